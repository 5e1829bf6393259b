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
from holdfast.storage.image import ImageLayout, TensorEntry, parse
from holdfast.util.blocks import BLOCK_BYTES, block_count, block_size, checksum
from holdfast.util.files import open_regular

CHUNK_BYTES = 2**20
"""Read and checked at a time, where it goes straight to its place: it is still in the processor's cache then."""


class PartSource(Protocol):
    """A readable part of a checkpoint, wherever it is stored."""

    name: str
    layout: ImageLayout
    skeleton: bytes
    memory: memoryview | None
    """All of it, where it is in memory."""

    def block(self, number: int, buffer: memoryview) -> memoryview:
        """Return a verified block: a view of it if the part is in memory, else a copy in the given buffer of
        BLOCK_BYTES."""

    def read(self, entry: TensorEntry, start: int, size: int) -> bytes:
        """Return verified bytes of a tensor, `size` of them from its byte `start` on."""

    def close(self) -> None:
        """End the reading; release files and memory."""


class _Source:
    """The base of all kinds of part readers."""

    memory: memoryview | None = None

    def __init__(self, name: str, size_bytes: int, checksums: Sequence[int] | None) -> None:
        self.name, self.size_bytes = name, size_bytes
        self._checksums = checksums
        self._cached: tuple[int, memoryview] | None = None
        """The block that was read last, while the head is read, which takes several looks at it."""
        blocks = block_count(size_bytes)
        if checksums is not None and len(checksums) != blocks:
            raise CheckpointError(f"{name} has {blocks} blocks, its checksums are of {len(checksums)}")
        try:
            self.layout = parse(self._range, size_bytes)
            buffer = self._range(self.layout.skeleton_start, self.layout.skeleton_capacity)
            self.skeleton = self.layout.skeleton_in(buffer)
        except CheckpointError as error:
            raise CheckpointError(str(error) if name in str(error) else f"{name}: {error}") from None
        self._cached = None

    def close(self) -> None:
        self._cached = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def read(self, entry: TensorEntry, start: int, size: int) -> bytes:
        if not 0 <= start <= start + size <= entry.size_bytes:
            raise CheckpointError(f"{self.name}: {entry.name} has {entry.size_bytes} bytes, not {start + size}")
        return self._range(entry.start + start, size)

    def block(self, number: int, buffer: memoryview) -> memoryview:
        start = number * BLOCK_BYTES
        size = block_size(number, self.size_bytes)
        content = self._fill(start, buffer[:size])
        if self._checksums is not None:
            self._compare(number, size, checksum(content))
        return content

    def _compare(self, number: int, size: int, found: int) -> None:
        assert self._checksums is not None
        if found != self._checksums[number]:
            start, right = number * BLOCK_BYTES, self._checksums[number]
            where = f"bytes {start} to {start + size}, have the checksum {found:08x}, not {right:08x}"
            raise CheckpointError(f"{self.name} is damaged: its block {number}, {where}")

    def _range(self, start: int, size: int) -> bytes:
        """Return some bytes; from verified blocks, where there are checksums."""
        if start + size > self.size_bytes:
            raise CheckpointError(f"{self.name} has {self.size_bytes} bytes, not {start + size}: it is truncated")
        if self._checksums is None:
            return bytes(self._fill(start, memoryview(bytearray(size))))
        found = bytearray()
        while len(found) < size:
            number, within = divmod(start + len(found), BLOCK_BYTES)
            found += self._cached_block(number)[within : within + size - len(found)]
        return bytes(found)

    def _cached_block(self, number: int) -> memoryview:
        if self._cached is None or self._cached[0] != number:
            buffer = memoryview(bytearray() if self.memory else bytearray(min(BLOCK_BYTES, self.size_bytes)))
            self._cached = number, self.block(number, buffer)
        return self._cached[1]

    def _fill(self, start: int, buffer: memoryview) -> memoryview:
        raise NotImplementedError


class MemoryPart(_Source):
    """A reader of an image in memory: a slot in shared memory, or the process's own memory."""

    def __init__(self, buffer: memoryview, checksums: Sequence[int] | None = None, name: str = "the image") -> None:
        self._buffer = self.memory = memoryview(buffer).cast("B")
        super().__init__(name, len(self._buffer), checksums)

    def close(self) -> None:
        super().close()
        try:
            self._buffer.release()
        except BufferError:
            pass  # a traceback still references it, and releases it later

    def block(self, number: int, buffer: memoryview) -> memoryview:
        start = number * BLOCK_BYTES
        return super().block(number, self._buffer[start : start + BLOCK_BYTES])

    def _fill(self, start: int, buffer: memoryview) -> memoryview:
        return self._buffer[start : start + len(buffer)]


class FilePart(_Source):
    """A reader of an image in a file, on a disk or in shared memory: reading is faster than mapping what is not mapped
    yet."""

    def __init__(
        self,
        path: Path,
        checksums: Sequence[int] | None = None,
        size_bytes: int | None = None,
        root: Path | None = None,
    ) -> None:
        """Open the file. Give `size_bytes`, the size of the image, where the file may be larger; and `root` where no
        link below it is to be followed."""
        try:
            self._file = open_regular(path, root)
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

    def block_into(self, number: int, buffers: Sequence[memoryview]) -> None:
        """Read a block straight into buffers that are together as long as it. They are filled before damage is
        found."""
        start, position, checksum = number * BLOCK_BYTES, number * BLOCK_BYTES, 0
        for buffer in buffers:
            for at in range(0, len(buffer), CHUNK_BYTES):
                chunk = self._fill(position, buffer[at : at + CHUNK_BYTES])
                position += len(chunk)
                if self._checksums is not None:
                    checksum = crc32c(chunk, checksum)
        if self._checksums is not None:
            self._compare(number, position - start, checksum)

    def _fill(self, start: int, buffer: memoryview) -> memoryview:
        done = 0
        while done < len(buffer):
            try:
                size = os.preadv(self._file, [buffer[done:]], start + done)
            except OSError as error:
                raise CheckpointError(f"{self.name} cannot be read: {error.strerror}") from None
            if size == 0:
                raise CheckpointError(f"{self.name} ends after {start + done} bytes: it was truncated while reading")
            done += size
        return buffer


class RangePart(_Source):
    """A reader of an image by `read(start, size)`: from an object store or a peer. It is thread-safe if the function
    is."""

    def __init__(
        self,
        read: Callable[[int, int], bytes],
        size_bytes: int,
        checksums: Sequence[int] | None = None,
        name: str = "the part",
    ) -> None:
        self._read = read
        super().__init__(name, size_bytes, checksums)

    def _fill(self, start: int, buffer: memoryview) -> memoryview:
        content = self._read(start, len(buffer))
        if len(content) != len(buffer):
            raise CheckpointError(f"{self.name} gave {len(content)} bytes from {start} on, not {len(buffer)}")
        buffer[:] = content
        return buffer
