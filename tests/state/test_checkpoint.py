"""A checkpoint is there when it is complete; a damaged one is named and the one before is used."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.errors import CheckpointError
from holdfast.state import checkpoint
from holdfast.state.checkpoint import Manifest, manifest_of
from holdfast.state.tree import Flat, flatten


def state(step: int, shard: int = 0) -> Flat:
    return flatten(
        {
            "model": {"a.b": torch.full((3, 5), step + shard / 10), "a": {"b": torch.arange(7)}},
            "half": torch.ones(3, dtype=torch.bfloat16),
            "odd": (torch.zeros(3, dtype=torch.bool), torch.empty(0, 2), torch.tensor(2.5, dtype=torch.float64)),
            "small": torch.ones(5).to(torch.float8_e5m2),
            "complex": torch.ones(3, dtype=torch.complex128),
            "turned": torch.arange(6.0).reshape(2, 3).t(),
            "step": step,
        }
    )


def write(root: Path, step: int, shards: int = 2, nonce: str = "n1") -> Path:
    parts = [checkpoint.write_part(root, step, nonce, shard, state(step, shard)) for shard in range(shards)]
    return checkpoint.publish(root, step, nonce, manifest_of(step, shards, parts, seed=3)).path


def assert_same(a: Flat, b: Flat) -> None:
    assert a.skeleton == b.skeleton
    for left, right in zip(a.tensors, b.tensors, strict=True):
        assert left.dtype == right.dtype and left.tolist() == right.tolist() and left.shape == right.shape


def test_what_was_written_is_read(tmp_path: Path) -> None:
    for step in (9, 10):
        write(tmp_path, step)
    found = checkpoint.latest(tmp_path)
    assert found is not None and (found.step, found.manifest.world_size, found.manifest.seed) == (10, 2, 3)
    assert set(found.manifest.versions) == {"holdfast", "torch"} and found.skipped == ()
    for shard in range(2):
        assert_same(checkpoint.read(found, shard), state(10, shard))
        assert_same(checkpoint.read_for(found, shard, 2), state(10, shard))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-9"]


def test_a_replicated_state_has_one_part_for_everybody(tmp_path: Path) -> None:
    write(tmp_path, 4, shards=1)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert_same(checkpoint.read_for(found, 7, 8), state(4))


def test_another_world_size_is_told_to_reshard(tmp_path: Path) -> None:
    write(tmp_path, 4, shards=2)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    with pytest.raises(CheckpointError, match="must be resharded"):
        checkpoint.read_for(found, 0, 3)
    with pytest.raises(CheckpointError, match="none with the number 2"):
        checkpoint.read(found, 2)


def test_nothing_is_there_before_it_is_published(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "none") is None
    checkpoint.write_part(tmp_path, 1, "n1", 0, state(1))
    assert checkpoint.latest(tmp_path) is None


def part_is_short(path: Path) -> None:
    os.truncate(path / "part-1.safetensors", (path / "part-1.safetensors").stat().st_size - 1)


def part_is_empty(path: Path) -> None:
    os.truncate(path / "part-1.safetensors", 0)


def part_is_missing(path: Path) -> None:
    (path / "part-0.safetensors").unlink()


def part_is_of_another_step(path: Path) -> None:
    shutil.copy(path.with_name("step-1") / "part-0.safetensors", path / "part-0.safetensors")


def parts_are_swapped(path: Path) -> None:
    (path / "part-0.safetensors").rename(path / "x")
    (path / "part-1.safetensors").rename(path / "part-0.safetensors")
    (path / "x").rename(path / "part-1.safetensors")


def manifest_is_missing(path: Path) -> None:
    (path / "manifest.json").unlink()


def manifest_is_short(path: Path) -> None:
    os.truncate(path / "manifest.json", 100)


def manifest_is_no_json(path: Path) -> None:
    (path / "manifest.json").write_bytes(b"\xff\x00hello")


def manifest_is_another_document(path: Path) -> None:
    (path / "manifest.json").write_text("[1, 2]")


def manifest_is_nested_deeply(path: Path) -> None:
    (path / "manifest.json").write_text("[" * 100_000)


def manifest_is_edited(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"seed": 3', '"seed": 4'))


def manifest_is_of_a_later_format(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"holdfast_checkpoint": 1', '"holdfast_checkpoint": 2'))


def manifest_is_of_another_step(path: Path) -> None:
    shutil.copy(path.with_name("step-1") / "manifest.json", path / "manifest.json")


def directory_is_empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def directory_is_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.touch()


def reforge(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """A manifest that somebody made, with a right digest."""

    def damage(path: Path) -> None:
        document = json.loads((path / "manifest.json").read_text())
        change(document["content"])
        document["digest"] = checkpoint._digest(document["content"])
        (path / "manifest.json").write_text(json.dumps(document))

    return damage


def lead_elsewhere(content: dict[str, Any]) -> None:
    content["parts"][0]["file"] = "../step-1/part-0.safetensors"


def lose_a_part(content: dict[str, Any]) -> None:
    content["parts"].pop(0)


def have_no_part(content: dict[str, Any]) -> None:
    content["parts"] = []


def have_another_type(content: dict[str, Any]) -> None:
    content["step"] = "two"


DAMAGES: list[Callable[[Path], None]] = [
    part_is_short,
    part_is_empty,
    part_is_missing,
    part_is_of_another_step,
    parts_are_swapped,
    manifest_is_missing,
    manifest_is_short,
    manifest_is_no_json,
    manifest_is_another_document,
    manifest_is_nested_deeply,
    manifest_is_edited,
    manifest_is_of_a_later_format,
    manifest_is_of_another_step,
    directory_is_empty,
    directory_is_a_file,
    *(reforge(change) for change in (lead_elsewhere, lose_a_part, have_no_part, have_another_type)),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_named_kept_and_passed_over(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    write(tmp_path, 1)
    damaged = write(tmp_path, 2)
    damage(damaged)
    told: list[str] = []
    found = checkpoint.latest(tmp_path, on_damage=told.append)
    assert found is not None and found.step == 1
    assert len(told) == len(found.skipped) == 1 and "step" in told[0]
    assert damaged.exists()
    assert_same(checkpoint.read(found, 1), state(1, 1))


@pytest.mark.parametrize("file", ["part-0.safetensors", "manifest.json"])
def test_every_flipped_bit_is_caught(tmp_path: Path, file: str) -> None:
    write(tmp_path, 1)
    path = write(tmp_path, 2) / file
    content = path.read_bytes()
    for position in range(0, len(content), max(1, len(content) // 60)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        found = checkpoint.latest(tmp_path, on_damage=lambda _: None)
        assert found is not None
        if found.step == 2:  # between the words of the JSON: it says the same
            assert file == "manifest.json"
            assert json.loads(flipped) == json.loads(content)
    path.write_bytes(content)
    found = checkpoint.latest(tmp_path)
    assert found is not None and found.step == 2


def test_a_shallow_look_leaves_the_rest_to_reading(tmp_path: Path) -> None:
    path = write(tmp_path, 2) / "part-0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    found = checkpoint.latest(tmp_path, is_deep=False)
    assert found is not None
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.read(found, 0)
    assert_same(checkpoint.read(found, 1), state(2, 1))


def test_a_part_written_by_another_is_as_good(tmp_path: Path) -> None:
    """A survivor writes what it holds of a dead rank, in any order."""
    parts = [checkpoint.write_part(tmp_path, 3, "n1", shard, state(3, shard)) for shard in (2, 0, 1)]
    found = checkpoint.publish(tmp_path, 3, "n1", manifest_of(3, 3, parts))
    assert_same(checkpoint.read(found, 2), state(3, 2))


def test_publishing_twice_keeps_the_sound_one_and_puts_a_damaged_one_aside(tmp_path: Path) -> None:
    first = write(tmp_path, 1, nonce="a")
    inode = first.stat().st_ino
    assert write(tmp_path, 1, nonce="b") == first and first.stat().st_ino == inode
    part_is_short(first)
    assert write(tmp_path, 1, nonce="c") == first and first.stat().st_ino != inode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-1.damaged-c"]
    found = checkpoint.latest(tmp_path)
    assert found is not None and found.step == 1


def test_parts_that_are_not_there_are_not_published(tmp_path: Path) -> None:
    parts = [checkpoint.write_part(tmp_path, 1, "n1", shard, state(1)) for shard in range(2)]
    (tmp_path / ".step-1.n1.partial" / "part-1.safetensors").unlink()
    for manifest in (
        manifest_of(1, 2, parts),
        manifest_of(2, 2, parts),
        manifest_of(1, 2, parts[1:]),
        Manifest(step=1, world_size=2, parts=()),
    ):
        with pytest.raises(CheckpointError):
            checkpoint.publish(tmp_path, 1, "n1", manifest)
    assert checkpoint.latest(tmp_path) is None


def test_what_the_system_refuses_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        checkpoint.write_part(tmp_path / "file", 1, "n1", 0, state(1))
    checkpoint.write_part(tmp_path, 1, "n1", 0, state(1))
    with pytest.raises(CheckpointError, match="cannot be written"):
        checkpoint.write_part(tmp_path, 1, "n1", 0, state(1))
    with pytest.raises(CheckpointError, match="can be named so"):
        checkpoint.write_part(tmp_path, 1, "../..", 0, state(1))
    if os.access("/dev/full", os.W_OK):
        (tmp_path / ".step-5.n1.partial").mkdir()
        (tmp_path / ".step-5.n1.partial" / "part-0.safetensors").symlink_to("/dev/full")
        with pytest.raises(CheckpointError, match="cannot be written"):
            checkpoint.write_part(tmp_path, 5, "n1", 0, state(5))


def test_a_part_is_a_safetensors_file(tmp_path: Path) -> None:
    """By the rules of the format: no holes, from zero to the end; and by its own package, where it is installed."""
    path = write(tmp_path, 2) / "part-0.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    end = 0
    for entry in sorted(header.values(), key=lambda entry: entry["data_offsets"]):
        assert entry["data_offsets"][0] == end
        end = entry["data_offsets"][1]
    assert 8 + length + end == len(content) and (8 + length) % 64 == 0
    assert {"model.a.b", "model.a.b#2", "odd.0", "half"} <= set(header)
    package = pytest.importorskip("safetensors.torch")
    loaded = package.load_file(path)
    assert torch.equal(loaded["half"], torch.ones(3, dtype=torch.bfloat16))
    assert torch.equal(loaded["model.a.b#2"], torch.arange(7))
