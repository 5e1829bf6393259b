"""`holdfast init`: what it writes, and what it leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from holdfast.cli.init_script import TEMPLATES, Template
from holdfast.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["init", *words])
    return int(ended.value.code or 0)


@pytest.mark.parametrize("template", Template)
def test_a_template_is_written_with_the_command_that_runs_it(
    template: Template, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    assert run(str(path), "--template", template.value) == 0
    text = path.read_text()
    compile(text, str(path), "exec")
    assert "import holdfast as hf" in text and "train.py" not in text and "mine.py" in text and "TODO" in text
    assert f"holdfast run --standalone --nproc-per-node 2 --spares 1 {path}" in capsys.readouterr().out


def test_the_default_is_a_ddp_script_named_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run() == 0 and "DistributedDataParallel(" in Path("train.py").read_text()


@pytest.mark.parametrize("kind", ["file", "link", "directory"])
def test_what_is_there_stays(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, other = tmp_path / "train.py", tmp_path / "other"
    other.write_text("mine")
    match kind:
        case "file":
            path.write_text("mine")
        case "link":
            path.symlink_to(other)
        case _:
            path.mkdir()
    assert run(str(path)) == 2
    assert f"{path} is there already: name another file" in capsys.readouterr().err
    assert other.read_text() == "mine" and (kind == "directory" or path.read_text() == "mine")


def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(tmp_path / "nowhere/train.py")) == 2
    assert (
        capsys.readouterr().err
        == f"holdfast: {tmp_path}/nowhere/train.py cannot be written: No such file or directory\n"
    )


def test_a_template_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(tmp_path / "train.py"), "--template", "jax") == 2
    assert "huggingface" in capsys.readouterr().err and not (tmp_path / "train.py").exists()


def test_the_templates_are_installed_with_the_package() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["holdfast"]
    assert f"{TEMPLATES.relative_to(TEMPLATES.parents[1])}/*.py" in data
    assert sorted(path.stem.removeprefix("train_") for path in TEMPLATES.glob("*.py")) == sorted(Template)


def test_writing_a_template_imports_no_torch(tmp_path: Path) -> None:
    code = "import sys; from holdfast.cli.main import run_app; run_app(['init', 'x.py']); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ}, capture_output=True, text=True
    )
    assert done.stdout.endswith("False\n"), done.stderr
