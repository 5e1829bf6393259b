"""A C++ extension build that was killed does not keep the next start waiting, and one that runs is not disturbed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.worker.launch import build_locks
from holdfast.worker.launch.build_locks import LockOwner, examine
from support.nest import ENVIRONMENT, Nest, Output, Result, eventually, eventually_async, write

BUILD = """
import os, sys, time
from torch.utils.file_baton import FileBaton
baton = FileBaton(sys.argv[1])
if baton.try_acquire():
    print("builds", flush=True)
    time.sleep(float(sys.argv[2]))
    baton.release()
    print("has built", flush=True)
else:
    print("waits", flush=True)
    baton.wait()
    print("was told", flush=True)
"""


@pytest.fixture(scope="module")
def nest() -> Iterator[Nest]:
    with Nest("warm") as nest:
        yield nest


async def killed_in_a_build(nest: Nest, directory: Path, lock: Path) -> None:
    with Output(directory) as output:
        child = await nest.start(["build.py", str(lock), "1000"], directory, output)
        await eventually_async(lambda: output.read()[0] == "builds\n", "the build goes on")
        child.signal(signal.SIGKILL)
        await child.wait()


def test_the_lock_of_a_worker_that_was_killed_is_taken_over(nest: Nest, tmp_path: Path) -> None:
    write(tmp_path / "build.py", BUILD)
    lock = tmp_path / "lock"
    nest.do(killed_in_a_build(nest, tmp_path, lock))
    assert lock.exists()

    async def start_three() -> list[Result]:
        return await asyncio.gather(*[nest.run_async(["build.py", str(lock), "0.5"], tmp_path) for _ in range(3)])

    results = nest.do(asyncio.wait_for(start_three(), 20))
    assert sorted(r.stdout for r in results) == ["builds\nhas built\n", *["waits\nwas told\n"] * 2]
    [builder] = [r for r in results if "builds" in r.stdout]
    assert f"holdfast: {lock} was left by a build whose process is dead" in builder.stderr
    assert not lock.exists()


def test_one_that_builds_is_waited_for(nest: Nest, tmp_path: Path) -> None:
    write(tmp_path / "build.py", BUILD)
    lock = tmp_path / "lock"

    async def one_after_another() -> tuple[Result, Result]:
        with Output(tmp_path) as output:
            child = await nest.start(["build.py", str(lock), "3"], tmp_path, output)
            await eventually_async(lambda: output.read()[0] == "builds\n", "the build goes on")
            second = await nest.run_async(["build.py", str(lock), "0"], tmp_path)
            status = await child.wait()
            return Result(status, *output.read()), second

    first, second = nest.do(one_after_another())
    assert (first.stdout, second) == ("builds\nhas built\n", Result(0, "waits\nwas told\n", ""))


def test_who_waits_for_a_builder_that_is_killed_ends_and_the_next_one_builds(nest: Nest, tmp_path: Path) -> None:
    write(tmp_path / "build.py", BUILD)
    lock = tmp_path / "lock"

    async def kill_the_builder() -> Result:
        with Output(tmp_path) as output, Output(tmp_path) as second:
            builder = await nest.start(["build.py", str(lock), "1000"], tmp_path, output)
            await eventually_async(lambda: output.read()[0] == "builds\n", "the build goes on")
            waiting = await nest.start(["build.py", str(lock), "0"], tmp_path, second)
            await eventually_async(lambda: second.read()[0] == "waits\n", "the other waits")
            builder.signal(signal.SIGKILL)
            await builder.wait()
            status = await asyncio.wait_for(waiting.wait(), 20)
            return Result(os.waitstatus_to_exitcode(status), *second.read())

    ended = nest.do(kill_the_builder())
    assert ended.code == 1 and "BuildLockError" in ended.stderr and str(lock) in ended.stderr
    assert nest.run(["build.py", str(lock), "0"], tmp_path).stdout == "builds\nhas built\n"


def plain_python(directory: Path, lock: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-u", "build.py", str(lock), "1000"],
        cwd=directory,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "builds\n"
    return process


def age(lock: Path) -> None:
    os.utime(lock, (time.time() - 60, time.time() - 60))


def test_a_lock_of_plain_python_is_left_alone_while_that_runs(nest: Nest, tmp_path: Path) -> None:
    write(tmp_path / "build.py", BUILD)
    lock = tmp_path / "lock"
    with plain_python(tmp_path, lock) as builder:
        age(lock)
        assert examine(str(lock)).state == "held"
        builder.kill()
    assert examine(str(lock)).state == "dead"
    assert nest.run(["build.py", str(lock), "0"], tmp_path).stdout == "builds\nhas built\n"


def test_a_lock_that_others_may_hold_unseen_is_named_with_what_to_do(
    nest: Nest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    age(lock)
    monkeypatch.setattr(build_locks, "_file_system", lambda _: "nfs4")
    found = examine(str(lock))
    assert found.state == "unknown" and "nfs4" in found.why
    lock.write_text("holdfast far-away 00000000-0000-0000-0000-000000000000 17\n")
    found = examine(str(lock))
    assert found.state == "unknown" and found.owner == LockOwner(
        "far-away", "00000000-0000-0000-0000-000000000000", "17"
    )
    monkeypatch.setattr(build_locks, "SAY_AFTER_S", 0.0)

    class Baton:
        lock_file_path, wait_seconds, fd = str(lock), 0.05, None

    assert build_locks.try_acquire(Baton()) is False
    remover = subprocess.Popen(["sh", "-c", f"sleep 1.5; rm {lock}"])
    build_locks.wait(Baton())
    assert remover.wait() == 0
    said = capsys.readouterr().err
    assert f"by process 17 on far-away, which has the lock file {lock}" in said and "delete that file" in said


def test_torch_is_patched_as_soon_as_it_is_imported_where_it_is_not_yet(tmp_path: Path) -> None:
    write(tmp_path / "build.py", BUILD)
    lock = tmp_path / "lock"
    with Nest("cold") as cold:
        cold.do(killed_in_a_build(cold, tmp_path, lock))
        assert LockOwner.read(os.open(lock, os.O_RDONLY)) is not None
        assert cold.run(["build.py", str(lock), "0"], tmp_path).stdout == "builds\nhas built\n"


@pytest.mark.long
def test_a_real_build_that_was_killed_is_done_by_the_next_worker(nest: Nest, tmp_path: Path) -> None:
    script = """
        import ctypes, torch.utils.cpp_extension as extension
        extension.load("holdfast_lock_test", ["answer.cpp"], build_directory="built", is_python_module=False)
        print(ctypes.CDLL("built/holdfast_lock_test.so").answer())
    """
    write(tmp_path / "answer.cpp", 'extern "C" int answer() { return 42; }')
    write(tmp_path / "train.py", textwrap.dedent(script))
    (tmp_path / "built").mkdir()
    lock = tmp_path / "built" / "lock"

    async def kill_in_the_build() -> None:
        with Output(tmp_path) as output:
            child = await nest.start(["train.py"], tmp_path, output)
            await eventually_async(lambda: lock.exists() and lock.read_bytes() != b"", "the build has begun")
            child.kill_group(signal.SIGKILL)
            await child.wait()

    nest.do(kill_in_the_build())
    assert lock.exists()
    assert nest.run(["train.py"], tmp_path).stdout.splitlines()[-1] == "42"
    eventually(lambda: not lock.exists(), "the lock is gone")
