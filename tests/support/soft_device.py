"""The accelerator in software (e2e/lab/soft_device.cpp), built when the first test of a run needs it, and installed
like a package of a vendor. SOFT_DEVICE in the environment names a library that was built before."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch

from support.plug_ins import LAB, environment
from support.references import made_once

LIBRARY = "soft_device.so"
GROUPS = {"torch.backends": "soft = holdfast_soft:load", "holdfast.accelerators": "soft = holdfast_soft:Soft"}
COMPILER_DEADLINE_S = 280.0
"""Half a minute on an idle core."""


def why_not() -> str:
    """Why it cannot be built here; empty if it can."""
    if shutil.which("g++") is None:
        return "g++ is not installed"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return "" if header.exists() else "Python's headers are not installed"


def build(directory: Path) -> None:
    directory.mkdir(parents=True)
    if ready := os.environ.get("SOFT_DEVICE"):
        shutil.copy(ready, directory / LIBRARY)
        return
    home = Path(torch.__file__).parent
    include = [home / "include", home / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    libraries = ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    words = ["g++", "-std=c++20", "-fPIC", "-shared", "-w", *(f"-I{one}" for one in include)]
    words += [str(LAB / "soft_device.cpp"), "-o", str(directory / LIBRARY), f"-L{home / 'lib'}", *libraries]
    subprocess.run(words, check=True, capture_output=True, timeout=COMPILER_DEADLINE_S)


def install_soft_device(directory: Path) -> dict[str, str]:
    """The environment in which torch and Holdfast find it."""
    built = made_once("soft device", build)
    site = directory / "site"
    about = site / "holdfast_soft-1.0.dist-info"
    about.mkdir(parents=True)
    os.link(built / LIBRARY, site / LIBRARY)
    for module in ("holdfast_soft.py", "holdfast_soft_group.py"):
        shutil.copy(LAB / module, site)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: holdfast_soft\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("".join(f"[{group}]\n{entry}\n" for group, entry in GROUPS.items()))
    return environment(site)
