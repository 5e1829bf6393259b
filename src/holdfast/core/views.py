"""Views: numbered, immutable assignments of ranks to nodes.

The rule of stable ranks, when a view follows another:

1. A node that stays keeps its group rank, if that rank still exists in the new size.
2. A node that asked for a rank (`--node-rank`) gets it, if nobody who stays holds it.
3. The rest fill the free ranks from the lowest, in the order in which they joined.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import msgspec

from holdfast.core.ladder import Strategy


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One node's place in a view. Its workers hold the ranks first_rank .. first_rank + workers - 1."""

    node_id: str
    incarnation: str
    group_rank: int
    first_rank: int
    workers: int
    role: str
    role_first_rank: int
    role_world_size: int


class View(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who is in the job, under which ranks, and where they meet."""

    number: int
    members: tuple[Member, ...]
    world_size: int
    store_node_id: str
    store_host: str
    store_port: int
    restart_count: int
    kept: bool = False
    """Workers that live stay and get new places; else all of them start anew."""
    planned: bool = False
    """Nothing is wrong: the workers change over at a step boundary."""
    strategy: Strategy | None = None
    """By which it came about; None for a first view or a change that nobody needed."""
    replaced: tuple[tuple[str, int], ...] = ()
    """Workers (node, local rank) that live but hang, and are ended."""
    weights: tuple[float, ...] = ()
    """By rank, how large its share of the global batch is; the largest is 1. Empty: all alike."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """What the assignment of ranks needs to know of a node."""

    node_id: str
    incarnation: str
    workers: int
    role: str
    requested_rank: int | None
    join_order: int
    current_rank: int | None
    preference: int = 0
    """The smaller, the better its name."""


def choose(candidates: Iterable[Candidate], nodes_max: int) -> list[Candidate]:
    """Those who take part when there are too many: who is in stays in, then who has the better name, then first come,
    first served."""
    ranked = sorted(candidates, key=lambda c: (c.current_rank is None, c.preference, c.join_order))
    return ranked[:nodes_max]


def assign_group_ranks(chosen: Sequence[Candidate]) -> list[Candidate]:
    """The candidates in the order of their new group ranks, by the rule of stable ranks."""
    size = len(chosen)
    seats: list[Candidate | None] = [None] * size
    waiting: list[Candidate] = []

    def seat(candidate: Candidate, rank: int | None) -> None:
        if rank is not None and 0 <= rank < size and seats[rank] is None:
            seats[rank] = candidate
        else:
            waiting.append(candidate)

    for candidate in chosen:
        if candidate.current_rank is not None:
            seat(candidate, candidate.current_rank)
    for candidate in sorted(chosen, key=lambda c: c.join_order):
        if candidate.current_rank is None:
            seat(candidate, candidate.requested_rank)
    queue = iter(sorted(waiting, key=lambda c: c.join_order))
    return [seated if seated is not None else next(queue) for seated in seats]


def seat_members(ordered: Sequence[Candidate]) -> tuple[Member, ...]:
    """Members with their ranks, from candidates in group-rank order."""
    role_sizes: dict[str, int] = {}
    for candidate in ordered:
        role_sizes[candidate.role] = role_sizes.get(candidate.role, 0) + candidate.workers
    members: list[Member] = []
    first_rank = 0
    role_next: dict[str, int] = dict.fromkeys(role_sizes, 0)
    for group_rank, candidate in enumerate(ordered):
        members.append(
            Member(
                node_id=candidate.node_id,
                incarnation=candidate.incarnation,
                group_rank=group_rank,
                first_rank=first_rank,
                workers=candidate.workers,
                role=candidate.role,
                role_first_rank=role_next[candidate.role],
                role_world_size=role_sizes[candidate.role],
            )
        )
        first_rank += candidate.workers
        role_next[candidate.role] += candidate.workers
    return tuple(members)


def ring_partner(first_ranks: Sequence[int], world_size: int, rank: int, nth: int) -> int:
    """The rank that keeps the n-th copy of this rank's shard: on the next node of the ring where there is more than
    one, so that the copy outlives the node; else the next rank. Workers and master count by this same rule."""
    if len(first_ranks) < 2:
        return (rank + nth) % world_size
    node = bisect_right(first_ranks, rank) - 1
    end = first_ranks[node + 1] if node + 1 < len(first_ranks) else world_size
    return (rank + nth * (end - first_ranks[node])) % world_size
