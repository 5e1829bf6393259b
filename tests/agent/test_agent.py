"""What an agent makes of its orders: the newest counts, none blocks the next, and a node that must go takes its leave.

The master is away: the test gives the orders, and reads what would have been reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.agent import Agent
from holdfast.agent.hangs import HangWatch
from holdfast.agent.launch.launcher import Launcher
from holdfast.agent.results import Result
from holdfast.agent.retry_watch import RetryWatch
from holdfast.agent.sample_audit_reader import SampleAuditReader
from holdfast.agent.step_times import StepTimeWatch
from holdfast.core.events import Event
from holdfast.core.orders import Exit, Hold
from holdfast.core.records import Outcome
from holdfast.core.strategies import Strategy
from holdfast.util import tasks
from holdfast.util.logs import NOTICE
from support.nest import ENVIRONMENT, children, is_running
from support.worker_groups import WorkerGroupUnderTest, agent_config, serve

LONG_S = 30.0


class AgentUnderTest(WorkerGroupUnderTest):
    """An agent without a master."""

    def __init__(self, directory: Path, launcher: Launcher, **changes: Any) -> None:
        self.directory = directory
        self.launcher = launcher
        self.events: list[Event] = []
        self.agent = Agent(agent_config(directory, **changes), launcher)
        self.agent._uplink.report = self.events.append  # type: ignore[method-assign, assignment]
        self.agent._reports._send = self.events.append
        self.worker_group = self.agent._worker_group
        self.running = asyncio.create_task(self.agent.run())

    async def begin(self, **changes: Any) -> list[int]:
        await self.until(lambda: self.agent._worker_server.name, "the agent listens")
        self.agent.obey(serve(1, **changes))
        await self.event("ViewJoined", view=1)
        return self.pids()

    async def result(self) -> Result:
        return await asyncio.wait_for(self.running, LONG_S)


@contextlib.asynccontextmanager
async def agent(directory: Path, **changes: Any) -> AsyncIterator[AgentUnderTest]:
    before = children()
    launcher = await Launcher.start("cold", env=ENVIRONMENT)
    under_test = AgentUnderTest(directory, launcher, **changes)
    try:
        yield under_test
    finally:
        under_test.agent.obey(Exit(outcome=Outcome.STOPPED, exit_code=0, why="the test is over", cause=None))
        await asyncio.wait_for(under_test.running, LONG_S)
    assert children() <= before


def test_a_node_that_gets_a_signal_waits_for_the_step_boundary(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent(tmp_path, shutdown_timeout_s=LONG_S) as job:
            pids = await job.begin()
            job.agent._on_signal(signal.SIGTERM)
            assert job.of("NodeLeaving")
            job.agent.obey(serve(1))  # as the master says while it has no other view yet
            await asyncio.sleep(0.1)
            assert all(map(is_running, pids)) and not job.running.done()
            job.agent.obey(Hold(job_id="job", why="this node is leaving", release=2))
            for pid in pids:
                await job.sent(pid, "release", view=2)
            assert (await job.result()).exit_code == 128 + signal.SIGTERM
            assert job.of("NodeLeft") and not job.of("WorkerFailed")

    asyncio.run(test())


def test_a_recovery_goes_on_while_a_node_is_about_to_go(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent(tmp_path, shutdown_timeout_s=LONG_S) as job:
            pids = await job.begin()
            job.agent._on_signal(signal.SIGTERM)
            os.kill(pids[0], signal.SIGKILL)
            await job.event("WorkerFailed")
            job.agent.obey(serve(2, keeps_workers=True, strategy=Strategy.RECOVER_IN_PLACE))
            await job.event("ViewJoined", view=2)
            job.agent.obey(Hold(job_id="job", why="nobody is left to train", release=0))
            assert (await job.result()).exit_code == 128 + signal.SIGTERM

    asyncio.run(test())


def test_a_node_that_stands_by_says_so_to_the_person_who_started_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not only with -v: it may stand by at the port of another job."""

    async def test() -> None:
        async with agent(tmp_path) as job:
            await job.until(lambda: job.agent._worker_server.name, "the agent listens")
            job.agent.obey(Hold(job_id="job", why="standing by: the job runs on 1 node"))
            await job.until(lambda: "holding: standing by" in caplog.text, "the line")

    with caplog.at_level(NOTICE, "holdfast"):
        asyncio.run(test())


