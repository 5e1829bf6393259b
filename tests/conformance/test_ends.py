"""How jobs end, and where output goes: the same exit codes, error files, summaries, streams and files under both
launchers, but for what docs/torchrun.md says."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from functools import partial
from pathlib import Path

import pytest

from holdfast.core.records import WorkerFailedRecord
from support.jobs import SPAWN, free_port, kill9, marked_processes, wait_for, wait_until_nothing_left
from support.launches import DEADLINE_S, HERE, LAUNCHERS, both, documented, start

FAILS = str(HERE / "fails.py")
TWO = ("--nproc-per-node", "2")
SUMMARY = re.compile(r"^ +(rank|exitcode|error_file|traceback) *: ?(.*?) *$", re.MULTILINE)
HEADING = "What ends differently"
ENDS_DIFFERENTLY = {
    "exit code after a signal": "128 + the signal's number, not 1",
    "other workers in the summary": "left out: they were ended because of the failure",
    "error file of an exception without `@record`": "written all the same",
    "traceback of the exception that ends the job": "once, in the report; tests/e2e/test_console.py holds it",
    "files of streams that are not redirected": "written all the same",
    "a node that comes late to `--nnodes 1:2`": "the job has begun without it; it joins",
    "a file timer that expires": "restarts, where torchrun kills itself",
}
"""What differs on purpose, and how; the tests below hold each of them."""


def fields(text: str) -> list[tuple[str, str]]:
    """The summary's lines that do not depend on chance, in order of ranks."""
    found = [(name, re.sub(r"\(pid: \d+\) *", "", value)) for name, value in SUMMARY.findall(text)]
    failures = [found[i : i + 4] for i in range(0, len(found), 4)]
    return [field for failure in sorted(failures) for field in failure]


def summary(text: str) -> list[tuple[str, str]]:
    """The failures of the summary that are no consequence of another."""
    found = fields(text)
    blocks = [found[i : i + 4] for i in range(0, len(found), 4)]
    return [field for block in blocks if not block[1][1].startswith(f"-{int(signal.SIGTERM)}") for field in block]


def are_ready(directory: Path) -> bool:
    return len(list(directory.glob("ready-*"))) == 2


def test_an_exception_ends_a_job_as_under_torchrun(tmp_path: Path) -> None:
    """Exit code, error file and summary of a recorded function's exception; the launcher's own error file."""
    outer = {launcher: tmp_path / f"{launcher}.json" for launcher in LAUNCHERS}
    found, messages = {}, {}
    for launcher in LAUNCHERS:
        ours = ("--error-format", "torchrun") if launcher == "holdfast" else ()
        env = {"TORCHELASTIC_ERROR_FILE": str(outer[launcher])}
        launch = start(launcher, tmp_path, *TWO, *ours, FAILS, "raise", env=env)
        assert launch.exit_code() == 1
        error = json.loads(launch.file("attempt_0/1/error.json"))["message"]
        messages[launcher] = error["message"], sorted({*error["extraInfo"]} - {"timestamp_s", "exception"})
        found[launcher] = summary(launch.plain(launch.agent.stderr))
        assert (
            "Root Cause (first observed failure):" in launch.agent.stderr and "ChildFailedError" in launch.agent.stderr
        )
        assert [name for name in launch.files() if name.endswith(".json")] == ["attempt_0/1/error.json"]
    assert messages["holdfast"] == messages["torchrun"]
    assert found["holdfast"] == found["torchrun"] and found["holdfast"][1][0] == "exitcode"
    outermost = {launcher: json.loads(path.read_text())["message"]["message"] for launcher, path in outer.items()}
    assert outermost["holdfast"] == outermost["torchrun"] == messages["torchrun"][0]
    assert ENDS_DIFFERENTLY.keys() == documented(HEADING)


@pytest.mark.thorough
@pytest.mark.parametrize("words", [("exit", "7"), ("say",), ("signal", "9"), ("signal", "11")], ids=" ".join)
def test_a_worker_that_ends_badly_is_exit_code_1_and_in_the_summary(tmp_path: Path, words: tuple[str, ...]) -> None:
    found = []
    for launcher in LAUNCHERS:
        ours = ("--error-format", "torchrun") if launcher == "holdfast" else ()
        launch = start(launcher, tmp_path, *TWO, "-r", "3", *ours, FAILS, *words)
        assert launch.exit_code() == 1
        found.append(
            [field for field in summary(launch.plain(launch.agent.stderr)) if field[0] in ("rank", "exitcode")]
        )
        outputs = [launch.file(f"attempt_0/{rank}/{name}.log") for rank in (0, 1) for name in ("stdout", "stderr")]
        # Of the stack of a crash, which `@record` has Python print, the frames of the script.
        crash = [line for line in outputs[-1].splitlines() if FAILS in line]
        found[-1] += [
            ("output", text) for text in (outputs[:-1] + crash if "Current thread" in outputs[-1] else outputs)
        ]
    assert found[0] == found[1]
    assert found[0][0] == ("rank", "1 (local_rank: 1)")


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_ends_the_workers(tmp_path: Path, number: signal.Signals) -> None:
    codes, endings = {}, {}
    for launcher in LAUNCHERS:
        launch = start(launcher, tmp_path, *TWO, FAILS, "wait", "PLACE")
        wait_for(partial(are_ready, launch.place.directory), DEADLINE_S)
        launch.agent.send(number)
        codes[launcher] = launch.exit_code()
        endings[launcher] = launch.printed()
    assert codes == {"torchrun": 1, "holdfast": 128 + number}
    assert endings["holdfast"] == endings["torchrun"] == ["rank 0 is there", "rank 1 is there"]


