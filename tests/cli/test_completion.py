"""Shell completion: what each word may become, and that a real bash offers it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli.completion import SCRIPTS, candidates
from holdfast.cli.main import main
from holdfast.cli.run_flag_table import FLAGS
from support.scenario import JobOnDisk


def names(*words: str) -> list[str]:
    return [name for name, _ in candidates(words)]


def test_commands_are_completed() -> None:
    assert names("st") == ["stacks", "status"]
    assert {"run", "jobs", "explain", "completion"} <= set(names(""))
    assert names("checkpoints", "p") == ["pin", "prune"]
    assert "complete-words" not in names("")


def test_every_flag_of_run_is_completed() -> None:
    assert set(names("run", "--")) == {flag.name for flag in FLAGS} | {"--help"}
    assert names("run", "--standalone", "--nproc") == ["--nproc-per-node"]
    assert names("run", "--nnodes", "2:4", "--nproc") == ["--nproc-per-node"]
    assert names("run", "--nnodes=2:4", "-m", "--spare-") == ["--spare-nodes"]
    assert names("check", "--accel") == ["--accelerator"]


def test_values_are_completed() -> None:
    assert names("run", "--start-method", "") == ["spawn", "fork", "forkserver"]
    assert names("status", "-o", "j") == ["json"]
    assert names("jobs", "prune", "--older-than", "") == []


def test_the_script_of_run_and_its_arguments_are_left_to_the_shell() -> None:
    assert names("run", "tr") == names("run", "--standalone", "train.py", "--") == names("run", "--log-dir", "") == []


def test_options_of_other_commands_are_completed() -> None:
    assert names("jobs", "prune", "--dr") == ["--dry-run"]
    assert {"--output", "--watch", "--help"} <= set(names("status", "--"))


def test_jobs_are_completed_the_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_STATE_DIR", str(tmp_path))
    for number, name in enumerate(("train-1", "train-2", "other")):
        job = JobOnDisk(tmp_path, name).close()
        for path in job.path.parent.iterdir():
            os.utime(path, (1_000 + number,) * 2)
    assert names("events", "train") == names("jobs", "rm", "other", "train") == ["train-2", "train-1"]
    monkeypatch.setenv("HOLDFAST_STATE_DIR", "~no-such-user/x")
    assert names("events", "train") == []


def test_nonsense_completes_to_nothing() -> None:
    assert names("nosuch", "--x", "-") == names("run", "--nosuch", "--") == names("jobs", "rm", "--state-dir", "") == []


@pytest.mark.parametrize("words", [[], ["tcsh"], ["bash", "zsh"]], ids=["none", "unknown", "two"])
def test_a_shell_that_is_none_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["completion", *words])
    assert ended.value.code == 2 and "bash, zsh" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [("holdfast run --nproc", "--nproc-per-node"), ("holdfast sta", "stacks status"), ("holdfast run tra", "train.py")],
)
def test_bash_offers_it(tmp_path: Path, words: str, expected: str) -> None:
    """A real bash, asked as its line editor asks; file names are its own doing."""
    (tmp_path / "holdfast").write_text(f'#!/bin/sh\nexec {sys.executable} -m holdfast "$@"\n')
    (tmp_path / "holdfast").chmod(0o755)
    (tmp_path / "train.py").touch()
    script = f"""
    eval "$(holdfast completion bash)"
    COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
    _holdfast
    complete -p holdfast | grep -q -- '-o default' || exit 9
    if (( ${{#COMPREPLY[@]}} )); then echo "${{COMPREPLY[@]}}"; else compgen -f "${{COMP_WORDS[COMP_CWORD]}}"; fi
    """
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "--norc", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_is_read_by_it(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-n"], input=SCRIPTS[shell], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
