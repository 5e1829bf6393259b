"""Who holds the state: the ring of copies, the local ranks of a node, and what is missing of a complete copy."""

from __future__ import annotations

import pytest

from holdfast.core.shard_map import ShardMap
from holdfast.core.state_coverage import NodeHolders, ShardLayout, StateHolder, carry_holders, missing_shards
from holdfast.core.views import ring_partner

UNEVEN = (0, 2, 5)  # three nodes of 2, 3 and 1 workers


@pytest.mark.parametrize(
    ("first_ranks", "world_size", "rank", "nth", "partner"),
    [
        ((0,), 4, 0, 1, 1),
        ((0,), 4, 3, 1, 0),
        ((0,), 4, 3, 2, 1),
        ((0, 2), 4, 0, 1, 2),
        ((0, 2), 4, 3, 1, 1),
        ((0, 1, 2), 3, 2, 2, 1),
        (UNEVEN, 6, 1, 1, 3),
        (UNEVEN, 6, 4, 1, 1),
        (UNEVEN, 6, 5, 1, 0),
    ],
)
def test_copies_go_around_a_ring(
    first_ranks: tuple[int, ...], world_size: int, rank: int, nth: int, partner: int
) -> None:
    assert ring_partner(first_ranks, world_size, rank, nth) == partner


@pytest.mark.parametrize("first_ranks", [(0, 3), (0, 2, 4), (0, 1, 2, 3, 4, 5)])
def test_on_nodes_of_one_size_the_first_copy_is_on_another_node(first_ranks: tuple[int, ...]) -> None:
    nodes = [sum(rank >= first for first in first_ranks) for rank in range(6)]
    assert all(nodes[rank] != nodes[ring_partner(first_ranks, 6, rank, 1)] for rank in range(6))


def holder(rank: int, *, shards: int = 4, replicas: int = 0, world_size: int = 4) -> StateHolder:
    layout = ShardLayout(
        shard_map=ShardMap(shards), replicas=replicas, world_size=world_size, first_ranks=(0, world_size // 2)
    )
    return StateHolder(view=1, rank=rank, layout=layout)


A, B, C = (holder(rank) for rank in range(3))


@pytest.mark.parametrize(
    ("holders", "dead", "workers", "after"),
    [
        ((A, B, C), set(), 3, (A, B, C)),
        ((A, B, C), {1}, 3, (A, None, C)),
        ((A, B, C), {1}, 2, (A, C)),
        ((A, B, C), {0, 1}, 1, (C,)),
        ((A, None, C), {0}, 2, (None, C)),
        ((A,), set(), 3, (A, None, None)),
        ((), set(), 2, (None, None)),
        ((A, B, C), {0, 2}, 2, (B, None)),
    ],
)
def test_the_living_keep_their_local_ranks_or_close_up(
    holders: NodeHolders, dead: set[int], workers: int, after: NodeHolders
) -> None:
    assert carry_holders(holders, dead, workers) == after


def test_nobody_is_left() -> None:
    assert missing_shards([]) == "no worker that holds the state is left"


def test_one_is_enough_where_every_rank_has_all() -> None:
    assert missing_shards([holder(3, shards=1)]) == ""


def test_each_shard_is_needed() -> None:
    assert missing_shards(holder(rank) for rank in range(4)) == ""
    assert missing_shards(holder(rank) for rank in (0, 1, 3)) == "shard 2 of 4 has no live copy left"
    assert missing_shards([holder(1)]) == "shard 0 of 4 and 2 more has no live copy left"


def own(*ranks: int, copies: int = 1, shards: int = 1) -> list[StateHolder]:
    """Those of four ranks on two nodes that live, each with state of its own: the ring is 0 → 2 → 1 → 3 → 0."""
    layout = ShardLayout(
        shard_map=ShardMap(shards), replicas=0, world_size=4, first_ranks=(0, 2), per_rank=True, local_replicas=copies
    )
    return [StateHolder(view=1, rank=rank, layout=layout) for rank in ranks]


@pytest.mark.parametrize(
    ("holders", "missing"),
    [
        (own(0, 1, 2, 3), ""),
        (own(0, 1, 2, 3, copies=0), ""),
        (own(0, 1, 3), ""),
        (own(0, 1, 3, copies=0), "the own state of rank 2"),
        (own(0, 1), ""),  # a node: its copies are on the other one
        (own(1, 3), "the own state of rank 0 and 1 more"),  # 0 and 2 keep one another's
        (own(0, 1, shards=2), ""),
        (own(0, 2, shards=2), "shard 1 of 2 and 2 more"),
    ],
)
def test_what_a_rank_has_for_itself_is_with_it_or_with_its_ring_partner(
    holders: list[StateHolder], missing: str
) -> None:
    assert missing_shards(holders) == (f"{missing} has no live copy left" if missing else "")


def test_a_copy_stands_for_its_rank() -> None:
    assert missing_shards(holder(rank, replicas=1) for rank in (0, 1)) == ""
    assert (
        missing_shards(holder(rank, replicas=1) for rank in (0, 2)) == "shard 1 of 4 and 1 more has no live copy left"
    )


def test_shards_of_two_cuts_do_not_make_a_copy() -> None:
    assert missing_shards([holder(0, shards=2, world_size=2), holder(1)]) != ""
