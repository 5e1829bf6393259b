"""The journal in a SQLite file: decisions, in order, each chained to the one before.

    records(seq, at, kind, body, chain)     body: the record as JSON; chain: digest of the chain so far and body

What comes from every node at once would fill it: so of many reports that are stored together one row is made, `batch`,
and it, like a long record, has its JSON lines compressed in a blob; its number is that of its last record.

An append is one transaction with one fsync (WAL, synchronous=FULL). A lock file beside the journal keeps a
second master out for as long as the first one lives, however it ends. It names the agent that keeps the master: if that
is gone, so will be the master, and who comes next may wait (`is_abandoned`). The chain is verified whenever the
journal is opened for writing: a record that is missing, changed or out of order is named, and the journal is
left as it is. Readers (status, events, logs) need no lock and never write.
"""

from __future__ import annotations

import hashlib
import os
import select
import sqlite3
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from urllib.parse import quote

import msgspec

from holdfast.core.records import DurableRecord
from holdfast.errors import JournalDamagedError, JournalError, JournalLockedError
from holdfast.util.files import FileLock
from holdfast.util.private_directories import make_closed

SCHEMA_VERSION = 2
READABLE_VERSIONS = (1, 2)
"""Version 1 has no batches and no blobs."""
BATCH = "batch"
BATCHED_KINDS = frozenset(
    {"workers-started", "view-joined", "step-interrupted", "worker-failed", "worker-succeeded", "workers-stalled"}
)
"""What each node or rank reports; no kind that is looked for by itself."""
BATCH_RECORDS_MIN = 32
LONG_BODY_CHARS = 16_384
BLOB_BYTES_MAX = 256 * 2**20
"""Of one row, decompressed."""
CHAIN_START = "0" * 16
SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""What a damaged file raises: sqlite3 cannot decode its own message about a name that is not text any more."""

_decoder: msgspec.json.Decoder[DurableRecord] = msgspec.json.Decoder(DurableRecord)
_encoder = msgspec.json.Encoder()


class JournalEntry(msgspec.Struct, frozen=True):
    """A record and its place in the journal."""

    seq: int
    record: DurableRecord


class SqliteJournal:
    """The one writer of a job's journal."""

    def __init__(self, path: Path, before_open: Callable[[Path], None] = lambda path: None, agent_pid: int = 0) -> None:
        """Lock and open the journal. `before_open` is called with the path when the lock is held and nothing is open
        yet: the time to set an old journal aside. `agent_pid`: the agent that ends this writer, or without which it
        ends; 0: there is none."""
        self.path = path
        try:
            make_closed(path.parent)
            self._lock = _lock(path, agent_pid)
        except OSError as error:
            raise JournalError(f"cannot open the journal {path}: {error.strerror or error}") from error
        try:
            before_open(path)
            self._db = _open(path)
        except SQLITE_ERRORS as error:
            self._lock.release()
            raise _explain(path, error) from error
        except OSError as error:
            self._lock.release()
            raise JournalError(f"cannot open the journal {path}: {error.strerror or error}") from error
        except BaseException:
            self._lock.release()
            raise
        self._seq = 0
        self._chain = CHAIN_START

    def replay(self) -> Iterator[JournalEntry]:
        """Return every record so far, verified. It must be read to its end before the first append."""
        try:
            for entry, chain in _verified(self.path, self._db, 0, CHAIN_START):
                self._seq, self._chain = entry.seq, chain
                yield entry
        except SQLITE_ERRORS as error:
            raise _explain(self.path, error) from error

    def append(self, records: Iterable[DurableRecord]) -> int:
        """Store the records durably, all of them or none; return the last sequence number."""
        seq, chain, rows = self._seq, self._chain, []
        for group in _grouped(records):
            seq += len(group)
            body, kind = _packed(group)
            chain = _link(chain, body)
            rows.append((seq, group[-1].at, kind, body, chain))
        if not rows:
            return self._seq
        try:
            with self._db:  # commits, or rolls back on an error
                self._db.execute("BEGIN IMMEDIATE")
                self._db.executemany("INSERT INTO records VALUES (?, ?, ?, ?, ?)", rows)
        except SQLITE_ERRORS as error:
            raise _explain(self.path, error) from error
        self._seq, self._chain = seq, chain
        return seq

    def page(self, after_seq: int, chars_max: int) -> list[str]:
        """Return records after a sequence number as JSON: the next one, and as many more as are not longer together."""
        found: list[str] = []
        chars = 0
        try:
            rows = self._db.execute("SELECT seq, body FROM records WHERE seq > ? ORDER BY seq", (after_seq,))
            for seq, body in rows:
                lines = _lines(self.path, seq, body)
                for line in lines[max(after_seq - (seq - len(lines)), 0) :]:
                    chars += len(line)
                    if found and chars > chars_max:
                        return found
                    found.append(line)
        except SQLITE_ERRORS as error:
            raise _explain(self.path, error) from error
        return found

    def close(self) -> None:
        """Close the journal and let the next master have it."""
        self._db.close()
        self._lock.release()


