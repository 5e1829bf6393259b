"""What agents must now do. Orders name a wanted state, not a change: an agent that gets one twice, or has
missed the one before, ends up the same."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from functools import cached_property
from itertools import accumulate

import msgspec

from holdfast.core import records as r
from holdfast.core.assess import can_repair_online, is_dumping
from holdfast.core.events import SessionInfo
from holdfast.core.faults.failures import Failure
from holdfast.core.health import checkup, peer_links
from holdfast.core.health.findings import CheckTask
from holdfast.core.rung_plans import is_member, may_resize, standby
from holdfast.core.snapshot_interval import FAULTS_PER_NODE_DAY
from holdfast.core.state import Draining, Finished, Gathering, JobState, Node, Serving
from holdfast.core.strategies import Strategy
from holdfast.core.views import Member, Runs, View
from holdfast.core.wording import counted


class Peer(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Another node, as far as keeping snapshots goes. There are several in each order, so its fields have no names
    there."""

    node_id: str
    address: str
    bulk_port: int
    workers: int
    slot_files: int = 0
    """How many of its workers may have had snapshots at once: one that closed up to a lower local rank has them in the
    slot file of its former one. 0: as many as there are workers."""


class Serve(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="serve"):
    """Run these workers of this view, and no others. Every node gets one for each view: its length does not depend on
    how many nodes there are."""

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
    node_sizes: Runs
    """How many workers each node has, in the order of group ranks, as (workers, nodes): one entry for all that follow
    one another and have as many."""
    keeps_workers: bool
    """Give the workers that live their new places; fill what is missing as `strategy` says: RECOVER from the parked
    spares first, otherwise by new processes. False: restart all of them."""
    planned: bool
    strategy: Strategy | None
    replaced: tuple[int, ...]
    """Local ranks whose workers live but hang: end them first."""
    spares: int
    """How many parked workers to keep beside."""
    session: SessionInfo | None
    """What is known of the workers' state; None until they have said so."""
    surplus: tuple[int, ...] = ()
    """Local ranks of the view before whose workers are well and have no rank in this one."""
    partners: tuple[Peer, ...] = ()
    """The nodes that hold replicas of this node's snapshots."""
    replica_owners: tuple[Peer, ...] = ()
    """The nodes of whose snapshots it holds replicas."""
    parity: tuple[Peer, ...] = ()
    """The group, itself included, that keeps its snapshots as parity."""
    weight_runs: tuple[tuple[float, int], ...] = ()
    """Of all ranks' shares of the global batch, as (weight, ranks); empty: all alike."""
    run: str = ""
    """Which run of the job this is: another one of the same name, with a journal of its own, has another."""
    faults_per_node_day: float = FAULTS_PER_NODE_DAY
    """Of this job, for those who choose how often to copy the state."""
    neighbours: tuple[Peer, ...] = ()
    """Other members of the view, to which the links are probed."""
    report_links: bool = False
    """Report which neighbours cannot be reached."""
    incidents: int = 0
    """How many incidents the job has had."""
    last_incident: str = ""
    """The cause of the last one."""

    def __post_init__(self) -> None:
        """Refuse sizes that do not fit the world, before anything is made of them."""
        nodes, ranks, is_empty = 0, 0, False
        for workers, count in self.node_sizes:  # one of these for each node of a view: no generators
            nodes, ranks, is_empty = nodes + count, ranks + workers * count, is_empty or workers < 1 or count < 1
        if (nodes, ranks) != (self.group_world_size, self.world_size) or is_empty:
            raise ValueError(f"{nodes} nodes with {ranks} ranks are not {self.group_world_size} with {self.world_size}")
        if self.weight_runs and sum(n for _, n in self.weight_runs) != self.world_size:
            raise ValueError("weights that are not those of all ranks")

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """Return the first rank of each node, in the order of group ranks."""
        sizes = [size for size, nodes in self.node_sizes for _ in range(nodes)]
        return tuple(accumulate(sizes[:-1], initial=0))

    @property
    def weights(self) -> tuple[float, ...]:
        """Return all ranks' shares of the global batch; empty: all alike."""
        return tuple(weight for weight, ranks in self.weight_runs for _ in range(ranks))


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
    neighbours: tuple[Peer, ...] = ()
    report_links: bool = False
    """As in Serve."""


class Exit(msgspec.Struct, frozen=True, kw_only=True, tag="exit"):
    """The job is over: end everything and exit."""

    outcome: r.Outcome
    exit_code: int
    why: str
    cause: Failure | None
    incidents: int = 0
    """How many incidents the job has had."""


class Refuse(msgspec.Struct, frozen=True, kw_only=True, tag="refuse"):
    """This agent is not part of the job."""

    why: str
    retry_after_s: float | None
    rejoin: bool
    holder: str
    holder_pid: int
    holder_machine_id: str
    holder_boot_id: str


CAUSE_CHARS_MAX = 200
"""Of the last incident's cause, in an order to serve."""

Order = Serve | Hold | Exit | Refuse


class Addressed(msgspec.Struct, frozen=True):
    """An order and the incarnation of the agent that it is for."""

    node_id: str
    incarnation: str
    order: Order


