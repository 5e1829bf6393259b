"""The journal in a SQLite file: decisions, in order, each chained to the one before.

    records(seq, at, kind, body, chain)     body: the record as JSON; chain: digest of the chain so far and body

An append is one transaction with one fsync (WAL, synchronous=FULL). A lock file beside the journal keeps a
second master out for as long as the first one lives, however it ends. It names the agent that keeps the master: if that
is gone, so will be the master, and who comes next may wait (`is_abandoned`). The chain is verified whenever the
journal is opened for writing: a record that is missing, changed or out of order is named, and the journal is
left as it is. Readers (status, events, logs) need no lock and never write.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import select
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from holdfast.core.records import DurableRecord
from holdfast.errors import JournalDamagedError, JournalError, JournalLockedError

SCHEMA_VERSION = 1
CHAIN_START = "0" * 16

_decoder: msgspec.json.Decoder[DurableRecord] = msgspec.json.Decoder(DurableRecord)
_encoder = msgspec.json.Encoder()


class Entry(msgspec.Struct, frozen=True):
    """A record and its place in the journal."""

    seq: int
    record: DurableRecord


class SqliteJournal:
    """The one writer of a job's journal."""

    def __init__(
        self, path: Path, before_open: Callable[[Path], None] = lambda path: None, keeper_pid: int = 0
    ) -> None:
        """`before_open` sees the path when the lock is held and nothing is open yet: the time to put an old
        journal aside. `keeper_pid`: the agent that ends this writer, or without which it ends; 0: there is none."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock_fd = _lock(path, keeper_pid)
        except OSError as error:
            raise JournalError(f"cannot open the journal {path}: {error.strerror or error}") from error
        try:
            before_open(path)
            self._db = _open(path)
        except sqlite3.Error as error:
            os.close(self._lock_fd)
            raise _explain(path, error) from error
        except BaseException:
            os.close(self._lock_fd)
            raise
        self._seq = 0
        self._chain = CHAIN_START

    def replay(self) -> Iterator[Entry]:
        """Every record so far, verified. Must be read to its end before the first append."""
        try:
            for entry, chain in _verified(self.path, self._db, 0, CHAIN_START):
                self._seq, self._chain = entry.seq, chain
                yield entry
        except sqlite3.Error as error:
            raise _explain(self.path, error) from error

    def append(self, records: Iterable[DurableRecord]) -> int:
        """Keep the records, durably; returns the last sequence number. All of them or none."""
        seq, chain, rows = self._seq, self._chain, []
        for record in records:
            seq += 1
            body = _encoder.encode(record).decode()
            chain = _link(chain, body)
            kind = str(record.__struct_config__.tag)
            rows.append((seq, record.at, kind, body, chain))
        if not rows:
            return self._seq
        try:
            with self._db:  # commits, or rolls back on an error
                self._db.execute("BEGIN IMMEDIATE")
                self._db.executemany("INSERT INTO records VALUES (?, ?, ?, ?, ?)", rows)
        except sqlite3.Error as error:
            raise _explain(self.path, error) from error
        self._seq, self._chain = seq, chain
        return seq

    def close(self) -> None:
        """Let the next master have it."""
        self._db.close()
        os.close(self._lock_fd)


def set_aside(path: Path, target: Path) -> None:
    """Move a journal whose writer is gone, with all it holds: what a killed master left in the write-ahead log too."""
    try:
        db = sqlite3.connect(path, isolation_level=None, timeout=5.0)
        try:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            db.close()
    except sqlite3.Error as error:
        raise _explain(path, error) from error
    path.rename(target)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def read_entries(path: Path, after_seq: int = 0) -> list[Entry]:
    """The records after a sequence number, for a reader beside the master or after it."""
    if not path.exists():
        raise JournalError(f"there is no journal at {path}")
    try:
        db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None, timeout=5.0)
        try:
            if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                return []  # its master is just making it
            _check_version(path, db)
            start = CHAIN_START
            if after_seq:
                row = db.execute("SELECT chain FROM records WHERE seq = ?", (after_seq,)).fetchone()
                start = row[0] if row else CHAIN_START
            return [entry for entry, _ in _verified(path, db, after_seq, start)]
        finally:
            db.close()
    except sqlite3.Error as error:
        raise _explain(path, error) from error


def _verified(path: Path, db: sqlite3.Connection, after_seq: int, chain: str) -> Iterator[tuple[Entry, str]]:
    expected = after_seq
    rows = db.execute("SELECT seq, body, chain FROM records WHERE seq > ? ORDER BY seq", (after_seq,))
    for seq, body, stored_chain in rows:
        expected += 1
        if seq != expected:
            raise _damaged(path, f"record {expected} is missing")
        if not isinstance(body, str) or _link(chain, body) != stored_chain:
            raise _damaged(path, f"record {seq} was changed after it was written")
        try:
            record = _decoder.decode(body)
        except msgspec.DecodeError as error:
            raise _damaged(path, f"record {seq} cannot be read ({error})") from error
        chain = stored_chain
        yield Entry(seq, record), chain


def _link(chain: str, body: str) -> str:
    return hashlib.sha256(f"{chain}{body}".encode()).hexdigest()[:16]


def is_abandoned(path: Path) -> bool:
    """Whether the agent that kept the master of this journal is gone: such a master ends soon."""
    try:
        keeper_pid = int(_lock_path(path).read_text() or 0)
        keeper = os.pidfd_open(keeper_pid) if keeper_pid > 0 else -1
    except ProcessLookupError:
        return True
    except (OSError, ValueError):
        return False
    if keeper < 0:
        return False
    try:
        return bool(select.select([keeper], [], [], 0)[0])  # it has ended, and its parent has not asked for it yet
    finally:
        os.close(keeper)


def _lock_path(path: Path) -> Path:
    return path.with_suffix(".lock")


def _lock(path: Path, keeper_pid: int) -> int:
    fd = os.open(_lock_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
            raise
        raise JournalLockedError(
            f"another master of this job is running: it holds {path}. End it first, or give another --rdzv-id"
        ) from None
    with contextlib.suppress(OSError):  # a full disk: then nobody waits for us, that is all
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(keeper_pid).encode(), 0)
    return fd


def _open(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, timeout=5.0)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=FULL")
    if db.execute("PRAGMA user_version").fetchone()[0] == 0:
        db.execute("BEGIN IMMEDIATE")
        columns = "seq INTEGER PRIMARY KEY, at REAL, kind TEXT, body TEXT NOT NULL, chain TEXT NOT NULL"
        db.execute(f"CREATE TABLE records ({columns})")
        db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        db.execute("COMMIT")
    _check_version(path, db)
    return db


def _check_version(path: Path, db: sqlite3.Connection) -> None:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version != SCHEMA_VERSION:
        raise JournalError(
            f"the journal {path} has format {version}, this Holdfast reads {SCHEMA_VERSION}: use the version that"
            " wrote it, or give another --rdzv-id"
        )


def _damaged(path: Path, what: str) -> JournalDamagedError:
    return JournalDamagedError(
        f"the journal {path} is damaged: {what}. Nothing was changed. Restore it from a copy to go on with this"
        " job, or move it away to start the job anew"
    )


def _explain(path: Path, error: sqlite3.Error) -> JournalError:
    text = str(error)
    if isinstance(error, sqlite3.OperationalError) and "full" in text:
        return JournalError(f"no space is left for the journal {path}: free some; the job goes on where it was")
    if isinstance(error, sqlite3.OperationalError) and ("readonly" in text or "unable to open" in text):
        return JournalError(f"the journal {path} cannot be written ({text}): make its directory writable")
    if isinstance(error, sqlite3.DatabaseError) and ("malformed" in text or "not a database" in text):
        return _damaged(path, text)
    return JournalError(f"the journal {path} cannot be used: {text}")