@pytest.mark.thorough
def test_a_node_that_comes_late_joins_a_job_that_has_begun(tmp_path: Path) -> None:
    """torchrun would still wait for it: 30 s by default."""
    words = (
        "--nnodes",
        "1:2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{free_port()}",
        "--rdzv-id",
        "x",
    )
    first = start("holdfast", tmp_path, *words, "--node-id", "first", FAILS, "wait", "PLACE")
    wait_for((first.place.directory / "ready-0").exists, DEADLINE_S)
    assert not (first.place.directory / "ready-1").exists()
    second = start("holdfast", tmp_path, *words, "--node-id", "second", FAILS, "wait", "PLACE")
    wait_for((first.place.directory / "ready-1").exists, DEADLINE_S)
    assert first.place.journal.view() == 2
    for launch in (first, second):
        launch.agent.send(signal.SIGTERM)
    assert [launch.exit_code() for launch in (first, second)] == [128 + signal.SIGTERM] * 2


@pytest.mark.thorough
def test_a_file_timer_kills_the_worker(tmp_path: Path) -> None:
    """Both end the worker by the client's signal. torchrun's launcher ends itself, too, and leaves others behind."""
    env = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TMPDIR": str(tmp_path)}
    theirs = start("torchrun", tmp_path, *TWO, FAILS, "timer", env=env)
    assert theirs.exit_code() == -signal.SIGKILL
    kill9(*(process.pid for process in marked_processes()))
    wait_until_nothing_left()
    ours = start("holdfast", tmp_path, *TWO, "--max-restarts", "1", FAILS, "timer", env=env)
    assert ours.exit_code() == 1
    assert "its timer 'a slow part' expired" in ours.agent.stderr
    assert [record.failure.rank for record in ours.place.journal.of(WorkerFailedRecord)] == [1, 1], "one in each try"
    assert len(list(tmp_path.glob("watchdog_timer_*"))) == 1, "torchrun's"


CHOICES = {
    "a module, one stream a rank, a role": (
        *("-r", "0:1,1:2", "--role", "trainer", "-m", "conformance.tells", "x"),
        {"PYTHONPATH": str(HERE.parent)},
    ),
    "a path, filters, one rank shown": (
        *("-t", "3", "--local-ranks-filter", "1", "--duplicate-stdout-filters", "apple,x,,y"),
        *("--duplicate-stderr-filters", "orange", "--run-path", str(HERE / "tells.py"), "a b"),
        {},
    ),
    "a program, variables, a virtual local rank": (
        *("--no-python", sys.executable, str(HERE / "tells.py"), "--", "-x"),
        {
            "PET_VIRTUAL_LOCAL_RANK": "1",
            "PET_TEE": "1",
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name} ${rank}> ",
        },
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("choice", CHOICES)
def test_output_is_where_torchrun_puts_it(tmp_path: Path, choice: str) -> None:
    """The console, and every file that torchrun makes; ours has those of the other streams too."""
    *words, env = CHOICES[choice]
    assert isinstance(env, dict)
    theirs, ours = both(tmp_path, *TWO, *SPAWN, *map(str, words), env=dict(env))
    assert (ours.exit_code(), theirs.exit_code()) == (0, 0), ours.agent.stderr
    assert ours.printed() == theirs.printed()
    assert ours.complained() == theirs.complained()
    assert set(theirs.files()) <= set(ours.files())
    extra = set(ours.files()) - set(theirs.files())
    assert all(re.fullmatch(r"attempt_0/[01]/std(out|err)\.log", name) for name in extra)
    for name in theirs.files():
        assert sorted(ours.file(name).splitlines()) == sorted(theirs.file(name).splitlines()), name


@pytest.mark.thorough
def test_without_a_home_a_job_runs(tmp_path: Path) -> None:
    """HOME that cannot be written to, and a working directory that is not ours."""
    env = {"HOME": "/proc", "HOLDFAST_STATE_DIR": "", "TMPDIR": str(tmp_path), "HOLDFAST_PRELOAD": "none"}
    theirs, ours = both(tmp_path, "-t", "1", str(HERE / "tells.py"), env=env, cwd=Path("/"))
    assert (ours.exit_code(), theirs.exit_code()) == (0, 0), ours.agent.stderr
    assert ours.printed() == theirs.printed()
    assert f"the job's journal is in {tmp_path}/holdfast-{os.geteuid()}, which may not outlive a" in ours.agent.stderr
