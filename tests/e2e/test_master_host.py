"""The node that has the master: it may be told to go for good, die, and come back."""

from __future__ import annotations

import signal
from pathlib import Path

from e2e.jobs import SPAWN, STEPS, AgentProcess, Place, free_port, kill9, wait_for
from holdfast.core.records import NodeLeft, ViewFormed


class StaticJob(Place):
    """As with torchrun's old flags: nodes have numbers, and number 0 has the master."""

    def __init__(self, directory: Path, nnodes: str) -> None:
        super().__init__(directory)
        self._flags = ("--nnodes", nnodes, "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
        self._flags += ("--rdzv-id", "static")

    def join(self, rank: int) -> AgentProcess:
        return self.start("--node-rank", str(rank), *self._flags, *SPAWN, STEPS)

    def members(self) -> set[str]:
        formed = self.journal.of(ViewFormed)
        return {member.node_id for member in formed[-1].view.members} if formed else set()


def test_a_second_signal_ends_a_node_that_stays_for_its_master(tmp_path: Path) -> None:
    job = StaticJob(tmp_path, "1:2")
    host, other = job.join(0), job.join(1)
    wait_for(lambda: job.members() == {"node-0", "node-1"}, what="both nodes in the view")
    job.journal.wait_for_workers(2)
    host.send(signal.SIGTERM)
    job.journal.wait_for(NodeLeft, lambda left: left.node_id == "node-0")
    wait_for(lambda: "staying for it" in host.stderr, what="the host to say that it stays")
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
