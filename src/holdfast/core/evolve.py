"""How each record changes the job. Nothing else mutates it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain, islice
from typing import assert_never

import msgspec

from holdfast.core import records as r
from holdfast.core import sample_audit, shard_leases, stragglers
from holdfast.core.assess import ended_workers, has_ended, holders_without, signatures
from holdfast.core.blame import doubtful_nodes, is_failed_newcomer, note, record_node_loss
from holdfast.core.faults.failures import Failure
from holdfast.core.health import checkup, peer_links
from holdfast.core.health.reputation import LAST_RESORT, Reputation
from holdfast.core.invariants import check_after
from holdfast.core.node_sets import ChangedMembers, changed_members, count_held, follow
from holdfast.core.replica_placement import PlacementSite, parity_groups, place
from holdfast.core.rung_tries import record_try
from holdfast.core.snapshot_interval import fault_rate
from holdfast.core.state import (
    CLOSED_INCIDENTS_MAX,
    CORDONS_MAX,
    FAILURES_PER_INCIDENT_MAX,
    GONE_NODES_MAX,
    VIEW_TIMES_MAX,
    Draining,
    Finished,
    Gathering,
    Incident,
    JobState,
    Left,
    Linked,
    Lost,
    Node,
    Serving,
    Unlinked,
    ViewProgress,
)
from holdfast.core.state_coverage import NodeHolders, ShardLayout, StateHolder, carry_holders, layout_of, revised
from holdfast.core.strategies import Strategy
from holdfast.core.views import Member, View, shape_of

SEVERITY: tuple[r.IncidentKind, ...] = ("planned", "node", "worker")


def evolve(job: JobState, record: r.Record) -> None:
    """Apply one record; a broken invariant afterwards is a bug and raises."""
    changed = changed_members(job.members, record.view) if isinstance(record, r.ViewFormed) else None
    _apply(job, record, changed)
    job.recorded_at = max(job.recorded_at, record.at)
    follow(job, record, changed)
    check_after(job, record)


def _apply(job: JobState, record: r.Record, changed: ChangedMembers | None) -> None:
    match record:
        case r.JobCreated(at=at, job_id=job_id, settings=settings):
            job.job_id, job.settings, job.created_settings, job.created_at = job_id, settings, settings, at
        case r.TermBegan():
            _begin_term(job, record)
        case r.NodeJoined():
            _join(job, record)
        case r.NodeLost(at=at, node_id=node_id, certain=certain, since=since, why=why):
            job.bans.pop(node_id, None)
            _lose_node(job.nodes[node_id], Lost(at=at, certain=certain, since=since, why=why))
            if not certain:
                record_node_loss(job, node_id, at)
        case r.NodeReputationChanged(node_id=node_id, reputation=reputation):
            _set_reputation(job, job.nodes[node_id], reputation)
        case r.NodeAdmitted(node_id=node_id):
            job.nodes[node_id].admitted = True
        case r.NodeCordoned(at=at, node_id=node_id, why=why):
            job.nodes[node_id].standing = Draining(at=at, signal=0, why=why)
            job.incidents.cordons = [*job.incidents.cordons[-CORDONS_MAX + 1 :], record]
            job.incidents.cleared &= {cordoned.incarnation for cordoned in job.incidents.cordons}
        case r.NodeCleared(incarnation=incarnation):
            job.incidents.cleared.add(incarnation)
        case r.NodeDraining(at=at, node_id=node_id, signal=signal, why=why):
            job.nodes[node_id].standing = Draining(at=at, signal=signal, why=why)
        case r.NodeLeftRecord(at=at, node_id=node_id):
            node = job.nodes[node_id]
            job.bans.pop(node_id, None)
            signal = node.standing.signal if isinstance(node.standing, Draining) else 0
            node.standing, node.store_port, node.parked = Left(at=at, signal=signal), 0, 0
        case r.GatheringBegan(at=at, deadline=deadline, why=why):
            job.phase = Gathering(since=at, deadline=deadline, why=why)
            job.progress = ViewProgress()
        case r.ViewFormed():
            assert changed is not None
            _form_view(job, record, changed)
        case r.WorkersStartedRecord(node_id=node_id):
            job.progress.started.add(node_id)
        case r.WorkerSucceededRecord(at=at, node_id=node_id, local_rank=local_rank, view=number):
            if job.view and number < job.view.number:
                _remove_holder(job, node_id, local_rank, number)
            else:
                job.progress.succeeded.add((node_id, local_rank))
                job.progress.failing.pop((node_id, local_rank), None)
            job.progress.stalled.clear()  # something moves
            job.progress.waiting.clear()
            _record_failing_since(job, at)
        case r.WorkerFailedRecord():
            _lose_worker(job, record)
        case r.ViewJoinedRecord():
            _join_view(job, record)
        case r.SessionRevisedRecord():
            _revise_session(job, record)
        case r.StepInterruptedRecord(at=at, node_id=node_id, step_error=step_error):
            _record_failing_since(job, at)
            job.progress.interrupted[(node_id, step_error.local_rank)] = step_error
            job.state.committed = max(job.state.committed, step_error.step - 1)
        case r.StepEchoRecord(node_id=node_id, local_rank=local_rank):
            job.progress.echoes.add((node_id, local_rank))
        case r.WorkerFailingRecord(node_id=node_id, local_rank=local_rank):
            job.progress.failing.setdefault((node_id, local_rank), record)
        case r.WorkersStalledRecord(at=at, node_id=node_id):
            _record_failing_since(job, at)
            job.progress.stalled[node_id] = record
        case r.WorkersMovedRecord(node_id=node_id):
            job.progress.stalled.pop(node_id, None)
            if not (job.progress.failed or job.progress.interrupted):
                job.progress.link_probe = None  # the links were asked about because of that stall
        case r.WorkersWaitingRecord(node_id=node_id):
            job.progress.waiting.add(node_id)
        case r.WaitEnded(node_id=node_id):
            job.progress.waiting.discard(node_id)
        case r.StepCommittedRecord(step=step, repeats=repeats):
            job.state.repeated += repeats
            _commit(job, step)
        case r.TrainingClosedRecord(at=at, step=step):
            job.progress.is_closed = True
            _record_failing_since(job, at)
            if job.progress.first_committed < 0:  # no worker leaves before all have the last step
                _commit(job, max(step - 1, 0))
        case r.JobResized(nodes=nodes):
            job.settings = msgspec.structs.replace(job.settings, nodes_max=nodes)
        case r.DataAnnouncedRecord() | r.DataSkippedRecord() | r.StepsAudited() | r.SamplesReportedRecord():
            sample_audit.evolve(job.data.audit, record)
        case r.ShardsLeased(stream=stream, leases=granted):
            shard_leases.record_leases(job.data.streams.by_name.setdefault(stream, shard_leases.StreamState()), granted)
        case r.ShardFailed(stream=stream, problem=problem) | r.ShardQuarantined(stream=stream, problem=problem):
            shard_leases.record_problem(
                job.data.streams.by_name.setdefault(stream, shard_leases.StreamState()), problem
            )
        case r.StepTimesReportedRecord():
            stragglers.note(job, record)
        case r.CollectivesRetriedRecord(retries=retries):
            for rank, count in retries.items():
                job.state.retries[rank] = job.state.retries.get(rank, 0) + count
        case r.StragglerFound(node_id=node_id, local_rank=local_rank, own_s=own_s, usual_s=usual_s):
            job.progress.stragglers[(node_id, local_rank)] = usual_s / own_s
        case r.AnomalyFound() | r.CountersReadRecord():
            pass  # for people
        case r.CheckConcluded() | r.NodeSuspected() | r.NodeReadmitted():
            checkup.evolve(job, record)
        case r.CheckupBegan() | r.RoundBegan() | r.NodeCheckedRecord() | r.CheckupDropped():
            checkup.evolve(job, record)
        case r.LinkProbeBegan() | r.PeerLinksProbedRecord() | r.PeerLinksJudged():
            peer_links.evolve(job, record)
        case r.PeerLinksRestored() | r.PeerLinkSlowedRecord():
            peer_links.evolve(job, record)
        case r.IncidentOpened():
            _open_incident(job, record)
        case r.IncidentDecided():
            _decide_incident(job, record)
        case r.NodesAwaited(deadline=deadline):
            assert job.incidents.current is not None, "waiting without an open incident"
            job.incidents.current.nodes_awaited_until = deadline
        case r.IncidentClosed():
            job.incidents.current = None
            job.incidents.closed = [*job.incidents.closed[-CLOSED_INCIDENTS_MAX + 1 :], record]
        case r.TrainingResumed(view=view_number, step=step, source=source):
            job.state.resumed_view, job.state.resumed_step, job.state.resumed_from = view_number, step, source
        case r.JobFinished():
            job.phase = Finished(record=record)
        case r.LinkBrokeRecord(at=at, node_id=node_id, deadline=deadline):
            job.nodes[node_id].link = Unlinked(since=at, deadline=deadline, certain=True)
        case r.LinkRestored(node_id=node_id):
            job.nodes[node_id].link = Linked()
        case r.StoreOfferedRecord(node_id=node_id, port=port):
            job.nodes[node_id].store_port = port
        case r.SparesChangedRecord(at=at, node_id=node_id, parked=parked):
            job.nodes[node_id].parked, job.nodes[node_id].parked_at = parked, at
        case r.ImagesReportedRecord(node_id=node_id, images=images, snapshot_stats=snapshot_stats):
            job.state.images[node_id], job.state.snapshot_stats_by_node[node_id] = images, snapshot_stats
            job.state.images_heard = 0 if record.is_looked_at else job.state.images_heard + 1
        case r.DurabilityChanged(at=at, durability=durability, snapshot_stats=snapshot_stats):
            job.state.durability, job.state.durability_at, job.state.snapshot_stats = durability, at, snapshot_stats
        case r.CheckpointPublishedRecord(step=step, url=url):
            job.state.checkpoint_step, job.state.checkpoint_url = step, url
        case r.NodeRefused():
            pass
        case _:
            assert_never(record)


def _begin_term(job: JobState, record: r.TermBegan) -> None:
    """Apply the start of a master. It has no connections yet: every node gets the silence timeout to come back, even if
    the time for gathering ran out while there was no master."""
    job.term = record.term
    job.checks.checkup, job.checks.started = None, 0
    deadline = record.at + job.settings.silence_timeout_s
    if isinstance(job.phase, Gathering):
        job.phase = msgspec.structs.replace(job.phase, deadline=max(job.phase.deadline, deadline))
    for node in job.nodes.values():
        node.store_port, node.parked = 0, 0
        if node.alive:
            node.link = Unlinked(since=record.at, deadline=deadline, certain=False)


def _join(job: JobState, record: r.NodeJoined) -> None:
    job.nodes.pop(record.node_id, None)
    job.state.images.pop(record.node_id, None)
    job.state.snapshot_stats_by_node.pop(record.node_id, None)
    job.nodes[record.node_id] = Node(
        node_id=record.node_id,
        incarnation=record.incarnation,
        info=record.info,
        joined_at=record.at,
        join_order=job.join_count,
        reputation=record.reputation,
        health=checkup.health_of_newcomer(job),
    )
    _set_reputation(job, job.nodes[record.node_id], record.reputation)
    job.join_count += 1
    if job.join_count % GONE_NODES_MAX == 0:
        _forget_gone(job)


def _set_reputation(job: JobState, node: Node, reputation: Reputation) -> None:
    node.reputation = reputation
    job.bans.pop(node.node_id, None)
    if reputation.grade in LAST_RESORT and reputation.until is not None:
        job.bans[node.node_id] = reputation.until


def _forget_gone(job: JobState) -> None:
    gone = [node_id for node_id, node in job.nodes.items() if not node.alive]
    for node_id in gone[:-GONE_NODES_MAX]:
        del job.nodes[node_id]


def _lose_node(node: Node, lost: Lost) -> None:
    if isinstance(node.standing, Draining):  # it was told to go: that it went without a goodbye is no news
        node.standing = Left(at=lost.at, signal=node.standing.signal)
    else:
        node.standing = lost
    node.store_port, node.parked = 0, 0


def _form_view(job: JobState, record: r.ViewFormed, changed: ChangedMembers) -> None:
    view = record.view
    assert job.view is None or view.number > job.view.number, "view numbers only grow"
    if job.incidents.current:
        _record_newcomers(job, job.incidents.current, view, changed)
        _count_try(job, job.incidents.current, record)
    progress = ViewProgress()
    if view.keeps_workers:
        progress.holders = _carried_holders(job, view, changed)
        progress.holders_before = job.progress.holders
    if view.keeps_workers and view.planned:
        progress.released = {node_id: job.members[node_id].incarnation for node_id in changed.gone}
    if job.view is not None:
        job.incidents.node_s += len(job.view.members) * max(record.at - job.formed_at, 0.0)
    job.incidents.faults_per_node_day = fault_rate(job.incidents.faults, job.incidents.node_s)
    job.incidents.views_formed_at = [*job.incidents.views_formed_at[-VIEW_TIMES_MAX + 1 :], record.at]
    job.view, job.members, job.progress = view, {m.node_id: m for m in view.members}, progress
    job.shape = shape_of(view)
    if not view.keeps_workers:
        sample_audit.begin_run(job.data.audit, view.number)
        shard_leases.begin_run(job.data.streams, view.number)
    job.phase = Serving()
    job.nodes[view.store_node_id].store_port = 0  # a store serves one view only
    _place_snapshots(job, view)


def _place_snapshots(job: JobState, view: View) -> None:
    """Choose the replica holders among the members that can hold replicas."""
    nodes = [job.nodes[m.node_id] for m in view.members]
    sites = [PlacementSite(n.node_id, n.info.domain or n.info.machine_id) for n in nodes if n.info.bulk_port]
    doubtful = doubtful_nodes(job) if sites else frozenset()
    if job.settings.replica_parity:
        before = tuple(dict.fromkeys(job.state.parity_groups.values()))
        groups = parity_groups(sites, job.settings.replica_parity, before, doubtful)
        job.state.parity_groups = {node_id: group for group in groups for node_id in group}
    else:
        job.state.placement = place(sites, job.settings.replicas, job.state.placement, doubtful)


def _record_newcomers(job: JobState, incident: Incident, view: View, changed: ChangedMembers) -> None:
    """Record which workers this view, or an earlier one of the same recovery, started. A node that gets fewer workers
    renumbers them: of those nothing is known."""
    before, incident.newcomers = incident.newcomers, {}
    if not view.keeps_workers or view.planned or incident.strategy is None:
        return
    empty = {*ended_workers(job), *view.replaced}
    touched = {*changed.others, *(node_id for node_id, _ in (*empty, *before))}
    incident.has_spare_failed |= any(before.get(worker) is Strategy.RECOVER for worker in view.replaced)
    for member in view.members:
        if member.node_id not in touched:
            continue  # none of its workers is new
        former = job.members.get(member.node_id)
        stays = former is not None and former.incarnation == member.incarnation
        if stays and former is not None and former.workers > member.workers:
            continue
        for local_rank in range(member.workers):
            worker = (member.node_id, local_rank)
            if not stays or worker in empty:
                incident.newcomers[worker] = incident.strategy
            elif worker in before:
                incident.newcomers[worker] = before[worker]


def _count_try(job: JobState, incident: Incident, record: r.ViewFormed) -> None:
    """Count the strategy's attempt, before the failures that it answers are cleared."""
    incident.rebuilt_at, incident.nodes_awaited_until = record.at, 0.0
    chosen = incident.strategy
    if chosen and record.view.keeps_workers and not record.view.planned:
        incident.tries[chosen] = incident.tries.get(chosen, 0) + 1
        record_try(job, incident, chosen)
        incident.answered |= {(chosen, mark) for mark in signatures(job, job.stall_if(job.members))}


