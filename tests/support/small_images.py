"""Small images for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.storage.image import ImageLayout, TensorRegion, plan


def region(name: str, dtype: str, shape: Sequence[int], index: int = 0, **fields: Any) -> TensorRegion:
    """Return a full tensor, unless the fields differ."""
    given = {"offsets": (0,) * len(shape), "full_shape": tuple(shape), "path": tuple(name.split(".")), **fields}
    return TensorRegion(name=name, dtype=dtype, shape=tuple(shape), index=index, **given)


def image_of(regions: Sequence[TensorRegion], skeleton: bytes = b"skeleton") -> tuple[ImageLayout, bytearray]:
    """Return an image whose tensors count upwards, byte by byte."""
    layout = plan(regions, len(skeleton) + 100, {"job": "a test"})
    image = bytearray(layout.size_bytes)
    layout.frame(memoryview(image))
    layout.put_skeleton(memoryview(image), skeleton)
    for entry in layout.entries:
        is_bits = entry.dtype == "bool"
        image[entry.start : entry.end] = bytes(at % (2 if is_bits else 61) for at in range(entry.size_bytes))
    return layout, image
