"""From an event to the records it makes true. What follows from them is decided in policy.py.

Every event names the incarnation it comes from. Events of an incarnation that is over change nothing; what the workers
of an old view did is evidence for the open incident, never a new fault.

Which node may use an id (`Hello`), by what is known of the incarnation that had it before:

    nothing                           joins
    the same incarnation              its connection is restored; if it was declared lost, it must rejoin
    left, or certainly dead           joins at once
    alive and connected               refused for good, unless the new one knows it to be dead
    alive, connection just broke      refused until the verdict
    silent, perhaps partitioned       refused until the guard window is over
"""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core import sample_audit, shard_leases
from holdfast.core.assess import has_ended, holders_without
from holdfast.core.durability import FEW_NODES, IMAGES_MAX, JOURNAL_EVERY_S, combine_stats, durability
from holdfast.core.faults.failures import (
    LOG_LINE_CHARS_MAX,
    LOG_TAIL_LINES_MAX,
    TRACEBACK_CHARS_MAX,
    Failure,
    is_collateral,
)
from holdfast.core.health import checkup, peer_links
from holdfast.core.health.reputation import LAST_RESORT
from holdfast.core.state import (
    ECHOES_LISTED_MAX,
    FAILURES_PER_INCIDENT_MAX,
    Draining,
    Finished,
    Incident,
    JobState,
    Linked,
    Lost,
    Node,
    Present,
    Serving,
    Unlinked,
)

MESSAGE_CHARS_MAX = 2_000
SOURCE_CHARS_MAX = 2_000
"""Of a failed step's error."""
STALL_NEWS_TIMES = 2.0
"""A stall that has lasted this many times longer than when it was last reported is news."""
READINGS_MAX = 16
"""Of a node's counters."""


