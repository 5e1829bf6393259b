"""Moments and durations as people read them, and texts that cannot disturb a terminal. Pure."""

from __future__ import annotations

import re
from datetime import datetime

_UNITS = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s"))
# Everything a terminal might obey, but for the tab and the end of a line. A worker's message may contain anything.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def moment(at: float) -> str:
    """A time by the reader's clock and zone, to the millisecond."""
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def duration(seconds: float) -> str:
    """Two units at most: 0.4 s, 12 s, 3 min 5 s, 2 h 10 min, 4 d 1 h."""
    seconds = max(seconds, 0.0)  # two clocks may disagree
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for size, name, small, small_name in _UNITS:
        if whole >= size:
            return f"{whole // size} {name} {whole % size // small} {small_name}"
    return f"{whole} s"


def plain(text: str) -> str:
    """The text without characters that a terminal would obey."""
    return _CONTROLS.sub("�", text)
