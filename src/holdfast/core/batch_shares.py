"""Shares of the global batch, by rank: what a straggler has less, the others have more. Pure.

    weight = weight before * usual time / own time, in eighths, from 1/4 to 1; the largest of all is made 1

A weight belongs to a local rank of a node: it stays through later views and restarts, while the world keeps its size.
The ranks of a node that has just joined have a full share. The samples of a step are the same whatever the weights,
and the mean of their losses too: who has how many of them is all that changes (data/slots.py).

Shares can be shifted where every rank has the whole model: a sharded one makes all ranks pass through it equally often.
And there must be a loader with more slots than ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.core.state import JobState
from holdfast.core.views import Member

WEIGHT_MIN = 0.25
"""Less than a quarter is hardly worth a rank: such a node wants to be replaced."""
PARTS = 8
"""Weights are rounded to eighths: a straggler is at least a fifth slower, and shares shall not follow noise."""


def shifted(job: JobState) -> tuple[float, ...]:
    """Return the weights with those of the known stragglers reduced."""
    assert job.view is not None
    weights = list(job.view.weights or (1.0,) * job.view.world_size)
    for (node_id, local_rank), pace in job.progress.stragglers.items():
        rank = job.members[node_id].first_rank + local_rank
        weights[rank] = max(round(weights[rank] * pace * PARTS) / PARTS, WEIGHT_MIN)
    return in_proportion(weights)


def carried(job: JobState, members: Iterable[Member]) -> tuple[float, ...]:
    """Return the weights of the view in force, for the members of the next."""
    before = job.view
    if before is None or not before.weights:
        return ()
    members = list(members)
    if before.world_size != sum(m.workers for m in members):
        return ()
    return in_proportion([_weight_of(job, before.weights, m, worker) for m in members for worker in range(m.workers)])


def _weight_of(job: JobState, weights: Sequence[float], member: Member, local_rank: int) -> float:
    had = job.members.get(member.node_id)
    stays = had is not None and had.incarnation == member.incarnation and local_rank < had.workers
    return weights[had.first_rank + local_rank] if had and stays else 1.0


def in_proportion(weights: Sequence[float]) -> tuple[float, ...]:
    """Return the weights scaled so that the largest is 1; empty if all are equal."""
    largest = max(weights)
    return () if min(weights) == largest else tuple(weight / largest for weight in weights)


def can_shift(job: JobState) -> bool:
    """Return whether the workers can have different shares."""
    if job.view is None or job.state.session is None or job.state.session.shards > 1:
        return False
    run = job.data.audit.run_of(job.view.number)
    slots = [source.slots for source in (run.sources or () if run else ())]
    return bool(job.data.streams.by_name) or any(count > job.view.world_size for count in slots)
