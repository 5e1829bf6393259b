"""A state as images: the ranks that hold the same shard each have a share of it, and a share is an image.

Which rows of which tensor are in which share follows from what the tensors are, so the ranks agree without a word.
Shares are whole tensors, given out from the largest to the smallest, each to the lightest share; one that is too large
for that to come out even is cut in rows before. An image's skeleton is that of the whole shard, in every share of it.
What the ranks may hold otherwise than each other (running statistics, a position in the data) is in the first share
with all of it: what is loaded is then what one rank had, not a mixture.

What a tensor is in the whole (its place, its full shape) comes from how it is sharded; rows count on top of that.
A shard that is no plain region of the whole (of two kinds of parallelism, interleaved) stands under a name of its own.
"""

from __future__ import annotations

import heapq
import mmap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from holdfast.errors import StateError
from holdfast.state.leaves import DTYPE_NAMES, DTYPES, Alias, Flat, Path, Spec, dotted
from holdfast.state.loading import load_parts
from holdfast.state.moves import as_bytes
from holdfast.state.sharded import region
from holdfast.state.tree import aliases, describe
from holdfast.storage.header import RESERVED
from holdfast.storage.image import Layout, Piece, plan, roomy
from holdfast.storage.sources import FilePart, MemoryPart, PartSource, RangePart

__all__ = [
    "Cut",
    "FilePart",
    "MemoryPart",
    "PartPlan",
    "PartSource",
    "RangePart",
    "cut",
    "layout_for",
    "load_parts",
    "views",
    "write_image",
]

GRAINS = 8
"""What is given out is at most an eighth of a fair share: the lightest and the heaviest differ by less than that."""
PIECE_BYTES_MIN = 4096
"""Smaller ones are not worth their frames."""


class Cut(NamedTuple):
    """A piece of a state, and the live tensor that it is copied from."""

    piece: Piece
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a tensor of a state; of one without dimensions, its only one."""

    index: int
    start: int
    stop: int


class PartPlan:
    """One share of a state that looks like this one. Made once; asked before each snapshot whether it still fits."""

    def __init__(
        self,
        flat: Flat,
        shares: int,
        share: int,
        about: Mapping[str, str] | None = None,
        first: Collection[int] = (),
    ) -> None:
        """`first`: the numbers of the tensors that are all in the first share."""
        self._specs, self._aliases = describe(flat), aliases(flat)
        self._tensors = flat.tensors
        self._rows = share_out(self._specs, shares, first)[share]
        pieces = _pieces(self._specs, self._aliases, self._rows)
        self.layout: Layout = plan(pieces, roomy(len(flat.skeleton)), about or {})

    def fits(self, flat: Flat) -> bool:
        """Whether the state still has these tensors, so placed, and a skeleton for which there is room. A roll that
        found nothing but other values gives the very same list of them, which need not be gone through."""
        if flat.tensors is not self._tensors:
            if describe(flat) != self._specs or aliases(flat) != self._aliases:
                return False
            self._tensors = flat.tensors
        return self.layout.holds(flat.skeleton)

    def tensors(self, flat: Flat) -> list[torch.Tensor]:
        """What to copy, of a state that fits: views of the live tensors, in the order of the layout's entries."""
        return [_view(flat.tensors[rows.index], rows) for rows in self._rows]


def cut(flat: Flat, shares: int, share: int) -> list[Cut]:
    """The pieces of a share, in the order of its image."""
    described = describe(flat)
    rows = share_out(described, shares)[share]
    pieces = _pieces(described, aliases(flat), rows)
    return [Cut(piece, _view(flat.tensors[row.index], row)) for piece, row in zip(pieces, rows, strict=True)]


def layout_for(flat: Flat, shares: int, share: int, about: Mapping[str, str] | None = None) -> Layout:
    """Where everything lies in the image of a share."""
    return PartPlan(flat, shares, share, about).layout


def views(layout: Layout, buffer: memoryview | mmap.mmap | bytearray) -> list[torch.Tensor]:
    """The tensors of an image, where they lie, in the order of its entries."""
    memory = as_bytes(buffer)
    return [
        memory[entry.start : entry.end].view(DTYPES[entry.dtype]).view(entry.shape)
        if entry.size_bytes
        else torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        for entry in layout.entries
    ]


def write_image(flat: Flat, shares: int, share: int, about: Mapping[str, str] | None = None) -> mmap.mmap:
    """The whole image in memory of our own, for whoever has no slots: survivors that leave a dump."""
    planned = PartPlan(flat, shares, share, about)
    image = mmap.mmap(-1, planned.layout.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with memoryview(image) as buffer:
        planned.layout.frame(buffer)
        planned.layout.put_skeleton(buffer, flat.skeleton)
    targets, sources = views(planned.layout, image), planned.tensors(flat)
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)
    return image


