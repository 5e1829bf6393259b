"""Scripts that were written for torchrun do the same here, unchanged, however their workers start."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.jobs import SCRIPTS, Place, free_port

OTHERS = SCRIPTS / "others"
FLAGS = ("--standalone", "--nproc-per-node", "2")
TWO = ("forkserver", "spawn")


def run(job: Place, *args: str, method: str = "") -> list[str]:
    """What the workers printed, rank by rank. Under torchrun, if no method is given."""
    logs = job.directory / "logs"
    words = [*FLAGS, "-r", "3", "--log-dir", str(logs), *(("--start-method", method) if method else ()), *args]
    agent = job.start(*words, cwd=OTHERS) if method else job.torchrun(*words, cwd=OTHERS)
    assert agent.wait() == 0, agent.stderr
    files = sorted(logs.glob("*/attempt_0/*/stdout.log"))
    assert len(files) == 2
    return [line for file in files for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    "words",
    [
        ("train_ddp.py", "--epochs", "3", "--lr=0.05", "my data"),
        pytest.param(("train_recorded.py", "--", "-x", "a b"), marks=pytest.mark.long),
    ],
    ids=["argparse and DDP", "a recorded main"],
)
def test_a_script_prints_what_it_prints_under_torchrun(tmp_path: Path, words: tuple[str, ...]) -> None:
    expected = run(Place(tmp_path / "torchrun"), *words)
    assert expected
    for method in TWO:
        assert run(Place(tmp_path / method), *words, method=method) == expected


@pytest.mark.parametrize("method", TWO)
def test_data_loaders_with_processes_of_their_own_work(tmp_path: Path, method: str) -> None:
    printed = run(Place(tmp_path), "train_loader.py", method=method)
    expected = [f"rank {rank} {how}: 4 batches, sum {1240 + 16 * rank}" for rank in (0, 1) for how in ("fork", "spawn")]
    assert printed == expected


@pytest.mark.parametrize("method", TWO)
def test_a_module_of_a_package_runs(tmp_path: Path, method: str) -> None:
    printed = run(Place(tmp_path), "-m", "toytrain.train", "--flag", "value", method=method)
    assert printed == [f"toytrain train.py ['--flag', 'value'] {15 + rank} __main__" for rank in (0, 1)]


def test_a_shell_script_runs(tmp_path: Path) -> None:
    printed = run(Place(tmp_path), "--no-python", str(OTHERS / "train.sh"), "hello", "w orld", method="forkserver")
    assert printed == [f"rank {rank} of 2 says hello w orld" for rank in (0, 1)]


def test_a_script_may_meet_at_the_address_it_was_given_itself(tmp_path: Path) -> None:
    """Before a restart and after it: the master passes clients of torch's store on to the view's store."""
    printed: dict[str, list[str]] = {}
    for name in ("torchrun", "holdfast"):
        job, port, logs = Place(tmp_path / name), free_port(), tmp_path / f"{name}-logs"
        static = ("--master-addr", "localhost", "--master-port", str(port), "--log-dir", str(logs), "-r", "3")
        words = ["--nproc-per-node", "2", "--max-restarts", "1", *static, str(SCRIPTS / "by_tcp.py")]
        words.append(f"tcp://localhost:{port}")
        agent = job.torchrun(*words) if name == "torchrun" else job.start(*words, "fail once")
        assert agent.wait() == 0, agent.stderr
        attempt = "attempt_0" if name == "torchrun" else "attempt_1"
        files = sorted(logs.glob(f"*/{attempt}/*/stdout.log"))
        printed[name] = [line for file in files for line in file.read_text().splitlines()]
    assert printed["holdfast"] == printed["torchrun"] == [f"rank {rank}: 3.0 at localhost" for rank in (0, 1)]


SETS_FIRST = """
import os
os.environ["PYTORCH_JIT"] = "0"
import torch
print(type(torch.jit.script(lambda x: x)).__name__ if os.environ["RANK"] == "0" else "other")
"""


def test_variables_that_a_script_sets_before_it_imports_torch_have_their_effect(tmp_path: Path) -> None:
    script = tmp_path / "sets_first.py"
    script.write_text(SETS_FIRST)
    assert run(Place(tmp_path / "holdfast"), str(script), method="forkserver") == ["function", "other"]
