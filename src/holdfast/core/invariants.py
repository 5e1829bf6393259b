"""What must hold after every record, in production too. A broken one is a bug: crash before it does harm.

`check_after` looks only at what the record touched, so that 1,000 joins stay cheap; `check_all` looks at
everything and is what the tests call after every step.
"""

from __future__ import annotations

from holdfast.core import records as r
from holdfast.core.state import Finished, Job, Serving
from holdfast.core.views import View


def check_after(job: Job, record: r.Record) -> None:
    """The invariants this record could have broken."""
    match record:
        case r.ViewFormed(view=view):
            check_view(job, view)
            for member in view.members:
                assert job.live(member.node_id, member.incarnation), f"{member.node_id} is not alive"
        case r.IncidentDecided():
            assert job.restarts_used <= job.settings.restarts_max, "more restarts than allowed"
        case r.JobFinished() | r.GatheringBegan():
            pass
        case r.NodeStarted(node_id=node_id) | r.WorkerDone(node_id=node_id):
            assert node_id in job.members, f"{node_id} is not in the view"
        case _:
            pass


def check_view(job: Job, view: View) -> None:
    """A view is whole: sizes in bounds, ranks without gaps or repeats."""
    size = len(view.members)
    assert job.settings.nodes_min <= size <= job.settings.nodes_max, f"a view of {size} nodes"
    assert [m.group_rank for m in view.members] == list(range(size)), "group ranks have gaps"
    next_rank = 0
    for member in view.members:
        assert member.workers > 0 and member.first_rank == next_rank, "ranks have gaps"
        next_rank += member.workers
    assert view.world_size == next_rank, "the world size is not the number of workers"
    assert len({m.node_id for m in view.members}) == size, "a node twice in a view"
    assert view.store_port > 0 and any(m.node_id == view.store_node_id for m in view.members), "a view without a store"


def check_all(job: Job) -> None:
    """Everything, at any moment."""
    assert job.restarts_used <= job.settings.restarts_max, "more restarts than allowed"
    if isinstance(job.phase, Serving):
        assert job.view is not None, "serving without a view"
        check_view(job, job.view)
        members = set(job.members)
        assert job.started <= members and {n for n, _ in job.done} <= members, "progress of a stranger"
        assert {n for n, _ in job.failed} <= members, "a failure of a stranger"
    if isinstance(job.phase, Finished) and job.phase.record.outcome is r.Outcome.SUCCEEDED:
        assert job.view and len(job.done) == job.view.world_size, "success with workers unaccounted for"
    orders = [n.join_order for n in job.nodes.values()]
    assert len(set(orders)) == len(orders), "two nodes joined at the same place"
    numbers = [i.number for i in job.incidents]
    assert numbers == sorted(set(numbers)), "incidents out of order"
    for node in job.nodes.values():
        assert not (node.store_port and not node.alive), "a store on a dead node"
