"""The one door: how each record changes the job. Nothing else mutates it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

import msgspec

from holdfast.core import records as r
from holdfast.core.invariants import check_after
from holdfast.core.state import (
    FAILURES_PER_INCIDENT_MAX,
    GONE_NODES_MAX,
    INCIDENTS_KEPT_MAX,
    Draining,
    Finished,
    Gathering,
    Incident,
    Job,
    Left,
    Linked,
    Lost,
    Node,
    Serving,
    Unlinked,
)

SEVERITY: tuple[r.IncidentKind, ...] = ("planned", "node", "worker")


def evolve(job: Job, record: r.Record) -> None:
    """Apply one record; a broken invariant afterwards is a bug and raises."""
    _apply(job, record)
    check_after(job, record)


def _apply(job: Job, record: r.Record) -> None:
    match record:
        case r.JobCreated(at=at, job_id=job_id, settings=settings):
            job.job_id, job.settings, job.created_at = job_id, settings, at
        case r.TermBegan():
            _begin_term(job, record)
        case r.NodeJoined():
            _join(job, record)
        case r.NodeLost(at=at, node_id=node_id, certain=certain, since=since, why=why):
            _lose_node(job.nodes[node_id], Lost(at=at, certain=certain, since=since, why=why))
        case r.NodeDraining(node_id=node_id, signal=signal, why=why):
            job.nodes[node_id].standing = Draining(signal=signal, why=why)
        case r.NodeLeft(at=at, node_id=node_id):
            node = job.nodes[node_id]
            signal = node.standing.signal if isinstance(node.standing, Draining) else 0
            node.standing, node.store_port = Left(at=at, signal=signal), 0
        case r.GatheringBegan(at=at, deadline=deadline, why=why):
            job.phase = Gathering(since=at, deadline=deadline, why=why)
            _clear_progress(job)
        case r.ViewFormed():
            _form_view(job, record)
        case r.NodeStarted(node_id=node_id):
            job.started.add(node_id)
        case r.WorkerDone(node_id=node_id, local_rank=local_rank):
            job.done.add((node_id, local_rank))
        case r.WorkerLost():
            _lose_worker(job, record)
        case r.IncidentOpened():
            _open_incident(job, record)
        case r.IncidentDecided():
            _decide_incident(job, record)
        case r.IncidentClosed():
            job.incident = None
            job.incidents = [*job.incidents[-INCIDENTS_KEPT_MAX + 1 :], record]
        case r.JobFinished():
            job.phase = Finished(record=record)
        case r.LinkLost(at=at, node_id=node_id, deadline=deadline):
            job.nodes[node_id].link = Unlinked(since=at, deadline=deadline, certain=True)
        case r.LinkRestored(node_id=node_id):
            job.nodes[node_id].link = Linked()
        case r.StoreReady(node_id=node_id, port=port):
            job.nodes[node_id].store_port = port
        case r.NodeRefused():
            pass
        case _:
            assert_never(record)


def _begin_term(job: Job, record: r.TermBegan) -> None:
    """A new master knows no connection yet: every node has until the silence timeout to come back, also if the
    time for gathering ran out while there was no master to come to."""
    job.term = record.term
    deadline = record.at + job.settings.silence_timeout_s
    if isinstance(job.phase, Gathering):
        job.phase = msgspec.structs.replace(job.phase, deadline=max(job.phase.deadline, deadline))
    for node in job.nodes.values():
        node.store_port = 0
        if node.alive:
            node.link = Unlinked(since=record.at, deadline=deadline, certain=False)


def _join(job: Job, record: r.NodeJoined) -> None:
    job.nodes.pop(record.node_id, None)
    job.nodes[record.node_id] = Node(
        node_id=record.node_id,
        incarnation=record.incarnation,
        info=record.info,
        joined_at=record.at,
        join_order=job.joins,
    )
    job.joins += 1
    if job.joins % GONE_NODES_MAX == 0:
        _forget_gone(job)


def _forget_gone(job: Job) -> None:
    gone = [node_id for node_id, node in job.nodes.items() if not node.alive]
    for node_id in gone[:-GONE_NODES_MAX]:
        del job.nodes[node_id]


def _lose_node(node: Node, lost: Lost) -> None:
    if isinstance(node.standing, Draining):  # it was told to go: that it went without a goodbye is no news
        node.standing = Left(at=lost.at, signal=node.standing.signal)
    else:
        node.standing = lost
    node.store_port = 0


def _clear_progress(job: Job) -> None:
    job.started.clear()
    job.done.clear()
    job.failed.clear()


def _form_view(job: Job, record: r.ViewFormed) -> None:
    job.view = record.view
    job.members = {m.node_id: m for m in record.view.members}
    job.phase = Serving()
    job.nodes[record.view.store_node_id].store_port = 0  # a store serves one view only
    _clear_progress(job)
    if job.incident:
        job.incident.rebuilt_at = record.at


def _lose_worker(job: Job, record: r.WorkerLost) -> None:
    failure = record.failure
    if not record.late:
        job.failing_since = job.failing_since if job.failed else record.at
        job.failed[(failure.node_id, failure.local_rank)] = failure
    incident = job.incident
    if incident and len(incident.failures) < FAILURES_PER_INCIDENT_MAX:
        incident.failures.append(failure)
    elif incident:
        incident.failures_dropped += 1


def _open_incident(job: Job, record: r.IncidentOpened) -> None:
    job.incidents_opened = record.number
    job.incident = Incident(
        number=record.number,
        kind=record.kind,
        cause=record.cause,
        view_before=record.view,
        happened_at=min([record.at, *_last_signs(job)]),
        detected_at=record.at,
        failures=list(job.failed.values())[:FAILURES_PER_INCIDENT_MAX],
    )


def _last_signs(job: Job) -> Iterator[float]:
    """Of the nodes that the view in force has lost."""
    for node_id in job.members:
        node = job.nodes.get(node_id)
        if node and isinstance(node.standing, Lost):
            yield node.standing.since


def _decide_incident(job: Job, record: r.IncidentDecided) -> None:
    incident = job.incident
    assert incident is not None, "decided without an open incident"
    first = incident.strategy is None
    incident.decided_view, incident.decided_at = record.view, record.at
    incident.strategy, incident.why = record.strategy, record.why
    worse = SEVERITY.index(record.kind) > SEVERITY.index(incident.kind)
    if first or worse:  # before the first decision the cause was a guess; after it, only something worse is news
        incident.kind, incident.cause = record.kind, record.cause
    job.restarts_used += record.counted