def decide(job: JobState, event: e.Event, now: float) -> list[r.Record]:
    """Return the records that this event makes true. Pure: reads the job, changes nothing."""
    match event:
        case e.Hello():
            return _hello(job, event, now)
        case e.LinkBroke(node_id=node_id, incarnation=incarnation):
            node = job.live(node_id, incarnation)
            if node is None or isinstance(node.link, Unlinked):
                return []
            return [r.LinkBrokeRecord(at=now, node_id=node_id, deadline=now + job.settings.reconnect_grace_s)]
        case e.NodeSilent(node_id=node_id, incarnation=incarnation, silent_s=silent_s):
            if job.live(node_id, incarnation) is None:
                return []
            why = f"no heartbeat for {silent_s:.1f} s"
            return [
                r.NodeLost(
                    at=now, node_id=node_id, incarnation=incarnation, certain=False, since=now - silent_s, why=why
                )
            ]
        case e.WorkersStarted(node_id=node_id, incarnation=incarnation, view=view, pids=pids, logs=logs):
            if not _in_current_view(job, node_id, incarnation, view) or node_id in job.progress.started:
                return []
            return [r.WorkersStartedRecord(at=now, node_id=node_id, view=view, pids=pids, logs=logs)]
        case e.WorkerSucceeded():
            return _worker_succeeded(job, event, now)
        case e.WorkerFailed():
            return _worker_failed(job, event, now)
        case e.StoreOffered(node_id=node_id, incarnation=incarnation, port=port):
            return _offer(job, node_id, incarnation, port, now) if job.live(node_id, incarnation) else []
        case e.ViewJoined() | e.StepInterrupted() | e.StepCommitted() | e.TrainingClosed():
            return _session_event(job, event, now)
        case e.WorkersStalled() | e.WorkersWaiting() | e.WorkersMoved():
            return _stall_event(job, event, now)
        case e.WorkerFailing():
            return _worker_failing(job, event, now)
        case e.SessionRevised():
            return _session_revised(job, event, now)
        case e.SparesChanged(node_id=node_id, incarnation=incarnation, parked=parked):
            node = job.live(node_id, incarnation)
            return _spares(node, parked, now) if node else []
        case e.ImagesReported(node_id=node_id, incarnation=incarnation):
            return _images_reported(job, event, now) if job.live(node_id, incarnation) else []
        case e.CheckpointPublished(node_id=node_id, incarnation=incarnation, step=step, url=url):
            is_news = job.live(node_id, incarnation) is not None and step > job.state.checkpoint_step
            return [r.CheckpointPublishedRecord(at=now, step=step, url=url)] if is_news else []
        case e.DataAnnounced() | e.SamplesReported() | e.DataSkipped():
            is_heard = job.live(event.node_id, event.incarnation) and not isinstance(job.phase, Finished)
            return sample_audit.decide(job.data.audit, event, now) if is_heard else []
        case e.StreamReported():
            return _stream_reported(job, event, now)
        case e.StepTimesReported(node_id=node_id, incarnation=incarnation, view=view, step_times=step_times):
            if not _in_current_view(job, node_id, incarnation, view):
                return []
            workers = job.members[node_id].workers
            known = tuple(pace for pace in step_times[:workers] if 0 <= pace.local_rank < workers)
            return [r.StepTimesReportedRecord(at=now, node_id=node_id, step_times=known)]
        case e.CollectivesRetried(node_id=node_id, incarnation=incarnation, view=view, retries=retries):
            if not _in_current_view(job, node_id, incarnation, view):
                return []
            member = job.members[node_id]
            counts = {member.first_rank + one.local_rank: one.count for one in retries if one.count > 0}
            ranks = range(member.first_rank, member.first_rank + member.workers)
            counts = {rank: count for rank, count in counts.items() if rank in ranks}
            return [r.CollectivesRetriedRecord(at=now, node_id=node_id, retries=counts)] if counts else []
        case e.NumbersReported():
            return _numbers(job, event, now)
        case e.CountersRead():
            return _counters(job, event, now)
        case e.NodeChecked():
            return checkup.decide(job, event, now)
        case e.PeerLinksProbed() | e.PeerLinkSlowed():
            return peer_links.decide(job, event, now) if not isinstance(job.phase, Finished) else []
        case e.DrainRequested(node_id=node_id, why=why):
            node = job.nodes.get(node_id)
            if node is None or not isinstance(node.standing, Present) or isinstance(job.phase, Finished):
                return []
            return [_draining(node_id, node.incarnation, 0, why, now)]
        case e.ResizeRequested(nodes=nodes, why=why):
            same = nodes == job.settings.nodes_max
            if same or nodes < max(job.settings.nodes_min, 1) or isinstance(job.phase, Finished):
                return []
            return [r.JobResized(at=now, nodes=nodes, why=why)]
        case e.NodeLeaving(node_id=node_id, incarnation=incarnation, signal=signal, why=why):
            node = job.live(node_id, incarnation)
            if node is None or isinstance(node.standing, Draining):
                return []
            return [_draining(node_id, incarnation, signal, why, now)]
        case e.NodeLeft(node_id=node_id, incarnation=incarnation):
            if job.live(node_id, incarnation) is None:
                return []
            return [r.NodeLeftRecord(at=now, node_id=node_id, incarnation=incarnation)]
        case _:
            assert_never(event)


def _in_current_view(job: JobState, node_id: str, incarnation: str, view: int) -> bool:
    if not isinstance(job.phase, Serving) or job.view is None or job.view.number != view:
        return False
    member = job.members.get(node_id)
    return member is not None and member.incarnation == incarnation and job.live(node_id, incarnation) is not None


def _worker_succeeded(job: JobState, event: e.WorkerSucceeded, now: float) -> list[r.Record]:
    worker = (event.node_id, event.local_rank)
    current = _in_current_view(job, event.node_id, event.incarnation, event.view)
    if (current and worker not in job.progress.succeeded and worker not in job.progress.failed) or (
        not current and _is_counted_on(job, event.node_id, event.incarnation, event.view, event.local_rank)
    ):
        return [r.WorkerSucceededRecord(at=now, node_id=event.node_id, view=event.view, local_rank=event.local_rank)]
    return []


