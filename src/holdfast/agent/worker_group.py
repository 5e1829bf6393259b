"""The workers of this node, through all the views it serves.

There are workers with a local rank in the newest view, spares, and workers that were dismissed and are on their way
out. What an order means to them:

    serve, restarting all   all of them end, spares too; every local rank gets a new process
    serve, keeping workers  those in `replaced` end; the others keep their processes and get their new assignments at
                            once; empty local ranks are filled, by parked spares if the strategy is `recover`, else by
                            new processes
    hold                    those with a local rank leave at the step boundary if the master planned it so, else they
                            are stopped

The rule of reports. An end is reported under the newest view that was ordered, and at once; the other workers of this
node are told at the same time that the view is over, which frees them from its collectives: a view that comes to
nothing costs nothing. An end that this agent wanted is not reported. What a worker says of a view counts only if the
view is still in force, or if only planned changes came after it.

The highest step that a dead worker had begun to apply is remembered, and sent with every assignment: such a step is
committed, though perhaps no living worker knows it. It is forgotten once all workers have joined a view with it, and
when this node has no part in the next view.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

import msgspec

from holdfast.agent.assignments import (
    assignment_in,
    free_device,
    spare_environment,
    visible_devices,
    worker_environment,
)
from holdfast.agent.config import AgentConfig
from holdfast.agent.failure_reports import FailureReports
from holdfast.agent.forced_ends import kill_overdue, signal_expired
from holdfast.agent.launch.child import Child
from holdfast.agent.launch.launcher import Launcher
from holdfast.agent.out_of_memory import MemoryWatch
from holdfast.agent.reports import Reports
from holdfast.agent.sample_audit_reader import SampleAuditReader
from holdfast.agent.spares import Spares, describe_exit
from holdfast.agent.worker_connection import WorkerConnection
from holdfast.agent.worker_logs import WorkerLogs
from holdfast.agent.worker_processes import Worker, WorkerProcesses, wait_for_ends
from holdfast.core import events
from holdfast.core.assess import ENDING_TIMEOUT_S
from holdfast.core.events import SessionInfo, combined
from holdfast.core.faults.failures import Failure
from holdfast.core.orders import Hold, Serve
from holdfast.core.strategies import Strategy
from holdfast.core.views import reassign_local_ranks
from holdfast.errors import LaunchError
from holdfast.snapshots.snapshot_manager import SnapshotManager
from holdfast.util.logs import get_logger
from holdfast.wire import worker_messages as messages

LOST_WAIT_S = 1.0
"""How long to wait for the end of a worker that was killed, so that its last step is known. It takes milliseconds."""
SPARES_END_S = 10.0
"""How long to wait for the ends of spares before the node is checked: then the devices' memory is free."""
NO_SNAPSHOTS = messages.SnapshotSettings(every=-1)
CONNECTION_GRACE_S = 1.0
"""A process that ends closes its connection a moment before its end is seen."""

log = get_logger(__name__)


