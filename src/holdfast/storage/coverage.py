"""Which part of a tensor a set of regions covers.

A count of values cannot tell: regions that overlap may add up to the size of the tensor while rows of it are missing.
So regions are subtracted from the full tensor one by one, and what remains is what no part has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.storage.header import Path, TensorEntry

Box = tuple[tuple[int, int], ...]
"""A region of a tensor: start and stop in each dimension."""
NAMED_MAX = 3
"""How many missing regions a sentence names."""


class Coverage:
    """A tensor, and the regions of it that no part seen so far has."""

    def __init__(self, shape: Sequence[int]) -> None:
        full = tuple((0, size) for size in shape)
        self._shape = tuple(shape)
        self._missing: list[Box] = [] if _is_empty(full) else [full]

    @property
    def missing(self) -> list[Box]:
        """Return the regions that no part has, in order and without overlap."""
        return sorted(self._missing)

    def add(self, offsets: Sequence[int], shape: Sequence[int]) -> list[Box]:
        """Add a region; return the subregions that it is the first to cover, without overlap."""
        region = tuple((start, start + size) for start, size in zip(offsets, shape, strict=True))
        covered, left = list[Box](), list[Box]()
        for box in self._missing:
            common = _common(box, region)
            if _is_empty(common):
                left.append(box)
            else:
                covered.append(common)
                left += _without(box, common)
        self._missing = left
        return covered

    def describe_missing(self) -> str:
        """Return the missing regions in words: rows, and columns where only some of a row is missing."""
        names = [self._name(box) for box in self.missing[:NAMED_MAX]]
        more = len(self._missing) - len(names)
        return ", ".join(names) + (f" and {more} more regions" if more else "")

    def _name(self, box: Box) -> str:
        if not box:
            return "its value"
        (start, stop), *others = box
        rows = f"row {start}" if stop == start + 1 else f"rows {start} to {stop - 1}"
        if tuple(others) == tuple((0, size) for size in self._shape[1:]):
            return f"{rows} of {self._shape[0]}"
        within = ", ".join(f"{first}:{last}" for first, last in others)
        return f"{rows} of {self._shape[0]} at [{within}]"


def describe_gaps(parts: Iterable[Sequence[TensorEntry]]) -> dict[str, str]:
    """Return the tensors that the parts of a checkpoint do not have completely: name → what is missing.

    Entries of one name that differ in path, dtype or complete shape are different tensors, as they are for a loader.
    """
    found: dict[tuple[str, Path, str, tuple[int, ...]], Coverage] = {}
    for entries in parts:
        for entry in entries:
            key = entry.name, entry.path, entry.dtype, entry.full_shape
            if key not in found:
                found[key] = Coverage(entry.full_shape)
            found[key].add(entry.offsets, entry.shape)
    incomplete: Mapping[str, Coverage] = {key[0]: one for key, one in found.items() if one.missing}
    return {name: coverage.describe_missing() for name, coverage in incomplete.items()}


def _common(one: Box, other: Box) -> Box:
    return tuple((max(first, start), min(last, stop)) for (first, last), (start, stop) in zip(one, other, strict=True))


def _is_empty(box: Box) -> bool:
    return any(start >= stop for start, stop in box)


def _without(box: Box, inner: Box) -> list[Box]:
    """Return what is left of a box when a box inside of it is removed: at most two boxes a dimension."""
    left: list[Box] = []
    rest = box
    for dimension, (start, stop) in enumerate(inner):
        first, last = rest[dimension]
        for side in ((first, start), (stop, last)):
            if side[0] < side[1]:
                left.append((*rest[:dimension], side, *rest[dimension + 1 :]))
        rest = (*rest[:dimension], (start, stop), *rest[dimension + 1 :])
    return left