def _worker_failed(job: JobState, event: e.WorkerFailed, now: float) -> list[r.Record]:
    node = job.live(event.node_id, event.incarnation)
    if node is None or not isinstance(node.standing, Present):
        return []  # workers of a node on its way out are expected to end
    key = (event.node_id, event.failure.local_rank)
    if _in_current_view(job, event.node_id, event.incarnation, event.view) or _is_yet_to_change(job, event):
        if key in job.progress.failed or key in job.progress.succeeded:
            return []
        shown = _shortened_echo(event.failure, len(job.progress.failed))
        return [r.WorkerFailedRecord(at=now, failure=shown, late=False)]
    incident, failed = job.incidents.current, (event.failure.view, event.failure.rank)
    if incident and _is_of(job, incident, event.view) and failed not in incident.failed:
        shown = _shortened_echo(event.failure, len(incident.failed))
        return [r.WorkerFailedRecord(at=now, failure=shown, late=True)]
    return []


def _shortened_echo(failure: Failure, others: int) -> Failure:
    """Return a failure without its traceback and log, if it is collateral and many others have said the same."""
    if others < FAILURES_PER_INCIDENT_MAX or not is_collateral(failure):
        return failure
    return replace(failure, traceback="", log_tail=())


def _is_yet_to_change(job: JobState, event: e.WorkerFailed) -> bool:
    """Return whether the failure is of the view before a planned one that has not begun to train. A planned view
    changes nothing before the step boundary, so a worker that dies before it is missing in the new view as well."""
    view, member = job.view, job.members.get(event.node_id)
    if not isinstance(job.phase, Serving) or view is None or member is None or member.incarnation != event.incarnation:
        return False
    before = view.keeps_workers and view.planned and event.view == view.number - 1 and job.progress.first_committed < 0
    return before and event.failure.local_rank < member.workers


def _is_of(job: JobState, incident: Incident, view: int) -> bool:
    """Return whether the view is one that this incident has left behind."""
    return job.view is not None and incident.view_before <= view < job.view.number


def _is_counted_on(job: JobState, node_id: str, incarnation: str, view: int, local_rank: int) -> bool:
    """Return whether a worker that ended in an earlier view is still counted as a holder of state."""
    if job.view is None or view >= job.view.number or not _in_current_view(job, node_id, incarnation, job.view.number):
        return False
    return holders_without(job, node_id, local_rank, view) != job.progress.holders.get(node_id, ())


def _session_event(
    job: JobState,
    event: e.ViewJoined | e.StepInterrupted | e.StepCommitted | e.TrainingClosed,
    now: float,
) -> list[r.Record]:
    """Return the records for an event of workers that use Holdfast. Only events of the newest view count."""
    node_id, view = event.node_id, event.view
    if not _in_current_view(job, node_id, event.incarnation, view):
        return []
    match event:
        case e.ViewJoined(session=session) if node_id not in job.progress.joined:
            session = _combined_session(job, session)
            news = session != job.state.session
            joined = r.ViewJoinedRecord(at=now, node_id=node_id, view=view, session=session, news=news)
            if not event.source or job.state.resumed_view == view:
                return [joined]
            source = event.source[:SOURCE_CHARS_MAX]
            return [joined, r.TrainingResumed(at=now, view=view, step=event.step, source=source)]
        case e.StepInterrupted(step_error=step_error) if _is_at_work(job, (node_id, step_error.local_rank)):
            return [_interrupted(job, node_id, view, step_error, now)]
        case e.StepCommitted(step=step) if job.progress.first_committed < 0:
            repeats = max(job.state.committed + 1 - step, 0)
            return [r.StepCommittedRecord(at=now, node_id=node_id, view=view, step=step, repeats=repeats)]
        case e.TrainingClosed(step=step) if not job.progress.is_closed:
            return [r.TrainingClosedRecord(at=now, node_id=node_id, view=view, step=step)]
    return []


