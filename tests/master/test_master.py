"""The shell's law, on twins: nothing leaves before the append, and a failed append ends the master."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest

from holdfast.core import events as e
from holdfast.core import settings as settings_module
from holdfast.core.faults.failures import Exited, Failure
from holdfast.core.orders import Exit, Serve
from holdfast.core.records import (
    JobFinished,
    NodeJoined,
    NodeLost,
    TermBegan,
    ViewFormed,
    WorkerFailedRecord,
    WorkersStartedRecord,
)
from holdfast.core.settings import Settings
from holdfast.errors import JournalError
from holdfast.master import master as master_module
from holdfast.master.master import Master
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
    ReadStacks,
    StackGroupMessage,
    Watch,
)
from support.simulated_master import SimulatedAgent, SimulatedJournal, SimulatedTransport, clock, run

SETTINGS = Settings(nodes_min=1, nodes_max=1, restarts_max=3)
TWO = Settings(nodes_min=2, nodes_max=2, restarts_max=3)


class World:
    """A master in simulated time, with its twins."""

    def __init__(self, settings: Settings = SETTINGS, journal: SimulatedJournal | None = None) -> None:
        self.trace: list[object] = []
        self.settings = settings
        self.journal = journal or SimulatedJournal(self.trace)
        self.transport = SimulatedTransport(self.trace)
        self.stopped: set[str] = set()
        """Hosts of agents that a signal has stopped on the master's machine."""
        self.master = Master(
            self.journal, self.transport, "demo", settings, clock, is_stopped=lambda info: info.host in self.stopped
        )
        self.ports: list[int] = []
        self.task = asyncio.create_task(self.master.run(self.ports.append))

    def agent(self, node_id: str) -> SimulatedAgent:
        return SimulatedAgent(self.transport, self.settings, node_id)

    async def until(self, condition: Callable[[], object]) -> None:
        """Let everything run until the condition holds."""
        for _ in range(1_000):
            if condition():
                return
            await asyncio.sleep(0.001)
        raise AssertionError("it did not happen")

    async def until_slowly(self, condition: Callable[[], object]) -> None:
        """The same over minutes."""
        for _ in range(1_000):
            if condition():
                return
            await asyncio.sleep(0.1)
        raise AssertionError("it did not happen")


@contextlib.asynccontextmanager
async def world(settings: Settings = SETTINGS, journal: SimulatedJournal | None = None) -> AsyncIterator[World]:
    made = World(settings, journal)
    await made.until(lambda: made.ports)
    try:
        yield made
    finally:
        made.task.cancel()
        await asyncio.gather(made.task, return_exceptions=True)


def failed(agent: SimulatedAgent, view: int) -> e.WorkerFailed:
    failure = Failure(node_id=agent.node_id, view=view, local_rank=0, rank=0, pid=1, end=Exited(1), failed_at=clock())
    return e.WorkerFailed(node_id=agent.node_id, incarnation=agent.incarnation, view=view, failure=failure)


async def served(place: World, node_id: str = "a") -> SimulatedAgent:
    agent = place.agent(node_id)
    await place.until(lambda: orders(agent, Serve))
    return agent


def orders(agent: SimulatedAgent, kind: type) -> list[Command]:
    return [command for command in agent.connection.of(Command) if isinstance(command.order, kind)]


# --- the law


def test_an_order_and_an_acknowledgement_leave_after_the_append_of_what_they_follow_from() -> None:
    async def scenario() -> None:
        async with world() as place:
            agent = await served(place)
            agent.report(agent.started(1))
            await place.until(lambda: Acknowledge(1) in agent.connection.sent)
            kinds = [type(item) for item in place.trace]
            assert kinds.index(NodeJoined) < kinds.index(Command), "no order, of any kind, before the first append"
            assert kinds.index(ViewFormed) < place.trace.index(orders(agent, Serve)[0])
            assert kinds.index(ViewFormed) < kinds.index(Acknowledge), "the Hello is acknowledged after the append too"
            started, acknowledged = kinds.index(WorkersStartedRecord), place.trace.index(Acknowledge(1))
            assert started < acknowledged

    run(scenario)


