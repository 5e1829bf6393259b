"""What workers write is kept in files; the console shows what torchrun would show, exactly once and in order."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent import worker_logs
from holdfast.agent.worker_logs import (
    ConsoleFeed,
    FollowedFile,
    LogPlan,
    WorkerLogFiles,
    WorkerLogs,
    read_tail,
    tail_lines,
)
from holdfast.core.faults.failures import Exited, Failure
from holdfast.errors import LaunchError


class Screen:
    """A console made of two files, and the logs that feed it."""

    def __init__(self, directory: Path, **choices: Any) -> None:
        self.run_dir = directory / "run"
        self.paths = (directory / "console_out", directory / "console_err")
        self.fds = tuple(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for path in self.paths)
        plan = LogPlan(run_dir=self.run_dir, **choices)
        self.logs = WorkerLogs(plan, stdout_fd=self.fds[0], stderr_fd=self.fds[1])

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self.logs.close()
        for fd in self.fds:
            os.close(fd)

    def run(self, code: str, view: int = 1, local_rank: int = 0, rank: int = 0) -> WorkerLogFiles:
        """A worker from start to end, and its output drained."""
        files = self.logs.open(view, local_rank, rank)
        process = start(code, files)
        assert process.wait(30) == 0
        assert asyncio.run(self.logs.drain())
        return files

    @property
    def out(self) -> bytes:
        return self.paths[0].read_bytes()

    @property
    def err(self) -> bytes:
        return self.paths[1].read_bytes()


def start(code: str, files: WorkerLogFiles, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-S", "-E", "-c", code, *arguments]
    process = subprocess.Popen(command, stdout=files.stdout_fd, stderr=files.stderr_fd)
    files.close()
    return process


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        await asyncio.sleep(0.002)


BOTH = "import sys; print('to out'); print('to err', file=sys.stderr)"


def test_every_stream_is_in_its_file_and_unchanged_on_the_console(tmp_path: Path) -> None:
    with Screen(tmp_path) as screen:
        files = screen.run(BOTH, view=3, local_rank=1)
        assert (screen.out, screen.err) == (b"to out\n", b"to err\n")
    directory = tmp_path / "run" / "attempt_2" / "1"
    assert (directory / "stdout.log").read_bytes() == b"to out\n"
    assert (directory / "stderr.log").read_bytes() == b"to err\n"
    assert files.stdout_path == str(directory / "stdout.log")
    assert files.stderr_path == str(directory / "stderr.log")
    assert files.error_file == str(directory / "error.json")


@pytest.mark.parametrize(
    ("choices", "out", "err"),
    [
        ({"redirects": 1}, b"", b"to err\n"),
        ({"redirects": 2}, b"to out\n", b""),
        ({"redirects": 3}, b"", b""),
        ({"redirects": {0: 3}}, b"", b""),
        ({"redirects": {1: 3}}, b"to out\n", b"to err\n"),
        ({"tee": 1}, b"[default0]:to out\n", b"to err\n"),
        ({"tee": 3, "role": "trainer"}, b"[trainer0]:to out\n", b"[trainer0]:to err\n"),
        ({"tee": {0: 2}}, b"to out\n", b"[default0]:to err\n"),
        ({"redirects": 3, "tee": 1}, b"[default0]:to out\n", b""),
        ({"local_ranks_filter": frozenset({1})}, b"", b""),
        ({"tee": 3, "local_ranks_filter": frozenset({1})}, b"", b""),
        ({"tee": 3, "local_ranks_filter": frozenset({0, 1})}, b"[default0]:to out\n", b"[default0]:to err\n"),
        (
            {"tee": 1, "role": "t", "prefix_template": "<${role_name} ${rank} ${local_rank} ${other}> "},
            b"<t 7 0 ${other}> to out\n",
            b"to err\n",
        ),
    ],
)
def test_console_follows_torchrun(tmp_path: Path, choices: dict[str, Any], out: bytes, err: bytes) -> None:
    with Screen(tmp_path, **choices) as screen:
        files = screen.run(BOTH, rank=7)
        assert (screen.out, screen.err) == (out, err)
    assert Path(files.stdout_path).read_bytes() == b"to out\n"
    assert Path(files.stderr_path).read_bytes() == b"to err\n"


def test_filters_copy_whole_matching_lines_of_teed_streams(tmp_path: Path) -> None:
    async def scenario(screen: Screen) -> None:
        files = screen.logs.open(1, 0, 0)
        assert files.stdout_fd is not None and files.stderr_fd is not None
        os.write(files.stdout_fd, b"loss=1\nnoise\nlo")
        await until(lambda: screen.out.endswith(b"lo"), "the partial line on the console")
        os.write(files.stdout_fd, b"ss=2\r\nlast step 9")
        os.write(files.stderr_fd, b"loss=3\n")
        files.close()
        assert await screen.logs.drain()

    choices = {"tee": {0: 1}, "duplicate_stdout_filters": ("loss", "step"), "duplicate_stderr_filters": ("loss",)}
    with Screen(tmp_path, **choices) as screen:
        asyncio.run(scenario(screen))
        screen.run("print('loss of a rank without tee')", local_rank=1)
    attempt = tmp_path / "run" / "attempt_0"
    expected = b"[default0]:loss=1\n[default0]:loss=2\n[default0]:last step 9\n"
    assert (attempt / "filtered_stdout.log").read_bytes() == expected
    assert not (attempt / "filtered_stderr.log").exists()


def test_lines_of_several_ranks_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_logs, "PARTIAL_LINE_WAIT_S", 60.0)  # a busy machine may stop a writer in mid-line
    code = """
