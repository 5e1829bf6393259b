"""A writer killed at every named point of a save: what was there before is there, and nothing half-written is."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from holdfast.storage.checkpoint_catalogue import CheckpointCatalogue
from holdfast.storage.failpoints import DEBUG_VARIABLE, REMOVAL_POINTS, SAVE_POINTS, VARIABLE
from holdfast.storage.retention import LastN
from support.processes import run
from support.saves import image, saved, visible

PUBLISHED = SAVE_POINTS.index("published")


@pytest.mark.parametrize("point", SAVE_POINTS)
def test_a_writer_killed_anywhere_leaves_all_or_nothing_and_another_goes_on(tmp_path: Path, point: str) -> None:
    catalogue = saved(tmp_path, [1])
    died = run("save.py", tmp_path, 2, "job-1", 2, 0, 1, **{VARIABLE: point, DEBUG_VARIABLE: "1"})
    assert died.returncode == -signal.SIGKILL, died.stderr
    is_published = SAVE_POINTS.index(point) >= PUBLISHED
    assert visible(tmp_path) == ({"step-1", "step-2"} if is_published else {"step-1"})
    assert latest(catalogue) == (2 if is_published else 1)
    went_on = run("save.py", tmp_path, 2, "job-1", 2, 0, 1)
    assert went_on.stdout.strip() == "2", went_on.stderr
    assert latest(catalogue) == 2
    assert (tmp_path / "step-2" / "part-1.safetensors").read_bytes() == bytes(image(201))
    if point not in ("published", "synced"):  # then notes are left, and harm nobody
        assert len(list((tmp_path / "step-2").iterdir())) == 5
    catalogue.prune(LastN(2), grace_s=0.0)
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", "step-2", ".lock"}


def test_without_the_debug_variable_no_point_ends_a_process(tmp_path: Path) -> None:
    done = run("save.py", tmp_path, 2, "job-1", 2, 0, 1, **{VARIABLE: "part-begun", DEBUG_VARIABLE: ""})
    assert done.stdout.strip() == "2", done.stderr


@pytest.mark.parametrize("point", ["part-half", "part-named", "note-written", "metadata-written"])
def test_what_a_dead_attempt_left_is_swept_and_only_that(tmp_path: Path, point: str) -> None:
    catalogue = saved(tmp_path, [1])
    run("save.py", tmp_path, 2, "job-1", 2, 0, 1, **{VARIABLE: point, DEBUG_VARIABLE: "1"})
    assert [left.step for left in catalogue.list().unfinished] == [2]
    assert catalogue.prune(LastN(1)).swept == []  # it may be a writer's between two parts: not before the grace is over
    assert [left.step for left in catalogue.prune(LastN(1), grace_s=0.0).swept] == [2]
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", ".lock"}


@pytest.mark.parametrize("point", REMOVAL_POINTS)
def test_a_removal_killed_anywhere_leaves_a_checkpoint_or_none(tmp_path: Path, point: str) -> None:
    catalogue = saved(tmp_path, [1, 2])
    died = run("remove.py", tmp_path, 1, **{VARIABLE: point, DEBUG_VARIABLE: "1"})
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert visible(tmp_path) == ({"step-1", "step-2"} if point == "removal-begun" else {"step-2"})
    listing = catalogue.list()
    assert listing.damaged == []
    for found in listing.found:
        catalogue.verify(found)
    catalogue.prune(LastN(1))
    assert {path.name for path in tmp_path.iterdir()} == {"step-2", ".lock"}


def latest(catalogue: CheckpointCatalogue) -> int | None:
    """Of a catalogue that finds nothing damaged."""
    found = catalogue.latest(on_damage=pytest.fail)
    return found.step if found else None