def _stall_event(
    job: JobState, event: e.WorkersStalled | e.WorkersWaiting | e.WorkersMoved, now: float
) -> list[r.Record]:
    """Return the records for a node's report that nothing moves there, or that something does again. A report of a
    stall is repeated when it has lasted much longer, which is news."""
    node_id, view, known = event.node_id, event.view, job.progress.stalled.get(event.node_id)
    if not _in_current_view(job, node_id, event.incarnation, view):
        return []
    match event:
        case e.WorkersStalled(stalled_s=stalled_s, worker_progress=worker_progress, is_overdue=is_overdue):
            shown = tuple(map(_shortened, worker_progress))
            is_known = known is not None and (known.worker_progress, known.is_overdue) == (shown, is_overdue)
            if is_known and known is not None and stalled_s < STALL_NEWS_TIMES * known.stalled_s:
                return []
            record = r.WorkersStalledRecord(
                at=now,
                node_id=node_id,
                view=view,
                stalled_s=stalled_s,
                worker_progress=shown,
                is_overdue=is_overdue,
            )
            return [record]
        case e.WorkersWaiting(waiting_s=waiting_s):
            if node_id in job.progress.waiting:
                return []
            return [r.WorkersWaitingRecord(at=now, node_id=node_id, view=view, waiting_s=waiting_s)]
        case e.WorkersMoved():
            moved: list[r.Record] = [r.WorkersMovedRecord(at=now, node_id=node_id, view=view)] if known else []
            ended = [r.WaitEnded(at=now, node_id=node_id, view=view)] if node_id in job.progress.waiting else []
            return [*moved, *ended]


def _worker_failing(job: JobState, event: e.WorkerFailing, now: float) -> list[r.Record]:
    """Return the fact if it is of the newest view and the end of the process has not come in before it."""
    node_id, local_rank, view = event.node_id, event.local_rank, event.view
    if not _in_current_view(job, node_id, event.incarnation, view) or local_rank >= job.members[node_id].workers:
        return []
    if (node_id, local_rank) in job.progress.failed or (node_id, local_rank) in job.progress.succeeded:
        return []
    return [
        r.WorkerFailingRecord(
            at=now,
            node_id=node_id,
            view=view,
            local_rank=local_rank,
            exception=event.exception[:LOG_LINE_CHARS_MAX],
            message=event.message[:MESSAGE_CHARS_MAX],
        )
    ]


def _combined_session(job: JobState, session: e.SessionInfo) -> e.SessionInfo:
    """Return what a node reports of its workers' state, combined with what is known. New workers in a view that keeps
    the others cannot know yet what these have found out."""
    is_known = job.view is not None and (job.view.keeps_workers or bool(job.progress.joined))
    if not is_known or job.state.session is None:
        return session
    # The newest report says how the state is sharded: workers that re-entered their function have sharded it again.
    return _cut_as(session, e.combined([job.state.session, session]))


def _session_revised(job: JobState, event: e.SessionRevised, now: float) -> list[r.Record]:
    """Return the record of a session that changed. Reports of an earlier view count too if its workers were kept
    since."""
    view = job.view
    is_theirs = view is not None and (event.view == view.number or (view.keeps_workers and event.view < view.number))
    is_heard = is_theirs and isinstance(job.phase, Serving) and job.live(event.node_id, event.incarnation) is not None
    if not is_heard or job.state.session is None:
        return []
    known = job.state.session  # sharding does not change within a view, and may have been different before
    session = _cut_as(known, e.combined([known, event.session]))
    if session == known:
        return []
    return [r.SessionRevisedRecord(at=now, node_id=event.node_id, view=event.view, session=session)]


def _cut_as(one: e.SessionInfo, session: e.SessionInfo) -> e.SessionInfo:
    """Return what is known of the workers' state, cut and copied as this one says."""
    return replace(
        session,
        shard_map=one.shard_map,
        replicas=one.replicas,
        world_multiple=one.world_multiple,
        world_size=one.world_size,
    )


def _shortened(vector: e.WorkerProgress) -> e.WorkerProgress:
    tail = tuple(line[:LOG_LINE_CHARS_MAX] for line in vector.log_tail[-LOG_TAIL_LINES_MAX:])
    return replace(vector, stack=vector.stack[-TRACEBACK_CHARS_MAX:], log_tail=tail)


def _counters(job: JobState, event: e.CountersRead, now: float) -> list[r.Record]:
    """Return the record of a node's counters. They count after the end of their view too, as they arrive late."""
    if job.live(event.node_id, event.incarnation) is None or isinstance(job.phase, Finished):
        return []
    kept = tuple(reading[:LOG_LINE_CHARS_MAX] for reading in event.readings[:READINGS_MAX])
    return [r.CountersReadRecord(at=now, node_id=event.node_id, view=event.view, readings=kept)]


