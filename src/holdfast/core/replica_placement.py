"""On which other nodes a node's snapshots are kept. Pure.

The rule of partners. Each node has N of them, who hold copies of its images. In order of weight:

1. No node holds for more than `2 N` others, so that the memory it must have can be said beforehand.
2. Nodes in doubt are used last.
3. Partners are in other failure domains than the node, and in different ones from each other.
4. All nodes hold for the same number of others (N), where 1 to 3 permit it.
5. The rest is the ring: the next domain's node of the same place; within one domain, the next node.

The order of changes. Copies are large, so what is good stays: a placement follows from the one before it.

1. Copies on nodes that are gone, and of nodes that are gone, are forgotten.
2. What is missing is placed.
3. A copy moves if there is a place that is better by 1 to 3.
4. A copy moves from a node with too many to one with too few, if it is no worse there by 1 to 3.

Looking for a place is bounded (`LOOKS_MAX`), so that ten thousand nodes are placed in a moment; beyond it, a place that
is good enough is taken for the best.

Parity groups: nodes of different domains, K to a group, each holding parity so that the images of any one of them
follow from the others'. Groups have at least K members, where there are as many nodes, so that memory stays within
what was asked for; and what can stay together, does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

import msgspec

LOOKS_MAX = 256
"""Candidates that are looked at for one copy."""
LOOKS_A_DOMAIN_MAX = 64
ROUNDS_MAX = 16
"""Of improving and levelling: each makes places better or loads more even, so a few are enough."""
HOLDS_FACTOR_MAX = 2
"""A node holds for at most this many times as many others as it has partners itself."""

Groups = tuple[tuple[str, ...], ...]


class PlacementSite(msgspec.Struct, frozen=True):
    """A node that can hold images, and what it would go down with."""

    node_id: str
    domain: str


class ReplicaPlacement(msgspec.Struct, frozen=True):
    """Who holds whose images."""

    partners: dict[str, tuple[str, ...]] = {}
    """By node: those who hold its images."""
    owners: dict[str, tuple[str, ...]] = {}
    """By node: those whose images it holds."""


NOWHERE = ReplicaPlacement()


def place(
    sites: Sequence[PlacementSite], replicas: int, before: ReplicaPlacement = NOWHERE, doubtful: Collection[str] = ()
) -> ReplicaPlacement:
    """Return partners for each of these nodes, in the order of the ring, by the rules above."""
    table = _Table(sites, min(replicas, len(sites) - 1), frozenset(doubtful))
    table.keep(before)
    table.fill()
    for _ in range(ROUNDS_MAX):  # levelling may make room at a safer place
        table.improve()
        if not table.level():
            break
    return ReplicaPlacement({owner: tuple(held) for owner, held in table.held.items() if held}, table.owners())


Rank = tuple[bool, bool, bool, int]
"""How bad a place is, by rules 1 to 3."""
PERFECT: Rank = (False, False, False, 0)


@dataclass
class _Table:
    """A placement in the making."""

    sites: Sequence[PlacementSite]
    copies: int
    doubtful: frozenset[str]
    held: dict[str, list[str]] = field(default_factory=dict)
    """By owner: its holders."""
    loads: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.domain = {site.node_id: site.domain for site in self.sites}
        self.rings: dict[str, list[str]] = {}
        self.index: dict[str, int] = {}
        for site in self.sites:
            ring = self.rings.setdefault(site.domain, [])
            self.index[site.node_id] = len(ring)
            ring.append(site.node_id)
        self.domains = list(self.rings)
        self.domain_index = {domain: index for index, domain in enumerate(self.domains)}

    def keep(self, before: ReplicaPlacement) -> None:
        for owner in self.domain:
            kept = [holder for holder in before.partners.get(owner, ()) if holder in self.domain][: self.copies]
            self.held[owner] = kept
            self.loads.update(kept)

    def fill(self) -> None:
        for nth in range(self.copies):  # all first copies before any second one: so that a ring comes out
            for owner, holders in self.held.items():
                if len(holders) <= nth and (found := self._best(owner, holders)):
                    holders.append(found)
                    self.loads[found] += 1

    def improve(self) -> None:
        """Move copies to better places. Each move improves its own copy's place and worsens no other's, so it ends."""
        for owner, holders in self.held.items():
            for holder in list(holders):
                others = [h for h in holders if h != holder]
                rank = self._rank(owner, holder, others, is_there=True)
                if rank == PERFECT:
                    continue
                better = self._best(owner, others, leaving=holder)
                if better and self._rank(owner, better, others) < rank:
                    self._move(owner, holder, better)

    def level(self) -> bool:
        """Move copies to less loaded nodes and return whether anything moved."""
        moves = 0
        light = [node_id for node_id in self.domain if self.loads[node_id] < self.copies]
        heavy = self._heavy() if light else {}
        for node_id in light:
            while self.loads[node_id] < self.copies and (found := self._relief(node_id, heavy)):
                self._move(*found, node_id)
                moves += 1
        return bool(moves)

    def _heavy(self) -> dict[str, list[str]]:
        """Return the owners by holder, of the holders that have too many copies."""
        heavy: dict[str, list[str]] = {h: [] for h, load in self.loads.items() if load > self.copies}
        for owner, holders in self.held.items():
            for holder in holders:
                if holder in heavy:
                    heavy[holder].append(owner)
        return heavy

    def _relief(self, node_id: str, heavy: Mapping[str, list[str]]) -> tuple[str, str] | None:
        """Return a copy that would be no worse on this node."""
        pairs = ((owner, holder) for holder, owners in heavy.items() for owner in owners)
        for owner, holder in islice(pairs, LOOKS_MAX):
            holders = self.held[owner]
            if holder not in holders or node_id in (owner, *holders) or self.loads[holder] <= self.copies:
                continue
            others = [h for h in holders if h != holder]
            if self._rank(owner, node_id, others) <= self._rank(owner, holder, others, is_there=True):
                return owner, holder
        return None

    def _move(self, owner: str, holder: str, to: str) -> None:
        holders = self.held[owner]
        holders[holders.index(holder)] = to
        self.loads[holder] -= 1
        self.loads[to] += 1

    def _best(self, owner: str, others: Collection[str], leaving: str = "") -> str:
        """Return where to put a copy, given the owner's other copies; empty if there is no place."""
        best, best_key = "", None
        for candidate in self._around(owner):
            if candidate in others or candidate == leaving:
                continue
            rank = self._rank(owner, candidate, others)
            if rank == PERFECT and self.loads[candidate] < self.copies:
                return candidate
            key = (rank, self.loads[candidate])
            if best_key is None or key < best_key:
                best, best_key = candidate, key
        if best_key and best_key[0][0]:  # all candidates hold too much: take any node that does not
            there = (n for n in self.domain if n not in (owner, leaving, *others) and not self._is_over(n))
            return next(there, best)
        return best

    def _rank(self, owner: str, holder: str, others: Collection[str], *, is_there: bool = False) -> Rank:
        domain = self.domain[holder]
        crowd = sum(self.domain[other] == domain for other in others)
        return self._is_over(holder, is_there), holder in self.doubtful, domain == self.domain[owner], crowd

    def _is_over(self, holder: str, is_there: bool = False) -> bool:
        """Return whether the node would hold, or holds, more copies than it may."""
        return self.loads[holder] - is_there >= self.copies * HOLDS_FACTOR_MAX

    def _around(self, owner: str) -> Iterator[str]:
        """Yield the nodes in ring order: of other domains first, then of its own. Nodes of a large domain start at
        different domains, so that they do not all choose the next one."""
        own, others = self.domain_index[self.domain[owner]], len(self.domains) - 1
        steps = ((self.index[owner] + step) % others + 1 for step in range(others))
        domains = (self.domains[(own + step) % (others + 1)] for step in steps)
        away = chain.from_iterable(self._domain_around(owner, domain) for domain in domains)
        return chain(islice(away, LOOKS_MAX), self._domain_around(owner, self.domain[owner]))

    def _domain_around(self, owner: str, domain: str) -> Iterator[str]:
        """Return a few nodes of a domain, from the one at the owner's position in its own domain."""
        ring, own = self.rings[domain], self.rings[self.domain[owner]]
        is_own = domain == self.domain[owner]
        first = self.index[owner] + 1 if is_own else self.index[owner] * len(ring) // len(own)
        return (ring[(first + step) % len(ring)] for step in range(min(len(ring) - is_own, LOOKS_A_DOMAIN_MAX)))

    def owners(self) -> dict[str, tuple[str, ...]]:
        """Return by node whose images it holds."""
        found: dict[str, list[str]] = {}
        for owner, holders in self.held.items():
            for holder in holders:
                found.setdefault(holder, []).append(owner)
        return {holder: tuple(owners) for holder, owners in found.items()}


