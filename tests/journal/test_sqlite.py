"""The journal keeps what it is given, in order, or says clearly what is wrong. Never less, never silently."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.core.records import JobCreated, TermBegan, WorkersStartedRecord
from holdfast.core.settings import Settings
from holdfast.errors import JournalDamagedError, JournalError, JournalLockedError
from holdfast.journal import SqliteJournal, is_abandoned, read_entries, read_newest, set_aside
from holdfast.journal import sqlite as sqlite_module
from support.strangers import as_stranger, world_writable


def terms(first: int, last: int) -> Any:
    return [TermBegan(at=float(term), term=term) for term in range(first, last + 1)]


def write(path: Path, records: Any) -> None:
    journal = SqliteJournal(path)
    list(journal.replay())
    journal.append(records)
    journal.close()


def kept(path: Path) -> Any:
    return [entry.record for entry in read_entries(path)]


def test_what_is_appended_is_read_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "a" / "journal.sqlite"
    created = JobCreated(at=0.5, job_id="x", settings=Settings(nodes_max=3))
    write(path, [created, *terms(1, 3)])
    write(path, terms(4, 5))
    assert kept(path) == [created, *terms(1, 5)]
    assert [entry.seq for entry in read_entries(path, after_seq=4)] == [5, 6]


def test_an_append_is_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    write(path, terms(1, 2))
    journal = SqliteJournal(path)
    list(journal.replay())
    with sqlite3.connect(path) as db:  # a row in the way of the second record
        db.execute("INSERT INTO records VALUES (4, 0, 'x', '{}', '')")
    with pytest.raises(JournalError):
        journal.append(terms(3, 4))
    journal.close()
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM records WHERE seq = 3").fetchone() == (0,)


def started(first: int, last: int) -> Any:
    """What every node reports after a new view."""
    return [
        WorkersStartedRecord(at=float(number), node_id=f"node-{number}", view=2, pids=tuple(range(8)))
        for number in range(first, last + 1)
    ]


def test_reports_of_many_nodes_share_a_row_and_keep_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = SqliteJournal(path)
    list(journal.replay())
    journal.append([*terms(1, 1), *started(2, 1001), *terms(1002, 1002)])
    journal.append(started(1003, 1005))
    with sqlite3.connect(path) as db:
        rows = db.execute("SELECT seq, kind FROM records ORDER BY seq").fetchall()
        size = db.execute("SELECT sum(length(body)) FROM records").fetchone()[0]
    few = [(seq, "workers-started") for seq in (1003, 1004, 1005)]
    assert rows == [(1, "term-began"), (1001, "batch"), (1002, "term-began"), *few]
    assert size < sum(len(msgspec.json.encode(record)) for record in started(2, 1001)) / 4
    wanted = [*terms(1, 1), *started(2, 1001), *terms(1002, 1002), *started(1003, 1005)]
    assert kept(path) == wanted and [entry.record for entry in journal.replay()] == wanted
    for after in (0, 1, 500, 1000, 1001, 1002, 1005, 2000):
        assert [entry.seq for entry in read_entries(path, after)] == list(range(after + 1, 1006))
        pages, sent = [], after
        while page := journal.page(sent, 5_000):
            assert len(page) == 1 or sum(map(len, page)) <= 5_000
            pages += page
            sent += len(page)
        assert pages == [msgspec.json.encode(record).decode() for record in wanted[after:]]
    journal.append(terms(1006, 1006))
    journal.close()
    assert kept(path)[-1] == terms(1006, 1006)[0]


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ("UPDATE records SET body = zeroblob(9) WHERE kind = 'batch'", "record 101 was changed"),
        ("DELETE FROM records WHERE kind = 'batch'", "record 2 is missing"),
        ("DELETE FROM records WHERE seq = 1", "record 101 was changed"),
    ],
)
def test_a_changed_batch_is_named(tmp_path: Path, damage: str, named: str) -> None:
    path = tmp_path / "journal.sqlite"
    write(path, [*terms(1, 1), *started(2, 101), *terms(102, 102)])
    with sqlite3.connect(path) as db:
        db.execute(damage)
    with pytest.raises(JournalDamagedError, match=named):
        kept(path)


def test_a_batch_that_would_fill_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.sqlite"
    write(path, started(1, 100))
    monkeypatch.setattr(sqlite_module, "BLOB_BYTES_MAX", 1_000)
    with pytest.raises(JournalDamagedError, match="cut off, or too long"):
        kept(path)


def test_a_journal_of_the_version_before_is_read_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    write(path, terms(1, 3))
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version=1")
    assert kept(path) == terms(1, 3)
    write(path, started(4, 100))
    assert kept(path) == [*terms(1, 3), *started(4, 100)]
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (2,), "one that knows no batches must not read it"


def test_a_second_master_is_kept_out_until_the_first_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    code = f"""
import sys
from pathlib import Path
from holdfast.journal import SqliteJournal
journal = SqliteJournal(Path({str(path)!r}))
print("held", flush=True)
sys.stdin.read()
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(JournalLockedError, match="another master"):
        SqliteJournal(path)
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    SqliteJournal(path).close()


