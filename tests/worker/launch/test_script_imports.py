"""Which imports of a script may be done ahead: those it begins with, of installed packages, that nothing prepares."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast.worker.launch.script_imports import ScriptImport, locate, script_imports
from support.nest import write

PACKAGES = ("alpha", "beta")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, beside a site directory with two packages."""
    for name in PACKAGES:
        write(tmp_path / "site-packages" / name / "__init__.py", "raise RuntimeError('nothing is imported')")
    write(tmp_path / "site-packages" / "mpi4py.py", "")
    write(tmp_path / "elsewhere" / "checkout.py", "")
    directory = tmp_path / "work"
    write(directory / "neighbour.py", "")
    monkeypatch.chdir(directory)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site-packages"), str(tmp_path / "elsewhere"), *sys.path])
    return directory


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import alpha", ["alpha"]),
        ("import alpha.part, beta as b", ["alpha.part", "beta"]),
        ("'''Trains.'''\nfrom __future__ import annotations\nimport os, json\nimport alpha", ["alpha"]),
        ("from alpha import *", ["alpha"]),
        ("N = 3\nNAMES: list[str] = ['a']\ndef f():\n    g()\nimport alpha", ["alpha"]),
        ("try:\n    import beta\nexcept ImportError:\n    beta = None\nimport alpha", ["alpha"]),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import beta\nimport alpha", ["alpha"]),
        ("import mpi4py\nimport alpha", ["alpha"]),
        # what may prepare an import ends the reading
        ("import os, beta\nos.environ['A'] = '1'\nimport alpha", ["beta"]),
        ("import os\nos.environ.setdefault('A', '1')\nimport alpha", []),
        ("if f():\n    pass\nimport alpha", []),
        ("with a():\n    pass\nimport alpha", []),
        ("class A: pass\nimport alpha", []),
        ("@decorator\ndef f(): pass\nimport alpha", []),
        ("def f(x=g()): pass\nimport alpha", []),
        ("import neighbour\nimport alpha", []),
        ("from neighbour import x\nimport alpha", []),
        ("from .sibling import x\nimport alpha", []),
        ("import checkout\nimport alpha", []),
        ("import absent\nimport alpha", []),
        ("try:\n    import neighbour\nexcept ImportError: pass\nimport alpha", []),
        ("if __name__ == '__main__':\n    import alpha", []),
        ("import alpha\nthis is no Python", []),
    ],
)
def test_what_is_taken(work: Path, source: str, expected: list[str]) -> None:
    write(work / "train.py", source)
    assert [one.module for one in script_imports(locate("script", "train.py"))] == expected


def test_names_are_taken_with_their_module(work: Path) -> None:
    write(work / "train.py", "from alpha.models import Small, Large")
    assert script_imports(locate("script", "train.py")) == [ScriptImport("alpha.models", ("Small", "Large"))]


def test_a_neighbour_of_the_same_name_is_the_scripts_own(work: Path) -> None:
    write(work / "alpha.py", "")
    write(work / "train.py", "import alpha, beta")
    assert script_imports(locate("script", "train.py")) == []


def test_a_directory_of_the_same_name_is_not(work: Path) -> None:
    write(work / "alpha" / "rows.csv", "")
    write(work / "train.py", "import alpha")
    assert script_imports(locate("script", "train.py")) == [ScriptImport("alpha")]


def test_a_module_is_found_without_importing_its_packages(work: Path) -> None:
    write(work / "lab" / "__init__.py", "import beta\nraised = 1 // 1")
    write(work / "lab" / "train.py", "import alpha\nfrom lab import model")
    assert [one.module for one in script_imports(locate("module", "lab.train"))] == ["beta", "alpha"]
    assert "lab" not in sys.modules


def test_a_package_is_run_by_its_main_module_after_its_init(work: Path) -> None:
    write(work / "lab" / "__init__.py", "configure()")
    write(work / "lab" / "__main__.py", "import alpha")
    assert script_imports(locate("module", "lab")) == []
    write(work / "lab" / "__init__.py", "")
    assert [one.module for one in script_imports(locate("module", "lab"))] == ["alpha"]


@pytest.mark.parametrize("kind", ["script", "module", "path"])
def test_what_is_not_there_has_no_imports(work: Path, kind: str) -> None:
    assert script_imports(locate(kind, "nowhere")) == []  # type: ignore[arg-type]
