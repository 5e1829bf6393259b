"""Helpers that hang are told from those that are slow, and killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.agent import master_supervisor, rendezvous_stores
from holdfast.agent.config import MasterPlan
from holdfast.agent.helper_watch import Helper, StoppedWatch, UnansweredTime, kill_unless_answered
from holdfast.agent.launch import launcher as launching
from holdfast.agent.master_supervisor import MasterSupervisor
from holdfast.agent.rendezvous_stores import StorePorts
from holdfast.util.processes import process_state
from support.nest import Nest, eventually, write

SLEEPER = [sys.executable, "-c", "import time; time.sleep(1000)"]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SLEEPER) as process:
        yield process
        process.kill()


def hangs_after(ticks: list[tuple[float, int, str, float]], limit_s: float = 10.0) -> int | None:
    """Return after which tick (time, answers, state, processor time) the process is found to hang."""
    unanswered = UnansweredTime(limit_s)
    for index, (at, answers, state, spent_s) in enumerate(ticks):
        if unanswered.look(answers, state, spent_s, at, tick_s=1.0):
            return index
    return None


def test_a_process_that_sleeps_and_does_not_answer_hangs() -> None:
    assert hangs_after([(float(i), 7, "S", 0.0) for i in range(20)]) == 11


def test_every_answer_starts_the_wait_again() -> None:
    assert hangs_after([(float(i), i // 5, "S", 0.0) for i in range(100)]) is None


def test_waiting_for_a_disk_does_not_count() -> None:
    assert hangs_after([(float(i), 7, "D", 0.0) for i in range(1000)]) is None


def test_a_process_that_computes_has_eight_times_as_long() -> None:
    hung = hangs_after([(float(i), 7, "R", float(i)) for i in range(200)])
    assert hung is not None and hung > 80


def test_time_in_which_the_watcher_itself_did_not_run_does_not_count() -> None:
    assert hangs_after([(100.0 * i, 7, "S", 0.0) for i in range(100)]) is None


def test_a_stopped_helper_is_killed_and_one_that_goes_on_is_not(sleeper: subprocess.Popen[bytes]) -> None:
    killed: list[str] = []
    watch = StoppedWatch(lambda: [Helper("the sleeper", sleeper.pid, lambda: killed.append("killed"))])
    for _ in range(3):  # stopped for a moment, again and again
        sleeper.send_signal(signal.SIGSTOP)
        eventually(lambda: process_state(sleeper.pid) == "T", "it is stopped")
        watch.look()
        watch.look()
        sleeper.send_signal(signal.SIGCONT)
        eventually(lambda: process_state(sleeper.pid) != "T", "it goes on")
        watch.look()
    assert not killed
    sleeper.send_signal(signal.SIGSTOP)
    eventually(lambda: process_state(sleeper.pid) == "T", "it is stopped")
    for _ in range(5):
        watch.look()
    assert killed == ["killed"]


def test_a_fork_server_that_does_not_answer_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Nest("cold") as nest:
        nest.do(nest.launcher.ready())
        monkeypatch.setattr(launching, "LAUNCH_LIMIT_S", 0.5)
        hung = nest.launcher.server_pid
        os.kill(hung, signal.SIGSTOP)
        write(tmp_path / "script.py", "print('ran')")
        assert nest.run(["script.py"], tmp_path).stdout == "ran\n"
        assert nest.launcher.server_pid != hung


def test_a_store_host_that_does_not_answer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    real, limits = kill_unless_answered, iter([60.0, 0.5])
    monkeypatch.setattr(
        rendezvous_stores,
        "kill_unless_answered",
        lambda answer, helper, limit_s: real(answer, helper, next(limits, limit_s)),
    )

    async def open_store(nest: Nest, ports: StorePorts, view: int) -> int:
        assert ports.reserve(view, ports.offer())
        listener = ports.claim(view)
        assert listener is not None
        await nest.launcher.stores.open(view, "127.0.0.1", listener)
        return nest.launcher.stores.host_pid

    async def open_twice(nest: Nest) -> None:
        ports = StorePorts("127.0.0.1")
        hung = await open_store(nest, ports, 1)
        os.kill(hung, signal.SIGSTOP)
        assert await open_store(nest, ports, 2) != hung
        assert await asyncio.wait_for(nest.launcher.stores.lost(), 10) == {1}
        ports.close()

    with Nest("cold") as nest:
        nest.do(open_twice(nest))


def test_a_master_that_does_not_answer_is_killed(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(master_supervisor, "ANSWER_LIMIT_S", 0.2)
    monkeypatch.setattr(master_supervisor, "LOOK_EVERY_S", 0.05)

    async def watch() -> None:
        plan = MasterPlan(
            arguments=(), journal=Path("journal.sqlite"), listen_host="127.0.0.1", job_id="job", required=True
        )
        supervisor = MasterSupervisor(plan, 0, {})
        supervisor._process = sleeper
        heard = iter(range(20))  # it answers twenty times, then no more
        watching = asyncio.create_task(supervisor.watch_answers(lambda: next(heard, 20), 0.1))
        assert await asyncio.wait_for(supervisor._wait(), 20) == -signal.SIGKILL
        assert next(heard, None) is None
        watching.cancel()

    asyncio.run(watch())