def test_a_journal_is_abandoned_when_the_agent_of_its_master_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    assert not is_abandoned(path)
    SqliteJournal(path).close()
    assert not is_abandoned(path), "nobody keeps it, so nobody is gone"
    agent = subprocess.Popen(["sleep", "1000"])
    journal = SqliteJournal(path, agent_pid=agent.pid)
    assert not is_abandoned(path)
    agent.kill()
    os.waitid(os.P_PID, agent.pid, os.WEXITED | os.WNOWAIT)
    assert is_abandoned(path), "a zombie is gone too"
    agent.wait()
    assert is_abandoned(path)
    journal.close()
    SqliteJournal(path, agent_pid=os.getpid()).close()
    assert not is_abandoned(path)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ("DELETE FROM records WHERE seq = 2", "record 2 is missing"),
        ("UPDATE records SET body = replace(body, '\"term\":2', '\"term\":7') WHERE seq = 2", "record 2 was changed"),
        ("UPDATE records SET chain = '0' WHERE seq = 3", "record 3 was changed"),
        ("DELETE FROM records WHERE seq = 1", "record 1 is missing"),
    ],
)
def test_a_changed_record_is_named_and_nothing_is_repaired(tmp_path: Path, damage: str, named: str) -> None:
    path = tmp_path / "journal.sqlite"
    write(path, terms(1, 3))
    with sqlite3.connect(path) as db:
        db.execute(damage)
    before = path.read_bytes()
    with pytest.raises(JournalDamagedError, match=named):
        kept(path)
    journal = SqliteJournal(path)
    with pytest.raises(JournalDamagedError, match="Restore it from a copy"):
        list(journal.replay())
    journal.close()
    assert path.read_bytes()[100:] == before[100:]


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(os.urandom(4096))
    with pytest.raises(JournalDamagedError, match="damaged"):
        SqliteJournal(path)
    with pytest.raises(JournalError):
        read_entries(tmp_path / "nowhere.sqlite")


def replayed(path: Path) -> None:
    journal = SqliteJournal(path)
    try:
        list(journal.replay())
    finally:
        journal.close()


def test_whatever_bytes_are_damaged_the_answer_is_a_sentence(tmp_path: Path) -> None:
    path, chance = tmp_path / "journal.sqlite", random.Random(7)
    write(path, terms(1, 20))
    content = path.read_bytes()
    names = content.index(b"CREATE TABLE")
    refused = 0
    for _ in range(30):
        damaged = bytearray(content)
        for _ in range(chance.choice((1, 3, 30))):
            damaged[chance.choice((names + chance.randrange(100), chance.randrange(len(damaged))))] = chance.randrange(
                256
            )
        path.write_bytes(damaged)
        for use in (read_entries, lambda damaged_path: read_newest(damaged_path, ("term-began",)), replayed):
            path.with_name("journal.sqlite-wal").unlink(missing_ok=True)
            try:
                use(path)
            except JournalError:
                refused += 1
    assert refused > 30


def test_a_journal_that_is_just_being_made_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    sqlite3.connect(path).close()
    assert read_entries(path) == []


def test_a_journal_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    write(path, terms(1, 1))
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version=99")
    with pytest.raises(JournalError, match="format 99"):
        SqliteJournal(path)


def test_a_full_disk_is_said_to_be_full_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    write(path, terms(1, 1))
    journal = SqliteJournal(path)
    list(journal.replay())
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    journal._db.execute(f"PRAGMA max_page_count={pages}")
    long = JobCreated(at=0.0, job_id=os.urandom(100_000).hex(), settings=Settings())
    with pytest.raises(JournalError, match="no space is left"):
        journal.append([long])
    journal._db.execute("PRAGMA max_page_count=100000")
    journal.append(terms(2, 2))
    journal.close()
    assert kept(path) == terms(1, 2)


def test_a_kill_in_the_middle_of_appends_leaves_a_whole_prefix(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    code = f"""
from pathlib import Path
from holdfast.core.records import TermBegan
from holdfast.journal import SqliteJournal
journal = SqliteJournal(Path({str(path)!r}))
list(journal.replay())
term = 0
while True:
    seq = journal.append([TermBegan(at=0.0, term=term + i) for i in range(1, 6)])
    term += 5
    print(seq, flush=True)
"""
    for delay_lines in (3, 17, 40):
        path.unlink(missing_ok=True)
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        acknowledged = [int(writer.stdout.readline()) for _ in range(delay_lines)][-1]
        writer.kill()
        writer.communicate()
        records = kept(path)
        assert len(records) >= acknowledged and len(records) % 5 == 0
        assert [record.term for record in records] == list(range(1, len(records) + 1))


def test_a_journal_put_aside_keeps_what_a_killed_master_left_in_its_log(tmp_path: Path) -> None:
    path, aside = tmp_path / "journal.sqlite", tmp_path / "aside.sqlite"
    code = f"""
import os
from pathlib import Path
from holdfast.core.records import TermBegan
from holdfast.journal import SqliteJournal
journal = SqliteJournal(Path({str(path)!r}))
list(journal.replay())
journal.append([TermBegan(at=0.0, term=1), TermBegan(at=0.0, term=2)])
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    set_aside(path, aside)
    assert [record.term for record in kept(aside)] == [1, 2]
    assert not path.exists() and not path.with_name(path.name + "-wal").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_a_journal_is_read_where_nothing_can_be_written(tmp_path: Path) -> None:
    directory = world_writable(tmp_path / "open") / "job"
    write(directory / "journal.sqlite", terms(1, 3))
    directory.chmod(0o555)
    (directory / "journal.sqlite").chmod(0o444)

    def read() -> None:
        if len(read_entries(directory / "journal.sqlite")) != 3:
            raise OSError

    assert as_stranger(read)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["a pipe", "a directory"])
def test_what_is_no_file_is_no_journal(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "journal.sqlite")
    with pytest.raises(JournalDamagedError, match="it is not a file"):
        read_entries(tmp_path / "journal.sqlite")
