"""What agents must now do. Orders name a wanted state, not a change: an agent that gets one twice, or has
missed the one before, ends up the same."""

from __future__ import annotations

import msgspec

from holdfast.core import records as r
from holdfast.core.events import SessionInfo
from holdfast.core.faults import Failure
from holdfast.core.health import checkup
from holdfast.core.health.findings import CheckTask
from holdfast.core.interval import FAULTS_PER_NODE_DAY
from holdfast.core.ladder import Strategy
from holdfast.core.planned import may_resize
from holdfast.core.plans import is_member, standby
from holdfast.core.state import Draining, Finished, Gathering, Job, Node, Serving
from holdfast.core.troubles import dumping, online
from holdfast.core.views import Member, View


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Another node, as far as keeping snapshots goes."""

    node_id: str
    address: str
    bulk_port: int
    workers: int
    rooms: int = 0
    """How many of its workers may have had snapshots at once: one that closed up to a lower seat has them where they
    were. 0: as many as there are workers."""


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
    workers: int
    """How many of its workers have ranks in this view."""
    first_ranks: tuple[int, ...]
    """The first rank of each node, in the order of group ranks."""
    kept: bool
    """Give the workers that live their new places; fill what is missing as `strategy` says: RECOVER from the parked
    spares first, otherwise by new processes. False: start all of them anew."""
    planned: bool
    strategy: Strategy | None
    replaced: tuple[int, ...]
    """Local ranks whose workers live but hang: end them first."""
    spares: int
    """How many parked workers to keep beside."""
    session: SessionInfo | None
    """What is known of the workers' state; None until they have said so."""
    partners: tuple[Peer, ...] = ()
    """Those who keep this node's snapshots."""
    guests: tuple[Peer, ...] = ()
    """Those whose snapshots it keeps."""
    parity: tuple[Peer, ...] = ()
    """The group, itself included, that keeps its snapshots as parity."""
    weights: tuple[float, ...] = ()
    """Of all ranks' shares of the global batch; empty: all alike."""
    run: str = ""
    """Which run of the job this is: another one of the same name, with a journal of its own, has another."""
    faults_per_node_day: float = FAULTS_PER_NODE_DAY
    """Of this job, for those who choose how often to copy the state."""


class Hold(msgspec.Struct, frozen=True, kw_only=True, tag="hold"):
    """Run no workers; wait."""

    job_id: str
    why: str
    release: int = 0
    """The view that began without this node, by plan: its workers leave at the step boundary. 0: stop them now."""
    spares: int = 0
    """How many parked workers to keep ready."""
    world_size: int = 0
    """Of the view in force, for the spares."""
    session: SessionInfo | None = None
    leaving: bool = False
    """It was asked to go: once its workers are gone it says goodbye and ends."""
    check: CheckTask | None = None
    """What to do in the round of a check; None: there is none."""


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
        case r.NodeJoined(node_id=node_id) | r.LinkRestored(node_id=node_id):
            return [_standing(job, job.nodes[node_id])]
        case r.NodeDraining(node_id=node_id) | r.NodeCordoned(node_id=node_id) | r.NodeAdmitted(node_id=node_id):
            return [_standing(job, job.nodes[node_id]), *_next_in_line(job, node_id)]
        case r.NodeLost(node_id=node_id) | r.NodeLeft(node_id=node_id):
            return _next_in_line(job, node_id)
        case r.ViewFormed() | r.GatheringBegan() | r.JobFinished() | r.JobResized() | r.NodeSettled(news=True):
            return [_standing(job, node) for node in job.nodes.values() if node.alive]
        case r.RoundBegan(tasks=tasks):
            return [_standing(job, job.nodes[node_id]) for node_id in tasks]
        case r.NodesChecked() | r.CheckupDropped() | r.NodeSuspected():
            return [_standing(job, node) for node in job.nodes.values() if node.alive and _is_idle(job, node)]
        case r.NodeRefused():
            return [Addressed(record.node_id, record.incarnation, _refusal(record))]
        case _:
            return []


def _standing(job: Job, node: Node) -> Addressed:
    return Addressed(node.node_id, node.incarnation, standing_order(job, node))


def _is_idle(job: Job, node: Node) -> bool:
    return isinstance(job.phase, Gathering) or not is_member(job, node)


