"""The agent: does what the master's last order says, and reports what becomes of it.

Orders name a wanted state (serve this view, hold, exit), so only the newest one counts: the agent works on one
at a time and then looks again. Everything else runs beside it: the link to the master, the workers' watchers,
the master's keeper where this node has the master.

Being told to go (SIGTERM, Ctrl-C, any of --signals-to-handle) drains the node: the master hears of it, the
workers get the same signal and their grace period, and the agent leaves with 128 + the signal's number. Workers that
can leave at a step boundary are given the time to: the agent goes on serving until the master has planned a view
without this node and they have left, for as long as the same grace period. A second signal ends the workers at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Coroutine
from typing import Any

import msgspec
import structlog

from holdfast.agent.birth.launcher import Launcher
from holdfast.agent.config import AgentConfig
from holdfast.agent.counters import Counters
from holdfast.agent.crew import Crew
from holdfast.agent.examination import Examination
from holdfast.agent.hangs import HangWatch
from holdfast.agent.identity import boot_id, machine_id, new_incarnation, saw_dead
from holdfast.agent.line import LineServer
from holdfast.agent.logs import WorkerLogs
from holdfast.agent.master_keeper import EXIT_JOURNAL, MasterFailedError, MasterKeeper
from holdfast.agent.memory.state_keeper import StateKeeper, find_last_checkpoint
from holdfast.agent.out_of_memory import MemoryWatch
from holdfast.agent.pace import PaceWatch
from holdfast.agent.reports import Reports
from holdfast.agent.store_ports import StorePorts
from holdfast.agent.uplink import Uplink
from holdfast.core.events import Event, Hello, NodeExamined, NodeGone, NodeInfo, NodeLeaving, StoreOffered
from holdfast.core.faults import Failure
from holdfast.core.health.findings import CheckResult, CheckTask
from holdfast.core.orders import Exit, Hold, Order, Refuse, Serve
from holdfast.core.records import Outcome
from holdfast.errors import AuthenticationError, LaunchError

EXIT_FAILED = 1
EXIT_REFUSED = 4
EXIT_NO_MASTER = 5
TAKE_OVER_AFTER_S = 1.0
"""How long the master may be away before another agent of its machine looks after it."""
DEAD_LIVES_MAX = 8
FAREWELL_S = 5.0
"""How long a finished master stays for agents that have not heard the end; see master.py."""
GOODBYE_S = 3.0
"""How long a leaving agent waits for the master to take note."""
MEMORY_SAMPLE_S = 1.0
STORES_OPEN_MAX = 4
"""Of views whose workers have not all left them for a later one."""
HOLDING_LINE_AFTER_S = 1.0
WAITING_LINE_S = 10.0
"""How often an agent that waits says so."""

log = structlog.get_logger("agent")


class Result(msgspec.Struct, frozen=True):
    """How it ended, for the command line to say and to exit with."""

    exit_code: int
    why: str
    outcome: Outcome | None = None
    cause: Failure | None = None


class Agent:
    """One node's agent."""

    def __init__(self, config: AgentConfig, launcher: Launcher) -> None:
        self._config, self._launcher = config, launcher
        self._incarnation = new_incarnation()
        self._dead_lives: tuple[str, ...] = ()
        self._refused_by = ""
        self._job_id = config.spec.run_id
        self._stores = StorePorts(config.address)
        self._logs = WorkerLogs(config.logs)
        self._memory = MemoryWatch()
        self._store_views: list[int] = []
        self._view_heard = 0
        self._to_replace: set[int] = set()
        """Local ranks that views which came and went before this agent got round to them wanted ended."""
        self._order: Order | None = None
        self._order_changed = asyncio.Event()
        self._signal: signal.Signals | None = None
        self._leave_at = 0.0
        """When a node that was told to go waits no longer for a step boundary, on the loop's clock."""
        self._is_alone = True
        """Whether the newest view has no other node."""
        self._over = False
        """Whether the end of the job, or of our part in it, is known here."""
        self._told_to_go = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()
        self._keeping: asyncio.Task[None] | None = None
        self._linking: asyncio.Task[None] | None = None
        self._keeper = (
            MasterKeeper(config.master, config.master_port, dict(os.environ))
            if config.master
            else None
        )
        self._uplink = Uplink(
            self,
            self._master_address,
            token=config.token,
            tls=config.tls,
            heartbeat_interval_s=config.heartbeat_interval_s,
            silence_timeout_s=config.silence_timeout_s,
        )
        self._reports = Reports(
            config.node_id, lambda: self._incarnation, self._tell, lambda: self._uplink.waiting
        )
        self._counters = Counters(config.accelerator, self._reports.counters)
        self._state = StateKeeper(config, self._reports)
        self._crew = Crew(
            config,
            self._reports,
            launcher,
            self._logs,
            self._memory,
            self._order_changed.set,
            self._close_stores,
            self._state,
        )
        self._examination = Examination(config, launcher, self._report_check)
        self._lines = LineServer(self._crew)
        self._replication = self._state.replicate()
        self._paces = PaceWatch(lambda: self._crew.seated, self._reports, config.straggler_interval_s)
        self._hangs = HangWatch(lambda: self._crew.seated, self._reports, config.hang_timeout_s)

    # --- what the link asks of us

    def hello(self) -> Hello:
        """Who we are and what we do."""
        self._crew.ledger.say_again()
        self._state.say(again=True)
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
            store_port=self._stores.offer(),
            serving=self._crew.view,
            term=self._uplink.term,
            dead_lives=self._dead_lives,
            leaving=int(self._signal or 0),
            parked=self._crew.parked,
        )

    def obey(self, order: Order) -> None:
        """Take an order; the newest one counts. But a port that a view has taken up is gone even if a newer view
        comes before this agent has got round to that one."""
        if isinstance(order, Serve) and order.store_here and self._stores.promise(order.view, order.store_port):
            self._offer_store()
        if isinstance(order, Serve) and order.view != self._view_heard:
            self._view_heard = order.view
            self._to_replace.update(order.replaced)
        self._order = order
        self._order_changed.set()

    def _master_address(self) -> tuple[str, int]:
        return self._config.master_host, self._keeper.port if self._keeper else self._config.master_port

    # --- the life of an agent

    async def run(self) -> Result:
        """From the first connection to the end of the job, or of this node's part in it."""
        loop = asyncio.get_running_loop()
        for handled in self._config.signals:
            loop.add_signal_handler(handled, self._on_signal, handled)
        if self._keeper and (failed := await self._start_master(self._keeper)):
            return failed
        await self._open_line()
        link = self._linking = asyncio.create_task(self._join())
        self._beside(self._hangs.run())
        self._beside(self._paces.run())
        self._beside(self._crew.ledger.run())
        self._beside(self._sample_memory())
        self._beside(self._look_after_master())
        self._beside(self._mourn_stores())
        orders = asyncio.create_task(self._work())
        try:
            await asyncio.wait({link, orders}, return_when=asyncio.FIRST_COMPLETED)
            return _refused(link) if link.done() and not link.cancelled() else await orders
        finally:
            await self._close(link, orders)

    async def _start_master(self, keeper: MasterKeeper) -> Result | None:
        """A result only if there is no point in going on."""
        starting, told = asyncio.create_task(keeper.start()), asyncio.create_task(self._told_to_go.wait())
        await asyncio.wait({starting, told}, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if not starting.done():
            keeper.release()
            await asyncio.wait({starting})
        await asyncio.gather(told, return_exceptions=True)
        try:
            starting.result()
        except MasterFailedError as error:
            if self._signal is None:
                return Result(EXIT_JOURNAL, str(error))
        if self._signal is not None and not keeper.owned:
            return Result(128 + int(self._signal), f"ended by {self._signal.name}", Outcome.STOPPED)
        self._keeping = self._beside(keeper.keep(lambda: self._over))
        return None

    async def _join(self) -> None:
        """Only when this node can start workers at once: a job that runs must not wait for a newcomer to warm up.
        One that is told to go meanwhile comes to say goodbye: it may have the master, which must know."""
        warming, told = asyncio.create_task(self._launcher.ready()), asyncio.create_task(self._told_to_go.wait())
        try:
            await asyncio.wait({warming, told}, return_when=asyncio.FIRST_COMPLETED)
            for problem in warming.result().problems if warming.done() else ():
                log.warning(problem)
        finally:
            warming.cancel()
            told.cancel()
        await self._uplink.run()

    async def _close(self, *tasks: asyncio.Task[Any]) -> None:
        for task in (*tasks, *self._background):
            task.cancel()
        await asyncio.gather(*tasks, *self._background, return_exceptions=True)
        await self._examination.close()
        await self._crew.close()
        await self._state.close()
        await self._lines.close()
        await self._logs.drain()
        self._logs.close()
        self._stores.close()
        await self._launcher.close()
        if self._keeper and self._over:  # else others may need the master: it ends when they are gone
            await self._keeper.stop(max(FAREWELL_S, self._config.silence_timeout_s) + 1.0)

    def _beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(_log_bugs)
        return task

    async def _work(self) -> Result:
        while True:
            await self._order_changed.wait()
            self._order_changed.clear()
            if self._signal is not None and self._may_go():
                return await self._leave(self._signal)
            result = await self._do(self._order)
            if result is not None:
                return result

    async def _do(self, order: Order | None) -> Result | None:
        if not isinstance(order, Hold) or order.check is None:
            self._examination.want(None)
        match order:
            case Serve():
                await self._serve(order)
            case Hold():
                return await self._stand_by(order)
            case Exit():
                self._over = True
                await self._uplink.say_farewell()
                url = self._crew.checkpoint_url()
                await self._stop_crew(self._config.shutdown_timeout_s)
                is_success = order.outcome is Outcome.SUCCEEDED
                last = await self._state.finish(is_success, self._is_alone) or await find_last_checkpoint(url)
                return Result(order.exit_code, _last_words(order, last), order.outcome, order.cause)
            case Refuse():
                return await self._refused(order)
            case _:
                pass
        return None

    async def _serve(self, order: Serve) -> None:
        self._job_id = order.job_id
        self._is_alone = order.group_world_size == 1
        if order.view != self._crew.view and order.store_here:
            self._open_store(order)
        replaced, self._to_replace = tuple(sorted(self._to_replace)), set()
        self._state.serve(order)
        await self._crew.serve(msgspec.structs.replace(order, replaced=replaced))
        self._reap_orphans()

    async def _stand_by(self, order: Hold) -> Result | None:
        self._job_id = order.job_id
        self._state.hold()
        await self._crew.hold(order)
        self._reap_orphans()
        if order.check is not None:  # only now: workers that run would be in its way
            self._examination.want(order.check)
        if not order.leaving:
            if order.check is None:  # else the master says what is going on, and each round would say it again
                self._beside(self._say_holding(order))
        elif not self._crew.in_session:  # else the crew says when the last of them has left
            await self._crew.stop(self._config.restart_grace_s)
            self._state.vault.remove()
            await self._say_goodbye()
            return Result(0, order.why, Outcome.STOPPED)
        return None

    def _open_store(self, order: Serve) -> None:
        listener = self._stores.take(order.view)
        if listener is None:
            log.error(f"view {order.view} asks for a store on port {order.store_port}, which was not on offer here")
            return
        self._beside(self._launcher.open_store(order.view, order.store_host, listener))
        self._store_views.append(order.view)
        # Workers that are kept may need the store of their view until they have left it.
        self._close_stores(self._store_views[-STORES_OPEN_MAX:][0] if order.kept else order.view)

    def _close_stores(self, view: int) -> None:
        """Those of views before this one."""
        for earlier in [number for number in self._store_views if number < view]:
            self._store_views.remove(earlier)
            self._beside(self._launcher.close_store(earlier))

    def _offer_store(self) -> None:
        self._report(
            StoreOffered(
                node_id=self._config.node_id, incarnation=self._incarnation, port=self._stores.offer()
            )
        )

    def _tell(self, event: Event) -> None:
        """To the master; what its counters say of the node follows when something failed."""
        self._uplink.report(event)
        if view := self._counters.view_of(event):
            self._beside(self._counters.read(view))

    def _report(self, event: Event) -> None:
        self._uplink.report(event)

    def _report_check(self, task: CheckTask, result: CheckResult) -> None:
        self._report(
            NodeExamined(
                node_id=self._config.node_id,
                incarnation=self._incarnation,
                checkup=task.checkup,
                round=task.round,
                result=result,
            )
        )

    async def _stop_crew(self, grace_s: float, with_signal: int = signal.SIGTERM) -> None:
        await self._crew.stop(grace_s, with_signal)
        self._reap_orphans()

    def _reap_orphans(self) -> None:
        self._launcher.reap_orphans({self._keeper.process_id} if self._keeper else set())

    async def _say_holding(self, order: Hold) -> None:
        await asyncio.sleep(HOLDING_LINE_AFTER_S)  # most holds are over in a moment and not worth a line
        if self._order is order:
            log.info(f"holding: {order.why}")

    # --- going

    def _on_signal(self, received: signal.Signals) -> None:
        if self._signal is not None:
            self._leave_at = 0.0
            if not self._crew.is_empty:
                self._crew.kill()
            elif self._keeper:
                self._keeper.release()
        else:
            self._signal = received
            loop = asyncio.get_running_loop()
            self._leave_at = loop.time() + self._config.shutdown_timeout_s
            loop.call_at(self._leave_at, self._order_changed.set)
            self._told_to_go.set()
            self._report(
                NodeLeaving(
                    node_id=self._config.node_id,
                    incarnation=self._incarnation,
                    signal=int(received),
                    why=f"its agent got {received.name}",
                )
            )
        self._order_changed.set()

    def _may_go(self) -> bool:
        """Workers that can leave at a step boundary stay until the master has planned it and they have left; not for
        longer than a stop may take, and not if there is no boundary to come."""
        waits = isinstance(self._order, Serve) or (isinstance(self._order, Hold) and self._order.release > 0)
        return not self._crew.in_session or not waits or asyncio.get_running_loop().time() >= self._leave_at

    async def _leave(self, received: signal.Signals) -> Result:
        log.info(f"got {received.name}: stopping this node's workers, at most {self._config.shutdown_timeout_s:.0f} s")
        await self._stop_crew(self._config.shutdown_timeout_s, received)
        if not (isinstance(self._order, Hold) and self._order.release):  # else the job goes on elsewhere
            await self._state.finish(False, self._is_alone)
        await self._say_goodbye()
        return Result(128 + int(received), f"ended by {received.name}", Outcome.STOPPED)

    async def _say_goodbye(self) -> None:
        self._report(NodeGone(node_id=self._config.node_id, incarnation=self._incarnation))
        self._over = True
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self._uplink.drained()
        except TimeoutError:
            log.warning("the master did not take note of the goodbye; leaving all the same")
        if self._linking:
            self._linking.cancel()
        if self._keeper and self._keeper.owned:
            await self._host_to_the_end()

    async def _host_to_the_end(self) -> None:
        """The job may go on elsewhere: whoever has its master stays for it."""
        assert self._keeping is not None
        await asyncio.wait({self._keeping}, timeout=GOODBYE_S)
        if not self._keeping.done():
            log.warning("other nodes go on and this node has the master: staying for it; another signal ends it")
            await asyncio.wait({self._keeping})

    async def _refused(self, refusal: Refuse) -> Result | None:
        await self._stop_crew(self._config.restart_grace_s)
        if refusal.rejoin:
            log.warning(f"{refusal.why}: coming back as a new life")
            # Nobody knows better that it is dead: its workers have just been stopped.
            self._dead_lives = (*self._dead_lives, self._incarnation)[-DEAD_LIVES_MAX:]
            self._incarnation = new_incarnation()
            self._uplink.forget_reports()
            self._order = None  # what came meanwhile was for the old life
        elif refusal.holder and refusal.holder not in self._dead_lives and saw_dead(refusal):
            self._dead_lives = (*self._dead_lives, refusal.holder)
        elif refusal.retry_after_s is None:
            return Result(EXIT_REFUSED, refusal.why)
        else:
            self._say_refusal(refusal)
            await asyncio.sleep(min(refusal.retry_after_s, 1.0) + 0.01)  # as the master said; less, to hear of news
        self._uplink.reconnect()
        return None

    def _say_refusal(self, refusal: Refuse) -> None:
        """Once for each reason: what changes from try to try is how long there is to wait."""
        if self._refused_by != refusal.holder:
            self._refused_by = refusal.holder
            log.warning(f"not taken in yet: {refusal.why}")

    # --- beside

    async def _open_line(self) -> None:
        try:
            await self._lines.start()
        except OSError as error:
            log.warning(f"no socket for workers, so none can be repaired while it runs: {error}")
        else:
            self._crew.listen_at(self._lines.name)

    async def _sample_memory(self) -> None:
        while True:
            self._memory.sample()
            await asyncio.sleep(MEMORY_SAMPLE_S)  # counters of the kernel: there is no event for them

    async def _mourn_stores(self) -> None:
        """Workers that have met go on without their store; one that still needs it fails and is restarted."""
        while True:
            lost = await self._launcher.stores_lost()
            log.warning(f"the store of view {', '.join(map(str, sorted(lost)))} is gone: its keeper died")

    async def _look_after_master(self) -> None:
        """While the master is away: say so, take it over if it can be had, give up if it never was there."""
        said_at = 0.0
        while not self._over:
            await asyncio.sleep(TAKE_OVER_AFTER_S)  # nothing waits for this; it only notices a long absence
            since = self._uplink.unreachable_since
            away_s = time.monotonic() - since if since is not None else 0.0
            if away_s < TAKE_OVER_AFTER_S:
                continue
            if self._keeper and not self._keeper.owned and self._job_id and await self._keeper.take_over(self._job_id):
                self._keeping = self._beside(self._keeper.keep(lambda: self._over))
            if time.monotonic() - said_at > WAITING_LINE_S:
                said_at = time.monotonic()
                log.warning(f"the master cannot be reached for {away_s:.0f} s ({self._uplink.trouble}); trying on")
            if away_s > self._config.join_timeout_s:
                self._give_up(away_s)

    def _give_up(self, away_s: float) -> None:
        """Running workers train on without a master; an agent with nothing to run has no reason to stay."""
        if self._crew.running or self._crew.in_session:
            return
        why = f"the master at {self._uplink.trouble or 'its address'} could not be reached for {away_s:.0f} s"
        code, outcome = (0, Outcome.SUCCEEDED) if self._crew.is_done else (EXIT_NO_MASTER, Outcome.FAILED)
        self.obey(Exit(outcome=outcome, exit_code=code, why=why, cause=None))


def _last_words(order: Exit, checkpoint: str) -> str:
    """Why it ended, and what the next start goes on from."""
    if order.outcome is not Outcome.FAILED or not checkpoint:
        return order.why
    return f"{order.why}; the last checkpoint is {checkpoint}"


def _refused(link: asyncio.Task[None]) -> Result:
    error = link.exception()
    if isinstance(error, AuthenticationError):
        return Result(EXIT_REFUSED, str(error))
    if isinstance(error, LaunchError):
        return Result(EXIT_FAILED, str(error))
    assert error is not None, "the link ended without a reason"
    raise error


def _log_bugs(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error(f"{type(error).__name__}: {error}", exc_info=error)
