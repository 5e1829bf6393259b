"""Bytes out of the blocks of parts into tensors, by a few threads, each block verified first.

A thread reads a block of a file straight to where its tensors live, and compares it with its checksum there. Where that
cannot be (many small tensors, one that goes to two places, a block from elsewhere), it reads into a buffer of its own,
or uses the block where it lies, and copies what it has of each tensor. Either way the bytes are still in the
processor's cache when they are needed again. Reading, checking and copying all let other threads run.

Targets that are not contiguous, or on a device, are assembled in host memory first, and copied when all is read.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from holdfast.storage.image import TensorEntry
from holdfast.storage.part_readers import FilePart, PartSource
from holdfast.util.blocks import BLOCK_BYTES, block_size

SPANS_MAX = 16
"""The most spans of a block that is read straight to its tensors: of more, each is too small for a call to the
kernel."""


class StoredRegion(NamedTuple):
    """A region of a shard's tensor, and the part that has it."""

    source: PartSource
    entry: TensorEntry
    row: int
    """The row of the shard's tensor with which it begins."""


class ByteSpan(NamedTuple):
    """Bytes of a block, and the address they go to."""

    start: int
    size: int
    address: int


class LoadTask(NamedTuple):
    """A block, and what is copied from it."""

    source: PartSource
    number: int
    spans: list[ByteSpan]


class BlockLoader:
    """The list of copies: from which block of which part to which tensor."""

    def __init__(self) -> None:
        self._spans: dict[int, dict[int, list[ByteSpan]]] = {}
        self._sources: dict[int, PartSource] = {}
        self._memory: dict[int, torch.Tensor] = {}
        self._buffers: list[torch.Tensor] = []
        """The targets of the bytes, referenced so that they stay allocated."""
        self.afterwards: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Target and source of the copies to make when all is read."""

    def add(self, stored: StoredRegion, rows: slice, target: torch.Tensor) -> None:
        """Add a copy of some rows of a region into a tensor of just that size."""
        size_bytes = target.numel() * target.element_size()
        if not size_bytes:
            return
        buffer = target
        if not target.is_cpu or not target.is_contiguous():
            buffer = torch.empty(target.shape, dtype=target.dtype, device="cpu")
            self.afterwards.append((target, buffer))
        self._buffers.append(buffer)
        row_bytes = stored.entry.size_bytes // (stored.entry.shape[0] if stored.entry.shape else 1)
        assert (rows.stop - rows.start) * row_bytes == size_bytes, stored.entry.name
        start = stored.entry.start + rows.start * row_bytes
        blocks = self._blocks_of(stored.source)
        for number, within, size in blocks_of(start, size_bytes):
            address = buffer.data_ptr() + number * BLOCK_BYTES + within - start
            blocks.setdefault(number, []).append(ByteSpan(within, size, address))

    def add_rest(self, sources: Iterable[PartSource]) -> None:
        """Verify every block of these parts, even if nothing is copied from it."""
        for source in sources:
            blocks = self._blocks_of(source)
            for number, _, _ in blocks_of(0, source.layout.size_bytes):
                blocks.setdefault(number, [])

    def run(self, threads: int) -> None:
        """Read, verify and copy. Raise the error of a thread that failed."""
        tasks, lock, errors = self._tasks(), threading.Lock(), list[BaseException]()

        def take() -> LoadTask | None:
            with lock:
                return None if errors else next(tasks, None)

        def work() -> None:
            try:
                buffer = bytearray()
                while (task := take()) is not None:
                    if task.source.memory is None and not buffer:
                        buffer = bytearray(BLOCK_BYTES)
                    self._carry_out(task, buffer)
            except BaseException as error:  # it is raised by the caller, which waits for all threads
                errors.append(error)

        try:
            self._share(work, threads)
            if errors:
                raise errors.pop()  # not referenced here too: its traceback references all buffers
            self._finish()
        finally:
            self._memory.clear()

    @staticmethod
    def _share(work: Callable[[], None], threads: int) -> None:
        others = [threading.Thread(target=work, name=f"holdfast-load-{number}") for number in range(1, threads)]
        for thread in others:
            thread.start()
        work()
        for thread in others:
            thread.join()

    def _blocks_of(self, source: PartSource) -> dict[int, list[ByteSpan]]:
        if id(source) not in self._sources:
            self._sources[id(source)] = source
            if source.memory is not None:
                self._memory[id(source)] = as_bytes(source.memory)
        return self._spans.setdefault(id(source), {})

    def _tasks(self) -> Iterator[LoadTask]:
        """Return the blocks part after part, each from its beginning, in the order a disk reads fastest."""
        for key, blocks in self._spans.items():
            for number in sorted(blocks):
                yield LoadTask(self._sources[key], number, blocks[number])

    def _carry_out(self, task: LoadTask, buffer: bytearray) -> None:
        if isinstance(task.source, FilePart) and (buffers := _buffers(task, buffer)):
            task.source.block_into(task.number, buffers)
            return
        task.source.block(task.number, memoryview(buffer))
        memory = self._memory.get(id(task.source))
        if memory is None:
            start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        else:
            start = memory.data_ptr() + task.number * BLOCK_BYTES
        for span in task.spans:
            ctypes.memmove(span.address, start + span.start, span.size)

    def _finish(self) -> None:
        with torch.no_grad():
            for target, source in self.afterwards:
                target.copy_(source)
        # Autograd learns of changes by the tensors' versions, and we wrote past it.
        torch.autograd.graph.increment_version([buffer for buffer in self._buffers if not buffer.is_inference()])


def _buffers(task: LoadTask, spare: bytearray) -> list[memoryview]:
    """Return a block as a sequence of buffers to read it into: those of its tensors, and spare memory for unwanted
    bytes. None if it cannot be read so."""
    spans = sorted(task.spans)
    if len(spans) > SPANS_MAX:
        return []
    size_bytes = block_size(task.number, task.source.layout.size_bytes)
    found, position, rest = [], 0, memoryview(spare)
    for span in [*spans, ByteSpan(size_bytes, 0, 0)]:
        if span.start < position:
            return []
        if gap := span.start - position:
            found.append(rest[:gap])
        if span.size:
            found.append(memoryview((ctypes.c_char * span.size).from_address(span.address)).cast("B"))
        position = span.start + span.size
    return found


def blocks_of(start: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield the blocks that a run of bytes is in: number, first byte in it, how many."""
    while size:
        number, within = divmod(start, BLOCK_BYTES)
        taken = min(size, BLOCK_BYTES - within)
        yield number, within, taken
        start, size = start + taken, size - taken


def as_bytes(buffer: memoryview | mmap.mmap | bytearray) -> torch.Tensor:
    """Return a buffer as a tensor of bytes, without a copy. A read-only one must not be written to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is read-only: we know
        return torch.frombuffer(buffer, dtype=torch.uint8)