def set_aside(path: Path, target: Path) -> None:
    """Move a journal whose writer is gone, with all it holds: what a killed master left in the write-ahead log too."""
    try:
        db = sqlite3.connect(path, isolation_level=None, timeout=5.0)
        try:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            db.close()
    except SQLITE_ERRORS as error:
        raise _explain(path, error) from error
    path.rename(target)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def read_entries(path: Path, after_seq: int = 0) -> list[JournalEntry]:
    """Return the records after a sequence number, for a reader beside the master or after it."""
    if not path.exists():
        raise JournalError(f"there is no journal at {path}")
    try:
        db = _open_to_read(path)
        try:
            if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                return []  # its master is just making it
            _check_version(path, db)
            before = "SELECT seq, chain FROM records WHERE seq <= ? ORDER BY seq DESC LIMIT 1"
            row_seq, chain = db.execute(before, (after_seq,)).fetchone() or (0, CHAIN_START)
            found = (entry for entry, _ in _verified(path, db, row_seq, chain))
            return [entry for entry in found if entry.seq > after_seq]
        finally:
            db.close()
    except SQLITE_ERRORS as error:
        raise _explain(path, error) from error


def read_newest(path: Path, kinds: Collection[str]) -> list[DurableRecord]:
    """Return the newest record of each of these kinds, in no order and unverified: enough for a list of many jobs."""
    return _read_kinds(path, kinds, "SELECT body, max(seq) FROM records WHERE kind IN ({}) GROUP BY kind")


def read_all_of(path: Path, kind: str) -> list[DurableRecord]:
    """Return all records of a kind in their order, unverified."""
    return _read_kinds(path, (kind,), "SELECT body FROM records WHERE kind IN ({}) ORDER BY seq")


def _read_kinds(path: Path, kinds: Collection[str], query: str) -> list[DurableRecord]:
    try:
        db = _open_to_read(path)
        try:
            if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                return []  # its master is just making it
            _check_version(path, db)
            rows = db.execute(query.format(", ".join("?" * len(kinds))), (*kinds,))
            return [_decoder.decode(line) for row in rows for line in _lines(path, 0, row[0])]
        finally:
            db.close()
    except (OSError, *SQLITE_ERRORS) as error:
        raise _explain(path, error) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError) as error:
        raise _damaged(path, f"a record cannot be read ({error})") from error


def _open_to_read(path: Path) -> sqlite3.Connection:
    """Open a journal for reading. Where nothing can be written, SQLite cannot make the file by which readers and
    writers share memory: there no process writes to the journal either."""
    if not path.is_file():
        raise _damaged(path, "it is not a file")
    unmoved = path.with_name(f"{path.name}-wal")
    is_closed = not os.access(path.parent, os.W_OK) and not (unmoved.exists() and unmoved.stat().st_size)
    is_fixed = is_closed or bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    mode = "mode=ro&immutable=1" if is_fixed else "mode=ro"
    return sqlite3.connect(f"file:{quote(str(path))}?{mode}", uri=True, isolation_level=None, timeout=5.0)


def _verified(path: Path, db: sqlite3.Connection, after_seq: int, chain: str) -> Iterator[tuple[JournalEntry, str]]:
    expected = after_seq + 1
    rows = db.execute("SELECT seq, body, chain FROM records WHERE seq > ? ORDER BY seq", (after_seq,))
    for seq, body, stored_chain in rows:
        is_blob = isinstance(body, bytes)
        if seq < expected or (seq != expected and not is_blob):
            raise _damaged(path, f"record {expected} is missing")
        if not isinstance(body, str | bytes) or _link(chain, body) != stored_chain:
            raise _damaged(path, f"record {seq} was changed after it was written")
        lines = _lines(path, seq, body)
        if seq - len(lines) + 1 != expected:
            raise _damaged(path, f"record {expected} is missing")
        chain = stored_chain
        for line in lines:
            try:
                record = _decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise _damaged(path, f"record {expected} cannot be read ({error})") from error
            yield JournalEntry(expected, record), chain
            expected += 1


