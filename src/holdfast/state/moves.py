"""Bytes out of the blocks of parts into tensors, by a few threads, each block verified first.

A thread reads a block of a file straight to where its tensors live, and compares it with its checksum there. Where that
cannot be (many small tensors, one that goes to two places, a block from elsewhere), it reads into a room of its own, or
looks at the block where it lies, and copies what it has of each tensor. Either way the bytes are still in the
processor's cache when they are needed again. Reading, checking and copying all let other threads run.

What lies scattered in memory, or on a device, is put together in host memory first, and copied when all is read.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from holdfast.storage.image import BLOCK_BYTES, Entry
from holdfast.storage.sources import FilePart, PartSource

SPANS_MAX = 16
"""Of a block that is read straight to its tensors: of more, each is too small to be worth a call to the kernel."""


class Held(NamedTuple):
    """A piece of a shard's tensor, and the part that has it."""

    source: PartSource
    entry: Entry
    row: int
    """With which row of the shard's tensor it begins."""


class Span(NamedTuple):
    """Bytes of a block, and the address they go to."""

    start: int
    size: int
    address: int


class Task(NamedTuple):
    """A block, and what is taken of it."""

    source: PartSource
    number: int
    spans: list[Span]


class Moves:
    """What is to be copied from which block of which part to where."""

    def __init__(self) -> None:
        self._spans: dict[int, dict[int, list[Span]]] = {}
        self._sources: dict[int, PartSource] = {}
        self._memory: dict[int, torch.Tensor] = {}
        self._rooms: list[torch.Tensor] = []
        """Where the bytes go, held so that it stays there."""
        self.afterwards: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Target and source of the copies to make when all is read."""

    def add(self, held: Held, rows: slice, target: torch.Tensor) -> None:
        """Some rows of a piece into a tensor of just that size."""
        size_bytes = target.numel() * target.element_size()
        if not size_bytes:
            return
        room = target
        if not target.is_cpu or not target.is_contiguous():
            room = torch.empty(target.shape, dtype=target.dtype)
            self.afterwards.append((target, room))
        self._rooms.append(room)
        row_bytes = held.entry.size_bytes // (held.entry.shape[0] if held.entry.shape else 1)
        assert (rows.stop - rows.start) * row_bytes == size_bytes, held.entry.name
        start = held.entry.start + rows.start * row_bytes
        blocks = self._blocks_of(held.source)
        for number, within, size in blocks_of(start, size_bytes):
            address = room.data_ptr() + number * BLOCK_BYTES + within - start
            blocks.setdefault(number, []).append(Span(within, size, address))

    def add_rest(self, sources: Iterable[PartSource]) -> None:
        """Have every block of these verified, whether something is taken of it or not."""
        for source in sources:
            blocks = self._blocks_of(source)
            for number, _, _ in blocks_of(0, source.layout.size_bytes):
                blocks.setdefault(number, [])

    def run(self, threads: int) -> None:
        """Read, verify and copy. Raises what a thread that failed raised."""
        tasks, lock, errors = self._tasks(), threading.Lock(), list[BaseException]()

        def take() -> Task | None:
            with lock:
                return None if errors else next(tasks, None)

        def work() -> None:
            try:
                room = bytearray()
                while (task := take()) is not None:
                    if task.source.memory is None and not room:
                        room = bytearray(BLOCK_BYTES)
                    self._carry_out(task, room)
            except BaseException as error:  # it belongs to the one who waits for all
                errors.append(error)

        try:
            self._share(work, threads)
            if errors:
                raise errors.pop()  # not kept here too: it would keep all that it has passed through
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

    def _blocks_of(self, source: PartSource) -> dict[int, list[Span]]:
        if id(source) not in self._sources:
            self._sources[id(source)] = source
            if source.memory is not None:
                self._memory[id(source)] = as_bytes(source.memory)
        return self._spans.setdefault(id(source), {})

    def _tasks(self) -> Iterator[Task]:
        """Part after part, each from its beginning: as a disk likes it."""
        for key, blocks in self._spans.items():
            for number in sorted(blocks):
                yield Task(self._sources[key], number, blocks[number])

    def _carry_out(self, task: Task, room: bytearray) -> None:
        if isinstance(task.source, FilePart) and (rooms := _rooms(task, room)):
            task.source.block_into(task.number, rooms)
            return
        task.source.block(task.number, memoryview(room))
        memory = self._memory.get(id(task.source))
        if memory is None:
            start = ctypes.addressof(ctypes.c_char.from_buffer(room))
        else:
            start = memory.data_ptr() + task.number * BLOCK_BYTES
        for span in task.spans:
            ctypes.memmove(span.address, start + span.start, span.size)

    def _finish(self) -> None:
        with torch.no_grad():
            for target, source in self.afterwards:
                target.copy_(source)
        # Autograd learns of changes by the tensors' versions, and we wrote past it.
        torch.autograd.graph.increment_version([room for room in self._rooms if not room.is_inference()])


def _rooms(task: Task, spare: bytearray) -> list[memoryview]:
    """A block as a row of places to read it into: those of its tensors, and spare memory for what nobody wants. None if
    it cannot be read so."""
    spans = sorted(task.spans)
    if len(spans) > SPANS_MAX:
        return []
    size_bytes = min(BLOCK_BYTES, task.source.layout.size_bytes - task.number * BLOCK_BYTES)
    found, position, rest = [], 0, memoryview(spare)
    for span in [*spans, Span(size_bytes, 0, 0)]:
        if span.start < position:
            return []
        if gap := span.start - position:
            found.append(rest[:gap])
        if span.size:
            found.append(memoryview((ctypes.c_char * span.size).from_address(span.address)).cast("B"))
        position = span.start + span.size
    return found


def blocks_of(start: int, size: int) -> Iterator[tuple[int, int, int]]:
    """The blocks that a run of bytes is in: number, from which byte of it, how many."""
    while size:
        number, within = divmod(start, BLOCK_BYTES)
        taken = min(size, BLOCK_BYTES - within)
        yield number, within, taken
        start, size = start + taken, size - taken


def as_bytes(buffer: memoryview | mmap.mmap | bytearray) -> torch.Tensor:
    """A buffer as a tensor of bytes, without a copy. One that is read-only must not be written to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is read-only: we know
        return torch.frombuffer(buffer, dtype=torch.uint8)
