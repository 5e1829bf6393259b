"""Readers and writers as processes, ended with the test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"
SOURCES = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[1])]
TIMEOUT_S = 60


def environment(**variables: str) -> dict[str, str]:
    path = os.pathsep.join([*SOURCES, os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path} | variables


def run(script: str, *words: Any, **variables: str) -> subprocess.CompletedProcess[str]:
    """To its end."""
    command = [sys.executable, str(SCRIPTS / script), *map(str, words)]
    return subprocess.run(
        command, env=environment(**variables), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


@contextmanager
def started(script: str, *words: Any, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Running; killed at the end if it still is."""
    command = [sys.executable, str(SCRIPTS / script), *map(str, words)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(**variables), text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


def said(process: subprocess.Popen[str], word: str) -> None:
    """Wait until it has said so."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if line != word:
        _, error = process.communicate(timeout=TIMEOUT_S)
        raise AssertionError(f"said {line!r}, not {word!r}: {error}")


def finish(process: subprocess.Popen[str]) -> str:
    """Let it go on; what it says at its end."""
    output, error = process.communicate("\n", timeout=TIMEOUT_S)
    assert process.returncode == 0, error
    return output.strip()
