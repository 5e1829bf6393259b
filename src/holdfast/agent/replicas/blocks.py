"""Images as rows of blocks: where each begins, and the crc32c of each."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from crc32c import crc32c

from holdfast.wire.bulk import BLOCK_BYTES


def block_count(size_bytes: int) -> int:
    """The last one may be short."""
    return -(-size_bytes // BLOCK_BYTES)


def span(index: int, size_bytes: int) -> slice:
    """Where a block is in an image of this size."""
    return slice(index * BLOCK_BYTES, min((index + 1) * BLOCK_BYTES, size_bytes))


def spans(size_bytes: int) -> Iterator[slice]:
    """All of them, in order."""
    return (span(index, size_bytes) for index in range(block_count(size_bytes)))


def checksum(block: memoryview) -> int:
    """crc32c. Other threads run meanwhile."""
    return int(crc32c(block))


def checksums_of(image: memoryview) -> bytes:
    """Of all its blocks, as a label has them."""
    return pack(checksum(image[where]) for where in spans(len(image)))


def pack(checksums: Iterator[int] | Sequence[int]) -> bytes:
    """Four bytes each, big-endian."""
    numbers = tuple(checksums)
    return struct.pack(f"!{len(numbers)}I", *numbers)


def unpack(checksums: bytes) -> tuple[int, ...]:
    """The numbers again."""
    return struct.unpack(f"!{len(checksums) // 4}I", checksums)
