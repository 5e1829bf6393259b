"""The one door: how each record changes the job. Nothing else mutates it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

import msgspec

from holdfast.core import leases, ledger, stragglers
from holdfast.core import records as r
from holdfast.core.blame import doubtful_nodes, note, note_loss
from holdfast.core.copies import Holder, Seats, layout_of, reseat
from holdfast.core.health import checkup
from holdfast.core.interval import fault_rate
from holdfast.core.invariants import check_after
from holdfast.core.ladder import Strategy
from holdfast.core.placement import Site, parity_groups, place
from holdfast.core.state import (
    CORDONS_KEPT_MAX,
    FAILURES_PER_INCIDENT_MAX,
    FORMED_KEPT_MAX,
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
from holdfast.core.troubles import dead_seats, is_disturbed, marks, seats_without
from holdfast.core.views import Member, View

SEVERITY: tuple[r.IncidentKind, ...] = ("planned", "node", "worker")


def evolve(job: Job, record: r.Record) -> None:
    """Apply one record; a broken invariant afterwards is a bug and raises."""
    _apply(job, record)
    check_after(job, record)


def _apply(job: Job, record: r.Record) -> None:
    match record:
        case r.JobCreated(at=at, job_id=job_id, settings=settings):
            job.job_id, job.settings, job.asked, job.created_at = job_id, settings, settings, at
        case r.TermBegan():
            _begin_term(job, record)
        case r.NodeJoined():
            _join(job, record)
        case r.NodeLost(at=at, node_id=node_id, certain=certain, since=since, why=why):
            _lose_node(job.nodes[node_id], Lost(at=at, certain=certain, since=since, why=why))
            if not certain:
                note_loss(job, node_id, at)
        case r.NodeAdmitted(node_id=node_id):
            job.nodes[node_id].admitted = True
        case r.NodeCordoned(node_id=node_id, why=why):
            job.nodes[node_id].standing = Draining(signal=0, why=why)
            job.cordons = [*job.cordons[-CORDONS_KEPT_MAX + 1 :], record]
            job.cleared.discard(node_id)
        case r.NodeCleared(node_id=node_id):
            job.cleared.add(node_id)
        case r.NodeDraining(node_id=node_id, signal=signal, why=why):
            job.nodes[node_id].standing = Draining(signal=signal, why=why)
        case r.NodeLeft(at=at, node_id=node_id):
            node = job.nodes[node_id]
            signal = node.standing.signal if isinstance(node.standing, Draining) else 0
            node.standing, node.store_port, node.parked = Left(at=at, signal=signal), 0, 0
        case r.GatheringBegan(at=at, deadline=deadline, why=why):
            job.phase = Gathering(since=at, deadline=deadline, why=why)
            _clear_progress(job)
            job.crew, job.crew_before, job.released = {}, {}, {}
        case r.ViewFormed():
            _form_view(job, record)
        case r.NodeStarted(node_id=node_id):
            job.started.add(node_id)
        case r.WorkerDone(node_id=node_id, local_rank=local_rank, view=number):
            if job.view and number < job.view.number:
                _forget_holder(job, node_id, local_rank, number)
            else:
                job.done.add((node_id, local_rank))
            job.stuck.clear()  # something moves
        case r.WorkerLost():
            _lose_worker(job, record)
        case r.NodeSettled():
            _settle(job, record)
        case r.StepBroken(at=at, node_id=node_id, stumble=stumble):
            _note_failing(job, at)
            job.held[(node_id, stumble.local_rank)] = stumble
        case r.WorkersStuck(at=at, node_id=node_id):
            _note_failing(job, at)
            job.stuck[node_id] = record
        case r.StepProved(step=step):
            _prove(job, step)
        case r.TrainingEnded(step=step):
            job.is_closed = True
            if job.proved < 0:  # nobody leaves before all have the last step
                _prove(job, max(step - 1, 0))
        case r.JobResized(nodes=nodes):
            job.settings = msgspec.structs.replace(job.settings, nodes_max=nodes)
        case r.DataDescribed() | r.DataSkipped() | r.StepsWitnessed() | r.SamplesNoted():
            ledger.evolve(job.ledger, record)
        case r.ShardsLeased(stream=stream, leases=granted):
            leases.note_leases(job.streams.by_name.setdefault(stream, leases.StreamState()), granted)
        case r.ShardFailed(stream=stream, trouble=trouble) | r.ShardQuarantined(stream=stream, trouble=trouble):
            leases.note_trouble(job.streams.by_name.setdefault(stream, leases.StreamState()), trouble)
        case r.PacesNoted():
            stragglers.note(job, record)
        case r.StragglerFound(node_id=node_id, local_rank=local_rank, own_s=own_s, usual_s=usual_s):
            job.stragglers[(node_id, local_rank)] = usual_s / own_s
        case r.NumbersOdd() | r.CountersNoted():
            pass  # for people
        case r.NodesChecked() | r.NodeSuspected() | r.NodeReadmitted():
            checkup.evolve(job, record)
        case r.CheckupBegan() | r.RoundBegan() | r.RoundReported() | r.CheckupDropped():
            checkup.evolve(job, record)
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
        case r.SparesKnown(at=at, node_id=node_id, parked=parked):
            job.nodes[node_id].parked, job.nodes[node_id].parked_at = parked, at
        case r.StateNoted(node_id=node_id, images=images, pacing=pacing):
            job.images[node_id], job.pacings[node_id] = images, pacing
        case r.StateSafe(at=at, safety=safety, pacing=pacing):
            job.safety, job.safety_at, job.pacing = safety, at, pacing
        case r.CheckpointPublished(step=step, url=url):
            job.checkpoint, job.checkpoint_url = step, url
        case r.NodeRefused():
            pass
        case _:
            assert_never(record)


def _begin_term(job: Job, record: r.TermBegan) -> None:
    """A new master knows no connection yet: every node has until the silence timeout to come back, also if the
    time for gathering ran out while there was no master to come to."""
    job.term = record.term
    job.checkup, job.checkups = None, 0
    deadline = record.at + job.settings.silence_timeout_s
    if isinstance(job.phase, Gathering):
        job.phase = msgspec.structs.replace(job.phase, deadline=max(job.phase.deadline, deadline))
    for node in job.nodes.values():
        node.store_port, node.parked = 0, 0
        if node.alive:
            node.link = Unlinked(since=record.at, deadline=deadline, certain=False)


def _join(job: Job, record: r.NodeJoined) -> None:
    job.nodes.pop(record.node_id, None)
    job.images.pop(record.node_id, None)
    job.pacings.pop(record.node_id, None)
    job.nodes[record.node_id] = Node(
        node_id=record.node_id,
        incarnation=record.incarnation,
        info=record.info,
        joined_at=record.at,
        join_order=job.joins,
        repute=record.repute,
        health=checkup.health_of_newcomer(job),
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
    node.store_port, node.parked = 0, 0


def _clear_progress(job: Job) -> None:
    """All that is known of the workers of one view only."""
    for known in (job.started, job.done, job.failed, job.held, job.stuck, job.settled):
        known.clear()
    job.paces.clear()
    job.slow.clear()
    job.stragglers.clear()
    job.pace_norm = (0.0, 0.0, 1.0)
    job.settled_at, job.proved, job.is_closed = 0.0, -1, False


def _form_view(job: Job, record: r.ViewFormed) -> None:
    view = record.view
    if job.incident:
        _count_try(job, job.incident, record)
    crew = {m.node_id: _carried(job, view, m) for m in view.members} if view.kept else {}
    job.crew, job.crew_before = crew, job.crew if view.kept else {}
    staying = {m.node_id for m in view.members}
    leaving = {m.node_id: m.incarnation for m in job.members.values() if m.node_id not in staying}
    job.released = leaving if view.kept and view.planned else {}
    if job.view is not None:
        job.node_s += len(job.view.members) * max(record.at - job.formed_at, 0.0)
    job.faults_per_node_day = fault_rate(job.faults, job.node_s)
    job.view, job.formed_at, job.layout = view, record.at, None
    job.formed_times = [*job.formed_times[-FORMED_KEPT_MAX + 1 :], record.at]
    job.members = {m.node_id: m for m in view.members}
    if not view.kept:
        ledger.begin_life(job.ledger, view.number)
        leases.begin_life(job.streams, view.number)
    job.phase = Serving()
    job.nodes[view.store_node_id].store_port = 0  # a store serves one view only
    _place_snapshots(job, view)
    _clear_progress(job)


def _place_snapshots(job: Job, view: View) -> None:
    """Among the members that can hold any."""
    infos = [(m.node_id, job.nodes[m.node_id].info) for m in view.members]
    sites = [Site(node_id, info.domain or info.machine_id) for node_id, info in infos if info.bulk_port]
    doubtful = doubtful_nodes(job)
    if job.settings.replica_parity:
        before = tuple(dict.fromkeys(job.parity.values()))
        groups = parity_groups(sites, job.settings.replica_parity, before, doubtful)
        job.parity = {node_id: group for group in groups for node_id in group}
    else:
        job.placement = place(sites, job.settings.replicas, job.placement, doubtful)


def _count_try(job: Job, incident: Incident, record: r.ViewFormed) -> None:
    """Before what it is an answer to is cleared."""
    incident.rebuilt_at = record.at
    chosen = incident.strategy
    if chosen and record.view.kept and not record.view.planned:
        incident.tries[chosen] = incident.tries.get(chosen, 0) + 1
        incident.answered |= {(chosen, mark) for mark in marks(job)}


def _carried(job: Job, view: View, member: Member) -> Seats:
    """What a member's workers bring along into a view that keeps them; spares that fill seats are no longer parked."""
    before = job.members.get(member.node_id)
    stays = before is not None and before.incarnation == member.incarnation
    seats = job.crew.get(member.node_id) or (None,) * (before.workers if before else 0)
    dead = {local for node_id, local in (*dead_seats(job), *view.replaced) if node_id == member.node_id}
    filled = member.workers - (len(seats) - len(dead) if stays else 0)
    if view.strategy is Strategy.RECOVER and filled > 0:
        node = job.nodes[member.node_id]
        node.parked = max(node.parked - filled, 0)
    return reseat(seats if stays else (), dead if stays else (), member.workers)


