"""`holdfast data verify` on journals as they may be: whole, with gaps, changed, of other data, of nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.cli.main import build_app
from holdfast.core.events import DataSource
from holdfast.core.records import (
    DataAnnouncedRecord,
    DataSkippedRecord,
    DurableRecord,
    JobCreated,
    StepsAudited,
    ViewFormed,
)
from holdfast.core.sample_audit import START, link, link_unaudited
from holdfast.core.settings import Settings
from holdfast.core.views import View
from holdfast.data.sample_digest import planned_digests
from holdfast.errors import JournalDamagedError
from holdfast.journal import SqliteJournal
from holdfast.observe.sample_audit_report import plan_of


def source(**changes: Any) -> DataSource:
    known: dict[str, Any] = {
        "name": "data",
        "size": 103,
        "seed": "0",
        "global_batch_size": 8,
        "slots": 8,
        "shuffle": True,
        "last_batch": "short",
        "locality": (),
        "fingerprint": "",
    }
    return DataSource(**(known | changes))


def view(number: int, keeps_workers: bool = False) -> ViewFormed:
    made = View(
        number=number,
        members=(),
        world_size=1,
        store_node_id="a",
        store_host="",
        store_port=1,
        restart_count=0,
        keeps_workers=keeps_workers,
    )
    return ViewFormed(at=1.0, view=made, why="")


@dataclass
class Told:
    """A journal in the making."""

    state_dir: Path
    job_id: str = "job"
    records: list[DurableRecord] = field(default_factory=list)
    chain: bytes = START

    def begin(self, number: int = 1, **changes: Any) -> Told:
        self.chain = START
        self.since, self.source = number, source(**changes)
        self.records += [view(number), DataAnnouncedRecord(at=1.0, view=number, sources=(self.source,))]
        return self

    def steps(self, first: int, last: int, *, unknown: tuple[int, ...] = (), skipped: tuple[int, ...] = ()) -> Told:
        samples = 0
        for step, count, total in planned_digests(plan_of(self.source), range(first, last + 1)):
            if step in skipped:
                continue
            self.chain = link_unaudited(self.chain, step) if step in unknown else link(self.chain, step, count, total)
            samples += 0 if step in unknown else count
        self.records.append(
            StepsAudited(
                at=1.0,
                since_view=self.since,
                source=0,
                first_step=first,
                last_step=last,
                samples=samples,
                chain=self.chain.hex(),
                unaudited=tuple((step, step) for step in unknown),
                skipped=((skipped[0], skipped[-1]),) if skipped else (),
            )
        )
        return self

    def skip(self, first: int, end: int) -> Told:
        self.records.append(
            DataSkippedRecord(
                at=1.0, view=self.since, source=0, name="data", first_step=first, end_step=end, why="spike"
            )
        )
        return self

    def write(self) -> Path:
        path = self.state_dir / "jobs" / self.job_id / "journal.sqlite"
        journal = SqliteJournal(path)
        assert not list(journal.replay())
        journal.append([JobCreated(at=0.0, job_id=self.job_id, settings=Settings()), *self.records])
        journal.close()
        return path


def verify(state_dir: Path, *words: str) -> tuple[int, list[tuple[str, int, int]]]:
    """Exit code, and what is wrong; as text and for programs alike."""
    command = ["data", "verify", "--state-dir", str(state_dir), *words]
    text = CliRunner().invoke(build_app(), command)
    result = CliRunner().invoke(build_app(), [*command, "-o", "json"])
    assert text.exit_code == result.exit_code, text.output
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    answer = json.loads(result.stdout)
    assert answer["exact"] is (result.exit_code == 0) is ("exact: every step" in text.stdout)
    assert all(finding["text"] in text.stdout for finding in answer["findings"])
    return result.exit_code, [(f["kind"], f["first_step"], f["last_step"]) for f in answer["findings"]]


def test_a_whole_journal_is_exact(tmp_path: Path) -> None:
    Told(tmp_path).begin().steps(0, 4).steps(5, 40).write()
    assert verify(tmp_path) == (0, [])


@pytest.mark.parametrize("changes", [{"seed": "7"}, {"size": 104}, {"shuffle": False}, {"locality": (10, 2)}])
def test_another_plan_than_was_handed_out_is_found(tmp_path: Path, changes: dict[str, Any]) -> None:
    told = Told(tmp_path).begin().steps(0, 4).steps(5, 9)
    told.records[1] = DataAnnouncedRecord(at=1.0, view=1, sources=(source(**changes),))
    told.write()
    assert verify(tmp_path) == (1, [("differs", 0, 4)])


def test_the_first_piece_that_differs_is_named(tmp_path: Path) -> None:
    told = Told(tmp_path).begin().steps(0, 4)
    told.chain = link(told.chain, 0, 1, 1)
    told.steps(5, 9).steps(10, 14).write()
    assert verify(tmp_path) == (1, [("differs", 5, 9)])


def test_what_was_not_audited_is_named_and_the_rest_is_judged(tmp_path: Path) -> None:
    told = Told(tmp_path).begin().steps(0, 9, unknown=(3,)).steps(10, 20)
    path = told.write()
    assert verify(tmp_path) == (1, [("unaudited", 3, 3)])
    whole = Told(tmp_path, "whole").begin().steps(0, 15).write()
    assert verify(tmp_path, "whole", "--against", str(path)) == (1, [("unaudited", 3, 3)])
    assert whole.exists()


def test_skips_are_exact_if_somebody_asked(tmp_path: Path) -> None:
    Told(tmp_path, "asked").begin().skip(4, 6).skip(6, 8).steps(0, 9, skipped=(4, 5, 6, 7)).write()
    assert verify(tmp_path, "asked") == (0, [])
    Told(tmp_path, "unasked").begin().skip(4, 6).steps(0, 9, skipped=(4, 5, 6, 7)).write()
    assert verify(tmp_path, "unasked") == (1, [("unexplained", 4, 7)])
    Told(tmp_path, "whole").begin().steps(0, 9).write()
    assert verify(tmp_path, "whole", "--against", "asked") == (1, [("differs", 4, 4)])


def test_a_later_start_goes_on_or_leaves_a_hole(tmp_path: Path) -> None:
    Told(tmp_path, "back").begin().steps(0, 9).begin(4).steps(6, 20).write()
    Told(tmp_path, "hole").begin().steps(0, 9).begin(4).steps(12, 20).write()
    Told(tmp_path, "whole").begin().steps(0, 20).write()
    assert verify(tmp_path, "back") == (0, [])
    assert verify(tmp_path, "back", "--against", "whole") == (0, [])
    assert verify(tmp_path, "hole") == (1, [("missing", 10, 11)])


def test_two_jobs_are_told_apart_at_the_first_step_that_differs(tmp_path: Path) -> None:
    Told(tmp_path, "one").begin().steps(0, 30).write()
    Told(tmp_path, "same").begin(slots=2, fingerprint="v1").steps(0, 12).steps(13, 25).write()
    Told(tmp_path, "across").begin(last_batch="across").steps(0, 30).write()
    assert verify(tmp_path, "one", "--against", "same") == (0, [])
    assert verify(tmp_path, "one", "--against", "across") == (1, [("differs", 12, 12)])


def test_a_journal_without_audit_records_proves_nothing(tmp_path: Path) -> None:
    Told(tmp_path).write()
    assert verify(tmp_path) == (1, [("missing", 0, 0)])


def test_a_journal_that_was_edited_is_not_read(tmp_path: Path) -> None:
    path = Told(tmp_path).begin().steps(0, 4).write()
    import sqlite3

    db = sqlite3.connect(path)
    db.execute("UPDATE records SET body = replace(body, '\"last_step\":4', '\"last_step\":5')")
    db.commit()
    db.close()
    with pytest.raises(JournalDamagedError):
        verify(tmp_path)
