"""What `holdfast run` says before anything starts of a script that is not there, and of how to go on after Ctrl-C."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from holdfast.cli.run import check_options, check_program, resume_command, run, without_message
from holdfast.cli.run_flags import parse_run
from holdfast.core.faults.failures import Exited, Failure
from holdfast.errors import UsageError


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nosuch.py"], "no script nosuch.py in {here}: give its path"),
        (["/no/such.py"], "no script /no/such.py"),
        (["-"], "a script cannot come from standard input, which all workers share: save it to a file"),
        (["--run-path", "nosuch.py"], "no script nosuch.py in {here}: give its path"),
        (
            ["-m", "nosuch.train"],
            "no module named nosuch: install it, or start from the directory that it is in, not {here}",
        ),
        (["."], ". is a directory without a __main__.py: give the path of a script"),
        (
            ["--no-python", "nosuch-program"],
            "no program nosuch-program: name one that is on PATH, or the path of one that can be executed",
        ),
    ],
)
def test_what_is_not_there_is_one_sentence(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as refused:
        check_program(parse_run(words, {}))
    assert str(refused.value) == sentence.format(here=tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        ["here.py"],
        ["package"],
        ["-m", "here"],
        ["-m", "timeit"],
        ["-m", "sys"],
        ["--no-python", "true"],
        ["--run-path", "package"],
    ],
)
def test_what_is_there_is_run(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here.py").touch()
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__main__.py").touch()
    monkeypatch.chdir(tmp_path)
    check_program(parse_run(words, {}))


class EditableFinder:
    """What `pip install --editable` puts into sys.meta_path for a package that is not below a path of its own."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name == "mapped" else None


def test_a_module_of_an_editable_install_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no module named mapped"):
        check_program(parse_run(["-m", "mapped.train"], {}))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, EditableFinder()])
    check_program(parse_run(["-m", "mapped.train"], {}))


def test_another_interpreter_may_have_other_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_program(parse_run(["-m", "nosuch.train"], {"PYTHON_EXEC": "/opt/python"}))


def test_nothing_starts_where_logs_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "here.py").touch()
    for place, why in ((tmp_path / "file/logs", "Not a directory"), (tmp_path / "file", "File exists")):
        words = ["--state-dir", str(tmp_path / "state"), "--log-dir", str(place), str(tmp_path / "here.py")]
        with pytest.raises(UsageError) as refused:
            check_options(parse_run(words, {}))
        assert str(refused.value) == f"--log-dir {place} cannot be made: {why}; name another directory"
    check_options(parse_run(["--log-dir", str(tmp_path / "a/b"), str(tmp_path / "here.py")], {}))
    assert (tmp_path / "a/b").is_dir() and not (tmp_path / "state").exists()


def test_nothing_starts_for_a_script_that_is_not_there(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holdfast", "run", "--standalone", "--state-dir", str(tmp_path / "state"), "no.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"holdfast: no script no.py in {tmp_path}: give its path\n"
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (
            ["--standalone", "train.py", "--lr", "0.1"],
            "holdfast run --rdzv-id train-1 --standalone train.py --lr 0.1",
        ),
        (["--rdzv-id", "mine", "train.py"], "holdfast run --rdzv-id mine train.py"),
        (["--role", "a b", "train.py"], "holdfast run --rdzv-id train-1 --role 'a b' train.py"),
    ],
)
def test_the_command_that_goes_on_names_the_job(words: list[str], command: str) -> None:
    assert resume_command(words, parse_run(words, {}), "train-1") == command


@pytest.mark.parametrize(
    ("exception", "traceback", "line"),
    [
        (
            "torch.OutOfMemoryError",
            "Traceback …",
            "job j failed: rank 0 exited with code 1: torch.OutOfMemoryError; end",
        ),
        ("", "Traceback …", "job j failed: rank 0 exited with code 1: Error: a, b; end"),
        ("ValueError", "", "job j failed: rank 0 exited with code 1: Error: a, b; end"),
    ],
)
def test_the_last_line_does_not_repeat_what_the_report_above_it_says(exception: str, traceback: str, line: str) -> None:
    cause = Failure(
        node_id="a",
        view=1,
        rank=0,
        local_rank=0,
        pid=1,
        end=Exited(1),
        failed_at=0.0,
        exception=exception,
        message="Error: a, b",
        traceback=traceback,
    )
    said = "job j failed: rank 0 exited with code 1: Error: a, b; end"
    assert without_message(said, cause) == line


def test_a_mistake_in_the_command_line_is_in_the_launchers_error_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error_file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    with pytest.raises(UsageError, match="nosuch"):
        run(["--rdzv-backend", "nosuch", "train.py"])
    assert "--rdzv-backend nosuch" in json.loads(error_file.read_text())["message"]["message"]