def _carried_holders(job: JobState, view: View, changed: ChangedMembers) -> dict[str, NodeHolders]:
    """Return what the members' workers bring into a view that keeps them."""
    dead: dict[str, set[int]] = {}
    for node_id, local_rank in (*ended_workers(job), *view.replaced, *view.surplus):
        dead.setdefault(node_id, set()).add(local_rank)
    carried = dict(job.progress.holders)
    for node_id in changed.gone:
        carried.pop(node_id, None)
    touched = {*changed.others, *dead}
    for member in view.members:
        if member.node_id in touched or member.node_id not in carried:
            carried[member.node_id] = _carried_by(job, view, member, dead.get(member.node_id, set()))
    return carried


def _carried_by(job: JobState, view: View, member: Member, dead: set[int]) -> NodeHolders:
    """Return what one member's workers bring along. Spares that get a rank are no longer parked."""
    before = job.members.get(member.node_id)
    stays = before is not None and before.incarnation == member.incarnation
    holders = job.progress.holders.get(member.node_id) or (None,) * (before.workers if before else 0)
    filled = member.workers - (len(holders) - len(dead) if stays else 0)
    if view.strategy is Strategy.RECOVER and filled > 0:
        node = job.nodes[member.node_id]
        node.parked = max(node.parked - filled, 0)
    return carry_holders(holders if stays else (), dead if stays else (), member.workers)


