"""Where and when a benchmark ran. A time without its machine and its load says nothing."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

PACKAGES = ("holdfast", "torch", "msgspec")


def describe() -> dict[str, Any]:
    """What does not change during a run."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in PACKAGES},
    }


def load() -> str:
    """The load average over 1, 5 and 15 minutes."""
    return " ".join(f"{average:.2f}" for average in os.getloadavg())


def heading(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in machine.items() if name != "cores")
    return f"{machine['cores']} cores, {versions}"


def benchmark_environment() -> dict[str, str]:
    """This process's, with bytecode cached as for any installed package and one thread for each worker."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return environment | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
