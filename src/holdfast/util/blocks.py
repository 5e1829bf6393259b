"""Images as sequences of blocks, each with a checksum: the one block size and the one loop of storage and transfer."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from crc32c import crc32c

from holdfast.core.image_info import BLOCK_BYTES as BLOCK_BYTES


def block_count(size_bytes: int) -> int:
    """Return the number of blocks of an image; the last one may be short."""
    return -(-size_bytes // BLOCK_BYTES)


def block_size(number: int, size_bytes: int) -> int:
    """Return the length of a block of an image of `size_bytes`."""
    return min(BLOCK_BYTES, size_bytes - number * BLOCK_BYTES)


def span(number: int, size_bytes: int) -> slice:
    """Return where a block is in an image of `size_bytes`."""
    return slice(number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, size_bytes))


def checksum(block: memoryview | bytes) -> int:
    """Return the crc32c of a block. Other threads run while it is computed."""
    return int(crc32c(block))


def block_checksums(image: memoryview) -> list[int]:
    """Return the checksum of each block."""
    return [checksum(block) for block in blocks_of_image(image)]


def blocks_of_image(image: memoryview) -> Iterator[memoryview]:
    """Yield the blocks of an image, as views of it."""
    content = memoryview(image).cast("B")
    for start in range(0, len(content), BLOCK_BYTES):
        yield content[start : start + BLOCK_BYTES]


def iter_blocks(image: memoryview) -> Iterator[tuple[memoryview, int]]:
    """Yield each block of an image and its checksum."""
    for block in blocks_of_image(image):
        yield block, checksum(block)


def pack_checksums(checksums: Iterable[int]) -> bytes:
    """Return checksums as `ImageInfo.checksums` has them: four bytes each, big-endian."""
    numbers = tuple(checksums)
    return struct.pack(f"!{len(numbers)}I", *numbers)


def unpack_checksums(packed: bytes) -> tuple[int, ...]:
    """Return the numbers of packed checksums."""
    return struct.unpack(f"!{len(packed) // 4}I", packed)


class ChecksummedBlocks:
    """An iterable of an image's blocks that computes the checksum of each as it is taken, while others are written."""

    def __init__(self, image: memoryview) -> None:
        self._image = image
        self.checksums: list[int] = []
        """The checksums of the blocks taken so far."""

    def __iter__(self) -> Iterator[memoryview]:
        self.checksums = []
        for block in blocks_of_image(self._image):
            self.checksums.append(checksum(block))
            yield block
