"""What is measured next: who alone, and who is paired with whom. Pure.

First every node alone, and those that are slow once more: what is slow twice is slow. Then the tournament.

The rounds of a tournament come from the circle method: one sits still, the others walk around it. In an odd number one
has a bye in each round, another one each time. Three rounds are enough to tell a node from a link; with up to four
nodes that is everybody with everybody.

Afterwards, for as long as it helps: slow pairs are played again, and whoever is not cleared is tried with those who
are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from holdfast.core.health import Stage
from holdfast.core.verdicts import ACCUSERS_MIN, Evidence, Pair, is_doubtful, norms, problems_of, slow_alone, slowness

ROUNDS = 3
COMPUTING: tuple[Stage, ...] = ("matmul", "bandwidth")


class Round(msgspec.Struct, frozen=True):
    """What is measured at the same time."""

    alone: tuple[str, ...] = ()
    ready: tuple[str, ...] = ()
    """Who is to be there for the others, and is not measured."""
    pairs: tuple[Pair, ...] = ()


def next_round(evidence: Evidence, machines: dict[str, str], partners: Sequence[str] = ()) -> Round | None:
    """The next one, or None when all is known that can be. `partners`: nodes known to be well, for the pairs only."""
    if fresh := [node_id for node_id in evidence.lives if node_id not in evidence.alone]:
        return Round(alone=apart(fresh, machines))
    known, slow = norms(evidence), set(slow_alone(evidence)) & set(evidence.lives)
    again = [n for n in slow if is_doubtful(evidence.alone[n], known) and not problems_of(evidence.alone[n])]
    if again:
        return Round(alone=apart(sorted(again), machines))
    # Who computes slowly would be slow with everybody: that is known, and nobody is to suffer from it.
    out = set(slow_alone(evidence, COMPUTING))
    players = [n for n in evidence.lives if not problems_of(evidence.alone[n]) and n not in out]
    if players and (asleep := [n for n in partners if n not in evidence.alone]):
        return Round(ready=tuple(asleep))
    helpers = [n for n in partners if players and not problems_of(evidence.alone[n])]
    pairs = disjoint(wanted(evidence, [*players, *helpers]), machines)
    return Round(pairs=tuple(pairs)) if pairs else None


def apart(nodes: Sequence[str], machines: dict[str, str]) -> tuple[str, ...]:
    """One of each machine: nodes that share one would disturb each other."""
    first = {machines[node_id]: node_id for node_id in reversed(nodes)}
    return tuple(node_id for node_id in nodes if first[machines[node_id]] == node_id)


def pair_of(one: str, other: str) -> Pair:
    """In order."""
    return (one, other) if one < other else (other, one)


def rounds(players: Sequence[str], count: int = ROUNDS) -> Iterator[list[Pair]]:
    """The pairs of each round: no player twice in one, no pair in two."""
    circle: list[str | None] = [*players]
    if len(players) < 2:
        return
    if len(circle) % 2:
        circle.append(None)
    for _ in range(min(count + len(players) % 2, len(circle) - 1)):  # a bye costs its player a round
        half = len(circle) // 2
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [pair_of(one, other) for one, other in facing if one is not None and other is not None]
        circle[1:] = [circle[-1], *circle[1:-1]]


def wanted(evidence: Evidence, players: Sequence[str]) -> list[Pair]:
    """The pairs still to be played, the most urgent first; what is known may change with each."""
    planned = [pair for of_round in rounds(players) for pair in of_round if pair not in evidence.pairs]
    if planned:
        return planned
    known, here = norms(evidence), set(players)
    slow = sorted(slowness(evidence).slow)
    again = [pair for pair in slow if is_doubtful(evidence.pairs[pair], known) and set(pair) <= here]
    return again or list(_duels(evidence, players))


def _duels(evidence: Evidence, players: Sequence[str]) -> Iterator[Pair]:
    """For those who are not cleared, and accused by too few to be blamed."""
    found = slowness(evidence)
    for player in players:
        if player in found.cleared or len(found.accusers(player)) >= ACCUSERS_MIN:
            continue
        fresh = [other for other in players if other in found.cleared and pair_of(player, other) not in evidence.pairs]
        if fresh:
            yield pair_of(player, fresh[0])


def disjoint(pairs: Sequence[Pair], machines: dict[str, str]) -> list[Pair]:
    """As many as can be played at once, from the front: no node twice, and no machine."""
    busy: set[str] = set()
    chosen = []
    for pair in pairs:
        involved = {machines[node_id] for node_id in pair}
        if not busy & involved:
            busy |= involved
            chosen.append(pair)
    return chosen