import os, sys
for n in range(300):
    for piece in (b'rank ', sys.argv[1].encode(), b' line ', str(n).encode(), b'\\n'):
        os.write(1, piece)
"""
    with Screen(tmp_path, tee={1: 1}) as screen:
        workers = [start(code, screen.logs.open(1, rank, rank), str(rank)) for rank in range(3)]
        assert [worker.wait(60) for worker in workers] == [0, 0, 0]
        assert asyncio.run(screen.logs.drain())
        lines = screen.out.decode().splitlines()
    for rank, prefix in ((0, ""), (1, "[default1]:"), (2, "")):
        mine = [line for line in lines if f"rank {rank} " in line]
        assert mine == [f"{prefix}rank {rank} line {n}" for n in range(300)]
    assert len(lines) == 900


class Steps:
    """Followed files stepped by hand, at times of our choosing."""

    def __init__(self, directory: Path, count: int = 1) -> None:
        self.paths = [directory / str(n) for n in range(count)]
        for path in self.paths:
            path.touch()
        self.files = [FollowedFile(path, b"[%d]:" % n) for n, path in enumerate(self.paths)]
        self.screen = directory / "screen"
        self.fd = os.open(self.screen, os.O_WRONLY | os.O_CREAT)
        self.feed = ConsoleFeed(self.fd)

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files:
            file.close()
        os.close(self.fd)

    def write(self, data: bytes, now: float, file: int = 0) -> bytes:
        """What the whole screen shows after this was written and every file looked at."""
        with self.paths[file].open("ab") as stream:
            stream.write(data)
        for followed in self.files:
            followed.step(self.feed, now)
        return self.screen.read_bytes()


def test_a_partial_line_is_shown_after_a_while_and_continued_without_a_second_prefix(tmp_path: Path) -> None:
    with Steps(tmp_path) as steps:
        assert steps.write(b"first\nPassword", 10.0) == b"[0]:first\n"
        assert steps.write(b"? ", 10.15) == b"[0]:first\n"
        assert steps.write(b"", 10.25) == b"[0]:first\n[0]:Password? "
        assert steps.write(b"yes\nlast\n", 11.0) == b"[0]:first\n[0]:Password? yes\n[0]:last\n"


def test_a_line_continued_after_another_ranks_gets_its_prefix_again(tmp_path: Path) -> None:
    with Steps(tmp_path, count=2) as steps:
        steps.write(b"50%", 10.0)
        assert steps.write(b"", 10.3) == b"[0]:50%"
        assert steps.write(b" hello\n", 10.4, file=1) == b"[0]:50%[1]: hello\n"
        assert steps.write(b" 60%\n", 10.5) == b"[0]:50%[1]: hello\n[0]: 60%\n"


def test_line_end_in_two_pieces_gets_one_prefix(tmp_path: Path) -> None:
    with Steps(tmp_path) as steps:
        assert steps.write(b"a\r", 10.0) == b""
        assert steps.write(b"\nb\r\n", 10.05) == b"[0]:a\r\n[0]:b\r\n"


def test_drain_waits_for_no_line_end_and_bytes_are_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_logs, "PARTIAL_LINE_WAIT_S", 60.0)
    with Screen(tmp_path) as screen:
        screen.run(r"import os; os.write(1, b'\r 10%\r 20%\r\n\x00\xff\xfe no newline at the end')")
        assert screen.out == b"\r 10%\r 20%\r\n\x00\xff\xfe no newline at the end"


def test_large_output_and_a_line_without_end_are_shown_once_in_order(tmp_path: Path) -> None:
    code = """
