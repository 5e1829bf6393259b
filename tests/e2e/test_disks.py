"""A disk that is full, or does not answer: workers train on, and the agent can leave."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.core.records import NodeLost, ViewFormed
from holdfast.util.processes import process_state
from support.jobs import SPAWN, STEPS, Journal, Place, is_alive, kill9, wait_for, wait_until_gone


def test_a_master_that_cannot_write_does_not_keep_the_only_agent(tmp_path: Path) -> None:
    """As on a full disk: it ends at every start, so it never learns that the last node leaves."""
    job = Place(tmp_path)
    agent = job.start("--standalone", *SPAWN, STEPS)
    job.journal.wait_for_workers(1)
    path = job.journal.path
    assert path is not None
    path.rename(path.with_name("hidden"))
    kill9(wait_for(agent.master_pid))
    wait_for(lambda: agent.logged("journal-failed"), what="a master that cannot start")
    agent.send(signal.SIGTERM)
    assert agent.wait() == 128 + signal.SIGTERM
    assert agent.logged("master-not-waited-for")


class LoopDisk:
    """An ext4 file system in a file, which can be frozen: every write to it waits."""

    def __init__(self, directory: Path) -> None:
        self.path, self._image = directory / "disk", directory / "disk.img"
        self.path.mkdir()
        with self._image.open("wb") as file:
            file.truncate(64 * 2**20)
        self._run("mkfs.ext4", "-q", str(self._image))
        self._run("mount", "-o", "loop", str(self._image), str(self.path))

    def freeze(self) -> None:
        self._run("fsfreeze", "-f", str(self.path))

    def thaw(self) -> None:
        self._run("fsfreeze", "-u", str(self.path))

    def close(self) -> None:
        subprocess.run(["fsfreeze", "-u", str(self.path)], check=False, capture_output=True)
        self._run("umount", "-l", str(self.path))

    def _run(self, *command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, timeout=30)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[LoopDisk]:
    try:
        found = LoopDisk(tmp_path)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be made and mounted here: {error}")
    try:
        yield found
    finally:
        found.close()


def test_workers_train_on_while_the_journals_disk_does_not_answer(tmp_path: Path, disk: LoopDisk) -> None:
    job = Place(tmp_path)
    job.state_dir, job.journal = disk.path, Journal(disk.path)
    times = ("--heartbeat-interval", "0.2", "--silence-timeout", "1", "--max-restarts", "1", "--nproc-per-node", "2")
    agent = job.start("--standalone", *times, *SPAWN, STEPS)
    pids = job.journal.wait_for_workers(2)
    master = agent.master_pid()
    disk.freeze()
    try:
        kill9(pids[1])  # something that has to be written down
        wait_until_gone(pids[1])
        wait_for(lambda: process_state(master) == "D", what="a master that waits for its disk")
        wait_for(lambda: agent.logged("master-unreachable"), what="an agent that misses its master")
        job.wait_for_steps(pids[0], more=100)
        assert is_alive(master), "a master that waits for its disk is left to it"
    finally:
        disk.thaw()
    job.journal.wait_for_workers(2, view=2)
    job.finish()
    assert agent.wait() == 0
    assert len(job.journal.of(ViewFormed)) == 2
    assert not job.journal.of(NodeLost)
