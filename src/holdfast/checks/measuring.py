"""How long a piece of work takes. Without torch.

A stage's work is repeated in blocks of a fifth of a second: a little less than two of the periods in which the kernel
hands out a limited share of a processor, so that a node that may run for a quarter of the time is seen to be almost
four times as slow, whenever a block begins; and short enough for several of them, of which the best is not disturbed
by anybody else.

What the work waited for because others had the processors is no part of its time, and is told beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from holdfast.checks.waiting import Waiting
from holdfast.core.health.findings import PAIRED, Stage, Timing

BLOCK_S = 0.18
BLOCKS = 4
SHARE_MAX = 0.95
"""Of the time that may have been waited: something was done, too."""
STAGE_S_MAX = 4.0
"""A stage that is this slow is not measured more exactly."""


def measure(stage: Stage, work: Callable[[], None], device: int = 0, *, block_s: float = BLOCK_S) -> Timing:
    """Runs it once to warm up, then in blocks."""
    work()
    give_up_at = time.perf_counter() + STAGE_S_MAX
    waiting = Waiting()
    times: list[float] = []
    shares: list[float] = []
    while len(times) < BLOCKS and (not times or time.perf_counter() < give_up_at):
        time_s, share = _block(work, block_s, waiting)
        times.append(time_s)
        shares.append(share)
    return timing_of(stage, times, device, min(shares))


def _block(work: Callable[[], None], block_s: float, waiting: Waiting) -> tuple[float, float]:
    """The time of one piece, and the share of the block that was waited for others: all of that within the time."""
    began_at, done = time.perf_counter(), 0
    waiting.again()
    while time.perf_counter() - began_at < block_s or not done:
        work()
        done += 1
    waited_s = waiting.longest_s()
    spent_s = time.perf_counter() - began_at
    share = min(waited_s / spent_s, SHARE_MAX)
    return spent_s * (1 - share) / done, share


def timing_of(stage: Stage, times: Sequence[float], device: int = 0, waited: float = 0.0) -> Timing:
    """Of blocks, each with the time of one piece. Alone the best counts, in pairs the one in the middle: a link that
    loses a packet now and then is as good as any in between."""
    ordered = sorted(times)
    middle = ordered[len(ordered) // 2]
    distances = sorted(abs(value - middle) for value in ordered)
    spread = distances[len(distances) // 2] / middle if middle > 0 else 0.0
    return Timing(stage, middle if stage in PAIRED else ordered[0], spread, device, waited)
