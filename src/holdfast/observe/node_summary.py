"""The nodes of a job and their workers, as the journal has them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, assert_never

import msgspec

from holdfast.core.records import WorkersStartedRecord
from holdfast.core.state import (
    Awaited,
    CutOff,
    Draining,
    Finished,
    Gathering,
    JobState,
    Left,
    LeftOut,
    Lost,
    Node,
    Present,
    Slow,
    Unfit,
)
from holdfast.core.views import Member
from holdfast.journal import JournalEntry

Standing = Literal["present", "draining", "lost", "left"]
WorkerState = Literal["starting", "running", "succeeded", "failed", "stopping", "unknown"]


class WorkerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of the view. `pid` is null until its node has reported that it runs."""

    rank: int
    local_rank: int
    pid: int | None
    state: WorkerState
    retries: int = 0
    """How many collectives this rank has run again below a step, since the job began."""


class NodeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A node's current or last incarnation. If it is no member of the view it has no group rank and no workers."""

    node_id: str
    host: str
    standing: Standing
    why: str
    """Why it is lost, leaving, or did not pass its check."""
    joined_at: float
    workers_max: int
    """The number of workers it runs as a member of a view."""
    group_rank: int | None
    workers: tuple[WorkerSummary, ...]
    log_dir: str


def summarise_nodes(job: JobState, entries: Sequence[JournalEntry]) -> tuple[NodeSummary, ...]:
    """Return members of the view by rank, then waiting nodes, then gone ones; each in the order of joining."""
    pids = _pids(job, entries)
    summaries = [_node(job, node, pids.get(node.node_id, ())) for node in job.nodes.values()]
    return tuple(sorted(summaries, key=lambda s: (s.standing in ("lost", "left"), _position(s))))


def _position(summary: NodeSummary) -> tuple[float, float]:
    return (float("inf") if summary.group_rank is None else summary.group_rank, summary.joined_at)


def _pids(job: JobState, entries: Sequence[JournalEntry]) -> dict[str, tuple[int, ...]]:
    """Return the processes of the last view by node."""
    number = job.view.number if job.view else 0
    started = (e.record for e in entries if isinstance(e.record, WorkersStartedRecord) and e.record.view == number)
    return {record.node_id: record.pids for record in started}


def _node(job: JobState, node: Node, pids: tuple[int, ...]) -> NodeSummary:
    standing, why = _standing(node)
    member = None if isinstance(job.phase, Gathering) else job.members.get(node.node_id)
    if member and member.incarnation != node.incarnation:
        member = None  # the view has an earlier incarnation of this node
    return NodeSummary(
        node_id=node.node_id,
        host=node.info.host,
        standing=standing,
        why=why,
        joined_at=node.joined_at,
        workers_max=node.info.workers,
        group_rank=member.group_rank if member else None,
        workers=tuple(_worker(job, node, member, i, pids) for i in range(member.workers)) if member else (),
        log_dir=node.info.log_dir,
    )


def _standing(node: Node) -> tuple[Standing, str]:
    match node.standing:
        case Present():
            return "present", _health(node)
        case Draining(why=why):
            return "draining", why
        case Lost(why=why):
            return "lost", why
        case Left():
            return "left", ""
        case _:
            assert_never(node.standing)


def _health(node: Node) -> str:
    """Return what a check found wrong with a present node."""
    match node.health:
        case Awaited():
            return "to be checked"
        case Unfit(why=why):
            return f"unfit, {why}"
        case LeftOut(why=why):
            return f"left out, {why}"
        case CutOff(why=why):
            return f"left out, {why}"
        case Slow(why=why):
            return f"slow, {why}"
        case _:
            return ""


def _worker(job: JobState, node: Node, member: Member, local_rank: int, pids: tuple[int, ...]) -> WorkerSummary:
    return WorkerSummary(
        rank=member.first_rank + local_rank,
        local_rank=local_rank,
        pid=pids[local_rank] if local_rank < len(pids) else None,
        state=_state(job, node, local_rank),
        retries=job.state.retries.get(member.first_rank + local_rank, 0),
    )


def _state(job: JobState, node: Node, local_rank: int) -> WorkerState:
    """Return the recorded state of a worker. If its node is gone, no more will be recorded."""
    key = (node.node_id, local_rank)
    if key in job.progress.succeeded:
        return "succeeded"
    if key in job.progress.failed:
        return "failed"
    if not node.alive:
        return "unknown"
    if isinstance(job.phase, Finished):
        return "stopping"
    return "running" if node.node_id in job.progress.started else "starting"
