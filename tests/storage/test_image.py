"""An image is planned once, read by anybody who knows safetensors or torch, and believed by ours in nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import CheckpointError
from holdfast.storage.header import ITEM_BYTES
from holdfast.storage.image import ImageLayout, capacity_for, parse, plan
from holdfast.storage.part_readers import MemoryPart
from holdfast.util.blocks import block_checksums
from support.small_images import image_of, region

SHAPES: list[tuple[int, ...]] = [(), (3, 5), (0, 2), (1,), (7, 1, 2)]


def small() -> tuple[ImageLayout, bytearray]:
    return image_of([region("model.weight", "float32", (3, 2)), region("model.step", "int64", (), 1)])


def reading(image: bytes | bytearray) -> Callable[[int, int], bytes]:
    return lambda start, size: bytes(image[start : start + size])


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_what_was_planned_is_parsed(dtype: str) -> None:
    layout, image = image_of([region(f"x.{at}", dtype, shape, at) for at, shape in enumerate(SHAPES)])
    assert parse(reading(image), len(image)) == layout
    assert layout.size_bytes % 4096 == 0 and all(entry.start % 64 == 0 for entry in layout.entries)
    assert layout.skeleton(memoryview(image)) == b"skeleton" and layout.about == {"job": "a test"}
    assert MemoryPart(memoryview(image), block_checksums(memoryview(image))).skeleton == b"skeleton"


def test_by_the_rules_of_the_format_there_are_no_holes() -> None:
    _, image = small()
    length = int.from_bytes(image[:8], "little")
    header = json.loads(image[8 : 8 + length])
    assert header.pop("__metadata__")["format"] == "pt"
    spans = sorted(entry["data_offsets"] for entry in header.values())
    assert spans[0][0] == 0 and spans[-1][1] == len(image) - 8 - length
    assert all(one[1] == other[0] for one, other in pairwise(spans))


def test_framing_leaves_values_and_skeleton_and_may_be_repeated() -> None:
    layout, image = small()
    before = bytes(image)
    layout.frame(memoryview(image))
    assert image == before
    noise = bytearray(b"\xaa" * len(image))
    layout.frame(memoryview(noise))
    layout.put_skeleton(memoryview(noise), b"skeleton")
    for entry in layout.entries:
        noise[entry.start : entry.end] = image[entry.start : entry.end]
    assert noise == before, "every byte is somebody's"


def test_a_skeleton_can_grow_up_to_its_capacity() -> None:
    layout = plan([], capacity_for(1000))
    image = memoryview(bytearray(layout.size_bytes))
    for content in (b"a" * 1000, b"b" * 2000, b"", b"c" * (layout.skeleton_capacity - 8)):
        assert layout.fits(content)
        layout.put_skeleton(image, content)
        assert layout.skeleton(image) == content
    assert not layout.fits(b"c" * (layout.skeleton_capacity - 7))
    with pytest.raises(CheckpointError, match="does not fit"):
        layout.put_skeleton(image, b"c" * (layout.skeleton_capacity - 7))
    with pytest.raises(CheckpointError, match="does not fit"):
        layout.frame(image[:-1])


def test_every_flipped_bit_is_caught() -> None:
    _, image = small()
    checksums = block_checksums(memoryview(image))
    for position in range(len(image)):
        for bit in range(8):
            image[position] ^= 1 << bit
            assert block_checksums(memoryview(image)) != checksums
            image[position] ^= 1 << bit
        image[position] ^= 1 << position % 8
        with pytest.raises(CheckpointError, match=r"part-3 is damaged: its block 0"):
            MemoryPart(memoryview(image), checksums, "part-3")
        image[position] ^= 1 << position % 8
    assert MemoryPart(memoryview(image), checksums).skeleton == b"skeleton"


def test_without_checksums_a_flipped_bit_is_at_most_a_sentence() -> None:
    layout, image = small()
    end = layout.skeleton_start + 16
    for position in range(end):
        for bit in range(8):
            image[position] ^= 1 << bit
            try:
                MemoryPart(memoryview(image))
            except CheckpointError:
                pass
            image[position] ^= 1 << bit


@given(st.binary(max_size=300), st.integers(0, 2**64 - 1), st.booleans())
def test_garbage_is_a_sentence(content: bytes, length: int, is_honest: bool) -> None:
    length = len(content) if is_honest else length
    image = length.to_bytes(8, "little") + content
    asked: list[int] = []

    def read(start: int, size: int) -> bytes:
        asked.append(size)
        return image[start : start + size]

    with pytest.raises(CheckpointError):
        parse(read, len(image))
    assert max(asked) <= len(image)


def header_of(image: bytes | bytearray) -> dict[str, Any]:
    length = int.from_bytes(image[:8], "little")
    found: dict[str, Any] = json.loads(image[8 : 8 + length])
    return found


def forged(image: bytes | bytearray, header: Any) -> bytes:
    """The image with another header, of the same length."""
    length = int.from_bytes(image[:8], "little")
    content = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    assert len(content) <= length
    return bytes(image[:8]) + content.ljust(length) + bytes(image[8 + length :])


def change_ours(**fields: Any) -> Callable[[dict[str, Any]], None]:
    """Change what our part of the header says of its first row, by the row's position."""

    def change(header: dict[str, Any]) -> None:
        ours = json.loads(header["__metadata__"]["holdfast"])
        for position, value in fields.items():
            ours["rows"][0][int(position[1:])] = value
        header["__metadata__"]["holdfast"] = json.dumps(ours, separators=(",", ":"))

    return change