def _numbers(job: JobState, event: e.NumbersReported, now: float) -> list[r.Record]:
    if not _in_current_view(job, event.node_id, event.incarnation, event.view):
        return []
    return [
        r.AnomalyFound(
            at=now,
            node_id=event.node_id,
            view=event.view,
            rank=event.rank,
            step=event.step,
            what=event.what[:MESSAGE_CHARS_MAX],
            outcome=event.outcome,
        )
    ]


def _stream_reported(job: JobState, event: e.StreamReported, now: float) -> list[r.Record]:
    """Return the records of leases and failed shards in committed steps. They hold in later views too, unless all
    workers went back to a checkpoint."""
    is_fenced = job.view is None or not job.data.streams.since_view <= event.view <= job.view.number
    if is_fenced or job.live(event.node_id, event.incarnation) is None or isinstance(job.phase, Finished):
        return []
    known = job.data.streams.by_name.get(event.stream)
    fresh, problems = shard_leases.unknown_reports(
        known, event.leases[: shard_leases.REPORTS_MAX], event.problems[: shard_leases.REPORTS_MAX]
    )
    found: list[r.Record] = []
    if fresh:
        found.append(r.ShardsLeased(at=now, view=event.view, stream=event.stream, step=event.step, leases=tuple(fresh)))
    for problem in problems:
        kind = r.ShardQuarantined if problem.is_last else r.ShardFailed
        bounded = replace(problem, why=problem.why[: shard_leases.WHY_CHARS_MAX])
        found.append(kind(at=now, view=event.view, stream=event.stream, step=event.step, problem=bounded))
    return found


def _interrupted(job: JobState, node_id: str, view: int, step_error: e.StepError, now: float) -> r.Record:
    """Return the record of an interrupted step; a short one, if it says nothing that others have not said."""
    is_one_of_many = len(job.progress.interrupted) >= ECHOES_LISTED_MAX
    if is_one_of_many and step_error.collateral and step_error.step - 1 <= job.state.committed:
        return r.StepEchoRecord(at=now, node_id=node_id, view=view, local_rank=step_error.local_rank)
    error = _bounded(step_error, has_traceback=not (is_one_of_many or step_error.collateral))
    return r.StepInterruptedRecord(at=now, node_id=node_id, view=view, step_error=error)


def _bounded(step_error: e.StepError, *, has_traceback: bool) -> e.StepError:
    """Return the error with limited texts. A hundred thousand ranks may send one."""
    kept = step_error.traceback[-TRACEBACK_CHARS_MAX:] if has_traceback else ""
    return replace(step_error, message=step_error.message[:MESSAGE_CHARS_MAX], traceback=kept)


def _is_at_work(job: JobState, worker: tuple[str, int]) -> bool:
    progress = job.progress
    known = worker in progress.interrupted or worker in progress.echoes or has_ended(job, worker)
    return not known and worker[1] < job.members[worker[0]].workers


def _hello(job: JobState, hello: e.Hello, now: float) -> list[r.Record]:
    old = job.nodes.get(hello.node_id)
    if old and old.incarnation == hello.incarnation:
        return _same_incarnation(job, old, hello, now)
    if isinstance(job.phase, Finished):
        finished = job.phase.record
        return [_refuse(hello, now, f"job {job.job_id} has already {finished.outcome.value}: {finished.why}")]
    if hello.term > job.term:
        why = (
            f"{hello.node_id} has followed a newer master (term {hello.term}) than this one (term {job.term}): this"
            " master's journal is an old copy; restore the newest one"
        )
        return [_refuse(hello, now, why)]
    if mismatch := _mismatch(job, hello):
        return [_refuse(hello, now, mismatch)]
    if old is None:
        holder = _only_node(job, hello)
        return [_refuse(hello, now, _is_another_job(job, holder))] if holder else _join_records(hello, now)
    return _next_incarnation(job, old, hello, now)


