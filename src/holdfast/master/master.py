"""The shell around the core. Its law:

    batch the inbox; decide and evolve in memory; append the records to the journal, one fsync a batch;
    only then let anything out: orders, acknowledgements, log lines, pages for watchers.

If the append fails the master ends: memory is ahead of disk, and no other process has heard of it yet. After a restart
it replays the journal, and every agent that reconnects gets its standing order; what an agent reports again is
recognised. Time enters the core as `now`; the loop wakes at the core's next deadline, not on a period.

The journal, the transport and the clock are arguments: tests/support/simulated_master.py has twins of them without
disk, network and waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol

from msgspec.structs import replace

from holdfast.core import events as e
from holdfast.core.notices import notice
from holdfast.core.policy import next_deadline
from holdfast.core.records import (
    CheckConcluded,
    DurableRecord,
    NodeRefused,
    Record,
    ShardsLeased,
    StepCommittedRecord,
    StepsAudited,
    is_durable,
)
from holdfast.core.rung_plans import why_no_dump
from holdfast.core.sentences import measured_sentence, sentence
from holdfast.core.settings import Settings, heartbeat_interval, silence_timeout
from holdfast.core.state import Finished, Gathering, JobState, Lost
from holdfast.core.transact import Turn, begin, replay, transact
from holdfast.errors import WireError
from holdfast.failover import DynamicFailoverExtension
from holdfast.journal import JournalEntry
from holdfast.master.connections import AgentConnectionState, Connections, MasterConnection, MasterTransport
from holdfast.master.failover_extension import MasterAdviser
from holdfast.master.job_clock import JobClock
from holdfast.master.machine_registry import MachineRegistry
from holdfast.master.operator_requests import objection, other_job_or_over, outcome
from holdfast.master.stack_requests import StackRequests
from holdfast.util.logs import get_logger
from holdfast.util.processes import DISK_WAIT, STOPPED, boot_id, machine_id, process_state
from holdfast.wire.control_messages import (
    Acknowledge,
    AskStacks,
    Command,
    EventReport,
    Farewell,
    Heartbeat,
    NodeStacks,
    OperatorAnswer,
    OperatorRequest,
    Page,
    Watch,
)
from holdfast.wire.frame_stream import until_first_ends

BATCH_EVENTS_MAX = 4_096
JOINS_GATHER_S = 0.02
"""Least time between two batches of nothing but introductions. A thousand nodes that come at once share tens of
syncs instead of paying one each; one that comes alone, and every other event, waits for nothing."""
PAGE_CHARS_MAX = 1_000_000
CHECK_LINES_MAX = 64
"""Lines of one node check in the log; the journal has all."""
FAREWELL_S = 5.0
"""How long a finished master stays for agents that have not heard the end yet; at least the silence timeout."""
LAST_MESSAGES_S = 0.5
"""How long the last messages may take to get out."""
HEARTBEAT_ECHO = Acknowledge(0)
PROGRESS_LINE_S = 10.0
"""How often the log says that the job still waits for nodes."""
STOOD_STILL_SHARE = 0.5
"""Share of the silence timeout: a master that did not run for longer cannot tell who was silent in that time."""
ORPHAN_GRACE_S = 2.0
"""How long a master whose agent died stays without any other agent."""

GARBAGE_THRESHOLDS = (100_000, 50, 100)
"""When Python looks for cyclic garbage. A view of ten thousand nodes is made of hundreds of thousands of objects, none
of them garbage: with Python's own thresholds looking through them takes a third of the time to form it."""

log = get_logger(__name__)

InboxItem = tuple[AgentConnectionState, EventReport | OperatorRequest | None]
"""A report or a request, and where it came from; None instead: the connection broke."""


def is_stopped_here(agent: e.NodeInfo) -> bool:
    """Return whether an agent's process is one of this machine and was stopped by a signal, or waits for a disk."""
    is_here = agent.boot_id == boot_id() and agent.machine_id == machine_id()
    return is_here and agent.pid > 0 and process_state(agent.pid) in (STOPPED, DISK_WAIT)


def collect_garbage_rarely() -> None:
    """Set this process's thresholds, for a master of many nodes."""
    gc.set_threshold(*GARBAGE_THRESHOLDS)


class Journal(Protocol):
    """Where a master's decisions are stored; `journal.SqliteJournal` on a disk."""

    def replay(self) -> Iterable[JournalEntry]:
        """Return all records, in order."""

    def append(self, records: Sequence[DurableRecord]) -> object:
        """Store records durably before returning. JournalError if that fails."""

    def page(self, after_seq: int, chars_max: int) -> list[str]:
        """Return records after a sequence number as JSON, at least one if there is one."""


