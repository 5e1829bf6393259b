"""A sharded model in a world whose size changes: the training function is entered again, in the same processes."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from holdfast.core.records import IncidentClosed, NodeJoined
from holdfast.core.strategies import Strategy
from support.jobs import SCRIPTS, AgentProcess, Place, agent_environment, free_port, wait_for
from support.references import made_once

ELASTIC = str(SCRIPTS / "elastic.py")
STEPS = 14
BATCH = 24
CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4}
"""Another split sums in another order, and Adam's first steps are sensitive to it."""


class Line(NamedTuple):
    """A committed step of a rank."""

    step: int
    rank: int
    pid: int
    view: int
    world_size: int
    loss: float
    samples: tuple[int, ...]


class Run:
    def __init__(self, directory: Path) -> None:
        self.place = Place(directory)

    def through(self, ranks: int, *options: str, model: str = "fsdp", code: int = 0, may: tuple[str, ...] = ()) -> Run:
        """A whole job on one node. `may`: strategies beyond elastic training."""
        recovery = ("--recovery", ",".join((*may, "elastic-training", "exit")))
        agent = self.start("--nproc-per-node", str(ranks), *recovery, options=options, model=model)
        assert agent.wait() == code, agent.stderr[-6000:]
        self.stderr = agent.stderr
        return self

    def start(self, *flags: str, options: tuple[str, ...], model: str = "fsdp") -> AgentProcess:
        recovery = ("--recovery", "elastic-training,exit")
        memory = ("--snapshots", "off")  # else a job that cannot be repaired starts anew from there
        return self.place.start(*recovery, *memory, *flags, ELASTIC, model, str(STEPS), *options)

    @property
    def lines(self) -> list[Line]:
        words = [line.split() for line in (self.place.work / "ledger").read_text().splitlines()]
        told = [found for found in words if found[0] != "#"]
        return [Line._make([*map(int, found[:5]), float(found[5]), tuple(map(int, found[6:]))]) for found in told]

    @property
    def entries(self) -> list[tuple[int, ...]]:
        """Process, rank, size of the world, older models still in memory: each time the function was entered."""
        found = (self.place.work / "entered").read_text().splitlines()
        return [tuple(map(int, line.split())) for line in found]

    def worlds(self, step: int) -> set[int]:
        return {line.world_size for line in self.lines if line.step == step}

    def pids(self, step: int) -> set[int]:
        return {line.pid for line in self.lines if line.step == step}

    @property
    def finals(self) -> list[str]:
        return [path.read_text() for path in sorted(self.place.work.glob("final-*"))]

    @property
    def state(self) -> dict[str, Any]:
        return torch.load(self.place.work / "state.pt", weights_only=True)

    @property
    def fired(self) -> int:
        return len(list(self.place.work.glob("fired-*")))

    @property
    def strategies(self) -> list[Strategy | None]:
        return [incident.strategy for incident in self.place.journal.of(IncidentClosed)]


@pytest.fixture
def reference(leak_guard: str) -> dict[str, Any]:
    """The same job without a fault, run once: its state at the end, losses and samples of each step."""
    run = Run(made_once("reentry", lambda directory: Run(directory).through(3)))
    return {"state": run.state, "losses": losses_of(run), "samples": samples_of(run)}


def losses_of(run: Run) -> dict[int, float]:
    """By step: the mean over the global batch."""
    found: dict[int, float] = {}
    for line in run.lines:
        found[line.step] = found.get(line.step, 0.0) + line.loss
    return found


def samples_of(run: Run) -> dict[int, Counter[int]]:
    found: dict[int, Counter[int]] = {}
    for line in run.lines:
        found.setdefault(line.step, Counter()).update(line.samples)
    return found


def assert_as_undisturbed(run: Run, reference: dict[str, Any], ranks: int, untold: tuple[int, ...] = ()) -> None:
    """Every step with every sample of its global batch, once; the same losses and the same end. Of the steps `untold`
    not every rank could say what it did."""
    assert len(run.finals) == ranks and set(run.finals) == {run.finals[0]}
    assert run.finals[0].startswith(f"{STEPS} ")
    samples, losses = samples_of(run), losses_of(run)
    for step, wanted in reference["samples"].items():
        if step in untold:
            assert samples.get(step, Counter()) <= wanted
            continue
        assert samples[step] == wanted, f"step {step} has other samples"
        assert losses[step] == pytest.approx(reference["losses"][step], rel=1e-3)
    torch.testing.assert_close(run.state, reference["state"], **CLOSE)


def test_it_shrinks_after_a_loss_and_grows_back(tmp_path: Path, reference: dict[str, Any]) -> None:
    run = Run(tmp_path).through(3, "--fault", "forward:4:0:kill", "--world-at", "6:3")
    assert_as_undisturbed(run, reference, 3)
    assert run.worlds(3) == {3} and run.worlds(4) == {2} and run.worlds(STEPS - 1) == {3}
    survivors = run.pids(3) & run.pids(4)
    assert len(survivors) == 2 and survivors < run.pids(STEPS - 1)
    assert run.strategies == [Strategy.ELASTIC_TRAINING] * 2
    assert len(run.entries) == 3 + 2 + 3 and not any(old for *_, old in run.entries), "the old model went first"
    assert run.place.journal.job().incidents.restarts_used == 0


