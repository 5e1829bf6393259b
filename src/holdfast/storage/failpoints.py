"""The named points of a save and of a removal, where tests and the kill campaign end the process.

`HOLDFAST_CRASH_AT=manifest-written` has the process killed, as by `kill -9`, the first time it gets there;
`HOLDFAST_CRASH_AT=part-half:3` the third time. It acts only where `HOLDFAST_DEBUG` is set too, so that no process of a
user can be ended by one variable. Both are read here when the module is imported.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable

VARIABLE = "HOLDFAST_CRASH_AT"
DEBUG_VARIABLE = "HOLDFAST_DEBUG"

SAVE_POINTS = (
    "part-begun",  # nothing of the part is written
    "part-half",  # some of its blocks are
    "part-written",  # all of it, durable, but under another name still; in a directory only
    "part-named",  # durable and named, but its note is missing
    "note-written",  # this part is done
    "parts-complete",  # all notes were seen
    "metadata-written",  # what stock DCP reads is there
    "manifest-written",  # in a directory: whole, but under the partial's name; in an object store: published
    "published",  # renamed, the directory above not yet synced
    "synced",  # durable; notes are still there
    "tidied",  # over
)
REMOVAL_POINTS = (
    "removal-begun",  # it is certain that no process reads it
    "removal-hidden",  # no longer a checkpoint, all its bytes still there
    "removal-half",  # some of its files are gone
)

_wanted, _, _count = (os.environ.get(VARIABLE, "") if os.environ.get(DEBUG_VARIABLE) else "").partition(":")
_reached: Counter[str] = Counter()

on_point: Callable[[str], None] | None = None
"""A function that is called at each point, for tests in the same process."""


def reach(point: str) -> None:
    """End this process here if the tests asked for it."""
    if on_point is not None:
        on_point(point)
    if point != _wanted:
        return
    _reached[point] += 1
    if _reached[point] == int(_count or 1):
        os.kill(os.getpid(), signal.SIGKILL)