def test_a_failed_append_ends_the_master_and_nothing_of_it_leaves(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="holdfast")

    async def scenario() -> None:
        async with world() as place:
            agent, watcher = await served(place), place.transport.connect("watcher")
            watcher.say(Watch(0))
            await place.until(lambda: watcher.sent)
            agent.report(agent.started(1))
            await place.until(lambda: Acknowledge(1) in agent.connection.sent)
            sent, pages, lines = list(agent.connection.sent), list(watcher.sent), len(caplog.records)
            place.journal.fails = True
            agent.report(failed(agent, 1))
            with pytest.raises(JournalError):
                await place.task
            assert place.trace[place.trace.index("failed append") + 1 :] == [], "nothing was sent after it, to anybody"
            assert agent.connection.sent == sent, "no order, no acknowledgement"
            assert watcher.sent == pages, "no page"
            assert len(caplog.records) == lines, "no log line of what was not stored"
            assert not place.journal.of(WorkerFailedRecord)

    run(scenario)


def test_a_failed_first_append_is_an_error_before_anything_listens() -> None:
    async def scenario() -> None:
        journal = SimulatedJournal()
        journal.fails = True
        with pytest.raises(JournalError):
            Master(journal, SimulatedTransport(), "demo", SETTINGS, clock)

    run(scenario)


def test_a_bug_while_a_connection_is_served_ends_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: object) -> bool:
        raise AssertionError("a bug")

    async def scenario() -> None:
        async with world() as place:
            agent = await served(place)
            monkeypatch.setattr(master_module, "_speaks_for_itself", bug)
            agent.report(agent.started(1))
            with pytest.raises(AssertionError, match="a bug"):
                await place.task

    run(scenario)


# --- batches


def test_what_waits_is_one_batch_and_one_append() -> None:
    settings = Settings(nodes_min=50, nodes_max=50, restarts_max=3)

    async def scenario() -> None:
        async with world(settings) as place:
            appends = len(place.journal.appends)
            agents = [place.agent(f"n{number}") for number in range(50)]
            await place.until(lambda: all(orders(agent, Serve) for agent in agents))
            assert len(place.journal.of(NodeJoined)) == 50 and len(place.journal.of(ViewFormed)) == 1
            assert len(place.journal.appends) - appends <= 2, "fifty nodes that come at once share an append"
            before = len(place.journal.appends)
            for agent in agents:
                agent.report(agent.started(1))
            await place.until(lambda: all(Acknowledge(1) in agent.connection.sent for agent in agents))
            assert len(place.journal.appends) - before <= 2

    run(scenario)


def test_a_batch_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(master_module, "BATCH_EVENTS_MAX", 4)

    async def scenario() -> None:
        async with world() as place:
            agent = await served(place)
            for number in range(20):
                agent.connection.say(EventReport(number + 1, 0, agent.started(1)))
            await place.until(lambda: Acknowledge(20) in agent.connection.sent)
            assert [a.number for a in agent.connection.of(Acknowledge)] == list(range(21)), "in order, none twice"

    run(scenario)


# --- agents


def test_an_agent_that_comes_back_gets_its_standing_order_and_its_repeats_change_nothing() -> None:
    async def scenario() -> None:
        async with world() as place:
            agent = await served(place)
            agent.report(agent.started(1))
            await place.until(lambda: Acknowledge(1) in agent.connection.sent)
            old, records = agent.connection, len(place.journal.records)
            agent.reconnect()
            agent.report(agent.started(1))
            await place.until(lambda: agent.connection.of(Command))
            await place.until(lambda: len(agent.connection.of(Acknowledge)) == 2)
            assert old.is_over, "an incarnation has one connection"
            assert isinstance(agent.connection.of(Command)[-1].order, Serve)
            assert len(place.journal.records) == records

    run(scenario)