@pytest.mark.long
def test_down_to_one_that_has_all_and_back(tmp_path: Path, reference: dict[str, Any]) -> None:
    faults = ("--fault", "forward:4:0:kill", "--fault", "barrier-before:9:1:kill")
    run = Run(tmp_path).through(2, *faults, "--world-at", "6:2", "--world-at", "11:2")
    assert run.fired == 2
    assert_as_undisturbed(run, reference, 2)
    assert run.worlds(4) == run.worlds(9) == {1} and run.worlds(8) == run.worlds(STEPS - 1) == {2}


@pytest.mark.long
def test_a_loss_while_it_grows_back_from_another(tmp_path: Path, reference: dict[str, Any]) -> None:
    faults = ("--fault", "forward:2:1:kill", "--fault", "forward:3:0:kill", "--fault", "forward:10:1:kill")
    run = Run(tmp_path).through(3, *faults, "--world-at", "5:3", "--world-at", "8:3", "--world-at", "11:3")
    assert run.fired == 3
    assert_as_undisturbed(run, reference, 3)


@pytest.mark.parametrize(
    "point", ["reshard", *(pytest.param(point, marks=pytest.mark.long) for point in ("agreed", "rebuild", "exchange"))]
)
def test_a_kill_on_the_way_into_the_smaller_world(tmp_path: Path, reference: dict[str, Any], point: str) -> None:
    """Ranks 1 and 3 die, whose copies are with 2 and 0: the second of them after it was entered again, as rank 2."""
    run = Run(tmp_path).through(4, "--fault", "forward:4:1:kill", "--fault", f"{point}:4:2:kill", "--world-at", "7:4")
    assert run.fired == 2
    assert_as_undisturbed(run, reference, 4)
    assert run.worlds(4) == {2}


@pytest.mark.long
def test_a_kill_of_the_newcomer_as_it_builds(tmp_path: Path, reference: dict[str, Any]) -> None:
    run = Run(tmp_path).through(
        3, "--fault", "forward:4:1:kill", "--fault", "rebuild:0:2:kill", "--world-at", "6:3", "--world-at", "9:3"
    )
    assert run.fired == 2
    assert_as_undisturbed(run, reference, 3)


@pytest.mark.long
def test_a_kill_before_the_barrier_repeats_the_step(tmp_path: Path, reference: dict[str, Any]) -> None:
    run = Run(tmp_path).through(3, "--fault", "barrier-before:4:2:kill", "--world-at", "6:3")
    assert_as_undisturbed(run, reference, 3)
    assert run.worlds(4) == {2}


def test_a_step_that_only_the_dead_saw_committed_stays_committed(tmp_path: Path, reference: dict[str, Any]) -> None:
    lost = ("--fault", "passed:4:0:lost", "--fault", "passed:4:1:lost")
    # Who is to die may hear of the others' trouble first: then all are well once more, and it dies a step later.
    run = Run(tmp_path).through(3, "--fault", "between:5:2:kill", *lost, "--world-at", "7:3", may=("retry",))
    assert run.fired == 3
    assert_as_undisturbed(run, reference, 3, untold=(4,))
    assert run.worlds(4) <= {3} and run.worlds(5) == {2}


@pytest.mark.long
def test_nodes_that_leave_and_come_cost_no_step(tmp_path: Path, reference: dict[str, Any]) -> None:
    run, endpoint = Run(tmp_path), f"127.0.0.1:{free_port()}"
    meeting = ("--nnodes", "1:3", "--settle", "50", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint)
    options = ("--world-at", "3:2", "--world-at", "8:3")

    def join(name: str) -> AgentProcess:
        return run.start(*meeting, "--rdzv-id", "nodes", "--node-id", name, options=options)

    agents = [join("a")]
    run.place.journal.wait_for(NodeJoined)  # so that the master is on a node that stays
    agents += [join("b"), join("c")]
    wait_for(lambda: (run.place.work / "ledger").exists() and {line.step for line in run.lines} & {3}, what="step 3")
    assert run.worlds(3) == {3}
    command = (sys.executable, "-m", "holdfast", "drain", "c")
    subprocess.run(command, env=agent_environment(run.place.state_dir), check=True, timeout=30, capture_output=True)
    assert agents[2].wait() == 0
    agents.append(join("d"))
    assert [agent.wait() for agent in agents] == [0] * 4
    assert_as_undisturbed(run, reference, 3)
    assert run.worlds(6) == {2} and run.worlds(STEPS - 1) == {3}
    assert len(run.pids(2) & run.pids(STEPS - 1)) == 2


def test_a_replicated_model_is_not_built_anew(tmp_path: Path) -> None:
    run = Run(tmp_path).through(3, "--fault", "forward:4:0:kill", "--world-at", "6:3", model="ddp")
    assert len(run.finals) == 3 and len(set(run.finals)) == 1
    assert run.worlds(4) == {2} and run.worlds(STEPS - 1) == {3}
    assert len(run.entries) == 4, "three at the start, and the one that took the rank"


def test_a_group_that_cannot_follow_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path).through(3, "--fault", "forward:4:2:kill", model="mesh", code=1)
    assert "Only groups of all ranks follow such a change" in run.place.journal.finished().why + run.stderr