# --- workers


def _note_failing(job: Job, at: float) -> None:
    if not is_disturbed(job):
        job.failing_since = at


def _lose_worker(job: Job, record: r.WorkerLost) -> None:
    failure = record.failure
    note(job, failure, record.at)
    if record.late:
        _forget_holder(job, failure.node_id, failure.local_rank, failure.view)
    else:
        _note_failing(job, record.at)
        job.failed[(failure.node_id, failure.local_rank)] = failure
        job.held.pop((failure.node_id, failure.local_rank), None)
    incident = job.incident
    if incident and len(incident.failures) < FAILURES_PER_INCIDENT_MAX:
        incident.failures.append(failure)
    elif incident:
        incident.failures_dropped += 1


def _settle(job: Job, record: r.NodeSettled) -> None:
    assert job.view is not None
    job.session = record.session
    job.settled.add(record.node_id)
    if len(job.settled) == len(job.members):
        job.settled_at = record.at
    if len(job.settled) == len(job.members) or not _is_cut_anew(job):
        for node_id in job.settled:
            _seat_holders(job, job.members[node_id])


def _is_cut_anew(job: Job) -> bool:
    """Whether workers came into this view with shards of another cut. They keep those until a step is committed, so
    what they held before counts until all have settled."""
    assert job.view is not None and job.session is not None
    cut = (job.session.shards, job.view.world_size)
    return any(h and (h.layout.shards, h.layout.world_size) != cut for seats in job.crew.values() for h in seats)


