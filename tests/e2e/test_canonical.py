"""The canonical reduction in real jobs: however many ranks there are, and whatever happens to them, the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.core.strategies import Strategy
from support.jobs import SCRIPTS
from support.references import made_once
from support.sessions import Run

SCRIPT = str(SCRIPTS / "canonical.py")
STEPS = 200
SLOTS = 6
"""More than one node of the tree for most ranks; and every fifth step has four samples, so that slots are empty."""


class CanonicalRun(Run):
    """A job of scripts/canonical.py."""

    def begin(self, ranks: int, *flags: str, options: tuple[str, ...] = ()) -> CanonicalRun:
        words = ("--nproc-per-node", str(ranks), *flags, SCRIPT, str(STEPS), str(SLOTS), *options)
        self.agents.append(self.place.start(*words))
        return self

    @property
    def slot_losses(self) -> dict[tuple[int, int], set[str]]:
        """By (step, slot): every loss that was committed."""
        found: dict[tuple[int, int], set[str]] = {}
        for line in (self.place.work / "slots").read_text().splitlines():
            step, slot, loss = line.split()
            found.setdefault((int(step), int(slot)), set()).add(loss)
        return found


def reference() -> CanonicalRun:
    """Four ranks, and nothing happens. Run once."""

    def make(directory: Path) -> None:
        run = CanonicalRun(directory)
        run.begin(4).finish()
        assert len(run.finals) == 4 and len(set(run.finals.values())) == 1 and not run.repeated()
        assert all(len(losses) == 1 for losses in run.slot_losses.values())

    return CanonicalRun(made_once("canonical", make))


def assert_same_history(run: CanonicalRun) -> None:
    """Parameters, optimizer, schedule and average at the end, on every rank, and each slot's loss of each step."""
    assert set(run.finals.values()) == set(reference().finals.values())
    assert run.slot_losses == reference().slot_losses


@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (1, 2))])
def test_any_number_of_ranks_ends_with_the_same_bits(tmp_path: Path, ranks: int) -> None:
    run = CanonicalRun(tmp_path).begin(ranks).finish()
    assert len(run.finals) == ranks
    assert_same_history(run)


def test_four_three_one_and_again_four_ranks_end_with_the_bits_of_four(tmp_path: Path) -> None:
    """One dies in a forward, another in the middle of an exchange, and then one after the other until one is left."""
    faults = ("forward:5:1:kill", "gather:60:2:kill", *["forward:120:last:kill"] * 3)
    options = tuple(word for fault in faults for word in ("--fault", fault))
    run = CanonicalRun(tmp_path).begin(
        4, "--recovery", "elastic-training,exit", options=(*options, "--pause", "0.05", "--until-hurry")
    )
    run.wait_until_calm(4, closed=4)
    run.wait_for_step(121)
    run.wait_until_calm(4)
    run.hurry().finish()
    assert run.fired == len(faults)
    assert_same_history(run)
    assert {incident.strategy for incident in run.incidents} == {Strategy.ELASTIC_TRAINING}
    sizes = [view.world_size for view in run.views()]
    assert sizes[:8] == [4, 3, 4, 3, 4, 3, 2, 1] and sizes[-1] == 4
    assert {line.world_size for line in run.ledger} >= {4, 3, 1}


@pytest.mark.parametrize("point", ["scatter", pytest.param("gather", marks=pytest.mark.long)])
def test_an_exchange_whose_links_break_is_repeated(tmp_path: Path, point: str) -> None:
    options = ("--fault", f"{point}:7:1:cut", "--fault", f"{point}:31:0:kill")
    run = CanonicalRun(tmp_path).begin(3, options=options).finish()
    assert run.fired == 2
    assert_same_history(run)
    assert [i.strategy for i in run.incidents] == [Strategy.RETRY, Strategy.RECOVER_IN_PLACE]
