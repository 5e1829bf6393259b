"""The shell around the core. Its law:

    batch the inbox; decide and evolve in memory; append the records to the journal, one fsync a batch;
    only then let anything out: orders, acknowledgements, log lines, pages for watchers.

If the append fails the master ends: memory is ahead of disk, and nobody has heard of it yet. After a restart it
replays the journal, and every agent that reconnects is told its standing order; what an agent reports again is
recognised. Time enters the core as `now`; the loop wakes at the core's next deadline, not on a period.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import msgspec
import structlog

from holdfast.core import events as e
from holdfast.core.conclude import next_deadline
from holdfast.core.records import DurableRecord, NodeRefused, NodesChecked, ShardsLeased, StepsWitnessed, is_durable
from holdfast.core.sentences import measured_sentence, sentence
from holdfast.core.settings import Settings
from holdfast.core.state import Finished, Gathering, Job
from holdfast.core.transact import Transaction, begin, replay, transact
from holdfast.errors import WireError
from holdfast.failover import DynamicFailoverExtension
from holdfast.journal import SqliteJournal
from holdfast.master.advice import Adviser
from holdfast.master.requests import objection, outcome
from holdfast.master.sessions import Session, Switchboard
from holdfast.master.steward import Steward
from holdfast.wire.channel import Server, ServerConnection, Tls
from holdfast.wire.messages import Acknowledge, Answer, Ask, Command, Farewell, Heartbeat, Page, Report, Watch

BATCH_EVENTS_MAX = 4_096
JOINS_GATHER_S = 0.02
"""Least time between two batches of nothing but introductions. A thousand nodes that come at once share tens of
syncs instead of paying one each; one that comes alone, and every other event, waits for nothing."""
PAGE_CHARS_MAX = 1_000_000
CHECK_LINES_MAX = 64
"""Of a check, in the log; the journal has all."""
FAREWELL_S = 5.0
"""How long a finished master stays for agents that have not heard the end yet; at least the silence timeout."""
FAREWELL_STREAMS_S = 0.5
"""How long the last messages may take to get out."""
PROGRESS_LINE_S = 10.0
"""How often the log says that the job still waits for nodes."""
STOOD_STILL_SHARE = 0.5
"""Of the silence timeout: a master that did not run for longer cannot tell who was silent meanwhile."""
ORPHAN_GRACE_S = 2.0
"""How long a master whose agent died stays without any other agent."""

log = structlog.get_logger("master")
_encoder = msgspec.json.Encoder()

Letter = tuple[Session, Report | Ask | None]
"""A report or a request, and where it came from; without one, the news that the connection broke."""


class Master:
    """One term of a job's coordinator."""

    def __init__(
        self,
        journal: SqliteJournal,
        job_id: str,
        settings: Settings,
        clock: Callable[[], float] = time.time,
        extension: DynamicFailoverExtension | None = None,
        steward: Steward | None = None,
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._adviser = Adviser(extension)
        self._steward = steward or Steward()
        self._pages: list[str] = []  # the journal's records as JSON, for watchers; index = seq - 1
        self._job = self._replay()
        self._inbox: asyncio.Queue[Letter | None] = asyncio.Queue()
        self._agents = Switchboard()
        self._watchers: dict[Session, int] = {}
        self._orphaned = False
        self._alone_since: float | None = None
        self._unaware: set[str] = set()  # lives that have not heard of the job's end
        self._progress_at = self._clock() + PROGRESS_LINE_S
        self._turn_at = self._clock()
        self._committed_at = 0.0  # on the monotonic clock
        self._commit(begin(self._job, job_id, settings, self._clock()))

    @property
    def job(self) -> Job:
        """The job as this term knows it. To be read only."""
        return self._job

    def orphan(self) -> None:
        """The agent that started this master is gone: stay only as long as another one is connected."""
        self._orphaned = True
        self._inbox.put_nowait(None)

    def _replay(self) -> Job:
        def kept() -> list[DurableRecord]:
            entries = list(self._journal.replay())
            self._pages.extend(_encoder.encode(entry.record).decode() for entry in entries)
            records = [entry.record for entry in entries]
            self._adviser.learn(records)
            return records

        return replay(kept())

    async def run(self, host: str, port: int, token: str, tls: Tls | None, ready: Callable[[int], None]) -> None:
        """Listen, decide until the job is over, see the agents off."""
        server = Server(token=token, tls=tls, handler=self._on_connection, stranger=_log_stranger)
        port = await server.start(host, port)
        self._steward.reconcile(self._job)
        try:
            ready(port)
            await self._decide_until_finished()
            await self._see_agents_off()
        finally:
            await self._steward.close()
            self._agents.end_all()
            for watcher in self._watchers:
                watcher.finish()
            await server.stop(FAREWELL_STREAMS_S)

    # --- the loop

    async def _decide_until_finished(self) -> None:
        while not isinstance(self._job.phase, Finished):
            wait_s = self._wait_s()
            batch = await self._next_batch(wait_s)
            self._notice_own_absence(wait_s)
            if self._is_abandoned():
                log.warning("the agent that started this master is gone and no other is connected: it ends")
                return
            self._say_progress()
            await self._deal_with(batch)

    async def _see_agents_off(self) -> None:
        """Until every agent of the job has heard its end, or has had time to: also one whose connection broke, and
        all of them when this master was started again after the end."""
        if not isinstance(self._job.phase, Finished):
            return
        self._unaware = {node.incarnation for node in self._job.nodes.values() if node.alive}
        leave_at = self._clock() + max(FAREWELL_S, self._job.settings.silence_timeout_s)
        while self._still_unaware() and (left_s := leave_at - self._clock()) > 0:
            await self._deal_with(await self._next_batch(left_s))

    def _still_unaware(self) -> set[str]:
        """Lives that have not heard of the end, less those that have left or were lost since."""
        return self._unaware & {node.incarnation for node in self._job.nodes.values() if node.alive}

    async def _deal_with(self, batch: list[Letter]) -> None:
        objections = {session: objection(self._job, ask) for session, ask in batch if isinstance(ask, Ask)}
        events = await self._advised([_event(letter) for letter in batch if not objections.get(letter[0])])
        self._commit(transact(self._job, [*events, *self._silences()], self._clock()))
        for session, message in batch:
            match message:
                case Report(number=number):
                    session.introduced = True
                    session.send(Acknowledge(number))
                case Ask():
                    why_not = objections[session]
                    met, text = (False, why_not) if why_not else outcome(self._job, message)
                    session.send(Answer(met, text, len(self._pages)))
                    session.finish()

    async def _advised(self, events: list[e.Event]) -> list[e.Event]:
        """With what is known of machines, and with the word of the user's extension and monitors, if there are any.
        That wait is no absence of the master's."""
        events = await self._steward.introduced(events)
        if isinstance(self._job.phase, Finished):
            return events
        if any(map(self._adviser.has_to_say, events)):
            events = await self._adviser.advise(events, self._job.restarts_used)
            self._turn_at = self._clock()
        if any(map(self._steward.has_to_say, events)):
            events = await self._steward.judged(events, self._job)
            self._turn_at = self._clock()
        return events

    async def _next_batch(self, wait_s: float | None) -> list[Letter]:
        """What came in; empty if nothing did in time, or if there is something else to look at."""
        came = await self._receive(wait_s)
        gather_until = self._committed_at + JOINS_GATHER_S
        while came and all(map(_is_introduction, came)) and (left_s := gather_until - time.monotonic()) > 0:
            came += await self._receive(left_s)
        return [letter for letter in came if letter is not None]

    async def _receive(self, wait_s: float | None) -> list[Letter | None]:
        """The next letter, and all that wait behind it."""
        came: list[Letter | None] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                came.append(await self._inbox.get())
        while len(came) < BATCH_EVENTS_MAX and not self._inbox.empty():
            came.append(self._inbox.get_nowait())
        return came

    def _notice_own_absence(self, wait_s: float | None) -> None:
        """A paused machine, a disk that hangs, a clock set forward: what this master did not hear meanwhile says
        nothing about the nodes. They introduce themselves anew and have as long for it as after a restart."""
        now = self._clock()
        away_s = 0.0 if wait_s is None else now - self._turn_at - wait_s
        self._turn_at = now
        if away_s > self._job.settings.silence_timeout_s * STOOD_STILL_SHARE:
            log.warning(f"this master stood still for {away_s:.1f} s: every node has to introduce itself anew")
            self._agents.forget_introductions(now)
            self._commit(begin(self._job, self._job.job_id, self._job.settings, now))

    def _is_abandoned(self) -> bool:
        """Whether there has been nobody to work for, for a while, and nobody who would end this master."""
        if not self._orphaned or len(self._agents):
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = self._clock()
        return self._alone_since is not None and self._clock() >= self._alone_since + ORPHAN_GRACE_S

    def _wait_s(self) -> float | None:
        deadlines = [next_deadline(self._job)]
        if (quietest_at := self._agents.quietest_at()) is not None:
            deadlines.append(quietest_at + self._job.settings.silence_timeout_s)
        if self._alone_since is not None:
            deadlines.append(self._alone_since + ORPHAN_GRACE_S)
        if isinstance(self._job.phase, Gathering):
            deadlines.append(self._progress_at)
        known = [deadline for deadline in deadlines if deadline is not None]
        return max(min(known) - self._clock(), 0.0) if known else None

    def _say_progress(self) -> None:
        phase, now = self._job.phase, self._clock()
        if not isinstance(phase, Gathering) or now < self._progress_at:
            return
        self._progress_at = now + PROGRESS_LINE_S
        if self._job.checkup:
            return
        here, settings = sum(n.is_here for n in self._job.nodes.values()), self._job.settings
        left_s = phase.deadline - now
        log.info(f"waiting for nodes: {here} of at least {settings.nodes_min} are here, {left_s:.0f} s left")

    def _silences(self) -> list[e.NodeSilent]:
        now = self._clock()
        silent = self._agents.silent_since(now - self._job.settings.silence_timeout_s)
        for session in silent:
            session.end()
            self._agents.remove(session)
        return [
            e.NodeSilent(node_id=s.node_id, incarnation=s.incarnation, silent_s=now - s.heard_at) for s in silent
        ]

    def _commit(self, done: Transaction) -> None:
        """The shell's law, in its order."""
        durable = [record for record in done.records if is_durable(record)]
        self._journal.append(durable)  # type: ignore[arg-type]  # is_durable has just said so
        self._adviser.learn(durable)
        for record in done.records:
            if is_durable(record) or isinstance(record, NodeRefused):
                is_routine = isinstance(record, StepsWitnessed | ShardsLeased)  # which come all the time
                say = log.debug if is_routine else log.info
                say(sentence(record), record=str(record.__struct_config__.tag))
            if isinstance(record, NodesChecked):
                for verdict in record.nodes[:CHECK_LINES_MAX]:
                    log.info(measured_sentence(verdict), record="node-measured")
        for addressed in done.orders:
            self._agents.send(addressed.incarnation, Command(self._job.term, addressed.order))
        self._pages.extend(_encoder.encode(record).decode() for record in durable)
        for watcher in self._watchers:
            self._feed(watcher)
        self._committed_at = time.monotonic()
        self._steward.learn(durable, self._job)

    # --- connections

    async def _on_connection(self, connection: ServerConnection) -> None:
        first = await connection.receive()
        if connection.role == "watcher" and isinstance(first, Watch):
            await self._serve_watcher(connection, first.after_seq)
        elif connection.role == "watcher" and isinstance(first, Ask):
            await self._serve_operator(connection, first)
        elif connection.role == "agent" and isinstance(first, Report) and isinstance(first.event, e.Hello):
            await self._serve_agent(connection, first, first.event)
        elif first is not None:
            raise WireError(f"a {connection.role} must introduce itself first")

    async def _serve_agent(self, connection: ServerConnection, first: Report, hello: e.Hello) -> None:
        session = Session(connection, hello.node_id, hello.incarnation, self._clock())
        self._agents.add(session)
        self._inbox.put_nowait((session, first))
        try:
            await _until_first_ends(self._hear(session), session.drain_outbox())
        finally:
            if self._agents.remove(session):
                self._inbox.put_nowait((session, None))

    async def _hear(self, session: Session) -> None:
        while (message := await session.connection.receive()) is not None:
            session.heard_at = self._clock()
            match message:
                case (Heartbeat(term=term) | Report(term=term)) if term > self._job.term:
                    raise WireError(f"{session.node_id} follows term {term}: this master is of term {self._job.term}")
                case Heartbeat():
                    session.send(Acknowledge(0))
                case Farewell():
                    self._unaware.discard(session.incarnation)
                    self._inbox.put_nowait(None)
                case Report(event=event) if _speaks_for_itself(session, event):
                    self._inbox.put_nowait((session, message))
                case _:
                    raise WireError(f"{session.node_id} sent a message that is not its to send")

    async def _serve_watcher(self, connection: ServerConnection, after_seq: int) -> None:
        session = Session(connection, "", "", self._clock())
        self._watchers[session] = max(after_seq, 0)
        self._feed(session)
        try:
            await _until_first_ends(_discard(connection), session.drain_outbox())
        finally:
            del self._watchers[session]

    async def _serve_operator(self, connection: ServerConnection, ask: Ask) -> None:
        """One request, one answer."""
        session = Session(connection, "", "", self._clock())
        self._inbox.put_nowait((session, ask))
        await _until_first_ends(_discard(connection), session.drain_outbox())

    def _feed(self, watcher: Session) -> None:
        """At least one page, so that a watcher knows where it stands; none longer than a frame may be."""
        while True:
            first = min(self._watchers[watcher], len(self._pages))  # a watcher of another journal learns of it
            last, size = first, 0
            while last < len(self._pages) and (last == first or size + len(self._pages[last]) < PAGE_CHARS_MAX):
                size, last = size + len(self._pages[last]), last + 1
            watcher.send(Page(last_seq=last, records=tuple(self._pages[first:last])))
            self._watchers[watcher] = last
            if last >= len(self._pages):
                return


async def _until_first_ends(*coroutines: object) -> None:
    """Run the reader and the writer of a connection until one of them ends; its exception is ours."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]  # type: ignore[call-overload]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


async def _discard(connection: ServerConnection) -> None:
    while await connection.receive() is not None:
        pass


def _speaks_for_itself(session: Session, event: e.Event) -> bool:
    """What operators ask for, no agent may report."""
    if isinstance(event, e.DrainAsked | e.ResizeAsked):
        return False
    return event.node_id == session.node_id and event.incarnation == session.incarnation


def _is_introduction(letter: Letter | None) -> bool:
    return letter is not None and isinstance(letter[1], Report) and isinstance(letter[1].event, e.Hello)


def _event(letter: Letter) -> e.Event:
    session, message = letter
    match message:
        case Report(event=event) | Ask(request=event):
            return event
        case None:
            return e.LinkBroke(node_id=session.node_id, incarnation=session.incarnation)


def _log_stranger(peer: str, why: str) -> None:
    log.warning(f"turned {peer} away: {why}", record="stranger")
