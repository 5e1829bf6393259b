"""Damage of every kind, in every kind of file: named, passed over for the one before, and nothing is removed."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import CheckpointError, MissingError
from holdfast.storage.checkpoint_writer import CheckpointWriter
from holdfast.storage.manifest import Manifest, decode, encode
from holdfast.storage.stores import open_store
from support.saves import about, flip, image, saved

PART = "part-1.safetensors"


def _cut(root: Path) -> None:
    path = root / "step-2" / PART
    path.write_bytes(path.read_bytes()[:-4096])


def _foreign(root: Path) -> None:
    path = root / "step-2" / "manifest.json"
    path.write_text(path.read_text().replace('"holdfast_checkpoint": 2', '"holdfast_checkpoint": 3'))


def _edited(root: Path) -> None:
    path = root / "step-2" / "manifest.json"
    document = json.loads(path.read_text())
    document["content"]["about"]["step"] = 3
    path.write_text(json.dumps(document))


def _resigned(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A manifest that lies well: its digest is right."""
    path = root / "step-2" / "manifest.json"
    content = json.loads(path.read_text())["content"]
    change(content)
    import msgspec

    path.write_bytes(encode(msgspec.convert(content, Manifest)))


def _leads_away(content: dict) -> None:  # type: ignore[type-arg]
    content["parts"][0]["file"] = "../step-1/part-0.safetensors"


def _without_part(content: dict) -> None:  # type: ignore[type-arg]
    content["parts"].pop()