# --- who has what


def share_out(described: Sequence[Spec], shares: int, first: Collection[int] = ()) -> list[list[Rows]]:
    """For each share its rows, in the order of the state."""
    fair = -(-sum(spec.size_bytes for spec in described) // shares)
    grain = max(fair // GRAINS, PIECE_BYTES_MIN) if shares > 1 else fair
    others = [(index, spec) for index, spec in enumerate(described) if index not in first]
    chunks = [(size, index, rows) for index, spec in others for rows, size in _chunks(spec, grain)]
    chunks.sort(key=lambda chunk: (-chunk[0], chunk[1]))
    lightest = [(0, share) for share in range(shares)]
    heapq.heapreplace(lightest, (sum(described[index].size_bytes for index in first), 0))
    given: dict[int, dict[int, int]] = {index: {0: _row_count(described[index])} for index in first}
    for size_bytes, index, rows in chunks:
        weight, share = heapq.heappop(lightest)
        counts = given.setdefault(index, {})
        counts[share] = counts.get(share, 0) + rows
        heapq.heappush(lightest, (weight + size_bytes, share))
    return _ranges(given, shares)


def _chunks(spec: Spec, grain: int) -> list[tuple[int, int]]:
    """A tensor in pieces of about the grain's size, or whole: rows and bytes of each."""
    rows = _row_count(spec)
    count = max(1, min(rows, -(-spec.size_bytes // max(grain, 1))))
    row_bytes = spec.size_bytes // rows if rows else 0
    bounds = [rows * at // count for at in range(count + 1)]
    return [(stop - start, (stop - start) * row_bytes) for start, stop in pairwise(bounds)]


def _row_count(spec: Spec) -> int:
    return spec.shape[0] if spec.shape else 1


def _ranges(given: Mapping[int, Mapping[int, int]], shares: int) -> list[list[Rows]]:
    """How many rows of which tensor in which share → which: all that a share has of a tensor lies together."""
    found: list[list[Rows]] = [[] for _ in range(shares)]
    for index in sorted(given):
        start = 0
        for share in sorted(given[index]):
            stop = start + given[index][share]
            found[share].append(Rows(index, start, stop))
            start = stop
    return found


def _pieces(described: Sequence[Spec], tied: Sequence[Alias], rows: Sequence[Rows]) -> list[Piece]:
    wanted = {row.index for row in rows}
    places = {index: _place(spec) for index, spec in enumerate(described) if index in wanted}
    names = _names([_shown_path(spec) for spec in described])
    others: dict[int, tuple[Path, ...]] = {}
    for path, index in tied:
        others[index] = (*others.get(index, ()), path)
    return [
        _piece(row, described[row.index], names[row.index], others.get(row.index, ()), *places[row.index])
        for row in rows
    ]


def _piece(
    rows: Rows, spec: Spec, name: str, tied: tuple[Path, ...], offsets: tuple[int, ...], whole: tuple[int, ...]
) -> Piece:
    has_rows = bool(spec.shape)
    return Piece(
        name=name,
        path=_shown_path(spec),
        index=rows.index,
        dtype=DTYPE_NAMES[spec.dtype],
        shape=(rows.stop - rows.start, *spec.shape[1:]) if has_rows else (),
        offsets=(offsets[0] + rows.start, *offsets[1:]) if has_rows else (),
        whole=whole,
        aliases=tied,
    )


def _view(tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    return tensor[rows.start : rows.stop] if tensor.dim() else tensor


# --- where it lies in the whole


def _place(spec: Spec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where a rank's tensor begins in the whole, and the whole's shape."""
    if spec.layout is None or not _is_region(spec):
        return (0,) * len(spec.shape), spec.shape
    return tuple(part.start for part in region(spec.layout)), spec.layout.shape


def _is_region(spec: Spec) -> bool:
    assert spec.layout is not None
    try:
        return tuple(part.stop - part.start for part in region(spec.layout)) == spec.shape
    except StateError:  # interleaved
        return False


def _shown_path(spec: Spec) -> Path:
    if spec.layout is None or _is_region(spec):
        return spec.path
    return *spec.path, "@" + "-".join(map(str, spec.layout.coordinate))


def _names(paths: Sequence[Path]) -> list[str]:
    """Each path in dots, made unique: keys may contain dots, so two paths may read the same."""
    names: list[str] = []
    taken: set[str] = set()
    for path in paths:
        plain = dotted(path)
        plain = f"state.{plain}" if plain.startswith(RESERVED) else plain
        name, count = plain, 1
        while name in taken:
            count += 1
            name = f"{plain}#{count}"
        taken.add(name)
        names.append(name)
    return names
