"""Models that are cut along a mesh, in a world of as many whole replicas as the living can form."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from holdfast.core.records import IncidentClosed
from holdfast.core.strategies import Strategy
from support.jobs import SCRIPTS, Place, agent_environment
from support.references import made_once

SCRIPT = str(SCRIPTS / "elastic_layouts.py")
STEPS = 12
UNTOLD = 3
"""The step before the fault: a rank that leaves its function as it learns of the commit writes no line of it."""
CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-5}
"""Another number of replicas sums in another order."""
SHARDS = {"pipeline": (0, 0, 1, 1), "tensor": (0, 1, 0, 1), "hybrid": (0, 1, 0, 1), "experts": (0, 1, 0, 1)}
"""Of each rank, of four."""


class Line(NamedTuple):
    """A committed step of a rank."""

    step: int
    rank: int
    pid: int
    world_size: int
    loss: float
    samples: tuple[int, ...]


class Run:
    def __init__(self, directory: Path) -> None:
        self.place = Place(directory)

    def through(self, layout: str, ranks: int, *options: str) -> Run:
        flags = ("--recovery", "elastic-training,exit", "--snapshots", "off", "--nproc-per-node", str(ranks))
        agent = self.place.start(*flags, SCRIPT, layout, str(STEPS), *options)
        assert agent.wait() == 0, agent.stderr[-6000:]
        return self

    @property
    def lines(self) -> list[Line]:
        words = [line.split() for line in (self.place.work / "ledger").read_text().splitlines()]
        return [Line._make([*map(int, found[:4]), float(found[4]), tuple(map(int, found[5:]))]) for found in words]

    def worlds(self, step: int) -> set[int]:
        return {line.world_size for line in self.lines if line.step == step}

    def pids(self, step: int) -> dict[int, int]:
        """By rank."""
        return {line.rank: line.pid for line in self.lines if line.step == step}

    def states(self) -> list[dict[str, Any]]:
        """By rank, at the end."""
        files = sorted(self.place.work.glob("state-*.pt"))
        return [torch.load(file, weights_only=True) for file in files]

    @property
    def strategies(self) -> list[Strategy | None]:
        return [incident.strategy for incident in self.place.journal.of(IncidentClosed)]

    def verify_data(self) -> None:
        """Have the journal show that each sample was used once."""
        command = [sys.executable, "-m", "holdfast", "data", "verify", "--state-dir", str(self.place.state_dir)]
        found = subprocess.run(
            [*command, "-o", "json"],
            env=agent_environment(self.place.state_dir),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert found.returncode == 0, found.stdout + found.stderr
        assert json.loads(found.stdout)["exact"]


def summed(run: Run) -> dict[int, tuple[Counter[int], float]]:
    """By step: the samples of all ranks, and the mean loss."""
    found: dict[int, tuple[Counter[int], float]] = {}
    for line in run.lines:
        samples, loss = found.get(line.step, (Counter(), 0.0))
        found[line.step] = (samples + Counter(line.samples), loss + line.loss)
    return found


def reference_of(layout: str) -> Run:
    """The same job without a fault, of four ranks."""
    return Run(made_once(f"elastic {layout}", lambda directory: Run(directory).through(layout, 4)))


def assert_steps_as_undisturbed(run: Run, layout: str) -> None:
    """Each step with the same samples and loss as without a fault, and each sample used once."""
    expected, found = summed(reference_of(layout)), summed(run)
    assert expected.keys() == set(range(STEPS)) and found.keys() | {UNTOLD} == expected.keys()
    assert found.get(UNTOLD, (Counter(),))[0] <= expected.pop(UNTOLD)[0]
    for step, (samples, loss) in expected.items():
        assert found[step][0] == samples, f"step {step} has other samples"
        assert found[step][1] == pytest.approx(loss, rel=1e-3), f"step {step} has another loss"
    run.verify_data()


def assert_as_undisturbed(run: Run, layout: str) -> None:
    """The same, and the same state at the end: that of each shard, on each rank that has it."""
    assert_steps_as_undisturbed(run, layout)
    states, expected = run.states(), reference_of(layout).states()
    assert len(states) == 4
    for rank, state in enumerate(states):
        torch.testing.assert_close(state, expected[rank], **CLOSE)
        twin = SHARDS[layout].index(SHARDS[layout][rank])
        torch.testing.assert_close(state, states[twin], rtol=0, atol=0)


def test_a_pipeline_goes_on_with_one_replica_and_grows_back(tmp_path: Path) -> None:
    """Rank 2 dies, of the second stage; of the first stage's two ranks one is left over."""
    run = Run(tmp_path).through("pipeline", 4, "--fault", "forward:4:2", "--world-at", "6:4")
    assert_as_undisturbed(run, "pipeline")
    assert run.worlds(2) == {4} and run.worlds(4) == {2} and run.worlds(STEPS - 1) == {4}
    before, between, after = run.pids(2), run.pids(4), run.pids(STEPS - 1)
    assert between == {0: before[0], 1: before[3]}, "each keeps its stage"
    assert after[0] == before[0] and after[1] == before[3], "the second one has the first stage now, from its twin"
    assert run.strategies == [Strategy.ELASTIC_TRAINING] * 2
    assert run.place.journal.job().incidents.restarts_used == 0


@pytest.mark.long
@pytest.mark.parametrize("layout", ["tensor", "hybrid", "experts"])
def test_other_layouts_go_on_with_one_replica_and_grow_back(tmp_path: Path, layout: str) -> None:
    run = Run(tmp_path).through(layout, 4, "--fault", "forward:4:2", "--world-at", "6:4")
    assert_as_undisturbed(run, layout)
    assert run.worlds(4) == {2} and run.worlds(STEPS - 1) == {4}
    survivors = set(run.pids(2).values()) & set(run.pids(4).values())
    assert len(survivors) == 2 and survivors < set(run.pids(STEPS - 1).values())


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_kill_at_the_barrier_repeats_the_step(tmp_path: Path, rank: int) -> None:
    run = Run(tmp_path).through("pipeline", 4, "--fault", f"barrier:4:{rank}", "--world-at", "6:4")
    assert_as_undisturbed(run, "pipeline")
    assert run.worlds(4) == {2}


@pytest.mark.long
def test_two_deaths_of_one_stage_in_one_step(tmp_path: Path) -> None:
    """Ranks 0 and 1 of six die, of the first stage: the third one is all that is left of it."""
    faults = ("--fault", "forward:4:0", "--fault", "forward:4:1")
    run = Run(tmp_path).through("pipeline", 6, *faults, "--world-at", "6:6")
    assert_steps_as_undisturbed(run, "pipeline")
    assert run.worlds(4) <= {2, 4} and run.worlds(STEPS - 1) == {6}


@pytest.mark.long
@pytest.mark.parametrize("point", ["build:4:0", "build:4:1", "join:4:0", "join:4:1"])
def test_a_kill_on_the_way_into_another_world(tmp_path: Path, point: str) -> None:
    """Six ranks become four; then one of those dies while it builds, or hands on its shard, and two are left."""
    faults = ("--fault", "forward:4:0", "--fault", point)
    run = Run(tmp_path).through("pipeline", 6, *faults, "--world-at", "8:6")
    assert_steps_as_undisturbed(run, "pipeline")
    assert run.worlds(2) == {6} and run.worlds(STEPS - 1) == {6}
    if (run.place.work / "fired-1").exists():  # not every rank has a shard to hand on
        assert run.worlds(4) == {2}
