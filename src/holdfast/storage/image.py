"""A part of a state as one run of bytes, the same in shared memory, in a file and on the way to another node.

    ┌──────────┬──────────┬───────────────────────────────┬───────────────────────────────┬───┬──────┐
    │ header   │ skeleton │ frame: before │ values │ after │ frame: before │ values │ after │ … │ zeros│
    └──────────┴──────────┴───────────────────────────────┴───────────────────────────────┴───┴──────┘

It is a file of two faces. For whoever knows safetensors it is such a file, the frames being tensors of padding. For
stock torch each frame is a torch.save archive of one tensor, found by the `.metadata` beside the files (pickles.py).

All but the values and the skeleton follows from what the tensors are, not from what is in them: it is written once
(`Layout.frame`), and a snapshot writes values and skeleton over the last ones. The skeleton has room to grow; one that
outgrows it needs a new layout.

The order of the entries is the order of the pieces that were given to `plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from crc32c import crc32c

from holdfast.errors import CheckpointError
from holdfast.storage import header
from holdfast.storage.frames import Frame, frame
from holdfast.storage.header import PAGE_BYTES
from holdfast.storage.pieces import Entry, Piece

__all__ = ["BLOCK_BYTES", "Entry", "Layout", "Piece", "block_checksums", "parse", "plan", "roomy"]

BLOCK_BYTES = 8 * 2**20
"""What one checksum is of: large enough for one read to be worth its call, small enough to stay in a cache."""
LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """What lies where in an image. Places count from its first byte."""

    entries: tuple[Entry, ...]
    size_bytes: int
    """A multiple of the page, so that it can be mapped and written without buffering."""
    skeleton_start: int
    skeleton_capacity: int
    """Bytes for the skeleton, the 8 of its length included."""
    head: bytes = field(repr=False)
    about: Mapping[str, str] = field(default_factory=dict)

    def frame(self, buffer: memoryview) -> None:
        """Write everything but values and skeleton. Done once."""
        self._check_room(buffer)
        buffer[: len(self.head)] = self.head
        end = self.skeleton_start + self.skeleton_capacity
        for entry in self.entries:
            around = _frame(entry)
            buffer[entry.frame_start : entry.start] = around.before
            end = entry.frame_start + entry.frame_bytes
            buffer[entry.end : end] = around.after
        buffer[end : self.size_bytes] = bytes(self.size_bytes - end)

    def holds(self, skeleton: bytes) -> bool:
        """Whether there is room for the skeleton: if not, a new layout is needed."""
        return len(skeleton) + LENGTH_BYTES <= self.skeleton_capacity

    def put_skeleton(self, buffer: memoryview, skeleton: bytes) -> None:
        """Write the skeleton over the last one."""
        self._check_room(buffer)
        if not self.holds(skeleton):
            raise CheckpointError(f"a skeleton of {len(skeleton)} bytes does not fit into {self.skeleton_capacity}")
        content = len(skeleton).to_bytes(LENGTH_BYTES, "little") + skeleton
        end = self.skeleton_start + self.skeleton_capacity
        buffer[self.skeleton_start : end] = content + bytes(self.skeleton_capacity - len(content))

    def skeleton(self, buffer: memoryview) -> bytes:
        """The skeleton in an image."""
        self._check_room(buffer)
        end = self.skeleton_start + self.skeleton_capacity
        return self.skeleton_in(buffer[self.skeleton_start : end])

    def skeleton_in(self, room: memoryview | bytes) -> bytes:
        """The skeleton, given the bytes of its room."""
        length = int.from_bytes(room[:LENGTH_BYTES], "little")
        if len(room) != self.skeleton_capacity or length > self.skeleton_capacity - LENGTH_BYTES:
            raise CheckpointError(f"its skeleton would have {length} bytes in a room of {self.skeleton_capacity}")
        return bytes(room[LENGTH_BYTES : LENGTH_BYTES + length])

    def _check_room(self, buffer: memoryview) -> None:
        if buffer.nbytes < self.size_bytes or buffer.itemsize != 1:
            raise CheckpointError(f"an image of {self.size_bytes} bytes does not fit into {buffer.nbytes}")


def roomy(skeleton_bytes: int) -> int:
    """The capacity to plan for a skeleton of this length: twice as much and a page, in whole pages."""
    return _rounded(LENGTH_BYTES + 2 * skeleton_bytes + PAGE_BYTES)


def plan(pieces: Iterable[Piece], skeleton_capacity: int, about: Mapping[str, str] | None = None) -> Layout:
    """Where everything will lie: a pure function, so that all who know the pieces agree. `about` is for people."""
    capacity, about = max(_rounded(skeleton_capacity), PAGE_BYTES), dict(about or {})
    entries: list[Entry] = []
    end = capacity
    for piece in pieces:
        around = frame(end, piece.dtype, piece.shape, piece.size_bytes)
        start, size_bytes = end + len(around.before), len(around.before) + piece.size_bytes + len(around.after)
        entries.append(_placed(piece, start, end, size_bytes))
        end += size_bytes
    data_bytes = _rounded(end)
    head = header.encode(header.Head(tuple(entries), 0, capacity, about), data_bytes)
    return _layout(header.Head(tuple(entries), 0, capacity, about), head, len(head) + data_bytes)


def parse(head: Callable[[int, int], bytes], size_bytes: int) -> Layout:
    """The layout of an image of so many bytes, of which `head(start, size)` reads some. Trusts nothing."""
    length = header.header_bytes(head(0, 8), size_bytes)
    content = head(0, length)
    if len(content) != length:
        raise CheckpointError(f"it ends within its header, after {len(content)} bytes")
    return _layout(header.decode(content[8:], size_bytes - length), content, size_bytes)


def block_checksums(buffer: memoryview) -> list[int]:
    """The crc32c of each block."""
    return list(_checksums(memoryview(buffer).cast("B")))


def _checksums(buffer: memoryview) -> Iterator[int]:
    for start in range(0, len(buffer), BLOCK_BYTES):
        yield crc32c(buffer[start : start + BLOCK_BYTES])


def _layout(said: header.Head, head: bytes, size_bytes: int) -> Layout:
    """With places that count from the image's first byte."""
    moved = tuple(
        _placed(item, item.start + len(head), item.frame_start + len(head), item.frame_bytes) for item in said.entries
    )
    return Layout(moved, size_bytes, said.skeleton_start + len(head), said.skeleton_capacity, head, said.about)


def _placed(piece: Piece, start: int, frame_start: int, frame_bytes: int) -> Entry:
    return Entry(
        name=piece.name,
        path=piece.path,
        index=piece.index,
        dtype=piece.dtype,
        shape=piece.shape,
        offsets=piece.offsets,
        whole=piece.whole,
        aliases=piece.aliases,
        start=start,
        frame_start=frame_start,
        frame_bytes=frame_bytes,
    )


def _frame(entry: Entry) -> Frame:
    around = frame(entry.frame_start, entry.dtype, entry.shape, entry.size_bytes)
    size_bytes = len(around.before) + entry.size_bytes + len(around.after)
    if entry.frame_start + len(around.before) != entry.start or size_bytes != entry.frame_bytes:
        raise CheckpointError(f"{entry.name} is not framed as this Holdfast would do it")
    return around


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
