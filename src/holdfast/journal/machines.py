"""What is known of machines across jobs: a SQLite file in the state directory that all jobs there share.

    events(number, machine, at, kind, fault, weight, job_id, why)    the history of each machine, bounded
    marks(machine, at, by, why, until)                                machines that no job is to have
    notes(machine, name, text)                                        what a platform's annotations would hold

Several masters and commands may have it open at once; each change is one small transaction. Unlike a job's journal
nothing is decided by it alone: a book that is lost costs memory of the past, not a job.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from holdfast.core.health.reputation import CordonMark, MachineEventKind, NodeEvent
from holdfast.errors import JournalError
from holdfast.journal.sqlite import SQLITE_ERRORS

BOOK_NAME = "nodes.sqlite"
BOOK_VERSION = 1
EVENTS_KEPT_MAX = 200
"""Events stored for a machine: years of a bad one."""
BUSY_TIMEOUT_S = 2.0
_TABLES = (
    "CREATE TABLE events (number INTEGER PRIMARY KEY, machine TEXT NOT NULL, at REAL NOT NULL, kind TEXT NOT NULL,"
    " fault TEXT NOT NULL, weight REAL NOT NULL, job_id TEXT NOT NULL, why TEXT NOT NULL)",
    "CREATE INDEX events_of_machine ON events (machine, at)",
    "CREATE TABLE marks (machine TEXT PRIMARY KEY, at REAL NOT NULL, by TEXT NOT NULL, why TEXT NOT NULL, until REAL)",
    "CREATE TABLE notes (machine TEXT, name TEXT, text TEXT NOT NULL, PRIMARY KEY (machine, name))",
)

_T = TypeVar("_T", NodeEvent, CordonMark)


class MachineBook:
    """The file, made when it is first needed. Errors are JournalError with a sentence."""

    def __init__(self, path: Path) -> None:
        self.path = path

    # --- histories

    def note(self, machine: str, event: NodeEvent) -> None:
        """Add an event to a machine's history."""
        self.note_all([(machine, event)])

    def note_all(self, lines: Iterable[tuple[str, NodeEvent]]) -> None:
        """Add events to several machines' histories in one transaction: a check may be of a thousand. Only the last of
        the passed checks is stored, as machines that stand by pass one every hour."""
        with self._changing() as db:
            for machine, event in lines:
                self._note(db, machine, event)

    def _note(self, db: sqlite3.Connection, machine: str, event: NodeEvent) -> None:
        row = (machine, event.at, event.kind.value, event.fault, event.weight, event.job_id, event.why)
        if event.kind is MachineEventKind.CHECK_PASSED:
            db.execute("DELETE FROM events WHERE machine = ? AND kind = ?", (machine, event.kind.value))
        db.execute(
            "INSERT INTO events (machine, at, kind, fault, weight, job_id, why) VALUES (?, ?, ?, ?, ?, ?, ?)", row
        )
        db.execute(
            "DELETE FROM events WHERE machine = ? AND number NOT IN"
            " (SELECT number FROM events WHERE machine = ? ORDER BY at DESC, number DESC LIMIT ?)",
            (machine, machine, EVENTS_KEPT_MAX),
        )

    def history(self, machine: str) -> list[NodeEvent]:
        """Return a machine's history, the oldest event first."""
        rows = self._read(
            "SELECT at, kind, fault, weight, job_id, why FROM events WHERE machine = ? ORDER BY at, number", (machine,)
        )
        names = ("at", "kind", "fault", "weight", "job_id", "why")
        return [self._convert(dict(zip(names, row, strict=True)), NodeEvent) for row in rows]

    def machines(self) -> list[str]:
        """Return all machines of which anything is known."""
        return [row[0] for row in self._read("SELECT machine FROM events UNION SELECT machine FROM marks ORDER BY 1")]

    # --- marks

    def mark(self, mark: CordonMark) -> None:
        """Keep a machine from all jobs. The newest mark counts."""
        with self._changing() as db:
            db.execute(
                "INSERT OR REPLACE INTO marks VALUES (?, ?, ?, ?, ?)",
                (mark.machine, mark.at, mark.by, mark.why, mark.until),
            )

    def unmark(self, machine: str) -> bool:
        """Remove a mark; return whether there was one."""
        with self._changing() as db:
            return db.execute("DELETE FROM marks WHERE machine = ?", (machine,)).rowcount > 0

    def marks(self) -> dict[str, CordonMark]:
        """Return all marks by machine, expired ones included."""
        rows = self._read("SELECT machine, at, by, why, until FROM marks ORDER BY at")
        names = ("machine", "at", "by", "why", "until")
        return {row[0]: self._convert(dict(zip(names, row, strict=True)), CordonMark) for row in rows}

    # --- notes

    def annotate(self, machine: str, notes: Mapping[str, str]) -> None:
        """Add to what is written down about a machine, or change it."""
        with self._changing() as db:
            rows = [(machine, name, text) for name, text in notes.items()]
            db.executemany("INSERT OR REPLACE INTO notes VALUES (?, ?, ?)", rows)

    def annotations(self, machine: str) -> dict[str, str]:
        """Return the notes about a machine."""
        return dict(self._read("SELECT name, text FROM notes WHERE machine = ? ORDER BY name", (machine,)))

    # --- the file

    def _convert(self, row: dict[str, Any], kind: type[_T]) -> _T:
        """Return what a row says. SQLite stores anything in any column, and other programs may have written it."""
        try:
            return msgspec.convert(row, kind)
        except msgspec.ValidationError as error:
            raise JournalError(f"{self.path} is damaged ({error}): move it away to start with an empty one") from None

    def _read(self, query: str, values: tuple[object, ...] = ()) -> list[Any]:
        if not self.path.exists():
            return []
        try:
            db = self._open()
            try:
                return db.execute(query, values).fetchall()
            finally:
                db.close()
        except SQLITE_ERRORS as error:
            raise self._explain(error) from error

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            db = self._open()
            try:
                db.execute("BEGIN IMMEDIATE")
                yield db
                db.execute("COMMIT")
            finally:
                db.close()  # what is not committed is undone
        except SQLITE_ERRORS as error:
            raise self._explain(error) from error
        except OSError as error:
            raise JournalError(f"cannot open {self.path}: {error.strerror or error}") from error

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, isolation_level=None, timeout=BUSY_TIMEOUT_S)
        try:
            if db.execute("PRAGMA user_version").fetchone()[0] == 0:
                db.execute("PRAGMA journal_mode=WAL")
                db.execute("BEGIN IMMEDIATE")
                if db.execute("PRAGMA user_version").fetchone()[0] == 0:  # no other process was first
                    for table in _TABLES:
                        db.execute(table)
                    db.execute(f"PRAGMA user_version={BOOK_VERSION}")
                db.execute("COMMIT")
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version != BOOK_VERSION:
                raise JournalError(
                    f"{self.path} has format {version}, this Holdfast reads {BOOK_VERSION}: use the version that wrote"
                    " it, or move it away to start with an empty one"
                )
        except BaseException:
            db.close()
            raise
        return db

    def _explain(self, error: sqlite3.Error | UnicodeDecodeError) -> JournalError:
        return JournalError(f"what is known of machines cannot be used ({self.path}): {error}")
