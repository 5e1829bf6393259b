"""From an event to the facts to be kept. What follows from the facts is conclude.py's business.

Every event names the life (`incarnation`) it comes from. What a life that is over has to say changes nothing;
what an old view's workers did is evidence for the open incident, never a new fault.

Who may have an id (`Hello`), by what is known of the life that had it before:

    nothing                           taken in
    it says so itself (same life)     its connection is restored; if it was declared lost, it must rejoin
    left, or certainly dead           taken in at once
    alive and connected               refused for good, unless the newcomer knows it dead
    alive, connection just broke      refused until the verdict
    silent, perhaps behind a cut      refused until the guard window is over
"""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from holdfast.core import events as e
from holdfast.core import leases, ledger
from holdfast.core import records as r
from holdfast.core.faults import LOG_LINE_CHARS_MAX, LOG_TAIL_LINES_MAX, TRACEBACK_CHARS_MAX, Failure
from holdfast.core.health import checkup
from holdfast.core.kept import IMAGES_MAX, SAID_EVERY_S, safety, together
from holdfast.core.state import Draining, Finished, Incident, Job, Linked, Lost, Node, Present, Serving, Unlinked
from holdfast.core.troubles import seats_without

MESSAGE_CHARS_MAX = 2_000
"""Of a failed step's error."""
READINGS_MAX = 16
"""Of a node's counters."""


def decide(job: Job, event: e.Event, now: float) -> list[r.Record]:
    """The records this event makes true. Pure: reads the job, changes nothing."""
    match event:
        case e.Hello():
            return _hello(job, event, now)
        case e.LinkBroke(node_id=node_id, incarnation=incarnation):
            node = job.live(node_id, incarnation)
            if node is None or isinstance(node.link, Unlinked):
                return []
            return [r.LinkLost(at=now, node_id=node_id, deadline=now + job.settings.reconnect_grace_s)]
        case e.NodeSilent(node_id=node_id, incarnation=incarnation, silent_s=silent_s):
            if job.live(node_id, incarnation) is None:
                return []
            why = f"nothing heard from it for {silent_s:.1f} s"
            return [
                r.NodeLost(
                    at=now, node_id=node_id, incarnation=incarnation, certain=False, since=now - silent_s, why=why
                )
            ]
        case e.WorkersStarted(node_id=node_id, incarnation=incarnation, view=view, pids=pids, logs=logs):
            if not _in_current_view(job, node_id, incarnation, view) or node_id in job.started:
                return []
            return [r.NodeStarted(at=now, node_id=node_id, view=view, pids=pids, logs=logs)]
        case e.WorkerSucceeded():
            return _worker_succeeded(job, event, now)
        case e.WorkerFailed():
            return _worker_failed(job, event, now)
        case e.StoreOffered(node_id=node_id, incarnation=incarnation, port=port):
            return _offer(job, node_id, incarnation, port, now) if job.live(node_id, incarnation) else []
        case e.SessionBegan() | e.StepInterrupted() | e.WorkersStalled() | e.StepCommitted() | e.TrainingClosed():
            return _session_news(job, event, now)
        case e.SparesChanged(node_id=node_id, incarnation=incarnation, parked=parked):
            node = job.live(node_id, incarnation)
            return _spares(node, parked, now) if node else []
        case e.StateKept(node_id=node_id, incarnation=incarnation):
            return _kept(job, event, now) if job.live(node_id, incarnation) else []
        case e.CheckpointWritten(node_id=node_id, incarnation=incarnation, step=step, url=url):
            is_news = job.live(node_id, incarnation) is not None and step > job.checkpoint
            return [r.CheckpointPublished(at=now, step=step, url=url)] if is_news else []
        case e.DataAnnounced() | e.SamplesWitnessed() | e.StretchSkipped():
            is_heard = job.live(event.node_id, event.incarnation) and not isinstance(job.phase, Finished)
            return ledger.decide(job.ledger, event, now) if is_heard else []
        case e.StreamNews():
            return _stream_news(job, event, now)
        case e.PacesReported(node_id=node_id, incarnation=incarnation, view=view, paces=paces):
            if not _in_current_view(job, node_id, incarnation, view):
                return []
            seats = job.members[node_id].workers
            known = tuple(pace for pace in paces[:seats] if 0 <= pace.local_rank < seats)
            return [r.PacesNoted(at=now, node_id=node_id, paces=known)]
        case e.NumbersReported():
            return _numbers(job, event, now)
        case e.CountersRead():
            return _counters(job, event, now)
        case e.NodeExamined():
            return checkup.decide(job, event, now)
        case e.DrainAsked(node_id=node_id, why=why):
            node = job.nodes.get(node_id)
            if node is None or not isinstance(node.standing, Present) or isinstance(job.phase, Finished):
                return []
            return [_draining(node_id, node.incarnation, 0, why, now)]
        case e.ResizeAsked(nodes=nodes, why=why):
            same = nodes == job.settings.nodes_max
            if same or nodes < max(job.settings.nodes_min, 1) or isinstance(job.phase, Finished):
                return []
            return [r.JobResized(at=now, nodes=nodes, why=why)]
        case e.NodeLeaving(node_id=node_id, incarnation=incarnation, signal=signal, why=why):
            node = job.live(node_id, incarnation)
            if node is None or isinstance(node.standing, Draining):
                return []
            return [_draining(node_id, incarnation, signal, why, now)]
        case e.NodeGone(node_id=node_id, incarnation=incarnation):
            if job.live(node_id, incarnation) is None:
                return []
            return [r.NodeLeft(at=now, node_id=node_id, incarnation=incarnation)]
        case _:
            assert_never(event)


