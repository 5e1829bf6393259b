"""Connections that are cut between live processes: the collectives are run again, and no step is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.core.records import IncidentOpened
from holdfast.core.strategies import Strategy
from support.sessions import Run, assert_same_bits, undisturbed

STEPS = 36
FLAGS = ["--collective-retries", "1"]


def assert_undisturbed_but_for_collectives(run: Run, model: str, ranks: int, faults: int) -> None:
    assert run.fired == faults
    assert_same_bits(run, undisturbed(model, ranks=ranks, steps=STEPS))
    assert not run.repeated()
    assert run.place.journal.of(IncidentOpened) == []
    assert [view.number for view in run.views()] == [1]
    assert {len(pids) for pids in run.pids.values()} == {1}
    status = json.loads(run.say("status", "-o", "json"))
    by_rank = {worker["rank"]: worker["retries"] for node in status["nodes"] for worker in node["workers"]}
    assert by_rank.keys() == set(range(ranks)) and all(by_rank.values()), by_rank
    assert status["retries"] == sum(by_rank.values())


def test_a_cut_at_any_point_of_a_step_repeats_collectives_and_no_step(tmp_path: Path) -> None:
    points = ["data", "forward", "backward", "collective", "barrier-before", "update-before", "update-after", "between"]
    faults = [f"{point}:{3 + 4 * index}:{index % 3}:cut" for index, point in enumerate(points)]
    run = Run(tmp_path).start("ddp", ranks=3, steps=STEPS, faults=faults, flags=FLAGS, options=["--pause", "0.02"])
    run.finish()
    assert_undisturbed_but_for_collectives(run, "ddp", 3, len(faults))


def test_a_cut_of_a_sharded_model_repeats_collectives_and_no_step(tmp_path: Path) -> None:
    points = ["data", "forward", "backward", "collective", "barrier-before"]
    faults = [f"{point}:{3 + 5 * index}:{index % 2}:cut" for index, point in enumerate(points)]
    flags = [*FLAGS, "--replicas", "0"]  # copies to other ranks are sent, and what was sent is not sent again
    run = Run(tmp_path).start("fsdp", ranks=2, steps=STEPS, faults=faults, flags=flags, options=["--pause", "0.02"])
    run.finish()
    assert_undisturbed_but_for_collectives(run, "fsdp", 2, len(faults))


@pytest.mark.parametrize("point", ["forward", pytest.param("barrier-before", marks=pytest.mark.long)])
def test_who_dies_in_the_middle_of_a_retry_is_replaced(tmp_path: Path, point: str) -> None:
    faults = [f"{point}:6:1:cut-and-kill"]
    run = Run(tmp_path).start("ddp", ranks=3, steps=STEPS, faults=faults, flags=FLAGS).finish()
    assert run.fired == 1
    assert_same_bits(run, undisturbed("ddp", ranks=3, steps=STEPS), missing=1)
    assert [incident.strategy for incident in run.incidents] == [Strategy.RECOVER_IN_PLACE]
    assert {rank: len(pids) for rank, pids in run.pids.items()} == {0: 1, 1: 2, 2: 1}
