"""A barrier that knows who is missing: `job.barrier(timeout)`.

On the view's store, not on its connections: whoever comes leaves its mark and counts itself, the last one opens. The
others look whether it is open, ever more rarely; only when the time is up the marks are looked at one by one. They do
not wait at the store: torch prints two lines whenever such a wait ends without success.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch._C._distributed_c10d import Store

from holdfast.core.diagnosis import ranks_text
from holdfast.errors import MissingRanksError

PAUSE_SHARE = 0.1
"""Of the time that it has taken so far, between two looks: who waits long can wait a little longer."""
PAUSE_S_MIN = 0.001
PAUSE_S_MAX = 0.1
"""Also between two looks at whether the view is over: the store itself does not say so."""


def wait_for_all(
    store: Store, rank: int, size: int, timeout_s: float, check: Callable[[], None] = lambda: None
) -> None:
    """Return when all ranks have come. MissingRanksError names who has not when the time is up; `check` raises what
    ends the wait before."""
    began_at = time.monotonic()
    store.set(f"came/{rank}", "1")
    if store.add("count", 1) == size:
        store.set("open", "1")
    while True:
        check()
        if store.check(["open"]):
            return
        waited_s = time.monotonic() - began_at
        if waited_s < timeout_s:
            pause_s = min(max(waited_s * PAUSE_SHARE, PAUSE_S_MIN), PAUSE_S_MAX)
            time.sleep(min(pause_s, timeout_s - waited_s))
            continue
        missing = tuple(other for other in range(size) if not store.check([f"came/{other}"]))
        if not missing:
            continue  # the last one came a moment ago, and is about to open
        text = f"{ranks_text(missing)} of {size} did not come to the barrier in {timeout_s:g} s"
        raise MissingRanksError(text, missing)
