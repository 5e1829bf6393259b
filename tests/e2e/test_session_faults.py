"""Faults at every point of a step: each ends with the same bits as an undisturbed run, and restarts nobody else."""

from pathlib import Path

import pytest

from holdfast.core.records import IncidentDecided
from holdfast.core.strategies import Strategy
from support.sessions import Run, assert_same_bits, undisturbed

POINTS = [
    "data",
    "forward",
    "backward",
    "collective",
    "barrier-before",
    "barrier-in",
    "update-before",
    "update-middle",
    "update-after",
    "between",
]


def all_points(action: str, ranks: int) -> list[str]:
    """A fault at each point, in steps far enough apart that each is recovered from, on all ranks in turn."""
    return [f"{point}:{3 + 3 * index}:{index % ranks}:{action}" for index, point in enumerate(POINTS)]


def assert_survivors_stayed(run: Run, ranks: int, deaths: int) -> None:
    """One process a rank, and one more for each death."""
    assert sum(len(pids) for pids in run.pids.values()) == ranks + deaths


def test_a_kill_at_every_point_is_repaired_in_place(tmp_path: Path) -> None:
    faults = all_points("kill", 3)
    run = Run(tmp_path).start("ddp", ranks=3, steps=36, faults=faults, options=["--apart"]).finish()
    assert run.fired == len(faults)
    assert_same_bits(run, undisturbed("ddp", ranks=3, steps=36), missing=len(faults))
    assert_survivors_stayed(run, 3, len(faults))
    assert [i.strategy for i in run.incidents] == [Strategy.RECOVER_IN_PLACE] * len(faults)


def test_a_kill_at_every_point_is_repaired_from_a_spare(tmp_path: Path) -> None:
    faults = all_points("kill", 3)
    run = Run(tmp_path).start("ddp", ranks=3, steps=36, faults=faults, flags=["--spares", "1"]).finish()
    assert run.fired == len(faults)
    assert_same_bits(run, undisturbed("ddp", ranks=3, steps=36), missing=len(faults))
    assert_survivors_stayed(run, 3, len(faults))
    assert Strategy.RECOVER in [i.strategy for i in run.incidents]


@pytest.mark.thorough
def test_a_kill_in_every_phase_of_an_agreement_by_a_tree_gives_the_same_bits(tmp_path: Path) -> None:
    """Of four ranks in pairs: 0 and 2 lead, 0 is the root. The answer of step 9 dies with the root, and the step is
    repeated; of steps 12 and 15 one of two groups has it, and the other rolls forward."""
    phases = ["barrier-before:3:3", "tree-up:6:2", "tree-root:9:0", "tree-down:12:2", "tree-down:15:0"]
    phases.append("update-before:18:1")
    faults = [f"{phase}:kill" for phase in phases]
    run = Run(tmp_path).start("ddp", ranks=4, steps=24, faults=faults, features="tree", options=["--apart"]).finish()
    assert run.fired == len(faults)
    assert_same_bits(run, undisturbed("ddp", ranks=4, steps=24), missing=len(faults))
    assert_survivors_stayed(run, 4, len(faults))
    assert [i.strategy for i in run.incidents] == [Strategy.RECOVER_IN_PLACE] * len(faults)


@pytest.mark.long
def test_a_rank_that_stops_between_the_levels_of_a_tree_is_replaced(tmp_path: Path) -> None:
    faults = ["tree-up:6:2:stop", "tree-down:12:2:stop", "tree-down:18:0:stop"]
    run = Run(tmp_path).start(
        "ddp", ranks=4, steps=24, faults=faults, features="tree", options=["--apart"], flags=["--hang-timeout", "3"]
    )
    run.finish()
    assert run.fired == len(faults)
    assert_same_bits(run, undisturbed("ddp", ranks=4, steps=24), missing=len(faults))
    assert_survivors_stayed(run, 4, len(faults))


@pytest.mark.long
def test_fully_sharded_from_replicas_that_ranks_of_a_tree_sent(tmp_path: Path) -> None:
    points = [point for point in POINTS if point != "barrier-in"]
    faults = [f"{point}:{3 + 3 * index}:{index % 3}:kill" for index, point in enumerate(points)]
    run = Run(tmp_path).start("fsdp", ranks=3, steps=36, faults=faults, features="tree", options=["--apart"]).finish()
    assert run.fired == len(faults)
    assert_same_bits(run, undisturbed("fsdp", ranks=3, steps=36), missing=len(faults))
    assert_survivors_stayed(run, 3, len(faults))


