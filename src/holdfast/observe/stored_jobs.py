"""The jobs of a state directory, and what they take on disk: for `holdfast jobs`, and for the removal of old ones.

    <state dir>/jobs/<job>/journal.sqlite         its records, and journal-….sqlite of earlier runs under the same id
                           checkpoints/           unless --checkpoint-dir names another place
                           nodes/                 what agents of this machine know (util/node_status.py)
    <state dir>/logs/<node>_<random>/             the output of one agent's workers; the journal says whose it is. Of
                                                  jobs in the default state directory it is among the temporary files

Of each journal the newest records of a few kinds are read, unverified, so that a list of thousands is quick. A journal
that cannot be read is a row like any other, with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import msgspec

from holdfast.core import records as r
from holdfast.errors import JournalError
from holdfast.journal import read_all_of, read_newest
from holdfast.observe.jobs import JOURNAL_NAME, is_locked_here, last_written_at
from holdfast.util.node_status import NodeStatus
from holdfast.util.processes import process_state
from holdfast.util.state_directory import DEFAULT, fallback, state_directory

CHECKPOINTS_NAME = "checkpoints"
LOGS_NAME = "logs"
_KINDS = ("job-created", "job-finished", "training-closed", "step-committed", "durability-changed")


class JobStanding(StrEnum):
    """Whether a job runs, and how it ended."""

    RUNNING = "running"
    UNFINISHED = "unfinished"
    """It has not ended and does not run on this machine: it can be continued, or runs elsewhere."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    UNREADABLE = "unreadable"
    """Its journal is damaged, of another version, or not permitted to be read."""
    NO_JOURNAL = "no journal"
    """Its journal is on another machine, or only checkpoints are left."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing can go on with it."""
        return self in (JobStanding.SUCCEEDED, JobStanding.FAILED, JobStanding.STOPPED)


class StoredJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job in a state directory, by what its newest records say."""

    job_id: str
    standing: JobStanding
    why: str
    """Why it cannot be read; empty if it can."""
    created_at: float | None
    last_active_at: float
    """When its journal was written last."""
    steps: int | None
    """How many steps are known to be committed; None if its workers do not say so."""
    directory: Path

    @property
    def journal(self) -> Path:
        """Where its journal is, if there is one."""
        return self.directory / JOURNAL_NAME

    @property
    def checkpoints(self) -> Path:
        """Where its checkpoints are, if it wrote them to the state directory."""
        return self.directory / CHECKPOINTS_NAME


class JobSize(msgspec.Struct, frozen=True, kw_only=True):
    """What a job takes on disk, in bytes."""

    journal_bytes: int
    log_bytes: int
    checkpoint_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.journal_bytes + self.log_bytes + self.checkpoint_bytes


def job_directories(state_dir: Path) -> list[Path]:
    """Return the directories of all jobs, the one that was active last first. Raises OSError if they cannot be listed;
    a state directory that is not there has no jobs."""
    try:
        found = [Path(entry.path) for entry in os.scandir(state_dir / "jobs") if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    return sorted(found, key=_active_at, reverse=True)


def read_job(directory: Path) -> StoredJob:
    """Return what is known of the job in a directory."""
    journal = directory / JOURNAL_NAME
    if not _is_there(journal):
        is_running = any(process_state(status.agent_pid) not in "XZ" for status in _statuses(directory))
        return _job(directory, JobStanding.RUNNING if is_running else JobStanding.NO_JOURNAL)
    try:
        newest = read_newest(journal, _KINDS)
    except JournalError as error:
        return _job(directory, JobStanding.RUNNING if is_locked_here(journal) else JobStanding.UNREADABLE, str(error))
    created = next((record for record in newest if isinstance(record, r.JobCreated)), None)
    finished = next((record for record in newest if isinstance(record, r.JobFinished)), None)
    if is_locked_here(journal):
        standing = JobStanding.RUNNING
    elif finished is not None:
        standing = JobStanding(finished.outcome.value)
    else:
        lives = any(process_state(status.agent_pid) not in "XZ" for status in _statuses(directory))
        standing = JobStanding.RUNNING if lives else JobStanding.UNFINISHED
    found = _job(directory, standing)
    if created is not None:
        found = msgspec.structs.replace(found, job_id=created.job_id, created_at=created.at)
    return msgspec.structs.replace(found, steps=max(map(_steps, newest), default=0) or None)


def size_of(job: StoredJob, state_dir: Path) -> JobSize:
    """Return what a job takes on disk, its logs in the state directory included."""
    checkpoint_bytes = disk_bytes(job.checkpoints)
    return JobSize(
        journal_bytes=disk_bytes(job.directory) - checkpoint_bytes,
        log_bytes=sum(disk_bytes(directory) for directory in log_directories(job.directory, state_dir)),
        checkpoint_bytes=checkpoint_bytes,
    )


def log_roots(state_dir: Path) -> list[Path]:
    """Return the directories in which jobs of a state directory have their logs, if --log-dir names no other."""
    is_default = state_dir == state_directory(DEFAULT)
    return [state_dir.absolute() / LOGS_NAME, *([fallback() / LOGS_NAME] if is_default else [])]


def log_directories(job_directory: Path, state_dir: Path) -> list[Path]:
    """Return the log directories of a job's nodes, of all runs, on this machine. Those that --log-dir named are the
    user's own."""
    roots, found = log_roots(state_dir), {}
    for journal in job_directory.glob("*.sqlite"):
        try:
            joined = read_all_of(journal, "node-joined")
        except JournalError:
            continue
        for record in joined:
            if isinstance(record, r.NodeJoined) and (path := Path(record.info.log_dir)).parent in roots:
                found[path] = path.is_dir() and not path.is_symlink()
    return [path for path, is_there in found.items() if is_there]


def disk_bytes(directory: Path) -> int:
    """Return what the files below a directory take; 0 for one that is not there. Links are not followed."""
    total = 0
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return 0
    for entry in entries:
        try:
            is_below = entry.is_dir(follow_symlinks=False)
            total += disk_bytes(Path(entry.path)) if is_below else entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError:
            continue  # removed meanwhile
    return total


def _job(directory: Path, standing: JobStanding, why: str = "") -> StoredJob:
    return StoredJob(
        job_id=directory.name,
        standing=standing,
        why=why,
        created_at=None,
        last_active_at=_active_at(directory),
        steps=None,
        directory=directory,
    )


def _active_at(directory: Path) -> float:
    if at := last_written_at(directory / JOURNAL_NAME):
        return at
    try:
        return directory.stat().st_mtime
    except OSError:
        return 0.0


def _is_there(journal: Path) -> bool:
    try:
        return journal.is_file()
    except OSError:
        return True  # and reading it says what is wrong


def _statuses(directory: Path) -> Iterator[NodeStatus]:
    for path in directory.glob("nodes/*.json"):
        try:
            yield msgspec.json.decode(path.read_bytes(), type=NodeStatus)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            continue


def _steps(record: r.DurableRecord) -> int:
    """Return how many steps are committed, as far as a record says."""
    match record:
        case r.TrainingClosedRecord(step=step):
            return step
        case r.StepCommittedRecord(step=step):
            return step + 1
        case r.DurabilityChanged(durability=durability):
            return max(durability.memory, durability.elsewhere, durability.storage, 0)
        case _:
            return 0
