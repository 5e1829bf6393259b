"""Removing: never the last good one, never what is pinned, read or written; real readers and writers."""

from __future__ import annotations

import os
import secrets
import threading
from pathlib import Path

import pytest

from holdfast.errors import BusyError, CheckpointError, MissingError, UsageError
from holdfast.storage import failpoints, object_locks
from holdfast.storage.checkpoint_catalogue import CheckpointCatalogue
from holdfast.storage.checkpoint_writer import CheckpointWriter
from holdfast.storage.retention import EveryK, LastN
from holdfast.storage.stores import open_store
from support.processes import finish, started, wait_for_line
from support.saves import about, flip, image, save, saved, visible

PART = "part-1.safetensors"


def steps(catalogue: CheckpointCatalogue) -> list[int]:
    return [found.step for found in catalogue.list().found]


def test_what_the_policy_does_not_keep_is_removed_with_reasons_for_the_rest(tmp_path: Path) -> None:
    catalogue = saved(tmp_path, range(10, 70, 10))
    catalogue.pin(10, "first")
    planned = catalogue.prune(LastN(2) | EveryK(30), is_dry=True)
    assert len(steps(catalogue)) == 6
    done = catalogue.prune(LastN(2) | EveryK(30))
    assert done.removed == planned.removed == [40, 20]
    assert done.kept[10] == "pinned as first"
    assert steps(catalogue) == [60, 50, 30, 10]
    assert visible(tmp_path) == {"step-60", "step-50", "step-30", "step-10"}


def test_the_last_good_one_is_kept_when_those_that_the_policy_keeps_are_damaged(tmp_path: Path) -> None:
    catalogue = saved(tmp_path, [1, 2, 3, 4])
    for step in (3, 4):
        flip(tmp_path / f"step-{step}" / PART)  # sizes are right: only reading all of it tells
    told: list[str] = []
    done = catalogue.prune(LastN(2), on_damage=told.append)
    assert done.removed == [1]
    assert steps(catalogue) == [4, 3, 2]
    assert "last good" in done.kept[2]
    assert len(told) == 2
    latest = catalogue.latest(on_damage=lambda _: None)
    assert latest is not None
    assert latest.step == 2


def test_nothing_is_removed_if_none_is_good(tmp_path: Path) -> None:
    catalogue = saved(tmp_path, [1, 2, 3])
    for step in (1, 2, 3):
        flip(tmp_path / f"step-{step}" / PART)
    assert catalogue.prune(LastN(1), on_damage=lambda _: None).removed == []
    assert visible(tmp_path) == {"step-1", "step-2", "step-3"}


def test_damaged_ones_are_named_and_left(tmp_path: Path) -> None:
    catalogue = saved(tmp_path, [1, 2, 3])
    (tmp_path / "step-1" / PART).unlink()
    done = catalogue.prune(LastN(1))
    assert done.removed == [2]
    assert "missing" in done.damaged[1]
    assert visible(tmp_path) == {"step-1", "step-3"}
    catalogue.remove(1)  # asked for by name
    assert visible(tmp_path) == {"step-3"}


def test_a_step_the_caller_has_just_written_need_not_be_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue = saved(tmp_path, [1, 2])
    monkeypatch.setattr(catalogue, "verify", lambda *_: pytest.fail("was read"))
    assert catalogue.prune(LastN(1), trusted={2}).removed == [1]


def test_what_was_just_written_stays_where_another_run_has_newer_ones(tmp_path: Path) -> None:
    catalogue = saved(tmp_path, [10, 20, 30], nonce="old-v1")
    told: list[str] = []
    for step in (1, 2):
        save(catalogue.store, step, nonce="new-v1")
        catalogue.prune(LastN(2), trusted={step}, on_damage=told.append)
        assert steps(catalogue) == [30, 20, step]
    assert ["is older than step 30" in text for text in told] == [True, True]


def test_of_one_run_what_was_just_written_goes_if_the_next_is_there_before(tmp_path: Path) -> None:
    catalogue = saved(tmp_path, [3], nonce="job-v1")
    save(catalogue.store, 4, nonce="job-v2")
    assert catalogue.prune(LastN(1), trusted={3}, on_damage=pytest.fail).removed == [3]


def test_files_that_go_while_they_are_swept_are_no_trouble(tmp_path: Path) -> None:
    catalogue = saved(tmp_path, [1])
    is_over = threading.Event()

    def come_and_go() -> None:
        while not is_over.is_set():
            for number in range(50):
                (tmp_path / f".put-{number}").touch()
            for number in range(50):
                (tmp_path / f".put-{number}").unlink()

    writer = threading.Thread(target=come_and_go)
    writer.start()
    try:
        for _ in range(200):
            catalogue.prune(LastN(1))
    finally:
        is_over.set()
        writer.join()


def test_the_only_good_one_and_pinned_ones_need_force(tmp_path: Path) -> None:
    catalogue = saved(tmp_path, [1, 2])
    catalogue.pin(1, "keep")
    with pytest.raises(UsageError, match="pinned as keep"):
        catalogue.remove(1)
    catalogue.unpin(1, "keep")
    catalogue.remove(1)
    with pytest.raises(UsageError, match="only good checkpoint"):
        catalogue.remove(2)
    catalogue.remove(2, is_forced=True)
    assert visible(tmp_path) == set()
    with pytest.raises(MissingError):
        catalogue.remove(2)


