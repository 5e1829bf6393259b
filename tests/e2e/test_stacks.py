"""`holdfast stacks` on real jobs: what every rank is doing, whatever it is stuck in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from support.jobs import DEADLINE_S, SCRIPTS, SPAWN, STEPS, Place, agent_environment, is_alive, wait_for
from support.sessions import Run

STUCK = str(SCRIPTS / "stuck.py")


def holdfast(job: Place, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast", *arguments],
        env=agent_environment(job.state_dir),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def groups_of(job: Place) -> dict[tuple[int, ...], str]:
    found = holdfast(job, "stacks", "-o", "json")
    assert found.returncode == 0, found.stderr
    return {tuple(group["ranks"]): group["stack"] for group in json.loads(found.stdout)["groups"]}


def test_an_unchanged_script_that_is_stuck_before_its_first_step_is_shown_as_it_is(tmp_path: Path) -> None:
    job = Place(tmp_path)
    agent = job.start("--standalone", "--nproc-per-node", "4", STUCK, env={"HOLDFAST_PRELOAD": "none"})
    pids = job.journal.wait_for_workers(4)
    wait_for(lambda: all((job.work / f"stuck-{rank}").exists() for rank in range(4)), what="all ranks to get stuck")

    def is_settled() -> bool:  # the flag is written a moment before the call
        found = groups_of(job)
        return set(found) == {(0, 1), (2,), (3,)} and "sleep 1000" in found[2,] and "re/__init__" in found[3,]

    wait_for(is_settled, what="all ranks in the calls that never return")
    found = groups_of(job)
    assert "in waits_in_an_import" in found[0, 1] and f'File "{STUCK}"' in found[0, 1]
    assert "in builds_an_extension" in found[2,] and "child process: sleep 1000" in found[2,]
    assert "in holds_the_interpreter" in found[3,]
    assert all(text.startswith("thread MainThread:") and "threading.py" in text for text in found.values())
    assert "fork_server" not in "".join(found.values())
    shown = holdfast(job, "stacks").stdout
    assert "ranks 0-1:" in shown and "rank 3:" in shown
    explained = holdfast(job, "explain").stdout
    assert "no incidents" in explained and "not made a step yet" in explained and "waits_in_an_import" in explained
    assert all(map(is_alive, pids.values())), "asking has disturbed no worker"
    agent.send(signal.SIGTERM)
    assert agent.wait() == 128 + signal.SIGTERM
    over = holdfast(job, "stacks")
    assert over.returncode == 1 and "is over" in over.stderr


def test_stacks_of_all_nodes_and_of_workers_with_a_session_that_are_stopped(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for name in ("a", "b"):
        run.join(
            name, "ddp", nnodes="2", ranks=1, steps=1000, flags=["--hang-timeout", "0"], options=["--pause", "0.03"]
        )
    run.wait_until_calm(2)
    pids = run.place.journal.wait_for_workers(2)
    os.kill(pids[1], signal.SIGSTOP)
    found = wait_for(lambda: groups_of(run.place))
    assert set(found) == {(0,), (1,)}
    assert "session.py" in found[0,] and "stopped by a signal" in found[1,]
    os.kill(pids[1], signal.SIGCONT)
    run.hurry()
    run.finish()


def test_a_program_that_cannot_dump_its_stacks_is_let_live(tmp_path: Path) -> None:
    """A signal without a handler would end it."""
    job = Place(tmp_path)
    agent = job.start("--standalone", *SPAWN, STEPS)
    pids = job.journal.wait_for_workers(1)
    job.wait_for_steps(*pids.values())
    assert "no answer from process" in groups_of(job)[0,]
    job.wait_for_steps(*pids.values())
    job.finish()
    assert agent.wait() == 0
