"""Who takes part, and under which ranks."""

from __future__ import annotations

import random

import pytest

from holdfast.core.views import Member, NodeCandidate, View, assign_group_ranks, choose, make_members, shape_of


def candidate(
    node_id: str,
    join_order: int,
    *,
    at: int | None = None,
    asks: int | None = None,
    workers: int = 1,
    role: str = "default",
) -> NodeCandidate:
    """`at`: the group rank it holds; `asks`: the one it would like."""
    return NodeCandidate(
        node_id=node_id,
        incarnation=f"{node_id}.1",
        workers=workers,
        role=role,
        requested_rank=asks,
        join_order=join_order,
        current_rank=at,
    )


def seated(*candidates: NodeCandidate) -> str:
    return "".join(c.node_id for c in assign_group_ranks(choose(candidates, len(candidates))))


RANKS = {
    "newcomers sit in the order in which they joined": (
        [candidate("b", 1), candidate("a", 0), candidate("c", 2)],
        "abc",
    ),
    "a node that stays keeps its rank, whatever the order of joining": (
        [candidate("a", 0, at=2), candidate("b", 1, at=0), candidate("c", 2, at=1)],
        "bca",
    ),
    "a replacement takes the lost node's place and nobody else moves": (
        [candidate("a", 0, at=0), candidate("c", 2, at=2), candidate("d", 3)],
        "adc",
    ),
    "the next life of a node comes back to its rank": (
        [candidate("b", 9, at=1), candidate("a", 0, at=0), candidate("c", 2, at=2)],
        "abc",
    ),
    "when the world shrinks, only nodes whose rank is gone move": (
        [candidate("a", 0, at=0), candidate("c", 2, at=2), candidate("d", 3, at=3)],
        "adc",
    ),
    "several whose rank is gone fill the gaps in the order in which they joined": (
        [candidate("d", 1, at=3), candidate("c", 2, at=2)],
        "dc",
    ),
    "who joined first comes first among those who move, member or not": (
        [candidate("z", 0), candidate("b", 1, at=5)],
        "zb",
    ),
    "a requested rank is given": (
        [candidate("a", 0, asks=2), candidate("b", 1, asks=0), candidate("c", 2, asks=1)],
        "bca",
    ),
    "a requested rank is given before those who do not mind are seated": (
        [candidate("a", 0), candidate("b", 1), candidate("c", 2, asks=0)],
        "cab",
    ),
    "of two who ask for the same rank the first to join has it": (
        [candidate("a", 0, asks=1), candidate("b", 1, asks=1)],
        "ba",
    ),
    "nobody who stays is moved for a request": (
        [candidate("a", 0, at=0), candidate("b", 1, at=1), candidate("c", 2, asks=0)],
        "abc",
    ),
    "a member's own request does not move it later": (
        [candidate("a", 0, at=1, asks=0), candidate("b", 1, at=0, asks=1)],
        "ba",
    ),
    "a request for a rank that does not exist is no request": (
        [candidate("a", 0, asks=7), candidate("b", 1, asks=-1)],
        "ab",
    ),
}


@pytest.mark.parametrize("rule", RANKS)
def test_ranks(rule: str) -> None:
    candidates, expected = RANKS[rule]
    assert seated(*candidates) == expected
    assert seated(*reversed(candidates)) == expected, "it depends on the order in which they were looked at"


CHOICES = {
    "all, if there is room": ([candidate("a", 0), candidate("b", 1)], 3, {"a", "b"}),
    "first come, first served": ([candidate("c", 2), candidate("a", 0), candidate("b", 1)], 2, {"a", "b"}),
    "who is in stays in, though others joined before": (
        [candidate("a", 0), candidate("b", 1, at=0), candidate("c", 2, at=1)],
        2,
        {"b", "c"},
    ),
    "a free place goes to the first in the queue": (
        [candidate("d", 3), candidate("c", 2), candidate("a", 0, at=0)],
        2,
        {"a", "c"},
    ),
}


@pytest.mark.parametrize("rule", CHOICES)
def test_who_takes_part(rule: str) -> None:
    candidates, nodes_max, expected = CHOICES[rule]
    assert {c.node_id for c in choose(candidates, nodes_max)} == expected


def test_ranks_of_workers_follow_one_another_over_nodes_of_different_sizes() -> None:
    members = make_members([candidate("a", 0, workers=4), candidate("b", 1, workers=1), candidate("c", 2, workers=8)])
    assert [(m.group_rank, m.first_rank, m.workers) for m in members] == [(0, 0, 4), (1, 4, 1), (2, 5, 8)]


def test_each_role_counts_its_own_ranks() -> None:
    members = make_members(
        [
            candidate("a", 0, workers=2, role="trainer"),
            candidate("b", 1, workers=3, role="reader"),
            candidate("c", 2, workers=4, role="trainer"),
        ]
    )
    by_node = {m.node_id: m for m in members}
    view = View(
        number=1,
        members=members,
        world_size=9,
        store_node_id="a",
        store_host="",
        store_port=1,
        restart_count=0,
        keeps_workers=False,
    )
    role_sizes = shape_of(view).role_sizes

    def role_ranks(member: Member) -> tuple[int, int]:
        return member.role_first_rank, role_sizes[member.role]

    assert role_ranks(by_node["a"]) == (0, 6)
    assert role_ranks(by_node["b"]) == (0, 3)
    assert role_ranks(by_node["c"]) == (2, 6)
    assert by_node["c"].first_rank == 5


@pytest.mark.parametrize("seed", range(20))
def test_members_that_stay_as_they_are_make_the_same_view_and_are_not_made_again(seed: int) -> None:
    chance = random.Random(seed)
    roles = ["default"] if seed % 2 else ["trainer", "reader"]

    def node(number: int, at: int | None) -> NodeCandidate:
        return candidate(f"n{number}", number, at=at, workers=chance.choice([1, 2]), role=chance.choice(roles))

    first = make_members([node(number, number) for number in range(12)])
    kept = [m for m in first if chance.random() < 0.8 and m.group_rank < 9]
    stay = [candidate(m.node_id, m.group_rank, at=m.group_rank, workers=m.workers, role=m.role) for m in kept]
    newcomers = [node(20 + number, None) for number in range(9 - len(kept))]
    expected = make_members(assign_group_ranks([*stay, *newcomers]))
    found = make_members(assign_group_ranks(newcomers, kept))
    assert found == expected
    assert [m for m in found if any(m is one for one in kept)] == [m for m in expected if m in kept]
