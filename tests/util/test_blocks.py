"""Blocks of an image: their number, sizes and checksums, by the one loop there is."""

from __future__ import annotations

import pytest
from crc32c import crc32c

from holdfast.util.blocks import BLOCK_BYTES, ChecksummedBlocks, block_checksums, block_count, block_size


def test_checksums_are_of_blocks() -> None:
    content = bytes(range(256)) * (BLOCK_BYTES // 128)
    sums = block_checksums(memoryview(content + b"x"))
    assert len(sums) == 3 and sums[:2] == block_checksums(memoryview(content))
    assert sums[2] == crc32c(b"x")
    assert block_checksums(memoryview(b"")) == []


@pytest.mark.parametrize("size_bytes", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 5 * BLOCK_BYTES + 3])
def test_blocks_are_full_but_for_the_last(size_bytes: int) -> None:
    sizes = [block_size(number, size_bytes) for number in range(block_count(size_bytes))]
    assert sum(sizes) == size_bytes and all(size == BLOCK_BYTES for size in sizes[:-1])
    assert all(sizes)


def test_blocks_can_be_iterated_again_and_have_the_checksums_of_the_last_time() -> None:
    content = memoryview(bytearray(b"a" * (BLOCK_BYTES + 5)))
    blocks = ChecksummedBlocks(content)
    assert b"".join(blocks) == content
    content[BLOCK_BYTES] = 0
    assert [len(block) for block in blocks] == [BLOCK_BYTES, 5]
    assert blocks.checksums == block_checksums(content)
