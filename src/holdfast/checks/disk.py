"""A node's disk, where its workers write: some megabytes written, synced, read back and compared. Without torch."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from holdfast.checks.measuring import measure
from holdfast.core.health.findings import WRONG_RESULT, Problem, Timing

BLOCK_S = 0.1
SIZE_BYTES = 4 * 2**20
PATTERN = bytes(range(256)) * (SIZE_BYTES // 256)


def check_disk(directory: Path) -> tuple[list[Timing], list[Problem]]:
    """Leaves nothing behind."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            timing = measure("disk", lambda: _write(file.fileno()), block_s=BLOCK_S)
            problem = _compare(file.fileno())
    except OSError as error:
        return [], [Problem("disk", "disk-error", f"{directory} cannot be written: {error.strerror}")]
    return [timing], [Problem("disk", WRONG_RESULT, f"{directory}: {problem}")] if problem else []


def _write(descriptor: int) -> None:
    os.pwrite(descriptor, PATTERN, 0)
    os.fdatasync(descriptor)


def _compare(descriptor: int) -> str:
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # from the disk, as far as the kernel obliges
    found = os.pread(descriptor, SIZE_BYTES, 0)
    return "" if found == PATTERN else "what was read back is not what was written"
