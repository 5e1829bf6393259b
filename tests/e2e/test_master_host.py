"""The node that has the master: it may be told to go for good, die, come back, or be lost for good."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from holdfast.core.records import NodeLeftRecord, ViewFormed
from holdfast.exit_codes import NO_MASTER
from support.jobs import (
    DEADLINE_S,
    SCRIPTS,
    SPAWN,
    STEPS,
    AgentProcess,
    Place,
    agent_environment,
    free_port,
    kill9,
    wait_for,
)


class StaticJob(Place):
    """As with torchrun's old flags: nodes have numbers, and number 0 has the master."""

    def __init__(self, directory: Path, nnodes: str) -> None:
        super().__init__(directory)
        self._flags: tuple[str, ...] = (
            "--nnodes",
            nnodes,
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            str(free_port()),
        )
        self._flags += ("--rdzv-id", "static")

    def join(self, rank: int, *further: str, **choices: Any) -> AgentProcess:
        return self.start("--node-rank", str(rank), *self._flags, *(further or (*SPAWN, STEPS)), **choices)

    def members(self) -> set[str]:
        formed = self.journal.of(ViewFormed)
        return {member.node_id for member in formed[-1].view.members} if formed else set()


def test_a_second_signal_ends_a_node_that_stays_for_its_master(tmp_path: Path) -> None:
    job = StaticJob(tmp_path, "1:2")
    host, other = job.join(0), job.join(1)
    wait_for(lambda: job.members() == {"node-0", "node-1"}, what="both nodes in the view")
    job.journal.wait_for_workers(2)
    host.send(signal.SIGTERM)
    job.journal.wait_for(NodeLeftRecord, lambda left: left.node_id == "node-0")
    wait_for(lambda: host.logged("waiting-for-master"), what="the host to say that it stays")
    assert host.is_running
    host.send(signal.SIGTERM)
    assert host.wait() == 143
    other.send(signal.SIGTERM)
    assert other.wait() == 143


def test_the_node_of_rank_0_comes_back_while_the_master_it_left_behind_lives(tmp_path: Path) -> None:
    job = StaticJob(tmp_path, "2")
    first, other = job.join(0), job.join(1)
    job.journal.wait_for_workers(2, view=1)
    master = first.master_pid()
    kill9(first.pid)
    second = job.join(0)
    job.journal.wait_for_workers(2, view=2)
    assert first.wait() == -signal.SIGKILL
    assert job.journal.term() == 1, f"the master {master} is the one that was there before"
    job.finish()
    assert second.wait() == 0 and other.wait() == 0


def test_a_port_that_something_else_used_for_a_moment_is_not_waited_for(tmp_path: Path) -> None:
    """As the master of a job that has just ended does. A job's own master starts there as soon as it can."""
    job = Place(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = "{}:{}".format(*other.getsockname())
        agent = job.start("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "new", *SPAWN, STEPS)
        wait_for(lambda: agent.logged("master-runs-elsewhere"), what="the agent to find its port in use")
    wait_for(lambda: agent.logged("master-taken-over"), what="the agent to start its job's master")
    job.finish()
    assert agent.wait() == 0


def test_a_port_that_another_program_has_is_named_with_that_program(tmp_path: Path) -> None:
    """Such as a launcher of another kind at the default port: it does not become the job's master by waiting."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        agent = Place(tmp_path).start("--nproc-per-node", "2", "--master-port", str(port), *SPAWN, STEPS)
        assert agent.wait() == 5
    assert f"port {port} is in use by process {os.getpid()} (" in agent.said
    assert "give this job another --master-port" in agent.said


def test_two_jobs_of_one_node_at_one_port_do_not_become_one(tmp_path: Path) -> None:
    """The second is refused, and does not end with the first one's success."""
    port, same_user = str(free_port()), {"HOLDFAST_TOKEN": "the token of this test, long enough"}
    first, second = Place(tmp_path / "first"), Place(tmp_path / "second")
    running = first.start("--master-port", port, *SPAWN, STEPS, env=same_user)
    first.journal.wait_for_workers(1)
    refused = second.start("--master-port", port, *SPAWN, STEPS, env=same_user)
    assert refused.wait() == 4
    assert "the port is in use by job " in refused.said and "which has its only node" in refused.said
    stranger = Place(tmp_path / "third").start("--master-port", port, *SPAWN, STEPS)
    assert stranger.wait() == 4
    assert f"port {port} is in use by a job with another token: give this job another --master-port" in stranger.said
    first.finish()
    assert running.wait() == 0


class NodesOfLostMaster(StaticJob):
    """Three nodes whose state directories are their own, as on three machines; the first has the master."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, "1:3")
        self._flags += ("--master-timeout", "2", "--silence-timeout", "2", "--settle", "20")

    def join_apart(self, rank: int, *further: str) -> AgentProcess:
        """Start a node with a state directory of its own, but for the first, whose journal is read here."""
        env = {} if rank == 0 else {"HOLDFAST_STATE_DIR": str(self.state_of(rank))}
        return self.join(rank, *further, env={"HOLDFAST_TOKEN": "the token of this test, long enough", **env})

    def state_of(self, rank: int) -> Path:
        return self.directory / f"state-{rank}"

    def status(self, rank: int) -> str:
        """Return what `holdfast status` says on that node."""
        found = subprocess.run(
            [sys.executable, "-m", "holdfast", "status"],
            env=agent_environment(self.state_of(rank)),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        return found.stdout + found.stderr

    def lose_machine(self, host: AgentProcess, *workers: int) -> None:
        """Kill the master's node at once: agent, master and workers."""
        kill9(host.pid, host.master_pid(), *workers)
        host.wait()


def test_nodes_train_on_without_their_master_and_end_when_a_decision_is_needed(tmp_path: Path) -> None:
    job = NodesOfLostMaster(tmp_path)
    host, *others = [job.join_apart(rank) for rank in range(3)]
    pids = job.journal.wait_for_workers(3)
    wait_for(lambda: "the master is connected" in job.status(1), what="a node that says it has its master")
    job.lose_machine(host, pids[0])
    wait_for(lambda: "the workers train on" in job.status(1), what="a node that says that its master is away")
    assert "is away for" in job.status(2)
    job.wait_for_steps(pids[1], pids[2])
    kill9(pids[1])
    assert others[0].wait() == NO_MASTER
    assert "a decision was needed: rank 1 on node-1 killed by SIGKILL" in others[0].stderr
    assert "ended: " in job.status(1) and "a decision was needed" in job.status(1)
    job.wait_for_steps(pids[2], more=20)
    assert others[1].is_running, "its workers train on"
    others[1].send(signal.SIGTERM)
    assert others[1].wait() == 128 + signal.SIGTERM


def test_a_job_that_ends_without_its_master_names_its_last_checkpoint(tmp_path: Path) -> None:
    job = NodesOfLostMaster(tmp_path)
    flags = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "5")
    script = (*flags, str(SCRIPTS / "session.py"), "ddp", "100000", "--pause", "0.03")
    host, *others = [job.join_apart(rank, *script) for rank in range(3)]
    pids = job.journal.wait_for_workers(3)
    wait_for(lambda: list((tmp_path / "checkpoints").glob("step-*")), what="a checkpoint")
    job.lose_machine(host, pids[0])
    assert [agent.wait() for agent in others] == [NO_MASTER, NO_MASTER]
    for rank, agent in enumerate(others, 1):
        assert f"the last checkpoint is {tmp_path / 'checkpoints'}" in agent.stderr
        assert "the last checkpoint is" in job.status(rank)
