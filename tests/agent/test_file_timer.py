"""The pipe by which workers set timers, with torch's own client on the other side."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.timer import FileTimerClient

from holdfast.agent.file_timer import FileTimer, timer_file
from holdfast.errors import UsageError

DEADLINE_S = 30.0


def run_with_client(path: Path, *requests: tuple[str, float]) -> list[tuple[int, int, str]]:
    """What has expired when the last request's timer, which is called "last", has."""
    expired: list[tuple[int, int, str]] = []

    async def serve() -> None:
        done = asyncio.Event()

        def note(pid: int, number: int, why: str) -> None:
            expired.append((pid, number, why))
            if "'last'" in why:
                done.set()

        timer = FileTimer(str(path), note)
        thread = threading.Thread(target=send)
        thread.start()
        await asyncio.wait_for(done.wait(), DEADLINE_S)
        thread.join()
        timer.close()

    def send() -> None:
        client = FileTimerClient(str(path), signal.SIGKILL)
        for scope, after_s in requests:
            client.release(scope) if after_s < 0 else client.acquire(scope, time.time() + after_s)
        client.acquire("last", time.time() + 0.3)

    asyncio.run(serve())
    return expired


def test_a_timer_that_is_not_released_expires_and_others_do_not(tmp_path: Path) -> None:
    path = tmp_path / "timer"
    found = run_with_client(path, ("long", 1000.0), ("released", 0.1), ("released", -1.0), ("short", 0.05))
    assert [(pid, number) for pid, number, _ in found] == [(os.getpid(), signal.SIGKILL)] * 2
    assert [why.split("'")[1] for _, _, why in found] == ["short", "last"]
    assert not path.exists()


def test_a_pipe_that_a_killed_agent_left_is_replaced_and_another_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "timer"
    os.mkfifo(path)
    assert len(run_with_client(path)) == 1
    path.write_text("mine")
    with pytest.raises(UsageError, match=r"TORCHELASTIC_TIMER_FILE .* cannot be made a named pipe: File exists"):
        run_with_client(path)
    assert path.read_text() == "mine"


def test_lines_that_are_no_requests_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "timer"

    async def serve() -> int:
        expired: list[int] = []
        done = asyncio.Event()
        timer = FileTimer(str(path), lambda pid, number, why: (expired.append(pid), done.set())[0])
        with path.open("wb", buffering=0) as pipe:
            pipe.write(b'nonsense\n{"pid": "x"}\n' + b"z" * 9_000 + b"\n")
            pipe.write(b'{"version": 1, "pid": 7, "scope_id": "s", "expiration_time": 1, ')
            pipe.write(b'"signal": 9}\n{"pid": 8, "scope_id": "s", "expiration_time": 1, "signal": 0}\n')
        await asyncio.wait_for(done.wait(), DEADLINE_S)
        timer.close()
        return sum(expired)

    assert asyncio.run(serve()) == 7


def test_it_is_on_only_if_the_variable_says_so() -> None:
    assert timer_file({}) == timer_file({"TORCHELASTIC_TIMER_FILE": "/x"}) == ""
    assert timer_file({"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_TIMER_FILE": "/x"}) == "/x"
    assert Path(timer_file({"TORCHELASTIC_ENABLE_FILE_TIMER": "1"})).name.startswith("watchdog_timer_")
