"""Large files written past the page cache: as fast as the disk, and without pushing everything else out of memory.

Two threads write 8 MiB blocks straight from the memory they are in (O_DIRECT) while the next block's checksum is
computed. The blocks are allocated before: a full disk is known at once, and writes into what is allocated run side by
side. Memory that is not aligned to pages goes through a buffer that is; a file system that cannot do it gets ordinary
writes.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from holdfast.storage.stores import Progress
from holdfast.util.blocks import BLOCK_BYTES

WRITER_THREADS = 2
"""One writes while the other computes; more gain nothing on any disk we measured."""
ALIGNMENT_BYTES = 4096
NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)
NOT_ALLOCATED = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)

_libc = ctypes.CDLL(None, use_errno=True)


def write_file(path: Path, blocks: Iterable[memoryview], size_bytes: int, on_progress: Progress | None = None) -> None:
    """Write a new file and have it on the disk when this returns."""
    with _opened(path) as (descriptor, is_direct):
        _allocate(descriptor, size_bytes)
        writer = _DirectWriter(descriptor, is_direct, iter(blocks), size_bytes, on_progress)
        with ThreadPoolExecutor(WRITER_THREADS, thread_name_prefix="holdfast-write") as pool:
            for done in [pool.submit(writer.work) for _ in range(WRITER_THREADS)]:
                done.result()
        os.ftruncate(descriptor, size_bytes)  # the last block may have been padded
        os.fdatasync(descriptor)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, bool]]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    is_direct = True
    try:
        descriptor = os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno not in NOT_DIRECT:
            raise
        path.unlink(missing_ok=True)  # some file systems refuse only after they have made it
        descriptor, is_direct = os.open(path, flags, 0o644), False
    try:
        yield descriptor, is_direct
    finally:
        os.close(descriptor)


def _allocate(descriptor: int, size_bytes: int) -> None:
    """Allocate blocks by the kernel's call. The C library's fallback would write zeros where the file system cannot
    allocate."""
    if not size_bytes:
        return
    size = ctypes.c_int64(size_bytes)
    if _libc.fallocate(descriptor, 0, ctypes.c_int64(0), size) and ctypes.get_errno() not in NOT_ALLOCATED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class _DirectWriter:
    """A writer of blocks that several threads take from one iterator."""

    def __init__(
        self,
        descriptor: int,
        is_direct: bool,
        blocks: Iterator[memoryview],
        size_bytes: int,
        on_progress: Progress | None,
    ) -> None:
        self._descriptor = descriptor
        self._is_direct = is_direct
        self._blocks = blocks
        self._size_bytes = size_bytes
        self._on_progress = on_progress
        self._take_lock = Lock()
        self._progress_lock = Lock()
        self._assigned_bytes = 0
        self._done_bytes = 0
        self._has_failed = False

    def work(self) -> None:
        """Write blocks until there are no more, or another thread failed."""
        try:
            while (assigned := self._next_block()) is not None:
                offset, block = assigned
                self._write(offset, block)
                self._report(len(block))
        except BaseException:
            self._has_failed = True
            raise

    def _next_block(self) -> tuple[int, memoryview] | None:
        with self._take_lock:
            block = None if self._has_failed else next(self._blocks, None)
            if block is None:
                return None
            offset = self._assigned_bytes
            self._assigned_bytes += len(block)
        return offset, block

    def _write(self, offset: int, block: memoryview) -> None:
        if self._is_direct and len(block) % ALIGNMENT_BYTES == 0:
            try:
                return _write_all(self._descriptor, block, offset)
            except OSError as error:
                if error.errno not in NOT_DIRECT:
                    raise
        if not self._is_direct:
            return _write_all(self._descriptor, block, offset)
        with mmap.mmap(-1, len(block) + -len(block) % ALIGNMENT_BYTES) as aligned, memoryview(aligned) as view:
            view[: len(block)] = block
            _write_all(self._descriptor, view, offset)

    def _report(self, size: int) -> None:
        with self._progress_lock:
            self._done_bytes += size
            if self._on_progress is not None:
                self._on_progress(self._done_bytes, self._size_bytes)


def _write_all(descriptor: int, block: memoryview, offset: int) -> None:
    while block:
        written = os.pwrite(descriptor, block, offset)
        block, offset = block[written:], offset + written


def read_block(descriptor: int, start: int, size: int) -> bytes:
    """Return bytes of a file; fewer than `size` only at its end."""
    parts = []
    while size and (part := os.pread(descriptor, min(size, BLOCK_BYTES), start)):
        parts.append(part)
        start, size = start + len(part), size - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