def orders(job: JobState, record: r.Record) -> list[Addressed]:
    """Return the orders that follow from this record, in the state it led to."""
    match record:
        case r.NodeJoined(node_id=node_id) | r.LinkRestored(node_id=node_id) | r.PeerLinksRestored(node_id=node_id):
            return [_standing(job, job.nodes[node_id])]
        case r.NodeReputationChanged():
            return [_standing(job, node) for node in job.nodes.values() if node.alive and _is_idle(job, node)]
        case r.NodeDraining(node_id=node_id) | r.NodeCordoned(node_id=node_id) | r.NodeAdmitted(node_id=node_id):
            return [_standing(job, job.nodes[node_id]), *_next_in_line(job, node_id)]
        case r.NodeLost(node_id=node_id) | r.NodeLeftRecord(node_id=node_id):
            return _next_in_line(job, node_id)
        case r.ViewFormed() | r.GatheringBegan() | r.JobFinished() | r.JobResized() | r.ViewJoinedRecord(news=True):
            return _all_standing(job, (node for node in job.nodes.values() if node.alive))
        case r.SessionRevisedRecord():
            return _all_standing(job, (node for node in job.nodes.values() if node.alive))
        case r.LinkProbeBegan():
            return _all_standing(job, (job.nodes[node_id] for node_id in job.members))
        case r.RoundBegan(tasks=tasks):
            return _all_standing(job, (job.nodes[node_id] for node_id in tasks))
        case r.CheckConcluded() | r.CheckupDropped() | r.NodeSuspected():
            return _all_standing(job, (node for node in job.nodes.values() if node.alive and _is_idle(job, node)))
        case r.NodeRefused() if _is_of_ended_job(job, record):
            return [Addressed(record.node_id, record.incarnation, standing_order(job, job.nodes[record.node_id]))]
        case r.NodeRefused():
            return [Addressed(record.node_id, record.incarnation, _refusal(record))]
        case _:
            return []


def check_orders(following: list[Addressed]) -> None:
    """Check that no node is told to wait without a reason."""
    for addressed in following:
        assert not isinstance(addressed.order, Hold) or addressed.order.why, f"{addressed.node_id} waits for no reason"


def _standing(job: JobState, node: Node) -> Addressed:
    return Addressed(node.node_id, node.incarnation, standing_order(job, node))


def _all_standing(job: JobState, nodes: Iterable[Node]) -> list[Addressed]:
    common = CommonParts(job)
    return [Addressed(node.node_id, node.incarnation, standing_order(job, node, common)) for node in nodes]


def _is_idle(job: JobState, node: Node) -> bool:
    return isinstance(job.phase, Gathering) or not is_member(job, node)


def _next_in_line(job: JobState, node_id: str) -> list[Addressed]:
    """Return the orders for the standby nodes whose turn it is to park workers, or no more, when one of them goes or
    comes. The others' turn does not change by it, except through nodes whose connections broke before."""
    if job.state.session is None or node_id in job.members or not isinstance(job.phase, Serving):
        return []
    wanted = _spare_nodes_wanted(job)
    return _all_standing(job, standby(job, wanted + 1)[max(wanted - 1 - len(job.sets.doubtful), 0) :])


def standing_order(job: JobState, node: Node, common: CommonParts | None = None) -> Order:
    """Return what this node should be doing now, whatever it was told before."""
    match job.phase:
        case Finished(record=record):
            return Exit(
                outcome=record.outcome,
                exit_code=record.exit_code,
                why=record.why,
                cause=record.cause,
                incidents=job.incidents.faults,
            )
        case Gathering(why=why):
            leaving = isinstance(node.standing, Draining)
            why = last_resort(node) or checkup.why_held(job, node) or why
            return Hold(job_id=job.job_id, why=why, leaving=leaving, check=checkup.task_of(job, node))
        case Serving():
            assert job.view is not None
            leaving = isinstance(node.standing, Draining)
            stays_for_now = not leaving or can_repair_online(job)  # until a step boundary
            if is_member(job, node) and stays_for_now:
                return _serve(job, job.view, job.members[node.node_id], common or CommonParts(job))
            return _hold(job, job.view, node, leaving)


def _hold(job: JobState, view: View, node: Node, leaving: bool) -> Hold:
    why = "this node is leaving" if leaving else f"standing by: the job runs on {counted(len(view.members), 'node')}"
    why = why if leaving else last_resort(node) or checkup.why_held(job, node) or why
    released = job.progress.released.get(node.node_id) == node.incarnation
    check = checkup.task_of(job, node)
    # Parked workers have the devices' memory: a check would find them there, and measure beside them.
    spares = 0 if leaving or check else _spares_standing_by(job, node)
    return Hold(
        job_id=job.job_id,
        why=why,
        release=view.number if released else 0,
        spares=spares,
        world_size=view.world_size if job.state.session else 0,
        session=job.state.session,
        leaving=leaving,
        check=check,
        neighbours=_neighbours(job, node, CommonParts(job)) if peer_links.is_asked(job, node) else (),
        report_links=peer_links.is_asked(job, node),
    )


