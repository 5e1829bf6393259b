"""A node that was cut off and comes back after the end of its job hears of the end, and how it was."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from holdfast.core.records import JobFinished, NodeLost
from support.jobs import wait_for
from support.sessions import Run

FLAGS = ["--silence-timeout", "2", "--heartbeat-interval", "0.5"]


def cut_off_one(directory: Path, *flags: str) -> tuple[Run, str]:
    """A job of two nodes, one of which stands still until the other has finished."""
    run = Run(directory)
    for name in ("a", "b"):
        run.join(
            name, "ddp", nnodes="1:2", flags=[*FLAGS, *flags], steps=200, options=["--pause", "0.03", "--until-hurry"]
        )
    run.wait_until_calm(2)
    name = run.other_than_the_masters()
    os.kill(run.nodes[name].pid, signal.SIGSTOP)
    run.place.journal.wait_for(NodeLost)
    run.wait_until_calm(1, closed=1)
    run.hurry()
    run.place.journal.wait_for(JobFinished)
    return run, name


def test_an_agent_that_comes_back_after_the_end_exits_with_the_jobs_code(tmp_path: Path) -> None:
    run, name = cut_off_one(tmp_path, "--farewell-timeout", "60")
    other = next(agent for agent in run.agents if agent is not run.nodes[name])
    wait_for(lambda: f"to tell {name} (lost) how" in other.stderr, what="the master stays")
    os.kill(run.nodes[name].pid, signal.SIGCONT)
    back_at = time.monotonic()
    assert run.nodes[name].wait() == 0, run.nodes[name].stderr[-4000:]
    assert " succeeded: " in run.nodes[name].logged("job-ended")[0]
    assert other.wait() == 0
    assert time.monotonic() - back_at < 50, "nobody waited for the time to run out"


def test_a_signal_ends_the_wait_for_a_node_that_does_not_come_back(tmp_path: Path) -> None:
    run, name = cut_off_one(tmp_path, "--farewell-timeout", "600")
    other = next(agent for agent in run.agents if agent is not run.nodes[name])
    wait_for(lambda: f"to tell {name} (lost) how" in other.stderr, what="the master stays")
    said = next(json.loads(line) for line in other.stderr.splitlines() if "waiting-for-lost-nodes" in line)
    assert said["level"] == "notice", "people see without -v what the console waits for"
    run.kill_node(name)
    other.send(signal.SIGTERM)
    assert other.wait() == 0, other.stderr[-4000:]