def _prove(job: Job, step: int) -> None:
    """Who came through a commit holds all it should, whether or not its node has said that it settled."""
    job.proved = step
    if job.session:
        for member in job.members.values():
            _seat_holders(job, member)


def _seat_holders(job: Job, member: Member) -> None:
    """A member's workers hold the state of the current view, but for those that have ended since."""
    assert job.view is not None and job.session is not None
    layout = job.layout = layout_of(job.view, job.session, job.layout)
    before, dead = job.crew.get(member.node_id, ()), dead_seats(job)
    seats: list[Holder | None] = []
    for local_rank in range(member.workers):
        had = before[local_rank] if local_rank < len(before) else None
        fresh = job.proved < 0 and (had is None or had.layout != layout or had.fresh)
        rank = member.first_rank + local_rank
        holder = Holder(view=job.view.number, rank=rank, layout=layout, fresh=fresh)
        seats.append(None if (member.node_id, local_rank) in dead else holder)
    job.crew[member.node_id] = tuple(seats)


def _forget_holder(job: Job, node_id: str, local_rank: int, number: int) -> None:
    """A worker of an earlier view is gone after all."""
    if node_id in job.crew:
        job.crew[node_id] = seats_without(job, node_id, local_rank, number)


# --- incidents


def _open_incident(job: Job, record: r.IncidentOpened) -> None:
    job.incidents_opened = record.number
    job.faults += record.kind != "planned"
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
    """Of the nodes that the view in force has lost; of steps that failed, and of the last that moved."""
    yield from (stumble.at for stumble in job.held.values())
    yield from (stuck.at - stuck.stalled_s for stuck in job.stall.values())
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
    job.reloaded = record.reload if record.reload >= 0 and not record.counted else job.reloaded
