"""What each committed step has used, as a chain of digests, so that two runs can be compared.

A link is the hash of the link before it, the step's number and the step's samples in ascending order. Which rank had
which sample does not enter: runs on 4 and on 3 ranks have the same chain. If two chains agree at a step, they agree at
all steps before it, so the first difference is found by bisection.

**Digests of batches.** While a session trains, no process has all samples of a step. So the worker that reads a batch
computes its digest: how many samples it has, and the sum (mod 2^128) of their digests, each a function of epoch and
sample. Sums can be added in any order and by any process, and a repeated or missing sample changes them. The master
adds up the digests of a step and chains them (core/sample_audit.py); `planned_digests` returns what the plan expects.
The digests are 64-bit mixers in two lanes, keyed by the epoch: mistakes do not pass them, forgers may.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from holdfast.core.sample_audit import DIGEST_BYTES, START, TOTAL_MODULUS
from holdfast.data.order import Indices, Words
from holdfast.data.step_plan import StepPlan

BLOCK_SAMPLES = 65_536
"""How many samples' digests are computed at a time."""
KEYS_CACHED_MAX = 64
# Made once: a batch is small, and making a number of NumPy's takes as long as mixing a batch with it.
_MIXING = tuple((np.uint64(s), np.uint64(f)) for s, f in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)))
_LAST_SHIFT = np.uint64(31)
_HALF = np.uint64(32)
_LOWER = np.uint64(2**32 - 1)
NAMED_MAX = 10
"""How many missing or repeated samples a verdict names."""


def next_link(previous: bytes, step: int, samples: Sequence[int] | Indices) -> bytes:
    """Return the link of a step after the link of the step before it."""
    ordered = np.sort(np.asarray(samples, dtype="<i8"))
    return hashlib.blake2b(previous + step.to_bytes(8, "little") + ordered.tobytes(), digest_size=DIGEST_BYTES).digest()


def chain(steps: Iterable[tuple[int, Sequence[int] | Indices]], start: bytes = START) -> list[bytes]:
    """Return the links of consecutive steps, each given as (number, samples)."""
    links, link = [], start
    for step, samples in steps:
        link = next_link(link, step, samples)
        links.append(link)
    return links


def planned_chain(plan: StepPlan, first_step: int, end_step: int, start: bytes = START) -> list[bytes]:
    """Return the links of an undisturbed run of this plan."""
    return chain(((step, plan.samples(step)) for step in range(first_step, end_step)), start)


def first_difference(mine: Sequence[bytes], others: Sequence[bytes]) -> int | None:
    """Return the index of the first link that differs, by bisection; None if one chain is a prefix of the other."""
    low, high = 0, min(len(mine), len(others))
    while low < high:
        middle = (low + high) // 2
        if mine[middle] == others[middle]:
            low = middle + 1
        else:
            high = middle
    return low if low < min(len(mine), len(others)) else None


# --- digests of batches


@lru_cache(maxsize=KEYS_CACHED_MAX)
def _lane_keys(epoch: int) -> Words:
    digest = hashlib.blake2b(f"holdfast ledger 1\0{epoch}".encode(), digest_size=16).digest()
    return np.frombuffer(digest, dtype="<u8").reshape(2, 1)


def _lanes(epoch: int, samples: Words) -> Words:
    """Return two rows, by the finaliser of SplitMix64: every bit of the input changes each of the output half the
    time."""
    words = samples + _lane_keys(epoch)
    for shift, factor in _MIXING:
        words ^= words >> shift
        words *= factor
    words ^= words >> _LAST_SHIFT
    return words


def _digests(epoch: int, samples: Words) -> Words:
    """Return three rows: the upper lane, and the lower one in halves, so that sums do not overflow."""
    lanes = _lanes(epoch, samples)
    rows = np.empty((3, len(samples)), dtype=np.uint64)
    rows[0] = lanes[0]
    np.right_shift(lanes[1], _HALF, out=rows[1])
    np.bitwise_and(lanes[1], _LOWER, out=rows[2])
    return rows


def _total(sums: Sequence[int]) -> int:
    upper, middle, lower = sums
    return ((upper << 64) + (middle << 32) + lower) % TOTAL_MODULUS


def batch_digest(samples_by_epoch: Iterable[tuple[int, Sequence[int] | Indices]]) -> tuple[int, int]:
    """Return the number of samples and the sum of their digests."""
    count = total = 0
    for epoch, samples in samples_by_epoch:
        count += len(samples)
        words = np.array(samples, dtype=np.uint64)
        total += _total(np.add.reduce(_digests(epoch, words), axis=1).tolist())
    return count, total % TOTAL_MODULUS


def planned_digests(plan: StepPlan, steps: range) -> Iterator[tuple[int, int, int]]:
    """Yield (step, count, total) of an undisturbed run."""
    block = max(1, BLOCK_SAMPLES // plan.global_batch_size)
    for first in range(steps.start, steps.stop, block):
        yield from _planned_block(plan, range(first, min(first + block, steps.stop)))


def _planned_block(plan: StepPlan, steps: range) -> Iterator[tuple[int, int, int]]:
    segments = [(step, *segment) for step in steps for segment in plan.order.segments(plan.span(step))]
    totals: dict[int, tuple[int, int]] = dict.fromkeys(steps, (0, 0))
    for epoch in sorted({epoch for _, epoch, _, _ in segments}):
        mine = [(step, first, end) for step, of, first, end in segments if of == epoch]
        offsets = np.concatenate([np.arange(first, end) for _, first, end in mine])
        digests = _digests(epoch, plan.order.samples_of(epoch, offsets).astype(np.uint64))
        starts = np.cumsum([0, *(end - first for _, first, end in mine)])[:-1]
        sums = np.add.reduceat(digests, starts, axis=1).T.tolist()
        for (step, first, end), row in zip(mine, sums, strict=True):
            count, total = totals[step]
            totals[step] = (count + end - first, (total + _total(row)) % TOTAL_MODULUS)
    for step, (count, total) in totals.items():
        yield step, count, total


@dataclass(frozen=True)
class DigestVerdict:
    """The verdict whether an epoch's steps used every sample exactly once; if not, examples of what went wrong."""

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


def prove_exactly_once(steps: Iterable[Sequence[int] | Indices], size: int) -> DigestVerdict:
    """Judge the samples of an epoch's committed steps. This needs one byte a sample."""
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
    return DigestVerdict(size, len(missing), len(repeated), len(strangers), tuple(examples))
