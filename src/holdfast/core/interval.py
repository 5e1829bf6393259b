"""How often to copy the state: every step where that is free, else as often as it pays. Pure.

A copy keeps the training waiting for `stall_s`. Without it, a fault that takes the state along costs half the interval
on the average. The optimum of the two is Young's and Daly's: an interval of sqrt(2 · stall · time between faults). It
assumes that nothing else is lost with a fault, and holds while the interval is short against that time.

On few nodes faults are so rare that the optimum is minutes, whatever a copy costs. Nobody likes to lose minutes: as
long as copies take no more than a hundredth of the time, they are made more often than that.

What the fault rate is, nobody knows before the job has run: one begins with the middle of what large installations have
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
FAULTS_PER_NODE_DAY = 0.004
PRIOR_NODE_DAYS = 1.0 / FAULTS_PER_NODE_DAY
DAY_S = 86_400.0
EVERY_MAX = 1_000_000


class Advice(msgspec.Struct, frozen=True):
    """A copy each so many steps, and why."""

    every: int
    why: str


def fault_rate(faults: int, node_s: float) -> float:
    """Faults a node and day: what was published, and what the job has seen in so many seconds of its nodes."""
    prior = FAULTS_PER_NODE_DAY * PRIOR_NODE_DAYS
    return (prior + faults) / (PRIOR_NODE_DAYS + max(node_s, 0.0) / DAY_S)


def advise(
    step_s: float, stall_s: float, nodes: int, faults_per_node_day: float = FAULTS_PER_NODE_DAY
) -> Advice:
    """The interval for steps of this length, with copies that cost this much, on so many nodes."""
    affordable = math.ceil(stall_s / (FREE_SHARE * step_s)) if step_s > 0.0 else 1
    if affordable <= 1:
        return Advice(1, f"a copy costs {_share(stall_s, step_s)} of a step: one after every step")
    between_s = DAY_S / (max(nodes, 1) * max(faults_per_node_day, 1e-9))
    optimal = max(math.ceil(math.sqrt(2.0 * stall_s * between_s) / step_s), 1)
    every = min(affordable, optimal, EVERY_MAX)
    which = "what costs a hundredth" if affordable <= optimal else "the optimum"
    why = (
        f"a copy costs {_share(stall_s, step_s)} of a step, a fault is due every {between_s / 3600.0:.0f} h: one in"
        f" {every} steps, {which}"
    )
    return Advice(every, why)


def _share(stall_s: float, step_s: float) -> str:
    return f"{100.0 * stall_s / step_s:.1f} %" if step_s > 0.0 else "nothing"