class WorkerGroup:
    """All workers of an agent. `changed` is called when the last worker that was told to leave has left, `joined` with
    each view that all workers have joined."""

    def __init__(
        self,
        config: AgentConfig,
        reports: Reports,
        launcher: Launcher,
        logs: WorkerLogs,
        memory: MemoryWatch,
        changed: Callable[[], None] = lambda: None,
        joined: Callable[[int], None] = lambda view: None,
        snapshots: SnapshotManager | None = None,
    ) -> None:
        self._snapshots = snapshots or SnapshotManager(config, reports)
        self._config, self._reports = config, reports
        self._changed, self._joined = changed, joined
        self._processes = WorkerProcesses(config, launcher, logs, memory, self)
        self._failure_reports = FailureReports(
            config,
            reports,
            memory.evidence,
            self._processes.tasks,
            lambda: self._order.restart_count if self._order else 0,
            self._failed,
        )
        self.sample_audit = SampleAuditReader(lambda: self._processes, reports)
        self._spares = Spares(self._start_spare, lambda parked: reports.report(events.SparesChanged, parked=parked))
        self._order: Serve | None = None
        self._hold: Hold | None = None
        self._applied_step = -1
        """The highest step that a worker which has ended had begun to apply."""
        self._revoked = ""
        """Why the newest view is over, while no other is known."""
        self._in_force_since = 0
        """The newest view that was no planned change."""
        self._last_view = 0
        self._stopping = False
        """Whether all workers are being ended: no time to start spares."""
        self.succeeded = 0
        self.steps_made = 0
        """How many steps the workers had made that have ended."""
        self.failures: tuple[Failure, ...] = ()
        """The failures of this node's workers since the last view was accepted."""
        self.ranks: tuple[int, ...] = ()
        """The ranks of this node in the newest view it has served."""
        self._answers: dict[tuple[int, int], bytes] = {}
        """By rank and world size: what a worker's collectives answered while it was built together with all others."""

    # --- facts

    @property
    def view(self) -> int:
        """The view it serves; 0: none."""
        return self._order.view if self._order else 0

    @property
    def ranked(self) -> list[Worker]:
        """The workers that have a local rank, in its order."""
        return sorted((w for w in self._processes if w.local_rank is not None), key=lambda w: w.local_rank or 0)

    @property
    def running(self) -> bool:
        """Whether any worker with a local rank is running."""
        return any(not worker.ended for worker in self.ranked)

    @property
    def is_empty(self) -> bool:
        """Whether no worker is left, spares and those on their way out included."""
        return not len(self._processes)

    @property
    def in_session(self) -> bool:
        """Whether there are workers that can be told to leave at a step boundary, or are leaving."""
        return any(w.connection is not None and w.repairs and not w.is_spare for w in self._processes)

    @property
    def in_sessions(self) -> list[Worker]:
        """The workers, spares too, that take part in online recovery, or will once they have enrolled."""
        living = [w for w in self._processes if w.child is not None and not w.ended and not w.dismissed]
        return living if any(worker.repairs for worker in living) else []

    @property
    def is_done(self) -> bool:
        """Whether all workers of the view have succeeded."""
        return self._order is not None and self.succeeded == self._order.workers

    @property
    def parked(self) -> int:
        """The number of spares that are ready."""
        return self._spares.parked

    def listen_at(self, socket_path: str) -> None:
        """Tell workers that are started from now on where they reach the agent."""
        self._processes.socket_path = socket_path

    # --- orders

    async def serve(self, order: Serve) -> None:
        """Do what the table above says. Returns before new processes run: their outcome is reported."""
        if order.view == self.view:
            self._order = order
            self._adjust_spares()
        elif order.keeps_workers:
            await self._serve_keeping_workers(order)
        else:
            await self.stop(self._config.restart_grace_s)
            self._applied_step = -1
            self._accept(order)
            self._fill_local_ranks()

    async def hold(self, order: Hold) -> None:
        """Take all local ranks away."""
        if order.release:
            self._release(self.ranked, order.release)
        else:
            await self._processes.stop([w for w in self._processes if not w.is_spare], self._config.restart_grace_s)
        self._order, self._hold = None, order
        self._applied_step = -1
        self._reports.view = 0
        spares = self._spares.workers
        self._adjust_spares()
        if order.check and not await wait_for_ends(spares, SPARES_END_S):
            text = f"spares did not end in {SPARES_END_S:.0f} s after SIGKILL: the node is checked while they still run"
            log.warning("spares-not-ended", text)

    async def stop(self, grace_s: float, with_signal: int = signal.SIGTERM) -> None:
        """End all workers: by the signal, and by SIGKILL those that are still running after the grace period. Spares
        have nothing to finish and are killed at once."""
        self._stopping = True
        for spare in self._spares.workers:
            spare.kill()
        self._spares.forget()
        await self._processes.stop(list(self._processes), grace_s, with_signal)
        self._stopping = False
        self._order = self._hold = None
        self._reports.view = 0

    def kill(self) -> None:
        """Kill all workers at once, with all that they started."""
        self._stopping = True
        self._spares.forget()
        for worker in self._processes:
            worker.kill()

    async def close(self) -> None:
        """Kill all workers and wait for their ends."""
        await self.stop(0.0, signal.SIGKILL)
        await self._processes.close()

    async def _serve_keeping_workers(self, order: Serve) -> None:
        self._processes.poll()
        await self._end_lost(order)
        workers_before = self._order.workers if self._order else 0
        self._accept(order)
        self._move_workers(order, workers_before)
        for worker in self.ranked:
            self._assign(worker, order)
        self._fill_local_ranks()

    async def _end_lost(self, order: Serve) -> None:
        """End workers that hang, and those that cannot be sent anything. The step that they had begun to apply is known
        once they have ended, and must be before any worker gets an assignment."""
        lost = [w for w in self.ranked if w.local_rank in order.replaced or w.connection_was_lost]
        for worker in lost:
            why = "its connection was lost" if worker.connection_was_lost else "the master replaces it"
            log.warning("worker-replaced", f"killing local rank {worker.local_rank} (process {worker.pid}): {why}")
            self._dismiss(worker)
        if not await wait_for_ends(lost, LOST_WAIT_S):
            text = f"a worker did not end in {LOST_WAIT_S:.0f} s after SIGKILL: continuing without it"
            log.warning("worker-not-ended", text)

    def _dismiss(self, worker: Worker) -> None:
        """Kill a worker and free its local rank."""
        self._applied_step = max(self._applied_step, worker.page.get("applied_step"))
        worker.local_rank = None
        worker.kill()

    def _move_workers(self, order: Serve, workers_before: int) -> None:
        """Give the living workers their local ranks in the new view; those without one leave."""
        living = {worker.local_rank: worker for worker in self.ranked if worker.local_rank is not None}
        has_joined = {rank: bool(worker.joined) for rank, worker in living.items() if rank not in order.surplus}
        moves = reassign_local_ranks(has_joined, workers_before, order.workers)
        surplus = [worker for local_rank, worker in living.items() if local_rank not in moves]
        for local_rank, worker in living.items():
            worker.local_rank = new = moves.get(local_rank)
            if new is not None and worker.builds_for_another(order.first_rank + new, order.world_size):
                self._dismiss(worker)
        if order.planned:
            self._release(surplus, order.view)
        else:
            for worker in surplus:
                self._dismiss(worker)

    def _accept(self, order: Serve) -> None:
        self._order, self._hold = order, None
        self._snapshots.open(order.job_id, self.checkpoint_url(), order.run)
        self._last_view = order.view
        self._stopping = False
        self._revoked = ""
        self.succeeded, self.failures = 0, ()
        self.ranks = tuple(range(order.first_rank, order.first_rank + order.workers))
        if not (order.keeps_workers and order.planned):
            self._in_force_since = order.view
        self._reports.view = order.view

    def _fill_local_ranks(self) -> None:
        """Give every local rank that has no worker a spare or a new process."""
        order = self._order
        assert order is not None
        filled = {worker.local_rank for worker in self.ranked}
        for local_rank in range(order.workers):
            if local_rank in filled:
                continue
            spare = self._spares.take() if order.keeps_workers and order.strategy is Strategy.RECOVER else None
            if spare is not None:
                spare.local_rank = local_rank
                self._assign(spare, order, self._config.program.numa_binding)
            else:
                self._start_worker(order, local_rank)
        self._adjust_spares()
        self._report_started()

    def _assign(self, worker: Worker, order: Serve, numa_binding: str = "") -> None:
        """Send a worker its assignment, now if it has a connection, else when it enrols."""
        assert worker.local_rank is not None
        if worker.device is None:
            taken = {other.device for other in self.ranked if other.device is not None}
            worker.device = free_device(taken, worker.local_rank)
        worker.assignment = assignment_in(
            order,
            worker.local_rank,
            newcomer=order.keeps_workers and not worker.joined,
            applied_step=self._applied_step,
            complete_version=self._snapshots.snapshot_store.complete_version(),
            checkpoint_dir=self.checkpoint_url(),
            holders=sum(bool(one.joined) and not one.ended for one in self.ranked),
            device=worker.device,
            visible_devices=self._visible_devices(worker.device),
            numa_binding=numa_binding,
        )
        worker.send(messages.Assign(worker.assignment, self._answers_for(worker)))

    def _visible_devices(self, device: int) -> str:
        try:
            return visible_devices(self._config, device)
        except LaunchError:
            return ""  # the start of its process fails by the same error, and is reported

    def _answers_for(self, worker: Worker) -> bytes:
        """Return what the collectives of a newcomer's rank answered when the job started, if that is known here."""
        if worker.assignment is None or not worker.assignment.newcomer:
            return b""
        return self._answers.get((worker.assignment.rank, worker.assignment.world_size), b"")

    def checkpoint_url(self) -> str:
        """Return where this job's checkpoints are: with the job's id, which the agent may not know at its start."""
        order = self._order or self._hold
        return self._config.checkpoint_dir.replace("{job_id}", order.job_id.replace("/", "_") if order else "")

    def _release(self, workers: list[Worker], view: int) -> None:
        """Tell workers to leave at the step boundary before this view. Those without a connection are stopped."""
        released = list(workers)
        for worker in released:
            worker.local_rank, worker.dismissed = None, True
            worker.send(messages.Release(view))
        if released:
            self._processes.tasks.start(self._wait_for_release(released))

    async def _wait_for_release(self, released: list[Worker]) -> None:
        await self._processes.wait_for_release(released)
        self._changed()

    # --- new processes (worker_processes.WorkerOwner)

    def _start_worker(self, order: Serve, local_rank: int) -> None:
        try:
            worker = self._processes.add(local_rank)
        except OSError as error:
            self._report_not_started(local_rank, str(error))
            return
        self._assign(worker, order)
        device = worker.device if worker.device is not None else local_rank
        rank = order.first_rank + local_rank
        self._processes.start(
            worker, order.view, rank, lambda path: worker_environment(self._config, order, local_rank, device, path)
        )

    def _start_spare(self) -> Worker | None:
        order = self._order or self._hold
        assert order is not None
        job_id, view = order.job_id, max(self._last_view, 1)
        restart_count = self._order.restart_count if self._order else 0
        try:
            worker = self._processes.add(None)
        except OSError as error:
            log.warning("spare-not-started", f"no memory for the progress page of a spare: {error}")
            return None
        self._processes.start(
            worker, view, 0, lambda path: spare_environment(self._config, job_id, view, restart_count, path)
        )
        return worker

    def started(self, worker: Worker) -> None:
        """Report it when the last worker of the view has a process."""
        if worker.local_rank is not None:
            self._report_started()

    def not_started(self, worker: Worker, reason: str) -> None:
        """Report a worker that has no process, and will have none."""
        if worker.is_spare:
            self._spares.lost(worker, reason)
            self._adjust_spares()
        elif worker.local_rank is not None:
            self._report_not_started(worker.local_rank, reason)

    def _report_started(self) -> None:
        ranked = self.ranked
        if self._order and len(ranked) == self._order.workers and all(worker.child for worker in ranked):
            logs = tuple(worker.log_directory(self._config.logs.run_dir) for worker in ranked)
            self._reports.report_started(tuple(worker.pid for worker in ranked), logs)

    def _report_not_started(self, local_rank: int, reason: str) -> None:
        assert self._order is not None
        self._revoke(f"local rank {local_rank} could not be started")
        self._failure_reports.report_not_started(self.view, self._order.first_rank + local_rank, local_rank, reason)

    # --- ends

    def ended(self, worker: Worker, child: Child) -> None:
        """Free the others from the view, read what the worker left behind, and report its end."""
        ended_at = time.time()
        code = os.waitstatus_to_exitcode(child.status)
        was_spare, local_rank = worker.is_spare, worker.local_rank
        if local_rank is not None and code != 0:
            self._revoke(f"local rank {local_rank} has ended")
        self._applied_step = max(self._applied_step, worker.page.get("applied_step"))
        self.steps_made = max(self.steps_made, worker.page.get("applied_step") + 1)
        self.sample_audit.read(gone=worker)
        self._snapshots.report()
        if worker.dismissed:
            log.debug("worker-left", f"process {child.pid} has ended as requested, with code {code}")
        elif was_spare:
            self._spares.lost(worker, describe_exit(code))
        elif local_rank is not None:
            self.succeeded += self._failure_reports.report_end(worker, self.view, local_rank, code, ended_at)
        self._adjust_spares()

    def _failed(self, failure: Failure) -> None:
        if failure.view == self._last_view:
            self.failures += (failure,)

    def _report_failing(self, worker: Worker, local_rank: int) -> None:
        """Report that a worker's script has failed. How, its end will say; until then no other cause is looked for, and
        the other workers do not wait for it in a collective."""
        self._failure_reports.report_failing(worker, local_rank)
        self._revoke(f"local rank {local_rank} has failed")
        asyncio.get_running_loop().call_later(ENDING_TIMEOUT_S, self._end_overdue, worker)

    def script_failed(self, worker: str, pid: int) -> None:
        """Report that the script of a worker without a session has failed. It ends when it likes, as under torchrun."""
        known = self._processes.find(worker)
        if known is not None and known.pid == pid and known.local_rank is not None and not known.dismissed:
            self._failure_reports.report_failing(known, known.local_rank)

    def _end_overdue(self, worker: Worker) -> None:
        if self._processes.find(worker.nonce) is worker:
            kill_overdue(worker)

    def end_expired(self, pid: int, number: int, why: str) -> None:
        """Send a signal to the process of a worker whose timer has expired."""
        signal_expired(self._processes, pid, number, why)

    def _revoke(self, why: str) -> None:
        """Free the other workers from the view's collectives; they wait for their next assignment."""
        self._revoked = self._revoked or why
        for worker in self.ranked:
            worker.send(messages.Revoke(self.view, why))

    # --- messages of workers (worker_connection.WorkerListener)

    def enrolled(self, worker: str, pid: int, connection: WorkerConnection, repairs: bool) -> bool:
        """Welcome a worker. Return False if no worker has this nonce, or it has enrolled before."""
        known = self._processes.find(worker)
        if known is None or known.connection is not None or known.connection_was_lost:
            return False
        known.connection, known.script_pid, known.repairs = connection, pid, repairs
        known.send(
            messages.Welcome(
                assignment=known.assignment,
                replicas=self._config.replicas,
                are_replicas_default=self._config.are_replicas_default,
                checkpoint_dir=self.checkpoint_url(),
                snapshots=self._config.snapshots if self._snapshots.is_on else NO_SNAPSHOTS,
                answers=self._answers_for(known),
            )
        )
        if known.is_spare and self._spares.prepare:
            known.send(self._spares.prepare)
        if known.local_rank is not None and self._revoked:
            known.send(messages.Revoke(self.view, self._revoked))
        return True

    def connection_lost(self, worker: str) -> None:
        """Treat a worker that is still running as a program without a session: it cannot be repaired any more."""
        known = self._processes.find(worker)
        if known is None:
            return
        known.connection, known.connection_was_lost = None, True
        self._spares.connection_lost()
        asyncio.get_running_loop().call_later(CONNECTION_GRACE_S, self._runs_without_connection, known)

    def _runs_without_connection(self, worker: Worker) -> None:
        if self._processes.find(worker.nonce) is None or worker.dismissed or not worker.repairs:
            return
        text = f"lost the connection to process {worker.pid}, which runs on: it will be replaced at the next recovery"
        log.warning("worker-connection-lost", text)
        if worker.is_spare and worker.child:
            worker.child.kill_group(signal.SIGKILL)

    def received(self, worker: str, message: messages.FromWorker) -> None:
        """Act on a worker's message, and report what the master has to know."""
        known = self._processes.find(worker)
        if known is None:
            return
        local_rank, since = known.local_rank, self._in_force_since
        match message:
            case messages.WorkerReady(session=session, data=data, answers=answers):
                known.data = data
                if answers and known.assignment is not None:
                    self._answers[known.assignment.rank, known.assignment.world_size] = answers
                self._ready(known, session)
            case messages.SessionRevisedMessage(session=session):
                self._revise(known, session)
            case messages.ViewJoinedMessage(view=view, step=step, source=source):
                known.joined = max(known.joined, min(view, self._last_view))
                known.began_with = (step, source)
                if self._order is not None and not self._order.keeps_workers and view == self.view:
                    self._snapshots.discard_after(step)
                self._report_joined()
            case messages.StepCommittedMessage(view=view, step=step) if local_rank is not None and view <= self.view:
                self._reports.report_committed(view, step)
            case messages.StepInterruptedMessage() if local_rank is not None and message.view >= since:
                self._failure_reports.report_interrupted(known, local_rank, message)
            case messages.WorkerFailingMessage() if local_rank is not None and message.view >= since:
                self._report_failing(known, local_rank)
            case messages.DataSkippedMessage():
                self._reports.report(events.DataSkipped, **msgspec.structs.asdict(message))
            case messages.StreamReportedMessage(view=view) if view <= self._last_view:
                self._reports.report_optional(events.StreamReported, **msgspec.structs.asdict(message))
            case messages.NumbersReportedMessage() if local_rank is not None and known.assignment is not None:
                fields = msgspec.structs.asdict(message)
                self._reports.report_optional(events.NumbersReported, rank=known.assignment.rank, **fields)
            case messages.TrainingClosedMessage(step=step) if local_rank is not None:
                self._reports.report_closed(step)
            case messages.WorkerReleased():
                log.debug("worker-released", f"process {known.pid} has left at the step boundary")
            case messages.AllocateBuffers(size_bytes=size_bytes, staging_bytes=staging_bytes):
                self._snapshots.allocate(known, size_bytes, staging_bytes)
            case messages.SnapshotSealed():
                self._snapshots.sealed(known, message)
            case messages.ListImages(request=request):
                self._snapshots.list_images(known, request)
            case messages.StacksMessage(request=request, text=text):
                answer = known.stacks.pop(request, None)
                if answer is not None and not answer.done():
                    answer.set_result(text)
            case _:
                name = type(message).__name__
                log.debug("outdated-message", f"ignoring an outdated message of process {known.pid}: {name}")

    def _ready(self, worker: Worker, session: SessionInfo) -> None:
        if worker.is_spare:
            self._spares.park(worker)
        else:
            worker.session = session
        self._adjust_spares()

    def _revise(self, worker: Worker, session: SessionInfo) -> None:
        """Record what a worker has found out about its state, and report it if the master knows the view's session."""
        if worker.is_spare:
            return
        worker.session = session
        self._reports.report_revised(self._session())
        self._adjust_spares()

    def _report_joined(self) -> None:
        """Report that all workers are in the view, once they are."""
        order, ranked = self._order, self.ranked
        if order is None or len(ranked) < order.workers or any(w.joined != order.view for w in ranked):
            return
        self._applied_step = -1  # all workers know it now
        self.sample_audit.read()
        self.sample_audit.describe(ranked, order.view)
        if self._reports.report_joined(self._session(), *ranked[0].began_with):
            self._joined(order.view)
        self._adjust_spares()

    def _session(self) -> SessionInfo:
        """Return the kind of state that the workers have: as they say, else as the master says."""
        known = [worker.session for worker in self.ranked if worker.session]
        ordered = (self._order and self._order.session) or (self._hold and self._hold.session)
        if known:
            return combined(known)
        return ordered or SessionInfo()

    # --- spares

    def _adjust_spares(self) -> None:
        """Bring the number of spares closer to what is wanted, when there is nothing more urgent."""
        order = self._order or self._hold
        if order is None or self._stopping:
            return
        is_known = order.session is not None or any(worker.session for worker in self.ranked)
        if is_known:
            size = order.world_size or self._config.workers
            self._spares.prepare = messages.Prepare(self._session().shard_map, size)
        ranked = self.ranked
        is_quiet = self._order is None or (
            not self._revoked
            and len(ranked) == self._order.workers
            and all(worker.joined == self._order.view for worker in ranked)
        )
        self._spares.adjust(order.spares if is_known else 0, is_quiet)
