"""Whole scenarios, word for word. `HOLDFAST_REWRITE=1` brings them up to date: read the difference."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.transcript import render

HERE = Path(__file__).parent / "transcripts"


@pytest.mark.parametrize("path", sorted(HERE.glob("*.txt")), ids=lambda p: p.stem)
def test_transcript(path: Path) -> None:
    told = render(path)
    if os.environ.get("HOLDFAST_REWRITE") == "1":
        path.write_text(told)
    assert told == path.read_text()
