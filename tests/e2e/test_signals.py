"""An agent that is told to go passes the signal on, gives its workers their grace, and leaves nothing behind."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from holdfast.core.records import NodeJoined, Outcome
from support.jobs import (
    SPAWN,
    STEPS,
    Place,
    free_port,
    marked_processes,
    wait_for,
    wait_until_gone,
    wait_until_nothing_left,
)


@pytest.mark.parametrize(
    ("number", "method"),
    [
        (signal.SIGTERM, "spawn"),
        (signal.SIGINT, "spawn"),
        (signal.SIGUSR1, "spawn"),
        (signal.SIGTERM, "forkserver"),
        (signal.SIGINT, "forkserver"),
    ],
)
def test_a_signal_to_the_agent_reaches_the_workers_and_becomes_the_exit_code(
    tmp_path: Path, number: signal.Signals, method: str
) -> None:
    job = Place(tmp_path)
    handled = ("--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1")
    agent = job.start("--standalone", "--nproc-per-node", "2", *handled, "--start-method", method, STEPS, "--trap")
    pids = job.journal.wait_for_workers(2)
    job.wait_for_steps(*pids.values())
    agent.send(number)
    assert agent.wait() == 128 + number
    assert [(job.work / f"trapped-{rank}").read_text() for rank in (0, 1)] == [str(int(number))] * 2
    end = job.journal.finished()
    assert (end.outcome, end.exit_code) == (Outcome.STOPPED, 128 + number)


def test_a_worker_that_ignores_the_signal_is_killed_when_its_grace_is_over(tmp_path: Path) -> None:
    job = Place(tmp_path)
    agent = job.start("--standalone", "--nproc-per-node", "2", "--shutdown-timeout", "1", *SPAWN, STEPS, "--ignore")
    pids = job.journal.wait_for_workers(2)
    job.wait_for_steps(*pids.values())
    agent.send(signal.SIGTERM)
    assert agent.wait() == 143
    assert (job.work / "ignored-0").exists() and (job.work / "ignored-1").exists()
    wait_until_gone(*pids.values())
    assert not job.ledger("end")


def test_a_second_signal_ends_the_workers_at_once(tmp_path: Path) -> None:
    job = Place(tmp_path)
    agent = job.start("--standalone", "--shutdown-timeout", "10000", *SPAWN, STEPS, "--ignore")
    pids = job.journal.wait_for_workers(1)
    job.wait_for_steps(*pids.values())
    agent.send(signal.SIGINT)
    wait_for((job.work / "ignored-0").exists)
    assert agent.is_running
    agent.send(signal.SIGINT)
    assert agent.wait() == 130


def test_an_agent_that_waits_for_other_nodes_can_be_told_to_go(tmp_path: Path) -> None:
    job = Place(tmp_path)
    endpoint = f"127.0.0.1:{free_port()}"
    agent = job.start("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, *SPAWN, STEPS)
    job.journal.wait_for(NodeJoined)
    agent.send(signal.SIGTERM)
    assert agent.wait() == 143
    assert job.journal.finished().outcome is Outcome.STOPPED
    assert not job.ledger()


def test_an_agent_can_be_told_to_go_while_its_fork_server_warms_up(tmp_path: Path) -> None:
    job = Place(tmp_path)
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(10_000)\n")
    agent = job.start("--standalone", "--preload", "endless", STEPS, env={"PYTHONPATH": str(tmp_path)})
    wait_for(agent.master_pid, what="the master, which is started after the signals' handlers are set")
    agent.send(signal.SIGTERM)
    assert agent.wait() == 143
    assert not job.ledger()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_nothing_outlives_an_agent_that_was_killed(tmp_path: Path, method: str) -> None:
    job = Place(tmp_path)
    agent = job.start("--standalone", "--nproc-per-node", "2", "--start-method", method, STEPS, "--ignore")
    pids = job.journal.wait_for_workers(2)
    job.wait_for_steps(*pids.values())
    wait_for(lambda: any(process.is_store_host for process in marked_processes()), what="the store host")
    seen = marked_processes()
    assert any(process.is_fork_server for process in seen)
    assert any(process.is_master for process in seen)
    assert set(pids.values()) <= {process.pid for process in seen}
    agent.kill()
    wait_until_nothing_left()
