"""A job across hosts: every host is a network namespace (hosts.py). The master is on the first one, where its journal
is; workers of all hosts write into one directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.core.records import NodeJoined, NodeLost, Outcome, ViewFormed, WorkersStartedRecord
from support.hosts import LINK, MASTER, Host, Network
from support.jobs import SPAWN, STEPS, AgentProcess, Journal, Place, wait_for

PORT = 29400
"""Each test has a network of its own: no port is ever taken."""
TOKEN = "the token of a job across several hosts"
LINE = ("--heartbeat-interval", "0.3", "--settle", "60", "--farewell-timeout", "0")
"""Heartbeats are frequent, so that a fault meets one at once. A view is formed when all nodes are there, not before."""
NOTICE_SILENCE = ("--silence-timeout", "2")
BEAR_SILENCE = ("--silence-timeout", "50")
GUARD_FOR_LONG = ("--guard-window", "600")
"""Longer than any test waits: whoever is taken in was not held up by it."""

Pids = dict[str, tuple[int, ...]]


class Cluster(Place):
    """A job on several hosts."""

    def __init__(self, directory: Path, net: Network, *flags: str) -> None:
        super().__init__(directory)
        self.net, self.flags = net, flags
        self.journal = Journal(self.state_of(net[0]), "job")

    def state_of(self, host: Host) -> Path:
        return self.directory / host.namespace / "state"

    def start_on(
        self, host: Host, node_id: str, *flags: str, program: tuple[str, ...] = (*SPAWN, STEPS), token: str = TOKEN
    ) -> AgentProcess:
        """The agent of a node; all nodes of a job have the job's flags."""
        meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.net[0].address}:{PORT}", "--rdzv-id", "job")
        words = (*meet, *LINE, *self.flags, "--node-id", node_id, *flags, *program)
        env = {"WORK": str(self.work), "GLOO_SOCKET_IFNAME": LINK}  # by itself gloo looks up the host's name
        env |= {"HOLDFAST_TOKEN": token} if token else {}
        return host.start_agent(words, state_dir=self.state_of(host), env=env)

    def start_master(self, *flags: str, token: str = TOKEN, job_id: str = "job") -> AgentProcess:
        """A master by itself, on the first host."""
        host = self.net[0]
        words = ("--host", host.address, "--port", str(PORT), "--job-id", job_id, *LINE, *self.flags, *flags)
        env = {"HOLDFAST_TOKEN": token}
        return host.start_agent(words, state_dir=self.state_of(host), env=env, command=MASTER)

    def start_all(self, names: str, **choices: Any) -> list[AgentProcess]:
        """A node a letter, on the hosts in their order."""
        return [self.start_on(host, name, **choices) for host, name in zip(self.net, names, strict=False)]

    def started(self, view: int) -> Pids:
        """The workers' processes by node."""
        return {record.node_id: record.pids for record in self.journal.of(WorkersStartedRecord) if record.view == view}

    def wait_for_view(self, number: int, names: str) -> Pids:
        """The processes of this view, once it is formed, of these nodes, and all of them run and work."""
        formed = self.journal.wait_for(ViewFormed, lambda record: record.view.number == number).view
        assert {member.node_id for member in formed.members} == set(names)
        wait_for(lambda: len(self.started(number)) == len(names), what=f"the workers of view {number}")
        pids = self.started(number)
        self.wait_for_steps(*flat(pids))
        return pids

    def lives(self, node_id: str) -> list[str]:
        """The incarnations that joined under this id."""
        return [record.incarnation for record in self.journal.of(NodeJoined) if record.node_id == node_id]

    def assert_finishes(self, *agents: AgentProcess) -> None:
        self.finish()
        assert [agent.wait() for agent in agents] == [0] * len(agents)
        assert self.journal.finished().outcome is Outcome.SUCCEEDED

    def assert_undisturbed(self, pids: Pids) -> None:
        """The first view is still in force, with the same workers, and nobody was ever lost."""
        assert self.journal.view() == 1
        assert self.started(1) == pids
        assert not self.journal.of(NodeLost)
        assert {line.pid for line in self.ledger("start")} == set(flat(pids))


def flat(pids: Pids) -> list[int]:
    return [pid for of_node in pids.values() for pid in of_node]