def _link(chain: str, body: str | bytes) -> str:
    content = body.encode() if isinstance(body, str) else body
    return hashlib.sha256(chain.encode() + content).hexdigest()[:16]


def _grouped(records: Iterable[DurableRecord]) -> Iterator[list[DurableRecord]]:
    """Yield the records of one append by row: many reports that follow one another share one."""
    for is_batched, run in groupby(records, lambda record: record.__struct_config__.tag in BATCHED_KINDS):
        group = list(run)
        if is_batched and len(group) >= BATCH_RECORDS_MIN:
            yield group
        else:
            yield from ([record] for record in group)


def _packed(group: list[DurableRecord]) -> tuple[str | bytes, str]:
    """Return the body and the kind of a row."""
    kind = str(group[0].__struct_config__.tag) if len(group) == 1 else BATCH
    text = b"\n".join(map(_encoder.encode, group))
    if len(group) == 1 and len(text) <= LONG_BODY_CHARS:
        return text.decode(), kind
    return zlib.compress(text, level=1), kind


def _lines(path: Path, seq: int, body: str | bytes) -> list[str]:
    """Return the records of a row, as JSON."""
    if isinstance(body, str):
        return [body]
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(body, BLOB_BYTES_MAX).decode()
    except (zlib.error, UnicodeDecodeError, TypeError) as error:
        raise _damaged(path, f"record {seq} cannot be read ({error})") from error
    if not unpacker.eof:
        raise _damaged(path, f"record {seq} cannot be read (it is cut off, or too long)")
    return text.split("\n")


def is_abandoned(path: Path) -> bool:
    """Return whether the agent that started the master of this journal is gone: such a master ends soon."""
    try:
        agent_pid = int(FileLock(_lock_path(path)).read_owner() or 0)
        agent_pidfd = os.pidfd_open(agent_pid) if agent_pid > 0 else -1
    except ProcessLookupError:
        return True
    except (OSError, ValueError):
        return False
    if agent_pidfd < 0:
        return False
    try:
        return bool(select.select([agent_pidfd], [], [], 0)[0])  # it has ended, and its parent has not asked for it yet
    finally:
        os.close(agent_pidfd)


def _lock_path(path: Path) -> Path:
    return path.with_suffix(".lock")


def _lock(path: Path, agent_pid: int) -> FileLock:
    lock = FileLock(_lock_path(path))
    if not lock.acquire(owner=str(agent_pid)):
        raise JournalLockedError(
            f"another master of this job is running: it holds {path}. End it first, or give another --rdzv-id"
        )
    return lock


def _open(path: Path) -> sqlite3.Connection:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # SQLite would make it readable by others
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
    db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
    return db


def _check_version(path: Path, db: sqlite3.Connection) -> None:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version not in READABLE_VERSIONS:
        raise JournalError(
            f"the journal {path} has format {version}, this Holdfast reads {SCHEMA_VERSION}: use the version that"
            " wrote it, or give another --rdzv-id"
        )


def _damaged(path: Path, what: str) -> JournalDamagedError:
    return JournalDamagedError(
        f"the journal {path} is damaged: {what}. Nothing was changed. Restore it from a copy to go on with this"
        " job, or move it away to start the job again from the beginning"
    )


def _explain(path: Path, error: sqlite3.Error | UnicodeDecodeError | OSError) -> JournalError:
    text = str(error)
    if isinstance(error, UnicodeDecodeError):
        return _damaged(path, "a name in it is not text")
    if isinstance(error, sqlite3.OperationalError) and "full" in text:
        return JournalError(f"no space is left for the journal {path}: free some; the job goes on where it was")
    if isinstance(error, sqlite3.OperationalError) and ("readonly" in text or "unable to open" in text):
        return JournalError(f"the journal {path} cannot be written ({text}): make its directory writable")
    if isinstance(error, sqlite3.DatabaseError) and ("malformed" in text or "not a database" in text):
        return _damaged(path, text)
    return JournalError(f"the journal {path} cannot be used: {text}")
