"""Make-believe clusters with known bad nodes and links, measured by the core's own tournament and judged by its
verdicts.

The noise is that of real measurements: parts differ by a per cent or so, blocks by another, and now and then a block,
or a whole measurement, is disturbed. A node's connection is as slow as the slower of its two ends and the link between.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.core.health.findings import (
    ALONE,
    PAIRED,
    CheckProblem,
    CheckResult,
    LinkVerdict,
    NodeVerdict,
    Stage,
    Timing,
)
from holdfast.core.health.tournament import next_round
from holdfast.core.health.verdicts import Evidence, Pair, judge

BASE_S: dict[Stage, float] = {
    "matmul": 0.006,
    "bandwidth": 0.012,
    "disk": 0.05,
    "all-gather": 0.0004,
    "all-reduce": 0.004,
}
BLOCKS = 5
ROUNDS_MAX = 100


@dataclass
class Cluster:
    """`parts`, `blocks`: how much nodes, and blocks of a node, differ by nature. `disturbed`: how often a block is."""

    size: int
    chance: random.Random
    parts: float = 0.01
    blocks: float = 0.01
    disturbed: float = 0.05
    slow_nodes: dict[str, tuple[Stage, float]] = field(default_factory=dict)
    """By node: in which stage, and how many times as slow."""
    slow_links: dict[Pair, float] = field(default_factory=dict)
    """Infinite: broken."""
    wrong: set[str] = field(default_factory=set)
    """Nodes whose product is wrong."""

    def __post_init__(self) -> None:
        self.nodes = [f"n{number:03d}" for number in range(self.size)]
        self.nature = {
            (node, stage): 1 + abs(self.chance.gauss(0, self.parts)) for node in self.nodes for stage in BASE_S
        }
        self.measurements = 0

    def check(self) -> tuple[list[NodeVerdict], list[LinkVerdict]]:
        evidence = Evidence(incarnations={node: f"{node}.1" for node in self.nodes}, alone={}, pairs={}, before={})
        machines = {node: node for node in self.nodes}
        for _ in range(ROUNDS_MAX):
            step = next_round(evidence, machines)
            if step is None:
                return judge(evidence)
            for node in step.alone:
                evidence.alone.setdefault(node, []).append(self._alone(node, step.stages or ALONE))
            for pair in step.pairs:
                evidence.pairs.setdefault(pair, []).append(self._paired(pair))
        raise AssertionError("the tournament does not come to an end")

    def _alone(self, node: str, stages: Sequence[Stage]) -> CheckResult:
        problems = (CheckProblem("matmul", "wrong-result", "the product is wrong", 0),) if node in self.wrong else ()
        return CheckResult(timings=tuple(self._timing(s, self._factor(node, s)) for s in stages), problems=problems)

    def _paired(self, pair: Pair) -> CheckResult:
        link = self.slow_links.get(pair, 1.0)
        if link == float("inf"):
            return CheckResult(problems=(CheckProblem("all-reduce", "no-answer", "it did not come through"),))
        return CheckResult(
            timings=tuple(self._timing(s, max(self._factor(node, s) for node in pair) * link) for s in PAIRED)
        )

    def _factor(self, node: str, stage: Stage) -> float:
        slow_stage, times = self.slow_nodes.get(node, ("disk", 1.0))
        is_slow = stage == slow_stage or (slow_stage == "all-reduce" and stage == "all-gather")
        return self.nature[(node, stage)] * (times if is_slow else 1.0)

    def _timing(self, stage: Stage, factor: float) -> Timing:
        self.measurements += 1
        whole = self.chance.uniform(1.05, 1.6) if self.chance.random() < self.disturbed / 10 else 1.0
        values = sorted(BASE_S[stage] * factor * whole * self._block() for _ in range(BLOCKS))
        middle = values[BLOCKS // 2]
        spread = sorted(abs(value - middle) for value in values)[BLOCKS // 2] / middle
        return Timing(stage, middle if stage in PAIRED else values[0], spread)

    def _block(self) -> float:
        noise = 1 + abs(self.chance.gauss(0, self.blocks))
        return noise * (self.chance.uniform(1.1, 2.0) if self.chance.random() < self.disturbed else 1.0)


def named(verdicts: list[NodeVerdict]) -> set[str]:
    return {verdict.node_id for verdict in verdicts if verdict.fitness != "fit"}


def linked(links: list[LinkVerdict]) -> set[Pair]:
    return {(link.first, link.second) for link in links}
