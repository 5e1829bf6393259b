"""The agent: does what the master's last order says, and reports what becomes of it.

Orders name a wanted state (serve this view, hold, exit), so only the newest one counts: the agent works on one at a
time and then looks at the newest again. Everything else runs in the background: the connection to the master, the
workers' watchers, the master's supervisor where this node has the master.

A signal to leave (SIGTERM, Ctrl-C, any of --signals-to-handle) drains the node: it is reported to the master, the
workers get the same signal and their grace period, and the agent exits with 128 + the signal's number. Workers that can
leave at a step boundary are given the time to: the agent continues to serve until the master has planned a view without
this node and they have left, for at most the same grace period. A second signal ends the workers at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from typing import Any

import msgspec

from holdfast import exit_codes
from holdfast.agent.config import AgentConfig
from holdfast.agent.console import JobConsole, signal_words
from holdfast.agent.device_counters import Counters
from holdfast.agent.file_timer import FileTimer
from holdfast.agent.forced_ends import kill_late, kill_stopped
from holdfast.agent.hangs import HangWatch, why_no_answer
from holdfast.agent.helper_watch import Helper, StoppedWatch
from holdfast.agent.incarnation import is_holder_dead, new_incarnation
from holdfast.agent.late_ends import LateEnds
from holdfast.agent.launch.launcher import Launcher
from holdfast.agent.link_watch import PROBE_EVERY_REPORTS, LinkWatch
from holdfast.agent.master_absence import LocalFacts, MasterAbsence
from holdfast.agent.master_supervisor import PORT_TAKEN_WAIT_S, MasterSupervisor
from holdfast.agent.node_check import NodeCheck
from holdfast.agent.out_of_memory import MemoryWatch
from holdfast.agent.reports import Reports
from holdfast.agent.results import Result, ended_by, link_failed, reason_of
from holdfast.agent.retry_watch import RetryWatch
from holdfast.agent.step_times import StepTimeWatch
from holdfast.agent.uplink import Uplink
from holdfast.agent.view_stores import ViewStores
from holdfast.agent.worker_connection import WorkerServer
from holdfast.agent.worker_group import WorkerGroup
from holdfast.agent.worker_logs import WorkerLogs
from holdfast.agent.worker_stacks import grouped, read_stacks
from holdfast.core.events import (
    CountersRead,
    Event,
    Hello,
    NodeChecked,
    NodeInfo,
    NodeLeaving,
    NodeLeft,
    StoreOffered,
)
from holdfast.core.health.findings import CheckResult, CheckTask
from holdfast.core.orders import Exit, Hold, Order, Refuse, Serve
from holdfast.core.records import Outcome
from holdfast.errors import MasterFailedError
from holdfast.snapshots.snapshot_manager import SnapshotManager, find_last_checkpoint
from holdfast.util.logs import get_logger
from holdfast.util.processes import boot_id, machine_id
from holdfast.util.tasks import TaskSet, end_process_on_bugs
from holdfast.wire.control_messages import NodeStacks

TAKE_OVER_AFTER_S = 1.0
"""How long the master may be unreachable before another agent of its machine takes it over."""
DEAD_INCARNATIONS_MAX = 8
FAREWELL_S = 5.0
"""How long a finished master stays for agents that have not heard the end; see master.py."""
FAREWELL_SENT_TIMEOUT_S = 2.0
"""How long an agent that has heard the end waits for a connection on which to confirm it."""
GOODBYE_TIMEOUT_S = 3.0
"""How long a leaving agent waits for the master's confirmation."""
MASTER_END_S = 12.0
"""How long a leaving agent waits for a master that it has told to end, and then killed: one that waits for a disk that
does not answer cannot end."""
MEMORY_SAMPLE_S = 1.0
HOLDING_MESSAGE_AFTER_S = 1.0
UNREACHABLE_MESSAGE_EVERY_S = 10.0

log = get_logger(__name__)


