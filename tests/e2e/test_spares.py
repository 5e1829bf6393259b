"""A spare never acts as a rank that another process has, however its script comes to depend on the rank."""

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.records import IncidentClosed
from holdfast.core.strategies import Strategy
from holdfast.wire.progress_page import ProgressPage, WorkerPhase
from support.jobs import SCRIPTS, Place, wait_for
from support.references import made_once

SCRIPT = str(SCRIPTS / "asks_for_rank.py")
RANKS, STEPS = 3, 60


def start(place: Place, way: str, *words: str, flags: tuple[str, ...] = ()) -> Any:
    return place.start("--nproc-per-node", str(RANKS), *flags, SCRIPT, way, str(STEPS), *words)


def reference(way: str) -> Place:
    """The same job without a fault."""

    def make(directory: Path) -> None:
        place = Place(directory)
        assert start(place, way).wait() == 0

    return Place(made_once(f"asks-for-rank {way}", make))


def finals(place: Place) -> dict[str, str]:
    return {path.name: path.read_text() for path in place.work.glob("final-*")}


def trained(place: Place) -> dict[tuple[int, int], str]:
    """By step and rank: the samples. Fails if a step of a rank was committed twice with other samples."""
    found: dict[tuple[int, int], str] = {}
    lines = (place.work / "trained").read_text().splitlines() if (place.work / "trained").exists() else []
    for line in lines:
        step, rank, _, samples = line.split()
        assert found.setdefault((int(step), int(rank)), samples) == samples
    return found


def pids(place: Place) -> set[int]:
    return {int(line.split()[2]) for line in (place.work / "trained").read_text().splitlines()}


def parked(agent_pid: int) -> int:
    """Return the process id of a worker of this agent that is parked, by its progress record; 0 if there is none."""
    for path in Path(f"/proc/{agent_pid}/fd").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if "holdfast-progress" in os.readlink(path):
                page = ProgressPage.open(path)
                if page.get("phase") == WorkerPhase.PARKED and page.get("view") == 0:
                    return page.get("pid")
    return 0


def kill_with_a_spare(tmp_path: Path, way: str) -> Place:
    """Run the job, let its rank 1 die once a spare is parked, and compare everything with the undisturbed run."""
    place = Place(tmp_path)
    agent = start(place, way, "kill", flags=("--spares", "1"))
    spare = wait_for(lambda: parked(agent.pid), what="a parked spare")
    before = len(trained(place))
    wait_for(lambda: len(trained(place)) > before + 2 * RANKS, what="two more steps: the agent knows of the spare")
    (place.work / "go").touch()
    assert agent.wait() == 0, agent.stderr[-4000:]
    assert [closed.strategy for closed in place.journal.of(IncidentClosed)] == [Strategy.RECOVER]
    assert (place.work / f"begun-{spare}").read_text() == f"1 {RANKS}", "the spare built for another rank"
    assert len((place.work / "main").read_text().splitlines()) == 1, "two processes took themselves for rank 0"
    assert finals(place) == finals(reference(way))
    assert trained(place) == trained(reference(way))
    assert len(pids(place)) == RANKS + 1 and spare in pids(place)
    return place


@pytest.mark.parametrize("way", ["environment", "job", "subgroup", "loader"])
def test_a_spare_waits_for_its_rank_where_the_script_asks_for_it(tmp_path: Path, way: str) -> None:
    kill_with_a_spare(tmp_path, way)


@pytest.mark.long
@pytest.mark.parametrize("way", ["copy", "membership", "torch", "local", "mesh", "collective", "thread"])
def test_a_spare_waits_for_its_rank_in_further_ways(tmp_path: Path, way: str) -> None:
    kill_with_a_spare(tmp_path, way)
