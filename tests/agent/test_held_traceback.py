"""The traceback of a worker that dies of an exception is on the console once, and is never lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.agent import held_traceback
from holdfast.agent.held_traceback import HeldTraceback, ReportAtEnd
from holdfast.core.faults.failures import Exited, Failure

TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    raise ValueError("first line\\nsecond line")
ValueError: first line
second line"""


def failure(error_file: Path, traceback: str = TRACEBACK) -> Failure:
    return Failure(
        node_id="a",
        view=1,
        rank=0,
        local_rank=0,
        pid=1,
        end=Exited(1),
        failed_at=0.0,
        error_file=str(error_file),
        traceback=traceback,
    )


class Console:
    """What a console shows of a worker that has failed with an exception, or is about to."""

    def __init__(self, directory: Path, *, has_failed: bool = True) -> None:
        self.error_file = directory / "error.json"
        self.report = ReportAtEnd()
        self.held = HeldTraceback(self.error_file, self.report)
        self.shown = ""
        if has_failed:
            written = {"message": "", "extraInfo": {"py_callstack": TRACEBACK + "\n"}}
            self.error_file.write_text(json.dumps({"message": written}))

    def write(self, text: str) -> None:
        self.shown += self.held.feed(text.encode()).decode()

    def wait(self, *, is_last: bool = False) -> None:
        self.shown += self.held.due(is_last).decode()

    def end(self, *, error_file: Path | None = None, traceback: str = TRACEBACK) -> None:
        self.report.decide(failure(error_file or self.error_file, traceback))
        self.wait()


@pytest.mark.parametrize("prefix", ["", "[rank1]: "])
def test_a_traceback_that_the_report_shows_is_not_shown_above_it(tmp_path: Path, prefix: str) -> None:
    console = Console(tmp_path)
    console.write("a warning\n")
    for line in TRACEBACK.splitlines():
        console.write(f"{prefix}{line}\n")
        console.wait()
    console.write("the last words of a library\n")
    assert console.held.is_holding
    console.end()
    assert console.shown == "a warning\nthe last words of a library\n" and not console.held.is_holding


def test_a_traceback_that_comes_after_the_decision_is_not_shown_either(tmp_path: Path) -> None:
    console = Console(tmp_path)
    console.end()
    console.write(f"{TRACEBACK}\n")
    console.wait(is_last=True)
    assert console.shown == ""


def test_a_traceback_that_the_job_survives_is_shown_when_the_next_worker_starts(tmp_path: Path) -> None:
    console = Console(tmp_path)
    console.write(f"{TRACEBACK}\n")
    console.wait()
    assert console.shown == ""
    console.wait(is_last=True)
    assert console.shown == f"{TRACEBACK}\n"


def test_a_traceback_of_another_worker_than_the_reported_one_is_shown(tmp_path: Path) -> None:
    console = Console(tmp_path)
    console.write(f"{TRACEBACK}\n")
    console.end(error_file=tmp_path / "1" / "error.json")
    assert console.shown == f"{TRACEBACK}\n"


def test_a_traceback_that_the_report_cuts_short_is_shown(tmp_path: Path) -> None:
    console = Console(tmp_path)
    console.write(f"{TRACEBACK}\n")
    console.end(traceback="Traceback (most recent call last):\n… cut here …\nsecond line")
    assert console.shown == f"{TRACEBACK}\n"


def test_a_run_that_ends_without_a_report_shows_it(tmp_path: Path) -> None:
    console = Console(tmp_path)
    console.write(f"{TRACEBACK}\n")
    console.report.decide(None)
    console.wait()
    assert console.shown == f"{TRACEBACK}\n"
    console.report.decide(failure(console.error_file))
    console.write(f"{TRACEBACK}\n")
    console.wait()
    assert console.shown == f"{TRACEBACK}\n" * 2, "the first decision counts"


def test_a_traceback_that_nothing_follows_from_is_shown_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_traceback, "COMPLETE_HELD_S", 0.0)
    console = Console(tmp_path)
    console.write(f"{TRACEBACK}\n")
    console.wait()
    assert console.shown == f"{TRACEBACK}\n"


@pytest.mark.parametrize("is_last", [False, True])
def test_the_beginning_of_a_traceback_is_shown_if_no_more_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_last: bool
) -> None:
    monkeypatch.setattr(held_traceback, "PARTIAL_HELD_S", 1000.0 if is_last else 0.0)
    console = Console(tmp_path)
    console.write(TRACEBACK.partition("\n")[0] + "\n")
    console.report.decide(failure(console.error_file))
    console.wait(is_last=is_last)
    assert console.shown == TRACEBACK.partition("\n")[0] + "\n"


def test_another_traceback_than_the_workers_own_is_shown_at_once(tmp_path: Path) -> None:
    other = TRACEBACK.replace("line 3", "line 4") + "\n"
    console = Console(tmp_path)
    console.write(other + TRACEBACK + "\n")
    assert console.shown == other
    console.end()
    assert console.shown == other


@pytest.mark.parametrize("content", ["", "{", "[]", '{"message": "text"}', '{"message": {"extraInfo": {}}}'])
def test_without_an_error_file_of_this_form_all_is_shown_at_once(tmp_path: Path, content: str) -> None:
    console = Console(tmp_path, has_failed=False)
    console.write(f"{TRACEBACK}\n")
    console.error_file.write_text(content)
    console.write(f"{TRACEBACK}\n")
    assert console.shown == f"{TRACEBACK}\n" * 2
