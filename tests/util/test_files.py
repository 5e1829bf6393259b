"""File locks, atomic replacement, allocation."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.util.files import FileLock, LockTakenError, allocate, write_atomically


def test_a_lock_is_held_by_one_and_says_by_whom(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert first.acquire(owner="process 17")
    assert not second.acquire(owner="process 18")
    assert second.read_owner() == "process 17"
    first.release()
    assert second.acquire(owner="8")
    assert first.read_owner() == "8"
    second.release()


def test_shared_locks_exclude_an_exclusive_one_only(tmp_path: Path) -> None:
    one, two, alone = (FileLock(tmp_path / "lock") for _ in range(3))
    assert one.acquire(shared=True) and two.acquire(shared=True)
    assert not alone.acquire()
    one.release()
    two.release()
    alone.wait(10.0)
    assert alone.is_held and not one.acquire(shared=True)
    with pytest.raises(LockTakenError, match="another process has had it locked"):
        one.wait(0.1, shared=True)
    alone.release()
    assert not alone.is_held


def test_a_lock_goes_with_the_process_that_held_it(tmp_path: Path) -> None:
    program = (
        "import os, sys, signal; from holdfast.util.files import FileLock;"
        " lock = FileLock(sys.argv[1]); assert lock.acquire(); print('held', flush=True);"
        " os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "lock")], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.stdout == "held\n"
    assert FileLock(tmp_path / "lock").acquire()


def test_release_frees_the_lock_though_a_fork_has_the_file_open_still(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    assert lock.acquire()
    copy = os.dup(lock.descriptor)  # what a fork has
    try:
        lock.release()
        other = FileLock(tmp_path / "lock")
        assert other.acquire()
        other.release()
    finally:
        os.close(copy)


def test_a_lock_on_a_missing_file_is_not_created_if_so_wanted(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FileLock(tmp_path / "absent").acquire(create=False)
    assert FileLock(tmp_path / "absent").read_owner() == ""


def test_write_atomically_replaces_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    write_atomically(target, b"old")
    write_atomically(target, b"new" * 100_000)
    assert target.read_bytes() == b"new" * 100_000

    def full_disk(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_atomically(target, b"newest")
    assert target.read_bytes() == b"new" * 100_000
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "a temporary file was left"


def test_allocated_space_is_real(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        allocate(file.fileno(), 1 << 20)
        found = os.fstat(file.fileno())
    assert found.st_size == 1 << 20 and found.st_blocks * 512 >= 1 << 20


def test_an_allocation_that_fails_says_what_was_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match=r"3\.0 MiB .*file: No space") as caught:
        allocate(file.fileno(), 3 << 20)
    assert caught.value.errno == errno.ENOSPC