def test_a_late_agent_of_a_finished_job_hears_of_its_end() -> None:
    async def scenario() -> None:
        async with world(Settings(nodes_min=1, nodes_max=1, restarts_max=0)) as place:
            agent = await served(place)
            agent.report(agent.started(1))
            agent.report(failed(agent, 1))
            await place.until(lambda: place.journal.of(JobFinished))
            agent.reconnect()  # its connection broke at the very end
            await place.until(lambda: orders(agent, Exit))
            assert not place.task.done(), "the master stays until it has heard that the agent knows"
            agent.connection.say(Farewell())
            await place.task

    run(scenario)


def test_an_agent_that_says_nothing_is_lost_after_the_silence_timeout_and_not_before() -> None:
    async def scenario() -> None:
        async with world(TWO) as place:
            silent, alive = place.agent("a"), place.agent("b")
            await place.until(lambda: orders(silent, Serve) and orders(alive, Serve))
            timeout_s, beat_s = TWO.silence_timeout_s, TWO.heartbeat_interval_s
            quiet_since = clock()
            while not place.journal.of(NodeLost):
                alive.beat()
                await asyncio.sleep(beat_s)
                assert clock() < quiet_since + 3 * timeout_s + 60
            lost = place.journal.of(NodeLost)
            assert [record.node_id for record in lost] == ["a"]
            assert lost[0].at - quiet_since >= timeout_s - 1.0
            assert silent.connection.is_over and not alive.connection.is_over
            assert Acknowledge(0) in alive.connection.sent, "heartbeats are echoed"

    run(scenario)


def test_many_agents_are_told_to_send_fewer_heartbeats_and_have_longer_to_be_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settings_module, "HEARTBEATS_PER_S_MAX", 1)
    three = Settings(nodes_min=3, nodes_max=3, restarts_max=3, heartbeat_interval_s=1.0, silence_timeout_s=1.5)

    async def scenario() -> None:
        async with world(three) as place:
            agents = [place.agent(node_id) for node_id in "abc"]
            await place.until(lambda: all(orders(agent, Serve) for agent in agents))
            assert [orders(agent, Serve)[0].heartbeat_interval_s for agent in agents] == [3.0, 3.0, 3.0]
            for _ in range(5):
                await asyncio.sleep(3.0)
                for agent in agents:
                    agent.beat()
            assert not place.journal.of(NodeLost)
            quiet_since = clock()
            await place.until_slowly(lambda: place.journal.of(NodeLost))
            assert 3.4 < clock() - quiet_since < 4.0, "the timeout, and by how much the interval is longer"

    run(scenario)


def test_few_agents_keep_the_heartbeats_they_were_started_with() -> None:
    async def scenario() -> None:
        async with world() as place:
            agent = await served(place)
            assert orders(agent, Serve)[0].heartbeat_interval_s == 0.0

    run(scenario)


def test_a_stopped_agent_is_waited_for_if_the_job_cannot_go_on_without_it() -> None:
    async def scenario() -> None:
        async with world() as place:
            agent = await served(place)
            place.stopped.add(agent.node_id)
            await asyncio.sleep(10 * SETTINGS.silence_timeout_s)
            assert not place.journal.of(NodeLost) and not agent.connection.is_over
            place.stopped.clear()
            await asyncio.sleep(0.9 * SETTINGS.silence_timeout_s)  # it goes on: it has as long as any other
            agent.beat()
            await asyncio.sleep(0.9 * SETTINGS.silence_timeout_s)
            assert not place.journal.of(NodeLost)
            await asyncio.sleep(3 * SETTINGS.silence_timeout_s)
            assert place.journal.of(NodeLost), "it is silent, and not stopped"

    run(scenario)


def test_a_stopped_agent_is_lost_if_the_job_can_go_on_without_it() -> None:
    async def scenario() -> None:
        async with world(Settings(nodes_min=1, nodes_max=2, restarts_max=3)) as place:
            silent, alive = place.agent("a"), place.agent("b")
            await place.until(lambda: orders(silent, Serve) and orders(alive, Serve))
            place.stopped.add(silent.node_id)
            for _ in range(30):
                alive.beat()
                await asyncio.sleep(TWO.heartbeat_interval_s)
            assert "a" in [record.node_id for record in place.journal.of(NodeLost)]

    run(scenario)