def test_it_does_not_wait_for_ever(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent(tmp_path, shutdown_timeout_s=0.3) as job:
            await job.begin()
            job.agent._on_signal(signal.SIGTERM)
            assert (await job.result()).exit_code == 128 + signal.SIGTERM
            assert not job.of("WorkerFailed")

    asyncio.run(test())


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent(tmp_path, shutdown_timeout_s=10_000.0) as job:
            await job.begin()
            job.agent._on_signal(signal.SIGTERM)
            await asyncio.sleep(0.05)
            assert not job.running.done()
            job.agent._on_signal(signal.SIGTERM)
            assert (await job.result()).exit_code == 128 + signal.SIGTERM

    asyncio.run(test())


def test_a_worker_that_a_skipped_view_wanted_ended_is_ended(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent(tmp_path) as job:
            pids = await job.begin()
            os.kill(pids[1], signal.SIGSTOP)
            job.agent.obey(serve(2, keeps_workers=True, strategy=Strategy.RECOVER_IN_PLACE, replaced=(1,)))
            job.agent.obey(serve(3, keeps_workers=True, strategy=Strategy.RECOVER_IN_PLACE))
            await job.event("ViewJoined", view=3)
            assert job.pids()[0::2] == pids[0::2] and job.pids()[1] != pids[1]
            assigned = job.messages_to(pids[0], "assign")
            assert not assigned or assigned[0]["assignment"]["view"] == 3

    asyncio.run(test())


def test_a_newer_order_does_not_wait_for_processes_that_are_slow_to_start(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent(tmp_path) as job:
            pids = await job.begin()
            os.kill(job.launcher.server_pid, signal.SIGSTOP)
            os.kill(pids[1], signal.SIGKILL)
            await job.event("WorkerFailed", view=1)
            job.agent.obey(serve(2, keeps_workers=True, strategy=Strategy.RECOVER_IN_PLACE))
            await job.sent(pids[0], "assign", view=2)
            job.agent.obey(serve(3, keeps_workers=True, workers=2, strategy=Strategy.ELASTIC_TRAINING))
            assert (await job.sent(pids[2], "assign", view=3))["rank"] == 1
            job.agent.obey(serve(4, keeps_workers=True, strategy=Strategy.RECOVER_IN_PLACE))
            await job.sent(pids[0], "assign", view=4)
            os.kill(job.launcher.server_pid, signal.SIGCONT)
            await job.event("ViewJoined", view=4)
            assert pids[0] in job.pids() and pids[2] in job.pids()

    asyncio.run(test())


def test_a_stopped_checksummer_is_ended_and_the_next_image_starts_another(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent(tmp_path) as job:
            await job.begin()
            checksummer = job.agent._snapshots.checksummer
            checksummer.wake(tmp_path)
            stopped = checksummer.process
            assert stopped is not None
            os.kill(stopped.pid, signal.SIGSTOP)
            await job.until(lambda: stopped.poll() == -signal.SIGKILL, "it is killed")
            checksummer.wake(tmp_path)
            assert checksummer.process is not None and checksummer.process.pid != stopped.pid

    asyncio.run(test())


def test_a_drained_node_reports_that_it_leaves_and_exits_with_0(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent(tmp_path) as job:
            pids = await job.begin()
            job.agent.obey(Hold(job_id="job", why="drained", release=2, leaving=True))
            for pid in pids:
                await job.sent(pid, "release", view=2)
            result = await job.result()
            assert (result.exit_code, result.why) == (0, "drained")
            assert job.of("NodeLeft") and not job.of("WorkerFailed")

    asyncio.run(test())


@pytest.mark.parametrize("watch", [HangWatch, StepTimeWatch, RetryWatch, SampleAuditReader])
def test_a_background_watch_that_dies_of_a_bug_ends_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watch: type
) -> None:
    bugs: list[BaseException] = []
    monkeypatch.setattr(tasks, "end_process", bugs.append)

    async def fail(self: object) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(watch, "run", fail)

    async def test() -> None:
        async with agent(tmp_path) as job:
            await job.until(lambda: bugs, "the bug is noticed")

    asyncio.run(test())
    assert [str(bug) for bug in bugs] == ["a bug"]


def test_a_bug_in_a_workers_message_ends_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bugs: list[BaseException] = []
    monkeypatch.setattr(tasks, "end_process", bugs.append)

    async def test() -> None:
        async with agent(tmp_path) as job:
            [first, *_] = await job.begin()
            monkeypatch.setattr(job.worker_group, "received", lambda worker, message: 1 / 0)
            job.do(first, "commit 1")
            await job.until(lambda: bugs, "the bug is noticed")

    asyncio.run(test())
    assert isinstance(bugs[0], ZeroDivisionError)
