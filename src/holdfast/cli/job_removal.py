"""Removal of jobs from a state directory: one by name, and those that ended long ago.

A job that runs is never removed. One that has not ended can be continued, so it is removed only if that is asked for.
Checkpoints stay unless they are asked for too: a later job may be meant to start from them. While a job is removed, the
lock of its journal is held, so that no master starts with half of it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from holdfast.core.wording import counted
from holdfast.errors import HoldfastError
from holdfast.observe.formatting import format_size
from holdfast.observe.jobs import JOURNAL_NAME, last_written_at
from holdfast.observe.stored_jobs import (
    CHECKPOINTS_NAME,
    JobStanding,
    StoredJob,
    disk_bytes,
    job_directories,
    log_directories,
    log_roots,
    read_job,
    size_of,
)
from holdfast.util.files import FileLock, LockUnsupportedError
from holdfast.util.logs import get_logger
from holdfast.util.node_status import read_statuses
from holdfast.util.processes import process_state

PATIENCE_S = 2.0
"""How long the removal at the end of a job goes on: the rest is left for the next."""

log = get_logger(__name__)


class RemovedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that was removed, or would be."""

    job_id: str
    removed_bytes: int
    checkpoints_kept: str = ""
    """Where its checkpoints are, if they stay."""
    checkpoint_bytes: int = 0
    """Their size."""