def _in_current_view(job: Job, node_id: str, incarnation: str, view: int) -> bool:
    if not isinstance(job.phase, Serving) or job.view is None or job.view.number != view:
        return False
    member = job.members.get(node_id)
    return member is not None and member.incarnation == incarnation and job.live(node_id, incarnation) is not None


def _worker_succeeded(job: Job, event: e.WorkerSucceeded, now: float) -> list[r.Record]:
    seat = (event.node_id, event.local_rank)
    current = _in_current_view(job, event.node_id, event.incarnation, event.view)
    if (current and seat not in job.done and seat not in job.failed) or (
        not current and _is_counted_on(job, event.node_id, event.incarnation, event.view, event.local_rank)
    ):
        return [r.WorkerDone(at=now, node_id=event.node_id, view=event.view, local_rank=event.local_rank)]
    return []


def _worker_failed(job: Job, event: e.WorkerFailed, now: float) -> list[r.Record]:
    node = job.live(event.node_id, event.incarnation)
    if node is None or not isinstance(node.standing, Present):
        return []  # workers of a node on its way out are expected to end
    key = (event.node_id, event.failure.local_rank)
    if _in_current_view(job, event.node_id, event.incarnation, event.view) or _is_yet_to_change(job, event):
        if key in job.failed or key in job.done:
            return []
        return [r.WorkerLost(at=now, failure=event.failure, late=False)]
    incident = job.incident
    if incident and _is_of(job, incident, event.view) and not _known(incident.failures, event):
        return [r.WorkerLost(at=now, failure=event.failure, late=True)]
    return []


def _is_yet_to_change(job: Job, event: e.WorkerFailed) -> bool:
    """A view by plan changes nothing until the step boundary: a worker that dies before is missing in it as well."""
    view, member = job.view, job.members.get(event.node_id)
    if not isinstance(job.phase, Serving) or view is None or member is None or member.incarnation != event.incarnation:
        return False
    before = view.kept and view.planned and event.view == view.number - 1 and job.proved < 0
    return before and event.failure.local_rank < member.workers


def _is_of(job: Job, incident: Incident, view: int) -> bool:
    """Whether the view is one that this incident has left behind."""
    return job.view is not None and incident.view_before <= view < job.view.number


def _is_counted_on(job: Job, node_id: str, incarnation: str, view: int, local_rank: int) -> bool:
    """Whether a worker that ended in an earlier view is still counted among those that hold the state."""
    if job.view is None or view >= job.view.number or not _in_current_view(job, node_id, incarnation, job.view.number):
        return False
    return seats_without(job, node_id, local_rank, view) != job.crew.get(node_id, ())