def test_stopped_agents_are_waited_for_if_the_job_cannot_go_on_without_any_of_them() -> None:
    """As when the master has a machine's only processes that were not suspended."""

    async def scenario() -> None:
        async with world(Settings(nodes_min=1, nodes_max=2, restarts_max=3)) as place:
            first, second = place.agent("a"), place.agent("b")
            await place.until(lambda: orders(first, Serve) and orders(second, Serve))
            place.stopped |= {"a", "b"}
            await asyncio.sleep(3.5 * SETTINGS.silence_timeout_s)
            assert not place.journal.of(NodeLost)
            place.stopped.clear()
            for _ in range(30):
                for agent in (first, second):
                    agent.beat()
                await asyncio.sleep(TWO.heartbeat_interval_s)
            assert not place.journal.of(NodeLost)

    run(scenario)


@pytest.mark.parametrize(
    "message",
    [
        EventReport(1, 0, e.WorkersStarted(node_id="b", incarnation="b.1", view=1, pids=(1,))),
        EventReport(1, 0, e.ResizeRequested(nodes=1, why="")),
        EventReport(1, 9, e.NodeLeft(node_id="a", incarnation="a.1")),
        Heartbeat(9),
        Watch(0),
    ],
    ids=["of another node", "an operator's", "a newer term's", "a newer term's heartbeat", "a watcher's"],
)
def test_a_message_that_is_not_the_agents_to_send_ends_its_connection_only(message: EventReport) -> None:
    async def scenario() -> None:
        async with world() as place:
            agent = await served(place)
            records = list(place.journal.records)
            agent.connection.say(message)
            await place.until(lambda: agent.connection.error)
            assert place.journal.records == records and not place.task.done()

    run(scenario)


@pytest.mark.parametrize("role", ["agent", "watcher"])
def test_a_connection_begins_with_its_own_first_message(role: str) -> None:
    async def scenario() -> None:
        async with world() as place:
            connection = place.transport.connect(role)  # type: ignore[arg-type]
            connection.say(Heartbeat(0))
            await place.until(lambda: connection.error)
            assert "must introduce itself" in str(connection.error)

    run(scenario)


# --- watchers and operators


def test_a_watcher_gets_every_record_once_in_pages_within_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(master_module, "PAGE_CHARS_MAX", 500)

    async def scenario() -> None:
        async with world() as place:
            watcher = place.transport.connect("watcher")
            watcher.say(Watch(0))
            agent = await served(place)
            agent.report(agent.started(1))
            await place.until(lambda: place.journal.of(WorkersStartedRecord))
            await place.until(
                lambda: any(page.last_seq == len(place.journal.records) for page in watcher.of(Page)[-1:])
            )
            pages: list[Page] = watcher.of(Page)
            assert sum(len(page.records) for page in pages) == len(place.journal.records)
            assert all(len(page.records) == 1 or sum(map(len, page.records)) < 500 for page in pages)
            late = place.transport.connect("watcher")
            late.say(Watch(10_000))
            await place.until(lambda: late.sent)
            assert late.sent[0] == Page(last_seq=len(place.journal.records), records=())

    run(scenario)


def test_a_watcher_has_the_last_record_when_the_master_ends() -> None:
    async def scenario() -> None:
        async with world(Settings(nodes_min=1, nodes_max=1, restarts_max=0)) as place:
            agent, watcher = await served(place), place.transport.connect("watcher")
            watcher.say(Watch(0))
            agent.report(agent.started(1))
            agent.report(failed(agent, 1))
            await place.until(lambda: place.journal.of(JobFinished))
            agent.connection.say(Farewell())
            await place.task
            assert watcher.of(Page)[-1].last_seq == len(place.journal.records)

    run(scenario)