def _same_incarnation(job: JobState, node: Node, hello: e.Hello, now: float) -> list[r.Record]:
    if not node.alive and isinstance(job.phase, Finished):
        return [_refuse(hello, now, f"the job has ended without {node.node_id}")]  # it is told how (orders.py)
    if not node.alive:
        why = f"{node.node_id} was declared gone and the job continued without it"
        if isinstance(node.standing, Lost):
            why = f"{node.node_id} was declared lost ({node.standing.why}) and the job continued without it"
        return [_refuse(hello, now, why, retry_after_s=0.0, rejoin=True)]
    restored = r.LinkRestored(at=now, node_id=node.node_id)
    offered = _offer(job, node.node_id, node.incarnation, hello.store_port, now)
    return [restored, *_let_back(node, hello, now), *offered, *_spares(node, hello.parked, now)]


def _let_back(node: Node, hello: e.Hello, now: float) -> list[r.Record]:
    """Return the record of a machine that is no longer a last resort. What else is heard of one that is here counts
    when it joins the next time."""
    if not node.is_last_resort or hello.reputation.grade in LAST_RESORT:
        return []
    changed = r.NodeReputationChanged(
        at=now, node_id=node.node_id, incarnation=node.incarnation, reputation=hello.reputation
    )
    return [changed]


def _offer(job: JobState, node_id: str, incarnation: str, port: int, now: float) -> list[r.Record]:
    """Return the record of an offered store port. A store serves one view only, so the port of the view in force is not
    news."""
    taken = 0
    if job.view and job.view.store_node_id == node_id and _in_current_view(job, node_id, incarnation, job.view.number):
        taken = job.view.store_port
    return [r.StoreOfferedRecord(at=now, node_id=node_id, port=port)] if port not in (0, taken) else []


def _images_reported(job: JobState, event: e.ImagesReported, now: float) -> list[r.Record]:
    """Return the records of a node's images. The durability is journaled at intervals only, as it changes with every
    step; and to find it, all images are looked at, so that this is done once for as many reports as there are nodes."""
    node_id, images = event.node_id, event.images
    heard = job.state.images_heard + 1
    is_due = now - job.state.durability_at >= JOURNAL_EVERY_S and heard > len(job.state.images) - FEW_NODES
    records: list[r.Record] = [
        r.ImagesReportedRecord(
            at=now,
            node_id=node_id,
            images=images[:IMAGES_MAX],
            snapshot_stats=event.snapshot_stats,
            is_looked_at=is_due,
        )
    ]
    if is_due:
        alive = {name: held for name, held in job.state.images.items() if (node := job.nodes.get(name)) and node.alive}
        found = durability({**alive, node_id: images}, job.state.checkpoint_step)
        if found != job.state.durability:
            snapshot_stats_by_node = {
                name: one for name, one in job.state.snapshot_stats_by_node.items() if name in alive
            } | {node_id: event.snapshot_stats}
            records.append(
                r.DurabilityChanged(
                    at=now, durability=found, snapshot_stats=combine_stats(snapshot_stats_by_node.values())
                )
            )
    return records


def _spares(node: Node, parked: int, now: float) -> list[r.Record]:
    return [r.SparesChangedRecord(at=now, node_id=node.node_id, parked=parked)] if parked != node.parked else []


def _join_records(hello: e.Hello, now: float) -> list[r.Record]:
    joined = r.NodeJoined(
        at=now, node_id=hello.node_id, incarnation=hello.incarnation, info=hello.info, reputation=hello.reputation
    )
    if hello.leaving:  # said in one breath, so that no view is ever formed with it
        why = "it was asked to leave before it joined"
        return [joined, _draining(hello.node_id, hello.incarnation, hello.leaving, why, now)]
    records: list[r.Record] = [joined]
    if hello.store_port:
        records.append(r.StoreOfferedRecord(at=now, node_id=hello.node_id, port=hello.store_port))
    if hello.parked:
        records.append(r.SparesChangedRecord(at=now, node_id=hello.node_id, parked=hello.parked))
    return records


def _draining(node_id: str, incarnation: str, signal: int, why: str, now: float) -> r.NodeDraining:
    return r.NodeDraining(at=now, node_id=node_id, incarnation=incarnation, signal=signal, why=why)


