"""`holdfast drain` and `holdfast resize` on real jobs of two nodes, with a script that does not speak to Holdfast: its
workers are started anew for each change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.core.records import IncidentDecided, NodeDraining, NodeLost, ViewFormed
from support.jobs import SPAWN, STEPS, AgentProcess, Place, agent_environment, free_port, wait_for

pytestmark = pytest.mark.usefixtures("leak_guard")


def operate(job: Place, *arguments: str) -> str:
    """What the command printed; it must succeed."""
    command = [sys.executable, "-m", "holdfast", *arguments]
    environment = agent_environment(job.state_dir)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def start_two(job: Place) -> tuple[AgentProcess, AgentProcess]:
    flags: tuple[str, ...] = (
        "--nnodes",
        "1:2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{free_port()}",
    )
    flags += ("--rdzv-id", "planned", "--settle", "30")
    first = job.start("--node-id", "first", *flags, *SPAWN, STEPS)
    second = job.start("--node-id", "second", *flags, *SPAWN, STEPS)
    job.journal.wait_for_workers(2, view=1)
    return first, second


def members(job: Place) -> list[set[str]]:
    """Of each view so far."""
    return [{member.node_id for member in formed.view.members} for formed in job.journal.of(ViewFormed)]


def test_a_drained_node_leaves_and_the_others_go_on(tmp_path: Path) -> None:
    job = Place(tmp_path)
    first, second = start_two(job)
    assert operate(job, "drain", "second") == "node second leaves the job\n"
    pids = job.journal.wait_for_workers(1, view=2)
    assert members(job)[-1] == {"first"}
    job.wait_for_steps(*pids.values())
    job.finish()
    assert (first.wait(), second.wait()) == (0, 0)
    assert [draining.signal for draining in job.journal.of(NodeDraining)] == [0]
    assert not any(decided.counted for decided in job.journal.of(IncidentDecided)), "a wish costs no restart"


def test_a_job_shrinks_and_grows_as_it_is_told(tmp_path: Path) -> None:
    job = Place(tmp_path)
    first, second = start_two(job)
    operate(job, "resize", "1", "--job", "planned")
    job.journal.wait_for_workers(1, view=2)
    operate(job, "resize", "2", "--job", "planned")
    wait_for(lambda: members(job)[-1] == {"first", "second"}, what="both nodes")
    job.journal.wait_for_workers(2, view=3)
    job.finish()
    assert (first.wait(), second.wait()) == (0, 0)
    assert [len(nodes) for nodes in members(job)] == [2, 1, 2]
    assert not job.journal.of(NodeLost)
