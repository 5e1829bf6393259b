"""Parity: whichever member is lost, its image is the same again, bit for bit."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.snapshots.parity import arithmetic as module
from holdfast.snapshots.parity.arithmetic import PIECE_ALIGNMENT_BYTES, Read, piece, piece_bytes, rebuild, xor_into


def parity_of(images: list[bytes], holder: int) -> bytearray:
    """As a holder makes it from what comes in."""
    members = len(images)
    pieces = [memoryview(i)[piece(len(i), members, o, holder)] for o, i in enumerate(images) if o != holder and i]
    found = bytearray(max(map(len, pieces), default=0))
    for one in pieces:
        xor_into(memoryview(found), one)
    return found


def reader(content: bytes | bytearray) -> Read:
    return lambda start, stop: memoryview(content)[start:stop]


def rebuilt(images: list[bytes], lost: int) -> bytes:
    others = [i for i in range(len(images)) if i != lost]
    target = bytearray(len(images[lost]))
    done = rebuild(
        lost,
        len(images),
        len(images[lost]),
        {i: len(images[i]) for i in others},
        {i: reader(images[i]) for i in others},
        {i: reader(parity_of(images, i)) for i in others},
        memoryview(target),
    )
    assert not (told := list(done)) or told[-1] == len(images[lost])
    return bytes(target)


sizes = st.lists(st.integers(0, 5 * PIECE_ALIGNMENT_BYTES), min_size=2, max_size=6)


@given(sizes, st.integers(0, 2**32), st.booleans())
@settings(deadline=None, max_examples=150)
def test_whoever_is_lost_is_rebuilt(lengths: list[int], seed: int, has_numpy: bool) -> None:
    chance = random.Random(seed)
    images = [chance.randbytes(length) for length in lengths]
    with pytest.MonkeyPatch.context() as patch:
        if not has_numpy:
            patch.setattr(module, "_numpy", lambda: None)
        for lost in range(len(images)):
            assert rebuilt(images, lost) == images[lost]


def test_images_larger_than_a_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STRIDE_BYTES", 5_000)
    images = [random.Random(number).randbytes(50_000 + 1_000 * number) for number in range(4)]
    assert [rebuilt(images, lost) for lost in range(4)] == images


@given(st.integers(1, 10**9), st.integers(2, 9))
def test_the_pieces_of_an_image_are_all_of_it_and_go_to_different_holders(size: int, members: int) -> None:
    for owner in range(members):
        pieces = sorted(
            (where.start, where.stop)
            for holder in range(members)
            if holder != owner
            for where in [piece(size, members, owner, holder)]
        )
        covered = [(start, stop) for start, stop in pieces if stop > start]
        assert covered[0][0] == 0 and covered[-1][1] == size
        assert all(one[1] == other[0] for one, other in itertools.pairwise(covered))


@given(st.integers(1, 10**12), st.integers(2, 9))
def test_parity_costs_a_fraction(size: int, members: int) -> None:
    assert piece_bytes(size, members) <= size / (members - 1) + PIECE_ALIGNMENT_BYTES + 1


@given(st.binary(max_size=3_000), st.binary(max_size=3_000))
def test_xor(target: bytes, source: bytes) -> None:
    source = source[: len(target)]
    found = [bytearray(target), bytearray(target)]
    xor_into(memoryview(found[0]), memoryview(source))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_numpy", lambda: None)
        patch.setattr(module, "XOR_BYTES", 100)
        xor_into(memoryview(found[1]), memoryview(source))
    padded = source + bytes(len(target) - len(source))
    assert found[0] == found[1] == bytes(a ^ b for a, b in zip(target, padded, strict=True))
