"""Small images for tests."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.storage.image import Layout, Piece, plan


def piece(name: str, dtype: str, shape: Sequence[int], index: int = 0, **fields: object) -> Piece:
    """A whole tensor, unless the fields say otherwise."""
    said = {"offsets": (0,) * len(shape), "whole": tuple(shape), "path": tuple(name.split(".")), **fields}
    return Piece(name=name, dtype=dtype, shape=tuple(shape), index=index, **said)  # type: ignore[arg-type]


def image_of(pieces: Sequence[Piece], skeleton: bytes = b"skeleton") -> tuple[Layout, bytearray]:
    """An image whose tensors count upwards, byte by byte."""
    layout = plan(pieces, len(skeleton) + 100, {"job": "a test"})
    image = bytearray(layout.size_bytes)
    layout.frame(memoryview(image))
    layout.put_skeleton(memoryview(image), skeleton)
    for entry in layout.entries:
        is_bits = entry.dtype == "bool"
        image[entry.start : entry.end] = bytes(at % (2 if is_bits else 61) for at in range(entry.size_bytes))
    return layout, image
