"""A few hundred `kill -9` of bench/kill_campaign.py: after each, a whole state is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[2] / "bench" / "kill_campaign.py"
TIME_LIMIT_S = 110
KILLS = {"storage": 140, "memory": 40, "sharded": 30, "replicate": 42, "parity": 32, "persist": 30, "both": 30}
"""Enough to hit every kind of moment, few enough for a busy machine."""


@pytest.mark.parametrize("phase", KILLS)
def test_a_complete_state_survives_every_kill(tmp_path: Path, phase: str) -> None:
    output = tmp_path / "result.json"
    temporary = tmp_path / "runs"
    temporary.mkdir()
    flags = ["--only", phase, "--kills", str(KILLS[phase]), "--scale", "1", "--seed", "7", "-o", str(output)]
    finished = subprocess.run(
        [sys.executable, str(CAMPAIGN), *flags],
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    result = json.loads(output.read_text())
    assert result["counts"][phase]["kills"] >= KILLS[phase]
    assert not list(temporary.glob("holdfast-*")), "something was left behind"
    ours = f"holdfast-campaign-{result['pid']}-"  # others may run at the same time
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(ours)]
