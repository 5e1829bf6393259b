"""Ranks that share data coordinates, killed and replaced: the same batches, dropout masks and bits as undisturbed, and
samples that are counted once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.jobs import DEADLINE_S, SCRIPTS, Place, agent_environment
from support.references import made_once
from support.sessions import Run, assert_same_bits

STEPS = 17
"""Two epochs of 90 samples in batches of 12, the last of which has 6, and a step."""


def start(directory: Path, *words: str, flags: tuple[str, ...] = ()) -> Run:
    run = Run(directory)
    command = ("--nproc-per-node", "4", *flags, str(SCRIPTS / "coordinates.py"), str(STEPS), *words)
    run.agents.append(run.place.start(*command))
    return run.finish()


def verify(place: Place) -> tuple[int, dict[str, Any]]:
    """Exit code and answer of `holdfast data verify`."""
    command = [sys.executable, "-m", "holdfast", "data", "verify", "--state-dir", str(place.state_dir), "-o", "json"]
    environment = agent_environment(place.state_dir)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def reference(*words: str) -> Run:
    def make(directory: Path) -> None:
        run = start(directory, *words)
        assert len(run.finals) == 4 and not run.repeated()

    return Run(made_once(f"coordinates {' '.join(words)}", make))


def check_repaired(run: Run, calm: Run, killed: set[int]) -> None:
    assert len(run.incidents) == len(killed) == len(list(run.place.work.glob("fired-*")))
    assert_same_bits(run, calm, missing=len(killed))
    assert {rank for rank, pids in run.pids.items() if len(pids) > 1} <= killed, "survivors are the same processes"
    code, answer = verify(run.place)
    assert (code, answer["exact"], answer["findings"]) == (0, True, [])
    (source,) = answer["sources"]
    assert (source["first_step"], source["last_step"], source["unaudited"]) == (0, STEPS - 1, [])
    assert source["samples"] == 2 * 90 + 12, "each data coordinate is counted once"


def test_a_lost_rank_of_a_data_coordinate_is_replaced(tmp_path: Path) -> None:
    """By a spare: a rank whose samples count in the audit, and later one whose samples are compared with them."""
    run = start(tmp_path, "--fault", "5:2", "--fault", "11:1", flags=("--spares", "1"))
    check_repaired(run, reference(), {1, 2})
    assert len({line.loss for line in reference().ledger if line.step == 3}) == 2, "one for each data coordinate"


def test_a_lost_rank_is_replaced_without_a_spare_where_only_the_last_stage_has_a_loss(tmp_path: Path) -> None:
    words = ("--slots", "6", "--stages")
    run = start(tmp_path, *words, "--fault", "9:3")
    check_repaired(run, reference(*words), {3})


@pytest.mark.long
def test_a_batch_that_only_one_rank_of_a_coordinate_has_wrong_is_found(tmp_path: Path) -> None:
    run = start(tmp_path, "--wrong", "8")
    code, answer = verify(run.place)
    assert code == 1 and answer["sources"][0]["samples"] == 2 * 90 + 12, "the number is right, and yet it is found"
    (finding,) = answer["findings"]
    assert finding["kind"] == "differs" and finding["first_step"] <= 8 <= finding["last_step"]
