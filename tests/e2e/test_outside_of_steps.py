"""Code in the loop of the steps that is not inside `with step:`: what it changes of the state is right all the same,
and what must happen once per step does."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.core.strategies import Strategy
from support.jobs import SCRIPTS
from support.sessions import Run, assert_same_bits, undisturbed

ROOT = Path(__file__).resolve().parents[2]
KILLS = [
    "forward:0:1:kill",
    "backward:4:0:kill",
    "update-before:7:1:kill",
    "update-after:10:0:kill",
    "outside:13:1:kill",
    "between:17:0:kill",
    "data:20:1:kill",
]


def saved(run: Run) -> dict[str, str]:
    """The states that the script saved after the steps, by name."""
    return {path.name: path.read_text() for path in run.place.work.glob("saved-*")}


@pytest.mark.parametrize("features", ["outside,ema,batchnorm", "before"])
def test_what_is_tracked_is_right_wherever_it_is_changed(tmp_path: Path, features: str) -> None:
    kills = [kill for kill in KILLS if "outside" in features or "outside" not in kill]
    run = Run(tmp_path).start("ddp", ranks=2, faults=kills, features=features, options=["--apart"]).finish()
    assert run.fired == len(kills)
    reference = undisturbed("ddp", ranks=2, features=features)
    assert_same_bits(run, reference, missing=len(kills))
    assert {i.strategy for i in run.incidents} == {Strategy.RECOVER_IN_PLACE}
    states, wanted = saved(run), saved(reference)
    assert states == {name: wanted[name] for name in states}, "a state was saved that never was"
    assert len(wanted) - len(states) <= len(kills)


def test_a_retried_step_puts_back_what_was_changed_outside(tmp_path: Path) -> None:
    faults = [f"{point}:{step}:{step % 2}:raise" for step, point in [(1, "data"), (2, "backward"), (9, "forward")]]
    features = "outside,ema,batchnorm"
    run = Run(tmp_path).start("ddp", ranks=2, faults=faults, features=features, options=["--apart"]).finish()
    assert run.fired == len(faults)
    reference = undisturbed("ddp", ranks=2, features=features)
    assert_same_bits(run, reference)
    assert saved(run) == saved(reference)


def test_replicas_of_shards_do_not_miss_what_changes_outside(tmp_path: Path) -> None:
    run = Run(tmp_path).start("fsdp", ranks=2, features="outside", flags=["--max-restarts", "0"]).finish(code=1)
    assert "scheduler" in (error := run.agents[0].stderr) and "was changed outside of `with step:`" in error


SCRIPT = """
import os, sys
import torch
from pathlib import Path
from calm import wait_until_calm
import holdfast as hf
from holdfast.errors import UsageError

job = hf.init()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters())
job.track(model=model, optimizer=optimizer)
out = os.open(Path(os.environ["WORK"]) / "out", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def say(*words):
    os.write(out, (" ".join(map(str, (job.rank, *words))) + chr(10)).encode())


def fail_once(name):
    try:
        os.close(os.open(Path(os.environ["WORK"]) / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    wait_until_calm()  # the master knows the session, and nothing else is amiss
    raise hf.RetryableError(name)


for step in job.steps(4):
    with step:
        step.after_commit(lambda: say("first", step.number, step.attempt, job.step, job.logged["loss"] == float(loss)))
        loss = model(torch.full((2, 4), float(step.number))).square().mean()
        if job.rank == 1 and step.number in (1, 3):
            fail_once(f"failed-{step.number}")
        step.after_commit(lambda: say("second", step.number, step.attempt, job.step, step.is_committed))
        step.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step.log(loss=loss)
    TAIL
try:
    step.after_commit(print)
except UsageError as error:
    say("refused", error)
"""


def run_script(tmp_path: Path, tail: str) -> tuple[list[str], str]:
    """Lines that were said, in order, and what the job wrote to standard error."""
    run = Run(tmp_path)
    script = tmp_path / "script.py"
    shutil.copy(SCRIPTS / "calm.py", tmp_path)
    script.write_text(SCRIPT.replace("TAIL", tail))
    agent = run.place.start("--nproc-per-node", "2", str(script))
    assert agent.wait() == 0, agent.stderr[-4000:]
    return (run.place.work / "out").read_text().splitlines(), agent.stderr


def test_what_is_to_happen_after_a_commit_happens_once_and_in_order(tmp_path: Path) -> None:
    lines, _ = run_script(tmp_path, "pass")
    for rank in (0, 1):
        assert [line for line in lines if line.startswith(f"{rank} ") and "refused" not in line] == [
            f"{rank} {which} {step} {attempt} {step + 1} True"
            for step, attempt in ((0, 0), (1, 1), (2, 0), (3, 1))
            for which in ("first", "second")
        ]
    assert len([line for line in lines if "refused step.after_commit is called inside" in line]) == 2


@pytest.mark.parametrize(
    ("tail", "warnings"),
    [
        ("print('outside')", 2),
        ("if step.is_committed: print('outside')", 0),
        ("pass", 0),
    ],
    ids=["unguarded", "guarded", "nothing"],
)
def test_code_outside_that_sees_an_aborted_attempt_is_warned_of_once(tmp_path: Path, tail: str, warnings: int) -> None:
    _, errors = run_script(tmp_path, tail)
    found = re.findall(r"the code after `with step:` \((.*?):(\d+)\) has run for the aborted attempt", errors)
    assert len(found) == warnings, errors
    lines = SCRIPT.splitlines()
    assert {int(line) for _, line in found} <= {lines.index("    TAIL") + 1}


def test_the_shipped_example_survives_a_kill_in_its_first_step(tmp_path: Path) -> None:
    driver = tmp_path / "driver.py"
    driver.write_text(
        f"""
import os, runpy, signal, sys
import torch

sys.path.insert(0, {str(ROOT / "examples")!r})
real = torch.nn.functional.cross_entropy


def hurting(*arguments, **named):
    if os.environ.get("RANK") == "1":
        try:
            os.close(os.open({str(tmp_path / "fired")!r}, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return real(*arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **named)


torch.nn.functional.cross_entropy = hurting
runpy.run_path({str(ROOT / "examples/train_session.py")!r}, run_name="__main__")
"""
    )
    results = []
    for name in ("hurt", "undisturbed"):  # the fault happens once
        command = [sys.executable, "-m", "holdfast", "run", "--standalone", "--nproc-per-node", "2", str(driver)]
        command += ["--steps", "45", "--result", str(tmp_path / name), str(ROOT / "README.md")]
        environment = os.environ | {"HOLDFAST_STATE_DIR": str(tmp_path / f"state-{name}"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "runs once" not in done.stderr, "the example is as we tell others to write"
        results.append(((tmp_path / name).read_text(), re.findall(r"^.*step +(\d+)  loss", done.stdout, re.MULTILINE)))
    assert (tmp_path / "fired").exists() and results[0] == results[1]
    assert results[0][1] == ["20", "40"]
