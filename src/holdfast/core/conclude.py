"""The policy: what follows from what is known. Level-triggered: it looks at the job as it is, not at what just
happened, so that a restarted master goes on from its journal by asking the same question.

`conclude` returns the next record, or None when there is nothing to do until something happens or
`next_deadline` comes. A driver evolves the record and asks again. A deadline is always still to come: whatever it
waits for, `conclude` acts on it when it is there, so that a driver neither sleeps for ever nor spins.

In order, the first that applies:

1. a connection is broken for longer than its grace      the node is lost
2. no view is in force                                    form one when the nodes are there, or give up in time
3. all workers of the view succeeded                      the job succeeded
4. the view cannot stay (a worker failed, a member is gone or going, newcomers wait)
       an incident opens; while the picture is incomplete, wait a moment
       (a node's verdict is out, or only collateral errors are known); then strategy.py chooses, once a view
5. all workers run                                        the incident closes

Why wait for verdicts: when a node dies, the first news is often another rank's broken collective. A view formed
then would still contain the dead node and would have to be formed again.
"""

from __future__ import annotations

import heapq

from holdfast.core import records as r
from holdfast.core import strategy
from holdfast.core.faults import describe, is_collateral, root_cause
from holdfast.core.state import Finished, Gathering, Incident, Job, Left, Lost, Node, Unlinked
from holdfast.core.views import Candidate, Member, View, assign_group_ranks, choose, seat_members

EXIT_FAILED = 1
EXIT_NODES_MISSING = 3
EXIT_SIGNAL_BASE = 128


def conclude(job: Job, now: float) -> r.Record | None:
    """The next thing that follows from the job's state, or None."""
    if isinstance(job.phase, Finished):
        return None
    if lost := _overdue_link(job, now):
        return lost
    if isinstance(job.phase, Gathering):
        return _while_gathering(job, job.phase, now)
    assert job.view is not None
    if len(job.done) == job.view.world_size:
        return r.JobFinished(at=now, outcome=r.Outcome.SUCCEEDED, exit_code=0, why="all workers succeeded")
    if trouble := strategy.trouble(job, now):
        return _while_troubled(job, job.view, trouble, now)
    if job.incident and len(job.started) == len(job.view.members):
        return _close(job, job.incident, job.view, now)
    return None


def next_deadline(job: Job) -> float | None:
    """When to ask again, if nothing happens before."""
    if isinstance(job.phase, Finished):
        return None
    deadlines = [n.link.deadline for n in job.nodes.values() if n.alive and isinstance(n.link, Unlinked)]
    if _verdict_is_out(job):
        return min(deadlines)  # nothing else is concluded before
    if isinstance(job.phase, Gathering):
        settled_at = _settled_at(job, job.phase.since)
        deadlines.append(job.phase.deadline if settled_at is None else settled_at)
    elif job.incident and _decided(job):
        deadlines.append(_storeless_until(job, job.incident))
    elif job.failed:
        deadlines.append(job.failing_since + job.settings.collect_window_s)
    elif (due_at := strategy.newcomers_due_at(job)) is not None:
        deadlines.append(due_at)
    return min(deadlines, default=None)


def _overdue_link(job: Job, now: float) -> r.NodeLost | None:
    for node in job.nodes.values():
        if node.alive and isinstance(node.link, Unlinked) and node.link.deadline <= now:
            waited_s = now - node.link.since
            why = (
                f"its connection closed and did not come back in {waited_s:.1f} s"
                if node.link.certain
                else f"it did not come back to the restarted master in {waited_s:.1f} s"
            )
            return r.NodeLost(
                at=now,
                node_id=node.node_id,
                incarnation=node.incarnation,
                certain=node.link.certain,
                since=node.link.since,
                why=why,
            )
    return None


def _verdict_is_out(job: Job) -> bool:
    return any(n.doubtful for n in job.nodes.values())


# --- no view in force


def _while_gathering(job: Job, phase: Gathering, now: float) -> r.Record | None:
    if stopped := _stopped(job, now):
        return stopped
    if _verdict_is_out(job):
        return None
    eligible = [n for n in job.nodes.values() if n.eligible]
    settled_at = _settled_at(job, phase.since)
    if settled_at is not None:
        if len(eligible) < job.settings.nodes_max and now < settled_at:
            return None
        return _form_view(job, eligible, now, f"{len(eligible)} of {job.settings.nodes_max} nodes here")
    if now < phase.deadline:
        return None
    if len(eligible) >= job.settings.nodes_min:
        return _storeless(phase.since, now)
    why = (
        f"waited {now - phase.since:.0f} s for {job.settings.nodes_min} nodes, {len(eligible)} came:"
        " start the missing ones, lower the minimum of --nnodes, or raise join_timeout in --rdzv-conf"
    )
    return r.JobFinished(at=now, outcome=r.Outcome.FAILED, exit_code=EXIT_NODES_MISSING, why=why)


def _settled_at(job: Job, since: float) -> float | None:
    """When the minimum, with a store to meet at, has been there for the settling time; None while it is not there."""
    eligible = [n for n in job.nodes.values() if n.eligible]
    if len(eligible) < job.settings.nodes_min or not _store_among(job, eligible):
        return None
    joined = heapq.nsmallest(job.settings.nodes_min, (n.joined_at for n in eligible))
    return max(joined[-1], since) + job.settings.settle_s


