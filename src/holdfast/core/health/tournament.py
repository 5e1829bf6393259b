"""What is measured next: who alone, and who is paired with whom. Pure.

First every node alone, and those that are slow again, beside others that are not: what is slow every time is slow. Who
failed by something that may pass is looked at once more, after a pause. Then the tournament.

The rounds of a tournament come from the circle method: one sits still, the others walk around it. In an odd number one
has a bye in each round, another one each time. Three rounds are enough to tell a node from a link; with up to four
nodes that is every pair.

Afterwards, for as long as it helps: slow pairs are measured again, and nodes that are not cleared are paired with those
that are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from holdfast.core.health.findings import PAIRED, CheckResult, Stage
from holdfast.core.health.verdicts import (
    ACCUSERS_MIN,
    Evidence,
    Norms,
    Pair,
    is_doubtful,
    measured,
    norms,
    problems_of,
    slow_alone,
    slow_stages,
    slowness,
)

Tried = TypeVar("Tried")
ROUNDS = 3
COMPUTING: tuple[Stage, ...] = ("matmul", "bandwidth")


class Round(msgspec.Struct, frozen=True):
    """What is measured at the same time."""

    alone: tuple[str, ...] = ()
    stages: tuple[Stage, ...] = ()
    """In which they are; empty: in all."""
    ready: tuple[str, ...] = ()
    """Who is to be there for the others, and is not measured."""
    pairs: tuple[Pair, ...] = ()
    after_pause: bool = False
    """What failed before is to have time to pass."""


def next_round(evidence: Evidence, machines: dict[str, str], partners: Sequence[str] = ()) -> Round | None:
    """Return the next round, or None when all is known that can be. `partners` are nodes known to be well, for pairs
    only."""
    if fresh := [node_id for node_id in evidence.incarnations if node_id not in evidence.alone]:
        return Round(alone=apart(fresh, machines))
    if step := _alone_again(evidence, machines):
        return step
    if evidence.again:
        failed = [node_id for node_id, kind in evidence.again.items() if kind == "alone"]
        ready = (node_id for node_id, kind in evidence.again.items() if kind == "ready")
        return Round(alone=apart(failed, machines), ready=tuple(ready), after_pause=True)
    # A node that computes slowly would be slow with every partner, and make the partner look slow.
    out = set(slow_alone(evidence, COMPUTING))
    players = [n for n in evidence.incarnations if not problems_of(evidence.alone[n]) and n not in out]
    if players and (fresh := [n for n in partners if n not in evidence.alone]):
        return Round(ready=tuple(fresh))
    helpers = [n for n in partners if players and not problems_of(evidence.alone[n])]
    pairs = disjoint(wanted(evidence, [*players, *helpers]), machines)
    if asleep := [n for pair in pairs for n in pair if n in evidence.asleep]:
        return Round(ready=tuple(asleep))
    return Round(pairs=tuple(pairs)) if pairs else None


def _alone_again(evidence: Evidence, machines: dict[str, str]) -> Round | None:
    known, slow = norms(evidence), slow_alone(evidence)
    sound = [n for n in evidence.incarnations if not problems_of(evidence.alone[n])]
    doubtful = [n for n in sound if n in slow and is_doubtful(evidence.alone[n], known)]
    if not doubtful:
        return None
    stages = {stage for node_id in doubtful for stage in slow_stages(evidence.alone[node_id], known)}
    well = [n for n in sound if n not in slow]
    again = beside_others(doubtful, most_usual(well, evidence.alone, known, stages), evidence.alone)
    return Round(alone=apart(again, machines), stages=tuple(sorted(stages)))


def most_usual(
    well: Sequence[Tried], tried: Mapping[Tried, Sequence[CheckResult]], known: Norms, stages: Collection[Stage]
) -> list[Tried]:
    """Return the nodes sorted by how close their first times are to what is expected."""

    def distance(one: Tried) -> float:
        values = measured(tried[one][:1], known)
        return max((abs(value.times - 1) for value in values if value.stage in stages), default=1.0)

    return sorted(well, key=distance)


def beside_others(
    slow: Sequence[Tried], well: Sequence[Tried], tried: Mapping[Tried, Sequence[CheckResult]]
) -> list[Tried]:
    """Return the slow ones that were measured least, after as many of the others that were not measured more often.
    Both are measured in the same round, so that they can be compared."""
    count = min(len(tried[one]) for one in slow)
    done = [one for one in well if len(tried[one]) > count]
    ready = [one for one in well if len(tried[one]) == count]
    return ready[: max(len(slow) - len(done), 0)] + [one for one in slow if len(tried[one]) == count]


def apart(nodes: Sequence[str], machines: dict[str, str]) -> tuple[str, ...]:
    """Return one node of each machine: nodes that share one would disturb each other."""
    first = {machines[node_id]: node_id for node_id in reversed(nodes)}
    return tuple(node_id for node_id in nodes if first[machines[node_id]] == node_id)


def pair_of(one: str, other: str) -> Pair:
    """Return the two as a pair, the lower one first."""
    return (one, other) if one < other else (other, one)


def rounds(players: Sequence[str], count: int = ROUNDS) -> Iterator[list[Pair]]:
    """Yield the pairs of each round: no player twice in one, no pair in two."""
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
    """Return the pairs still to be measured, the most urgent first. Each result may change what follows."""
    planned = [pair for of_round in rounds(players) for pair in of_round if pair not in evidence.pairs]
    if planned:
        return planned
    known, here = norms(evidence), set(players)
    slow = slowness(evidence).slow
    there = [pair for pair in sorted(evidence.pairs) if set(pair) <= here]
    doubtful = [pair for pair in there if pair in slow and is_doubtful(evidence.pairs[pair], known)]
    if doubtful:
        well = [pair for pair in there if pair not in slow]
        return beside_others(doubtful, most_usual(well, evidence.pairs, known, PAIRED), evidence.pairs)
    return list(_duels(evidence, players))


def _duels(evidence: Evidence, players: Sequence[str]) -> Iterator[Pair]:
    """Yield pairs for the nodes that are not cleared, and accused by too few to be blamed."""
    found = slowness(evidence)
    for player in players:
        if player in found.cleared or len(found.accusers(player)) >= ACCUSERS_MIN:
            continue
        fresh = [other for other in players if other in found.cleared and pair_of(player, other) not in evidence.pairs]
        if fresh:
            yield pair_of(player, fresh[0])


def disjoint(pairs: Sequence[Pair], machines: dict[str, str]) -> list[Pair]:
    """Return as many pairs as can be measured at once, from the front: no node twice, and no machine."""
    busy: set[str] = set()
    chosen = []
    for pair in pairs:
        involved = {machines[node_id] for node_id in pair}
        if not busy & involved:
            busy |= involved
            chosen.append(pair)
    return chosen