def test_an_operator_gets_one_answer_after_the_append() -> None:
    async def scenario() -> None:
        async with world(Settings(nodes_min=1, nodes_max=2, restarts_max=3, settle_s=0.1)) as place:
            await served(place)
            for request, accepted in (
                (OperatorRequest(e.ResizeRequested(nodes=2, why="")), True),
                (OperatorRequest(e.DrainRequested(node_id="nowhere", why="")), False),
            ):
                operator = place.transport.connect("watcher")
                operator.say(request)
                await place.until(partial(getattr, operator, "is_over"))
                (answer,) = operator.of(OperatorAnswer)
                assert (answer.accepted, answer.seq) == (accepted, len(place.journal.records))

    run(scenario)


# --- a master that starts again


def test_a_restarted_master_replays_its_journal_and_opens_the_next_term() -> None:
    async def scenario() -> None:
        async with world() as place:
            agent = await served(place)
            agent.report(agent.started(1))
            await place.until(lambda: Acknowledge(1) in agent.connection.sent)
        async with world(journal=SimulatedJournal(records=place.journal.records)) as again:
            assert [record.term for record in again.journal.of(TermBegan)] == [1, 2]
            back = again.agent("a")
            await again.until(lambda: orders(back, Serve))
            command = orders(back, Serve)[0]
            assert command.term == 2 and isinstance(command.order, Serve) and command.order.view == 1
            assert len(again.journal.of(ViewFormed)) == 1, "nothing is decided again"

    run(scenario)


def test_a_master_that_stood_still_blames_no_agent() -> None:
    async def scenario() -> None:
        async with world(TWO) as place:
            first, second = place.agent("a"), place.agent("b")
            await place.until(lambda: orders(first, Serve) and orders(second, Serve))
            asyncio.get_running_loop().now += 10 * TWO.silence_timeout_s  # type: ignore[attr-defined]
            await place.until(lambda: first.connection.is_over and second.connection.is_over)
            first.reconnect()
            second.reconnect()
            await place.until(lambda: orders(first, Serve) and orders(second, Serve))
            assert not place.journal.of(NodeLost)
            assert [record.term for record in place.journal.of(TermBegan)] == [1, 2]

    run(scenario)


def test_a_master_without_its_agent_ends_when_no_other_is_connected() -> None:
    async def scenario() -> None:
        async with world() as place:
            agent = await served(place)
            place.master.orphan()
            await asyncio.sleep(1.0)
            assert not place.task.done(), "another agent needs it"
            agent.connection.finish()
            await place.task

    run(scenario)


# --- stacks on request


def test_stacks_of_all_agents_are_passed_on_and_one_that_does_not_answer_is_named() -> None:
    async def scenario() -> None:
        async with world(TWO) as place:
            answers, silent = place.agent("a"), place.agent("b")
            await place.until(lambda: orders(answers, Serve) and orders(silent, Serve))
            journaled = len(place.journal.records)
            operator = place.transport.connect("watcher")
            operator.say(AskStacks("demo"))
            await place.until(lambda: answers.connection.of(ReadStacks) and silent.connection.of(ReadStacks))
            (request,) = answers.connection.of(ReadStacks)
            report = NodeStacks(request.request, "a", (StackGroupMessage((0,), "thread MainThread"),))
            answers.connection.say(NodeStacks(99, "a", ()))  # of a request that is over
            answers.connection.say(report)
            for _ in range(15):
                answers.beat()
                silent.beat()
                await asyncio.sleep(1.0)
            assert operator.sent[0] == report
            answer = operator.sent[1]
            assert isinstance(answer, OperatorAnswer) and not answer.accepted
            assert "1 of 2 nodes have not answered" in answer.text and answer.text.endswith(": b")
            assert operator.is_over
            assert len(place.journal.records) == journaled, "asking is no decision"

    run(scenario)


def test_stacks_of_another_job_are_refused() -> None:
    async def scenario() -> None:
        async with world() as place:
            await served(place)
            operator = place.transport.connect("watcher")
            operator.say(AskStacks("other"))
            await place.until(lambda: operator.sent)
            assert operator.sent == [OperatorAnswer(False, "this master runs job demo, not other")]

    run(scenario)