def _without_checksum(content: dict) -> None:  # type: ignore[type-arg]
    content["parts"][0]["checksums"] = ""


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "part missing": (lambda root: (root / "step-2" / PART).unlink(), f"{PART} is missing"),
    "part short": (_cut, f"{PART} has 45056 bytes, its manifest says 49152"),
    "part flipped": (lambda root: flip(root / "step-2" / PART), f"{PART} has a wrong checksum in block 0"),
    "part of another step": (
        lambda root: shutil.copy(root / "step-1" / PART, root / "step-2" / PART),
        f"{PART} has a wrong checksum",
    ),
    "part of another rank": (
        lambda root: shutil.copy(root / "step-2" / "part-0.safetensors", root / "step-2" / PART),
        f"{PART} has a wrong checksum",
    ),
    "part is a directory": (
        lambda root: ((root / "step-2" / PART).unlink(), (root / "step-2" / PART).mkdir()),
        f"{PART} is missing",
    ),
    "manifest missing": (lambda root: (root / "step-2" / "manifest.json").unlink(), "has no manifest.json"),
    "manifest empty": (lambda root: (root / "step-2" / "manifest.json").write_bytes(b""), "is not JSON"),
    "manifest of another step": (
        lambda root: shutil.copy(root / "step-1" / "manifest.json", root / "step-2" / "manifest.json"),
        "is of step 1",
    ),
    "manifest of another format": (_foreign, "is of format 3, this Holdfast reads 2"),
    "manifest edited": (_edited, "digest"),
    "manifest leads away": (lambda root: _resigned(root, _leads_away), "which is not a valid name"),
    "manifest without a part": (lambda root: _resigned(root, _without_part), "does not name the 2 parts"),
    "manifest without a checksum": (lambda root: _resigned(root, _without_checksum), "a checksum for each block"),
    "older format": (
        lambda root: (root / "step-2" / "manifest.json").write_text('{"holdfast_checkpoint": 1, "content": {}}'),
        "is of format 1",
    ),
    "deeply nested": (
        lambda root: (root / "step-2" / "manifest.json").write_text("[" * 90_000),
        "is not JSON",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_and_the_one_before_is_used(tmp_path: Path, name: str) -> None:
    damage, sentence = DAMAGES[name]
    catalogue = saved(tmp_path, [1, 2])
    damage(tmp_path)
    before = sorted(path for path in tmp_path.rglob("*"))
    told: list[str] = []
    found = catalogue.latest(on_damage=told.append)
    assert found is not None
    assert found.step == 1
    assert len(told) == 1
    assert sentence in told[0]
    assert "step-2" in told[0]
    assert sentence in found.skipped[0]
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_damage_of_what_only_stock_readers_read_is_named_but_does_not_matter(tmp_path: Path) -> None:
    catalogue = saved(tmp_path, [1])
    flip(tmp_path / "step-1" / ".metadata", 5)
    found = catalogue.latest(on_damage=pytest.fail)
    assert found is not None
    (finding,) = catalogue.inspect(found)
    assert not finding.matters
    assert ".metadata has a wrong checksum" in finding.text
    (tmp_path / "step-1" / ".metadata").unlink()
    assert catalogue.latest(on_damage=pytest.fail) is not None
    assert "missing" in catalogue.inspect(found)[0].text


def test_all_that_is_wrong_is_found_each_file_once(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with CheckpointWriter(store, about(1, 2), "a") as writing:
        writing.write_part(0, image(0, 17_000_000))
        writing.write_part(1, image(1))
        found = writing.publish()
    assert found is not None
    flip(tmp_path / "step-1" / "part-0.safetensors", 9_000_000)
    flip(tmp_path / "step-1" / "part-0.safetensors", 16_900_000)
    flip(tmp_path / "step-1" / PART, 0)
    catalogue = saved(tmp_path, [])
    texts = [finding.text for finding in catalogue.inspect(found)]
    assert len(texts) == 2
    assert "part-0.safetensors has a wrong checksum in block 1 of 3 and 1 more" in texts[0]
    with pytest.raises(CheckpointError, match=r"part-0.*part-1"):
        catalogue.verify(found)


def test_every_single_flipped_bit_of_a_manifest_is_caught(tmp_path: Path) -> None:
    saved(tmp_path, [1])
    raw = (tmp_path / "step-1" / "manifest.json").read_bytes()
    for position in range(len(raw) * 8):
        changed = bytearray(raw)
        changed[position // 8] ^= 1 << position % 8
        with pytest.raises(CheckpointError):
            decode(bytes(changed), Manifest, "it")


def test_flipped_bits_anywhere_in_a_part_are_caught(tmp_path: Path) -> None:
    catalogue = saved(tmp_path, [1])
    found = catalogue.open(1)
    path = tmp_path / "step-1" / PART
    raw = path.read_bytes()
    chance = random.Random(4)
    places = [0, 8, len(raw) * 8 - 1, *(chance.randrange(len(raw) * 8) for _ in range(100))]
    for place in places:
        flip(path, place // 8, place % 8)
        with pytest.raises(CheckpointError, match=PART):
            catalogue.verify(found)
        path.write_bytes(raw)
    catalogue.verify(found)


def test_parts_to_load_from_are_verified_block_by_block(tmp_path: Path) -> None:
    catalogue = saved(tmp_path, [1])
    found = catalogue.open(1)
    with catalogue.sources(found) as sources:
        assert sorted(sources) == [0, 1]
        assert sources[0].skeleton == b"\x92\x01\xc0"
    flip(tmp_path / "step-1" / PART)
    with pytest.raises(CheckpointError, match=PART), catalogue.sources(found, [1]) as sources:
        sources[1].read(sources[1].layout.entries[0], 0, 4)


def test_a_step_that_is_not_there_is_missing_not_damaged(tmp_path: Path) -> None:
    catalogue = saved(tmp_path, [1])
    with pytest.raises(MissingError, match="no checkpoint of step 5"):
        catalogue.open(5)


def test_what_is_not_named_like_a_checkpoint_is_not_looked_at(tmp_path: Path) -> None:
    catalogue = saved(tmp_path, [1])
    for name in ("step-01", "step-", "step-x", "latest", "step-99999999999999999999"):
        (tmp_path / name).mkdir()
    listing = catalogue.list()
    assert [found.step for found in listing.found] == [1]
    assert listing.damaged == []
