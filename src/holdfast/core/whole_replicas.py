"""Worlds that are a whole number of replicas of a model that is cut: which workers have a rank in the next one. Pure.

A model of which each rank holds a shard (pipeline, tensor, expert parallel) trains on a multiple of its shards. When
workers are lost the others form as many replicas as they can, and the rest have no rank until there are enough for one
more. How many ranks train on average, of 64 (dp 8 · pp 4 · tp 2) with 4 dead at random:

    37.1    a replica is given up as a whole when one of its ranks is lost
    51.3    replicas are put together of ranks that keep their shards
    56      any worker can take any shard, from one that has it: here. It is the most that 60 workers can be

So the world is the largest multiple of the shards that the living can fill, as long as each shard lives. Local ranks
close up on their nodes, and nodes keep their order (views.py). Those without a rank are chosen so that no shard is lost
with them, few must be moved, and a node that has ranks keeps some.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import NamedTuple


class SeatedWorker(NamedTuple):
    """A living worker that could have a rank in the next world."""

    node: str
    local_rank: int
    shard: Hashable = None
    """What it holds of the state; None: nothing yet."""


def whole_size(workers: int, multiple: int) -> int:
    """Return the size of the largest world that so many workers can fill."""
    return workers - workers % multiple


def surplus(living: Iterable[SeatedWorker], count: int) -> list[SeatedWorker]:
    """Return so many workers that go without a rank. As long as as many stay as there are shards, each shard that a
    living worker holds is held by one that stays."""
    left = list(living)
    by_node = Counter(worker.node for worker in left)
    by_shard = Counter(worker.shard for worker in left)
    order = {node: index for index, node in enumerate(by_node)}

    def cost(worker: SeatedWorker) -> tuple[bool, bool, bool, int, int, int]:
        """Return how much is lost with a worker: the smaller, the better."""
        is_last_holder = worker.shard is not None and by_shard[worker.shard] == 1
        is_last_of_node = by_node[worker.node] == 1
        held = by_shard[worker.shard]
        return (
            is_last_holder,
            worker.shard is not None,
            is_last_of_node,
            -held,
            -order[worker.node],
            -worker.local_rank,
        )

    found = []
    for _ in range(count):
        worker = min(left, key=cost)
        left.remove(worker)
        by_node[worker.node] -= 1
        by_shard[worker.shard] -= 1
        found.append(worker)
    return found
