"""How long a piece of work takes. Without torch.

A stage's work is repeated in blocks of a tenth of a second. A block is as long as the period in which the kernel hands
out a limited share of a processor, so that a node that may run for a quarter of the time only is seen to be four times
as slow; and it is short enough for several of them, of which the best is not disturbed by anybody else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from holdfast.core.health import PAIRED, Stage, Timing

BLOCK_S = 0.1
BLOCKS = 4
STAGE_S_MAX = 4.0
"""A stage that is this slow is not measured more exactly."""


def measure(stage: Stage, work: Callable[[], None], device: int = 0, *, block_s: float = BLOCK_S) -> Timing:
    """Runs it once to warm up, then in blocks."""
    work()
    give_up_at = time.perf_counter() + STAGE_S_MAX
    times: list[float] = []
    while len(times) < BLOCKS and (not times or time.perf_counter() < give_up_at):
        times.append(_block(work, block_s))
    return timing_of(stage, times, device)


def _block(work: Callable[[], None], block_s: float) -> float:
    """The time of one piece."""
    began_at, done = time.perf_counter(), 0
    while (spent_s := time.perf_counter() - began_at) < block_s or not done:
        work()
        done += 1
    return spent_s / done


def timing_of(stage: Stage, times: Sequence[float], device: int = 0) -> Timing:
    """Of blocks, each with the time of one piece. Alone the best counts, in pairs the one in the middle: a link that
    loses a packet now and then is as good as any in between."""
    ordered = sorted(times)
    middle = ordered[len(ordered) // 2]
    distances = sorted(abs(value - middle) for value in ordered)
    spread = distances[len(distances) // 2] / middle if middle > 0 else 0.0
    return Timing(stage, middle if stage in PAIRED else ordered[0], spread, device)
