"""Attempts at a checkpoint: by one writer, by several, raced, repeated, given up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import CheckpointError
from holdfast.storage import failpoints
from holdfast.storage.checkpoint_catalogue import CheckpointCatalogue
from holdfast.storage.checkpoint_writer import CheckpointWriter
from holdfast.storage.manifest import finite
from holdfast.storage.stores import open_store
from holdfast.util.blocks import block_checksums
from support.processes import finish, started, wait_for_line
from support.saves import BLOCK, about, flip, image, save, saved, visible


def test_a_checkpoint_has_its_parts_what_stock_readers_want_and_a_manifest(tmp_path: Path) -> None:
    found = save(open_store(str(tmp_path)), 7, metrics=finite({"loss": 0.5, "odd": float("nan")}), notes={"data": 3})
    assert {path.name for path in (tmp_path / "step-7").iterdir()} == {
        *("part-0.safetensors", "part-1.safetensors", ".metadata", ".objects", "manifest.json"),
    }
    assert (found.step, found.about.shards, found.about.notes) == (7, 2, {"data": 3})
    assert found.about.metrics == {"loss": 0.5, "odd": None}
    assert (tmp_path / "step-7" / "part-1.safetensors").read_bytes() == bytes(image(701))
    assert visible(tmp_path) == {"step-7"}


def test_checksums_are_those_of_the_image(tmp_path: Path) -> None:
    content = image(1, BLOCK + 5_000_000)
    told: list[int] = []
    with CheckpointWriter(open_store(str(tmp_path)), about(1, 1), "a") as writing:
        part = writing.write_part(0, content, lambda done, total: told.append(done))
        assert writing.publish() is not None
    assert [part.checksum(number) for number in range(part.blocks)] == block_checksums(content)
    assert told[-1] == len(content)


def test_nothing_is_published_while_a_part_is_missing(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with CheckpointWriter(store, about(1, 3), "a") as one, CheckpointWriter(store, about(1, 3), "a") as other:
        one.write_part(0, image(0))
        one.write_part(2, image(2))
        assert one.publish() is None
        assert visible(tmp_path) == set()
        assert CheckpointCatalogue(store).latest() is None
        other.write_part(1, image(1))
        found = other.publish()
        assert found is not None
        again = one.publish()
    assert again is not None
    assert again.manifest == found.manifest


def test_notes_of_all_writers_are_merged(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for number in range(2):
        with CheckpointWriter(store, about(1, 2, notes={f"rng-{number}": [number]}), "a") as writing:
            writing.write_part(number, image(number))
            found = writing.publish()
    assert found is not None
    assert found.about.notes == {"rng-0": [0], "rng-1": [1]}


def test_two_processes_that_are_last_at_once_publish_one_checkpoint(tmp_path: Path) -> None:
    words = (tmp_path, 5, "raced", 4)
    with (
        started("save.py", *words, 0, 1, HOLD="1") as one,
        started("save.py", *words, 2, 3, HOLD="1") as other,
    ):
        wait_for_line(one, "written")
        wait_for_line(other, "written")
        assert one.stdin is not None
        one.stdin.write("\n")  # both go on now, and see all notes
        one.stdin.flush()
        assert finish(other) == "5"
        assert finish(one) == "5"
    assert visible(tmp_path) == {"step-5"}
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith((".partial", ".removed"))] == []
    assert CheckpointCatalogue(open_store(str(tmp_path))).latest() is not None


def test_a_publication_between_two_checks_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(tmp_path))
    for point in ("parts-complete", "metadata-written", "manifest-written"):
        step = failpoints.SAVE_POINTS.index(point)
        with (
            CheckpointWriter(store, about(step, 1), "a") as slow,
            CheckpointWriter(store, about(step, 1), "a") as quick,
        ):
            slow.write_part(0, image(step))

            def overtake(reached: str, at: str = point, by: CheckpointWriter = quick) -> None:
                if reached == at:
                    monkeypatch.setattr(failpoints, "on_point", None)
                    assert by.publish() is not None

            monkeypatch.setattr(failpoints, "on_point", overtake)
            found = slow.publish()
        assert found is not None, point
        assert found.step == step
    assert [path for path in tmp_path.iterdir() if path.name.startswith((".put", ".step"))] == []


def test_a_part_that_is_done_is_not_written_again(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with CheckpointWriter(store, about(1), "a") as first:
        done = first.write_part(0, image(0))
    with CheckpointWriter(store, about(1), "a") as second:
        assert second.write_part(0, image(99)) == done
        second.write_part(1, image(1))
        assert second.publish() is not None
        assert second.write_part(0, image(98)) == done  # published: it stays as it is
    assert (tmp_path / "step-1" / "part-0.safetensors").read_bytes() == bytes(image(0))


def test_of_two_attempts_one_wins_and_the_other_leaves_nothing(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with CheckpointWriter(store, about(3), "a") as one, CheckpointWriter(store, about(3), "b") as other:
        for number in range(2):
            one.write_part(number, image(number))
            other.write_part(number, image(10 + number))
        won, lost = one.publish(), other.publish()
    assert won is not None and lost is not None
    assert won.manifest.nonce == lost.manifest.nonce == "a"
    assert {path.name for path in tmp_path.iterdir()} == {"step-3", ".lock"}


def test_a_writer_whose_attempt_was_removed_finds_the_other_checkpoint(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with CheckpointWriter(store, about(3), "b") as one, CheckpointWriter(store, about(3), "b") as other:
        one.write_part(0, image(0))
        save(store, 3, nonce="a")
        assert one.publish() is None  # it cannot know: parts are missing
        other.write_part(1, image(1))
        found = other.publish()
        assert found is not None
        assert found.manifest.nonce == "a"
        assert {path.name for path in tmp_path.iterdir()} == {"step-3", ".lock"}
        assert one.publish() is not None


def test_a_damaged_checkpoint_is_moved_aside_and_stays(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    save(store, 3, nonce="a")
    flip(tmp_path / "step-3" / "part-1.safetensors")
    assert save(store, 3, nonce="b").manifest.nonce == "b"
    (aside,) = (name for name in visible(tmp_path) if name != "step-3")
    assert aside.startswith("step-3.damaged-b")
    assert (tmp_path / aside / "part-1.safetensors").exists()
    assert [found.step for found in CheckpointCatalogue(store).list().found] == [3]


def test_an_abandoned_attempt_leaves_nothing_and_a_published_one_stays(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    writing = CheckpointWriter(store, about(1), "a")
    writing.write_part(0, image(0))
    writing.abandon()
    assert {path.name for path in tmp_path.iterdir()} == set()
    save(store, 1, nonce="a")
    CheckpointWriter(store, about(1), "a").abandon()
    assert CheckpointCatalogue(store).latest() is not None


@pytest.mark.parametrize("other", [{"run": "two"}, {"parts": 3}], ids=str)
def test_what_another_attempt_left_under_the_same_name_is_replaced(tmp_path: Path, other: dict[str, Any]) -> None:
    """It died when all was written but the last move, or had one part of two."""
    store = open_store(str(tmp_path))
    for left in (1, 2):
        with CheckpointWriter(store, about(left, **{"run": "one", "parts": 2, **other}), "a") as dead:
            for number in range(left):
                dead.write_part(number, image(number))
            if left == 2 and "parts" not in other:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(FileNotFoundError()))
                    assert dead.publish() is None
    for step in (1, 2):
        with (
            CheckpointWriter(store, about(step, run="one"), "a") as first,
            CheckpointWriter(store, about(step, run="one"), "a") as last,
        ):
            assert first.publish() is None, "nothing of it is ours"
            first.write_part(0, image(10))
            assert first.publish() is None
            last.write_part(1, image(11))
            assert last.publish() is not None
        found = CheckpointCatalogue(store).open(step)
        CheckpointCatalogue(store).verify(found)
        assert (found.about.run, found.about.parts) == ("one", 2)
        written = [(tmp_path / found.name(part)).read_bytes() for part in found.manifest.parts]
        assert written == [bytes(image(10)), bytes(image(11))]


def test_a_part_that_was_damaged_before_it_was_published_is_named(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with CheckpointWriter(store, about(1, 1), "a") as writing:
        writing.write_part(0, image(0))
        part = tmp_path / ".step-1.a.partial" / "part-0.safetensors"
        part.write_bytes(part.read_bytes()[:-1])
        with pytest.raises(CheckpointError, match=r"part-0\.safetensors has \d+ bytes, its note says"):
            writing.publish()
    assert visible(tmp_path) == set()


@pytest.mark.parametrize("nonce", ["", "a/b", "../x", "a" * 200, "."])
def test_a_nonce_leads_nowhere_else(tmp_path: Path, nonce: str) -> None:
    with pytest.raises(CheckpointError):
        CheckpointWriter(open_store(str(tmp_path)), about(1), nonce)


def test_a_store_has_its_checkpoints_in_order(tmp_path: Path) -> None:
    catalogue = saved(tmp_path, [10, 9, 100])
    assert [found.step for found in catalogue.list().found] == [100, 10, 9]
    latest = catalogue.latest()
    assert latest is not None
    assert latest.step == 100
