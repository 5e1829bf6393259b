"""`holdfast nodes`: what is known of machines, and which no job is to have."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from holdfast.cli.app import run_app
from holdfast.core.health.reputation import Kind, NodeEvent
from holdfast.journal import BOOK_NAME, NodeBook


def run(capsys: pytest.CaptureFixture[str], state_dir: Path, *words: str) -> tuple[int, str, str]:
    code = run_app(["nodes", *words, "--state-dir", str(state_dir)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_nothing_is_known_at_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, tmp_path, "ls") == (0, "nothing is known of any machine yet\n", "")
    assert run(capsys, tmp_path, "ls", "-o", "json")[1].strip() == "[]"
    assert not (tmp_path / BOOK_NAME).exists(), "looking writes nothing"
    code, _, said = run(capsys, tmp_path, "history", "ghost")
    assert code == 1 and "nothing is known of machine ghost" in said


def test_cordon_and_uncordon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, tmp_path, "cordon", "gpu-17", "--why", "its fan is loud")[0] == 0
    (one,) = json.loads(run(capsys, tmp_path, "ls", "-o", "json")[1])
    assert (one["machine"], one["grade"]) == ("gpu-17", "cordoned") and "its fan is loud" in one["why"]
    assert "cordoned" in run(capsys, tmp_path, "ls")[1]
    assert run(capsys, tmp_path, "uncordon", "gpu-17", "--why", "fan replaced")[0] == 0
    (one,) = json.loads(run(capsys, tmp_path, "ls", "-o", "json")[1])
    assert one["grade"] == "probation" and one["mark"] is None
    assert one["why"].startswith("it was let back "), "it never had a fault"
    code, _, said = run(capsys, tmp_path, "uncordon", "gpu-17")
    assert code == 1 and "neither cordoned nor banned" in said
    lines = run(capsys, tmp_path, "history", "gpu-17")[1].splitlines()
    assert len(lines) == 2 and "its fan is loud" in lines[0] and "fan replaced" in lines[1]


@pytest.mark.parametrize("name", ["", " ", "gpu 17", "gpu\n17", "\x1b[31m", "g" * 256])
def test_a_name_that_no_machine_can_have_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, said = run(capsys, tmp_path, "cordon", name)
    assert code == 1 and "no machine is called" in said
    assert json.loads(run(capsys, tmp_path, "ls", "-o", "json")[1]) == []


def test_the_doubtful_come_first_and_a_lemon_is_let_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book, now = NodeBook(tmp_path / BOOK_NAME), time.time()
    for machine, faults in (("good", 0), ("lemon", 3), ("once", 1)):
        book.note(machine, NodeEvent(at=now - 10, kind=Kind.CHECK_PASSED))
        for _ in range(faults):
            book.note(machine, NodeEvent(at=now - 5, kind=Kind.FAULT, fault="device-lost", weight=1.0, job_id="j"))
    listed = json.loads(run(capsys, tmp_path, "ls", "-o", "json")[1])
    assert [(one["machine"], one["grade"]) for one in listed] == [
        ("lemon", "banned"),
        ("once", "probation"),
        ("good", "good"),
    ]
    assert run(capsys, tmp_path, "uncordon", "lemon")[0] == 0
    assert run(capsys, tmp_path, "ls")[1].count("probation") == 2
    told = [json.loads(line) for line in run(capsys, tmp_path, "history", "-o", "json")[1].splitlines()]
    assert {line["machine"] for line in told} == {"good", "lemon", "once"}
