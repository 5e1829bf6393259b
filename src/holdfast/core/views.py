"""Views: numbered, immutable assignments of ranks to nodes.

The rule of stable ranks, when a view follows another:

1. A node that stays keeps its group rank, if that rank still exists in the new size.
2. A node that asked for a rank (`--node-rank`) gets it, if no node that stays has it.
3. The rest fill the free ranks from the lowest, in the order in which they joined.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import msgspec

from holdfast.core.strategies import Strategy

Runs = tuple[tuple[int, int], ...]
_T = TypeVar("_T")


class Member(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One node's place in a view. Its workers hold the ranks first_rank .. first_rank + workers - 1."""

    node_id: str
    incarnation: str
    group_rank: int
    first_rank: int
    workers: int
    role: str
    role_first_rank: int


class View(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who is in the job, under which ranks, and where they meet."""

    number: int
    members: tuple[Member, ...]
    world_size: int
    store_node_id: str
    store_host: str
    store_port: int
    restart_count: int
    keeps_workers: bool = False
    """Live workers stay and get new ranks; else all of them restart."""
    planned: bool = False
    """Nothing is wrong: the workers change over at a step boundary."""
    strategy: Strategy | None = None
    """By which it came about; None for a first view or a restart."""
    replaced: tuple[tuple[str, int], ...] = ()
    """Workers (node, local rank) that live but hang, and are ended."""
    surplus: tuple[tuple[str, int], ...] = ()
    """Workers (node, local rank) of the view before that are well and have no rank in this one: with them the world
    would be no whole number of replicas."""
    weights: tuple[float, ...] = ()
    """By rank, how large its share of the global batch is; the largest is 1. Empty: all alike."""


class ViewShape(NamedTuple):
    """What every order to serve says of a view as a whole; made once for each view."""

    node_sizes: Runs = ()
    """The workers of each node, in the order of group ranks, as (workers, nodes)."""
    weight_runs: tuple[tuple[float, int], ...] = ()
    """The weight of each rank, as (weight, ranks)."""
    role_sizes: Mapping[str, int] = MappingProxyType({})
    """How many ranks each role has."""


class NodeCandidate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the assignment of ranks needs to know of a node."""

    node_id: str
    incarnation: str
    workers: int
    role: str
    requested_rank: int | None
    join_order: int
    current_rank: int | None
    preference: int = 0
    """The smaller, the better its reputation."""


def choose(candidates: Iterable[NodeCandidate], nodes_max: int) -> list[NodeCandidate]:
    """Return the nodes that take part when there are too many: members stay, then better reputation, then join
    order."""
    ranked = sorted(candidates, key=lambda c: (c.current_rank is None, c.preference, c.join_order))
    return ranked[:nodes_max]


def assign_group_ranks(chosen: Sequence[NodeCandidate], seated: Iterable[Member] = ()) -> list[NodeCandidate | Member]:
    """Return the candidates in the order of their new group ranks, by the rule of stable ranks. `seated` are members
    that stay as they are, each with a group rank of its own that the new size has."""
    seated = tuple(seated)
    size = len(chosen) + len(seated)
    by_rank: list[NodeCandidate | Member | None] = [None] * size
    waiting: list[NodeCandidate] = []
    for member in seated:
        assert by_rank[member.group_rank] is None, f"two members of rank {member.group_rank} stay"
        by_rank[member.group_rank] = member

    newcomers = sorted((c for c in chosen if c.current_rank is None), key=lambda c: c.join_order)
    stay = ((c, c.current_rank) for c in chosen if c.current_rank is not None)
    for candidate, rank in (*stay, *((c, c.requested_rank) for c in newcomers)):
        if rank is not None and 0 <= rank < size and by_rank[rank] is None:
            by_rank[rank] = candidate
        else:
            waiting.append(candidate)
    queue = iter(sorted(waiting, key=lambda c: c.join_order))
    return [placed if placed is not None else next(queue) for placed in by_rank]


def make_members(ordered: Sequence[NodeCandidate | Member]) -> tuple[Member, ...]:
    """Return members with their ranks, from candidates in group-rank order. A member whose ranks stay is taken as it
    is: most of a large view do."""
    members: list[Member] = []
    first_rank = 0
    role_next = dict.fromkeys({candidate.role for candidate in ordered}, 0)
    has_roles = len(role_next) > 1
    for group_rank, candidate in enumerate(ordered):
        role, workers = candidate.role, candidate.workers
        role_first_rank = role_next[role] if has_roles else first_rank
        if (
            type(candidate) is Member
            and candidate.first_rank == first_rank
            and candidate.role_first_rank == role_first_rank
            and candidate.group_rank == group_rank
        ):
            member = candidate
        else:
            member = Member(
                node_id=candidate.node_id,
                incarnation=candidate.incarnation,
                group_rank=group_rank,
                first_rank=first_rank,
                workers=workers,
                role=role,
                role_first_rank=role_first_rank,
            )
        members.append(member)
        first_rank += workers
        if has_roles:
            role_next[role] += workers
    return tuple(members)


def shape_of(view: View) -> ViewShape:
    """Return what all orders of a view have in common."""
    role_sizes: dict[str, int] = {}
    for member in view.members:
        role_sizes[member.role] = role_sizes.get(member.role, 0) + member.workers
    return ViewShape(tuple(_runs(member.workers for member in view.members)), tuple(_runs(view.weights)), role_sizes)


def _runs(values: Iterable[_T]) -> Iterator[tuple[_T, int]]:
    return ((value, len(list(alike))) for value, alike in groupby(values))


def reassign_local_ranks(live: Mapping[int, bool], workers_before: int, workers: int) -> dict[int, int]:
    """Return the new local rank of each live worker of a node in a view that keeps its workers; a worker without one
    has to go. `live` says of each old local rank whether its worker has joined a view.

    1. If the node has as many workers as before, or more, each keeps its local rank: those of the dead are filled.
    2. If it has fewer, the live workers close up in order: 0, 2, 3 become 0, 1, 2. If there are still too many, those
       that have never joined a view go first, then the highest.

    The agent assigns by this rule, and the master counts on it (core/state_coverage.py)."""
    if workers >= workers_before:
        return {local_rank: local_rank for local_rank in live}
    staying = sorted(live, key=lambda local_rank: (not live[local_rank], local_rank))[:workers]
    return {local_rank: index for index, local_rank in enumerate(sorted(staying))}


def ring_partner(first_ranks: Sequence[int], world_size: int, rank: int, nth: int) -> int:
    """Return the rank that keeps the n-th copy of this rank's shard: on the next node of the ring where there is more
    than one, so that the copy survives the loss of the node; else the next rank. Workers and the master use this same
    rule."""
    if len(first_ranks) < 2:
        return (rank + nth) % world_size
    node = bisect_right(first_ranks, rank) - 1
    end = first_ranks[node + 1] if node + 1 < len(first_ranks) else world_size
    return (rank + nth * (end - first_ranks[node])) % world_size