def _next_incarnation(job: JobState, old: Node, hello: e.Hello, now: float) -> list[r.Record]:
    if old.alive and _known_dead(old, hello):
        why = "its process is gone, as reported by its next incarnation on the same machine"
        lost = r.NodeLost(at=now, node_id=old.node_id, incarnation=old.incarnation, certain=True, since=now, why=why)
        return [lost, *_join_records(hello, now)]
    match old.standing, old.link:
        case ((Present() | Draining()), Unlinked(deadline=deadline)):
            remaining_s = max(deadline - now, 0.0)
            return [_refuse_for(old, hello, now, "lost its connection a moment ago", remaining_s)]
        case ((Present() | Draining()), Linked()):
            return [_refuse_for(old, hello, now, "is alive and connected", None)]
        case Lost(at=at, certain=False), _ if not _known_dead(old, hello):
            remaining_s = at + job.settings.guard_window_s - now
            if remaining_s > 0:
                return [_refuse_for(old, hello, now, "fell silent and may still be alive", remaining_s)]
    return _join_records(hello, now)


def _known_dead(old: Node, hello: e.Hello) -> bool:
    """Return whether the old incarnation is dead: the new one saw its process gone, or the machine was rebooted
    since."""
    rebooted = old.info.machine_id == hello.info.machine_id and old.info.boot_id != hello.info.boot_id
    return rebooted or old.incarnation in hello.dead_incarnations


def _mismatch(job: JobState, hello: e.Hello) -> str:
    spec, settings = hello.spec, job.created_settings
    if hello.info.workers < 1:
        return f"the agent would run {hello.info.workers} workers: give --nproc-per-node 1 or more"
    if spec.run_id and spec.run_id != job.job_id:
        return (
            f"this master runs job {job.job_id}, the agent wants {spec.run_id}: give the same --rdzv-id on every"
            " node, or another --rdzv-endpoint"
        )
    if (spec.nodes_min, spec.nodes_max) != (settings.nodes_min, settings.nodes_max):
        return (
            f"the agent was started with --nnodes {spec.nodes_min}:{spec.nodes_max}, the job has"
            f" {settings.nodes_min}:{settings.nodes_max}: give the same --nnodes on every node"
        )
    if spec.restarts_max != settings.restarts_max:
        return (
            f"the agent was started with --max-restarts {spec.restarts_max}, the job has"
            f" {settings.restarts_max}: give the same --max-restarts on every node"
        )
    return ""


def _only_node(job: JobState, hello: e.Hello) -> Node | None:
    """Return the node of a job of one node, if it is here and the agent does not name the job: then the agent does not
    come to stand by, but is a job of its own that was given the same port."""
    settings = job.settings
    if hello.spec.run_id or settings.nodes_max + settings.spare_nodes > 1:
        return None
    here = (node for node in job.nodes.values() if isinstance(node.standing, Present) and isinstance(node.link, Linked))
    return next(here, None)


def _is_another_job(job: JobState, holder: Node) -> str:
    return (
        f"the port is in use by job {job.job_id}, which has its only node (process {holder.info.pid} on"
        f" {holder.info.host}): give this job another --master-port or --rdzv-endpoint, or --standalone"
    )


def _refuse_for(old: Node, hello: e.Hello, now: float, state: str, retry_after_s: float | None) -> r.NodeRefused:
    remedy = (
        "give this node another --node-id (or --node-rank), or stop the other one first"
        if retry_after_s is None
        else f"retry in {retry_after_s:.1f} s, or as soon as the old incarnation is known to be dead"
    )
    why = f"node {old.node_id} {state} (process {old.info.pid} on {old.info.host}): {remedy}"
    return _refuse(hello, now, why, retry_after_s=retry_after_s, holder=old)


def _refuse(
    hello: e.Hello,
    now: float,
    why: str,
    *,
    retry_after_s: float | None = None,
    rejoin: bool = False,
    holder: Node | None = None,
) -> r.NodeRefused:
    return r.NodeRefused(
        at=now,
        node_id=hello.node_id,
        incarnation=hello.incarnation,
        why=why,
        retry_after_s=retry_after_s,
        rejoin=rejoin,
        holder=holder.incarnation if holder else "",
        holder_pid=holder.info.pid if holder else 0,
        holder_machine_id=holder.info.machine_id if holder else "",
        holder_boot_id=holder.info.boot_id if holder else "",
    )
