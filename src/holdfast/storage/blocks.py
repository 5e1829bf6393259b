"""An image on its way into a store: in blocks, each with its checksum."""

from __future__ import annotations

from collections.abc import Iterator

from crc32c import crc32c

from holdfast.storage import points
from holdfast.storage.stores import BLOCK_BYTES, Progress


class Blocks:
    """An image in blocks; the checksum of each is computed when it is taken, while others are written."""

    def __init__(self, image: memoryview) -> None:
        self._image = image.cast("B") if image.format != "B" or image.ndim != 1 else image
        self._checksums: list[str] = []

    @property
    def size_bytes(self) -> int:
        return len(self._image)

    @property
    def checksums(self) -> str:
        """Of all blocks, once they were taken."""
        return "".join(self._checksums)

    def __iter__(self) -> Iterator[memoryview]:
        self._checksums = []
        for start in range(0, len(self._image), BLOCK_BYTES):
            block = self._image[start : start + BLOCK_BYTES]
            self._checksums.append(f"{crc32c(block):08x}")
            yield block

    def computed(self) -> list[str]:
        """The checksums, without writing anything."""
        for _ in self:
            pass
        return self._checksums


def halfway(on_progress: Progress | None) -> Progress:
    """Told on, with the point in the middle."""
    is_past = False

    def progress(done: int, total: int) -> None:
        nonlocal is_past
        if done * 2 >= total and not is_past:
            is_past = True
            points.reach("part-half")
        if on_progress is not None:
            on_progress(done, total)

    return progress
