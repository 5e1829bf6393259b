"""Jobs to compare with: run once for all processes of a test run, by whichever test needs one first."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

DIRECTORY = "HOLDFAST_TEST_REFERENCES"
"""The variable that says where they are (tests/conftest.py makes and removes it)."""


def made_once(name: str, make: Callable[[Path], object]) -> Path:
    """A directory that `make` has filled. Whoever comes meanwhile waits; who fails leaves it to the next."""
    directory = Path(os.environ[DIRECTORY]) / re.sub(r"\W+", "-", name)
    with directory.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = directory.with_suffix(".done")
        if not done.exists():
            shutil.rmtree(directory, ignore_errors=True)
            make(directory)
            done.touch()
    return directory
