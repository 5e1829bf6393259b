"""How often to copy the state: every step where that is free, else as often as it pays. Pure.

A copy keeps the training waiting for `stall_s`. Without it, a fault that takes the state along costs half the interval
on the average. The optimum of the two is Young's and Daly's: an interval of sqrt(2 · stall · time between faults). It
assumes that nothing else is lost with a fault, and holds while the interval is short against that time.

On few nodes faults are so rare that the optimum is minutes, whatever a copy costs. Users do not want to lose minutes:
as long as copies take no more than a hundredth of the time, they are made more often than that.

The fault rate is not known before the job has run: the estimate begins with the middle of what large installations have
published, 2 to 7 faults a day and thousand nodes, and learns from the job itself. What was published counts for as much
as PRIOR_NODE_DAYS of the job's own, the time in which it expects one fault. So a fault in the first hour doubles the
rate, ten of them make it eleven times as high, and a thousand nodes that run for a day without any make it a fifth. (It
is the mean of a gamma distribution, as it follows from one fault in that time and from those that came.)
"""

from __future__ import annotations

import math

import msgspec

FREE_SHARE = 0.01
"""Of a step's time. A copy that costs less is made after every step."""
BUSY_SHARE_MAX = 0.25
"""Of the time, in which copies from a device may be under way."""
FAULTS_PER_NODE_DAY = 0.004
PRIOR_NODE_DAYS = 1.0 / FAULTS_PER_NODE_DAY
DAY_S = 86_400.0
EVERY_MAX = 1_000_000


class IntervalAdvice(msgspec.Struct, frozen=True):
    """A copy each so many steps, and why."""

    every: int
    why: str


def fault_rate(faults: int, node_s: float) -> float:
    """Return faults per node and day, from the published rate and what the job has seen in this many node seconds."""
    prior = FAULTS_PER_NODE_DAY * PRIOR_NODE_DAYS
    return (prior + faults) / (PRIOR_NODE_DAYS + max(node_s, 0.0) / DAY_S)


def advise(
    step_s: float,
    stall_s: float,
    nodes: int,
    faults_per_node_day: float = FAULTS_PER_NODE_DAY,
    busy_s: float = 0.0,
) -> IntervalAdvice:
    """Return the interval for steps of this length, copies of this cost, and this many nodes. `busy_s`: how long a copy
    from a device is under way, which costs nothing by itself, but takes bandwidth of the bus and of the host's
    memory."""
    rest = math.ceil(busy_s / (BUSY_SHARE_MAX * step_s)) if step_s > 0.0 else 1
    affordable = math.ceil(stall_s / (FREE_SHARE * step_s)) if step_s > 0.0 else 1
    if rest > affordable:
        why = f"a copy from the device takes {busy_s:.2f} s: one in {rest} steps, a quarter of the time"
        return IntervalAdvice(min(rest, EVERY_MAX), why)
    if affordable <= 1:
        return IntervalAdvice(1, f"a copy costs {_share(stall_s, step_s)} of a step: one after every step")
    between_s = DAY_S / (max(nodes, 1) * max(faults_per_node_day, 1e-9))
    optimal = max(math.ceil(math.sqrt(2.0 * stall_s * between_s) / step_s), 1)
    every = min(affordable, optimal, EVERY_MAX)
    which = "what costs a hundredth" if affordable <= optimal else "the optimum"
    why = (
        f"a copy costs {_share(stall_s, step_s)} of a step, a fault is due every {between_s / 3600.0:.0f} h: one in"
        f" {every} steps, {which}"
    )
    return IntervalAdvice(every, why)


def _share(stall_s: float, step_s: float) -> str:
    return f"{100.0 * stall_s / step_s:.1f} %" if step_s > 0.0 else "nothing"
