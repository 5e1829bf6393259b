"""Readers and writers as processes, ended with the test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parents[1] / "storage" / "scripts"
SOURCES = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[1])]
TIMEOUT_S = 60


def environment(**variables: str) -> dict[str, str]:
    path = os.pathsep.join([*SOURCES, os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path} | variables


def run(script: str, *arguments: Any, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script to its end."""
    command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    return subprocess.run(
        command, env=environment(**variables), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


@contextmanager
def started(script: str, *arguments: Any, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Start a script; kill it at the end if it still runs."""
    command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    with subprocess.Popen(
        command,
        env=environment(**variables),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


def wait_for_line(process: subprocess.Popen[str], expected: str) -> None:
    """Wait until the process prints this line."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if line != expected:
        _, error = process.communicate(timeout=TIMEOUT_S)
        raise AssertionError(f"printed {line!r}, not {expected!r}: {error}")


def finish(process: subprocess.Popen[str]) -> str:
    """Let the process go on; return what it prints until its end."""
    output, error = process.communicate("\n", timeout=TIMEOUT_S)
    assert process.returncode == 0, error
    return output.strip()
