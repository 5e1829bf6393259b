"""A worker that comes when its agent does not wait for it any more: a sentence, and no traceback of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.wire.progress_page import ProgressPage

SCRIPT = "import holdfast; holdfast.init()"


@pytest.mark.parametrize("gone", ["page", "agent"])
def test_it_ends_with_a_sentence(gone: str, tmp_path: Path) -> None:
    page, descriptor = ProgressPage.in_memory()
    path = f"/proc/{os.getpid()}/fd/{descriptor if gone == 'agent' else 9999}"
    variables = {
        "HOLDFAST_SOCKET": str(tmp_path / "socket"),
        "HOLDFAST_WORKER": "nonce",
        "HOLDFAST_PROGRESS": path,
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            capture_output=True,
            text=True,
            env=os.environ | variables,
            timeout=120,
            check=False,
        )
    finally:
        page.close()
        os.close(descriptor)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("holdfast: this worker ends, as its agent does not wait for it any more (")
