"""Times, durations and ranks as people read them, and text that cannot disturb a terminal. Pure."""

from __future__ import annotations

import re
from datetime import datetime

_UNITS = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s"))
# Everything a terminal might obey, but for the tab and the end of a line. A worker's message may contain anything.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def format_time(at: float) -> str:
    """Return a time by the reader's clock and zone, to the millisecond."""
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def format_duration(seconds: float) -> str:
    """Return a duration in two units at most: 0.4 s, 12 s, 3 min 5 s, 2 h 10 min, 4 d 1 h."""
    seconds = max(seconds, 0.0)  # two clocks may disagree
    if seconds < 10:
        return f"{seconds:.1f} s"
    rounded = int(seconds)
    for size, name, small, small_name in _UNITS:
        if rounded >= size:
            return f"{rounded // size} {name} {rounded % size // small} {small_name}"
    return f"{rounded} s"


def format_size(size_bytes: int) -> str:
    """Return a size in the unit that people would use."""
    amount = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def format_ranks(ranks: list[int]) -> str:
    """Return ranks as ranges: 0-3, 5."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def printable(text: str) -> str:
    """Return the text without control characters that a terminal would obey."""
    return _CONTROLS.sub("�", text)
