"""What must hold after every record, in production too. A broken one is a bug: crash before it does harm.

`check_after` looks only at what the record touched, so that 1,000 joins stay cheap; `check_all` looks at
everything and is what the tests call after every step.
"""

from __future__ import annotations

from holdfast.core import records as r
from holdfast.core.copies import lack
from holdfast.core.ladder import LADDER, Strategy
from holdfast.core.state import Awaited, Finished, Job, LeftOut, Serving, Unfit
from holdfast.core.views import View


def check_after(job: Job, record: r.Record) -> None:
    """The invariants this record could have broken."""
    match record:
        case r.ViewFormed(view=view):
            check_view(view)
            check_new_view(job, view)
        case r.IncidentDecided(strategy=strategy, counted=counted):
            assert job.restarts_used <= job.settings.restarts_max, "more restarts than allowed"
            assert not (counted and strategy in LADDER), "a recovery that keeps the workers uses up no restart"
        case r.IncidentClosed():
            assert job.view is None or not job.view.kept or job.proved >= 0, "over without a committed step"
        case r.NodeStarted(node_id=node_id) | r.NodeSettled(node_id=node_id) | r.StepBroken(node_id=node_id):
            assert node_id in job.members, f"{node_id} is not in the view"
        case r.WorkerDone(node_id=node_id) | r.WorkersStuck(node_id=node_id) | r.StepProved(node_id=node_id):
            assert node_id in job.members, f"{node_id} is not in the view"
        case _:
            pass


def check_new_view(job: Job, view: View) -> None:
    """Those who are to serve can, and a view that keeps workers keeps the state."""
    size = len(view.members)
    assert size >= job.settings.nodes_min or view.strategy is Strategy.DUMP, f"a view of {size} nodes"
    assert size <= job.settings.nodes_max or view.kept, f"a view of {size} nodes"
    for member in view.members:
        node = job.live(member.node_id, member.incarnation)
        assert node, f"{member.node_id} is not alive"
        assert member.workers <= node.info.workers, f"{member.node_id} cannot run {member.workers} workers"
        is_unproved = isinstance(node.health, Awaited | Unfit | LeftOut)
        assert view.kept or not is_unproved, f"{member.node_id} has not passed its check"
    if view.kept:
        kept = [holder for seats in job.crew.values() for holder in seats if holder]
        assert not lack(kept), f"a view that keeps workers without their state: {lack(kept)}"


def check_view(view: View) -> None:
    """A view is whole: ranks without gaps or repeats, and a place to meet."""
    size = len(view.members)
    assert [m.group_rank for m in view.members] == list(range(size)), "group ranks have gaps"
    next_rank = 0
    for member in view.members:
        assert member.workers > 0 and member.first_rank == next_rank, "ranks have gaps"
        next_rank += member.workers
    assert view.world_size == next_rank, "the world size is not the number of workers"
    assert len({m.node_id for m in view.members}) == size, "a node twice in a view"
    has_weights = len(view.weights) == next_rank and max(view.weights) == 1.0 and min(view.weights) > 0
    assert not view.weights or has_weights, "weights that are no shares of the ranks"
    assert view.store_port > 0 and any(m.node_id == view.store_node_id for m in view.members), "a view without a store"


def check_all(job: Job) -> None:
    """Everything, at any moment."""
    assert job.restarts_used <= job.settings.restarts_max, "more restarts than allowed"
    if isinstance(job.phase, Serving):
        assert job.view is not None, "serving without a view"
        check_view(job.view)
        members = set(job.members)
        assert job.started <= members and {n for n, _ in job.done} <= members, "progress of a stranger"
        assert {n for n, _ in job.failed} <= members, "a failure of a stranger"
        assert {n for n, _ in job.held} | set(job.stuck) | job.settled <= members, "a report of a stranger"
        assert not set(job.held) & set(job.failed), "a worker that holds and has failed"
        assert set(job.crew) <= members and not set(job.released) & members, "the state is elsewhere"
        for node_id, seats in job.crew.items():
            assert len(seats) == job.members[node_id].workers, f"{node_id} has other seats than workers"
    is_success = isinstance(job.phase, Finished) and job.phase.record.outcome is r.Outcome.SUCCEEDED
    if is_success and not job.settings.check_only:
        assert job.view and job.is_through, "success with workers unaccounted for"
    orders = [n.join_order for n in job.nodes.values()]
    assert len(set(orders)) == len(orders), "two nodes joined at the same place"
    numbers = [i.number for i in job.incidents]
    assert numbers == sorted(set(numbers)), "incidents out of order"
    for node in job.nodes.values():
        assert not (node.store_port and not node.alive), "a store on a dead node"
