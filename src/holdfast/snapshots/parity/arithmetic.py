"""The arithmetic of parity in a group of nodes, as in RAID-5: any one node's image follows from what the others have.

K members. Each splits its image into K-1 pieces, one for each other member. Member m's parity is the exclusive or of
the pieces that the others have for it:

    members 0 1 2        image 0 = 0a 0b        parity 0 = 1b ^ 2a
                         image 1 = 1a 1b        parity 1 = 0a ^ 2b
                         image 2 = 2a 2b        parity 2 = 0b ^ 1a

If member x is lost, its piece for m is m's parity without what the others have put into it. So what is needed are the
images and the parities of all others, of one step; no byte of x itself. Parity has the size of the largest piece, an
image's size / (K-1); what is shorter counts as if it were followed by zeros, so that members need not know each other's
sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

PIECE_ALIGNMENT_BYTES = 4_096
XOR_BYTES = 256 * 2**10
"""How much is mixed at a time without numpy: other threads wait for the interpreter that long."""
STRIDE_BYTES = 8 * 2**20

Read = Callable[[int, int], memoryview]
"""Returns (start, stop) of an image or of parity. What is beyond its end may be left out."""


def piece_bytes(size_bytes: int, members: int) -> int:
    """Return the size of a piece; the last ones of a small image may be shorter, or empty."""
    bare = -(-size_bytes // (members - 1))
    return -(-bare // PIECE_ALIGNMENT_BYTES) * PIECE_ALIGNMENT_BYTES


def piece(size_bytes: int, members: int, owner: int, holder: int) -> slice:
    """Return which part of the owner's image goes into the holder's parity."""
    assert owner != holder, "a node holds no parity of its own image"
    number = (holder - owner - 1) % members
    length = piece_bytes(size_bytes, members)
    return slice(min(number * length, size_bytes), min((number + 1) * length, size_bytes))


def rebuild(
    lost: int,
    members: int,
    size_bytes: int,
    sizes: Mapping[int, int],
    images: Mapping[int, Read],
    parities: Mapping[int, Read],
    target: memoryview,
) -> Iterator[int]:
    """Write the lost member's image into the target; yield how many bytes are done. The images and parities are those
    of all other members, and of one step; `sizes` says how long each image is (0 for a member without one)."""
    done = 0
    for holder, parity in parities.items():
        where = piece(size_bytes, members, lost, holder)
        for start in range(where.start, where.stop, STRIDE_BYTES):
            stop = min(start + STRIDE_BYTES, where.stop)
            offset = start - where.start
            block = target[start:stop]
            block[:] = bytes(len(block))
            xor_into(block, parity(offset, offset + len(block)))
            for owner, image in images.items():
                if owner != holder and sizes[owner]:
                    theirs = piece(sizes[owner], members, owner, holder)
                    begin, end = theirs.start + offset, min(theirs.start + offset + len(block), theirs.stop)
                    if begin < end:
                        xor_into(block, image(begin, end))
            done += len(block)
            yield done


def xor_into(target: memoryview, source: memoryview) -> None:
    """Compute target ^= source; the source may be shorter than the target, and not longer."""
    size = min(len(target), len(source))
    if numpy := _numpy():
        there = numpy.frombuffer(target, numpy.uint8, size)
        numpy.bitwise_xor(there, numpy.frombuffer(source, numpy.uint8, size), out=there)
        return
    for start in range(0, size, XOR_BYTES):
        stop = min(start + XOR_BYTES, size)
        mixed = int.from_bytes(target[start:stop], "little") ^ int.from_bytes(source[start:stop], "little")
        target[start:stop] = mixed.to_bytes(stop - start, "little")


@cache
def _numpy() -> Any:
    """Return numpy, which is twenty times as fast, or None: torch works without it, and so must this."""
    try:
        import numpy
    except ImportError:
        return None
    return numpy
