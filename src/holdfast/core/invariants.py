"""What must hold after every record, in production too. A broken one is a bug: crash before it does harm.

`check_after` looks only at what the record touched, so that 1,000 joins stay cheap; `check_next` at what was decided,
and is not part of a replay; `check_all` looks at everything and is what the tests call after every step.
"""

from __future__ import annotations

from holdfast.core import node_sets
from holdfast.core import records as r
from holdfast.core.choose_strategy import overlooked_plan
from holdfast.core.replica_placement import ReplicaPlacement
from holdfast.core.state import Awaited, CutOff, Finished, JobState, LeftOut, Node, Serving, Unfit
from holdfast.core.state_coverage import WorkerKey, missing_shards
from holdfast.core.strategies import LADDER, Strategy
from holdfast.core.views import View


def check_after(job: JobState, record: r.Record) -> None:
    """Check the invariants that this record could have broken."""
    match record:
        case r.ViewFormed(view=view):
            check_view(view)
            check_new_view(job, view)
            check_placement(job.state.placement)
        case r.IncidentDecided(strategy=strategy, counted=counted):
            assert job.incidents.restarts_used <= job.settings.restarts_max, "more restarts than allowed"
            assert not (counted and strategy in LADDER), "a recovery that keeps the workers uses up no restart"
        case r.IncidentClosed():
            assert job.view is None or not job.view.keeps_workers or job.progress.first_committed >= 0, (
                "over without a committed step"
            )
        case (
            r.WorkersStartedRecord(node_id=node_id)
            | r.ViewJoinedRecord(node_id=node_id)
            | r.StepInterruptedRecord(node_id=node_id)
        ):
            assert node_id in job.members, f"{node_id} is not in the view"
        case r.WorkerSucceededRecord(node_id=node_id, local_rank=local_rank):
            assert node_id in job.members, f"{node_id} is not in the view"
            _check_ended_once(job, (node_id, local_rank))
        case r.WorkerFailedRecord(failure=failure):
            _check_ended_once(job, (failure.node_id, failure.local_rank))
        case (
            r.WorkersStalledRecord(node_id=node_id)
            | r.WorkersMovedRecord(node_id=node_id)
            | r.StepCommittedRecord(node_id=node_id)
        ):
            assert node_id in job.members, f"{node_id} is not in the view"
        case _:
            pass


def check_next(job: JobState, record: r.Record) -> None:
    """Check a record before it is applied, where it is made and not where it is replayed: what it is compared with is
    partly known of connections alone, and older journals may contain what is refused now."""
    assert record.at >= job.recorded_at, "time went back"
    if isinstance(record, r.IncidentDecided) and record.strategy in (Strategy.DUMP, Strategy.EXIT):
        plan = overlooked_plan(job)
        assert plan is None, f"{record.strategy.value} although {plan.why if plan else ''}"


def _check_ended_once(job: JobState, worker: WorkerKey) -> None:
    is_both = worker in job.progress.succeeded and worker in job.progress.failed
    assert not is_both, f"worker {worker[1]} of {worker[0]} has both succeeded and failed"


def check_placement(placement: ReplicaPlacement) -> None:
    """Check that each node knows the nodes of whose snapshots it holds replicas, and no others."""
    kept = {(owner, partner) for owner, partners in placement.partners.items() for partner in partners}
    known = {(owner, partner) for partner, owners in placement.owners.items() for owner in owners}
    assert kept == known, f"replicas without an owner, or owners without a replica: {sorted(kept ^ known)}"


def check_new_view(job: JobState, view: View) -> None:
    """Check that the members of a view can serve, and that a view that keeps workers keeps the state."""
    size = len(view.members)
    assert size >= job.settings.nodes_min or view.strategy is Strategy.DUMP, f"a view of {size} nodes"
    assert size <= job.settings.nodes_max or view.keeps_workers, f"a view of {size} nodes"
    nodes, alive, keeps_workers = job.nodes, job.sets.alive, view.keeps_workers
    for member in view.members:
        node = nodes.get(member.node_id)
        is_alive = node and node.incarnation == member.incarnation and member.node_id in alive
        assert node and is_alive, f"{member.node_id} is not alive"
        assert member.workers <= node.info.workers, f"{member.node_id} cannot run {member.workers} workers"
        assert keeps_workers or not _is_unproved(node), f"{member.node_id} has not passed its check"
    if keeps_workers:
        kept = (holder for holders in job.progress.holders.values() for holder in holders if holder)
        missing = missing_shards(kept)
        assert not missing, f"a view that keeps workers without their state: {missing}"


def _is_unproved(node: Node) -> bool:
    return isinstance(node.health, Awaited | Unfit | LeftOut | CutOff)


def check_view(view: View) -> None:
    """Check that a view is complete: ranks without gaps or repeats, and a store."""
    size, next_rank = len(view.members), 0
    for group_rank, member in enumerate(view.members):
        assert member.group_rank == group_rank, "group ranks have gaps"
        assert member.workers > 0 and member.first_rank == next_rank, "ranks have gaps"
        next_rank += member.workers
    assert view.world_size == next_rank, "the world size is not the number of workers"
    assert len({m.node_id for m in view.members}) == size, "a node twice in a view"
    has_weights = len(view.weights) == next_rank and max(view.weights) == 1.0 and min(view.weights) > 0
    assert not view.weights or has_weights, "weights that are no shares of the ranks"
    assert view.store_port > 0 and any(m.node_id == view.store_node_id for m in view.members), "a view without a store"


def check_all(job: JobState) -> None:
    """Check everything, at any moment."""
    assert not (wrong := node_sets.differences(job)), f"kept of the nodes, and wrong: {wrong}"
    assert job.incidents.restarts_used <= job.settings.restarts_max, "more restarts than allowed"
    if isinstance(job.phase, Serving):
        assert job.view is not None, "serving without a view"
        check_view(job.view)
        decided_view = job.incidents.current.decided_view if job.incidents.current else 0
        assert decided_view < job.view.number, "decided, and not done"
        members = set(job.members)
        assert job.progress.started <= members and {n for n, _ in job.progress.succeeded} <= members, (
            "progress of a stranger"
        )
        assert {n for n, _ in job.progress.failed} <= members, "a failure of a stranger"
        still = set(job.progress.stalled) | job.progress.waiting
        interrupted = job.progress.interrupted.keys() | job.progress.echoes
        told = {node_id for node_id, _ in interrupted}
        assert told | still | job.progress.joined <= members, "a report of a stranger"
        assert not interrupted & job.progress.failed.keys(), "a worker that holds and has failed"
        assert not set(job.progress.failing) & (set(job.progress.failed) | job.progress.succeeded), (
            "a worker that is about to end and has ended"
        )
        assert set(job.progress.holders) <= members and not set(job.progress.released) & members, (
            "the state is elsewhere"
        )
        for node_id, holders in job.progress.holders.items():
            assert len(holders) == job.members[node_id].workers, f"{node_id} has other holders than workers"
    is_success = isinstance(job.phase, Finished) and job.phase.record.outcome is r.Outcome.SUCCEEDED
    if is_success and not job.settings.check_only:
        assert job.view and job.is_complete, "success with workers unaccounted for"
    orders = [n.join_order for n in job.nodes.values()]
    assert len(set(orders)) == len(orders), "two nodes joined at the same place"
    numbers = [i.number for i in job.incidents.closed]
    assert numbers == sorted(set(numbers)), "incidents out of order"
    for node in job.nodes.values():
        assert not (node.store_port and not node.alive), "a store on a dead node"
