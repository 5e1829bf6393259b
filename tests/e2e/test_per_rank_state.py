"""What each rank has for itself: after a kill the newcomer has its own again, never another rank's."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.core.records import IncidentDecided, SessionRevisedRecord
from holdfast.core.strategies import Strategy
from holdfast.storage.checkpoint_catalogue import CheckpointCatalogue
from holdfast.storage.stores import open_store
from support.sessions import Run, assert_same_bits, undisturbed

EVERY_STEP = ["--snapshots", "1"]
TOGETHER = ["--pause", "0.1", "--together"]

FEATURES = ["meter", "zero", "nosync"]
ONE_QUICK = ["meter", *(pytest.param(name, marks=pytest.mark.long) for name in ("zero", "nosync"))]
"""All go through the same ring, slots and checkpoints: one is enough where the other two have had their kill."""


def strategies(run: Run) -> list[Strategy]:
    return [decided.strategy for decided in run.place.journal.of(IncidentDecided)]


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize(
    "fault", ["forward:7:1:kill", *(pytest.param(f"{p}:7:1:kill", marks=pytest.mark.long) for p in ("data", "between"))]
)
def test_a_killed_rank_gets_its_own_back_from_its_ring_partner(tmp_path: Path, features: str, fault: str) -> None:
    """Step 7 is the second of three whose gradients are accumulated without being averaged."""
    run = Run(tmp_path).start("ddp", ranks=3, features=features, faults=[fault]).finish()
    assert_same_bits(run, undisturbed("ddp", ranks=3, features=features), missing=1)
    assert strategies(run) == [Strategy.RECOVER_IN_PLACE]
    assert [len(run.pids[rank]) for rank in range(3)] == [1, 2, 1]


@pytest.mark.parametrize("features", ONE_QUICK)
@pytest.mark.parametrize("point", [pytest.param("update-before", marks=pytest.mark.long), "update-after"])
def test_it_is_so_around_an_update(tmp_path: Path, features: str, point: str) -> None:
    run = Run(tmp_path).start("ddp", ranks=3, features=features, faults=[f"{point}:8:1:kill"]).finish()
    assert_same_bits(run, undisturbed("ddp", ranks=3, features=features), missing=1)
    assert strategies(run) == [Strategy.RECOVER_IN_PLACE]


@pytest.mark.parametrize("features", ONE_QUICK)
def test_a_rank_that_dies_with_its_ring_partner_sends_all_back_to_memory(tmp_path: Path, features: str) -> None:
    """Rank 2 keeps the copy of rank 1, and rank 0 alone cannot say what they had for themselves."""
    faults = ["forward:10:1:kill", "forward:10:2:kill"]
    run = Run(tmp_path).start("ddp", ranks=3, features=features, faults=faults, flags=EVERY_STEP, options=TOGETHER)
    run.finish()
    assert_same_bits(run, undisturbed("ddp", ranks=3, features=features))
    assert strategies(run)[-1] is Strategy.RESTART  # the first death may have been decided on before the second
    assert all(len(run.pids[rank]) == 2 for rank in range(3))


@pytest.mark.parametrize("features", ONE_QUICK)
def test_all_workers_die_at_once_and_each_finds_its_own_in_memory(tmp_path: Path, features: str) -> None:
    faults = [f"forward:11:{rank}:kill" for rank in range(2)]
    run = Run(tmp_path).start("ddp", ranks=2, features=features, faults=faults, flags=EVERY_STEP, options=TOGETHER)
    run.finish()
    assert_same_bits(run, undisturbed("ddp", ranks=2, features=features))
    assert strategies(run)[-1] is Strategy.RESTART and run.place.journal.job().incidents.restarts_used == 0


@pytest.mark.parametrize("features", ONE_QUICK)
def test_a_checkpoint_gives_each_rank_its_own_and_is_refused_by_another_world(tmp_path: Path, features: str) -> None:
    """The first run stops at step 11, with gradients in accumulation; the second goes on to the end."""
    directory = tmp_path / "checkpoints"
    flags = ["--checkpoint-dir", str(directory), "--checkpoint-every", "11", *EVERY_STEP]
    Run(tmp_path / "first").start("ddp", ranks=2, steps=11, features=features, flags=flags).finish()
    assert [found.step for found in CheckpointCatalogue(open_store(str(directory))).list().found] == [11]

    alone = Run(tmp_path / "alone").start("ddp", ranks=1, features=features, flags=flags).finish(1)
    assert "each rank has state of its own" in alone.agents[0].stderr
    assert "start with as many workers" in alone.agents[0].stderr

    again = Run(tmp_path / "again").start("ddp", ranks=2, features=features, flags=flags).finish()
    assert min(line.step for line in again.ledger) == 11
    assert again.finals == undisturbed("ddp", ranks=2, features=features).finals


@pytest.mark.long
def test_without_replicas_it_comes_from_memory_alone(tmp_path: Path) -> None:
    flags = [*EVERY_STEP, "--replicas", "0"]
    run = Run(tmp_path).start("ddp", ranks=2, features="meter", faults=["forward:10:1:kill"], flags=flags)
    run.finish()
    assert_same_bits(run, undisturbed("ddp", ranks=2, features="meter"))
    assert strategies(run) == [Strategy.RESTART]


@pytest.mark.parametrize("model", ["fsdp", pytest.param("hsdp", marks=pytest.mark.long)])
def test_a_sharded_model_has_it_in_its_ring(tmp_path: Path, model: str) -> None:
    ranks = 2 if model == "fsdp" else 4
    run = Run(tmp_path).start(model, ranks=ranks, features="meter", faults=["forward:7:1:kill"]).finish()
    assert_same_bits(run, undisturbed(model, ranks=ranks, features="meter"), missing=1)
    assert strategies(run) == [Strategy.RECOVER_IN_PLACE]


def test_what_is_changed_between_two_steps_where_no_copy_is_made_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path).start("ddp", ranks=2, features="meter,outside").finish(1)
    assert "(meter) was changed between two steps" in run.agents[0].stderr
    assert "job.track_local names inside `with step:`" in run.agents[0].stderr
    assert {line.step for line in run.ledger} == {0}


@pytest.mark.long
def test_a_sharded_models_gradients_that_were_reduced_are_in_its_ring(tmp_path: Path) -> None:
    run = Run(tmp_path).start("fsdp", ranks=2, features="micro", faults=["forward:7:1:kill"]).finish()
    assert_same_bits(run, undisturbed("fsdp", ranks=2, features="micro"), missing=1)
    assert strategies(run) == [Strategy.RECOVER_IN_PLACE]


def test_those_that_were_not_are_refused(tmp_path: Path) -> None:
    run = Run(tmp_path).start("fsdp", ranks=2, features="nosync").finish(1)
    assert "with gradients that are not reduced yet" in run.agents[0].stderr and not run.ledger


@pytest.mark.long
def test_gradients_that_every_backward_averaged_are_everybodys(tmp_path: Path) -> None:
    """Nothing is kept per rank then: two of three may die."""
    faults = ["forward:7:1:kill", "forward:7:2:kill"]
    run = Run(tmp_path).start("ddp", ranks=3, features="micro", faults=faults, options=TOGETHER).finish()
    assert_same_bits(run, undisturbed("ddp", ranks=3, features="micro"))
    assert Strategy.RESTART not in strategies(run) and not run.place.journal.of(SessionRevisedRecord)