class Master:
    """One term of a job's coordinator."""

    def __init__(
        self,
        journal: Journal,
        transport: MasterTransport,
        job_id: str,
        settings: Settings,
        clock: Callable[[], float] | None = None,
        extension: DynamicFailoverExtension | None = None,
        machine_registry: MachineRegistry | None = None,
        is_stopped: Callable[[e.NodeInfo], bool] = is_stopped_here,
    ) -> None:
        self._is_stopped = is_stopped
        self._journal, self._transport = journal, transport
        self._adviser = MasterAdviser(extension)
        self._machine_registry = machine_registry or MachineRegistry()
        self._last_seq = 0  # of the journal
        self._heartbeat_interval_s = 0.0  # the longest that an agent was told
        self._recorded_at = 0.0  # the latest time in the journal
        self._job = self._replay()
        self._clock = clock or JobClock(self._recorded_at)
        self._inbox: asyncio.Queue[InboxItem | None] = asyncio.Queue()
        self._crash: Exception | None = None  # a bug of ours while a connection was served
        self._agents = Connections()
        self._stack_requests = StackRequests()
        self._watchers: dict[MasterConnection, asyncio.Event] = {}  # set when there are records to send
        self._is_ending = self._orphaned = False
        self._no_dump = ""
        self._alone_since: float | None = None
        self._uninformed: set[str] = set()  # incarnations that have not heard of the job's end
        self._progress_at = self._clock() + PROGRESS_LINE_S
        self._turn_at = self._committed_at = self._clock()
        self._commit(begin(self._job, job_id, settings, self._clock()))

    @property
    def job(self) -> JobState:
        """The job as this term knows it, to be read only."""
        return self._job

    @property
    def torch_store(self) -> tuple[str, int] | None:
        """Host and port of the view's rendezvous store, if there is a view."""
        return (self._job.view.store_host, self._job.view.store_port) if self._job.view is not None else None

    def orphan(self) -> None:
        """Stay only as long as another agent is connected: the one that started this master is gone."""
        self._orphaned = True
        self._inbox.put_nowait(None)

    def _replay(self) -> JobState:
        return replay(self._learned())

    def _learned(self) -> Iterator[DurableRecord]:
        """Yield the journal's records, which others learn from on the way: a list of all would fill the memory."""
        for entry in self._journal.replay():
            self._last_seq = entry.seq
            self._recorded_at = max(self._recorded_at, entry.record.at)
            self._adviser.learn([entry.record])
            yield entry.record

    async def run(self, ready: Callable[[int], None]) -> None:
        """Listen, call `ready` with the port, decide until the job is over, tell the agents that it is."""
        port = await self._transport.start(self._on_connection)
        self._machine_registry.reconcile(self._job)
        try:
            ready(port)
            await self._decide_until_finished()
            await self._tell_agents_of_end()
        finally:
            await self._machine_registry.close()
            self._agents.finish_all()
            self._is_ending = True
            self._wake_watchers()
            await self._transport.stop(LAST_MESSAGES_S)

    # --- the loop

    async def _decide_until_finished(self) -> None:
        while not isinstance(self._job.phase, Finished):
            wait_s = self._wait_s()
            batch = await self._next_batch(wait_s)
            self._notice_own_absence(wait_s)
            if self._is_abandoned():
                text = "the agent that started this master is gone and no other is connected: the master ends"
                log.warning("master-abandoned", text)
                return
            self._log_progress()
            await self._process(batch)

    async def _tell_agents_of_end(self) -> None:
        """Wait until every agent of the job has heard of its end, or has had time to: also one whose connection broke,
        and all of them when this master was started again after the end."""
        if not isinstance(self._job.phase, Finished):
            return
        now, settings = self._clock(), self._job.settings
        self._uninformed = {node.incarnation for node in self._job.nodes.values() if node.alive}
        leave_at = now + max(FAREWELL_S, settings.silence_timeout_s)
        while self._still_uninformed() and (left_s := leave_at - self._clock()) > 0:
            await self._process(await self._next_batch(left_s))
        await self._wait_for_lost(now)

    def _still_uninformed(self) -> set[str]:
        """Return incarnations that have not heard of the end, less those that have left or were lost since."""
        return self._uninformed & {node.incarnation for node in self._job.nodes.values() if node.alive}

    async def _wait_for_lost(self, ended_at: float) -> None:
        """Wait until the agents of lost nodes have come back and heard of the end, or have had time to. One that was
        lost long ago has given up by itself."""
        settings = self._job.settings
        lost = {
            node.incarnation: node.node_id
            for node in self._job.nodes.values()
            if isinstance(node.standing, Lost) and node.standing.at > ended_at - settings.join_timeout_s
        }
        leave_at = ended_at + settings.farewell_timeout_s
        self._uninformed |= lost.keys()
        if lost and leave_at > self._clock():
            names = ", ".join(sorted(lost.values()))
            text = f"the job is over; waiting up to {settings.farewell_timeout_s:.0f} s to tell {names} (lost) how"
            log.notice("waiting-for-lost-nodes", text)
        while self._uninformed & lost.keys() and not self._orphaned and (left_s := leave_at - self._clock()) > 0:
            await self._process(await self._next_batch(left_s))

    async def _process(self, batch: list[InboxItem]) -> None:
        objections = {sender: objection(self._job, ask) for sender, ask in batch if isinstance(ask, OperatorRequest)}
        events = await self._advised([_event(item) for item in batch if not objections.get(item[0])])
        self._commit(transact(self._job, [*events, *self._silences()], self._clock()))
        for sender, message in batch:
            match message:
                case EventReport(number=number):
                    sender.introduced = True
                    sender.connection.send(Acknowledge(number))
                case OperatorRequest():
                    refusal = objections[sender]
                    accepted, text = (False, refusal) if refusal else outcome(self._job, message)
                    sender.connection.send(OperatorAnswer(accepted, text, self._last_seq))
                    sender.connection.finish()

    async def _advised(self, events: list[e.Event]) -> list[e.Event]:
        """Return the events with what is known of machines, and with the advice of the user's extension and monitors.
        Waiting for them does not count as an absence of the master's."""
        events = await self._machine_registry.introduced(events)
        if isinstance(self._job.phase, Finished):
            return events
        if any(map(self._adviser.has_to_say, events)):
            events = await self._adviser.advise(events, self._job.incidents.restarts_used)
            self._turn_at = self._clock()
        if any(map(self._machine_registry.has_to_say, events)):
            events = await self._machine_registry.judged(events, self._job)
            self._turn_at = self._clock()
        return events

    async def _next_batch(self, wait_s: float | None) -> list[InboxItem]:
        """Return what came in; nothing if nothing did in time, or if there is something else to look at."""
        loop = asyncio.get_running_loop()
        items = await self._receive(wait_s)
        left_s = min(self._committed_at + JOINS_GATHER_S - self._clock(), JOINS_GATHER_S)
        gather_until = loop.time() + left_s
        while items and all(map(_is_introduction, items)) and (left_s := gather_until - loop.time()) > 0:
            items += await self._receive(left_s)
        if self._crash is not None:
            raise self._crash
        return [item for item in items if item is not None]

    async def _receive(self, wait_s: float | None) -> list[InboxItem | None]:
        """Return the next item of the inbox, and all that wait behind it."""
        items: list[InboxItem | None] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                items.append(await self._inbox.get())
        while len(items) < BATCH_EVENTS_MAX and not self._inbox.empty():
            items.append(self._inbox.get_nowait())
        return items

    def _notice_own_absence(self, wait_s: float | None) -> None:
        """Have all agents send their Hello again if this master did not run for a while: a paused machine, a disk that
        hangs. What it did not hear in that time says nothing about the nodes; they have as long
        to come back as after a restart."""
        now = self._clock()
        away_s = 0.0 if wait_s is None else now - self._turn_at - wait_s
        self._turn_at = now
        if away_s > self._job.settings.silence_timeout_s * STOOD_STILL_SHARE:
            log.warning("master-stood-still", f"this master did not run for {away_s:.1f} s: all nodes reconnect")
            self._agents.forget_introductions(now)
            self._commit(begin(self._job, self._job.job_id, self._job.settings, now))

    def _is_abandoned(self) -> bool:
        """Return whether no agent has been connected for a while, and the agent that would end this master is gone."""
        if not self._orphaned or len(self._agents):
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = self._clock()
        return self._alone_since is not None and self._clock() >= self._alone_since + ORPHAN_GRACE_S

    def _wait_s(self) -> float | None:
        deadlines = [next_deadline(self._job)]
        if (quietest_at := self._agents.quietest_at()) is not None:
            deadlines.append(quietest_at + self._silence_timeout_s)
        if self._alone_since is not None:
            deadlines.append(self._alone_since + ORPHAN_GRACE_S)
        if isinstance(self._job.phase, Gathering):
            deadlines.append(max(self._progress_at, self._job.phase.since + PROGRESS_LINE_S))
        known = [deadline for deadline in deadlines if deadline is not None]
        return max(min(known) - self._clock(), 0.0) if known else None

    def _log_progress(self) -> None:
        phase, now = self._job.phase, self._clock()
        if not isinstance(phase, Gathering) or now < max(self._progress_at, phase.since + PROGRESS_LINE_S):
            return
        self._progress_at = now + PROGRESS_LINE_S
        if self._job.checks.checkup:
            return
        here, settings = len(self._job.sets.here), self._job.settings
        left_s = phase.deadline - now
        text = f"waiting for nodes: {here} of at least {settings.nodes_min} are here, {left_s:.0f} s left"
        is_short = 0 < here < settings.nodes_min  # else nodes are starting, which needs no line
        write = log.notice if is_short else log.info
        write("waiting-for-nodes", text)

    def _silences(self) -> list[e.NodeSilent]:
        now = self._clock()
        unheard = self._agents.silent_since(now - self._silence_timeout_s)
        silent = [agent for agent in unheard if not self._waits_for_stopped(agent, now)]
        for agent in silent:
            agent.connection.abort()
            self._agents.remove(agent)
        return [e.NodeSilent(node_id=a.node_id, incarnation=a.incarnation, silent_s=now - a.heard_at) for a in silent]

    @property
    def _silence_timeout_s(self) -> float:
        settings = self._job.settings
        return silence_timeout(settings, max(self._heartbeat_interval_s, settings.heartbeat_interval_s))

    def _waits_for_stopped(self, agent: AgentConnectionState, now: float) -> bool:
        """Return whether a silent agent is not lost: its process, on this master's machine, is stopped by a signal or
        waits for a disk, and without its node there is no job. Its workers train on; to declare it lost would restart
        them. When it goes on it has as long as any other to be heard."""
        node = self._job.nodes.get(agent.node_id)
        is_stopped = node is not None and self._is_stopped(node.info)
        if node is None or not (is_stopped or agent.was_stopped) or self._is_dispensable(agent.node_id):
            return False
        if is_stopped and not agent.was_stopped:
            text = f"the agent of {agent.node_id} (process {node.info.pid}) is stopped or waits for a disk"
            log.warning("agent-stopped", f"{text}: waiting for it; its workers continue")
        agent.was_stopped = is_stopped
        self._agents.heard(agent, now)
        return True

    def _is_dispensable(self, node_id: str) -> bool:
        """Return whether there are enough nodes without this one, whose agents are not stopped like its own."""
        nodes, nodes_min = self._job.nodes, self._job.settings.nodes_min
        others = (one for one in self._job.sets.here if one != node_id and not self._is_stopped(nodes[one].info))
        return len(list(islice(others, nodes_min))) == nodes_min

    def _commit(self, done: Turn) -> None:
        """Carry out the shell's law, in its order."""
        durable = [record for record in done.records if is_durable(record)]
        self._journal.append(durable)  # type: ignore[arg-type]  # is_durable has just said so
        self._adviser.learn(durable)
        for record in done.records:
            if is_durable(record) or isinstance(record, NodeRefused):
                self._log(record)
            if isinstance(record, StepCommittedRecord) and (why := self._why_no_dump()):
                log.warning("dump-impossible", f"dump will not work: {why}")
            if isinstance(record, CheckConcluded):
                for verdict in record.nodes[:CHECK_LINES_MAX]:
                    log.info("node-measured", measured_sentence(verdict))
        if done.orders:
            self._heartbeat_interval_s = max(
                self._heartbeat_interval_s, heartbeat_interval(self._job.settings, len(self._job.sets.alive))
            )
        is_longer = self._heartbeat_interval_s > self._job.settings.heartbeat_interval_s
        told_s = self._heartbeat_interval_s if is_longer else 0.0
        for addressed in done.orders:
            self._agents.send(addressed.incarnation, Command(self._job.term, addressed.order, told_s))
        self._last_seq += len(durable)
        self._wake_watchers()
        self._committed_at = self._clock()
        self._machine_registry.learn(durable, self._job)

    def _log(self, record: Record) -> None:
        """Log a record: in short, where the person who started the job wants to know of it at once."""
        line = notice(self._job, record)
        is_routine = isinstance(record, StepsAudited | ShardsLeased)  # which come all the time
        write = log.notice if line else log.debug if is_routine else log.info
        write(str(record.__struct_config__.tag), line or sentence(record))

    def _wake_watchers(self) -> None:
        for has_news in self._watchers.values():
            has_news.set()

    def _why_no_dump(self) -> str:
        """Return why no dump can be written, only when that is new: it depends on the layout, and comes with each
        view."""
        before, self._no_dump = self._no_dump, why_no_dump(self._job)
        return self._no_dump if self._no_dump != before else ""

    # --- connections

    async def _on_connection(self, connection: MasterConnection) -> None:
        try:
            await self._serve(connection)
        except (WireError, asyncio.CancelledError):
            raise
        except Exception as error:  # a bug of ours ends this master
            self._crash = error
            self._inbox.put_nowait(None)

    async def _serve(self, connection: MasterConnection) -> None:
        first = await connection.receive()
        if connection.role == "watcher" and isinstance(first, Watch):
            await self._serve_watcher(connection, first.after_seq)
        elif connection.role == "watcher" and isinstance(first, OperatorRequest):
            self._inbox.put_nowait((AgentConnectionState(connection, "", "", self._clock()), first))
            await _discard(connection)  # it is answered once, after the journal has what follows from it
        elif connection.role == "watcher" and isinstance(first, AskStacks):
            refusal = other_job_or_over(self._job, first.job_id)
            await self._stack_requests.serve(connection, self._agents.introduced(), refusal)
        elif connection.role == "agent" and isinstance(first, EventReport) and isinstance(first.event, e.Hello):
            await self._serve_agent(connection, first, first.event)
        elif first is not None:
            raise WireError(f"a {connection.role} must introduce itself first")

    async def _serve_agent(self, connection: MasterConnection, first: EventReport, hello: e.Hello) -> None:
        agent = AgentConnectionState(connection, hello.node_id, hello.incarnation, self._clock())
        agent.clock.heard(first.sent_at, agent.heard_at)
        self._agents.add(agent)
        self._inbox.put_nowait((agent, first))
        try:
            await self._read_reports(agent)
        finally:
            if self._agents.remove(agent):
                self._inbox.put_nowait((agent, None))

    async def _read_reports(self, agent: AgentConnectionState) -> None:
        while (message := await agent.connection.receive()) is not None:
            self._agents.heard(agent, self._clock())
            match message:
                case Heartbeat(term=term) | EventReport(term=term) if term > self._job.term:
                    raise WireError(f"{agent.node_id} follows term {term}: this master is of term {self._job.term}")
                case Heartbeat():
                    agent.connection.send(HEARTBEAT_ECHO)
                case Farewell():
                    self._uninformed.discard(agent.incarnation)
                    self._inbox.put_nowait(None)
                case NodeStacks(node_id=node_id) if node_id == agent.node_id:
                    self._stack_requests.answered(message)
                case EventReport(event=event, sent_at=sent_at) if _speaks_for_itself(agent, event):
                    agent.clock.heard(sent_at, agent.heard_at)
                    translated = agent.clock.translated(event, agent.heard_at)
                    self._inbox.put_nowait((agent, replace(message, event=translated)))
                case _:
                    raise WireError(f"{agent.node_id} sent a message that is not its to send")

    async def _serve_watcher(self, connection: MasterConnection, after_seq: int) -> None:
        self._watchers[connection] = asyncio.Event()
        try:
            await until_first_ends(_discard(connection), self._send_pages(connection, max(after_seq, 0)))
        finally:
            del self._watchers[connection]

    async def _send_pages(self, watcher: MasterConnection, sent: int) -> None:
        """Send at least one page, so that a watcher knows where it stands, then more as records come; none longer than
        a frame may be, and none before the watcher has read most of the last."""
        has_news = self._watchers[watcher]
        while True:
            first = min(sent, self._last_seq)  # a watcher of another journal learns of it
            records = self._journal.page(first, PAGE_CHARS_MAX)
            sent = first + len(records)
            watcher.send(Page(last_seq=sent, records=tuple(records)))
            await watcher.drain()
            while sent >= self._last_seq:
                if self._is_ending:
                    return
                has_news.clear()
                await has_news.wait()


async def _discard(connection: MasterConnection) -> None:
    while await connection.receive() is not None:
        pass


def _speaks_for_itself(agent: AgentConnectionState, event: e.Event) -> bool:
    """Return whether an agent may report this: an event of its own node, and nothing that operators ask for."""
    if isinstance(event, e.DrainRequested | e.ResizeRequested):
        return False
    return event.node_id == agent.node_id and event.incarnation == agent.incarnation


def _is_introduction(item: InboxItem | None) -> bool:
    return item is not None and isinstance(item[1], EventReport) and isinstance(item[1].event, e.Hello)


def _event(item: InboxItem) -> e.Event:
    sender, message = item
    match message:
        case EventReport(event=event) | OperatorRequest(request=event):
            return event
        case None:
            return e.LinkBroke(node_id=sender.node_id, incarnation=sender.incarnation)
