"""Node checks of real processes: the right node or link is named, no good one is, and the job runs without the bad.

These nodes share one machine, with each other and with other tests.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from holdfast.core.health.findings import NodeVerdict
from holdfast.core.records import CheckConcluded, NodeJoined, NodeSuspected, ViewFormed
from holdfast.exit_codes import UNFIT as EXIT_UNFIT
from support.hosts import LINK, Host, Network, delay_between, hosts, lose_between, why_no_delays
from support.jobs import SCRIPTS, AgentProcess, Journal, Place, free_port, marker, wait_for
from support.plug_ins import install_lab, install_project

DOCUMENT = Path(__file__).parents[2] / "docs" / "processors.md"
CHECK = (sys.executable, "-m", "holdfast", "check", "--log-format", "json")
CGROUP = Path("/sys/fs/cgroup/cpu")
NO_HOSTS = why_no_delays()
TOKEN = "the token of a check across several hosts"
LONG_S = 100.0
"""Several processes import torch at the same time, and what is slowed down takes its time."""
GATHER = ("--settle", "60")
"""A check begins when all nodes are there, not before."""
DONE = str(SCRIPTS / "nothing.py")
"""A program that ends well at once: these tests are about what comes before it."""
SICK = "0, 7, No, No, No, 16, 16\n"
"""As nvidia-smi counts: seven uncorrectable errors."""


def verdicts(journal: Journal) -> dict[str, NodeVerdict]:
    """Of the first check. No link was bad."""
    checked = wait_for(lambda: journal.of(CheckConcluded), LONG_S, what="the verdicts")[0]
    assert not checked.links, checked.links
    return {verdict.node_id: verdict for verdict in checked.nodes}


def bad(found: Iterable[NodeVerdict]) -> dict[str, str]:
    """Everybody who is named, and as what."""
    return {verdict.node_id: verdict.fitness for verdict in found if verdict.fitness != "fit"}


def members(journal: Journal) -> set[str]:
    return {member.node_id for member in journal.wait_for(ViewFormed).view.members}


class Nodes(Place):
    """Agents on loopback, with the lab's processor."""

    def __init__(self, directory: Path, *flags: str) -> None:
        super().__init__(directory)
        self.lab, self.port, self.flags = install_lab(directory), free_port(), flags

    def node(self, name: str, *program: str, **faults: str) -> AgentProcess:
        return self.start("--node-check", *self._words(name), *(program or (DONE,)), env=self.lab | faults)

    def check(self, name: str, **faults: str) -> AgentProcess:
        return self.start(*self._words(name), env=self.lab | faults, command=CHECK)

    def _words(self, name: str) -> tuple[str, ...]:
        meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", "job")
        return (*meet, *GATHER, "--accelerator", "lab", *self.flags, "--node-id", name)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_the_example_of_the_documentation_is_installed_and_checks_this_machine(tmp_path: Path, place: Place) -> None:
    project = tmp_path / "project"
    project.mkdir()
    for name, text in re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)^```", DOCUMENT.read_text(), re.M | re.S):
        (project / name).write_text(text)
    found = install_project(project, tmp_path / "site")
    tool = f"{sys.executable} -c print('device_1:_0_uncorrectable'.replace('_',chr(32)))"
    env = found | {"XXXX_DEVICES": "2", "XXXX_TOOL": tool}
    agent = place.start(env=env, command=CHECK)  # it is found without being named
    assert agent.wait() == 0, agent.stderr
    (verdict,) = verdicts(place.journal).values()
    assert verdict.fitness == "fit" and {m.stage for m in verdict.measured} == {"matmul", "bandwidth", "disk"}
    assert place.journal.of(CheckConcluded)[0].accelerator == "xxxx"
    assert "matmul" in agent.stdout and "fit" in agent.stdout, "the table"

    sick = place.start(env=env | {"XXXX_TOOL": tool.replace("_0_", "_5_")}, command=(*CHECK, "--rdzv-id", "sick"))
    assert sick.wait() == EXIT_UNFIT
    assert "5 uncorrectable memory errors" in sick.stdout and "unfit" in sick.stdout


def test_of_five_nodes_two_are_broken_and_the_job_runs_on_the_others(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "--nnodes", "3:5")
    counters = tmp_path / "counters"
    counters.write_text(SICK)
    faults = {"b": {"LAB_WRONG": "1"}, "d": {"LAB_COUNTERS": str(counters)}}
    agents = [nodes.node(name, **faults.get(name, {})) for name in "abcde"]
    found = verdicts(nodes.journal)
    assert bad(found.values()) == {"b": "unfit", "d": "unfit"}, found
    assert "the product is wrong in 1 of 256 rows (3)" in found["b"].why
    assert "7 uncorrectable memory errors" in found["d"].why
    assert members(nodes.journal) == {"a", "c", "e"}
    assert [agent.wait() for agent in agents] == [0] * 5
    assert "b is unfit" in "".join(agent.stderr for agent in agents), "it is said, too"


def test_a_process_that_is_killed_once_in_a_check_costs_nobody_its_name(tmp_path: Path) -> None:
    nodes, died = Nodes(tmp_path, "--nnodes", "3"), tmp_path / "died"
    agents = [nodes.check("a", LAB_DIES_ONCE=str(died)), nodes.check("b"), nodes.check("c")]
    assert not bad(verdicts(nodes.journal).values()), "and no link"
    assert [agent.wait() for agent in agents] == [0] * 3 and died.exists()


@pytest.fixture
def quota() -> Iterator[Path]:
    """A control group that may have a quarter of a processor. On a busy machine nobody gets more than that; so the
    group goes before others, and what limits it is its quota."""
    if not os.access(CGROUP / "cgroup.procs", os.W_OK) or not (CGROUP / "cpu.cfs_quota_us").exists():
        pytest.skip("no control groups (v1) for the processor here")
    group = CGROUP / f"holdfast-{marker()}"
    group.mkdir()
    (group / "cpu.cfs_quota_us").write_text("25000")
    (group / "cpu.shares").write_text("262144")
    yield group
    for pid in (group / "cgroup.procs").read_text().split():
        (CGROUP / "cgroup.procs").write_text(pid)
    group.rmdir()


def test_a_node_with_a_share_of_a_processor_is_named_and_left_out(tmp_path: Path, quota: Path) -> None:
    nodes = Nodes(tmp_path, "--nnodes", "2:3", "--exclude-straggler")
    agents = [nodes.node(name) for name in "ab"]
    wait_for(lambda: len(nodes.journal.of(NodeJoined)) == 2, what="both nodes")
    slow = agents[1]
    for pid in _family(slow.pid):
        (quota / "cgroup.procs").write_text(str(pid))
    agents.append(nodes.node("c"))
    found = verdicts(nodes.journal)
    (quota / "cpu.cfs_quota_us").write_text("-1")  # what follows need not be slow
    assert bad(found.values()) == {"b": "slow"}, found
    assert "times the expected" in found["b"].why
    assert [node_id for node_id, verdict in found.items() if verdict.is_left_out] == ["b"]
    assert members(nodes.journal) == {"a", "c"}
    assert [agent.wait() for agent in agents] == [0, 0, 0]


def _family(pid: int) -> list[int]:
    """A process and its children, as deep as they go."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    children = [int(word) for word in path.read_text().split()] if path.exists() else []
    return [pid, *(member for child in children for member in _family(child))]


@contextlib.contextmanager
def losing(one: Host, other: Host) -> Iterator[None]:
    lose_between(one, other, 0.1)
    yield


@contextlib.contextmanager
def delaying(one: Host, other: Host) -> Iterator[None]:
    with delay_between(one, other, 0.005):
        yield


@pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS or "hosts can be made")
@pytest.mark.parametrize("fault", [losing, delaying])
def test_a_link_that_loses_packets_or_delays_them_is_named_and_none_of_its_ends(
    tmp_path: Path, fault: Callable[[Host, Host], AbstractContextManager[None]]
) -> None:
    with hosts(3) as net, fault(net[1], net[2]):
        agents = check_hosts(net, tmp_path)
        assert [agent.wait(LONG_S) for agent in agents] == [EXIT_UNFIT] * 3  # lost packets take their time
    (record,) = Journal(tmp_path / "a" / "state").of(CheckConcluded)
    assert not bad(record.nodes), record.nodes
    assert [(link.first, link.second) for link in record.links] == [("b", "c")], record.links
    assert "the link between b and c is" in agents[0].stdout


def check_hosts(net: Network, directory: Path) -> list[AgentProcess]:
    """One node on each, a, b and so on; the journal is with the first."""
    env = install_lab(directory) | {"GLOO_SOCKET_IFNAME": LINK, "HOLDFAST_TOKEN": TOKEN}
    meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{net[0].address}:29400", "--rdzv-id", "job")
    agents = []
    for host, name in zip(net, "abcdef", strict=False):
        words = (*meet, *GATHER, "--nnodes", str(len(net.hosts)), "--accelerator", "lab", "--node-id", name)
        agents.append(host.start_agent(words, state_dir=directory / name / "state", env=env, command=CHECK))
    return agents


def test_after_a_fault_the_suspect_is_checked_before_the_workers_start_again(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "--nnodes", "1", "--max-restarts", "1")
    agent = nodes.node("a", str(SCRIPTS / "crash_once.py"))
    assert agent.wait() == 0
    (suspected,) = nodes.journal.of(NodeSuspected)
    assert suspected.node_id == "a" and "SIGSEGV" in suspected.why
    checks = nodes.journal.of(CheckConcluded)
    assert [check.nodes[0].fitness for check in checks] == ["fit", "fit"]
    kinds = [type(record).__name__ for record in nodes.journal.records()]
    assert kinds.index("NodeSuspected") < kinds.index("CheckConcluded", kinds.index("CheckConcluded") + 1)
