"""How bench/reputation.py reads a trace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"


def test_a_fault_that_ends_as_it_starts_does_not_stay_open_to_the_end_of_the_trace(tmp_path: Path) -> None:
    """Of the published trace 14 do: read the other way round, its machines were down for twice the time."""
    trace = tmp_path / "trace.json"
    lines = [("a", 1.0, "end"), ("a", 1.0, "start"), ("a", 2.0, "start"), ("a", 5.0, "end"), ("b", 300.0, "start")]
    lines += [("b", 301.0, "end")]
    trace.write_text(json.dumps([{"node_id": n, "event_time": at, "event_type": f"fault_{w}"} for n, at, w in lines]))
    command = [sys.executable, str(BENCH / "reputation.py"), "--trace", str(trace), "--nodes", "2"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "3 outages of 2 of 2 machines in 301 days" in shown
    assert "4 machine-days down, 0.7% of the time" in shown
