"""The master may die at any moment: workers do not notice, and what happened meanwhile is dealt with afterwards."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from holdfast.core.records import (
    IncidentDecided,
    JobFinished,
    NodeJoined,
    NodeLost,
    Outcome,
    ViewFormed,
    WorkerFailedRecord,
    WorkerSucceededRecord,
)
from support.jobs import (
    SPAWN,
    STEPS,
    AgentProcess,
    Place,
    free_port,
    is_alive,
    kill9,
    wait_for,
    wait_until_gone,
)

MANY = 3


def kill_master(agent: AgentProcess) -> int:
    """The process id it had."""
    pid = wait_for(agent.master_pid, what="the master")
    kill9(pid)
    wait_until_gone(pid)
    return pid


def term_is(job: Place, term: int) -> bool:
    return job.journal.term() == term


class HiddenJournal:
    """While it is hidden, the job's master is dead and cannot come back."""

    def __init__(self, job: Place, agent: AgentProcess) -> None:
        assert job.journal.path is not None
        self._path, self._agent = job.journal.path, agent
        self._hidden = self._path.with_name("hidden")

    def __enter__(self) -> None:
        tries = self._tries_in_vain()
        self._path.rename(self._hidden)
        kill_master(self._agent)
        wait_for(lambda: self._tries_in_vain() > tries, what="a master that cannot start")

    def __exit__(self, *_: object) -> None:
        self._hidden.rename(self._path)

    def _tries_in_vain(self) -> int:
        return self._agent.stderr.count("is gone while its job runs")


def test_a_master_that_is_killed_comes_back_and_workers_do_not_notice(tmp_path: Path) -> None:
    job = Place(tmp_path)
    agent = job.start("--standalone", "--nproc-per-node", "2", *SPAWN, STEPS)
    pids = job.journal.wait_for_workers(2)
    for term in range(2, 2 + MANY):
        kill_master(agent)
        wait_for(partial(term_is, job, term), what=f"term {term}")
        job.wait_for_steps(*pids.values())
    job.finish()
    assert agent.wait() == 0
    assert job.journal.pids() == pids
    assert len(job.journal.of(ViewFormed)) == 1
    assert len(job.ledger("start")) == len(job.ledger("end")) == 2


def test_a_master_killed_again_and_again_before_it_can_do_anything_loses_nothing(tmp_path: Path) -> None:
    job = Place(tmp_path)
    agent = job.start("--standalone", *SPAWN, STEPS)
    pids = job.journal.wait_for_workers(1)
    for _ in range(MANY):
        kill_master(agent)
    job.finish()
    assert agent.wait() == 0
    assert job.journal.pids() == pids


def test_a_master_killed_while_nodes_are_awaited_goes_on_waiting(tmp_path: Path) -> None:
    job = Place(tmp_path)
    flags: tuple[str, ...] = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    flags += ("--rdzv-id", "awaited")
    first = job.start("--node-id", "first", *flags, *SPAWN, STEPS)
    job.journal.wait_for(NodeJoined)
    kill_master(first)
    second = job.start("--node-id", "second", *flags, *SPAWN, STEPS)
    job.journal.wait_for_workers(2, view=1)
    assert job.journal.term() == 2
    job.finish()
    assert (first.wait(), second.wait()) == (0, 0)
    assert not job.journal.of(NodeLost)


@pytest.mark.parametrize("order", ["master first", "worker first"])
def test_a_master_and_a_worker_killed_together_are_one_restart(tmp_path: Path, order: str) -> None:
    job = Place(tmp_path)
    agent = job.start("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", *SPAWN, STEPS)
    pids = job.journal.wait_for_workers(2, view=1)
    both = (agent.master_pid(), pids[1])
    kill9(*(both if order == "master first" else reversed(both)))
    job.journal.wait_for_workers(2, view=2)
    assert job.journal.term() == 2
    job.finish()
    assert agent.wait() == 0
    assert [decided.counted for decided in job.journal.of(IncidentDecided)] == [True]
    assert [lost.failure.rank for lost in job.journal.of(WorkerFailedRecord) if not lost.late] == [1]


@pytest.mark.parametrize("moment", ["worker-failed", "view-formed"])
def test_a_master_killed_in_the_middle_of_a_restart_finishes_it(tmp_path: Path, moment: str) -> None:
    """As soon as the record is in the journal: before its orders are out, or just after."""
    job = Place(tmp_path)
    agent = job.start("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", *SPAWN, STEPS)
    pids = job.journal.wait_for_workers(2, view=1)
    master = agent.master_pid()
    kill9(pids[0])
    reached = {
        "worker-failed": lambda: job.journal.of(WorkerFailedRecord),
        "view-formed": lambda: job.journal.view() == 2,
    }
    wait_for(reached[moment], what=moment)
    kill9(master)
    job.journal.wait_for_workers(2, view=2)
    job.finish()
    assert agent.wait() == 0
    assert job.journal.job().incidents.restarts_used == 1


@pytest.mark.parametrize("moment", [WorkerSucceededRecord, JobFinished])
def test_a_master_killed_at_the_very_end_does_not_keep_the_agent(tmp_path: Path, moment: type) -> None:
    job = Place(tmp_path)
    agent = job.start("--standalone", "--nproc-per-node", "2", *SPAWN, STEPS)
    job.journal.wait_for_workers(2)
    master = agent.master_pid()
    job.finish()
    job.journal.wait_for(moment)
    if is_alive(master):
        kill9(master)
    assert agent.wait() == 0
    assert job.journal.finished().outcome is Outcome.SUCCEEDED


def test_what_happens_to_workers_while_there_is_no_master_is_dealt_with_when_it_is_back(tmp_path: Path) -> None:
    job = Place(tmp_path)
    agent = job.start("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", *SPAWN, STEPS)
    pids = job.journal.wait_for_workers(2, view=1)
    with HiddenJournal(job, agent):
        kill9(pids[0])
        wait_until_gone(pids[0])
        job.wait_for_steps(pids[1])
    second = job.journal.wait_for_workers(2, view=2)
    with HiddenJournal(job, agent):
        job.finish()
        wait_until_gone(*second.values())
    assert agent.wait() == 0
    assert len(job.ledger("end")) == 2


def test_workers_that_finish_without_a_master_have_succeeded_even_if_it_never_comes_back(tmp_path: Path) -> None:
    job = Place(tmp_path)
    agent = job.start("--standalone", "--rdzv-conf", "join_timeout=1", *SPAWN, STEPS)
    pids = job.journal.wait_for_workers(1)
    with HiddenJournal(job, agent):
        job.wait_for_steps(*pids.values())
        job.finish()
        assert agent.wait() == 0


def test_a_master_that_stood_still_for_a_while_restarts_nobody(tmp_path: Path) -> None:
    """A paused machine: that it has not heard from anybody for long is its own fault."""
    job = Place(tmp_path)
    times = ("--heartbeat-interval", "0.2", "--silence-timeout", "1")
    agent = job.start("--standalone", *times, *SPAWN, STEPS)
    pids = job.journal.wait_for_workers(1)
    master = agent.master_pid()
    for pid in (agent.pid, master):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2.0)  # twice the silence after which a node is lost
    job.wait_for_steps(*pids.values())
    for pid in (master, agent.pid):
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: agent.logged("master-stood-still"), what="a master that notices its own absence")
    job.wait_for_steps(*pids.values())
    job.finish()
    assert agent.wait() == 0
    assert is_alive(master) is False
    assert job.journal.pids() == pids
    assert not job.journal.of(NodeLost)
