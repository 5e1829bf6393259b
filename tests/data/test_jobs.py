"""Real jobs: a DDP script under `holdfast run`, killed mid-epoch and continued at another world size."""

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.data.sample_digest import chain, planned_chain, prove_exactly_once
from holdfast.data.step_plan import make_plan
from support.jobs import agent_environment

ROOT = Path(__file__).resolve().parent.parent.parent
LOGGED = Path(__file__).parent / "scripts" / "logged.py"
SIZE, GLOBAL_BATCH, SEED = 193, 16, 3
STEPS_PER_EPOCH = 13


@pytest.fixture(autouse=True)
def guarded(leak_guard: str) -> str:
    return leak_guard


def run(tmp_path: Path, workers: int, *arguments: Any, restarts: int = 0) -> Any:
    command = [
        sys.executable, "-m", "holdfast", "run", "--standalone", "--nproc-per-node", str(workers),
        "--max-restarts", str(restarts), *map(str, arguments),
    ]  # fmt: skip
    environment = agent_environment(tmp_path / "state", {"OMP_NUM_THREADS": "1"})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def committed_steps(directory: Path, lives: list[str]) -> dict[int, list[int]]:
    """What was trained on at each step; a later life's account of a step replaces an earlier one's."""
    steps: dict[int, list[int]] = {}
    for life in lives:
        ranks: dict[int, list[int]] = defaultdict(list)
        for path in directory.glob(f"commits-{life}-*"):
            for line in path.read_text().splitlines():
                step, *samples = map(int, line.split())
                ranks[step] += samples
        steps |= ranks
    return steps


def trained_alone(plan: Any, steps: Any) -> Any:
    """The parameters that one process ends with, which sees the whole global batch."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x = torch.tensor(plan.samples(step), dtype=torch.float32)[:, None] / SIZE
        optimizer.zero_grad()
        (model(x) - x.sin()).square().mean().backward()
        optimizer.step()
    return model.state_dict()


def test_killed_mid_epoch_and_continued_with_fewer_workers_every_sample_counts_once_and_alike(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    first = run(tmp_path, 3, LOGGED, log, 2, 1, STEPS_PER_EPOCH + 6, restarts=2)
    assert "life 1-3-0 from step 16" in first
    second = run(tmp_path, 2, LOGGED, log, 4, 2, 0)
    assert "life 0-2-1 from step 24" in second

    steps = committed_steps(log, ["0-3", "1-3", "0-2"])
    assert sorted(steps) == list(range(4 * STEPS_PER_EPOCH))
    for epoch in range(4):
        own = [steps[epoch * STEPS_PER_EPOCH + step] for step in range(STEPS_PER_EPOCH)]
        verdict = prove_exactly_once(own, SIZE)
        assert verdict.exactly_once, f"epoch {epoch}: {verdict}"
    plan = make_plan(SIZE, global_batch_size=GLOBAL_BATCH, seed=SEED)
    assert chain(sorted(steps.items())) == planned_chain(plan, 0, 4 * STEPS_PER_EPOCH)

    saved = torch.load(log / "checkpoint.pt", weights_only=True)
    assert saved["data"] == plan.state(4 * STEPS_PER_EPOCH)
    for name, wanted in trained_alone(plan, 4 * STEPS_PER_EPOCH).items():
        assert torch.allclose(saved["model"][f"module.{name}"], wanted, rtol=1e-4, atol=1e-6)

    read = {int(line) for path in log.glob("reads-*") for line in path.read_text().split()}
    assert read == set(range(SIZE))
    assert not (log / f"reads-{os.getpid()}").exists()


def test_the_example_runs_and_continues_at_another_world_size(tmp_path: Path) -> None:
    example = ROOT / "examples/exact_data.py"
    first = run(tmp_path, 2, example, "--checkpoint", tmp_path / "exact.pt", "--epochs", 1)
    assert re.search(r"from step 0, epoch 0, with 2 workers", first)
    assert "done: 21 steps, 1000 samples" in first
    second = run(tmp_path, 1, example, "--checkpoint", tmp_path / "exact.pt", "--epochs", 2)
    assert "from step 21, epoch 1, with 1 workers" in second
    assert "done: 42 steps, 2000 samples" in second
