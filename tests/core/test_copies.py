"""Who holds the state: the ring of copies, the seats of a node, and what is missing of a complete copy."""

from __future__ import annotations

import pytest

from holdfast.core.copies import Holder, Layout, Seats, lack, reseat
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


def holder(rank: int, *, shards: int = 4, replicas: int = 0, fresh: bool = False, world_size: int = 4) -> Holder:
    layout = Layout(shards=shards, replicas=replicas, world_size=world_size, first_ranks=(0, world_size // 2))
    return Holder(view=1, rank=rank, layout=layout, fresh=fresh)


A, B, C = (holder(rank) for rank in range(3))


@pytest.mark.parametrize(
    ("seats", "dead", "workers", "after"),
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
def test_the_living_keep_their_seats_or_close_up(seats: Seats, dead: set[int], workers: int, after: Seats) -> None:
    assert reseat(seats, dead, workers) == after


def test_nobody_is_left() -> None:
    assert lack([]) == "no worker that holds the state is left"


def test_one_is_enough_where_every_rank_has_all() -> None:
    assert lack([holder(3, shards=1)]) == ""


def test_each_shard_is_needed() -> None:
    assert lack(holder(rank) for rank in range(4)) == ""
    assert lack(holder(rank) for rank in (0, 1, 3)) == "shard 2 of 4 has no live copy left"
    assert lack([holder(1)]) == "shard 0 of 4 and 2 more has no live copy left"


def test_a_copy_stands_for_its_rank_once_it_has_been_made() -> None:
    assert lack(holder(rank, replicas=1) for rank in (0, 1)) == ""
    assert lack(holder(rank, replicas=1, fresh=rank == 0) for rank in (0, 1)) == "shard 2 of 4 has no live copy left"


def test_shards_of_two_cuts_do_not_make_a_copy() -> None:
    assert lack([holder(0, shards=2, world_size=2), holder(1)]) != ""
