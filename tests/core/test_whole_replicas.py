"""Worlds that are a whole number of replicas: who has a rank, and how many train."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.mesh_shape import mesh_shape
from holdfast.core.shard_map import ShardMap, declared_map
from holdfast.core.whole_replicas import SeatedWorker, surplus, whole_size

meshes = st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=4)


def world_of(mesh: list[tuple[int, bool]]) -> tuple[ShardMap, int]:
    """The map of a mesh, by the size of each dimension and whether the state is replicated along it."""
    shape = mesh_shape({f"dimension {index}": size for index, (size, _) in enumerate(mesh)})
    replicated = [f"dimension {index}" for index, (_, repeats) in enumerate(mesh) if repeats]
    return declared_map(shape, replicated), shape.world_size


def seated(shard_map: ShardMap, ranks: list[int], node_size: int) -> list[SeatedWorker]:
    return [SeatedWorker(str(rank // node_size), rank % node_size, shard_map.shard_of(rank)) for rank in ranks]


@settings(deadline=None)
@given(meshes, st.data())
def test_no_shard_that_lives_is_lost_with_who_has_no_rank(mesh: list[tuple[int, bool]], data: st.DataObject) -> None:
    shard_map, world_size = world_of(mesh)
    dead = data.draw(st.sets(st.integers(0, world_size - 1), max_size=world_size))
    ranks = [rank for rank in range(world_size) if rank not in dead]
    living = seated(shard_map, ranks, data.draw(st.integers(1, world_size)))
    next_size = whole_size(len(living), shard_map.shards)
    without = surplus(living, len(living) - next_size)
    left = [worker for worker in living if worker not in without]
    assert len(left) == next_size and next_size % shard_map.shards == 0
    assert len(living) - next_size < shard_map.shards, "they could form one more replica"
    if next_size:
        assert {worker.shard for worker in left} == {worker.shard for worker in living}


@settings(deadline=None)
@given(meshes, st.data())
def test_who_has_no_rank_leaves_as_few_as_possible_to_be_moved(
    mesh: list[tuple[int, bool]], data: st.DataObject
) -> None:
    """Each rank takes the shard that is wanted there; with one node nothing else counts than whom to spare."""
    shard_map, world_size = world_of(mesh)
    dead = data.draw(st.sets(st.integers(0, world_size - 1), max_size=world_size))
    living = seated(shard_map, [rank for rank in range(world_size) if rank not in dead], world_size)
    count = len(living) % shard_map.shards
    if len(living) < shard_map.shards:
        return
    replicas = len(living) // shard_map.shards
    left = Counter(worker.shard for worker in living if worker not in surplus(living, count))
    held = Counter(worker.shard for worker in living)
    missing = sum(max(replicas - held[shard], 0) for shard in range(shard_map.shards))
    assert sum(max(replicas - left[shard], 0) for shard in range(shard_map.shards)) == missing


def test_a_worker_without_state_goes_first_and_a_node_keeps_one_of_its_workers() -> None:
    new = SeatedWorker("a", 0)
    holders = [SeatedWorker("a", 1, 0), SeatedWorker("b", 0, 1), SeatedWorker("c", 0, 1), SeatedWorker("c", 1, 0)]
    assert surplus([new, *holders], 1) == [new]
    assert surplus([new, *holders], 2) == [new, holders[3]], "the last of a node with more than one"


def test_the_last_holder_of_a_shard_stays_whatever_its_local_rank() -> None:
    """Ranks 0, 1, 2, 3 have the shards 0, 0, 1, 1; rank 2 is dead."""
    living = [SeatedWorker("a", 0, 0), SeatedWorker("a", 1, 0), SeatedWorker("a", 3, 1)]
    assert surplus(living, 1) == [SeatedWorker("a", 1, 0)]


# --- how many ranks train, of 64 (dp 8 · pp 4 · tp 2) on eight nodes, four of which are dead

SIZES = {"dp": 8, "pp": 4, "tp": 2}
RANKS, SHARDS, TRIALS = 64, 8, 400


def replicas_dropped_as_a_whole(shard_map: ShardMap, living: list[int]) -> int:
    lost = {shard_map.replica_of(rank) for rank in range(RANKS) if rank not in living}
    return (shard_map.replicas(RANKS) - len(lost)) * SHARDS


def put_together_by_shard(shard_map: ShardMap, living: list[int]) -> int:
    held = Counter(shard_map.shard_of(rank) for rank in living)
    return min(held[shard] for shard in range(SHARDS)) * SHARDS


def any_worker_takes_any_shard(shard_map: ShardMap, living: list[int]) -> int:
    workers = seated(shard_map, living, 8)
    without = surplus(workers, len(workers) - whole_size(len(workers), SHARDS))
    left = [worker for worker in workers if worker not in without]
    assert {worker.shard for worker in left} == set(range(SHARDS))
    return len(left)


def mean_of(rule: Callable[[ShardMap, list[int]], int]) -> float:
    shard_map, chosen = declared_map(mesh_shape(SIZES), ["dp"]), random.Random(16)
    total = 0
    for _ in range(TRIALS):
        dead = set(chosen.sample(range(RANKS), 4))
        total += rule(shard_map, [rank for rank in range(RANKS) if rank not in dead])
    return total / TRIALS


def test_of_64_ranks_with_4_dead_56_train() -> None:
    """What the docstring of the module says."""
    assert mean_of(any_worker_takes_any_shard) == 56
    assert 50 < mean_of(put_together_by_shard) < 52.5
    assert 36 < mean_of(replicas_dropped_as_a_whole) < 38.5
