"""Fewer ranks go on only where a lost rank's samples are shared out among them, or where the script sees to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.core.records import IncidentDecided, SessionRevisedRecord
from holdfast.core.strategies import Strategy
from support.sessions import Run, undisturbed

ELASTIC = ["--recovery", "elastic-training,exit"]
KILL = ["forward:8:1:kill"]


def decided(run: Run) -> IncidentDecided:
    (found,) = run.place.journal.of(IncidentDecided)
    return found


@pytest.mark.parametrize(
    ("features", "sentence"),
    [
        pytest.param("", "no hf.Loader or hf.Stream is tracked", id="data made by rank"),
        pytest.param("torch", "step.batches is given a DataLoader", id="a loader of each rank's own"),
        pytest.param("loader,later", "step.batches is given a DataLoader", id="one that is first used in step 5"),
    ],
)
def test_a_job_whose_samples_nobody_shares_out_does_not_shrink_and_says_why(
    tmp_path: Path, features: str, sentence: str
) -> None:
    options = ["--resizable", "auto", "--pause", "0.05"]
    run = Run(tmp_path).start("ddp", ranks=2, features=features, faults=KILL, flags=ELASTIC, options=options)
    run.finish(1)
    assert decided(run).strategy is Strategy.EXIT
    assert f"no elastic-training: {sentence}" in decided(run).why
    assert "hf.init(resizable=True)" in decided(run).why
    assert run.place.journal.of(SessionRevisedRecord) or "later" not in features
    assert {line.world_size for line in run.ledger} == {2}


def test_another_number_of_ranks_does_not_go_on_from_a_checkpoint_either(tmp_path: Path) -> None:
    options = ["--resizable", "auto"]
    flags = ["--checkpoint-dir", str(tmp_path / "checkpoints")]
    dumping = [*flags, "--recovery", "dump,exit"]
    Run(tmp_path / "two").start("ddp", ranks=2, features="torch", faults=KILL, flags=dumping, options=options).finish(7)
    one = Run(tmp_path / "one").start("ddp", ranks=1, features="torch", flags=flags, options=options).finish(1)
    why = one.place.journal.finished().why
    assert "was divided among 2 ranks, and now there is 1" in why and "no hf.Loader or hf.Stream is tracked" in why, why
    assert not one.ledger
    two = Run(tmp_path / "again").start("ddp", ranks=2, features="torch", flags=flags, options=options).finish()
    assert two.finals == undisturbed("ddp", ranks=2, features="torch", options=options).finals


@pytest.mark.parametrize("features", [pytest.param("", id="the script says so"), "loader"])
def test_a_job_whose_samples_are_shared_out_goes_on_with_fewer_ranks(tmp_path: Path, features: str) -> None:
    options = ["--pause", "0.05"]
    run = Run(tmp_path).start("ddp", ranks=2, features=features, faults=KILL, flags=ELASTIC, options=options).finish()
    assert Strategy.ELASTIC_TRAINING in [incident.strategy for incident in run.incidents]
    assert 1 in {line.world_size for line in run.ledger}
