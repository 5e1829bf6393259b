"""What agents must now do. Orders name a wanted state, not a change: an agent that gets one twice, or has
missed the one before, ends up the same."""

from __future__ import annotations

import msgspec

from holdfast.core import records as r
from holdfast.core.faults import Failure
from holdfast.core.state import Draining, Finished, Gathering, Job, Node, Serving
from holdfast.core.views import Member, View


class Serve(msgspec.Struct, frozen=True, kw_only=True, tag="serve"):
    """Run these workers of this view, and no others."""

    view: int
    job_id: str
    group_rank: int
    group_world_size: int
    first_rank: int
    world_size: int
    role_first_rank: int
    role_world_size: int
    store_host: str
    store_port: int
    store_here: bool
    restart_count: int
    restarts_max: int


class Hold(msgspec.Struct, frozen=True, kw_only=True, tag="hold"):
    """Run no workers; wait."""

    job_id: str
    why: str


class Exit(msgspec.Struct, frozen=True, kw_only=True, tag="exit"):
    """The job is over: end everything and exit."""

    outcome: r.Outcome
    exit_code: int
    why: str
    cause: Failure | None


class Refuse(msgspec.Struct, frozen=True, kw_only=True, tag="refuse"):
    """This agent is not part of the job."""

    why: str
    retry_after_s: float | None
    rejoin: bool
    holder: str
    holder_pid: int
    holder_machine_id: str
    holder_boot_id: str


Order = Serve | Hold | Exit | Refuse


class Addressed(msgspec.Struct, frozen=True):
    """An order and the life it is for."""

    node_id: str
    incarnation: str
    order: Order


def orders(job: Job, record: r.Record) -> list[Addressed]:
    """The orders this record gives rise to, in the state it led to."""
    match record:
        case r.NodeJoined(node_id=node_id) | r.LinkRestored(node_id=node_id) | r.NodeDraining(node_id=node_id):
            return [_standing(job, job.nodes[node_id])]
        case r.ViewFormed() | r.GatheringBegan() | r.JobFinished():
            return [_standing(job, node) for node in job.nodes.values() if node.alive]
        case r.NodeRefused():
            return [Addressed(record.node_id, record.incarnation, _refusal(record))]
        case _:
            return []


def _standing(job: Job, node: Node) -> Addressed:
    return Addressed(node.node_id, node.incarnation, standing_order(job, node))


def standing_order(job: Job, node: Node) -> Order:
    """What this node should be doing now, whatever it was told before."""
    match job.phase:
        case Finished(record=record):
            return Exit(
                outcome=record.outcome, exit_code=record.exit_code, why=record.why, cause=record.cause
            )
        case Gathering(why=why):
            return Hold(job_id=job.job_id, why=why)
        case Serving():
            assert job.view is not None
            member = job.members.get(node.node_id)
            if isinstance(node.standing, Draining):
                return Hold(job_id=job.job_id, why="this node is leaving")
            if member is None or member.incarnation != node.incarnation:
                why = f"standing by: the job runs on {len(job.view.members)} nodes"
                return Hold(job_id=job.job_id, why=why)
            return _serve(job, job.view, member)


def _serve(job: Job, view: View, member: Member) -> Serve:
    return Serve(
        view=view.number,
        job_id=job.job_id,
        group_rank=member.group_rank,
        group_world_size=len(view.members),
        first_rank=member.first_rank,
        world_size=view.world_size,
        role_first_rank=member.role_first_rank,
        role_world_size=member.role_world_size,
        store_host=view.store_host,
        store_port=view.store_port,
        store_here=view.store_node_id == member.node_id,
        restart_count=view.restart_count,
        restarts_max=job.settings.restarts_max,
    )


def _refusal(record: r.NodeRefused) -> Refuse:
    return Refuse(
        why=record.why,
        retry_after_s=record.retry_after_s,
        rejoin=record.rejoin,
        holder=record.holder,
        holder_pid=record.holder_pid,
        holder_machine_id=record.holder_machine_id,
        holder_boot_id=record.holder_boot_id,
    )
