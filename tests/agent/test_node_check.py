"""This node's part in a check: a task is done once, a result always comes, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.agent import node_check as module
from holdfast.agent.launch.launcher import Launcher
from holdfast.agent.node_check import NodeCheck
from holdfast.core.health.findings import CheckResult, CheckTask
from support.nest import ENVIRONMENT, children
from support.worker_groups import agent_config

LONG_S = 60.0
ALONE = CheckTask(checkup="1.1", round=0, kind="alone")
READY = CheckTask(checkup="1.1", round=0, kind="ready")


class UnderTest:
    def __init__(self, directory: Path, launcher: Launcher) -> None:
        self.results: asyncio.Queue[tuple[CheckTask, CheckResult]] = asyncio.Queue()
        config = agent_config(directory, accelerator="cpu")
        self.examination = NodeCheck(config, launcher, lambda task, result: self.results.put_nowait((task, result)))

    async def result(self) -> tuple[CheckTask, CheckResult]:
        return await asyncio.wait_for(self.results.get(), LONG_S)

    @property
    def pid(self) -> int:
        assert self.examination._process is not None
        return self.examination._process.child.pid


@contextlib.asynccontextmanager
async def examination(directory: Path) -> AsyncIterator[UnderTest]:
    before = children()
    launcher = await Launcher.start("cold", env=ENVIRONMENT)
    under_test = UnderTest(directory, launcher)
    try:
        yield under_test
    finally:
        await under_test.examination.close()
        await launcher.close()
    assert children() <= before, "a process was left behind"


def run(story: Callable[[UnderTest], object], directory: Path) -> None:
    async def play() -> None:
        async with examination(directory) as under_test:
            await story(under_test)  # type: ignore[misc]

    asyncio.run(play())


def test_a_task_is_done_once_and_the_process_stays_for_the_next_round(tmp_path: Path) -> None:
    async def story(node: UnderTest) -> None:
        node.examination.want(ALONE)
        task, result = await node.result()
        pid = node.pid
        assert task == ALONE and not result.problems and result.store_port > 0 and result.accelerator == "cpu"
        assert {timing.stage for timing in result.timings} == {"matmul", "bandwidth", "disk"}
        node.examination.want(ALONE)  # the order is repeated
        again = CheckTask(checkup="1.1", round=3, kind="ready")
        node.examination.want(again)
        task, result = await node.result()
        assert task == again and node.results.empty() and node.pid == pid

    run(story, tmp_path)


def test_a_process_that_dies_is_a_result_and_the_next_task_gets_another(tmp_path: Path) -> None:
    async def story(node: UnderTest) -> None:
        node.examination.want(READY)
        _, first = await node.result()
        os.kill(node.pid, signal.SIGKILL)
        node.examination.want(ALONE)
        _, result = await node.result()
        assert "was killed by SIGKILL" in result.problems[0].text
        node.examination.want(CheckTask(checkup="1.1", round=2, kind="ready"))
        _, third = await node.result()
        assert not third.problems and first.store_port

    run(story, tmp_path)


def test_one_that_does_not_come_back_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(node: UnderTest) -> None:
        node.examination.want(READY)
        await node.result()
        os.kill(node.pid, signal.SIGSTOP)
        monkeypatch.setattr(module, "ALONE_TIMEOUT_S", 0.2)
        node.examination.want(ALONE)
        _, result = await node.result()
        assert "did not come back" in result.problems[0].text

    run(story, tmp_path)


def test_when_there_is_something_better_to_do_it_ends_at_once(tmp_path: Path) -> None:
    async def story(node: UnderTest) -> None:
        node.examination.want(READY)
        await node.result()
        node.examination.want(ALONE)
        node.examination.want(None)
        await asyncio.sleep(0)
        assert node.examination._process is None and node.results.empty()

    run(story, tmp_path)


@pytest.mark.parametrize(
    ("status", "text"), [(9, "was killed by SIGKILL"), (40, "was killed by signal 40"), (768, "code 3")]
)
def test_the_end_of_the_examiner_is_described_also_for_signals_without_a_name(status: int, text: str) -> None:
    async def test() -> str:
        errors = os.memfd_create("stderr")
        child: Any = SimpleNamespace(wait=lambda: asyncio.sleep(0, status))
        ours: Any = None
        try:
            return await module.CheckProcess(child, ours, errors).describe_end()
        finally:
            os.close(errors)

    assert text in asyncio.run(test())
