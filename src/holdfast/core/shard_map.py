"""Which shard of the state each rank holds. Ranks with the same shard are replicas of one another.

A *shard* is what a rank holds of the state: a set of regions of the full tensors. Shards are numbered in the order of
the lowest ranks that hold them, and each is held by equally many ranks. Every agent and newcomer is told the map, so it
does not grow with the number of ranks where that can be: rank r has shard r % shards, or the ranks are on a mesh, and a
mask says along which of its dimensions the state is replicated.

    DDP on 8                 shards 1                                          every rank has all, in any world
    FSDP2 on 8               shards 8                                          0 1 2 3 4 5 6 7
    HSDP, 2 × 4              shards 4                                          0 1 2 3 0 1 2 3
    pipeline × data, 2 × 4   sizes (2, 4), mask (split, replicated)            0 0 0 0 1 1 1 1
    pp × dp × tp, 2 × 2 × 2  sizes (2, 2, 2), mask (split, replicated, split)  0 1 0 1 2 3 2 3

What follows no mesh is a table.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Sequence
from functools import lru_cache

import msgspec

from holdfast.core.mesh_shape import MeshShape
from holdfast.errors import UsageError

MAPS_CACHED_MAX = 64


class ShardMap(msgspec.Struct, frozen=True, omit_defaults=True):
    """The shard of each rank: rank % shards, unless a mesh or a table says otherwise."""

    shards: int = 1
    """How many different ones there are. 1: every rank has all of the state."""
    sizes: tuple[int, ...] = ()
    """Of a mesh's dimensions, the last of which varies fastest."""
    is_replicated: tuple[bool, ...] = ()
    """By dimension, whether ranks that differ in it alone hold the same shard."""
    table: tuple[int, ...] = ()
    """By rank, its shard, where no mesh describes it."""

    def shard_of(self, rank: int) -> int:
        """Return the shard of a rank."""
        by_rank = self._by_rank
        return by_rank[rank] if by_rank else rank % self.shards

    def replica_of(self, rank: int) -> int:
        """Return how many lower ranks hold the same shard."""
        return _replica_numbers(self)[rank] if self._by_rank else rank // self.shards

    def ranks_of(self, shard: int, world_size: int) -> Sequence[int]:
        """Return the ranks that hold a shard, ascending."""
        return _ranks_by_shard(self)[shard] if self._by_rank else range(shard, world_size, self.shards)

    def replicas(self, world_size: int) -> int:
        """Return how many ranks hold each shard."""
        return world_size // self.shards

    def fits(self, world_size: int) -> bool:
        """Return whether it is a map of a world of this size."""
        by_rank = self._by_rank
        return len(by_rank) == world_size if by_rank else world_size % self.shards == 0

    def fitted(self, world_size: int) -> ShardMap:
        """Return the map, or a plain one of as many shards where the ranks of another world have yet to say theirs."""
        return self if self.fits(world_size) else ShardMap(self.shards)

    @property
    def _by_rank(self) -> tuple[int, ...]:
        return self.table or (_shards_by_rank(self.sizes, self.is_replicated) if self.sizes else ())


ALL_OF_IT = ShardMap()
"""Every rank has all of the state, however many there are."""


def number_holdings(holdings: Sequence[Hashable]) -> tuple[int, ...]:
    """Return by rank the number of its shard, from what each rank holds: equal holdings are one shard."""
    numbers: dict[Hashable, int] = {}
    return tuple([numbers.setdefault(holding, len(numbers)) for holding in holdings])


def shard_map_of(numbers: Sequence[int]) -> ShardMap:
    """Return the map with these shards, by rank. Raises UsageError where one has more replicas than another."""
    counts = Counter(numbers)
    shards = len(counts)
    if all(number == rank % shards for rank, number in enumerate(numbers)) and len(numbers) % shards == 0:
        return ShardMap(shards)
    fewest, most = min(counts, key=lambda shard: counts[shard]), max(counts, key=lambda shard: counts[shard])
    if counts[fewest] != counts[most]:
        raise UsageError(
            f"what rank {numbers.index(fewest)} holds of the state is on {counts[fewest]} of the ranks, what rank"
            f" {numbers.index(most)} holds on {counts[most]}: give each part of the model to equally many ranks"
        )
    dimensions = _dimensions(tuple(numbers))
    if dimensions is None:
        return ShardMap(shards, table=tuple(numbers))
    sizes, is_replicated = zip(*dimensions, strict=True)
    return ShardMap(shards, sizes, is_replicated)


def declared_map(mesh: MeshShape, replicated: Sequence[str]) -> ShardMap:
    """Return the map of a mesh along some dimensions of which the state is replicated."""
    split = [name for name in mesh.names if name not in replicated]
    return shard_map_of(number_holdings([mesh.index_along(rank, split) for rank in range(mesh.world_size)]))


def lonely_shards(shard_map: ShardMap, first_ranks: Sequence[int], world_size: int) -> frozenset[int]:
    """Return the shards that the loss of one node takes away; of one process, where there is one node. `first_ranks`:
    the first rank of each node."""
    if shard_map.shards == 1:
        return frozenset()
    return _lonely_shards(shard_map, tuple(first_ranks), world_size)


@lru_cache(maxsize=MAPS_CACHED_MAX)
def _lonely_shards(shard_map: ShardMap, first_ranks: tuple[int, ...], world_size: int) -> frozenset[int]:
    places: list[set[int]] = [set() for _ in range(shard_map.shards)]
    for rank in range(world_size):
        places[shard_map.shard_of(rank)].add(bisect_right(first_ranks, rank) if len(first_ranks) > 1 else rank)
    return frozenset(shard for shard, where in enumerate(places) if len(where) < 2)


def _dimensions(numbers: tuple[int, ...]) -> list[tuple[int, bool]] | None:
    """Return the mesh that explains the numbers, its outermost dimension first; None if there is none."""
    count = len(numbers)
    if count == 1:
        return []
    for blocks in (divisor for divisor in range(2, count + 1) if count % divisor == 0):
        block = numbers[: count // blocks]
        shards = len(set(block))
        for is_replicated in (True, False):
            offset = 0 if is_replicated else shards
            repeated = (one + nth * offset for nth in range(blocks) for one in block)
            if any(own != expected for own, expected in zip(numbers, repeated, strict=True)):
                continue
            if (inner := _dimensions(block)) is None:
                continue
            if inner and inner[0][1] == is_replicated:
                return [(blocks * inner[0][0], is_replicated), *inner[1:]]
            return [(blocks, is_replicated), *inner]
    return None


@lru_cache(maxsize=MAPS_CACHED_MAX)
def _shards_by_rank(sizes: tuple[int, ...], is_replicated: tuple[bool, ...]) -> tuple[int, ...]:
    found = [0]
    for size, repeats in zip(reversed(sizes), reversed(is_replicated), strict=True):
        offset = 0 if repeats else max(found) + 1
        found = [shard + nth * offset for nth in range(size) for shard in found]
    return tuple(found)


@lru_cache(maxsize=MAPS_CACHED_MAX)
def _replica_numbers(shard_map: ShardMap) -> tuple[int, ...]:
    seen: Counter[int] = Counter()
    found = []
    for shard in shard_map._by_rank:
        found.append(seen[shard])
        seen[shard] += 1
    return tuple(found)


@lru_cache(maxsize=MAPS_CACHED_MAX)
def _ranks_by_shard(shard_map: ShardMap) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in range(shard_map.shards)]
    for rank, shard in enumerate(shard_map._by_rank):
        found[shard].append(rank)
    return tuple(map(tuple, found))