class Pruning(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the jobs that were not active for long."""

    removed: list[RemovedJob]
    logs_removed: int
    """Log directories that belong to no job that is there."""
    logs_bytes: int
    kept_unfinished: list[str]
    """Jobs as old that have not ended, or whose journal cannot be read."""
    failed: list[str]
    """Sentences about what could not be removed."""
    is_complete: bool = True
    """Whether the time was enough."""

    @property
    def removed_bytes(self) -> int:
        """What was freed, or would be."""
        return self.logs_bytes + sum(job.removed_bytes for job in self.removed)


def check_removable(job: StoredJob, *, force: bool) -> None:
    """Raise HoldfastError for a job that runs or, without `force`, may be needed."""
    if job.standing is JobStanding.RUNNING:
        raise HoldfastError(f"job {job.job_id} is running: stop it first (Ctrl-C or SIGTERM to its `holdfast run`)")
    if force or job.standing.has_ended:
        return
    remedy = "--force removes it all the same"
    match job.standing:
        case JobStanding.UNREADABLE:
            raise HoldfastError(f"whether job {job.job_id} has ended is not known ({job.why}): {remedy}")
        case JobStanding.NO_JOURNAL:
            raise HoldfastError(f"job {job.job_id} has no journal here, perhaps it is on another machine: {remedy}")
        case _:
            raise HoldfastError(
                f"job {job.job_id} has not ended: `holdfast run` with --rdzv-id {job.job_id} goes on with it; {remedy}"
            )


def remove_job(job: StoredJob, state_dir: Path, *, with_checkpoints: bool, dry_run: bool = False) -> RemovedJob:
    """Remove a job's journal, logs and, if asked for, its checkpoints. Raises HoldfastError if that is not possible."""
    size = size_of(job, state_dir)
    keeps = size.checkpoint_bytes > 0 and not with_checkpoints
    done = RemovedJob(
        job_id=job.job_id,
        removed_bytes=size.total_bytes - (size.checkpoint_bytes if keeps else 0),
        checkpoints_kept=str(job.checkpoints) if keeps else "",
        checkpoint_bytes=size.checkpoint_bytes if keeps else 0,
    )
    if dry_run:
        return done
    lock = FileLock(job.journal.with_suffix(".lock"))
    try:
        if not lock.acquire():
            raise HoldfastError(f"job {job.job_id} has been started again: it stays")
        for directory in log_directories(job.directory, state_dir):
            shutil.rmtree(directory)
        _remove_all_but(job.directory, {lock.path.name} | ({CHECKPOINTS_NAME} if keeps else set()))
        lock.path.unlink(missing_ok=True)
    except LockUnsupportedError:
        raise HoldfastError(f"{job.directory} is on a file system without locks: remove it by hand") from None
    except OSError as error:
        reason = f"{error.filename or job.directory}: {error.strerror or error}"
        raise HoldfastError(f"job {job.job_id} cannot be removed: {reason}") from error
    finally:
        lock.release()
    with contextlib.suppress(OSError):
        job.directory.rmdir()
    return done


def remove_old_jobs(state_dir: Path, older_than_s: float) -> None:
    """Remove what `holdfast jobs prune` would, when a job is over, for as long as that is not felt. A state directory
    that cannot be written is left alone."""
    try:
        done = prune(state_dir, older_than_s, with_checkpoints=False, patience_s=PATIENCE_S)
    except OSError:
        return
    if done.removed or done.logs_removed:
        kept = sum(job.checkpoint_bytes for job in done.removed)
        log.info(
            "old-jobs-removed",
            f"removed {counted(len(done.removed), 'job')} that ended more than {older_than_s / 86_400:g} days ago, with"
            f" logs {format_size(done.removed_bytes)}{f'; {format_size(kept)} of checkpoints stay' if kept else ''}"
            " (--keep-jobs says how long they stay, `holdfast jobs` lists them)",
        )


def prune(
    state_dir: Path,
    older_than_s: float,
    *,
    with_checkpoints: bool,
    with_unfinished: bool = False,
    dry_run: bool = False,
    patience_s: float = 3_600.0,
) -> Pruning:
    """Remove the jobs that have ended and were not active for this long, and logs as old that belong to no job. Raises
    OSError if the state directory cannot be listed."""
    before, give_up_at = time.time() - older_than_s, time.monotonic() + patience_s
    removed, unfinished, failed = [], [], []
    is_complete = True
    for directory in job_directories(state_dir):
        if _changed_at(directory) >= before:
            continue
        if time.monotonic() > give_up_at:
            is_complete = False
            break
        job = read_job(directory)
        if not job.standing.has_ended and not (with_unfinished and job.standing is JobStanding.UNFINISHED):
            if job.standing in (JobStanding.UNFINISHED, JobStanding.UNREADABLE):
                unfinished.append(job.job_id)
            continue
        try:
            removed.append(remove_job(job, state_dir, with_checkpoints=with_checkpoints, dry_run=dry_run))
        except HoldfastError as error:
            failed.append(str(error))
    logs = list(_logs_of_no_job(state_dir, before)) if is_complete else []
    logs_bytes = sum(map(disk_bytes, logs))
    for directory in logs if not dry_run else []:
        try:
            shutil.rmtree(directory)
        except OSError as error:
            failed.append(f"the logs in {directory} cannot be removed: {error.strerror or error}")
    return Pruning(
        removed=removed,
        logs_removed=len(logs),
        logs_bytes=logs_bytes,
        kept_unfinished=unfinished,
        failed=failed,
        is_complete=is_complete,
    )


def _remove_all_but(directory: Path, kept: Collection[str]) -> None:
    for entry in os.scandir(directory):
        if entry.name not in kept:
            shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else Path(entry.path).unlink()


def _changed_at(directory: Path) -> float:
    try:
        return last_written_at(directory / JOURNAL_NAME) or directory.stat().st_mtime
    except OSError:
        return time.time()


def _logs_of_no_job(state_dir: Path, before: float) -> Iterator[Path]:
    """Yield the log directories without a change since then that no journal here names: jobs' whose master was on
    another machine, or that were removed. Those of agents that live are left alone."""
    old = []
    for root in log_roots(state_dir):
        with contextlib.suppress(OSError):
            found = [Path(entry.path) for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False)]
            old += [path for path in found if _newest_change(path) < before]
    if not old:
        return
    living = [one for one in read_statuses(state_dir, None) if process_state(one.agent_pid) not in "XZ"]
    named = {path for directory in job_directories(state_dir) for path in log_directories(directory, state_dir)}
    for path in old:
        if path not in named and not any(path.name.startswith(f"{status.node_id}_") for status in living):
            yield path


def _newest_change(directory: Path) -> float:
    """Return when anything below a directory was changed last; now, if that cannot be seen."""
    newest = 0.0
    try:
        for entry in os.scandir(directory):
            found = entry.stat(follow_symlinks=False).st_mtime
            newest = max(newest, found)
            if entry.is_dir(follow_symlinks=False):
                newest = max(newest, _newest_change(Path(entry.path)))
        return max(newest, directory.stat().st_mtime)
    except OSError:
        return time.time()