def _session_news(
    job: Job,
    event: e.SessionBegan | e.StepInterrupted | e.WorkersStalled | e.StepCommitted | e.TrainingClosed,
    now: float,
) -> list[r.Record]:
    """Of workers that speak to Holdfast. Only the newest view's count: in an older one they did what they had to."""
    node_id, view = event.node_id, event.view
    if not _in_current_view(job, node_id, event.incarnation, view):
        return []
    match event:
        case e.SessionBegan(session=session) if node_id not in job.settled:
            news = session != job.session
            return [r.NodeSettled(at=now, node_id=node_id, view=view, session=session, news=news)]
        case e.StepInterrupted(stumble=stumble) if _is_at_work(job, (node_id, stumble.local_rank)):
            return [r.StepBroken(at=now, node_id=node_id, view=view, stumble=_bounded(stumble))]
        case e.WorkersStalled(stalled_s=stalled_s, vectors=vectors):
            shown = tuple(map(_shortened, vectors))
            if node_id in job.stuck and job.stuck[node_id].vectors == shown:
                return []
            return [r.WorkersStuck(at=now, node_id=node_id, view=view, stalled_s=stalled_s, vectors=shown)]
        case e.StepCommitted(step=step) if job.proved < 0:
            return [r.StepProved(at=now, node_id=node_id, view=view, step=step)]
        case e.TrainingClosed(step=step) if not job.is_closed:
            return [r.TrainingEnded(at=now, node_id=node_id, view=view, step=step)]
    return []


def _shortened(vector: e.Vector) -> e.Vector:
    tail = tuple(line[:LOG_LINE_CHARS_MAX] for line in vector.log_tail[-LOG_TAIL_LINES_MAX:])
    return replace(vector, stack=vector.stack[-TRACEBACK_CHARS_MAX:], log_tail=tail)


def _counters(job: Job, event: e.CountersRead, now: float) -> list[r.Record]:
    """Also of a view that is over: they come when the failure may have been answered."""
    if job.live(event.node_id, event.incarnation) is None or isinstance(job.phase, Finished):
        return []
    kept = tuple(reading[:LOG_LINE_CHARS_MAX] for reading in event.readings[:READINGS_MAX])
    return [r.CountersNoted(at=now, node_id=event.node_id, view=event.view, readings=kept)]


def _numbers(job: Job, event: e.NumbersReported, now: float) -> list[r.Record]:
    if not _in_current_view(job, event.node_id, event.incarnation, event.view):
        return []
    return [
        r.NumbersOdd(
            at=now,
            node_id=event.node_id,
            view=event.view,
            rank=event.rank,
            step=event.step,
            what=event.what[:MESSAGE_CHARS_MAX],
            outcome=event.outcome,
        )
    ]


def _stream_news(job: Job, event: e.StreamNews, now: float) -> list[r.Record]:
    """Of committed steps: true also if a view has come since, but not if all workers went back to a checkpoint."""
    is_fenced = job.view is None or not job.streams.since_view <= event.view <= job.view.number
    if is_fenced or job.live(event.node_id, event.incarnation) is None or isinstance(job.phase, Finished):
        return []
    known = job.streams.by_name.get(event.stream)
    fresh, troubles = leases.news_of(known, event.leases[: leases.NEWS_MAX], event.troubles[: leases.NEWS_MAX])
    found: list[r.Record] = []
    if fresh:
        found.append(
            r.ShardsLeased(at=now, view=event.view, stream=event.stream, step=event.step, leases=tuple(fresh))
        )
    for trouble in troubles:
        kind = r.ShardQuarantined if trouble.is_last else r.ShardFailed
        bounded = replace(trouble, why=trouble.why[: leases.WHY_CHARS_MAX])
        found.append(kind(at=now, view=event.view, stream=event.stream, step=event.step, trouble=bounded))
    return found


def _bounded(stumble: e.Stumble) -> e.Stumble:
    """A thousand ranks stumble over one that fell: where each of them was is not worth keeping."""
    kept = "" if stumble.collateral else stumble.traceback[-TRACEBACK_CHARS_MAX:]
    return replace(stumble, message=stumble.message[:MESSAGE_CHARS_MAX], traceback=kept)


def _is_at_work(job: Job, seat: tuple[str, int]) -> bool:
    known = seat in job.held or seat in job.failed or seat in job.done
    return not known and seat[1] < job.members[seat[0]].workers


def _known(failures: list[Failure], event: e.WorkerFailed) -> bool:
    return any(f.rank == event.failure.rank and f.view == event.view for f in failures)


def _hello(job: Job, hello: e.Hello, now: float) -> list[r.Record]:
    old = job.nodes.get(hello.node_id)
    if old and old.incarnation == hello.incarnation:
        return _same_life(job, old, hello, now)
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
        return _take_in(hello, now)
    return _next_life(job, old, hello, now)


def _same_life(job: Job, node: Node, hello: e.Hello, now: float) -> list[r.Record]:
    if not node.alive:
        why = f"{node.node_id} was declared gone and the job went on without it"
        if isinstance(node.standing, Lost):
            why = f"{node.node_id} was declared lost ({node.standing.why}) and the job went on without it"
        return [_refuse(hello, now, why, retry_after_s=0.0, rejoin=True)]
    restored = r.LinkRestored(at=now, node_id=node.node_id)
    offered = _offer(job, node.node_id, node.incarnation, hello.store_port, now)
    return [restored, *offered, *_spares(node, hello.parked, now)]


