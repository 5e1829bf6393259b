"""A process of Holdfast that a signal has stopped neither answers nor dies: it is replaced like a dead one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from holdfast.core.records import NodeLost, ViewFormed
from support.jobs import SCRIPTS, SPAWN, STEPS, AgentProcess, Place, kill9, marked_processes, wait_for, wait_until_gone

TRAINS = str(SCRIPTS / "trains.py")


def stop(agent: AgentProcess, helper: str) -> int:
    """Stop a helper of the agent; return its process id."""
    if helper == "master":
        pid = wait_for(agent.master_pid, what="the master")
    else:
        (pid,) = [process.pid for process in marked_processes() if process.arguments == [f"holdfast: {helper}"]]
    os.kill(pid, signal.SIGSTOP)
    return pid


def test_a_stopped_master_is_replaced_and_no_worker_notices(tmp_path: Path) -> None:
    job = Place(tmp_path)
    agent = job.start("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", *SPAWN, STEPS)
    pids = job.journal.wait_for_workers(2)
    wait_until_gone(stop(agent, "master"))
    wait_for(lambda: job.journal.term() == 2, what="the next master")
    job.wait_for_steps(*pids.values())
    assert job.journal.pids() == pids
    assert len(job.journal.of(ViewFormed)) == 1
    kill9(pids[1])  # the next master decides
    job.journal.wait_for_workers(2, view=2)
    job.finish()
    assert agent.wait() == 0


def test_a_master_that_is_stopped_before_it_listens_is_started_again(tmp_path: Path) -> None:
    job = Place(tmp_path)
    agent = job.start("--standalone", *SPAWN, STEPS)
    pid = wait_for(agent.master_pid)
    os.kill(pid, signal.SIGSTOP)
    wait_until_gone(pid)
    job.wait_for_steps(*job.journal.wait_for_workers(1).values())
    job.finish()
    assert agent.wait() == 0


def test_a_stopped_fork_server_is_replaced_when_it_is_needed(tmp_path: Path) -> None:
    fails_while_stopped(Place(tmp_path), "fork server", *SPAWN, STEPS)


def test_a_stopped_store_host_is_replaced_when_it_is_needed(tmp_path: Path) -> None:
    fails_while_stopped(Place(tmp_path), "store host", TRAINS)


def fails_while_stopped(job: Place, helper: str, *script: str) -> None:
    """Kill a worker while a helper is stopped: the launch, or the store, of the next view waits for the helper."""
    agent = job.start("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", *script)
    first = job.journal.wait_for_workers(2, view=1)
    job.wait_for_steps(*first.values())
    stopped = stop(agent, helper)
    kill9(first[1])
    second = job.journal.wait_for_workers(2, view=2)
    job.wait_for_steps(*second.values())
    wait_until_gone(stopped)
    job.finish()
    assert agent.wait() == 0


def test_a_stopped_helper_costs_running_workers_nothing(tmp_path: Path) -> None:
    job = Place(tmp_path)
    agent = job.start("--standalone", "--nproc-per-node", "2", TRAINS)
    pids = job.journal.wait_for_workers(2)
    job.wait_for_steps(*pids.values())
    wait_until_gone(stop(agent, "fork server"), stop(agent, "store host"))
    job.wait_for_steps(*pids.values())
    job.finish()
    assert agent.wait() == 0
    assert job.journal.pids() == pids


def test_an_agent_that_is_stopped_and_goes_on_restarts_no_worker(tmp_path: Path) -> None:
    """A job of one node has nowhere else to go: its master waits, and the workers train on."""
    job = Place(tmp_path)
    times = ("--heartbeat-interval", "0.2", "--silence-timeout", "1")
    agent = job.start("--standalone", "--nproc-per-node", "2", *times, *SPAWN, STEPS)
    pids = job.journal.wait_for_workers(2)
    for _ in range(2):
        agent.send(signal.SIGSTOP)
        time.sleep(3.0)  # three times the silence after which a node is lost
        job.wait_for_steps(*pids.values())
        agent.send(signal.SIGCONT)
        job.wait_for_steps(*pids.values())
    job.finish()
    assert agent.wait() == 0
    assert job.journal.pids() == pids
    assert not job.journal.of(NodeLost) and len(job.journal.of(ViewFormed)) == 1


def test_a_stopped_master_does_not_keep_an_agent_that_got_a_signal(tmp_path: Path) -> None:
    job = Place(tmp_path)
    agent = job.start("--standalone", *SPAWN, STEPS)
    job.journal.wait_for_workers(1)
    stop(agent, "master")
    agent.send(signal.SIGTERM)
    assert agent.wait() == 128 + signal.SIGTERM
