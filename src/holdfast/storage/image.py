"""A part of a state as one run of bytes, the same in shared memory, in a file and on the way to another node.

    ┌──────────┬──────────┬───────────────────────────────┬───────────────────────────────┬───┬──────┐
    │ header   │ skeleton │ frame: before │ values │ after │ frame: before │ values │ after │ … │ zeros│
    └──────────┴──────────┴───────────────────────────────┴───────────────────────────────┴───┴──────┘

It is a file in two formats. For readers of safetensors it is such a file, the frames being tensors of padding. For
stock torch each frame is a torch.save archive of one tensor, found by the `.metadata` beside the files (pickles.py).

All but the values and the skeleton follows from what the tensors are, not from what is in them: it is written once
(`ImageLayout.frame`), and a snapshot writes values and skeleton over the last ones. The skeleton may grow up to its
capacity; a larger one needs a new layout.

The order of the entries is the order of the regions that were given to `plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from holdfast.errors import CheckpointError
from holdfast.storage import header
from holdfast.storage.archive_frames import Frame, frame
from holdfast.storage.header import PAGE_BYTES, TensorEntry, TensorRegion

__all__ = ["ImageLayout", "TensorEntry", "TensorRegion", "capacity_for", "parse", "plan"]

LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """The places of everything in an image. Offsets count from its first byte."""

    entries: tuple[TensorEntry, ...]
    size_bytes: int
    """A multiple of the page, so that it can be mapped and written without buffering."""
    skeleton_start: int
    skeleton_capacity: int
    """Bytes for the skeleton, the 8 of its length included."""
    head: bytes = field(repr=False)
    about: Mapping[str, str] = field(default_factory=dict)

    def frame(self, buffer: memoryview) -> None:
        """Write everything but values and skeleton, once for each buffer."""
        self._check_capacity(buffer)
        buffer[: len(self.head)] = self.head
        end = self.skeleton_start + self.skeleton_capacity
        for entry in self.entries:
            around = _frame(entry)
            buffer[entry.frame_start : entry.start] = around.before
            end = entry.frame_start + entry.frame_bytes
            buffer[entry.end : end] = around.after
        buffer[end : self.size_bytes] = bytes(self.size_bytes - end)

    def fits(self, skeleton: bytes) -> bool:
        """Return whether the skeleton fits; if not, a new layout is needed."""
        return len(skeleton) + LENGTH_BYTES <= self.skeleton_capacity

    def put_skeleton(self, buffer: memoryview, skeleton: bytes) -> None:
        """Write the skeleton over the last one."""
        self._check_capacity(buffer)
        if not self.fits(skeleton):
            raise CheckpointError(f"a skeleton of {len(skeleton)} bytes does not fit into {self.skeleton_capacity}")
        content = len(skeleton).to_bytes(LENGTH_BYTES, "little") + skeleton
        end = self.skeleton_start + self.skeleton_capacity
        buffer[self.skeleton_start : end] = content + bytes(self.skeleton_capacity - len(content))

    def skeleton(self, buffer: memoryview) -> bytes:
        """Return the skeleton in an image."""
        self._check_capacity(buffer)
        end = self.skeleton_start + self.skeleton_capacity
        return self.skeleton_in(buffer[self.skeleton_start : end])

    def skeleton_in(self, reserved: memoryview | bytes) -> bytes:
        """Return the skeleton, given the bytes that are reserved for it."""
        length = int.from_bytes(reserved[:LENGTH_BYTES], "little")
        if len(reserved) != self.skeleton_capacity or length > self.skeleton_capacity - LENGTH_BYTES:
            raise CheckpointError(f"its skeleton would have {length} bytes in a space of {self.skeleton_capacity}")
        return bytes(reserved[LENGTH_BYTES : LENGTH_BYTES + length])

    def _check_capacity(self, buffer: memoryview) -> None:
        if buffer.nbytes < self.size_bytes or buffer.itemsize != 1:
            raise CheckpointError(f"an image of {self.size_bytes} bytes does not fit into {buffer.nbytes}")


def capacity_for(skeleton_bytes: int) -> int:
    """Return the capacity to plan for a skeleton of this length: twice as much and a page, in full pages."""
    return _rounded(LENGTH_BYTES + 2 * skeleton_bytes + PAGE_BYTES)


def plan(
    regions: Iterable[TensorRegion], skeleton_capacity: int, about: Mapping[str, str] | None = None
) -> ImageLayout:
    """Return where everything will lie. This is a pure function, so that all who know the regions agree. `about` is for
    people."""
    capacity, about = max(_rounded(skeleton_capacity), PAGE_BYTES), dict(about or {})
    if capacity > header.SKELETON_BYTES_MAX:
        raise CheckpointError(
            f"the state has {capacity / 2**20:.0f} MiB beside its tensors, {header.SKELETON_BYTES_MAX / 2**20:.0f} are"
            " allowed: make tensors of large lists and texts"
        )
    entries: list[TensorEntry] = []
    end = capacity
    for region in regions:
        around = frame(end, region.dtype, region.shape, region.size_bytes)
        start, size_bytes = end + len(around.before), len(around.before) + region.size_bytes + len(around.after)
        entries.append(_entry_at(region, start, end, size_bytes))
        end += size_bytes
    data_bytes = _rounded(end)
    head = header.encode(header.ImageHead(tuple(entries), 0, capacity, about), data_bytes)
    return _layout(header.ImageHead(tuple(entries), 0, capacity, about), head, len(head) + data_bytes)


def parse(head: Callable[[int, int], bytes], size_bytes: int) -> ImageLayout:
    """Return the layout of an image of `size_bytes`, of which `head(start, size)` reads a range. It trusts nothing."""
    length = header.header_bytes(head(0, 8), size_bytes)
    content = head(0, length)
    if len(content) != length:
        raise CheckpointError(f"it ends within its header, after {len(content)} bytes")
    return _layout(header.decode(content[8:], size_bytes - length), content, size_bytes)


def _layout(decoded: header.ImageHead, head: bytes, size_bytes: int) -> ImageLayout:
    """Return the layout with offsets that count from the image's first byte."""
    shift = len(head)
    entries = tuple(
        _entry_at(item, item.start + shift, item.frame_start + shift, item.frame_bytes) for item in decoded.entries
    )
    start, capacity = decoded.skeleton_start + shift, decoded.skeleton_capacity
    return ImageLayout(entries, size_bytes, start, capacity, head, decoded.about)


def _entry_at(region: TensorRegion, start: int, frame_start: int, frame_bytes: int) -> TensorEntry:
    return TensorEntry(
        name=region.name,
        path=region.path,
        index=region.index,
        dtype=region.dtype,
        shape=region.shape,
        offsets=region.offsets,
        full_shape=region.full_shape,
        aliases=region.aliases,
        start=start,
        frame_start=frame_start,
        frame_bytes=frame_bytes,
    )


def _frame(entry: TensorEntry) -> Frame:
    around = frame(entry.frame_start, entry.dtype, entry.shape, entry.size_bytes)
    size_bytes = len(around.before) + entry.size_bytes + len(around.after)
    if entry.frame_start + len(around.before) != entry.start or size_bytes != entry.frame_bytes:
        raise CheckpointError(f"{entry.name} is not framed as this version of Holdfast does it")
    return around


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
