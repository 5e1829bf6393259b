"""The workers of this node, through all the views it serves.

Who is who: workers with a seat (a local rank of the newest view), spares, and those that were dismissed and are on
their way out. What an order means to them:

    serve, not kept    all of them end, spares too; every seat gets a new process
    serve, kept        `replaced` ones end; the living keep their processes and are told their new places at once;
                       empty seats are filled, by parked spares if the strategy is `recover`, else by new processes
    hold               those with a seat leave at the step boundary if the master planned it so, else they are stopped

The rule of reports. An end is reported under the newest view that was ordered, and at once; the others on this node
are told that the view is over in the same breath, which frees them from its collectives: a view that comes to nothing
costs nothing. An end that this agent wanted is not reported. What a worker says of a view counts only if the view is
still in force, or if nothing but planned changes came after it.

The highest step that a dead worker had begun to apply is remembered, and told to all who get a place: such a step is
committed, though nobody who lives may know it. It is forgotten once all have settled with it, and when this node has no
part in the next view.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from holdfast.agent.advice import Adviser
from holdfast.agent.autopsy import examine
from holdfast.agent.birth.child import Child
from holdfast.agent.birth.launcher import Launcher
from holdfast.agent.config import AgentConfig
from holdfast.agent.environment import spare_environment, worker_environment
from holdfast.agent.ledger import LedgerKeeper
from holdfast.agent.line import Line
from holdfast.agent.logs import WorkerLogs
from holdfast.agent.memory.state_keeper import StateKeeper
from holdfast.agent.out_of_memory import MemoryWatch
from holdfast.agent.places import place_in, reseat
from holdfast.agent.reports import Reports
from holdfast.agent.spares import Spares, describe_exit
from holdfast.agent.staff import Staff
from holdfast.agent.workers import Worker, until_gone
from holdfast.core.events import SessionInfo
from holdfast.core.fault_table import typed
from holdfast.core.faults import Failure, NotStarted
from holdfast.core.ladder import Strategy
from holdfast.core.orders import Hold, Serve
from holdfast.wire.session import (
    AskHeld,
    Assign,
    Closed,
    Committed,
    FromWorker,
    Interrupted,
    Joined,
    NeedRoom,
    Numbers,
    Prepare,
    Ready,
    Release,
    Released,
    Revoke,
    Sealed,
    Shards,
    Skipped,
    Snapshots,
    Stacks,
    Welcome,
)

LOST_WAIT_S = 1.0
"""For a worker that was killed to be gone, so that its last step is known. The kernel takes milliseconds."""
SPARES_GONE_S = 10.0
"""For spares that were killed to be gone before the node is checked: then the devices' memory is free."""
NO_SNAPSHOTS = Snapshots(every=-1)
LINE_GRACE_S = 1.0
"""A process that ends closes its line a moment before its end is seen."""

log = structlog.get_logger("agent")


