"""Ranks that are slower than the others, and what to do about their node. Pure.

What is compared is a rank's own time in a step: from its beginning to its first collective, before which nobody waits
for anybody. (The rest of a step is as long for all: everybody waits for the slowest.) Each node reports the median over
its last steps every few seconds. A rank is slow in a report if it is beyond THRESHOLD robust deviations of the other
ranks, with a floor of 5 % of their median: by a fifth at least. Slow in WINDOW reports in a row, it is a straggler:
told once a view, and by `--straggler-action`

    report   no more than that
    shift    the others take a part of its share of the global batch, from the next step boundary on (shares.py)
    swap     its node leaves at a step boundary, if one stands by that can take its place
"""

from __future__ import annotations

from collections.abc import Collection
from statistics import median

from holdfast.core import records as r
from holdfast.core.plans import find_substitute, standby
from holdfast.core.state import Job, Present

WINDOW = 3
THRESHOLD = 4.0
FLOOR = 0.05
FLOOR_S = 0.001
"""What schedulers do to anybody."""
TO_SIGMA = 1.4826
FEW = 32
"""Of as many ranks, each is compared with all others; of more, with all, as they were a moment ago."""
NORM_EVERY_S = 5.0
ACTIONS = ("report", "shift", "swap")

Seat = tuple[str, int]


def norm_of(own_s: Collection[float]) -> tuple[float, float]:
    """What ranks take, and how much they differ."""
    middle = median(own_s)
    return middle, max(TO_SIGMA * median(abs(one - middle) for one in own_s), FLOOR * middle, FLOOR_S)


def score(job: Job, seat: Seat) -> tuple[float, float]:
    """By how many deviations a rank is slower than the others, and what they take. Among many it makes no difference
    whether it is one of the others itself."""
    if len(job.paces) > FEW:
        middle, sigma = job.pace_norm[1:]
    else:
        middle, sigma = norm_of([own_s for other, own_s in job.paces.items() if other != seat] or [job.paces[seat]])
    return (job.paces[seat] - middle) / sigma, middle


def note(job: Job, record: r.PacesNoted) -> None:
    """Take a node's report in. Part of evolve."""
    seats = [(record.node_id, pace.local_rank) for pace in record.paces]
    job.paces |= {seat: pace.own_s for seat, pace in zip(seats, record.paces, strict=True)}
    if len(job.paces) > FEW and record.at >= job.pace_norm[0] + NORM_EVERY_S:
        job.pace_norm = (record.at, *norm_of(job.paces.values()))
    for seat in seats:
        job.slow[seat] = job.slow.get(seat, 0) + 1 if score(job, seat)[0] > THRESHOLD else 0


def conclude(job: Job, now: float) -> r.StragglerFound | r.NodeDraining | None:
    """A straggler that is still to be told of, or to be swapped."""
    if slow := untold(job):
        return _found(job, slow[0], now)
    return _swap(job, now) if job.settings.straggler_action == "swap" else None


def untold(job: Job) -> list[Seat]:
    """Stragglers that no record has named yet."""
    return [seat for seat, count in job.slow.items() if count >= WINDOW and seat not in job.stragglers]


def _found(job: Job, seat: Seat, now: float) -> r.StragglerFound:
    node_id, local_rank = seat
    deviations, usual_s = score(job, seat)
    return r.StragglerFound(
        at=now,
        view=job.view.number if job.view else 0,
        node_id=node_id,
        rank=job.members[node_id].first_rank + local_rank,
        local_rank=local_rank,
        own_s=job.paces[seat],
        usual_s=usual_s,
        score=deviations,
    )


def _swap(job: Job, now: float) -> r.NodeDraining | None:
    for node_id in dict.fromkeys(node_id for node_id, _ in job.stragglers):
        node, member = job.nodes.get(node_id), job.members.get(node_id)
        if node is None or member is None or not isinstance(node.standing, Present) or job.proved < 0:
            continue
        if find_substitute(job, standby(job), member):
            why = "a rank on it is slower than all others, and another node stands by"
            return r.NodeDraining(at=now, node_id=node_id, incarnation=node.incarnation, signal=0, why=why)
    return None
