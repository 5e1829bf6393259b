"""Full tensors that several shards of a checkpoint have under one name: are they the same?

A DTensor says which region of a full tensor it is. A plain tensor does not: a layer that is cut by hand, or an expert,
has the same name on every rank and other numbers. Such tensors are loaded by the number of the shard, into the layout
that they were saved in. Into another layout they would be a mixture, so they are compared, byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from holdfast.errors import StateError
from holdfast.state.tensor_specs import Path, dotted
from holdfast.storage.image import TensorEntry
from holdfast.storage.part_readers import PartSource
from holdfast.util.blocks import BLOCK_BYTES


class StoredRows(NamedTuple):
    """Some rows of a tensor, and the part that has them."""

    source: PartSource
    entry: TensorEntry


def have_same_bytes(one: Sequence[StoredRows], other: Sequence[StoredRows]) -> bool:
    """Return whether two copies of a tensor, each given by its rows in order, have the same bytes. At most two blocks
    are in memory."""
    if sum(rows.entry.size_bytes for rows in one) != sum(rows.entry.size_bytes for rows in other):
        return False
    bounds = sorted({*_bounds(one), *_bounds(other)})
    for start, stop in pairwise(bounds):
        for at in range(start, stop, BLOCK_BYTES):
            size = min(BLOCK_BYTES, stop - at)
            if _read(one, at, size) != _read(other, at, size):
                return False
    return True


def refusal(path: Path, one: int, other: int) -> StateError:
    """Return the error for a tensor that two shards have with other content each."""
    return StateError(
        f"{dotted(path)} is another tensor on shard {one} than on shard {other}, and neither says which region of a"
        " full tensor it is: load it in the layout that it was saved in, or make it a DTensor before it is saved"
    )


def _bounds(copies: Sequence[StoredRows]) -> list[int]:
    bounds = [0]
    for rows in copies:
        bounds.append(bounds[-1] + rows.entry.size_bytes)
    return bounds


def _read(copies: Sequence[StoredRows], at: int, size: int) -> bytes:
    """Return bytes that lie within the rows of one part."""
    for rows in copies:
        if at < rows.entry.size_bytes:
            return rows.source.read(rows.entry, at, size)
        at -= rows.entry.size_bytes
    return b""
