"""`holdfast nodes`: the fault history of machines, and which of them no job may use."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from holdfast.cli import master
from holdfast.cli.main import run_app
from holdfast.core.health.reputation import MachineEventKind, NodeEvent, ban
from holdfast.errors import UsageError
from holdfast.journal import BOOK_NAME, MachineBook


def run(capsys: pytest.CaptureFixture[str], state_dir: Path, *words: str) -> tuple[int, str, str]:
    code = run_app(["nodes", *words, "--state-dir", str(state_dir)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_nothing_is_known_at_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, tmp_path, "ls") == (0, "no machine has a history yet\n", "")
    assert run(capsys, tmp_path, "ls", "-o", "json")[1].strip() == "[]"
    assert not (tmp_path / BOOK_NAME).exists(), "looking writes nothing"
    code, _, said = run(capsys, tmp_path, "history", "ghost")
    assert code == 1 and "machine ghost has no history" in said


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
    assert code == 1 and "neither cordoned nor banned" in said and "it is probation" in said
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
    book, now = MachineBook(tmp_path / BOOK_NAME), time.time()
    for machine, faults in (("good", 0), ("lemon", 3), ("once", 1)):
        book.note(machine, NodeEvent(at=now - 10, kind=MachineEventKind.CHECK_PASSED))
        for _ in range(faults):
            book.note(
                machine, NodeEvent(at=now - 5, kind=MachineEventKind.FAULT, fault="device-lost", weight=1.0, job_id="j")
            )
        if mark := ban(machine, book.history(machine), now, "job j"):
            book.mark(mark)
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


def test_a_cordon_of_a_machine_that_nobody_knows_is_said_and_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "was never seen here" in run(capsys, tmp_path, "cordon", "gpu-71")[1]
    assert "was never seen here" not in run(capsys, tmp_path, "cordon", "gpu-71")[1]
    (one,) = json.loads(run(capsys, tmp_path, "ls", "-o", "json")[1])
    assert (one["machine"], one["grade"]) == ("gpu-71", "cordoned")


def test_a_machine_that_failed_a_check_may_be_let_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = MachineBook(tmp_path / BOOK_NAME)
    failed = NodeEvent(
        at=time.time() - 9e4, kind=MachineEventKind.CHECK_FAILED, fault="check-failed", weight=1.0, job_id="j"
    )
    book.note("gpu-17", failed)
    (one,) = json.loads(run(capsys, tmp_path, "ls", "-o", "json")[1])
    assert (one["grade"], one["faults"], one["last_fault"]) == ("probation", 1, "check-failed")
    assert "a check of it failed" in one["why"]
    assert run(capsys, tmp_path, "uncordon", "gpu-17", "--why", "GPU replaced")[0] == 0
    (one,) = json.loads(run(capsys, tmp_path, "ls", "-o", "json")[1])
    assert one["why"].startswith("it was let back ")


PLUG_IN = """
from holdfast.platforms.local_platform import LocalPlatform

class Cluster(LocalPlatform):
    name = "cluster"
    def __init__(self, state_dir):
        super().__init__(state_dir / "elsewhere")
"""


def test_a_platform_of_ones_own_is_reached_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_cluster.py").write_text(PLUG_IN)
    info = tmp_path / "a_cluster-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: a-cluster\nVersion: 1.0\n")
    points = "cluster = a_cluster:Cluster\nbroken = no_such:Thing\n"
    (info / "entry_points.txt").write_text(f"[holdfast.platforms]\n{points}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HOLDFAST_PLATFORM", "cluster")
    assert run(capsys, tmp_path, "cordon", "gpu-17")[0] == 0
    assert (tmp_path / "elsewhere" / BOOK_NAME).exists()
    options = master._parser().parse_args(["--job-id", "j", "--state-dir", str(tmp_path)])
    assert list(master._machine_registry(options)._platform.unschedulable()) == ["gpu-17"]  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="there is no such platform; known are local, cluster, broken"):
        run(capsys, tmp_path, "ls", "--platform", "nowhere")
    with pytest.raises(UsageError, match="it failed to load"):
        run(capsys, tmp_path, "ls", "--platform", "broken")
