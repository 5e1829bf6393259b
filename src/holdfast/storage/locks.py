"""Locks on files: held by a process, gone with it, whatever ended it. On shared file systems they work across nodes if
the file system passes flock on (NFS since Linux 2.6.12, Lustre with -o flock)."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)


class LockUnsupportedError(OSError):
    """The file system has no locks."""


@contextmanager
def shared(path: Path) -> Iterator[int]:
    """Hold a lock that others may share, on a file that is there; its descriptor."""
    with _opened(path, os.O_RDONLY) as descriptor:
        _lock(descriptor, fcntl.LOCK_SH)
        yield descriptor


@contextmanager
def exclusive(path: Path) -> Iterator[bool]:
    """Hold the lock alone; False, at once, if somebody has it."""
    with _opened(path, os.O_RDWR) as descriptor:
        try:
            _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


@contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """Hold the lock alone, made if it is not there, after waiting for it. Where there are no locks, without."""
    with _opened(path, os.O_RDWR | os.O_CREAT) as descriptor:
        try:
            _lock(descriptor, fcntl.LOCK_EX)
        except LockUnsupportedError:
            pass
        yield


def touch(path: Path) -> None:
    """Make a file to lock."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
    finally:
        _unlock(descriptor)
        os.close(descriptor)


def _unlock(descriptor: int) -> None:
    """Closing alone would leave the lock with every process that was forked meanwhile, for as long as it lives."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _lock(descriptor: int, how: int) -> None:
    try:
        fcntl.flock(descriptor, how)
    except OSError as error:
        if error.errno in UNSUPPORTED:
            raise LockUnsupportedError(error.errno, "this file system has no locks (flock)") from None
        raise
