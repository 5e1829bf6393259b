"""Faults from a rate, where there is no trace. Pure but for its seed.

arrivals    regular, or Weibull: shape 1 is Poisson, below 1 faults come in clusters (0.62 on a public trace)
bursts      a share of the faults comes in groups of 2 to 14 machines within ten minutes
lemons      a few machines have a share of the faults that is larger than theirs
repairs     log-normal, by median and mean; equal ones: always as long
"""

from __future__ import annotations

import math
from enum import StrEnum
from random import Random

import msgspec

from holdfast.sim.outages import DAY_S, HOUR_S, Outage, OutageKind, merged

BURST_NODES_MIN, BURST_NODES_MAX = 2, 14
BURST_GOES_ON = 2.0 / 3.0
"""The chance that a burst has another machine: bursts of the public trace have 4 on the average."""
BURST_S = 600.0


class Arrivals(StrEnum):
    """How the times between faults are distributed."""

    REGULAR = "regular"
    WEIBULL = "weibull"


KINDS = {
    OutageKind.DEVICE: 0.28,
    OutageKind.DIES: 0.41,
    OutageKind.SILENT: 0.12,
    OutageKind.LEAVES: 0.19,
}
"""The shares on the public trace."""


class FaultModel(msgspec.Struct, frozen=True, kw_only=True):
    """How often machines fail, and how. The defaults are what a public trace of 400 servers shows."""

    per_node_day: float
    """Faults of a machine a day, on the average."""
    arrivals: Arrivals = Arrivals.WEIBULL
    shape: float = 1.0
    burst_share: float = 0.0
    """Of the faults, how many come in bursts."""
    lemon_nodes: float = 0.0
    lemon_share: float = 0.0
    """A share of the machines, and the share of the faults that they have."""
    repair_median_s: float = 20 * HOUR_S
    repair_mean_s: float = 133 * HOUR_S
    kinds: dict[OutageKind, float] = msgspec.field(default_factory=lambda: dict(KINDS))


def generate(model: FaultModel, nodes: int, span_s: float, seed: int) -> list[Outage]:
    """Return the outages of this many machines in this much time."""
    random = Random(f"{seed} faults")
    shuffled = random.sample(range(nodes), nodes)
    lemons = shuffled[: math.ceil(nodes * model.lemon_nodes)] if model.lemon_share else []
    others = shuffled[len(lemons) :] or lemons
    kinds, weights = list(model.kinds), list(model.kinds.values())
    found: list[Outage] = []
    at = 0.0
    mean_gap_s = DAY_S / (model.per_node_day * nodes) * _nodes_an_arrival(model)
    while (at := at + _gap(model, mean_gap_s, random)) < span_s:
        size = _burst_size(random) if random.random() < _burst_chance(model) else 1
        for _ in range(size):
            node = random.choice(lemons if random.random() < model.lemon_share and lemons else others)
            start_s = at + (random.uniform(0.0, BURST_S) if size > 1 else 0.0)
            kind = random.choices(kinds, weights)[0]
            repair_s = 0.0 if kind is OutageKind.PROCESS else _repair(model, random)
            found.append(Outage(node, start_s, start_s + repair_s, kind))
    return merged(found)


def _gap(model: FaultModel, mean_s: float, random: Random) -> float:
    if model.arrivals is Arrivals.REGULAR:
        return mean_s
    return random.weibullvariate(mean_s / math.gamma(1.0 + 1.0 / model.shape), model.shape)


def _repair(model: FaultModel, random: Random) -> float:
    if model.repair_mean_s <= model.repair_median_s:
        return model.repair_median_s
    sigma = math.sqrt(2.0 * math.log(model.repair_mean_s / model.repair_median_s))
    return random.lognormvariate(math.log(model.repair_median_s), sigma)


def _burst_size(random: Random) -> int:
    size = BURST_NODES_MIN
    while size < BURST_NODES_MAX and random.random() < BURST_GOES_ON:
        size += 1
    return size


def _burst_mean() -> float:
    return BURST_NODES_MIN + sum(BURST_GOES_ON**n for n in range(1, BURST_NODES_MAX - BURST_NODES_MIN + 1))


def _burst_chance(model: FaultModel) -> float:
    """Return which share of the arrivals are bursts, so that they have their share of the faults."""
    share, mean = model.burst_share, _burst_mean()
    return share / (mean * (1.0 - share) + share)


def _nodes_an_arrival(model: FaultModel) -> float:
    chance = _burst_chance(model)
    return chance * _burst_mean() + 1.0 - chance