# --- workers


def _record_failing_since(job: JobState, at: float) -> None:
    """Note when the view may have begun to fail: from the first thing that is wrong on, it has."""
    if not (job.progress.failed or job.progress.interrupted or job.stall_if(())):
        job.progress.failing_since = at


def _lose_worker(job: JobState, record: r.WorkerFailedRecord) -> None:
    failure = record.failure
    note(job, failure, record.at)
    _record_failing_since(job, record.at)
    job.state.committed = max(job.state.committed, failure.step - 1)
    if record.late:
        _remove_holder(job, failure.node_id, failure.local_rank, failure.view)
    else:
        if job.incidents.current and is_failed_newcomer(job, failure):
            brought_by = job.incidents.current.newcomers[(failure.node_id, failure.local_rank)]
            job.incidents.current.has_spare_failed |= brought_by is Strategy.RECOVER
        job.progress.failed[(failure.node_id, failure.local_rank)] = failure
        job.progress.interrupted.pop((failure.node_id, failure.local_rank), None)
        job.progress.echoes.discard((failure.node_id, failure.local_rank))
        job.progress.failing.pop((failure.node_id, failure.local_rank), None)
    if job.incidents.current:
        _add_failure(job.incidents.current, failure)


def _add_failure(incident: Incident, failure: Failure) -> None:
    incident.failed.add((failure.view, failure.rank))
    if len(incident.failures) < FAILURES_PER_INCIDENT_MAX:
        incident.failures.append(failure)
    else:
        incident.failures_dropped += 1