class Agent:
    """One node's agent."""

    def __init__(self, config: AgentConfig, launcher: Launcher) -> None:
        self._config, self._launcher = config, launcher
        self._incarnation = new_incarnation()
        self._dead_incarnations: tuple[str, ...] = ()
        self._refused_by = ""
        self._job_id = config.spec.run_id
        self._has_joined = False
        self._logs = WorkerLogs(config.logs)
        self._memory = MemoryWatch()
        self._newest_view = 0
        self._to_replace: set[int] = set()
        """Local ranks to replace in views that were superseded before this agent served them."""
        self._order: Order | None = None
        self._order_changed = asyncio.Event()
        self._signal: signal.Signals | None = None
        self._leave_at = 0.0
        """When a node that got a signal waits no longer for a step boundary, on the loop's clock."""
        self._is_alone = True
        """Whether the newest view has no other node."""
        self._is_over = False
        """Whether the end of the job, or of this node's part in it, is known here."""
        self._ends_without_master = False
        self._signalled = asyncio.Event()
        self._tasks = TaskSet()
        self._stores = ViewStores(config.address, launcher.stores, self._tasks)
        self._supervision: asyncio.Task[None] | None = None
        self._linking: asyncio.Task[None] | None = None
        self._supervisor: MasterSupervisor | None = None
        self._file_timer: FileTimer | None = None
        if config.master is not None:
            self._supervisor = MasterSupervisor(config.master, config.master_port, dict(os.environ))
        self._uplink = Uplink(
            self,
            self._master_address,
            token=config.token,
            tls=config.tls,
            heartbeat_interval_s=config.heartbeat_interval_s,
            silence_timeout_s=config.silence_timeout_s,
            keeps_master=lambda: self._supervisor is not None and self._supervisor.owned,
        )
        self._reports = Reports(config.node_id, lambda: self._incarnation, self._send, lambda: self._uplink.waiting)
        self._counters = Counters(
            config.accelerator,
            lambda view, readings: self._reports.report(CountersRead, view=view, readings=readings),
        )
        self._snapshots = SnapshotManager(config, self._reports)
        self._worker_group = WorkerGroup(
            config,
            self._reports,
            launcher,
            self._logs,
            self._memory,
            self._order_changed.set,
            self._stores.close_before,
            self._snapshots,
        )
        self._console = JobConsole(config, lambda: self._worker_group.ranked, lambda: self._worker_group.steps_made)
        self._node_check = NodeCheck(config, launcher, self._report_check)
        probe_every_s = PROBE_EVERY_REPORTS * config.straggler_interval_s
        self._link_watch = LinkWatch(self._reports, token=config.token, tls=config.tls, probe_every_s=probe_every_s)
        self._worker_server = WorkerServer(self._worker_group)
        self._replication = self._snapshots.replicate()
        self._step_times = StepTimeWatch(lambda: self._worker_group.ranked, self._reports, config.straggler_interval_s)
        self._retry_watch = RetryWatch(lambda: self._worker_group.ranked, self._reports)
        self._absence = MasterAbsence(config.state_dir, config.node_id, config.master_timeout_s, self._facts)
        self._stopped_helpers = StoppedWatch(self._helpers)
        self._hangs = HangWatch(
            lambda: self._worker_group.ranked,
            self._reports,
            config.hang_timeout_s,
            lambda: self._worker_group.in_sessions,
            kill_stopped,
        )
        self._late_ends = LateEnds(
            lambda: self._worker_group.ranked,
            lambda: self._worker_group.succeeded,
            kill_late,
            config.hang_timeout_s,
        )

    # --- called by the uplink

    def hello(self) -> Hello:
        """Return the first message to a master. What an earlier master may not have journaled is reported again."""
        self._worker_group.sample_audit.resend()
        self._snapshots.report(again=True)
        config = self._config
        info = NodeInfo(
            host=socket.gethostname(),
            address=config.address,
            machine_id=machine_id(),
            boot_id=boot_id(),
            pid=os.getpid(),
            workers=config.workers,
            role=config.role,
            requested_rank=config.requested_rank,
            log_dir=str(config.logs.run_dir),
            domain=config.failure_domain,
            bulk_port=self._replication.port,
            machine=config.machine,
        )
        return Hello(
            node_id=config.node_id,
            incarnation=self._incarnation,
            info=info,
            spec=msgspec.structs.replace(config.spec, run_id=self._job_id),
            store_port=self._stores.ports.offer(),
            term=self._uplink.term,
            dead_incarnations=self._dead_incarnations,
            leaving=int(self._signal or 0),
            parked=self._worker_group.parked,
        )

    def obey(self, order: Order) -> None:
        """Accept an order; the newest one counts. The port of a view that is never served stays taken all the same."""
        if isinstance(order, Serve) and order.store_here and self._stores.ports.reserve(order.view, order.store_port):
            self._reports.report(StoreOffered, port=self._stores.ports.offer())
        if isinstance(order, Serve) and order.view != self._newest_view:
            missed = getattr(self._order, "surplus", ()) if self._newest_view > self._worker_group.view else ()
            self._newest_view = order.view
            self._to_replace.update((*missed, *order.replaced))
        self._order = order
        self._console.obey(order)
        self._order_changed.set()

    def read_stacks(self, request: int) -> None:
        """Read the stacks of this node's workers and send them to the master."""
        self._tasks.start(self._send_stacks(request), "stacks")

    async def _send_stacks(self, request: int) -> None:
        workers = [worker for worker in self._worker_group.ranked if worker.assignment and not worker.ended]
        stacks = await read_stacks(workers, why_no_answer)
        ranks = [worker.assignment.rank for worker in workers if worker.assignment]
        note = (
            "" if workers else f"it holds: {self._order.why}" if isinstance(self._order, Hold) else "it has no workers"
        )
        groups = grouped(list(zip(ranks, stacks, strict=True)))
        await self._uplink.send_stacks(NodeStacks(request, self._config.node_id, groups, note))

    def _master_address(self) -> tuple[str, int]:
        return self._config.master_host, self._supervisor.port if self._supervisor else self._config.master_port

    # --- the run of an agent

    async def run(self) -> Result:
        """Run from the first connection to the end of the job, or of this node's part in it."""
        loop = asyncio.get_running_loop()
        end_process_on_bugs(loop)
        for handled in self._config.signals:
            loop.add_signal_handler(handled, self._on_signal, handled)
        if self._config.timer_file:
            self._file_timer = FileTimer(self._config.timer_file, self._worker_group.end_expired)
        self._tasks.start(self._stopped_helpers.run(), "stopped helpers")
        if self._supervisor and (failed := await self._start_master(self._supervisor)):
            return failed
        await self._listen_for_workers()
        link = self._linking = asyncio.create_task(self._join())
        self._tasks.start(self._hangs.run(), "hang watch")
        self._tasks.start(self._late_ends.run(), "late ends")
        self._tasks.start(self._step_times.run(), "step times")
        self._tasks.start(self._retry_watch.run(), "collective retries")
        self._tasks.start(self._link_watch.run(), "link watch")
        self._tasks.start(self._worker_group.sample_audit.run(), "sample audit")
        self._tasks.start(self._sample_memory(), "memory samples")
        self._tasks.start(self._console.run(), "console")
        self._tasks.start(self._watch_master(), "master watch")
        if self._supervisor:
            watch = self._supervisor.watch_answers(self._messages_heard, self._config.heartbeat_interval_s)
            self._tasks.start(watch, "master answers")
        self._tasks.start(self._stores.watch(), "store watch")
        orders = asyncio.create_task(self._work())
        try:
            await asyncio.wait({link, orders}, return_when=asyncio.FIRST_COMPLETED)
            result = link_failed(link, self._supervisor) if link.done() and not link.cancelled() else await orders
            return self._completed(result)
        finally:
            await self._close(link, orders)

    def _completed(self, result: Result) -> Result:
        """Return the result with what the console shows of the end."""
        last_line = self._console.ended_line(result.outcome, result.why, self._console.incidents(self._order))
        group = self._worker_group
        return msgspec.structs.replace(
            result,
            job_id=self._console.job_id,
            last_line=last_line,
            failures=group.failures,
            ranks=group.ranks,
        )

    async def _start_master(self, supervisor: MasterSupervisor) -> Result | None:
        """Start the master; return a result only if there is no point in going on."""
        starting, signalled = asyncio.create_task(supervisor.start()), asyncio.create_task(self._signalled.wait())
        await asyncio.wait({starting, signalled}, return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        if not starting.done():
            supervisor.release()
            await asyncio.wait({starting})
        await asyncio.gather(signalled, return_exceptions=True)
        try:
            starting.result()
        except MasterFailedError as error:
            if self._signal is None:
                return Result(exit_codes.NO_MASTER, str(error))
        if self._signal is not None and not supervisor.owned:
            return ended_by(self._signal)
        self._supervise(supervisor)
        return None

    def _supervise(self, supervisor: MasterSupervisor) -> None:
        self._supervision = self._tasks.start(supervisor.supervise(lambda: self._is_over), "master supervisor")

    async def _join(self) -> None:
        """Connect to the master once this node can start workers at once: a running job must not wait for a newcomer to
        warm up. A node that gets a signal before connects to report that it leaves: it may have the master, which must
        know."""
        warming, signalled = asyncio.create_task(self._launcher.ready()), asyncio.create_task(self._signalled.wait())
        try:
            await asyncio.wait({warming, signalled}, return_when=asyncio.FIRST_COMPLETED)
            for problem in warming.result().problems if warming.done() else ():
                log.warning("fork-server-problem", problem)
        finally:
            warming.cancel()
            signalled.cancel()
        await self._uplink.run()

    async def _close(self, *tasks: asyncio.Task[Any]) -> None:
        for task in tasks:
            task.cancel()
        self._tasks.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._tasks.close()
        if self._file_timer is not None:
            self._file_timer.close()
        await self._node_check.close()
        await self._worker_group.close()
        await self._snapshots.close()
        await self._worker_server.close()
        await self._logs.drain()
        self._logs.close()
        self._absence.close()
        self._stores.ports.close()
        await self._launcher.close()
        if self._supervisor and self._is_over:  # else others may need the master: it ends when they are gone
            stays_s = max(FAREWELL_S, self._config.silence_timeout_s) + self._config.farewell_timeout_s
            await self._supervisor.stop(stays_s + 1.0)

    async def _work(self) -> Result:
        while True:
            await self._order_changed.wait()
            self._order_changed.clear()
            if self._signal is not None and self._may_leave():
                return await self._leave(self._signal)
            result = await self._do(self._order)
            if result is not None:
                return result

    async def _do(self, order: Order | None) -> Result | None:
        if not isinstance(order, Hold) or order.check is None:
            self._node_check.want(None)
        if isinstance(order, Serve | Hold):
            self._link_watch.follow(order.neighbours, is_asked=order.report_links)
        match order:
            case Serve():
                await self._serve(order)
            case Hold():
                return await self._hold(order)
            case Exit():
                self._is_over = True
                self._logs.decide_report(order.cause)
                await self._uplink.farewell_sent(FAREWELL_SENT_TIMEOUT_S)
                url = self._worker_group.checkpoint_url()
                await self._stop_workers(self._config.shutdown_timeout_s)
                is_success = order.outcome is Outcome.SUCCEEDED
                last = await self._snapshots.finish(is_success, self._is_alone) or await find_last_checkpoint(url)
                why = reason_of(order, last)
                if self._ends_without_master:
                    await self._absence.end(why)
                return Result(order.exit_code, why, order.outcome, order.cause)
            case Refuse():
                return await self._refused(order)
            case _:
                pass
        return None

    async def _serve(self, order: Serve) -> None:
        self._job_id, self._has_joined = order.job_id, True
        self._is_alone = order.group_world_size == 1
        if order.view != self._worker_group.view and order.store_here:
            self._stores.open(order)
        replaced, self._to_replace = tuple(sorted(self._to_replace)), set()
        self._snapshots.serve(order)
        await self._worker_group.serve(msgspec.structs.replace(order, replaced=replaced))
        self._reap_orphans()

    async def _hold(self, order: Hold) -> Result | None:
        self._job_id, self._has_joined = order.job_id, True
        self._snapshots.hold()
        await self._worker_group.hold(order)
        self._reap_orphans()
        if order.check is not None:  # only now: workers that run would disturb the check
            self._node_check.want(order.check)
        if not order.leaving:
            if order.check is None:  # else the master logs what is going on, and each round would repeat it
                self._tasks.start(self._log_holding(order))
        elif not self._worker_group.in_session:  # else the worker group calls back when the last of them has left
            await self._worker_group.stop(self._config.restart_grace_s)
            self._snapshots.snapshot_store.remove()
            await self._report_left()
            return Result(exit_codes.SUCCESS, order.why, Outcome.STOPPED)
        return None

    def _send(self, event: Event) -> None:
        """Send an event to the master; when something failed, the devices' counters follow."""
        self._uplink.report(event)
        if view := self._counters.view_of(event):
            self._tasks.start(self._counters.read(view))

    def _report_check(self, task: CheckTask, result: CheckResult) -> None:
        self._reports.report(NodeChecked, checkup=task.checkup, round=task.round, result=result)

    async def _stop_workers(self, grace_s: float, with_signal: int = signal.SIGTERM) -> None:
        await self._worker_group.stop(grace_s, with_signal)
        self._reap_orphans()

    def _reap_orphans(self) -> None:
        self._launcher.reap_orphans({self._supervisor.process_id} if self._supervisor else set())

    async def _log_holding(self, order: Hold) -> None:
        await asyncio.sleep(HOLDING_MESSAGE_AFTER_S)  # most holds are over in a moment and not worth a line
        if self._order is order:
            is_guest = not self._console.job_id and not (self._supervisor and self._supervisor.owned)
            (log.notice if is_guest else log.info)("node-holding", f"holding: {order.why}")

    # --- leaving

    def _on_signal(self, received: signal.Signals) -> None:
        if self._is_over and self._worker_group.is_empty and self._supervisor:
            self._supervisor.release()  # the master stays for nodes that were lost: there is nothing else to wait for
        elif self._signal is not None:
            self._leave_at = 0.0
            if not self._worker_group.is_empty:
                self._worker_group.kill()
            elif self._supervisor:
                self._supervisor.release()
        else:
            self._logs.hide_interrupts()
            self._signal = received
            loop = asyncio.get_running_loop()
            self._leave_at = loop.time() + self._config.shutdown_timeout_s
            loop.call_at(self._leave_at, self._order_changed.set)
            self._signalled.set()
            self._reports.report(NodeLeaving, signal=int(received), why=f"its agent got {received.name}")
        self._order_changed.set()

    def _may_leave(self) -> bool:
        """Return False while workers can still leave at a step boundary: until the master has planned it and they have
        left, for at most as long as a stop may take, and not if no boundary will come."""
        waits = isinstance(self._order, Serve) or (isinstance(self._order, Hold) and self._order.release > 0)
        return not self._worker_group.in_session or not waits or asyncio.get_running_loop().time() >= self._leave_at

    async def _leave(self, received: signal.Signals) -> Result:
        timeout_s = self._config.shutdown_timeout_s
        text = f"got {signal_words(received)}: stopping this node's workers, in at most {timeout_s:.0f} s"
        log.notice("node-stopping", text)
        await self._stop_workers(timeout_s, received)
        saved = ""
        if not (isinstance(self._order, Hold) and self._order.release):  # else the job goes on elsewhere
            saved = await self._snapshots.finish(False, self._is_alone)
        await self._report_left()
        return msgspec.structs.replace(ended_by(received), saved=saved)

    async def _report_left(self) -> None:
        self._reports.report(NodeLeft)
        self._is_over = True
        is_confirmed = True
        try:
            async with asyncio.timeout(GOODBYE_TIMEOUT_S):
                await self._uplink.drained()
        except TimeoutError:
            is_confirmed = False
            text = f"the master did not confirm in {GOODBYE_TIMEOUT_S:.0f} s that this node leaves: leaving anyway"
            log.warning("leaving-unconfirmed", text)
        if self._linking:
            self._linking.cancel()
        if self._supervisor and self._supervisor.owned:
            await self._wait_for_master(self._supervisor, is_confirmed)

    async def _wait_for_master(self, supervisor: MasterSupervisor, is_confirmed: bool) -> None:
        """Stay until the master ends: the job may go on elsewhere and needs it. If it goes on nowhere, a master that
        cannot even write down that the last node leaves, as its disk is full or does not answer, is not waited for."""
        assert self._supervision is not None
        await asyncio.wait({self._supervision}, timeout=GOODBYE_TIMEOUT_S)
        if self._supervision.done():
            return
        if self._is_alone and not is_confirmed:
            text = "the master does not answer and no other node needs it: ending it; the job can be continued later"
            log.warning("master-not-waited-for", text)
            supervisor.release()
        else:
            text = (
                "the master on this node is still needed, by nodes that continue or to tell lost ones of the end:"
                " waiting for it; another signal ends it"
            )
            log.warning("waiting-for-master", text)
        released = asyncio.create_task(supervisor.released())
        await asyncio.wait({self._supervision, released}, return_when=asyncio.FIRST_COMPLETED)
        released.cancel()
        await asyncio.wait({self._supervision}, timeout=MASTER_END_S)

    async def _refused(self, refusal: Refuse) -> Result | None:
        await self._stop_workers(self._config.restart_grace_s)
        if refusal.rejoin:
            log.warning("node-rejoining", f"{refusal.why}: rejoining as a new incarnation")
            # This agent has just stopped its workers, so it knows that the old incarnation is dead.
            known = (*self._dead_incarnations, self._incarnation)
            self._dead_incarnations = known[-DEAD_INCARNATIONS_MAX:]
            self._incarnation = new_incarnation()
            self._uplink.forget_reports()
            self._order = None  # what has arrived since was for the old incarnation
        elif refusal.holder and refusal.holder not in self._dead_incarnations and is_holder_dead(refusal):
            self._dead_incarnations = (*self._dead_incarnations, refusal.holder)
        elif refusal.retry_after_s is None:
            return Result(exit_codes.REFUSED, refusal.why)
        else:
            self._log_refusal(refusal)
            await asyncio.sleep(min(refusal.retry_after_s, 1.0) + 0.01)  # as the master said; less, to hear of news
        self._uplink.reconnect()
        return None

    def _log_refusal(self, refusal: Refuse) -> None:
        """Log a refusal once for each reason: from attempt to attempt only the time to wait changes."""
        if self._refused_by != refusal.holder:
            self._refused_by = refusal.holder
            log.warning("join-refused", f"the master refused this node, retrying: {refusal.why}")

    # --- in the background

    async def _listen_for_workers(self) -> None:
        try:
            await self._worker_server.start()
        except OSError as error:
            text = f"cannot open the socket for workers, so they are restarted instead of repaired: {error}"
            log.warning("no-worker-socket", text)
        else:
            self._worker_group.listen_at(self._worker_server.name)

    async def _sample_memory(self) -> None:
        while True:
            self._memory.sample()
            await asyncio.sleep(MEMORY_SAMPLE_S)  # counters of the kernel: there is no event for them

    def _helpers(self) -> list[Helper]:
        """Return the processes that are replaced when they hang."""
        found = [*self._launcher.helpers]
        if checksummer := self._snapshots.checksummer.process:
            found.append(Helper("the process that verifies snapshots", checksummer.pid, checksummer.kill))
        if self._supervisor and (master := self._supervisor.helper):
            found.append(master)
        return found

    def _messages_heard(self) -> int | None:
        """Return how many messages have come from the master; None while it need not answer."""
        is_talking = self._linking is not None and not self._linking.done() and not self._is_over
        return self._uplink.messages_heard if is_talking and self._uplink.is_started else None

    async def _watch_master(self) -> None:
        """While the master is unreachable: log it, take the master over if possible, give up if it never was there."""
        logged_at = 0.0
        while not self._is_over:
            await asyncio.sleep(TAKE_OVER_AFTER_S)  # nothing waits for this; it only notices a long absence
            since = self._uplink.unreachable_since
            away_s = time.monotonic() - since if since is not None else 0.0
            is_away = away_s >= TAKE_OVER_AFTER_S
            is_too_long = self._absence.look(away_s if is_away else 0.0, self._uplink.unanswered)
            if not is_away:
                continue
            supervisor = self._supervisor
            if supervisor and await supervisor.take_over(self._job_id, has_joined=self._has_joined):
                self._supervise(supervisor)
            taken_by = supervisor.port_taken_by if supervisor else ""
            if time.monotonic() - logged_at > UNREACHABLE_MESSAGE_EVERY_S:
                logged_at = time.monotonic()
                text = f"the master is unreachable for {away_s:.0f} s ({taken_by or self._uplink.trouble}); retrying"
                log.warning("master-unreachable", text)
            is_here = supervisor is not None and supervisor.owned  # what keeps it from running can be mended here
            wait_s = PORT_TAKEN_WAIT_S if taken_by else self._config.join_timeout_s
            if away_s > wait_s or (is_too_long and not is_here):
                self._give_up(away_s, "" if is_here else self._absence.needs_decision, taken_by)

    def _facts(self) -> LocalFacts:
        newest = self._snapshots.uploader.newest
        return LocalFacts(
            job_id=self._job_id,
            master="{}:{}".format(*self._master_address()),
            trouble=self._uplink.trouble,
            view=self._worker_group.view,
            workers=self._worker_group.ranked,
            checkpoint=newest.url if newest is not None else "",
        )

    def _give_up(self, away_s: float, undecided: str, port_taken_by: str) -> None:
        """End an agent that has nothing to run, or whose workers wait for a decision that does not come; workers that
        train go on without a master."""
        if not undecided and (self._worker_group.running or self._worker_group.in_session):
            return
        why = f"the master at {self._uplink.trouble or 'its address'} was unreachable for {away_s:.0f} s"
        why += f", and a decision was needed: {undecided}" if undecided else ""
        why = port_taken_by or why
        code, outcome = (0, Outcome.SUCCEEDED) if self._worker_group.is_done else (exit_codes.NO_MASTER, Outcome.FAILED)
        self._ends_without_master = True
        self.obey(Exit(outcome=outcome, exit_code=code, why=why, cause=None))
