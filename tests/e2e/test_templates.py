"""What `holdfast init` writes, and the example with epochs: they run, and do what their first lines promise."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from e2e.test_spares import parked
from holdfast.core.records import IncidentClosed
from holdfast.core.strategies import Strategy
from support.jobs import Place, wait_for


def in_no_hurry(script: str, hurry: Path) -> str:
    """Return the script with samples that take their time until the file exists: a kill shall meet a training job."""
    slow = f"\n        __import__('time').sleep(0 if __import__('os').path.exists({str(hurry)!r}) else 0.002)"
    paced, places = re.subn(r"(def __getitem__\(self, .*:)$", lambda found: found[1] + slow, script, flags=re.MULTILINE)
    assert places == 1
    return paced


@pytest.mark.parametrize(
    ("template", "steps"),
    [
        ("ddp", 400),
        pytest.param("fsdp2", 150, marks=pytest.mark.thorough),
        pytest.param("huggingface", 150, marks=pytest.mark.thorough),
    ],
)
def test_a_killed_worker_of_a_template_is_replaced_and_it_trains(tmp_path: Path, template: str, steps: int) -> None:
    if template == "huggingface" and find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    command = [sys.executable, "-m", "holdfast", "init", "mine.py", "--template", template]
    written = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    flags = re.search(r"^  holdfast run (.*) mine\.py$", written, re.MULTILINE)
    assert flags, written
    job, script, hurry = Place(tmp_path), tmp_path / "mine.py", tmp_path / "hurry"
    script.write_text(in_no_hurry(script.read_text(), hurry))
    agent = job.start(*flags[1].split(), str(script), "--steps", str(steps))
    wait_for(lambda: parked(agent.pid), what="a parked spare")
    known = agent.stdout.count("step ") + 1  # twenty steps later its agent and the master know of it
    wait_for(lambda: agent.stdout.count("step ") > known, what="the first steps")
    os.kill(job.journal.pids()[1], signal.SIGKILL)
    hurry.touch()
    assert agent.wait() == 0, agent.stderr[-3000:]
    (incident,) = job.journal.of(IncidentClosed)
    assert incident.strategy is Strategy.RECOVER and "SIGKILL" in incident.cause
    losses = [float(loss) for loss in re.findall(r"^step +\d+  loss ([\d.]+)$", agent.stdout, re.MULTILINE)]
    assert losses[-1] < losses[0] and agent.stdout.rstrip().endswith("trained")


DIES_IN_EVALUATION = """
import os, runpy, signal
from pathlib import Path
import torch.distributed as dist

calls, all_reduce = 0, dist.all_reduce

def all_reduce_and_die(*arguments, **named):
    global calls
    calls += 1
    flag = Path(__file__).with_name("killed")
    if calls == 2 and dist.get_rank() == 1 and "kill" in os.environ["WHAT"] and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return all_reduce(*arguments, **named)

dist.all_reduce = all_reduce_and_die
runpy.run_path(EXAMPLE, run_name="__main__")
"""


@pytest.mark.thorough
def test_a_worker_killed_in_an_evaluation_changes_no_bit_of_the_best_model(tmp_path: Path) -> None:
    outputs, models = [], []
    for what in ("undisturbed", "killed"):
        directory = tmp_path / what
        directory.mkdir()
        example = str(Path(__file__).resolve().parents[2] / "examples/train_epochs.py")
        (directory / "script.py").write_text(DIES_IN_EVALUATION.replace("EXAMPLE", repr(example)))
        job = Place(directory)
        script = [str(directory / "script.py"), "--epochs", "2", "--best", str(directory / "best.pt")]
        agent = job.start("--standalone", "--nproc-per-node", "2", *script, env={"WHAT": what})
        assert agent.wait() == 0, agent.stderr[-3000:]
        assert len(job.journal.of(IncidentClosed)) == (what == "killed")
        outputs.append(re.findall(r"^(?:epoch|best).*$", agent.stdout, re.MULTILINE))
        models.append(torch.load(directory / "best.pt", weights_only=True))
    assert outputs[0] == outputs[1] and len(outputs[0]) == 3
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())
