"""`holdfast status` on a machine without the job's journal: what the agents of this machine know."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from holdfast.core.stacks import ranks_text
from holdfast.observe.formatting import format_duration
from holdfast.util.node_status import NodeStatus
from holdfast.util.processes import process_state


def local_lines(statuses: Sequence[NodeStatus]) -> Iterator[str]:
    """Yield the page: the nodes of the job that was active last."""
    job_id, now = statuses[0].job_id, time.time()
    yield f"job {job_id}, as known on this machine; the journal is on the master's, {statuses[0].master}"
    for status in statuses:
        if status.job_id == job_id:
            yield from node_lines(status, now)


def node_lines(status: NodeStatus, now: float) -> Iterator[str]:
    """Yield what one node's agent knows, and what follows from it."""
    where = f", {ranks_text(status.ranks)} of {status.world_size}" if status.ranks else ""
    yield f"node {status.node_id}: view {status.view}{where}, {status.workers_running} workers running"
    if status.ended:
        yield f"  ended: {status.ended}"
    elif process_state(status.agent_pid) in "XZ":
        yield f"  its agent (process {status.agent_pid}) is gone"
    elif not status.master_away_since:
        yield "  the master is connected: ask it with --endpoint for the whole job"
    else:
        away = format_duration(now - status.master_away_since)
        yield f"  the master at {status.master} is away for {away} ({status.trouble})"
        if not status.needs_decision:
            yield "  the workers train on; the next fault needs a decision and cannot be handled until it is back"
        else:
            left = format_duration(max(status.gives_up_at - now, 0.0))
            yield f"  a decision is needed ({status.needs_decision}): this node ends in {left} if it does not come back"
    if status.checkpoint and not status.ended:
        yield f"  the last checkpoint known here is {status.checkpoint}"
