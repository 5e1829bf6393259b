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

    def again(self, *lost: int) -> dict[int, int]:
        """By rank that was not lost: how many micro-batches it has computed more than once."""
        lines = [tuple(map(int, line.split())) for line in (self.place.work / "rounds").read_text().splitlines()]
        ranks = {rank for _, _, rank, _ in lines} - set(lost)
        own = {rank: [(step, slot) for step, slot, who, _ in lines if who == rank] for rank in ranks}
        return {rank: len(rounds) - len(set(rounds)) for rank, rounds in own.items()}

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
        assert len(run.finals) == RANKS and not run.repeated() and set(run.again().values()) == {0}

    return MicroRun(made_once(f"micro-batches {' '.join(options)}", make))


@pytest.mark.parametrize("options", [("--batch-norm",), ("--canonical",)], ids=["ddp", "canonical"])
def test_a_survivor_computes_no_finished_micro_batch_again(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Twelve of sixteen are finished on all ranks when one dies. The mean loss is added up over all of them."""
    run = MicroRun(tmp_path).begin(*options, faults=("12:2:1:kill",)).finish()
    assert run.fired == 1
    assert_same_bits(run, reference(*options))
    assert run.again(1) == {0: 0, 2: 0}
    assert len(run.pids[1]) == 2 and len(run.pids[0]) == len(run.pids[2]) == 1
    run.verify()
