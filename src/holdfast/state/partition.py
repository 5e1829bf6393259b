"""A state as images: the ranks that hold the same shard each have a share of it, and a share is an image.

Which rows of which tensor are in which share follows from what the tensors are, so the ranks agree without
communicating. Shares are complete tensors, assigned from the largest to the smallest, each to the lightest share; one
that is too large for an even result is split in rows before. The skeleton of an image is that of its shard, in every
share of it.
State in which the ranks may differ (running statistics, a position in the data) is all in the first share: what is
loaded is then what one rank had, not a mixture. State that a rank has for itself (per_rank_state.py) is all in its own
share.

Offsets and full shape of a tensor come from its sharding; rows are added to that. A shard that is not a plain region of
the full tensor (two kinds of parallelism, interleaved) gets a name of its own.
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
from holdfast.state.block_loader import as_bytes
from holdfast.state.dtensors import local_region, place_of
from holdfast.state.load_parts import load_parts
from holdfast.state.per_rank_state import LOCAL
from holdfast.state.tensor_specs import DTYPE_NAMES, DTYPES, Alias, FlatTree, Path, TensorSpec, dotted
from holdfast.state.tree import aliases, describe
from holdfast.storage.header import RESERVED
from holdfast.storage.image import ImageLayout, TensorRegion, capacity_for, plan
from holdfast.storage.part_readers import FilePart, MemoryPart, PartSource, RangePart
from holdfast.torch_compat import copy_all

__all__ = [
    "FilePart",
    "MemoryPart",
    "PartPlan",
    "PartSource",
    "PartitionSpec",
    "RangePart",
    "load_parts",
    "regions_of",
    "views",
    "write_image",
]

GRAINS = 8
"""A chunk is at most an eighth of a fair share: the lightest and the heaviest share differ by less than that."""
CHUNK_BYTES_MIN = 4096
"""Smaller ones are not worth their frames."""


class PartitionSpec(NamedTuple):
    """A region of a state, and the live tensor that it is copied from."""

    region: TensorRegion
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class RowRange:
    """Some rows of a tensor of a state; of one without dimensions, its only one."""

    index: int
    start: int
    stop: int


class PartPlan:
    """The plan of one share of a state. It is made once, and checked before each snapshot for whether it still fits."""

    def __init__(
        self,
        flat: FlatTree,
        shares: int,
        share: int,
        about: Mapping[str, str] | None = None,
        first: Collection[int] = (),
    ) -> None:
        """Make a plan. `first` are the numbers of the tensors that are all in the first share."""
        self._specs, self._aliases = describe(flat), aliases(flat)
        self._tensors = flat.tensors
        self._rows = rows_of(self._specs, shares, share, first)
        regions = _regions(self._specs, self._aliases, self._rows)
        self.layout: ImageLayout = plan(regions, capacity_for(len(flat.skeleton)), about or {})

    def fits(self, flat: FlatTree) -> bool:
        """Return whether the state still has these tensors in these places, and a skeleton that fits. A cached walk
        that found nothing but other values returns the very same list, which need not be compared."""
        if flat.tensors is not self._tensors:
            if describe(flat) != self._specs or aliases(flat) != self._aliases:
                return False
            self._tensors = flat.tensors
        return self.layout.fits(flat.skeleton)

    def tensors(self, flat: FlatTree) -> list[torch.Tensor]:
        """Return what to copy of a state that fits: views of the live tensors, in the order of the layout's entries."""
        return [_view(flat.tensors[rows.index], rows) for rows in self._rows]


def regions_of(flat: FlatTree, shares: int, share: int) -> list[PartitionSpec]:
    """Return the regions of a share, in the order of its image."""
    described = describe(flat)
    rows = rows_of(described, shares, share)
    regions = _regions(described, aliases(flat), rows)
    pairs = zip(regions, rows, strict=True)
    return [PartitionSpec(region, _view(flat.tensors[row.index], row)) for region, row in pairs]


def views(layout: ImageLayout, buffer: memoryview | mmap.mmap | bytearray) -> list[torch.Tensor]:
    """Return the tensors of an image as views of it, in the order of its entries."""
    memory = as_bytes(buffer)
    return [
        memory[entry.start : entry.end].view(DTYPES[entry.dtype]).view(entry.shape)
        if entry.size_bytes
        else torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="cpu")
        for entry in layout.entries
    ]