@pytest.mark.parametrize("action", ["raise", "cut"])
def test_a_step_that_breaks_is_retried_by_the_same_processes(tmp_path: Path, action: str) -> None:
    before_the_barrier = ["data", "forward", "backward", "collective", "barrier-before"]
    faults = [f"{point}:{3 + 3 * index}:{index % 3}:{action}" for index, point in enumerate(before_the_barrier)]
    run = Run(tmp_path).start("ddp", ranks=3, faults=faults, options=["--apart"]).finish()
    assert run.fired == len(faults)
    assert_same_bits(run, undisturbed("ddp", ranks=3))
    assert_survivors_stayed(run, 3, 0)
    assert {i.strategy for i in run.incidents} == {Strategy.RETRY}


@pytest.mark.parametrize(
    "features",
    [
        pytest.param("tail,clip,loader", marks=pytest.mark.long),
        "scaler,accumulate,batchnorm",
        pytest.param("ema,early,micro", marks=pytest.mark.long),
        pytest.param("torch", marks=pytest.mark.long),
    ],
    ids=lambda text: text.replace(",", "-"),
)
def test_everything_that_is_tracked_comes_back(tmp_path: Path, features: str) -> None:
    faults = [f"{point}:{4 + 4 * index}:{index % 2}:kill" for index, point in enumerate(POINTS) if index < 6]
    faults += ["update-middle:29:0:kill", "update-after:32:1:kill", "update-after:36:0:kill"]
    run = Run(tmp_path).start("ddp", ranks=2, steps=40, faults=faults, features=features).finish()
    assert run.fired == len(faults)
    assert_same_bits(run, undisturbed("ddp", ranks=2, steps=40, features=features), missing=len(faults))
    assert_survivors_stayed(run, 2, len(faults))


def test_an_error_between_two_steps_is_a_failed_worker_like_any_other(tmp_path: Path) -> None:
    """Not the end of the training: a ValueError, and sys.exit(3)."""
    faults = ["between:9:1:bug", "between:18:0:exit"]
    run = Run(tmp_path).start("ddp", ranks=3, faults=faults, options=["--apart"]).finish()
    assert run.fired == len(faults)
    assert_same_bits(run, undisturbed("ddp", ranks=3), missing=len(faults))
    assert_survivors_stayed(run, 3, len(faults))
    assert [i.strategy for i in run.incidents] == [Strategy.RECOVER_IN_PLACE] * len(faults)


def test_an_error_is_the_cause_however_long_its_process_takes_to_end(tmp_path: Path) -> None:
    """Its peers' broken connections come in long before, and are not taken for the cause."""
    faults = ["forward:9:1:bug", "between:18:0:bug"]
    run = Run(tmp_path).start("ddp", ranks=3, faults=faults, options=["--apart", "--slow-exit", "1.5"]).finish()
    assert run.fired == len(faults)
    assert_same_bits(run, undisturbed("ddp", ranks=3), missing=len(faults))
    assert_survivors_stayed(run, 3, len(faults))
    decisions = run.place.journal.of(IncidentDecided)
    assert [decision.strategy for decision in decisions] == [Strategy.RECOVER_IN_PLACE] * len(faults)
    assert all("a bug in the user's code" in decision.cause for decision in decisions)


def test_a_failure_after_the_last_step_is_the_scripts_own(tmp_path: Path) -> None:
    run = Run(tmp_path).start("ddp", ranks=2, faults=["epilogue:30:1:bug"]).finish(code=1)
    assert "a bug in the user's code" in run.place.journal.finished().why


def test_fully_sharded_from_replicas(tmp_path: Path) -> None:
    faults = [*all_points("kill", 3), "capture:35:2:kill"]
    run = Run(tmp_path).start("fsdp", ranks=3, steps=38, faults=faults).finish()
    assert run.fired == len(faults)
    assert_same_bits(run, undisturbed("fsdp", ranks=3, steps=38), missing=len(faults))
    assert_survivors_stayed(run, 3, len(faults))


@pytest.mark.long
def test_fully_sharded_with_a_spare(tmp_path: Path) -> None:
    faults = ["forward:5:1:kill", "barrier-in:20:0:kill"]
    run = Run(tmp_path).start("fsdp", ranks=2, faults=faults, flags=["--spares", "1"], options=["--pause", "0.05"])
    run.finish()
    assert_same_bits(run, undisturbed("fsdp", ranks=2), missing=2)


@pytest.mark.long
def test_hybrid_sharded_from_the_twin(tmp_path: Path) -> None:
    faults = [f"{point}:{3 + 3 * index}:{index % 4}:kill" for index, point in enumerate(POINTS) if index % 2]
    run = Run(tmp_path).start("hsdp", ranks=4, steps=36, faults=faults).finish()
    assert run.fired == len(faults)
    assert_same_bits(run, undisturbed("hsdp", ranks=4, steps=36), missing=len(faults))
    assert_survivors_stayed(run, 4, len(faults))
