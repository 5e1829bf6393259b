"""Shares of the global batch, by rank: what a straggler has less, the others have more. Pure.

    weight = weight before * usual time / own time, in eighths, from 1/4 to 1; the largest of all is made 1

A weight is of a seat: it stays with it through later views, also where workers start anew, while the world keeps its
size. A seat of a node that has just come has a whole share. The samples of a step are the same whatever the weights,
and the mean of their losses too: who has how many of them is all that changes (data/slots.py).

Shares can be shifted where every rank has the whole model: a sharded one makes all ranks pass through it equally often.
And there must be a loader with more slots than ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.core.state import Job
from holdfast.core.views import Member

WEIGHT_MIN = 0.25
"""Less than a quarter is hardly worth a rank: such a node wants to be replaced."""
PARTS = 8
"""Weights are rounded to eighths: a straggler is at least a fifth slower, and shares shall not follow noise."""


def shifted(job: Job) -> tuple[float, ...]:
    """The weights, once those of the known stragglers have been made smaller."""
    assert job.view is not None
    weights = list(job.view.weights or (1.0,) * job.view.world_size)
    for (node_id, local_rank), pace in job.stragglers.items():
        rank = job.members[node_id].first_rank + local_rank
        weights[rank] = max(round(weights[rank] * pace * PARTS) / PARTS, WEIGHT_MIN)
    return in_proportion(weights)


def carried(job: Job, members: Iterable[Member]) -> tuple[float, ...]:
    """The weights of the view in force, for the members of the next."""
    before = job.view
    members = list(members)
    if before is None or not before.weights or before.world_size != sum(m.workers for m in members):
        return ()
    return in_proportion([_of_seat(job, before.weights, m, seat) for m in members for seat in range(m.workers)])


def _of_seat(job: Job, weights: Sequence[float], member: Member, local_rank: int) -> float:
    had = job.members.get(member.node_id)
    stays = had is not None and had.incarnation == member.incarnation and local_rank < had.workers
    return weights[had.first_rank + local_rank] if had and stays else 1.0


def in_proportion(weights: Sequence[float]) -> tuple[float, ...]:
    """The same with 1 as the largest; none, if all are alike."""
    largest = max(weights)
    return () if min(weights) == largest else tuple(weight / largest for weight in weights)


def can_shift(job: Job) -> bool:
    """Whether the workers could have other shares."""
    if job.view is None or job.session is None or job.session.shards > 1:
        return False
    life = job.ledger.life_of(job.view.number)
    slots = [source.slots for source in (life.sources or () if life else ())]
    return bool(job.streams.by_name) or any(count > job.view.world_size for count in slots)