import sys
for n in range(100_000): print(n)
sys.stdout.write('x' * 3_000_000)
"""
    with Screen(tmp_path) as screen:
        screen.run(code)
        assert screen.out == b"".join(b"%d\n" % n for n in range(100_000)) + b"x" * 3_000_000


def test_next_attempt_keeps_the_old_files_and_shows_both_once(tmp_path: Path) -> None:
    with Screen(tmp_path) as screen:
        screen.run("print('first life', end='')", view=1)
        screen.run("print('second life')", view=2)
        assert screen.out == b"first lifesecond life\n"
        assert (tmp_path / "run" / "attempt_0" / "0" / "stdout.log").read_bytes() == b"first life"
        assert (tmp_path / "run" / "attempt_1" / "0" / "stdout.log").read_bytes() == b"second life\n"


def test_output_of_an_earlier_run_in_the_same_place_is_not_shown_again(tmp_path: Path) -> None:
    with Screen(tmp_path) as screen:
        files = screen.run("print('before')")
        Path(files.error_file).write_text("{}")
    with Screen(tmp_path) as screen:
        files = screen.run("print('after')")
        assert screen.out == b"before\nafter\n"
    assert Path(files.stdout_path).read_bytes() == b"before\nafter\n"
    assert files.stdout_start_bytes == len("before\n")
    assert not Path(files.error_file).exists()
    assert [path.read_text() for path in Path(files.error_file).parent.glob("error.json.*")] == ["{}"]


def run_on_pipe(tmp_path: Path, scenario: Callable[[WorkerLogs, int], Coroutine[None, None, None]]) -> None:
    """Run with a pipe for the console's stdout. The scenario owns the reading end."""
    reader, writer = os.pipe()
    feed = WorkerLogs(LogPlan(run_dir=tmp_path / "run"), stdout_fd=writer, stderr_fd=writer)
    try:
        asyncio.run(scenario(feed, reader))
    finally:
        feed.close()
        os.close(writer)


def test_blocked_console_stops_neither_worker_nor_agent_and_loses_nothing(tmp_path: Path) -> None:
    expected = b"".join(b"line %d\n" % n for n in range(100_000))

    async def scenario(feed: WorkerLogs, reader: int) -> None:
        process = start("for n in range(100_000): print('line', n)", feed.open(1, 0, 0))
        assert await asyncio.to_thread(process.wait, 30) == 0
        begun_at = time.monotonic()
        assert not await feed.drain(stall_s=0.3)
        assert time.monotonic() - begun_at < 10

        shown = asyncio.create_task(asyncio.to_thread(read_exactly, reader, len(expected)))
        assert await feed.drain()
        assert await shown == expected
        os.close(reader)

    run_on_pipe(tmp_path, scenario)


def read_exactly(fd: int, size_bytes: int) -> bytes:
    parts: list[bytes] = []
    while size_bytes and (part := os.read(fd, size_bytes)):
        parts.append(part)
        size_bytes -= len(part)
    return b"".join(parts)


def test_non_blocking_console_loses_nothing(tmp_path: Path) -> None:
    async def scenario(feed: WorkerLogs, reader: int) -> None:
        process = start("print('x' * 300_000)", feed.open(1, 0, 0))
        assert await asyncio.to_thread(process.wait, 30) == 0
        assert not await feed.drain(stall_s=0.2)  # the pipe is full
        shown = asyncio.create_task(asyncio.to_thread(read_exactly, reader, 300_001))
        assert await feed.drain()
        assert await shown == b"x" * 300_000 + b"\n"
        os.close(reader)

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    feed = WorkerLogs(LogPlan(run_dir=tmp_path / "run"), stdout_fd=writer, stderr_fd=writer)
    asyncio.run(scenario(feed, reader))
    feed.close()
    os.close(writer)


def test_closed_console_is_forgotten_and_the_files_are_complete(tmp_path: Path) -> None:
    async def scenario(feed: WorkerLogs, reader: int) -> None:
        files = feed.open(1, 0, 0)
        os.close(reader)
        process = start("print('x\\n' * 50_000, end='')", files)
        assert await asyncio.to_thread(process.wait, 30) == 0
        assert await feed.drain()
        assert Path(files.stdout_path).stat().st_size == 100_000

    run_on_pipe(tmp_path, scenario)