def last_resort(node: Node) -> str:
    """Return why a node that is here takes no part in the job; empty if it may."""
    if not node.is_last_resort:
        return ""
    return (
        f"machine {node.machine} is {node.reputation.grade.value} ({node.reputation.why}): it stands by as a last"
        f" resort; `holdfast nodes uncordon {node.machine}` lets it back when it connects again"
    )


def _spares_standing_by(job: JobState, node: Node) -> int:
    """Return how many workers a standby node parks: all of its own, if the job may need it."""
    if job.state.session is None or is_dumping(job):
        return 0
    place = job.sets.standby.get(node.node_id)
    is_wanted = place is not None and bisect_left(job.sets.line, (*place, node.node_id)) < _spare_nodes_wanted(job)
    return node.info.workers if is_wanted else 0


def _spare_nodes_wanted(job: JobState) -> int:
    """Return how many of the standby nodes are to park workers."""
    assert job.view is not None
    return max(job.settings.nodes_max + job.settings.spare_nodes - len(job.view.members), 0)


def _serve(job: JobState, view: View, member: Member, common: CommonParts) -> Serve:
    return Serve(
        view=view.number,
        job_id=job.job_id,
        group_rank=member.group_rank,
        group_world_size=len(view.members),
        first_rank=member.first_rank,
        world_size=view.world_size,
        role_first_rank=member.role_first_rank,
        role_world_size=job.shape.role_sizes[member.role],
        store_host=view.store_host,
        store_port=view.store_port,
        store_here=view.store_node_id == member.node_id,
        restart_count=view.restart_count,
        restarts_max=job.settings.restarts_max,
        workers=member.workers,
        node_sizes=job.shape.node_sizes,
        keeps_workers=view.keeps_workers,
        planned=view.planned,
        strategy=view.strategy,
        replaced=tuple([local_rank for node_id, local_rank in view.replaced if node_id == member.node_id]),
        surplus=tuple([local_rank for node_id, local_rank in view.surplus if node_id == member.node_id]),
        spares=_spares_beside(job, member),
        session=job.state.session,
        partners=common.peers(job.state.placement.partners.get(member.node_id, ())),
        replica_owners=common.peers(job.state.placement.owners.get(member.node_id, ())),
        parity=common.peers(job.state.parity_groups.get(member.node_id, ())),
        weight_runs=job.shape.weight_runs,
        run=common.run,
        faults_per_node_day=job.incidents.faults_per_node_day,
        neighbours=_neighbours(job, job.nodes[member.node_id], common),
        report_links=peer_links.is_asked(job, job.nodes[member.node_id]),
        incidents=job.incidents.faults,
        last_incident=common.last_incident,
    )


def _last_incident(job: JobState) -> str:
    current = job.incidents.current
    if current and current.kind != "planned":
        return current.cause
    return next((record.cause for record in reversed(job.incidents.closed) if record.kind != "planned"), "")


class CommonParts:
    """What the orders of all nodes to serve have in common, made when the first one needs it."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._peers: dict[str, Peer] = {}

    @cached_property
    def run(self) -> str:
        """Return the id of this run: when its journal began, in microseconds. A job that continues its journal is the
        same run."""
        return f"{int(self._job.created_at * 1e6):x}"

    def peers(self, node_ids: tuple[str, ...]) -> tuple[Peer, ...]:
        """Return these members of the view as peers, including one that is just being lost."""
        if not node_ids:
            return ()
        known = self._peers
        return tuple([peer for node_id in node_ids if (peer := known.get(node_id) or self._peer(node_id))])

    def _peer(self, node_id: str) -> Peer | None:
        node = self._job.nodes.get(node_id)
        if node is None:
            return None
        peer = self._peers[node_id] = Peer(
            node_id=node_id,
            address=node.info.address,
            bulk_port=node.info.bulk_port,
            workers=self._job.members[node_id].workers,
            slot_files=node.info.workers,
        )
        return peer

    @cached_property
    def last_incident(self) -> str:
        """Return the cause of the last incident."""
        return _last_incident(self._job)[:CAUSE_CHARS_MAX]


def _neighbours(job: JobState, node: Node, common: CommonParts) -> tuple[Peer, ...]:
    near = common.peers(tuple([member.node_id for member in peer_links.near(job, node)]))
    return tuple([peer for peer in near if peer.bulk_port > 0])


def _spares_beside(job: JobState, member: Member) -> int:
    """Return how many spares a member parks: those wanted, and one for each missing worker that may be started
    again."""
    if job.state.session is None or is_dumping(job):
        return 0
    empty = job.nodes[member.node_id].info.workers - member.workers
    return job.settings.spares + (empty if empty and may_resize(job) else 0)


def _is_of_ended_job(job: JobState, record: r.NodeRefused) -> bool:
    """Return whether the agent belongs to this job, was cut off from it, and comes back after its end. An agent that
    was started since does not: it may be meant for the next job."""
    node = job.nodes.get(record.node_id)
    return isinstance(job.phase, Finished) and node is not None and node.incarnation == record.incarnation


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