def _join_view(job: JobState, record: r.ViewJoinedRecord) -> None:
    assert job.view is not None
    job.state.session = record.session
    job.progress.joined.add(record.node_id)
    if len(job.progress.joined) == len(job.members):
        job.progress.all_joined_at = record.at
    is_known = job.progress.layout is not None and job.progress.layout is layout_in_force(job)
    if is_known:
        _record_holders(job, [job.members[record.node_id]], layout_in_force(job))
    elif len(job.progress.joined) == len(job.members) or not _is_resharded(job):
        _record_holders(job, [job.members[node_id] for node_id in job.progress.joined], layout_in_force(job))


def _revise_session(job: JobState, record: r.SessionRevisedRecord) -> None:
    """Apply what is now known of the workers' state. What they hold does not change."""
    _record_failing_since(job, record.at)
    job.state.session = record.session
    known: dict[ShardLayout, ShardLayout] = {}

    def seen_again(holder: StateHolder) -> StateHolder:
        layout = known.setdefault(holder.layout, revised(holder.layout, record.session))
        return msgspec.structs.replace(holder, layout=layout)

    for by_node in (job.progress.holders, job.progress.holders_before):
        for node_id, holders in by_node.items():
            by_node[node_id] = tuple(holder and seen_again(holder) for holder in holders)
    job.progress.layout = job.progress.layout and known.get(job.progress.layout)


