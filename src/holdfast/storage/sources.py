"""An image to read from: in memory, in a file, or behind anything that reads a range of bytes.

It is read in blocks, and every block is compared with the checksum it came with before it is used, the header's too.
Where there is none yet (an image in memory, just sealed), it is believed. What is wrong is named: the part, the block.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from crc32c import crc32c

from holdfast.errors import CheckpointError
from holdfast.storage.image import BLOCK_BYTES, Entry, Layout, parse

CHUNK_BYTES = 2**20
"""Read and checked at a time, where it goes straight to its place: it is still in the processor's cache then."""


class PartSource(Protocol):
    """A part of a checkpoint, from wherever it is."""

    name: str
    layout: Layout
    skeleton: bytes
    memory: memoryview | None
    """All of it, where it is in memory."""

    def block(self, number: int, room: memoryview) -> memoryview:
        """A verified block: where it lies, if that is in memory, or else in the room that is given, of BLOCK_BYTES."""

    def read(self, entry: Entry, start: int, size: int) -> bytes:
        """Verified bytes of a tensor, from one of its bytes on."""

    def close(self) -> None:
        """No more reading; files and memory are let go."""


class _Source:
    """What all kinds have in common."""

    memory: memoryview | None = None

    def __init__(self, name: str, size_bytes: int, checksums: Sequence[int] | None) -> None:
        self.name, self.size_bytes = name, size_bytes
        self._checksums = checksums
        self._kept: tuple[int, memoryview] | None = None
        """The block that was read last, while the head is read, which takes several looks at it."""
        blocks = -(-size_bytes // BLOCK_BYTES)
        if checksums is not None and len(checksums) != blocks:
            raise CheckpointError(f"{name} has {blocks} blocks, its checksums are of {len(checksums)}")
        try:
            self.layout = parse(self._range, size_bytes)
            room = self._range(self.layout.skeleton_start, self.layout.skeleton_capacity)
            self.skeleton = self.layout.skeleton_in(room)
        except CheckpointError as error:
            raise CheckpointError(str(error) if name in str(error) else f"{name}: {error}") from None
        self._kept = None

    def close(self) -> None:
        self._kept = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def read(self, entry: Entry, start: int, size: int) -> bytes:
        if not 0 <= start <= start + size <= entry.size_bytes:
            raise CheckpointError(f"{self.name}: {entry.name} has {entry.size_bytes} bytes, not {start + size}")
        return self._range(entry.start + start, size)

    def block(self, number: int, room: memoryview) -> memoryview:
        start = number * BLOCK_BYTES
        size = min(BLOCK_BYTES, self.size_bytes - start)
        content = self._fill(start, room[:size])
        if self._checksums is not None:
            self._compare(number, size, crc32c(content))
        return content

    def _compare(self, number: int, size: int, found: int) -> None:
        assert self._checksums is not None
        if found != self._checksums[number]:
            start, right = number * BLOCK_BYTES, self._checksums[number]
            where = f"bytes {start} to {start + size}, have the checksum {found:08x}, not {right:08x}"
            raise CheckpointError(f"{self.name} is damaged: its block {number}, {where}")

    def _range(self, start: int, size: int) -> bytes:
        """Some bytes: of verified blocks, where there are checksums."""
        if start + size > self.size_bytes:
            raise CheckpointError(f"{self.name} has {self.size_bytes} bytes, not {start + size}: it is cut short")
        if self._checksums is None:
            return bytes(self._fill(start, memoryview(bytearray(size))))
        found = bytearray()
        while len(found) < size:
            number, within = divmod(start + len(found), BLOCK_BYTES)
            found += self._look(number)[within : within + size - len(found)]
        return bytes(found)

    def _look(self, number: int) -> memoryview:
        if self._kept is None or self._kept[0] != number:
            room = memoryview(bytearray() if self.memory else bytearray(min(BLOCK_BYTES, self.size_bytes)))
            self._kept = number, self.block(number, room)
        return self._kept[1]

    def _fill(self, start: int, room: memoryview) -> memoryview:
        raise NotImplementedError


class MemoryPart(_Source):
    """An image in memory: a slot in shared memory, or our own."""

    def __init__(self, buffer: memoryview, checksums: Sequence[int] | None = None, name: str = "the image") -> None:
        self._buffer = self.memory = memoryview(buffer).cast("B")
        super().__init__(name, len(self._buffer), checksums)

    def close(self) -> None:
        super().close()
        try:
            self._buffer.release()
        except BufferError:
            pass  # an error on its way up still looks at it: it is let go with that

    def block(self, number: int, room: memoryview) -> memoryview:
        start = number * BLOCK_BYTES
        return super().block(number, self._buffer[start : start + BLOCK_BYTES])

    def _fill(self, start: int, room: memoryview) -> memoryview:
        return self._buffer[start : start + len(room)]


class FilePart(_Source):
    """An image in a file, of a disk or of shared memory: reading beats mapping what is not mapped yet."""

    def __init__(
        self, path: Path, checksums: Sequence[int] | None = None, size_bytes: int | None = None
    ) -> None:
        """`size_bytes`: of the image, where the file may be larger."""
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from None
        try:
            super().__init__(str(path), size_bytes or os.fstat(self._file).st_size, checksums)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        super().close()
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def block_into(self, number: int, rooms: Sequence[memoryview]) -> None:
        """A block straight to where it belongs, in rooms that are together as long as it. They have it before it is
        found to be damaged."""
        start, position, checksum = number * BLOCK_BYTES, number * BLOCK_BYTES, 0
        for room in rooms:
            for at in range(0, len(room), CHUNK_BYTES):
                chunk = self._fill(position, room[at : at + CHUNK_BYTES])
                position += len(chunk)
                if self._checksums is not None:
                    checksum = crc32c(chunk, checksum)
        if self._checksums is not None:
            self._compare(number, position - start, checksum)

    def _fill(self, start: int, room: memoryview) -> memoryview:
        done = 0
        while done < len(room):
            try:
                size = os.preadv(self._file, [room[done:]], start + done)
            except OSError as error:
                raise CheckpointError(f"{self.name} cannot be read: {error.strerror}") from None
            if size == 0:
                raise CheckpointError(f"{self.name} ends after {start + done} bytes: it was cut short meanwhile")
            done += size
        return room


class RangePart(_Source):
    """An image behind `read(start, size)`: an object store, a peer. Safe for several threads if the function is."""

    def __init__(
        self,
        read: Callable[[int, int], bytes],
        size_bytes: int,
        checksums: Sequence[int] | None = None,
        name: str = "the part",
    ) -> None:
        self._read = read
        super().__init__(name, size_bytes, checksums)

    def _fill(self, start: int, room: memoryview) -> memoryview:
        content = self._read(start, len(room))
        if len(content) != len(room):
            raise CheckpointError(f"{self.name} gave {len(content)} bytes from {start} on, {len(room)} were asked for")
        room[:] = content
        return room