def test_pins_are_tags(tmp_path: Path) -> None:
    catalogue = saved(tmp_path, [1])
    catalogue.pin(1, "a")
    catalogue.pin(1, "a")
    catalogue.pin(1, "release-1.0")
    assert catalogue.open(1).tags == ("a", "release-1.0")
    with pytest.raises(UsageError, match="not a valid tag"):
        catalogue.pin(1, "../x")
    with pytest.raises(CheckpointError, match="not pinned as b"):
        catalogue.unpin(1, "b")
    with pytest.raises(MissingError):
        catalogue.pin(2, "a")
    catalogue.verify(catalogue.open(1))


def test_what_another_process_reads_is_not_removed_until_it_is_done_or_dead(tmp_path: Path) -> None:
    catalogue = saved(tmp_path, [1, 2, 3])
    with started("read.py", tmp_path, 1) as reader, started("read.py", tmp_path, 2) as killed:
        wait_for_line(reader, "reading")
        wait_for_line(killed, "reading")
        done = catalogue.prune(LastN(1))
        assert done.removed == []
        assert "is being read" in done.kept[1]
        with pytest.raises(BusyError):
            catalogue.remove(1, is_forced=True)
        assert finish(reader) == "complete"
        killed.kill()
        killed.wait()
    assert catalogue.prune(LastN(1)).removed == [2, 1]


def test_of_two_who_prune_at_once_neither_takes_what_the_other_relies_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue = saved(tmp_path, [10, 15, 16])
    others: list[int] = []

    def meanwhile(point: str) -> None:
        if point == "removal-begun":
            monkeypatch.setattr(failpoints, "on_point", None)
            done = CheckpointCatalogue(catalogue.store).prune(EveryK(10))
            assert "is being read" in done.kept[16]
            others.extend(done.removed)

    monkeypatch.setattr(failpoints, "on_point", meanwhile)
    assert catalogue.prune(LastN(1)).removed == [15, 10]
    assert others == []
    assert steps(catalogue) == [16]


def test_a_reader_that_comes_too_late_gets_an_error(tmp_path: Path) -> None:
    catalogue = saved(tmp_path, [1, 2])
    found = catalogue.open(1)
    catalogue.remove(1)
    with pytest.raises(MissingError), catalogue.reading(found):
        pass
    save(catalogue.store, 1, nonce="anew")
    with catalogue.reading(catalogue.open(1)):
        pass


def test_what_another_process_writes_is_not_swept_until_it_is_dead(tmp_path: Path) -> None:
    catalogue = saved(tmp_path, [1])
    with started("save.py", tmp_path, 2, "job-1", 2, 0, HOLD="1") as writer:
        wait_for_line(writer, "written")
        assert catalogue.prune(LastN(1), grace_s=0.0).swept == []
        assert [left.step for left in catalogue.list().unfinished] == [2]
        writer.kill()
        writer.wait()
    assert [left.step for left in catalogue.prune(LastN(1), grace_s=0.0).swept] == [2]


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


def test_a_process_that_was_forked_by_a_reader_is_none(tmp_path: Path) -> None:
    catalogue = saved(tmp_path, [1, 2])
    go_on, held = os.pipe()
    with catalogue.reading(catalogue.open(1)):
        if not (child := os.fork()):
            os.close(held)
            os.read(go_on, 1)
            os._exit(0)
    try:
        assert catalogue.prune(LastN(1)).removed == [1]
    finally:
        os.close(held)
        os.close(go_on)
        os.waitpid(child, 0)


def test_where_there_are_no_locks_a_lease_protects_until_it_expires() -> None:
    clock = Clock()
    catalogue = CheckpointCatalogue(open_store(f"memory://{secrets.token_hex(4)}"), clock)
    for step in (1, 2):
        save(catalogue.store, step)
    reading = catalogue.reading(catalogue.open(1))
    reading.__enter__()
    assert "is being read by process" in catalogue.prune(LastN(1)).kept[1]
    clock.now += object_locks.DURATION_S + 1
    assert catalogue.prune(LastN(1)).removed == [1]  # as if its process had died
    reading.__exit__(None, None, None)
    assert list(catalogue.store.names("step-1")) == []


def test_a_reader_that_comes_while_its_checkpoint_is_being_removed_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue = CheckpointCatalogue(open_store(f"memory://{secrets.token_hex(4)}"))
    for step in (1, 2):
        save(catalogue.store, step)
    reading = catalogue.reading(catalogue.open(1))
    delete = catalogue.store.delete

    def read_just_before(name: str) -> None:
        if name.endswith("manifest.json"):
            reading.__enter__()
        delete(name)

    monkeypatch.setattr(catalogue.store, "delete", read_just_before)
    with pytest.raises(BusyError):
        catalogue.remove(1)
    monkeypatch.undo()
    catalogue.verify(catalogue.open(1))
    reading.__exit__(None, None, None)
    catalogue.remove(1)
    assert steps(catalogue) == [2]


def test_a_removal_leaves_another_attempt_at_the_same_step_alone() -> None:
    catalogue = CheckpointCatalogue(open_store(f"memory://{secrets.token_hex(4)}"))
    save(catalogue.store, 1)
    save(catalogue.store, 2)
    with CheckpointWriter(catalogue.store, about(1), "other") as writing:
        writing.write_part(0, image(0))
        catalogue.remove(1)
        assert catalogue.prune(LastN(1), grace_s=0.0).swept == []
        writing.write_part(1, image(1))
        assert writing.publish() is not None
    assert steps(catalogue) == [2, 1]
