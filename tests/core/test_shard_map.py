"""Maps from ranks to the shards of the state that they hold."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.mesh_shape import mesh_shape
from holdfast.core.shard_map import (
    ALL_OF_IT,
    ShardMap,
    declared_map,
    lonely_shards,
    number_holdings,
    shard_map_of,
)
from holdfast.errors import UsageError

meshes = st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=4)


def by_rank(shard_map: ShardMap, world_size: int) -> list[int]:
    return [shard_map.shard_of(rank) for rank in range(world_size)]


def test_the_table_of_the_module() -> None:
    """The examples in the module's docstring."""
    assert by_rank(ALL_OF_IT, 8) == [0] * 8
    assert by_rank(ShardMap(8), 8) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert by_rank(ShardMap(4), 8) == [0, 1, 2, 3, 0, 1, 2, 3]
    assert by_rank(declared_map(mesh_shape({"pp": 2, "dp": 4}), ["dp"]), 8) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert by_rank(declared_map(mesh_shape({"pp": 2, "dp": 2, "tp": 2}), ["dp"]), 8) == [0, 1, 0, 1, 2, 3, 2, 3]
    assert declared_map(mesh_shape({"dp": 2, "tp": 4}), ["dp"]) == ShardMap(4)


@given(meshes)
def test_every_mesh_is_found_from_what_its_ranks_hold(mesh: list[tuple[int, bool]]) -> None:
    names = {f"dimension {index}": size for index, (size, _) in enumerate(mesh)}
    replicated = [f"dimension {index}" for index, (_, is_replicated) in enumerate(mesh) if is_replicated]
    shape = mesh_shape(names)
    split = [name for name in names if name not in replicated]
    holdings = [shape.index_along(rank, split) for rank in range(shape.world_size)]
    found = declared_map(shape, replicated)
    assert by_rank(found, shape.world_size) == list(number_holdings(holdings)) == holdings
    assert found.table == ()
    assert found.fits(shape.world_size)
    assert found.shards == math.prod(size for size, is_replicated in mesh if not is_replicated)
    assert len(found.sizes) <= len([size for size, _ in mesh if size > 1])  # neighbours of one kind are one dimension


@given(meshes)
def test_replicas_of_a_shard_are_numbered_by_rank(mesh: list[tuple[int, bool]]) -> None:
    shape = mesh_shape({f"dimension {index}": size for index, (size, _) in enumerate(mesh)})
    found = declared_map(shape, [f"dimension {index}" for index, (_, repeats) in enumerate(mesh) if repeats])
    world_size, replicas = shape.world_size, found.replicas(shape.world_size)
    held = {(found.shard_of(rank), found.replica_of(rank)) for rank in range(world_size)}
    assert held == {(shard, nth) for shard in range(found.shards) for nth in range(replicas)}
    for shard in range(found.shards):
        ranks = found.ranks_of(shard, world_size)
        assert [found.replica_of(rank) for rank in ranks] == list(range(replicas))
        assert {found.shard_of(rank) for rank in ranks} == {shard}


@given(st.permutations([0, 0, 1, 1, 2, 2]))
def test_what_is_on_no_mesh_is_a_table(numbers: list[int]) -> None:
    ordered = number_holdings(numbers)
    found = shard_map_of(ordered)
    assert tuple(by_rank(found, 6)) == ordered
    assert (found.shards, found.replicas(6), found.fits(6), found.fits(5)) == (3, 2, True, False)


def test_shards_are_numbered_in_the_order_of_their_lowest_rank() -> None:
    assert number_holdings(["b", "a", "b", "c"]) == (0, 1, 0, 2)


def test_shards_on_different_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match="what rank 2 holds of the state is on 1 of the ranks, what rank 0 holds on 2"):
        shard_map_of([0, 0, 1])


@pytest.mark.parametrize(
    ("shard_map", "first_ranks", "lonely"),
    [
        (ALL_OF_IT, (0,), set()),
        (ShardMap(4), (0,), {0, 1, 2, 3}),
        (ShardMap(2), (0,), set()),  # on one node, another process is enough
        (ShardMap(2), (0, 2), set()),
        (declared_map(mesh_shape({"pp": 2, "dp": 2}), ["dp"]), (0,), set()),
        (declared_map(mesh_shape({"pp": 2, "dp": 2}), ["dp"]), (0, 2), {0, 1}),  # both replicas are on one node
        (declared_map(mesh_shape({"dp": 2, "tp": 2}), ["dp"]), (0, 3), {0}),
    ],
)
def test_a_shard_is_lonely_if_one_loss_takes_all_its_replicas(
    shard_map: ShardMap, first_ranks: tuple[int, ...], lonely: set[int]
) -> None:
    assert lonely_shards(shard_map, first_ranks, 4) == lonely
