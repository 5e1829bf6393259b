"""What a check of nodes measures and finds, as data: shared by events, orders, records and the journal.

a task      what a node is to do in one round: its stages alone, or the collectives with a partner
a result    what came of it: a timing a stage and device, and problems
a verdict   what is concluded of a node or of the link between two, with what was measured and expected
"""

from __future__ import annotations

from typing import Literal

import msgspec

Stage = Literal["device", "matmul", "bandwidth", "disk", "all-gather", "all-reduce", "examination"]
"""`examination`: the check itself could not be carried out."""
ALONE: tuple[Stage, ...] = ("matmul", "bandwidth", "disk")
PAIRED: tuple[Stage, ...] = ("all-gather", "all-reduce")

WRONG_RESULT = "wrong-result"
"""The fault of a device that computes, copies or stores wrong values."""
TEXT_CHARS_MAX = 300
"""Of a problem's text."""
RESULT_ENTRIES_MAX = 256
"""Timings, and problems, of one result: sixteen devices would bring 64."""

TaskKind = Literal["alone", "ready", "pair"]


class CheckTask(msgspec.Struct, frozen=True, kw_only=True):
    """What a node does in a round."""

    checkup: str
    """Which check; no two of a job share a name, also across terms of the master."""
    round: int
    kind: TaskKind
    """`ready`: nothing but to be there for others."""
    stages: tuple[Stage, ...] = ()
    """Alone, which of them; empty: all."""
    partner: str = ""
    rank: int = 0
    """Of two: 0 is the one at whose store they meet."""
    store_host: str = ""
    store_port: int = 0


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """How long one piece of a stage's work takes."""

    stage: Stage
    best_s: float
    """Alone, the best of several blocks: what disturbs a block makes it longer, never shorter. In pairs the one in the
    middle: what a link does now and then counts."""
    spread: float
    """How much the blocks differ, as a share of the time."""
    device: int = 0
    waited: float = 0.0
    """The share of the time in which the work was ready and others had the processors. Alone, in the least disturbed
    block, and the times are without it; in pairs, in all blocks, and the times are with it."""


class CheckProblem(msgspec.Struct, frozen=True, array_like=True):
    """What makes a node unfit whatever its speed."""

    stage: Stage
    fault: str
    text: str
    device: int = -1


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a task."""

    timings: tuple[Timing, ...] = ()
    problems: tuple[CheckProblem, ...] = ()
    accelerator: str = ""
    store_port: int = 0
    """Where partners of later rounds find this node's store."""
    took_s: float = 0.0


Fitness = Literal["fit", "slow", "unfit"]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A stage as it counts for a verdict: the worst device, or the worst partner."""

    stage: Stage
    value_s: float
    expected_s: float
    limit_s: float
    device: int = 0
    partner: str = ""

    @property
    def is_slow(self) -> bool:
        return self.value_s > self.limit_s

    @property
    def times(self) -> float:
        """Return the value as a multiple of the expected one."""
        return self.value_s / self.expected_s if self.expected_s > 0 else 1.0


class NodeVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is concluded of a node."""

    node_id: str
    incarnation: str
    fitness: Fitness
    why: str
    """Empty for one that is fit."""
    measured: tuple[Measured, ...] = ()
    problems: tuple[CheckProblem, ...] = ()
    is_left_out: bool = False
    """Slow, and the job does without it; or one end of a link that is broken."""


class LinkVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is concluded of the link between two nodes that are well."""

    first: str
    second: str
    state: Literal["slow", "broken"]
    why: str
    measured: tuple[Measured, ...] = ()


class Norm(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage takes on the nodes of a job."""

    stage: Stage
    expected_s: float
    deviation: float
    """A robust standard deviation, as a share of the time."""
    limit_s: float
    count: int
    """Of how many values."""
