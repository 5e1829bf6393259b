"""The ledger: what each committed step has used, as a chain of digests, so that two runs can be compared.

A link is the hash of the link before it, the step's number and the step's samples in ascending order. Which rank had
which sample does not enter: runs on 4 and on 3 ranks have the same chain. If two chains agree at a step, they agree at
all steps before it, so the first difference is found by bisection.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.data.order import Indices
from holdfast.data.plan import Plan

DIGEST_BYTES = 16
START = bytes(DIGEST_BYTES)
"""The link before the first step."""
NAMED_MAX = 10
"""How many missing or repeated samples a verdict names."""


def next_link(previous: bytes, step: int, samples: Sequence[int] | Indices) -> bytes:
    """The link of a step after the link of the step before it."""
    ordered = np.sort(np.asarray(samples, dtype="<i8"))
    return hashlib.blake2b(previous + step.to_bytes(8, "little") + ordered.tobytes(), digest_size=DIGEST_BYTES).digest()


def chain(steps: Iterable[tuple[int, Sequence[int] | Indices]], start: bytes = START) -> list[bytes]:
    """The links of consecutive steps, each given as (number, samples)."""
    links, link = [], start
    for step, samples in steps:
        link = next_link(link, step, samples)
        links.append(link)
    return links


def planned_chain(plan: Plan, first_step: int, end_step: int, start: bytes = START) -> list[bytes]:
    """The links an undisturbed run of this plan has."""
    return chain(((step, plan.samples(step)) for step in range(first_step, end_step)), start)


def first_difference(mine: Sequence[bytes], others: Sequence[bytes]) -> int | None:
    """The index of the first link that differs, by bisection; None if one chain is the other's beginning."""
    low, high = 0, min(len(mine), len(others))
    while low < high:
        middle = (low + high) // 2
        if mine[middle] == others[middle]:
            low = middle + 1
        else:
            high = middle
    return low if low < min(len(mine), len(others)) else None


@dataclass(frozen=True)
class Verdict:
    """Whether an epoch's steps used every sample exactly once; if not, what went wrong, by example."""

    samples: int
    missing: int
    repeated: int
    strangers: int
    examples: tuple[int, ...]

    @property
    def exactly_once(self) -> bool:
        return not (self.missing or self.repeated or self.strangers)

    def __str__(self) -> str:
        if self.exactly_once:
            return f"each of {self.samples:,} samples exactly once"
        return (
            f"of {self.samples:,} samples {self.missing:,} missing, {self.repeated:,} repeated,"
            f" {self.strangers:,} unknown; for example {', '.join(map(str, self.examples))}"
        )


def prove_exactly_once(steps: Iterable[Sequence[int] | Indices], size: int) -> Verdict:
    """Judge the samples of an epoch's committed steps. Needs one byte a sample."""
    uses = np.zeros(size, dtype=np.uint8)
    strangers: list[int] = []
    for step in steps:
        samples = np.asarray(step, dtype=np.int64)
        known = (samples >= 0) & (samples < size)
        strangers += samples[~known].tolist()
        members, counts = np.unique(samples[known], return_counts=True)
        uses[members] = np.minimum(uses[members].astype(np.int64) + counts, 2)
    missing, repeated = np.flatnonzero(uses == 0), np.flatnonzero(uses > 1)
    examples = [*strangers[:NAMED_MAX], *missing[:NAMED_MAX].tolist(), *repeated[:NAMED_MAX].tolist()][:NAMED_MAX]
    return Verdict(size, len(missing), len(repeated), len(strangers), tuple(examples))