def _is_resharded(job: JobState) -> bool:
    """Return whether workers came into this view with differently sharded state. They keep it until a step is
    committed, so it counts until all nodes have joined."""
    assert job.view is not None and job.state.session is not None
    sharding = (job.state.session.shard_map.fitted(job.view.world_size), job.view.world_size)
    return any(
        h and (h.layout.shard_map, h.layout.world_size) != sharding
        for holders in job.progress.holders.values()
        for h in holders
    )


def _commit(job: JobState, step: int) -> None:
    """Apply the first commit of a view. All its workers hold the state, whether or not their nodes have reported it."""
    job.progress.first_committed = step
    job.state.committed = max(job.state.committed, step)
    if job.state.session:
        layout = layout_in_force(job)
        is_none_recorded = job.progress.layout is None
        members = [m for m in job.members.values() if is_none_recorded or not _is_recorded(job, m, layout)]
        _record_holders(job, members, layout)


def layout_in_force(job: JobState) -> ShardLayout:
    """Return how the state of the view's workers is sharded: one object for one layout, also across views."""
    assert job.view is not None and job.state.session is not None
    found = layout_of(job.view, job.state.session, job.progress.layout)
    if found is job.progress.layout:
        return found
    some = next((holder for holders in job.progress.holders.values() for holder in holders if holder), None)
    return some.layout if some and some.layout == found else found


