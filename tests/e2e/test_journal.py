"""The journal on a disk that is full, after damage, and of a job that ran before."""

from __future__ import annotations

import secrets
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.core.records import NodeJoined, Outcome, TermBegan, ViewFormed, WorkerFailedRecord
from support.jobs import (
    SPAWN,
    STEPS,
    AgentProcess,
    Journal,
    Place,
    free_port,
    kill9,
    wait_for,
    wait_until_nothing_left,
)

NAMED = ("--rdzv-id", "again", "--node-id", "only", "--max-restarts", "3", *SPAWN)
"""The same job and the same node, whoever runs it."""


# --- a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Place]:
    """A place whose state is on a file system of 2 MiB."""
    job = Place(tmp_path)
    job.state_dir.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "holdfast-test", str(job.state_dir)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    yield job
    subprocess.run(["umount", "--lazy", str(job.state_dir)], check=True)


def fill(job: Place) -> Path:
    """Take all the space there is."""
    ballast = job.state_dir / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                pass
    return ballast


def wait_for_masters_without_space(agent: AgentProcess, count: int) -> None:
    wait_for(lambda: agent.stderr.count("no space is left for the journal") >= count, what="a master without space")


def test_training_goes_on_while_the_disk_is_full_and_the_master_comes_back_when_it_is_not(small_disk: Place) -> None:
    job = small_disk
    agent = job.start("--standalone", "--nproc-per-node", "2", *SPAWN, STEPS)
    pids = job.journal.wait_for_workers(2)
    ballast = fill(job)
    kill9(agent.master_pid())
    wait_for_masters_without_space(agent, 2)
    job.wait_for_steps(*pids.values())
    ballast.unlink()
    wait_for(lambda: job.journal.term() > 1, what="the next term")
    job.finish()
    assert agent.wait() == 0
    assert job.journal.pids() == pids
    assert len(job.journal.of(ViewFormed)) == 1


def test_a_failure_that_cannot_be_written_down_is_dealt_with_when_there_is_space_again(small_disk: Place) -> None:
    job = small_disk
    agent = job.start("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", *SPAWN, STEPS)
    pids = job.journal.wait_for_workers(2)
    ballast = fill(job)
    kill9(pids[1])
    wait_for_masters_without_space(agent, 1)
    job.wait_for_steps(pids[0])  # nothing was decided, so nobody was told
    ballast.unlink()
    job.journal.wait_for_workers(2, view=2)
    job.finish()
    assert agent.wait() == 0
    assert [lost.failure.rank for lost in job.journal.of(WorkerFailedRecord)] == [1]


def test_a_job_cannot_begin_on_a_full_disk_and_says_so(small_disk: Place) -> None:
    job = small_disk
    (job.state_dir / "token").write_text(secrets.token_hex(32))
    fill(job)
    agent = job.start("--standalone", *SPAWN, STEPS)
    assert agent.wait() == 5
    assert "no space is left" in agent.stderr
    assert not job.ledger()


# --- a job that ran before


def abandon(job: Place, *flags: str) -> None:
    """A job that is left unfinished."""
    agent = job.start(*NAMED, *flags, STEPS)
    job.wait_for_steps(*job.journal.wait_for_workers(1).values())
    cut_power(agent)


def cut_power(agent: AgentProcess) -> None:
    """Everything of this agent's is gone at once."""
    kill9(agent.master_pid(), agent.pid)
    agent.wait()
    wait_until_nothing_left()


def test_an_unfinished_job_goes_on_where_it_was(tmp_path: Path) -> None:
    job = Place(tmp_path)
    first = job.start(*NAMED, STEPS)
    job.journal.wait_for_workers(1, view=1)
    job.tell(0, "exit 3")
    job.wait_for_steps(*job.journal.wait_for_workers(1, view=2).values())
    cut_power(first)
    second = job.start(*NAMED, STEPS)
    job.journal.wait_for_workers(1, view=3)
    job.finish()
    assert second.wait() == 0
    assert [began.term for began in job.journal.of(TermBegan)] == [1, 2]
    assert len(job.journal.of(NodeJoined)) == 2
    assert [line.restart_count for line in job.ledger("start")] == [0, 1, 1]  # a lost node is nobody's restart


def test_an_unfinished_job_does_not_go_on_with_other_settings(tmp_path: Path) -> None:
    job = Place(tmp_path)
    abandon(job)
    before = contents(job.journal)
    again = job.start(*NAMED, "--max-restarts", "4", STEPS)
    assert again.wait() == 5
    assert "give the same flags" in again.stderr
    assert contents(job.journal) == before


def test_a_finished_job_is_put_aside_when_its_name_is_used_again(tmp_path: Path) -> None:
    job = Place(tmp_path)
    job.finish()
    assert job.start(*NAMED, STEPS).wait() == 0
    created = job.journal.job().created_at
    assert job.start(*NAMED, STEPS).wait() == 0
    assert job.journal.job().created_at > created
    assert job.journal.path is not None
    aside = list(job.journal.path.parent.glob("journal-*.sqlite"))
    assert len(aside) == 1
    with closing(sqlite3.connect(aside[0])) as database:
        assert database.execute("SELECT count(*) FROM records WHERE kind = 'job-finished'").fetchone() == (1,)
    assert job.journal.finished().outcome is Outcome.SUCCEEDED


# --- damage


def contents(journal: Journal) -> bytes:
    """The journal's bytes, with nothing left beside it."""
    assert journal.path is not None
    with closing(sqlite3.connect(journal.path)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return journal.path.read_bytes()


def change_a_record(data: bytearray) -> None:
    """One letter of the node's name."""
    place = data.index(b'"node_id":"only"') + len(b'"node_id":"o')
    data[place] ^= 1


def destroy_a_page(data: bytearray) -> None:
    """The one that holds the records; SQLite's pages are 4 KiB."""
    data[4096:8192] = b"\xff" * 4096


def destroy_the_header(data: bytearray) -> None:
    data[:16] = b"something else!!"


@pytest.mark.parametrize("damage", [change_a_record, destroy_a_page, destroy_the_header])
def test_a_damaged_journal_is_named_and_left_alone(tmp_path: Path, damage: object) -> None:
    job = Place(tmp_path)
    abandon(job)
    data = bytearray(contents(job.journal))
    damage(data)  # type: ignore[operator]
    assert job.journal.path is not None
    job.journal.path.write_bytes(data)
    again = job.start(*NAMED, STEPS)
    assert again.wait() == 5
    assert f"the journal {job.journal.path} is damaged" in again.stderr
    assert "Nothing was changed" in again.stderr
    assert job.journal.path.read_bytes() == bytes(data)
    assert len(job.ledger("start")) == 1


def test_a_journal_damaged_under_a_running_job_stops_no_worker(tmp_path: Path) -> None:
    job = Place(tmp_path)
    flags = ("--rdzv-conf", "join_timeout=1", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-backend", "c10d")
    agent = job.start(*NAMED, *flags, STEPS)
    pids = job.journal.wait_for_workers(1)
    kill9(agent.master_pid())
    data = bytearray(contents(job.journal))
    change_a_record(data)
    assert job.journal.path is not None
    job.journal.path.write_bytes(data)
    wait_for(lambda: "is damaged" in agent.stderr, what="a master that finds the damage")
    job.wait_for_steps(*pids.values())
    job.finish()
    assert agent.wait() == 0
