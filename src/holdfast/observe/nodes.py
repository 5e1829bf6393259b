"""The nodes of a job and their workers, as far as the journal knows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, assert_never

import msgspec

from holdfast.core.records import NodeStarted
from holdfast.core.state import (
    Awaited,
    Draining,
    Finished,
    Gathering,
    Job,
    Left,
    LeftOut,
    Lost,
    Node,
    Present,
    Slow,
    Unfit,
)
from holdfast.core.views import Member
from holdfast.journal import Entry

Standing = Literal["present", "draining", "lost", "left"]
WorkerState = Literal["starting", "running", "succeeded", "failed", "told-to-stop", "unknown"]


class WorkerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of the view. `pid` is null until its node has said that it runs."""

    rank: int
    local_rank: int
    pid: int | None
    state: WorkerState


class NodeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A node's current or last life. Without a place in the view it has no group rank and no workers."""

    node_id: str
    host: str
    standing: Standing
    why: str
    """Of a node that is lost, leaving, or did not pass its check."""
    joined_at: float
    workers_max: int
    """How many workers it runs when it takes part."""
    group_rank: int | None
    workers: tuple[WorkerSummary, ...]
    log_dir: str


def summarise_nodes(job: Job, entries: Sequence[Entry]) -> tuple[NodeSummary, ...]:
    """Members of the view by rank, then those who wait, then those who are gone; each in the order of joining."""
    pids = _pids(job, entries)
    summaries = [_node(job, node, pids.get(node.node_id, ())) for node in job.nodes.values()]
    return tuple(sorted(summaries, key=lambda s: (s.standing in ("lost", "left"), _place(s))))


def _place(summary: NodeSummary) -> tuple[float, float]:
    return (float("inf") if summary.group_rank is None else summary.group_rank, summary.joined_at)


def _pids(job: Job, entries: Sequence[Entry]) -> dict[str, tuple[int, ...]]:
    """By node: the processes of the last view."""
    number = job.view.number if job.view else 0
    started = (e.record for e in entries if isinstance(e.record, NodeStarted) and e.record.view == number)
    return {record.node_id: record.pids for record in started}


def _node(job: Job, node: Node, pids: tuple[int, ...]) -> NodeSummary:
    standing, why = _standing(node)
    member = None if isinstance(job.phase, Gathering) else job.members.get(node.node_id)
    if member and member.incarnation != node.incarnation:
        member = None  # its place is that of an earlier life
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
    """What is wrong with one that is there."""
    match node.health:
        case Awaited():
            return "to be checked"
        case Unfit(why=why):
            return f"unfit, {why}"
        case LeftOut(why=why):
            return f"left out, {why}"
        case Slow(why=why):
            return f"slow, {why}"
        case _:
            return ""


def _worker(job: Job, node: Node, member: Member, local_rank: int, pids: tuple[int, ...]) -> WorkerSummary:
    return WorkerSummary(
        rank=member.first_rank + local_rank,
        local_rank=local_rank,
        pid=pids[local_rank] if local_rank < len(pids) else None,
        state=_state(job, node, local_rank),
    )


def _state(job: Job, node: Node, local_rank: int) -> WorkerState:
    """What was recorded of a worker. Of one whose node is gone nothing more will be."""
    key = (node.node_id, local_rank)
    if key in job.done:
        return "succeeded"
    if key in job.failed:
        return "failed"
    if not node.alive:
        return "unknown"
    if isinstance(job.phase, Finished):
        return "told-to-stop"
    return "running" if node.node_id in job.started else "starting"