def change_listed(name: str, key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].__setitem__(key, value)


FORGERIES: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (lambda header: header["__metadata__"].pop("holdfast"), "not one that Holdfast wrote"),
    (lambda header: header.pop("__metadata__"), "not one that Holdfast wrote"),
    (lambda header: header["__metadata__"].update(holdfast='{"format":3}'), "format 3"),
    (lambda header: header["__metadata__"].update(holdfast="[" * 1000), "cannot be read"),
    (lambda header: header.pop("model.weight"), "model.weight"),
    (lambda header: header.pop("__holdfast__.skeleton"), "skeleton"),
    (change_ours(_2=-1), "sizes of model.weight"),
    (change_ours(_3="float31"), "float31"),
    (change_ours(_4=[3, 3]), "place of model.weight"),
    (change_ours(_4=[3, 2, 1]), "sizes of model.weight"),
    (change_ours(_4=[2**70, 2**70]), "sizes of model.weight"),
    (change_ours(_5=[1, 0]), "place of model.weight"),
    (change_ours(_6=[2, 2]), "place of model.weight"),
    (change_ours(_7=2**40), "place of model.weight"),
    (change_ours(_8=10), "place of model.weight"),
    (change_ours(_8=2**40), "beyond its end"),
    (change_ours(_0="model.step"), "model.step"),
    (change_ours(_0="__pad__.0"), "__pad__"),
    (change_listed("model.weight", "data_offsets", [0, 24]), "place of model.weight"),
    (change_listed("model.weight", "data_offsets", [2**62, 2**62 + 24]), "sizes of model.weight"),
    (change_listed("model.weight", "dtype", "F64"), "place of model.weight"),
    (change_listed("model.weight", "shape", "three"), "cannot be read"),
    (change_listed("__holdfast__.skeleton", "data_offsets", [0, 4]), "too little space for the skeleton"),
    (change_listed("__holdfast__.skeleton", "data_offsets", [0, 2**40]), "beyond its end"),
    (change_listed("__holdfast__.skeleton", "data_offsets", [-1, 100]), "beyond its end"),
]


@pytest.mark.parametrize("number", range(len(FORGERIES)))
def test_a_header_that_contradicts_itself_is_a_sentence(number: int) -> None:
    change, sentence = FORGERIES[number]
    _, image = small()
    header = header_of(image)
    change(header)
    with pytest.raises(CheckpointError, match=sentence):
        parse(reading(forged(image, header)), len(image))


@pytest.mark.parametrize("content", [b"[" * 4000, b"{}", b"null", b'{"a":' * 600, b'"\xff"', b'{"__metadata__":7}'])
def test_json_that_is_no_header_is_a_sentence(content: bytes) -> None:
    _, image = small()
    with pytest.raises(CheckpointError):
        parse(reading(forged(image, content)), len(image))


def test_a_truncated_image_is_a_sentence() -> None:
    _, image = small()
    for size in (*range(0, len(image), 37), len(image) - 1):
        with pytest.raises(CheckpointError):
            MemoryPart(memoryview(image)[:size])
    with pytest.raises(CheckpointError, match="bytes behind its header"):
        MemoryPart(memoryview(image + b"x"))


def test_a_skeleton_that_claims_more_than_its_capacity_is_a_sentence() -> None:
    layout, image = small()
    image[layout.skeleton_start : layout.skeleton_start + 8] = b"\xff" * 8
    with pytest.raises(CheckpointError, match="skeleton would have"):
        MemoryPart(memoryview(image))


def test_a_header_may_be_large_but_not_larger_than_the_format_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    regions = [region(f"layers.{at}." + "x" * 100, "float32", (2,), at) for at in range(5_000)]
    layout, image = image_of(regions)
    assert len(layout.head) > 2_000_000 and parse(reading(image), len(image)) == layout
    monkeypatch.setattr("holdfast.storage.header.HEADER_BYTES_MAX", 100_000)
    with pytest.raises(CheckpointError, match="5000 tensors have a header of"):
        plan(regions, 100)


def test_regions_and_entries_can_be_sent() -> None:
    layout, _ = small()
    for entry in layout.entries:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(entry), type=type(entry)) == entry
