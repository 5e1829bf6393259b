"""Checkpoints of any layout load into any other, bit for bit, and stock torch opens them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "layout_worlds.py"


@pytest.mark.timeout(240)
def test_through_pipelines_and_tensor_parallelism_to_a_single_process_and_back(tmp_path: Path) -> None:
    """Alone → PP × TP → FSDP2 × TP → FSDP2 → interleaved PP × FSDP2 → PP × TP → alone → FSDP2 × TP → DDP → …"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path], env=environment, capture_output=True, text=True, timeout=230, check=False
    )
    assert done.returncode == 0, done.stderr[-6_000:]
    assert len(list(tmp_path.glob("run/step-*"))) == 11
