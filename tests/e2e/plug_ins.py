"""Plug-ins for tests: real distributions with entry points, in a directory that goes onto PYTHONPATH."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

LAB = Path(__file__).parent / "lab" / "holdfast_lab.py"
METADATA = "Metadata-Version: 2.1\nName: holdfast-lab\nVersion: 1.0\n"


def install_lab(directory: Path) -> dict[str, str]:
    """The processor of lab/; the environment in which it is found."""
    site = directory / "site"
    about = site / "holdfast_lab-1.0.dist-info"
    about.mkdir(parents=True)
    shutil.copy(LAB, site)
    (about / "METADATA").write_text(METADATA)
    (about / "entry_points.txt").write_text("[holdfast.accelerators]\nlab = holdfast_lab:Lab\n")
    return environment(site)


def install_project(project: Path, site: Path) -> dict[str, str]:
    """By pip, as a user would; the environment in which it is found."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*pip, "--target", str(site), str(project)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return environment(site)


def environment(site: Path) -> dict[str, str]:
    known = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": f"{site}{os.pathsep}{known}" if known else str(site)}