def _is_recorded(job: JobState, member: Member, layout: ShardLayout) -> bool:
    """Return whether all that a member's workers hold is of the current view."""
    assert job.view is not None
    number, holders = job.view.number, job.progress.holders.get(member.node_id, ())
    if not holders or holders[0] is None or holders[0].view != number:
        return False
    return all(h is not None and h.view == number and h.layout is layout for h in holders)


def _record_holders(job: JobState, members: Collection[Member], layout: ShardLayout) -> None:
    """Record that the members' workers hold the state of the current view, except those that have ended since."""
    assert job.view is not None
    if not members:
        return
    number, holders = job.view.number, job.progress.holders
    have_some_ended = bool(job.progress.failed or job.progress.succeeded)
    job.progress.layout = layout
    ranks = chain.from_iterable(range(m.first_rank, m.first_rank + m.workers) for m in members)
    held = iter([StateHolder(view=number, rank=rank, layout=layout) for rank in ranks])
    for member in members:
        node_id, own = member.node_id, tuple(islice(held, member.workers))
        holders[node_id] = _of_living(job, node_id, own) if have_some_ended else own
    count_held(job, [member.node_id for member in members])


def _of_living(job: JobState, node_id: str, held: NodeHolders) -> NodeHolders:
    return tuple(None if has_ended(job, (node_id, local_rank)) else one for local_rank, one in enumerate(held))


def _remove_holder(job: JobState, node_id: str, local_rank: int, number: int) -> None:
    """Remove a worker of an earlier view that has ended."""
    if node_id in job.progress.holders:
        job.progress.holders[node_id] = holders_without(job, node_id, local_rank, number)


# --- incidents


def _open_incident(job: JobState, record: r.IncidentOpened) -> None:
    job.incidents.opened = record.number
    job.incidents.faults += record.kind != "planned"
    job.incidents.current = Incident(
        number=record.number,
        kind=record.kind,
        cause=record.cause,
        view_before=record.view,
        happened_at=min([record.at, *_last_signs(job)]),
        detected_at=record.at,
    )
    for failure in job.progress.failed.values():
        _add_failure(job.incidents.current, failure)


def _last_signs(job: JobState) -> Iterator[float]:
    """Yield when lost members were last heard, when steps failed, and when stalled workers last made progress."""
    yield from (step_error.at for step_error in job.progress.interrupted.values())
    yield from (stuck.at - stuck.stalled_s for stuck in job.stall_if(job.members).values())
    for node_id in job.sets.off:
        node = job.nodes.get(node_id)
        if node and isinstance(node.standing, Lost):
            yield node.standing.since


def _decide_incident(job: JobState, record: r.IncidentDecided) -> None:
    incident = job.incidents.current
    assert incident is not None, "decided without an open incident"
    assert record.view > incident.decided_view, "decided twice about one view"
    first = incident.strategy is None
    incident.decided_view, incident.decided_at = record.view, record.at
    incident.strategy, incident.why = record.strategy, record.why
    worse = SEVERITY.index(record.kind) > SEVERITY.index(incident.kind)
    job.incidents.faults += incident.kind == "planned" and record.kind != "planned" and (first or worse)
    if first or worse:  # before the first decision the cause was a guess; after it, only something worse is news
        incident.kind, incident.cause = record.kind, record.cause
    job.incidents.restarts_used += record.counted
    job.state.reloaded = record.reload if record.reload >= 0 and not record.counted else job.state.reloaded
