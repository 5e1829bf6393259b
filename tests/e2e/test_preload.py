"""What is imported ahead costs a job nothing but time if it cannot be, and no worker imports it again."""

from __future__ import annotations

import sys
from pathlib import Path

from support.jobs import Place
from support.sessions import Run, assert_same_bits, undisturbed

THREADED = "import threading, time\nthreading.Thread(target=time.sleep, args=[99], daemon=True).start()\n"


def test_a_job_runs_and_recovers_whose_preloaded_module_starts_a_thread(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(THREADED)
    flags = ["--preload", "auto,threaded"]
    run = Run(tmp_path).start(
        "ddp", ranks=2, faults=["forward:5:1:kill"], flags=flags, env={"PYTHONPATH": str(tmp_path)}
    )
    run.finish()
    assert_same_bits(run, undisturbed("ddp", ranks=2))
    assert [len(run.pids[rank]) for rank in range(2)] == [1, 2]
    assert run.agents[0].stderr.count("--preload threaded started threads") == 1


def test_no_worker_imports_what_the_script_begins_with(tmp_path: Path) -> None:
    job = Place(tmp_path)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "heavy.py").write_text("import os\nimporter = os.getpid()\n")
    script = tmp_path / "train.py"
    script.write_text("import os\nimport heavy\nprint('imported by', heavy.importer, 'run by', os.getpid())\n")
    env = {"PYTHONPATH": str(tmp_path / "site-packages")}
    agent = job.start("--standalone", "--nproc-per-node", "2", str(script), env=env)
    assert agent.wait() == 0, agent.stderr
    lines = [line.split() for line in agent.stdout.splitlines() if "imported by" in line]
    importers, workers = {words[-4] for words in lines}, {words[-1] for words in lines}
    assert len(lines) == 2 and len(importers) == 1 and not importers & workers
    off = job.start("--standalone", "--preload", "numpy", str(script), env=env)
    assert off.wait() == 0, off.stderr
    [words] = [line.split() for line in off.stdout.splitlines() if "imported by" in line]
    assert words[-4] == words[-1]


STANDARD = (
    "asyncio",
    "base64",
    "json",
    "logging",
    "queue",
    "random",
    "selectors",
    "socket",
    "statistics",
    "subprocess",
)


def test_modules_in_the_working_directory_do_not_come_before_pythons_own(tmp_path: Path) -> None:
    """As in a plain start of a script that is elsewhere. Agent, master and fork server import all of these."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    for name in STANDARD:
        (here / f"{name}.py").write_text(f"raise ImportError('{name} of the user')")
    (elsewhere / "train.py").write_text("import random, sys, os\nprint('ran in', os.getcwd(), sys.flags.safe_path)\n")
    job = Place(tmp_path)
    command = (sys.executable, "-m", "holdfast", "run")
    agent = job.start("--standalone", str(elsewhere / "train.py"), cwd=here, command=command)
    assert agent.wait() == 0, agent.stderr
    assert agent.stdout == f"ran in {here} False\n"