def _stopped(job: Job, now: float) -> r.JobFinished | None:
    """The job ends when the last node to go was told to: there is nobody left to wait with, and nobody to wait for.
    One that was lost may come back, whoever left before it."""
    ended = [n.standing for n in job.nodes.values() if isinstance(n.standing, Lost | Left)]
    if not ended or len(ended) < len(job.nodes):
        return None
    last_at = max(standing.at for standing in ended)
    signals = [standing.signal for standing in ended if isinstance(standing, Left) and standing.at == last_at]
    if not signals:
        return None
    code = EXIT_SIGNAL_BASE + max(signals) if any(signals) else EXIT_FAILED
    return r.JobFinished(at=now, outcome=r.Outcome.STOPPED, exit_code=code, why="the last node left by request")


# --- trouble


def _while_troubled(job: Job, view: View, trouble: strategy.Trouble, now: float) -> r.Record | None:
    incident = job.incident
    if incident is None:
        number = job.incidents_opened + 1
        return r.IncidentOpened(
            at=now, number=number, view=view.number, kind=trouble.kind, cause=trouble.text
        )
    if _incomplete(job, now):
        return None
    if not _decided(job):
        choice = strategy.choose(job)
        return r.IncidentDecided(
            at=now,
            number=incident.number,
            view=view.number,
            kind=trouble.kind,
            cause=trouble.text,
            strategy=choice.strategy,
            counted=choice.counted,
            why=choice.why,
        )
    return _act(job, incident, trouble, now)


def _decided(job: Job) -> bool:
    """Whether the strategy for the trouble of this very view is chosen."""
    return bool(job.incident and job.view and job.incident.decided_view == job.view.number)


def _incomplete(job: Job, now: float) -> bool:
    """Whether a moment's wait may still tell the cause."""
    if _verdict_is_out(job):
        return True
    only_collateral = bool(job.failed) and all(is_collateral(f) for f in job.failed.values())
    waiting = now < job.failing_since + job.settings.collect_window_s
    return only_collateral and waiting and not strategy.members_gone(job)


def _act(job: Job, incident: Incident, trouble: strategy.Trouble, now: float) -> r.Record | None:
    if incident.strategy is r.Strategy.EXIT:
        cause = root_cause(job.failed.values())
        why = f"{describe(cause)}; {incident.why}" if cause else incident.why
        return r.JobFinished(
            at=now, outcome=r.Outcome.FAILED, exit_code=EXIT_FAILED, why=why, cause=cause
        )
    eligible = [n for n in job.nodes.values() if n.eligible]
    if len(eligible) >= job.settings.nodes_min:
        if formed := _form_view(job, eligible, now, trouble.text):
            return formed
        return _storeless(incident.decided_at, now) if _storeless_until(job, incident) <= now else None
    deadline = now + job.settings.join_timeout_s
    why = f"{len(eligible)} of at least {job.settings.nodes_min} nodes are left"
    return r.GatheringBegan(at=now, deadline=deadline, why=why)


def _storeless_until(job: Job, incident: Incident) -> float:
    return incident.decided_at + job.settings.join_timeout_s


def _storeless(since: float, now: float) -> r.JobFinished:
    why = f"no node offered a port for the workers' store in {now - since:.0f} s: look for errors in the agents' logs"
    return r.JobFinished(at=now, outcome=r.Outcome.FAILED, exit_code=EXIT_NODES_MISSING, why=why)


def _close(job: Job, incident: Incident, view: View, now: float) -> r.IncidentClosed:
    cause = root_cause(incident.failures) if incident.kind == "worker" else None
    return r.IncidentClosed(
        at=now,
        number=incident.number,
        kind=incident.kind,
        cause=describe(cause) if cause else incident.cause,
        strategy=incident.strategy or r.Strategy.RESTART,
        happened_at=min([incident.happened_at, *(f.failed_at for f in incident.failures)]),
        detected_at=incident.detected_at,
        decided_at=incident.decided_at,
        rebuilt_at=incident.rebuilt_at,
        view_before=incident.view_before,
        view_after=view.number,
        restarts_used=job.restarts_used,
        collateral=max(len(incident.failures) + incident.failures_dropped - (cause is not None), 0),
    )


# --- forming a view


def _store_among(job: Job, eligible: list[Node]) -> bool:
    """Whether one of those who would take part has a store to offer."""
    if len(eligible) <= job.settings.nodes_max:
        return any(n.store_port for n in eligible)
    return any(job.nodes[c.node_id].store_port for c in _chosen(job, eligible))


def _chosen(job: Job, eligible: list[Node]) -> list[Candidate]:
    candidates = [_candidate(node, job.members.get(node.node_id)) for node in eligible]
    return choose(candidates, job.settings.nodes_max)


def _form_view(job: Job, eligible: list[Node], now: float, why: str) -> r.ViewFormed | None:
    """The next view; None until some member has a store to offer."""
    members = seat_members(assign_group_ranks(_chosen(job, eligible)))
    host = next((m.node_id for m in members if job.nodes[m.node_id].store_port), None)
    if host is None:
        return None
    view = View(
        number=job.view.number + 1 if job.view else 1,
        members=members,
        world_size=sum(m.workers for m in members),
        store_node_id=host,
        store_host=job.nodes[host].info.address,
        store_port=job.nodes[host].store_port,
        restart_count=job.restarts_used,
    )
    return r.ViewFormed(at=now, view=view, why=why)


def _candidate(node: Node, member: Member | None) -> Candidate:
    return Candidate(
        node_id=node.node_id,
        incarnation=node.incarnation,
        workers=node.info.workers,
        role=node.info.role,
        requested_rank=node.info.requested_rank,
        join_order=node.join_order,
        current_rank=member.group_rank if member else None,
    )
