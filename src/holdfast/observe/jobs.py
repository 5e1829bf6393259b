"""Which job is meant: by its id, by the beginning of it, by its journal's path, or the one that was active last."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from holdfast.errors import UsageError

JOURNAL_NAME = "journal.sqlite"
CANDIDATES_SHOWN_MAX = 10

# One line a lock: "3: FLOCK  ADVISORY  WRITE 9503 fe:00:2146460 0 EOF". A device's number means little where file
# systems are stacked, so only the file's own number is compared.
_HELD = re.compile(r"^\d+: FLOCK\s+ADVISORY\s+WRITE\s+\S+\s+\S+:(\d+)\s", re.MULTILINE)


def find_journal(state_dir: Path, wanted: str | None) -> Path:
    """The journal of the wanted job, or of the newest. UsageError if there is none, or more than one fits."""
    if wanted and wanted.endswith(".sqlite"):
        return _named(Path(wanted))
    journals = sorted(state_dir.glob(f"jobs/*/{JOURNAL_NAME}"), key=active_at, reverse=True)
    if not journals:
        raise UsageError(
            f"there is no job in {state_dir}: start one with `holdfast run`, name another directory with"
            " --state-dir, or a live master with --endpoint HOST:PORT"
        )
    return journals[0] if wanted is None else _matching(journals, wanted)


def active_at(journal: Path) -> float:
    """When the journal was last written. New records are in the file beside it until SQLite moves them; that file is
    empty where only a reader has been."""
    return max(_written_at(journal), _written_at(journal.with_name(f"{journal.name}-wal")))


def is_held_here(journal: Path) -> bool:
    """Whether a process of this machine holds the journal, as a master does for as long as it lives. Looks without
    touching: trying the lock would keep a starting master out."""
    try:
        inode = journal.with_suffix(".lock").stat().st_ino
        locks = Path("/proc/locks").read_text()
    except OSError:
        return False
    return str(inode) in _HELD.findall(locks)


def matches(job_id: str, wanted: str) -> bool:
    """Whether the text means this job: its id or the beginning of it."""
    return _directory_name(job_id).startswith(_directory_name(wanted))


def _named(path: Path) -> Path:
    if not path.is_file():
        raise UsageError(f"there is no journal {path}")
    return path


def _matching(journals: Iterable[Path], wanted: str) -> Path:
    by_id = {journal.parent.name: journal for journal in journals}
    if exact := by_id.get(_directory_name(wanted)):
        return exact
    fitting = [job_id for job_id in by_id if matches(job_id, wanted)]
    if not fitting:
        raise UsageError(f"there is no job {wanted}. There are, the newest first: {_listed(by_id)}")
    if len(fitting) > 1:
        raise UsageError(f"{wanted} may mean any of {_listed(fitting)}: give more of the id")
    return by_id[fitting[0]]


def _directory_name(job_id: str) -> str:
    return job_id.replace("/", "_")


def _listed(job_ids: Iterable[str]) -> str:
    shown = list(job_ids)
    more = f" and {len(shown) - CANDIDATES_SHOWN_MAX} more" if len(shown) > CANDIDATES_SHOWN_MAX else ""
    return ", ".join(shown[:CANDIDATES_SHOWN_MAX]) + more


def _written_at(path: Path) -> float:
    try:
        found = path.stat()
    except OSError:
        return 0.0
    return found.st_mtime if found.st_size else 0.0
