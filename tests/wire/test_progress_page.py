"""A progress record is written by one process, read by another, outlives the writer and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.wire.progress_page import PAGE_BYTES, ProgressPage, WorkerPhase
from support.nest import ENVIRONMENT

WRITER = """
import os, sys
from pathlib import Path
from holdfast.wire.progress_page import WorkerPhase, ProgressPage
page = ProgressPage.open(Path(sys.argv[1]))
page.move(applied_step=41, phase=WorkerPhase.UPDATE)
try:
    os.truncate(sys.argv[1], 0)
except PermissionError:
    print("refused")
os.kill(os.getpid(), 9)
"""


def test_a_dead_worker_still_tells_how_far_it_came() -> None:
    page, descriptor = ProgressPage.in_memory()
    try:
        moved_ns = page.get("moved_ns")
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        ended = subprocess.run([sys.executable, "-uc", WRITER, path], env=ENVIRONMENT, capture_output=True, check=False)
        assert (ended.returncode, ended.stdout) == (-9, b"refused\n"), ended.stderr
        assert (page.get("applied_step"), page.get("phase")) == (41, WorkerPhase.UPDATE)
        assert page.get("moved_ns") > moved_ns
    finally:
        os.close(descriptor)
        page.close()


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "page"
    path.write_bytes(bytes(PAGE_BYTES))
    with pytest.raises(ValueError, match="not a progress record"):
        ProgressPage.open(path)
    with pytest.raises(OSError, match="No such file"):
        ProgressPage.open(tmp_path / "nothing")


def test_a_private_record_begins_with_nothing() -> None:
    page = ProgressPage.private()
    assert (page.get("applied_step"), page.get("step"), page.get("view")) == (-1, -1, 0)
    page.close()
