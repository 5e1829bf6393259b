"""`holdfast` itself: the version, and errors as sentences with exit codes."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import holdfast
from holdfast.cli.main import main
from support.processes import environment

HOLDFAST = (sys.executable, "-m", "holdfast")
PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


@pytest.mark.parametrize("word", ["--version", "version"])
def test_the_version_is_that_of_pyproject(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([word])
    assert ended.value.code == 0
    printed = capsys.readouterr().out.strip()
    assert printed == holdfast.__version__ == tomllib.loads(PYPROJECT.read_text())["project"]["version"]


def test_the_version_is_written_in_one_place() -> None:
    version = re.escape(holdfast.__version__)
    package = Path(holdfast.__file__).parent
    assert not [path for path in package.rglob("*.py") if re.search(rf"[\"']{version}[\"']", path.read_text())]


def test_a_users_mistake_is_a_sentence_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["status", "--state-dir", str(tmp_path)])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"holdfast: there is no job in {tmp_path}: start one with `holdfast run`")


@pytest.mark.parametrize(
    "words", [["train.py", "--lr", "0.1 0.2"], ["--nproc_per_node=2", "train.py"], ["-t", "3", "train.py"]]
)
def test_a_script_without_run_is_told_how_it_is_started(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"; a script is started by holdfast run {shlex.join(words)}\n")
    with pytest.raises(SystemExit):
        main(["stat"])
    assert capsys.readouterr().err.endswith("; holdfast --help says what there is\n")


def test_finding_the_command_imports_little() -> None:
    code = "import sys, holdfast.cli.main; print(*{name.split('.')[0] for name in sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"torch", "grpc", "structlog", "typer", "rich", "numpy", "asyncio", "logging"}.isdisjoint(found)


@pytest.mark.parametrize(
    ("redirection", "variables", "code", "said"),
    [
        (">/dev/full", {}, 1, "holdfast: No space left on device\n"),
        (">&-", {}, 0, ""),
        (">&- 2>&-", {}, 0, ""),
        ("| true", {}, 0, ""),
        (">/dev/null", {"PYTHONIOENCODING": "ascii:strict"}, 0, ""),
    ],
)
def test_an_output_that_takes_nothing_is_no_traceback(
    tmp_path: Path, redirection: str, variables: dict[str, str], code: int, said: str
) -> None:
    command = ["sh", "-c", f'"$@" {redirection}', "sh", *HOLDFAST, "init", "\N{GREEK SMALL LETTER PI}.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(**variables), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (code, said)


def test_what_is_interrupted_ends_without_a_traceback(tmp_path: Path) -> None:
    words = ["master", "--job-id", "a", "--port", "0", "--state-dir", str(tmp_path), "--log-format", "text"]
    with subprocess.Popen([*HOLDFAST, *words], env=environment(), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and "listens on" in process.stderr.readline()
        os.kill(process.pid, signal.SIGINT)
        said = process.stderr.read()
    assert (process.returncode, said) == (128 + signal.SIGINT, "")
