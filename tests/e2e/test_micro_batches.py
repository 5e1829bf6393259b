"""A fault costs a micro-batch, not a step: what survivors compute again, and the bits at the end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.jobs import DEADLINE_S, SCRIPTS, agent_environment
from support.references import made_once
from support.sessions import Run, assert_same_bits

SCRIPT = str(SCRIPTS / "micro_batches.py")
STEPS = 6
RANKS = 3
EACH = 16
"""Micro-batches a rank and step."""


class MicroRun(Run):
    """A job of scripts/micro_batches.py."""

    def begin(
        self, *options: str, ranks: int = RANKS, faults: tuple[str, ...] = (), flags: tuple[str, ...] = ()
    ) -> MicroRun:
        words = [word for fault in faults for word in ("--fault", fault)]
        slots = str(RANKS * EACH)
        self.agents.append(
            self.place.start("--nproc-per-node", str(ranks), *flags, SCRIPT, str(STEPS), slots, *words, *options)
        )
        return self

    def again(self) -> list[int]:
        """Of each process: how many micro-batches it has computed more than once."""
        own: dict[int, list[tuple[int, int]]] = {}
        for line in (self.place.work / "rounds").read_text().splitlines():
            step, slot, _, pid = map(int, line.split())
            own.setdefault(pid, []).append((step, slot))
        return sorted(len(rounds) - len(set(rounds)) for rounds in own.values())

    def verify(self) -> None:
        """The journal says that each sample was used exactly once."""
        done = subprocess.run(
            [sys.executable, "-m", "holdfast", "data", "verify", "--state-dir", str(self.place.state_dir)],
            env=agent_environment(self.place.state_dir),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def reference(*options: str) -> MicroRun:
    """Nothing happens. Run once."""

    def make(directory: Path) -> None:
        run = MicroRun(directory)
        run.begin(*options).finish()
        assert len(run.finals) == RANKS and not run.repeated() and set(run.again()) == {0}

    return MicroRun(made_once(f"micro-batches {' '.join(options)}", make))


@pytest.mark.parametrize("options", [("--batch-norm",), ("--canonical",)], ids=["ddp", "canonical"])
def test_a_survivor_computes_no_finished_micro_batch_again(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Twelve of sixteen are finished on all ranks when one dies. The mean loss is added up over all of them."""
    run = MicroRun(tmp_path).begin(*options, faults=("12:2:1:kill",)).finish()
    assert run.fired == 1
    assert_same_bits(run, reference(*options))
    assert run.again() == [0, 0, 0, 0]
    assert len(run.pids[1]) == 2 and len(run.pids[0]) == len(run.pids[2]) == 1
    run.verify()


@pytest.mark.parametrize("views", [(), pytest.param(("--bucket-views",), marks=pytest.mark.long)], ids=len)
def test_a_fault_where_the_last_micro_batch_is_reduced_costs_that_one(tmp_path: Path, views: tuple[str, ...]) -> None:
    """Some buckets are sums of all ranks by then. Before, one dies behind the loop, with everything reduced; in the
    last step, a second one in the repeat, and then the connections break."""
    faults = ("backward:1:1:kill", "behind:2:2:kill", "12:4:1:kill", "14:4:0:kill", "backward:4:2:cut")
    run = MicroRun(tmp_path).begin("--batch-norm", *views, faults=faults).finish()
    assert run.fired == len(faults)
    assert_same_bits(run, reference("--batch-norm", *views), missing=1)
    assert sum(len(pids) for pids in run.pids.values()) == RANKS + 4
    assert max(run.again()) <= 4, "one at most for each fault that a process has lived through"
    run.verify()


def test_what_the_script_wants_repeated_is_computed_again(tmp_path: Path) -> None:
    """By the rank that asked for it."""
    run = MicroRun(tmp_path).begin("--batch-norm", faults=("12:2:1:raise",)).finish()
    assert_same_bits(run, reference("--batch-norm"))
    assert run.again() == [0, 0, 12]


@pytest.mark.parametrize("lost", [1, pytest.param(2, marks=pytest.mark.long)])
def test_fewer_ranks_keep_the_subtrees_of_their_slots(tmp_path: Path, lost: int) -> None:
    """The canonical reduction: the lost rank's slots are shared out, in the same step."""
    flags = ("--recovery", "elastic-training,exit")
    run = MicroRun(tmp_path).begin("--canonical", faults=(f"12:2:{lost}:kill",), flags=flags).finish()
    assert {text.split()[1] for text in run.finals.values()} == {
        text.split()[1] for text in reference("--canonical").finals.values()
    }
    assert run.views()[1].world_size == RANKS - 1
    assert set(run.again()) == {0}
    run.verify()


@pytest.mark.long
def test_without_keep_a_broken_step_is_repeated_as_a_whole(tmp_path: Path) -> None:
    run = MicroRun(tmp_path).begin("--batch-norm", "--whole", faults=("12:2:1:kill",)).finish()
    assert_same_bits(run, reference("--batch-norm"))
    *_, one, other = run.again()
    assert min(one, other) >= 12