def _next_in_line(job: Job, node_id: str) -> list[Addressed]:
    """When one that stood by goes, those behind it move up."""
    if job.session is None or node_id in job.members or not isinstance(job.phase, Serving):
        return []
    return [_standing(job, node) for node in standby(job)]


def standing_order(job: Job, node: Node) -> Order:
    """What this node should be doing now, whatever it was told before."""
    match job.phase:
        case Finished(record=record):
            return Exit(
                outcome=record.outcome, exit_code=record.exit_code, why=record.why, cause=record.cause
            )
        case Gathering(why=why):
            leaving = isinstance(node.standing, Draining)
            why = last_resort(node) or checkup.why_held(job, node) or why
            return Hold(job_id=job.job_id, why=why, leaving=leaving, check=checkup.task_of(job, node))
        case Serving():
            assert job.view is not None
            leaving = isinstance(node.standing, Draining)
            if is_member(job, node) and not (leaving and not online(job)):
                return _serve(job, job.view, job.members[node.node_id])  # one that leaves stays until a step boundary
            return _hold(job, job.view, node, leaving)


def _hold(job: Job, view: View, node: Node, leaving: bool) -> Hold:
    why = "this node is leaving" if leaving else f"standing by: the job runs on {len(view.members)} nodes"
    why = why if leaving else last_resort(node) or checkup.why_held(job, node) or why
    released = job.released.get(node.node_id) == node.incarnation
    check = checkup.task_of(job, node)
    # Parked workers have the devices' memory: a check would find them there, and measure beside them.
    spares = 0 if leaving or check else _spares_standing_by(job, view, node)
    return Hold(
        job_id=job.job_id,
        why=why,
        release=view.number if released else 0,
        spares=spares,
        world_size=view.world_size if job.session else 0,
        session=job.session,
        leaving=leaving,
        check=check,
    )


def last_resort(node: Node) -> str:
    """Why a node that is here has no part in the job; empty if it may have one."""
    if not node.is_last_resort:
        return ""
    return (
        f"machine {node.machine} is {node.repute.grade.value} ({node.repute.why}): it stands by as a last resort, for"
        f" when the job cannot do without it; `holdfast nodes uncordon {node.machine}` lets it back when it joins again"
    )


def _spares_standing_by(job: Job, view: View, node: Node) -> int:
    """All of its workers, if the job is large enough to need it some day."""
    if job.session is None or dumping(job):
        return 0
    wanted = max(job.settings.nodes_max + job.settings.spare_nodes - len(view.members), 0)
    return node.info.workers if node in standby(job)[:wanted] else 0


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
        workers=member.workers,
        first_ranks=tuple(m.first_rank for m in view.members),
        kept=view.kept,
        planned=view.planned,
        strategy=view.strategy,
        replaced=tuple(local_rank for node_id, local_rank in view.replaced if node_id == member.node_id),
        spares=_spares_beside(job, member),
        session=job.session,
        partners=_peers(job, job.placement.partners.get(member.node_id, ())),
        guests=_peers(job, job.placement.guests.get(member.node_id, ())),
        parity=_peers(job, job.parity.get(member.node_id, ())),
        weights=view.weights,
        run=_run(job),
        faults_per_node_day=job.faults_per_node_day,
    )


def _run(job: Job) -> str:
    """By when its journal began, in microseconds: a journal that is gone on with is the same run."""
    return f"{int(job.created_at * 1e6):x}"


def _peers(job: Job, node_ids: tuple[str, ...]) -> tuple[Peer, ...]:
    """Of this view's members, also of one that is just being lost."""
    found = [(node, job.members[node_id]) for node_id in node_ids if (node := job.nodes.get(node_id))]
    return tuple(
        Peer(
            node_id=node.node_id,
            address=node.info.address,
            bulk_port=node.info.bulk_port,
            workers=member.workers,
            rooms=node.info.workers,
        )
        for node, member in found
    )


def _spares_beside(job: Job, member: Member) -> int:
    """As many as are wanted, and one for each empty seat that may be filled again."""
    if job.session is None or dumping(job):
        return 0
    empty = job.nodes[member.node_id].info.workers - member.workers
    return job.settings.spares + (empty if may_resize(job) else 0)


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
