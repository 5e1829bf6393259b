"""The book of nodes: what is known of machines across jobs."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.core.health.reputation import CordonMark, MachineEventKind, NodeEvent
from holdfast.errors import JournalError
from holdfast.journal.machines import EVENTS_KEPT_MAX, MachineBook
from holdfast.platforms.local_platform import LocalPlatform
from holdfast.platforms.platform import open_platform

FAULT = NodeEvent(
    at=1.0, kind=MachineEventKind.FAULT, fault="driver-error", weight=1.0, job_id="a", why="it did not answer"
)


def test_what_is_noted_is_found_by_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "nodes.sqlite"
    assert MachineBook(path).history("m") == [] and not path.exists()
    MachineBook(path).note("m", FAULT)
    MachineBook(path).note("other", FAULT)
    assert MachineBook(path).history("m") == [FAULT]
    assert MachineBook(path).machines() == ["m", "other"]


def test_a_history_is_bounded_and_loses_the_oldest(tmp_path: Path) -> None:
    book = MachineBook(tmp_path / "nodes.sqlite")
    for at in range(EVENTS_KEPT_MAX + 3):
        book.note("m", NodeEvent(at=float(at), kind=MachineEventKind.FAULT))
    book.note("other", FAULT)
    assert [event.at for event in book.history("m")] == [float(at) for at in range(3, EVENTS_KEPT_MAX + 3)]
    assert len(book.history("other")) == 1


def test_several_writers_at_once(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from holdfast.core.health.reputation import MachineEventKind, NodeEvent
from holdfast.journal.machines import MachineBook
book = MachineBook(Path(sys.argv[1]))
for at in range(20):
    book.note(sys.argv[2], NodeEvent(at=float(at), kind=MachineEventKind.FAULT))
"""
    path = tmp_path / "nodes.sqlite"
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), name]) for name in "abc"]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    assert [len(MachineBook(path).history(name)) for name in "abc"] == [20, 20, 20]


def test_a_file_of_another_kind_or_version_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nodes.sqlite"
    path.write_text("this is no database, and never was")
    with pytest.raises(JournalError, match=r"nodes\.sqlite"):
        MachineBook(path).history("m")
    path.unlink()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version=9")
    db.close()
    with pytest.raises(JournalError, match="has format 9"):
        MachineBook(path).note("m", FAULT)


def test_the_local_platform_keeps_a_deny_list(tmp_path: Path) -> None:
    now = [100.0]
    platform = LocalPlatform(tmp_path, clock=lambda: now[0])
    forever = CordonMark(machine="m", at=90.0, by="ada", why="loud")
    a_while = CordonMark(machine="n", at=90.0, by="job a", why="it keeps failing", until=150.0)
    platform.mark_unschedulable(forever)
    platform.mark_unschedulable(a_while)
    assert LocalPlatform(tmp_path, clock=lambda: now[0]).unschedulable() == {"m": forever, "n": a_while}
    now[0] = 200.0
    assert platform.unschedulable() == {"m": forever}
    assert platform.mark_schedulable("m") and not platform.mark_schedulable("m")
    assert platform.unschedulable() == {}


def test_annotations(tmp_path: Path) -> None:
    platform = open_platform("local", tmp_path)
    assert platform.annotations("m") == {}
    platform.annotate("m", {"rack": "3", "ticket": "17"})
    platform.annotate("m", {"ticket": "18"})
    assert platform.annotations("m") == {"rack": "3", "ticket": "18"}


@pytest.mark.parametrize("change", ["kind = 'nonsense'", "at = 'yesterday'", "weight = x'00'"])
def test_a_row_that_another_program_has_changed_is_a_sentence(tmp_path: Path, change: str) -> None:
    book = MachineBook(tmp_path / "nodes.sqlite")
    book.note("m", FAULT)
    with sqlite3.connect(book.path) as db:
        db.execute(f"UPDATE events SET {change}")
    with pytest.raises(JournalError, match="is damaged"):
        book.history("m")


def test_a_name_that_is_not_text_any_more_is_a_sentence(tmp_path: Path) -> None:
    book = MachineBook(tmp_path / "nodes.sqlite")
    book.note("m", FAULT)
    with sqlite3.connect(book.path) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    book.path.write_bytes(book.path.read_bytes().replace(b"CREATE TABLE events", b"CREATE T\xd9BLE events"))
    with pytest.raises(JournalError, match="cannot be used"):
        book.history("m")
