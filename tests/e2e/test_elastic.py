"""Several agents, each its own node, meeting on loopback: joining, leaving, dying, and being turned away."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.core.records import GatheringBegan, NodeJoined, NodeLeftRecord, NodeLost, Outcome, ViewFormed
from support.jobs import (
    DEADLINE_S,
    SCRIPTS,
    SPAWN,
    STEPS,
    AgentProcess,
    Place,
    agent_environment,
    free_port,
    is_alive,
    kill9,
    wait_for,
    wait_until_gone,
    wait_until_nothing_left,
)

LONG = "10000"


class Fleet(Place):
    """A job with a port of its own to meet at."""

    def __init__(self, directory: Path, nnodes: str, *flags: str) -> None:
        super().__init__(directory)
        self.port = free_port()
        self._flags: tuple[str, ...] = (
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"127.0.0.1:{self.port}",
            "--rdzv-id",
            "fleet",
        )
        self._flags += ("--nnodes", nnodes, *flags)

    def join(self, name: str, *flags: str, env: dict[str, str] | None = None) -> AgentProcess:
        """One more node. Later flags win."""
        return self.start("--node-id", name, *self._flags, *flags, *SPAWN, STEPS, env=env or {})

    def wait_for_members(self, *names: str) -> dict[str, int]:
        """Group ranks by node, once the newest view has these nodes and all of their workers run and make steps."""
        seen: dict[int, int] = {}

        def current() -> dict[str, int]:
            started = self.journal.started()
            members = {m.node_id: m.group_rank for m in started.view.members} if started else {}
            pids = started.pids if started else {}
            if started is None or members.keys() != set(names) or len(pids) < started.view.world_size:
                return {}
            for pid in pids.values():
                seen.setdefault(pid, self.steps_of(pid))
            return members if all(self.steps_of(pid) > seen[pid] for pid in pids.values()) else {}

        return wait_for(current, what=f"a view of {names}")

    def wait_for_node(self, name: str) -> None:
        self.journal.wait_for(NodeJoined, lambda joined: joined.node_id == name)

    def pids_of(self, name: str) -> list[int]:
        """Wait until the workers of a node in the newest view are reported; return their process ids."""

        def found() -> list[int]:
            started = self.journal.started()
            member = next((m for m in started.view.members if m.node_id == name), None) if started else None
            ranks = range(member.first_rank, member.first_rank + member.workers) if member else range(0)
            return [started.pids[rank] for rank in ranks] if started and set(ranks) <= started.pids.keys() else []

        return wait_for(found, what=f"the workers of {name}")


def ends(*agents: AgentProcess) -> list[int]:
    return [agent.wait() for agent in agents]


# --- joining


def test_a_job_starts_with_its_minimum_and_takes_in_who_comes_later(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "1:3", "--settle", "0.1", "--nproc-per-node", "2")
    first = fleet.join("first")
    assert fleet.wait_for_members("first") == {"first": 0}
    second = fleet.join("second")
    assert fleet.wait_for_members("first", "second") == {"first": 0, "second": 1}
    third = fleet.join("third")
    assert fleet.wait_for_members("first", "second", "third") == {"first": 0, "second": 1, "third": 2}
    fleet.finish()
    assert ends(first, second, third) == [0, 0, 0]
    assert sorted(line.rank for line in fleet.ledger("end")) == [0, 1, 2, 3, 4, 5]
    assert fleet.journal.job().incidents.restarts_used == 0


def test_a_job_that_has_all_its_nodes_does_not_wait_for_more(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "1:2", "--settle", LONG)
    agents = [fleet.join("first"), fleet.join("second")]
    fleet.wait_for_members("first", "second")
    assert fleet.journal.view() == 1
    fleet.finish()
    assert ends(*agents) == [0, 0]


def test_a_job_does_not_start_below_its_minimum(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "2:3", "--settle", "0")
    first = fleet.join("first")
    fleet.wait_for_node("first")
    assert fleet.journal.view() == 0
    second = fleet.join("second")
    fleet.wait_for_members("first", "second")
    assert fleet.journal.view() == 1
    fleet.finish()
    assert ends(first, second) == [0, 0]


def test_a_wait_for_nodes_that_runs_out_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    times = ("--rdzv-conf", "join_timeout=2", "--silence-timeout", "2", "--heartbeat-interval", "0.5")
    fleet = Fleet(tmp_path, "3", *times)
    agents = [fleet.join("first"), fleet.join("second")]
    assert ends(*agents) == [3, 3]
    end = fleet.journal.finished()
    assert (end.outcome, end.exit_code) == (Outcome.FAILED, 3)
    assert "2 joined" in end.why
    assert not fleet.ledger()


def test_a_node_too_many_stands_by_and_replaces_one_that_is_lost(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "2")
    first = fleet.join("first")
    fleet.wait_for_node("first")
    second = fleet.join("second")
    fleet.wait_for_members("first", "second")
    spare = fleet.join("spare")
    fleet.wait_for_node("spare")
    pids = fleet.journal.pids()
    fleet.wait_for_steps(*pids.values())
    assert fleet.journal.pids() == pids  # nobody was disturbed by it
    ranks = {m.node_id: m.group_rank for m in fleet.journal.of(ViewFormed)[-1].view.members}
    second.kill()
    assert fleet.wait_for_members("first", "spare") == {"first": ranks["first"], "spare": ranks["second"]}
    fleet.finish()
    assert ends(first, spare) == [0, 0]


# --- leaving and dying


def test_a_node_that_leaves_or_dies_is_missed_for_a_moment_only(tmp_path: Path) -> None:
    """Down to one by a signal, up to two, down by a kill, up again: those who stay keep their rank."""
    fleet = Fleet(tmp_path, "1:2", "--settle", "0.1")
    stays = fleet.join("stays")
    fleet.wait_for_members("stays")
    leaves = fleet.join("leaves")
    fleet.wait_for_members("stays", "leaves")
    leaves.send(signal.SIGTERM)
    assert leaves.wait() == 143
    assert fleet.wait_for_members("stays") == {"stays": 0}
    dies = fleet.join("dies")
    fleet.wait_for_members("stays", "dies")
    victims = fleet.pids_of("dies")
    dies.kill()
    wait_until_gone(*victims)
    assert fleet.wait_for_members("stays") == {"stays": 0}
    comes_back = fleet.join("dies")
    assert fleet.wait_for_members("stays", "dies") == {"stays": 0, "dies": 1}
    fleet.finish()
    assert ends(stays, comes_back) == [0, 0]
    assert [left.node_id for left in fleet.journal.of(NodeLeftRecord)] == ["leaves"]
    assert [(lost.node_id, lost.certain) for lost in fleet.journal.of(NodeLost)] == [("dies", True)]
    assert fleet.journal.job().incidents.restarts_used == 0


def test_a_node_that_stood_still_is_given_up_and_comes_back_at_once_when_it_runs_again(tmp_path: Path) -> None:
    """It may have been alive behind a cut, so its id is guarded; but it knows itself that its old life is over."""
    times = ("--heartbeat-interval", "0.2", "--silence-timeout", "1", "--guard-window", LONG)
    fleet = Fleet(tmp_path, "1:2", "--settle", "0.1", *times)
    host = fleet.join("host")
    fleet.wait_for_members("host")
    sleeper = fleet.join("sleeper")
    fleet.wait_for_members("host", "sleeper")
    ghosts = fleet.pids_of("sleeper")
    sleeper.send(signal.SIGSTOP)
    assert fleet.wait_for_members("host") == {"host": 0}
    sleeper.send(signal.SIGCONT)
    fleet.wait_for_members("host", "sleeper")
    wait_until_gone(*ghosts)
    fleet.finish()
    assert ends(host, sleeper) == [0, 0]
    assert [(lost.node_id, lost.certain) for lost in fleet.journal.of(NodeLost)] == [("sleeper", False)]


def test_a_node_in_the_middle_can_leave_and_the_others_keep_their_ranks_if_they_can(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "2:3", "--settle", "0.1")
    first = fleet.join("first")  # who comes first has the master, and would stay for it
    fleet.wait_for_node("first")
    second = fleet.join("second")
    before = fleet.wait_for_members("first", "second")
    third = fleet.join("third")
    fleet.wait_for_members("first", "second", "third")
    second.send(signal.SIGTERM)
    assert second.wait() == 143
    after = fleet.wait_for_members("first", "third")
    assert after["first"] == before["first"]
    fleet.finish()
    assert ends(first, third) == [0, 0]


def test_a_job_below_its_minimum_stops_its_workers_and_waits(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "2", "--rdzv-conf", f"join_timeout={LONG}")
    first = fleet.join("first")
    fleet.wait_for_node("first")
    second = fleet.join("second")
    fleet.wait_for_members("first", "second")
    survivors = fleet.pids_of("first")
    second.kill()
    fleet.journal.wait_for(GatheringBegan, lambda began: "1 of at least 2" in began.why)
    wait_until_gone(*survivors)
    again = fleet.join("second")
    fleet.wait_for_members("first", "second")
    fleet.finish()
    assert ends(first, again) == [0, 0]


@pytest.mark.parametrize("restarts", ["1", "0"])
def test_a_worker_and_another_nodes_agent_killed_at_once_are_both_dealt_with(tmp_path: Path, restarts: str) -> None:
    """The worker's death is its own, so it needs a restart; the node's is not."""
    fleet = Fleet(tmp_path, "1:2", "--settle", "0.1", "--max-restarts", restarts, "--nproc-per-node", "2")
    first = fleet.join("first")
    fleet.wait_for_members("first")
    second = fleet.join("second")
    fleet.wait_for_members("first", "second")
    kill9(fleet.pids_of("first")[1], second.pid)
    second.wait()
    if restarts == "1":
        assert fleet.wait_for_members("first") == {"first": 0}
        fleet.finish()
    assert first.wait() == (0 if restarts == "1" else 1)
    assert fleet.journal.job().incidents.restarts_used == int(restarts)


def test_all_nodes_dying_one_after_another_leave_one_that_goes_on(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "1:4", "--settle", "1")
    names = ["a", "b", "c", "d"]
    agents = {"a": fleet.join("a")}
    fleet.wait_for_node("a")
    agents |= {name: fleet.join(name) for name in names[1:]}
    fleet.wait_for_members(*names)
    kill9(*(agents[name].pid for name in names[1:]))
    for name in names[1:]:
        agents[name].wait()
    fleet.wait_for_members("a")
    fleet.finish()
    assert agents["a"].wait() == 0


# --- the master's home


def test_another_agent_of_the_machine_keeps_the_master_when_its_agent_is_killed(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "1:2", "--settle", "0.1")
    owner = fleet.join("owner")
    fleet.wait_for_members("owner")
    heir = fleet.join("heir")
    fleet.wait_for_members("owner", "heir")
    old_master = owner.master_pid()
    owner.kill()
    fleet.wait_for_members("heir")
    assert is_alive(old_master)  # somebody needs it
    pids = fleet.journal.pids()
    kill9(old_master)
    new_master = wait_for(heir.master_pid, what="a master of the heir's")
    wait_for(lambda: fleet.journal.term() == 2, what="the second term")
    kill9(new_master)
    wait_for(lambda: fleet.journal.term() == 3, what="the third term")
    fleet.wait_for_steps(*pids.values())
    fleet.finish()
    assert heir.wait() == 0
    assert fleet.journal.pids() == pids


def test_an_agent_that_leaves_stays_for_its_master_while_others_go_on(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "1:2", "--settle", "0.1")
    owner = fleet.join("owner")
    fleet.wait_for_members("owner")
    other = fleet.join("other")
    fleet.wait_for_members("owner", "other")
    gone = fleet.pids_of("owner")
    owner.send(signal.SIGTERM)
    wait_until_gone(*gone)
    fleet.wait_for_members("other")
    kill9(owner.master_pid())
    wait_for(lambda: fleet.journal.term() == 2, what="the second term")
    assert owner.is_running
    fleet.finish()
    assert ends(owner, other) == [143, 0]


# --- being turned away


def test_an_id_belongs_to_one_life_and_to_the_next_one_when_it_is_dead(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "1:2", "--settle", "0.1", "--guard-window", LONG)
    host = fleet.join("host")
    fleet.wait_for_members("host")
    first = fleet.join("twin")
    fleet.wait_for_members("host", "twin")
    pids = fleet.journal.pids()
    refused = fleet.join("twin")
    assert refused.wait() == 4
    assert "alive and connected" in refused.stderr
    assert fleet.journal.pids() == pids
    fleet.wait_for_steps(*pids.values())
    victims = fleet.pids_of("twin")
    first.kill()
    wait_until_gone(*victims)
    second = fleet.join("twin")
    fleet.wait_for_members("host", "twin")
    fleet.finish()
    assert ends(host, second) == [0, 0]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--nnodes", "1:3"), "give the same --nnodes"),
        (("--max-restarts", "7"), "give the same --max-restarts"),
        (("--rdzv-id", "another"), "give the same --rdzv-id"),
    ],
)
def test_an_agent_of_another_job_is_refused(tmp_path: Path, flags: tuple[str, ...], sentence: str) -> None:
    fleet = Fleet(tmp_path, "1:2", "--settle", "0.1")
    host = fleet.join("host")
    fleet.wait_for_members("host")
    pids = fleet.journal.pids()
    stranger = fleet.join("stranger", *flags)
    assert stranger.wait() == 4
    assert sentence in stranger.stderr
    fleet.finish()
    assert host.wait() == 0
    assert fleet.journal.pids() == pids
    assert [joined.node_id for joined in fleet.journal.of(NodeJoined)] == ["host"]


def test_an_agent_without_the_token_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "1:2", "--settle", "0.1")
    host = fleet.join("host")
    fleet.wait_for_members("host")
    before = fleet.journal.records()
    stranger = fleet.join("stranger", env={"HOLDFAST_TOKEN": "not the token of this job"})
    assert stranger.wait() == 4
    assert "does not know the job's token" in stranger.stderr
    assert fleet.journal.records() == before
    fleet.finish()
    assert host.wait() == 0


def test_strangers_on_the_masters_port_change_nothing(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "1:2", "--settle", "0.1")
    host = fleet.join("host")
    fleet.wait_for_members("host")
    before, master = fleet.journal.records(), host.master_pid()
    stranger = [sys.executable, str(SCRIPTS / "stranger.py"), str(fleet.port)]
    subprocess.run(stranger, check=True, timeout=DEADLINE_S, env=agent_environment(fleet.state_dir))
    assert fleet.journal.records() == before
    other = fleet.join("other")  # nor is the door blocked for others
    fleet.wait_for_members("host", "other")
    assert host.master_pid() == master
    fleet.finish()
    assert ends(host, other) == [0, 0]


def test_agents_that_start_together_agree_on_one_master(tmp_path: Path) -> None:
    """All of them try to start it; the port decides."""
    fleet = Fleet(tmp_path, "4")
    agents = [fleet.join(f"node-{i}") for i in range(4)]
    fleet.wait_for_members(*(f"node-{i}" for i in range(4)))
    assert len([agent for agent in agents if agent.master_pid()]) == 1
    fleet.finish()
    assert ends(*agents) == [0, 0, 0, 0]
    wait_until_nothing_left()