def write_image(flat: FlatTree, shares: int, share: int, about: Mapping[str, str] | None = None) -> mmap.mmap:
    """Return a complete image in memory of our own, for a process without slots: survivors that leave a dump."""
    planned = PartPlan(flat, shares, share, about)
    image = mmap.mmap(-1, planned.layout.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    fill_image(image, planned, flat)
    return image


def fill_image(memory: mmap.mmap, planned: PartPlan, flat: FlatTree) -> None:
    """Write a complete image into memory of its size."""
    with memoryview(memory) as buffer:
        planned.layout.frame(buffer)
        planned.layout.put_skeleton(buffer, flat.skeleton)
    targets, sources = views(planned.layout, memory), planned.tensors(flat)
    if targets:
        with torch.no_grad():
            copy_all(targets, sources)


# --- which share has what


def rows_of(described: Sequence[TensorSpec], shares: int, share: int, first: Collection[int] = ()) -> list[RowRange]:
    """Return the rows that are in a share: its part of what all ranks have alike, and all of a rank's own. The latter
    comes last in the state, and may have another size on other ranks: it has no influence on how the rest is
    divided."""
    shared = [spec for spec in described if spec.path[0] != LOCAL]
    own = [RowRange(index, 0, _row_count(described[index])) for index in range(len(shared), len(described))]
    return share_out(shared, shares, first)[share] + own


def share_out(described: Sequence[TensorSpec], shares: int, first: Collection[int] = ()) -> list[list[RowRange]]:
    """Return for each share its rows, in the order of the state."""
    fair = -(-sum(spec.size_bytes for spec in described) // shares)
    grain = max(fair // GRAINS, CHUNK_BYTES_MIN) if shares > 1 else fair
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


def _chunks(spec: TensorSpec, grain: int) -> list[tuple[int, int]]:
    """Return a tensor in chunks of about the grain's size, or undivided: rows and bytes of each."""
    rows = _row_count(spec)
    count = max(1, min(rows, -(-spec.size_bytes // max(grain, 1))))
    row_bytes = spec.size_bytes // rows if rows else 0
    bounds = [rows * at // count for at in range(count + 1)]
    return [(stop - start, (stop - start) * row_bytes) for start, stop in pairwise(bounds)]


def _row_count(spec: TensorSpec) -> int:
    return spec.shape[0] if spec.shape else 1


def _ranges(given: Mapping[int, Mapping[int, int]], shares: int) -> list[list[RowRange]]:
    """Return how many rows of which tensor are in which share → which rows: all that a share has of a tensor is
    contiguous."""
    found: list[list[RowRange]] = [[] for _ in range(shares)]
    for index in sorted(given):
        start = 0
        for share in sorted(given[index]):
            stop = start + given[index][share]
            found[share].append(RowRange(index, start, stop))
            start = stop
    return found


def _regions(described: Sequence[TensorSpec], tied: Sequence[Alias], rows: Sequence[RowRange]) -> list[TensorRegion]:
    wanted = {row.index for row in rows}
    places = {index: place_of(spec.layout, spec.shape) for index, spec in enumerate(described) if index in wanted}
    names = _names([_shown_path(spec) for spec in described])
    others: dict[int, tuple[Path, ...]] = {}
    for path, index in tied:
        others[index] = (*others.get(index, ()), path)
    return [
        _region(row, described[row.index], names[row.index], others.get(row.index, ()), *places[row.index])
        for row in rows
    ]


def _region(
    rows: RowRange,
    spec: TensorSpec,
    name: str,
    tied: tuple[Path, ...],
    offsets: tuple[int, ...],
    full_shape: tuple[int, ...],
) -> TensorRegion:
    has_rows = bool(spec.shape)
    return TensorRegion(
        name=name,
        path=_shown_path(spec),
        index=rows.index,
        dtype=DTYPE_NAMES[spec.dtype],
        shape=(rows.stop - rows.start, *spec.shape[1:]) if has_rows else (),
        offsets=(offsets[0] + rows.start, *offsets[1:]) if has_rows else (),
        full_shape=full_shape,
        aliases=tied,
    )


def _view(tensor: torch.Tensor, rows: RowRange) -> torch.Tensor:
    return tensor[rows.start : rows.stop] if tensor.dim() else tensor


# --- its place in the full tensor


def _is_region(spec: TensorSpec) -> bool:
    assert spec.layout is not None
    try:
        return tuple(part.stop - part.start for part in local_region(spec.layout)) == spec.shape
    except StateError:  # interleaved
        return False


def _shown_path(spec: TensorSpec) -> Path:
    if spec.layout is None or _is_region(spec):
        return spec.path
    return *spec.path, "@" + "-".join(map(str, spec.layout.coordinate))


def _names(paths: Sequence[Path]) -> list[str]:
    """Return each path in dots, made unique: keys may contain dots, so two paths may read the same."""
    names: list[str] = []
    used: set[str] = set()
    for path in paths:
        plain = dotted(path)
        plain = f"state.{plain}" if plain.startswith(RESERVED) else plain
        name, count = plain, 1
        while name in used:
            count += 1
            name = f"{plain}#{count}"
        used.add(name)
        names.append(name)
    return names
