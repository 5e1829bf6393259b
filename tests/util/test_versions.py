"""Versions of Python and torch: what is said of those that are not supported, and without torch."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from holdfast.util import versions
from holdfast.util.versions import PYTHON_TESTED, TORCH_TESTED, is_tested, torch_version, untested

SRC = Path(versions.__file__).resolve().parents[2]


def test_these_versions_are_tested_ones() -> None:
    assert untested(torch_version()) == ""
    assert is_tested("2.13.1+cu130", TORCH_TESTED) and not is_tested("2.1", TORCH_TESTED)


def test_untested_versions_are_named_with_the_tested_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert untested("2.9.0+cu128").startswith("torch 2.9.0+cu128: Holdfast is not tested with it, but with Python 3.11")
    monkeypatch.setattr(versions, "PYTHON_TESTED", ("3.10",))
    assert f"and torch {TORCH_TESTED[0]}.0: " not in untested("2.13.0") and "not tested with it" in untested("2.13.0")
    assert " and torch 2.9.0: Holdfast is not tested with them" in untested("2.9.0")


def test_the_project_file_and_the_page_name_the_same_versions() -> None:
    project, page = (SRC.parent / "pyproject.toml").read_text(), (SRC.parent / "docs/stability.md").read_text()
    for version in PYTHON_TESTED:
        assert f'"Programming Language :: Python :: {version}"' in project and f"Python {version}" in page
    for version in TORCH_TESTED:
        assert f"torch {version}" in page


def test_a_python_that_is_too_old_is_told_so_before_anything_else_is_read() -> None:
    code = "import sys; sys.version_info = (3, 9, 18, 'final', 0); sys.version = '3.9.18 (x)'; import holdfast"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: Holdfast needs Python 3.11 or newer, this is 3.9.18 (")


def test_without_torch_nothing_starts_but_programs_that_need_none(tmp_path: Path) -> None:
    """An environment with what Holdfast needs, by way of a path file, and without torch."""
    venv.create(tmp_path / "venv", symlinks=True)
    here = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    there = tmp_path / "venv" / here.relative_to(sys.prefix)
    for name in ("msgspec", "crc32c", "typer", "rich", "numpy"):
        for found in here.glob(f"{name}*"):
            (there / found.name).symlink_to(found)
    (there / "holdfast.pth").write_text(str(SRC))
    (tmp_path / "train.py").write_text("")
    python = str(tmp_path / "venv/bin/python")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [python, "-m", "holdfast", "run", "--standalone", "--state-dir", str(tmp_path / "state"), *words]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)

    done = run(str(tmp_path / "train.py"))
    sentence = f"holdfast: torch is not installed in the environment of Holdfast ({python}): install it there"
    assert done.returncode == 2 and done.stderr.startswith(sentence), done.stderr
    assert not (tmp_path / "state").exists(), "no job was made"
    done = run("--no-python", "/bin/true")
    assert done.returncode == 0, done.stderr
