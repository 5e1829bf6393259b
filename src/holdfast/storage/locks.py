"""The locks of checkpoints in a directory (util/files.py), as context managers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.util.files import FileLock, LockTakenError, LockUnsupportedError, open_plain

__all__ = ["LockTakenError", "LockUnsupportedError", "exclusive", "in_turn", "shared", "touch"]

PATIENCE_S = 60.0
"""A process of ours has one of these locks for as long as a rename takes: seconds where the storage stalls."""
MODE = 0o644
"""Other users of a shared file system may read what this one writes."""


@contextmanager
def shared(path: Path) -> Iterator[int]:
    """Hold a lock that others may share, on a file that exists; yield its descriptor. Raises LockTakenError if another
    process holds it alone and does not give it back."""
    lock = FileLock(path)
    lock.wait(PATIENCE_S, shared=True, create=False)
    try:
        yield lock.descriptor
    finally:
        lock.release()


@contextmanager
def exclusive(path: Path) -> Iterator[bool]:
    """Hold the lock alone, on a file that exists; yield False, at once, if another process has it."""
    lock = FileLock(path)
    is_alone = lock.acquire(create=False)
    try:
        yield is_alone
    finally:
        lock.release()


@contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """Wait for the lock and hold it alone; create the file if needed. Where there are no locks, continue without.
    Raises LockTakenError if it is never given back."""
    lock = FileLock(path, MODE)
    try:
        lock.wait(PATIENCE_S)
    except LockUnsupportedError:
        pass
    try:
        yield
    finally:
        lock.release()


def touch(path: Path) -> None:
    """Create a file to lock."""
    os.close(open_plain(path, os.O_RDWR | os.O_CREAT, MODE))
