"""What a tensor in an image is."""

from __future__ import annotations

import math

from msgspec import Struct

Path = tuple[str | int, ...]

ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
}
"""Bytes of one element, by the name that torch has for the dtype."""


class Piece(Struct, frozen=True, kw_only=True):
    """A tensor, or some of its rows, and where in the whole tensor they lie."""

    name: str
    """For people and stock loaders: the path in dots, the same in every part that has a piece of it."""
    path: Path
    """Where it stands in the state."""
    index: int
    """Number of the tensor in the skeleton of its shard."""
    dtype: str
    shape: tuple[int, ...]
    """Of the piece."""
    offsets: tuple[int, ...]
    """Where the piece begins in the whole tensor: the one that all shards and shares together hold."""
    whole: tuple[int, ...]
    """The whole tensor's shape."""
    aliases: tuple[Path, ...] = ()
    """Other places in the state where the same tensor stands: tied weights."""

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Entry(Piece, frozen=True, kw_only=True):
    """A piece that has its place in an image. Places count from the image's first byte."""

    start: int
    frame_start: int
    """The archive around it, for stock torch."""
    frame_bytes: int

    @property
    def end(self) -> int:
        return self.start + self.size_bytes


class Stored(Struct, frozen=True, kw_only=True):
    """A value that is no tensor, in a file of such."""

    name: str
    path: Path
    start: int
    size_bytes: int