def parity_groups(
    sites: Sequence[PlacementSite], size: int, before: Groups = (), doubtful: Collection[str] = ()
) -> Groups:
    """Return groups of at least `size` nodes, or one of all; none for a single node."""
    if size < 2 or len(sites) < 2:
        return ()
    deal = _Deal(sites, max(len(sites) // size, 1), frozenset(doubtful))
    deal.keep(before)
    deal.assign_rest()
    deal.level()
    return tuple(tuple(group) for group in deal.groups)


class _Deal:
    """Groups in the making."""

    def __init__(self, sites: Sequence[PlacementSite], count: int, doubtful: frozenset[str]) -> None:
        self.domain = {site.node_id: site.domain for site in sites}
        self.doubtful, self.count = doubtful, count
        self.size_min, self.size_max = len(sites) // count, -(-len(sites) // count)
        self.groups: list[list[str]] = []

    def keep(self, before: Groups) -> None:
        left = [[node_id for node_id in group if node_id in self.domain] for group in before]
        largest = sorted((group for group in left if group), key=len, reverse=True)[: self.count]
        self.groups = [group for group in left if group in largest]
        for group in self.groups:
            while len(group) > self.size_max:
                group.remove(max(group, key=lambda node_id: self._crowd(group, node_id)))
        self.groups += [[] for _ in range(self.count - len(self.groups))]

    def assign_rest(self) -> None:
        """Assign the remaining nodes, the largest domain first, so that its nodes come into different groups."""
        assigned = {node_id for group in self.groups for node_id in group}
        sizes = Counter(self.domain.values())
        rest = [node_id for node_id in self.domain if node_id not in assigned]
        rest.sort(key=lambda node_id: (-sizes[self.domain[node_id]], self.domain[node_id]))
        for number, node_id in enumerate(rest):
            seen = (self.groups[(number + step) % self.count] for step in range(self.count))
            some = list(islice((group for group in seen if len(group) < self.size_max), LOOKS_A_DOMAIN_MAX))
            min(some, key=lambda group: (self._crowd(group, node_id), len(group))).append(node_id)

    def level(self) -> None:
        """Move nodes until no group is too small."""
        while len(small := min(self.groups, key=len)) < self.size_min:
            large = max(self.groups, key=len)
            moved = min(large, key=lambda node_id: self._crowd(small, node_id) - self._crowd(large, node_id))
            large.remove(moved)
            small.append(moved)

    def _crowd(self, group: Sequence[str], node_id: str) -> int:
        """Return how many of a group would fail, or may fail, together with this node."""
        others = [other for other in group if other != node_id]
        shaky = sum(other in self.doubtful for other in others) if node_id in self.doubtful else 0
        return sum(self.domain[other] == self.domain[node_id] for other in others) + shaky
