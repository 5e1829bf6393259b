"""A barrier that knows who is missing: `job.barrier(timeout)`.

On the view's store, not on its connections: whoever comes leaves its mark and counts itself, the last one opens. Two
requests and a wait each, whatever the number of ranks; only when the time is up the marks are looked at one by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from holdfast.core.diagnosis import ranks_text
from holdfast.errors import MissingRanksError

WAIT_SLICE = timedelta(milliseconds=100)
"""Between two looks at whether the view is over: the store itself does not say so."""


def wait_for_all(
    store: Store, rank: int, size: int, timeout_s: float, check: Callable[[], None] = lambda: None
) -> None:
    """Return when all ranks have come. MissingRanksError names who has not when the time is up; `check` raises what
    ends the wait before."""
    give_up_at = time.monotonic() + timeout_s
    store.set(f"came/{rank}", "1")
    if store.add("count", 1) == size:
        store.set("open", "1")
    while True:
        check()
        try:
            store.wait(["open"], WAIT_SLICE)
            return
        except DistStoreError:
            if time.monotonic() < give_up_at:
                continue
        missing = tuple(other for other in range(size) if not store.check([f"came/{other}"]))
        if not missing:
            continue  # the last one came a moment ago, and is about to open
        text = f"{ranks_text(missing)} of {size} did not come to the barrier in {timeout_s:g} s"
        raise MissingRanksError(text, missing)