class Crew:
    """One for the life of an agent. `changed` is called when the last worker that was told to leave has left."""

    def __init__(
        self,
        config: AgentConfig,
        reports: Reports,
        launcher: Launcher,
        logs: WorkerLogs,
        memory: MemoryWatch,
        changed: Callable[[], None] = lambda: None,
        joined: Callable[[int], None] = lambda view: None,
        keeper: StateKeeper | None = None,
    ) -> None:
        self._keeper = keeper or StateKeeper(config, reports)
        self._config, self._reports, self._memory = config, reports, memory
        self._changed, self._joined = changed, joined
        self._staff = Staff(config, launcher, logs, memory, self)
        self._adviser = Adviser(config.failover)
        self.ledger = LedgerKeeper(lambda: self._staff, reports)
        self._spares = Spares(self._hire_spare, reports.spares)
        self._order: Serve | None = None
        self._hold: Hold | None = None
        self._begun = -1
        self._revoked = ""
        """Why the newest view is over, while no other is known."""
        self._in_force_since = 0
        """The newest view that was no planned change."""
        self._last_view = 0
        self._stopping = False
        """Whether everybody is being ended: no time to make spares."""
        self.succeeded = 0

    # --- what others may know

    @property
    def view(self) -> int:
        """The view it serves; 0: none."""
        return self._order.view if self._order else 0

    @property
    def seated(self) -> list[Worker]:
        """Those with a rank, by local rank."""
        return sorted((w for w in self._staff if w.seat is not None), key=lambda w: w.seat or 0)

    @property
    def running(self) -> bool:
        """Whether any worker with a rank is."""
        return any(not worker.ended for worker in self.seated)

    @property
    def is_empty(self) -> bool:
        """Whether nobody is left, spares and those on their way out included."""
        return not len(self._staff)

    @property
    def in_session(self) -> bool:
        """Whether workers live here that can be told to leave at a step boundary, or are leaving."""
        return any(w.line is not None and w.repairs and not w.is_spare for w in self._staff)

    @property
    def is_done(self) -> bool:
        """Whether all workers of the view have ended well."""
        return self._order is not None and self.succeeded == self._order.workers

    @property
    def parked(self) -> int:
        return self._spares.parked

    def listen_at(self, socket_path: str) -> None:
        """Where workers that are started from now on find their line."""
        self._staff.listen_at(socket_path)

    # --- orders

    async def serve(self, order: Serve) -> None:
        """See the top. Returns before new processes are up: what becomes of them is reported."""
        if order.view == self.view:
            self._order = order
            self._mend()
        elif order.kept:
            await self._keep(order)
        else:
            await self.stop(self._config.restart_grace_s)
            self._begun = -1
            self._adopt(order)
            self._fill()

    async def hold(self, order: Hold) -> None:
        """No more ranks here."""
        if order.release:
            self._release(self.seated, order.release)
        else:
            await self._staff.stop([w for w in self._staff if not w.is_spare], self._config.restart_grace_s)
        self._order, self._hold = None, order
        self._begun = -1
        self._reports.view = 0
        spares = self._spares.workers
        self._mend()
        if order.check and not await until_gone(spares, SPARES_GONE_S):
            log.warning("spares that were killed are not gone yet; the node is checked beside them")

    async def stop(self, grace_s: float, with_signal: int = signal.SIGTERM) -> None:
        """End everything: by the signal, and by SIGKILL what is still there after the grace period. Spares have nothing
        to finish, and need none."""
        self._stopping = True
        for spare in self._spares.workers:
            spare.kill()
        self._spares.forget()
        await self._staff.stop(list(self._staff), grace_s, with_signal)
        self._stopping = False
        self._order = self._hold = None
        self._reports.view = 0

    def kill(self) -> None:
        """At once, with whatever they started."""
        self._stopping = True
        self._spares.forget()
        for worker in self._staff:
            worker.kill()

    async def close(self) -> None:
        """Nothing is left on return."""
        await self.stop(0.0, signal.SIGKILL)
        await self._staff.close()

    async def _keep(self, order: Serve) -> None:
        self._staff.notice_ends()
        await self._end_lost(order)
        seats_before = self._order.workers if self._order else 0
        self._adopt(order)
        self._settle_seats(order, seats_before)
        for worker in self.seated:
            self._assign(worker, order)
        self._fill()

    async def _end_lost(self, order: Serve) -> None:
        """Those that hang, and those that can no longer be told anything. How far they came is known once they are
        gone, and must be before anybody is told a place."""
        lost = [w for w in self.seated if w.seat in order.replaced or w.line_was_lost]
        for worker in lost:
            why = "its line is lost" if worker.line_was_lost else "it is to be replaced"
            log.warning(f"ending local rank {worker.seat} (process {worker.pid}): {why}")
            self._dismiss(worker)
        if not await until_gone(lost, LOST_WAIT_S):
            log.warning("a worker that was killed is not gone yet; going on without it")

    def _dismiss(self, worker: Worker) -> None:
        """Kill it; its seat is free."""
        self._begun = max(self._begun, worker.page.get("begun"))
        worker.seat = None
        worker.kill()

    def _settle_seats(self, order: Serve, seats_before: int) -> None:
        """Who stays, and where."""
        living = {worker.seat: worker for worker in self.seated if worker.seat is not None}
        seats = reseat({seat: bool(w.joined) for seat, w in living.items()}, seats_before, order.workers)
        surplus = [worker for seat, worker in living.items() if seat not in seats]
        for seat, worker in living.items():
            worker.seat = seats.get(seat)
            if worker.seat is not None and self._builds_the_wrong_shard(worker, worker.seat, order):
                self._dismiss(worker)
        if order.planned:
            self._release(surplus, order.view)
        else:
            for worker in surplus:
                self._dismiss(worker)

    def _builds_the_wrong_shard(self, worker: Worker, seat: int, order: Serve) -> bool:
        """What a worker builds before it joins depends on its rank, where the state is sharded."""
        if worker.joined or worker.place is None or self._session().shards == 1:
            return False
        return (worker.place.rank, worker.place.world_size) != (order.first_rank + seat, order.world_size)

    def _adopt(self, order: Serve) -> None:
        self._order, self._hold = order, None
        self._keeper.open(order.job_id, self.checkpoint_url(), order.run)
        self._last_view = order.view
        self._stopping = False
        self._revoked = ""
        self.succeeded = 0
        if not (order.kept and order.planned):
            self._in_force_since = order.view
        self._reports.view = order.view

    def _fill(self) -> None:
        """Every seat gets somebody."""
        order = self._order
        assert order is not None
        taken = {worker.seat for worker in self.seated}
        for seat in range(order.workers):
            if seat in taken:
                continue
            spare = self._spares.take() if order.kept and order.strategy is Strategy.RECOVER else None
            if spare is not None:
                spare.seat = seat
                self._assign(spare, order)
            else:
                self._hire(order, seat)
        self._mend()
        self._say_started()

    def _assign(self, worker: Worker, order: Serve) -> None:
        """Its place, now if it has a line, else when it enrols."""
        assert worker.seat is not None
        worker.place = place_in(
            order,
            worker.seat,
            newcomer=order.kept and not worker.joined,
            begun=self._begun,
            whole=self._keeper.vault.whole_word(),
            checkpoint_dir=self.checkpoint_url(),
        )
        worker.tell(Assign(worker.place))

    def checkpoint_url(self) -> str:
        """Where this job's checkpoints are. With the job's id, which may be known only now."""
        order = self._order or self._hold
        return self._config.checkpoint_dir.replace("{job_id}", order.job_id.replace("/", "_") if order else "")

    def _release(self, workers: list[Worker], view: int) -> None:
        """They leave at the step boundary before this view; those without a line know of none, and are stopped."""
        going = list(workers)
        for worker in going:
            worker.seat, worker.dismissed = None, True
            worker.tell(Release(view))
        if going:
            self._staff.beside(self._see_off(going))

    async def _see_off(self, going: list[Worker]) -> None:
        await self._staff.see_off(going)
        self._changed()

    # --- new processes (staff.Employer)

    def _hire(self, order: Serve, seat: int) -> None:
        try:
            worker = self._staff.new(seat)
        except OSError as error:
            self._could_not_start(seat, str(error))
            return
        self._assign(worker, order)
        rank = order.first_rank + seat
        self._staff.start(worker, order.view, rank, lambda path: worker_environment(self._config, order, seat, path))

    def _hire_spare(self) -> Worker | None:
        order = self._order or self._hold
        assert order is not None
        job_id, size, view = order.job_id, order.world_size or self._config.workers, max(self._last_view, 1)
        try:
            worker = self._staff.new(None)
        except OSError as error:
            log.warning(f"no memory for a spare: {error}")
            return None
        number = worker.number
        self._staff.start(
            worker, view, 0, lambda path: spare_environment(self._config, job_id, view, size, number, path)
        )
        return worker

    def started(self, worker: Worker) -> None:
        """A worker has a process."""
        if worker.seat is not None:
            self._say_started()

    def not_started(self, worker: Worker, reason: str) -> None:
        """A worker has none, and will have none."""
        if worker.is_spare:
            self._spares.lost(worker, reason)
            self._mend()
        elif worker.seat is not None:
            self._could_not_start(worker.seat, reason)

    def _say_started(self) -> None:
        seated = self.seated
        if self._order and len(seated) == self._order.workers and all(worker.child for worker in seated):
            self._reports.started(tuple(w.pid for w in seated), tuple(self._log_directory(w) for w in seated))

    def _log_directory(self, worker: Worker) -> str:
        """Relative to the node's: where its output has been since it was started, whatever views it has seen."""
        path = worker.files.error_file
        return str(Path(path).parent.relative_to(self._config.logs.run_dir)) if path else ""

    def _could_not_start(self, seat: int, reason: str) -> None:
        assert self._order is not None
        failure = Failure(
            node_id=self._config.node_id,
            view=self.view,
            rank=self._order.first_rank + seat,
            local_rank=seat,
            pid=0,
            end=NotStarted(reason),
            failed_at=time.time(),
        )
        self._revoke(f"local rank {seat} could not be started")
        self._report_failure(typed(failure, self._config.fault_table))

    # --- ends

    def ended(self, worker: Worker, child: Child) -> None:
        """A worker's process is gone; what it left behind is still here."""
        ended_at = time.time()
        code = os.waitstatus_to_exitcode(child.status)
        was_spare, seat = worker.is_spare, worker.seat
        if seat is not None and code != 0:
            self._revoke(f"local rank {seat} has ended")
        self._begun = max(self._begun, worker.page.get("begun"))
        self.ledger.read(gone=worker)
        self._keeper.say()
        if worker.dismissed:
            log.debug(f"process {child.pid} has left with code {code}")
        elif was_spare:
            self._spares.lost(worker, describe_exit(code))
        elif seat is not None:
            self._report_end(worker, seat, code, ended_at)
        self._mend()

    def _report_end(self, worker: Worker, seat: int, code: int, ended_at: float) -> None:
        assert worker.place is not None
        failure = examine(
            code,
            node_id=self._config.node_id,
            view=self.view,
            rank=worker.place.rank,
            local_rank=seat,
            pid=worker.pid,
            ended_at=ended_at,
            files=worker.files,
            memory_evidence=self._memory.evidence,
            step=worker.page.get("step") if worker.joined else -1,
            table=self._config.fault_table,
        )
        if failure is not None:
            self._report_failure(failure)
        else:
            self.succeeded += 1
            self._reports.succeeded(seat)

    def _report_failure(self, failure: Failure) -> None:
        if self._adviser.is_asked:
            restarts = self._order.restart_count if self._order else 0
            self._staff.beside(self._adviser.tell(failure, restarts, self._reports.failed))
        else:
            self._reports.failed(failure)

    def _revoke(self, why: str) -> None:
        """Free the others from the view's collectives; they hold until they are told of the next."""
        self._revoked = self._revoked or why
        for worker in self.seated:
            worker.tell(Revoke(self.view, why))

    # --- what workers say (line.Listener)

    def enrolled(self, worker: str, pid: int, line: Line, repairs: bool) -> bool:
        """Its first words. False: nobody we know, or somebody who has a line already."""
        known = self._staff.find(worker)
        if known is None or known.line is not None or known.line_was_lost:
            return False
        known.line, known.script_pid, known.repairs = line, pid, repairs
        known.tell(
            Welcome(
                place=known.place,
                replicas=self._config.replicas,
                checkpoint_dir=self.checkpoint_url(),
                snapshots=self._config.snapshots if self._keeper.is_on else NO_SNAPSHOTS,
            )
        )
        if known.is_spare and self._spares.prepare:
            known.tell(self._spares.prepare)
        if known.seat is not None and self._revoked:
            known.tell(Revoke(self.view, self._revoked))
        return True

    def line_lost(self, worker: str) -> None:
        """If it lives, it can no longer be repaired: it is a program like any other now."""
        known = self._staff.find(worker)
        if known is None:
            return
        known.line, known.line_was_lost = None, True
        self._spares.unheard()
        asyncio.get_running_loop().call_later(LINE_GRACE_S, self._lives_without_line, known)

    def _lives_without_line(self, worker: Worker) -> None:
        if self._staff.find(worker.nonce) is None or worker.dismissed or not worker.repairs:
            return
        log.warning(f"the line to process {worker.pid} is lost: it cannot be given another place")
        if worker.is_spare and worker.child:
            worker.child.kill_group(signal.SIGKILL)

    def heard(self, worker: str, message: FromWorker) -> None:
        """What counts of it, becomes an event."""
        known = self._staff.find(worker)
        if known is None:
            return
        match message:
            case Ready(session=session, data=data):
                known.data = data
                self._ready(known, session)
            case Joined(view=view, step=step):
                known.joined = max(known.joined, min(view, self._last_view))
                if self._order is not None and not self._order.kept and view == self.view:
                    self._keeper.begin_from(step)
                self._begin_session()
            case Committed(view=view, step=step) if known.seat is not None and view <= self.view:
                self._reports.committed(view, step)
            case Interrupted() if known.seat is not None and message.view >= self._in_force_since:
                assert known.place is not None
                self._reports.interrupted(message, known.place.rank, known.seat)
            case Skipped():
                self._reports.skipped(message)
            case Shards(view=view) if view <= self._last_view:
                self._reports.shards(message)
            case Numbers() if known.seat is not None and known.place is not None:
                self._reports.numbers(message, known.place.rank)
            case Closed(step=step) if known.seat is not None:
                self._reports.closed(step)
            case Released():
                log.debug(f"process {known.pid} has left at the step boundary")
            case NeedRoom(size_bytes=size_bytes):
                self._keeper.need_room(known, size_bytes)
            case Sealed():
                self._keeper.sealed(known, message)
            case AskHeld(request=request):
                self._keeper.tell_held(known, request)
            case Stacks(request=request, text=text):
                answer = known.stacks.pop(request, None)
                if answer is not None and not answer.done():
                    answer.set_result(text)
            case _:
                log.debug(f"process {known.pid} said something out of date: {type(message).__name__}")

    def _ready(self, worker: Worker, session: SessionInfo) -> None:
        if worker.is_spare:
            self._spares.park(worker)
        else:
            worker.session = session
        self._mend()

    def _begin_session(self) -> None:
        order, seated = self._order, self.seated
        if order is None or len(seated) < order.workers or any(w.joined != order.view for w in seated):
            return
        self._begun = -1  # all have settled with it
        self.ledger.read()
        self.ledger.describe(seated, order.view)
        if self._reports.began(self._session()):
            self._joined(order.view)
        self._mend()

    def _session(self) -> SessionInfo:
        """What kind of state the workers have: as they say, as the master knows."""
        said = [worker.session for worker in self.seated if worker.session]
        ordered = (self._order and self._order.session) or (self._hold and self._hold.session)
        if said:
            return SessionInfo(
                shards=max(session.shards for session in said),
                replicas=max(session.replicas for session in said),
                resizable=all(session.resizable for session in said),
            )
        return ordered or SessionInfo()

    # --- spares

    def _mend(self) -> None:
        """Bring the spares to the number that is wanted, when there is nothing more urgent."""
        order = self._order or self._hold
        if order is None or self._stopping:
            return
        knows = order.session is not None or any(worker.session for worker in self.seated)
        if knows:
            size = order.world_size or self._config.workers
            self._spares.prepare = Prepare(self._session().shards > 1, size)
        seated = self.seated
        quiet = self._order is None or (
            not self._revoked
            and len(seated) == self._order.workers
            and all(worker.joined == self._order.view for worker in seated)
        )
        self._spares.keep(order.spares if knows else 0, quiet)
