"""A device that runs behind its host: whenever a rank is killed, all ranks end with the bits of an undisturbed run.

The device and its collectives are make-believe (lab/holdfast_late.py): no accelerator is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.core.records import IncidentDecided
from holdfast.core.strategies import Strategy
from support.jobs import SCRIPTS, Place
from support.plug_ins import install_late_device
from support.references import made_once

LATE = str(SCRIPTS / "late.py")
STEPS = 12
LATE_S = 0.1
"""Long enough that the host is through with its step before the device has begun with the collective."""


def run(
    directory: Path, faults: Sequence[str] = (), *, ranks: int = 2, snapshots: str = "off", **variables: str
) -> Place:
    place = Place(directory)
    env = {**install_late_device(directory), "LATE_S": str(LATE_S), **variables}
    agent = place.start(*("--nproc-per-node", str(ranks), "--snapshots", snapshots, LATE, str(STEPS)), *faults, env=env)
    assert agent.wait() == 0, agent.stderr[-6000:]
    assert len(list(place.work.glob("fired-*"))) == len(faults)
    return place


def finals(place: Place) -> dict[str, str]:
    return {path.name: path.read_text() for path in place.work.glob("final-*")}


def undisturbed(ranks: int = 2, **variables: str) -> dict[str, str]:
    name = f"late device {ranks} {variables}"
    directory = made_once(name, lambda directory: run(directory, ranks=ranks, **variables) and None)
    return finals(Place(directory))


def pids(place: Place) -> set[str]:
    return {line.split()[2] for line in (place.work / "ledger").read_text().splitlines()}


@pytest.mark.parametrize(
    "fault",
    [
        "between:6:1",
        "update:6:1",
        pytest.param("backward:6:1", marks=pytest.mark.long),
        pytest.param("between:6:0", marks=pytest.mark.long),
        pytest.param("update:7:0", marks=pytest.mark.long),
    ],
)
def test_a_rank_is_killed_while_the_device_is_behind_its_host(tmp_path: Path, fault: str) -> None:
    """`between`: the host has committed the step, and the device has not begun with its collective."""
    hurt = run(tmp_path, [fault])
    assert finals(hurt) == undisturbed(), "bits differ, though the incident was closed"
    assert len(set(finals(hurt).values())) == 1
    assert len(pids(hurt)) == 3, "only the killed process was replaced"


@pytest.mark.parametrize(
    "fault",
    [
        "backward:6:1",
        pytest.param("update:6:1", marks=pytest.mark.long),
        pytest.param("between:6:0", marks=pytest.mark.long),
    ],
)
def test_a_rank_of_a_sharded_model_is_killed_while_the_device_is_behind(tmp_path: Path, fault: str) -> None:
    """Its copy in another rank's memory is made before the commit, and must be of what the device has done by then."""
    hurt = run(tmp_path, [fault], LATE_MODEL="fsdp2")
    assert finals(hurt) == undisturbed(LATE_MODEL="fsdp2")
    assert len(set(finals(hurt).values())) == 2, "each rank has a shard of its own"
    assert len(pids(hurt)) == 3, "only the killed process was replaced"


def test_shards_on_a_device_come_from_snapshots_unless_copies_are_asked_for(tmp_path: Path) -> None:
    """A copy in another rank's memory before each commit may take longer than the step. So there is none by default;
    the ranks go back to the newest snapshot in their agent's memory."""
    hurt = run(tmp_path, ["between:6:1"], snapshots="1", LATE_MODEL="fsdp2")
    assert finals(hurt) == undisturbed(LATE_MODEL="fsdp2")
    assert len(pids(hurt)) == 4, "all start again"
    (incident,) = hurt.journal.of(IncidentDecided)
    assert incident.strategy is Strategy.RESTART and not incident.counted and incident.reload >= 0


@pytest.mark.long
def test_several_kills_on_three_ranks(tmp_path: Path) -> None:
    hurt = run(tmp_path, ["between:3:1", "update:6:2", "between:8:0"], ranks=3)
    assert finals(hurt) == undisturbed(3)


def test_what_a_script_makes_of_an_aborted_collective_is_not_held_against_it(tmp_path: Path) -> None:
    hurt = run(tmp_path, ["backward:6:1"], LATE_ABORTED="nan")
    assert (hurt.work / "saw-nan").exists()
    assert finals(hurt) == undisturbed()
    assert len(pids(hurt)) == 3, "the rank that raised was not replaced"


def test_a_second_rank_dies_while_all_connect_their_groups_again(tmp_path: Path) -> None:
    """Communicators of the device are connected before the view is joined, subgroups too; the second fault frees those
    who wait in them."""
    variables = {"LATE_MODEL": "subgroup", "LATE_CONNECT": "die", "LATE_MARK": str(tmp_path / "mark")}
    hurt = run(tmp_path, ["backward:6:1"], ranks=3, **variables)
    assert not (tmp_path / "mark").exists(), "nobody connected a subgroup"
    assert finals(hurt) == undisturbed(3, LATE_MODEL="subgroup")


@pytest.mark.parametrize("free", ["raise", pytest.param("block", marks=pytest.mark.long)])
def test_a_worker_whose_communicator_cannot_be_freed_is_replaced(tmp_path: Path, free: str) -> None:
    """One rank is killed; the abort of the other's communicator fails, so that it has to go too. With three ranks, the
    third one has the state."""
    variables = {"LATE_FREE": free, "LATE_MARK": str(tmp_path / "mark")}
    hurt = run(tmp_path, ["backward:6:1"], ranks=3, **variables)
    assert not (tmp_path / "mark").exists()
    assert finals(hurt) == undisturbed(3)
    assert len(pids(hurt)) == 5
