"""Plug-ins for tests: real distributions with entry points, in a directory that goes onto PYTHONPATH."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

LAB = Path(__file__).parents[1] / "e2e" / "lab"


def install_lab(directory: Path) -> dict[str, str]:
    """The processor of lab/holdfast_lab.py; the environment in which it is found."""
    return install(directory, "holdfast_lab", "lab = holdfast_lab:Lab")


def install_late_device(directory: Path) -> dict[str, str]:
    """The device of lab/holdfast_late.py, which takes the place of the CPU; the environment in which it is found."""
    return install(directory, "holdfast_late", "cpu = holdfast_late:Late")


def install_simulated_accelerator(directory: Path) -> dict[str, str]:
    """The accelerator of lab/holdfast_sim.py, which torch loads; the environment in which it is found."""
    return install(directory, "holdfast_sim", "sim = holdfast_sim:load", group="torch.backends")


def install(directory: Path, module: str, entry_point: str, group: str = "holdfast.accelerators") -> dict[str, str]:
    site = directory / "site"
    about = site / f"{module}-1.0.dist-info"
    about.mkdir(parents=True)
    shutil.copy(LAB / f"{module}.py", site)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{group}]\n{entry_point}\n")
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
