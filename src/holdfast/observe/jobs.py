"""Finds the journal of a job: by the job's id, by the beginning of it, by the journal's path, or the newest one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from holdfast.errors import UsageError

JOURNAL_NAME = "journal.sqlite"
CANDIDATES_SHOWN_MAX = 10

# One line a lock: "3: FLOCK  ADVISORY  WRITE 9503 fe:00:2146460 0 EOF". A device's number means little where file
# systems are stacked, so only the file's own number is compared.
_LOCKED = re.compile(r"^\d+: FLOCK\s+ADVISORY\s+WRITE\s+\S+\s+\S+:(\d+)\s", re.MULTILINE)


def find_journal(state_dir: Path, wanted: str | None) -> Path:
    """Return the journal of the wanted job, or of the newest. Raise UsageError if there is none, or several match."""
    if wanted and wanted.endswith(".sqlite"):
        return _named(Path(wanted))
    journals = sorted(state_dir.glob(f"jobs/*/{JOURNAL_NAME}"), key=last_written_at, reverse=True)
    if not journals:
        raise UsageError(
            f"there is no job in {state_dir}: start one with `holdfast run`, name another directory with"
            " --state-dir, or a live master with --endpoint HOST:PORT"
        )
    return journals[0] if wanted is None else _matching(journals, wanted)


def last_written_at(journal: Path) -> float:
    """Return when the journal was last written. New records are in the file beside it until SQLite moves them; that
    file is empty if only a reader has opened the journal."""
    return max(_modified_at(journal), _modified_at(journal.with_name(f"{journal.name}-wal")))


def is_locked_here(journal: Path) -> bool:
    """Return whether a process of this machine has the journal locked, as a master has for as long as it runs.

    The kernel's table of locks is read: trying the lock itself could keep a starting master out.
    """
    try:
        inode = journal.with_suffix(".lock").stat().st_ino
        locks = Path("/proc/locks").read_text()
    except OSError:
        return False
    return str(inode) in _LOCKED.findall(locks)


def matches(job_id: str, wanted: str) -> bool:
    """Return whether the text is this job's id or the beginning of it."""
    return _directory_name(job_id).startswith(_directory_name(wanted))


def _named(path: Path) -> Path:
    if not path.is_file():
        raise UsageError(f"there is no journal {path}")
    return path


def _matching(journals: Iterable[Path], wanted: str) -> Path:
    by_id = {journal.parent.name: journal for journal in journals}
    if exact := by_id.get(_directory_name(wanted)):
        return exact
    matching = [job_id for job_id in by_id if matches(job_id, wanted)]
    if not matching:
        raise UsageError(f"there is no job {wanted}. There are, the newest first: {_listed(by_id)}")
    if len(matching) > 1:
        raise UsageError(f"{wanted} is ambiguous, it may be any of {_listed(matching)}: give more of the id")
    return by_id[matching[0]]


def _directory_name(job_id: str) -> str:
    return job_id.replace("/", "_")


def _listed(job_ids: Iterable[str]) -> str:
    shown = list(job_ids)
    more = f" and {len(shown) - CANDIDATES_SHOWN_MAX} more" if len(shown) > CANDIDATES_SHOWN_MAX else ""
    return ", ".join(shown[:CANDIDATES_SHOWN_MAX]) + more


def _modified_at(path: Path) -> float:
    try:
        found = path.stat()
    except OSError:
        return 0.0
    return found.st_mtime if found.st_size else 0.0
