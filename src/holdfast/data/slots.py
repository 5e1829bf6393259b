"""Slots → ranks. The global batch is divided into slots, fixed for the run; ranks own slots, whatever their number.

The rule, a pure function of (rank, world size, slots, weights), so that every rank knows the owner of each slot:

1. Every slot has exactly one owner; a rank's slots are contiguous, in the order of ranks.
2. Without weights the counts of two ranks differ by one at most. Ranks need not divide slots; with more ranks than
   slots some own none.
3. With weights (a straggler gets a smaller one) the counts are in proportion, rounded by largest remainders, ties to
   the lower rank. All ranks must use the same weights.

A slot's samples are a contiguous stretch of the step's positions; slots differ by one sample at most, in the last,
short step of an epoch as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from holdfast.errors import UsageError

COUNTS_CACHED_MAX = 16
"""Weights change seldom, and are asked for at every step."""


def slots_of(rank: int, world_size: int, slots: int, weights: Sequence[float] | None = None) -> range:
    """Return the slots that a rank owns."""
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} does not exist in a world of {world_size}")
    if weights is None:
        return range(rank * slots // world_size, (rank + 1) * slots // world_size)
    counts = slot_counts(world_size, slots, tuple(weights))
    first = sum(counts[:rank])
    return range(first, first + counts[rank])


@lru_cache(maxsize=COUNTS_CACHED_MAX)
def slot_counts(world_size: int, slots: int, weights: tuple[float, ...]) -> tuple[int, ...]:
    """Return how many slots each rank owns, in proportion to the weights. The arithmetic is exact, so that all ranks
    agree."""
    if len(weights) != world_size:
        raise UsageError(f"{len(weights)} weights for {world_size} ranks; give one for each rank")
    if any(not math.isfinite(weight) or weight < 0 for weight in weights) or not any(weights):
        raise UsageError("weights of ranks must be finite, not negative, and not all zero")
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    shares = [slots * weight / total for weight in exact]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(world_size), key=lambda rank: (counts[rank] - shares[rank], rank))
    for rank in by_remainder[: slots - sum(counts)]:
        counts[rank] += 1
    return tuple(counts)


def slot_positions(positions: range, slots: range, slots_total: int) -> range:
    """Return which of a step's positions these (contiguous) slots have."""
    count = len(positions)
    return positions[slots.start * count // slots_total : slots.stop * count // slots_total]


def loss_scale(rank_samples: int, global_samples: int, world_size: int) -> float:
    """Return the factor for a rank's mean loss, so that DDP's average over ranks is the mean over the global batch.

    DDP divides the sum of the ranks' gradients by the world size W. Rank r's mean over its n_r samples, times n_r·W/N,
    summed and divided by W, is the sum over all samples divided by N. A rank without samples has scale 0. Counts of
    tokens work as well as counts of samples, where the loss is a mean over tokens.
    """
    if global_samples <= 0:
        raise UsageError("a step without samples has no mean loss")
    return rank_samples * world_size / global_samples