def test_a_stuck_console_does_not_keep_the_agent_from_exiting(tmp_path: Path) -> None:
    code = """
import os, subprocess, sys
from pathlib import Path
from holdfast.agent.worker_logs import LogPlan, WorkerLogs
logs = WorkerLogs(LogPlan(run_dir=Path(sys.argv[1])))
files = logs.open(1, 0, 0)
os.write(files.stdout_fd, b'x' * 1_000_000)
while logs._feeds[1]._written_bytes == 0: pass
logs.close()
sys.exit(7)
"""
    reader, writer = os.pipe()
    agent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], stdout=writer)
    os.close(writer)
    try:
        assert agent.wait(30) == 7
    finally:
        agent.kill()
        os.close(reader)


def test_vanished_log_file_stops_nothing(tmp_path: Path) -> None:
    with Steps(tmp_path, count=2) as steps:
        steps.paths[1].unlink()
        assert steps.write(b"still here\n", 10.0) == b"[0]:still here\n"
        assert steps.files[1].step(steps.feed, 10.1) == (False, True)
        assert steps.files[1].size_bytes() <= steps.files[1].shown_bytes


def test_files_of_ended_attempts_are_let_go(tmp_path: Path) -> None:
    def open_logs() -> int:
        links = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)]
        return sum(link.startswith(str(tmp_path / "run")) for link in links)

    with Screen(tmp_path) as screen:
        for view in range(1, 6):
            screen.run(f"print({view})", view=view)
        assert screen.out == b"1\n2\n3\n4\n5\n"
        asyncio.run(until(lambda: open_logs() == 2, "only the last attempt's two files open"))


def test_devnull_means_no_files_and_an_inherited_console(tmp_path: Path) -> None:
    feed = WorkerLogs(LogPlan(run_dir=Path(os.devnull), redirects=3, tee=3))
    assert feed.open(1, 0, 0) == WorkerLogFiles()
    assert asyncio.run(feed.drain())
    feed.close()


def test_a_log_directory_that_cannot_be_created_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    feed = WorkerLogs(LogPlan(run_dir=tmp_path / "file"))
    with pytest.raises(LaunchError, match=f"cannot open log files under {tmp_path}/file: Not a directory"):
        feed.open(1, 0, 0)


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", ()),
        (b"\n\n", ()),
        (b"one", ("one",)),
        (b"a\nb\nc\nd\n\n", ("b", "c", "d")),
        (b"\x1b[31mred\x1b[0m\x07\n", ("red",)),
        (b" 10%\r 20%\r 30%\r\nnext\n", (" 30%", "next")),
        (b"\xff\xfe\x00junk\n", ("\ufffd\ufffdjunk",)),
        (b"y" * 5000 + b"\nshort\n", ("short",)),
        (b"short\n" + b"z" * 5000, ("z" * 100,)),
    ],
)
def test_tail_lines(tmp_path: Path, content: bytes, lines: tuple[str, ...]) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    assert tail_lines(str(path), 3, 100) == lines


def test_tails_begin_where_this_worker_began_and_absent_files_have_none(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"old\nnew\n")
    assert tail_lines(str(path), 9, 100, start_bytes=4) == ("new",)
    assert tail_lines(str(tmp_path / "absent"), 9, 100) == ()
    assert tail_lines("", 9, 100) == ()
    assert read_tail(str(tmp_path), 100) == ""


@pytest.mark.parametrize(
    ("choices", "shown"),
    [
        ({"has_report": True}, b"before\nafter\n"),
        ({}, b"before\n{traceback}\nafter\n"),
        ({"has_report": True, "tee": 2}, b"[default0]:before\n[default0]:{traceback}\n[default0]:after\n"),
    ],
)
def test_a_traceback_that_the_report_shows_is_left_out_where_lines_have_no_prefix(
    tmp_path: Path, choices: dict[str, Any], shown: bytes
) -> None:
    traceback = "Traceback (most recent call last):\nValueError: no"
    with Screen(tmp_path, **choices) as screen:
        files = screen.logs.open(1, 0, 0)
        error = {"message": {"message": "ValueError: no", "extraInfo": {"py_callstack": traceback + "\n"}}}
        Path(files.error_file).write_text(json.dumps(error))
        text = f"before\n{traceback}\nafter\n"
        process = start(f"import sys; sys.stderr.write({text!r})", files)
        assert process.wait(30) == 0
        cause = Failure(
            node_id="a",
            view=1,
            rank=0,
            local_rank=0,
            pid=1,
            end=Exited(1),
            failed_at=0.0,
            error_file=files.error_file,
            traceback=traceback,
        )
        screen.logs.decide_report(cause)
        assert asyncio.run(screen.logs.drain())
        expected = traceback.replace("\n", "\n[default0]:") if "tee" in choices else traceback
        assert screen.err == shown.replace(b"{traceback}", expected.encode())