def _offer(job: Job, node_id: str, incarnation: str, port: int, now: float) -> list[r.Record]:
    """A store serves one view only: an offer made before the view in force took it up says nothing new."""
    taken = 0
    if job.view and job.view.store_node_id == node_id and _in_current_view(job, node_id, incarnation, job.view.number):
        taken = job.view.store_port
    return [r.StoreReady(at=now, node_id=node_id, port=port)] if port not in (0, taken) else []


def _kept(job: Job, said: e.StateKept, now: float) -> list[r.Record]:
    """What is safe goes to the journal now and then only: it changes with every step."""
    node_id, images = said.node_id, said.images
    records: list[r.Record] = [
        r.StateNoted(at=now, node_id=node_id, images=images[:IMAGES_MAX], pacing=said.pacing)
    ]
    if now - job.safety_at >= SAID_EVERY_S:
        alive = {name: held for name, held in job.images.items() if (node := job.nodes.get(name)) and node.alive}
        found = safety({**alive, node_id: images}, job.checkpoint)
        if found != job.safety:
            pacings = {name: one for name, one in job.pacings.items() if name in alive} | {node_id: said.pacing}
            records.append(r.StateSafe(at=now, safety=found, pacing=together(pacings.values())))
    return records


def _spares(node: Node, parked: int, now: float) -> list[r.Record]:
    return [r.SparesKnown(at=now, node_id=node.node_id, parked=parked)] if parked != node.parked else []


def _take_in(hello: e.Hello, now: float) -> list[r.Record]:
    joined = r.NodeJoined(
        at=now, node_id=hello.node_id, incarnation=hello.incarnation, info=hello.info, repute=hello.repute
    )
    if hello.leaving:  # said in one breath, so that no view is ever formed with it
        why = "it was told to go before it joined"
        return [joined, _draining(hello.node_id, hello.incarnation, hello.leaving, why, now)]
    records: list[r.Record] = [joined]
    if hello.store_port:
        records.append(r.StoreReady(at=now, node_id=hello.node_id, port=hello.store_port))
    if hello.parked:
        records.append(r.SparesKnown(at=now, node_id=hello.node_id, parked=hello.parked))
    return records


def _draining(node_id: str, incarnation: str, signal: int, why: str, now: float) -> r.NodeDraining:
    return r.NodeDraining(at=now, node_id=node_id, incarnation=incarnation, signal=signal, why=why)


def _next_life(job: Job, old: Node, hello: e.Hello, now: float) -> list[r.Record]:
    if old.alive and _known_dead(old, hello):
        why = "its process is gone: its next life on the same machine says so"
        lost = r.NodeLost(
            at=now, node_id=old.node_id, incarnation=old.incarnation, certain=True, since=now, why=why
        )
        return [lost, *_take_in(hello, now)]
    match old.standing, old.link:
        case (Present() | Draining()), Unlinked(deadline=deadline):
            remaining_s = max(deadline - now, 0.0)
            return [_refuse_for(old, hello, now, "lost its connection a moment ago", remaining_s)]
        case (Present() | Draining()), Linked():
            return [_refuse_for(old, hello, now, "is alive and connected", None)]
        case Lost(at=at, certain=False), _ if not _known_dead(old, hello):
            remaining_s = at + job.settings.guard_window_s - now
            if remaining_s > 0:
                return [_refuse_for(old, hello, now, "fell silent and may still be alive", remaining_s)]
    return _take_in(hello, now)


def _known_dead(old: Node, hello: e.Hello) -> bool:
    """The newcomer saw its process gone, or the machine has been rebooted since."""
    rebooted = old.info.machine_id == hello.info.machine_id and old.info.boot_id != hello.info.boot_id
    return rebooted or old.incarnation in hello.dead_lives


def _mismatch(job: Job, hello: e.Hello) -> str:
    spec, settings = hello.spec, job.asked
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


def _refuse_for(old: Node, hello: e.Hello, now: float, state: str, retry_after_s: float | None) -> r.NodeRefused:
    remedy = (
        "give this node another --node-id (or --node-rank), or end the other one first"
        if retry_after_s is None
        else f"it can be had in {retry_after_s:.1f} s, or at once when the old life is known to be dead"
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
