"""A forked interpreter remembers its parent's youth. This makes it forget what a fresh one would not know.

Left as it is, and meant to be: modules that are imported already, and settings that libraries read from the environment
while they are imported (TORCH_LOGS, PYTHON…). The agent starts the fork server in the job's environment, so they agree.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path
from typing import Any

OPENMP_VARIABLE = "OMP_NUM_THREADS"

_OPENBLAS_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)


def forget() -> None:
    """Reset the interpreter, in the new worker, with its own environment and directory."""
    gc.enable()
    reseed()
    forget_the_server_in_multiprocessing()
    tempfile: Any = sys.modules.get("tempfile")
    if tempfile is not None:
        tempfile.tempdir = None  # chosen by the server's TMPDIR


def set_threads(openmp_of_server: str | None) -> None:
    """May start threads, so the worker must be set up: it comes last (see child_setup.adopt_agent)."""
    set_torch_threads(openmp_of_server)
    set_openblas_threads()


def reseed() -> None:
    """Python's `random` does so itself. Fresh interpreters seed torch and NumPy by chance, not by a constant."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def forget_the_server_in_multiprocessing() -> None:
    for library in ("multiprocessing", "multiprocess"):  # the latter is its copy with another pickle, of `datasets`
        process: Any = sys.modules.get(f"{library}.process")
        if process is None:
            continue
        process.ORIGINAL_DIR = str(Path.cwd())  # where spawned children look for a relative script
        process.current_process().authkey = os.urandom(32)


def set_torch_threads(openmp_of_server: str | None) -> None:
    """OpenMP read its variable when the server loaded it."""
    if "torch" in sys.modules and os.environ.get(OPENMP_VARIABLE) != openmp_of_server:
        sys.modules["torch"].set_num_threads(threads_wanted(OPENMP_VARIABLE))


def set_openblas_threads() -> None:
    """NumPy's OpenBLAS was held at one thread in the server, whatever the environment said (see preload)."""
    wanted = threads_wanted("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", OPENMP_VARIABLE)
    if wanted == 1 or "numpy" not in sys.modules:
        return
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "openblas" in line and " r-xp " in line:
            library = ctypes.CDLL(line.split(maxsplit=5)[5])
            for setter in _OPENBLAS_SETTERS:
                if hasattr(library, setter):
                    getattr(library, setter)(wanted)
                    break


def threads_wanted(*variables: str) -> int:
    """OMP_NUM_THREADS may be a list, one number a level of nesting; the first is ours. MKL and OpenBLAS, when they read
    it themselves, do not take more threads than there are processors."""
    processors = len(os.sched_getaffinity(0))
    for variable in variables:
        first = os.environ.get(variable, "").split(",")[0].strip()
        if first.isdigit() and int(first) > 0:
            return min(int(first), processors)
    return processors
