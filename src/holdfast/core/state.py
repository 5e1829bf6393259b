"""The job as data. Only evolve.py changes it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from holdfast.core.durability import Durability, ImageReport, SnapshotStats
from holdfast.core.events import NodeInfo, SessionInfo, StepError
from holdfast.core.faults.failures import Failure
from holdfast.core.health.findings import Norm, Stage
from holdfast.core.health.reputation import LAST_RESORT, Reputation
from holdfast.core.node_sets import HeldShards, NodeSets
from holdfast.core.records import (
    CheckConcluded,
    IncidentClosed,
    IncidentKind,
    JobFinished,
    NodeCordoned,
    WorkerFailingRecord,
    WorkersStalledRecord,
)
from holdfast.core.replica_placement import NOWHERE, ReplicaPlacement
from holdfast.core.sample_audit import SampleAudit
from holdfast.core.settings import Settings
from holdfast.core.shard_leases import Streams
from holdfast.core.snapshot_interval import FAULTS_PER_NODE_DAY
from holdfast.core.state_coverage import NodeHolders, ShardLayout, WorkerKey
from holdfast.core.strategies import Strategy
from holdfast.core.views import Member, View, ViewShape

if TYPE_CHECKING:
    from holdfast.core.health.check_rounds import Checkup

GONE_NODES_MAX = 1_000
"""How many ended incarnations are remembered, for the guard of their ids and for `holdfast status`."""
CLOSED_INCIDENTS_MAX = 1_000
FAILURES_PER_INCIDENT_MAX = 64
ECHOES_LISTED_MAX = 64
"""How many interrupted steps of a view are journaled, with what they say, before the rest is counted."""
PAST_FAILURES_MAX = 256
VIEW_TIMES_MAX = 256
CORDONS_MAX = 256


class PastFailure(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of a failure, to compare later ones with (blame.py)."""

    at: float
    rank: int
    pid: int
    machine: str
    fault: str
    is_of_node: bool
    signature: str
    """Its exception, in a form that is the same when it happens again; empty if there was none."""
    step: int
    attempt: int = 0
    """The view in which its step was tried, as far as is known."""
    is_newcomer: bool = False
    """Whether the worker was one that the recovery under way had started."""


class Present(msgspec.Struct, frozen=True, tag="present"):
    """Alive, as far as is known."""


class Draining(msgspec.Struct, frozen=True, tag="draining"):
    """On its way out, by request."""

    at: float
    signal: int
    why: str


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """Declared gone."""

    at: float
    certain: bool
    since: float
    """When it was last heard."""
    why: str


class Left(msgspec.Struct, frozen=True, tag="left"):
    """Gone after a goodbye."""

    at: float
    signal: int


Standing = Present | Draining | Lost | Left


class Linked(msgspec.Struct, frozen=True, tag="linked"):
    """Its connection is up."""


class Unlinked(msgspec.Struct, frozen=True, tag="unlinked"):
    """Its connection broke; it is lost if it has not come back by the deadline."""

    since: float
    deadline: float
    certain: bool
    """Whether the break itself proves a death (a closed socket), or only a master's restart."""


Link = Linked | Unlinked


class Unchecked(msgspec.Struct, frozen=True, tag="unchecked"):
    """No check is wanted."""


class Awaited(msgspec.Struct, frozen=True, tag="awaited"):
    """Must be checked before it takes part."""

    why: str


class Fit(msgspec.Struct, frozen=True, tag="fit"):
    """Passed its last check."""

    at: float


class Slow(msgspec.Struct, frozen=True, tag="slow"):
    """Takes part all the same."""

    at: float
    why: str


class LeftOut(msgspec.Struct, frozen=True, tag="left-out"):
    """Slow, and the job does without it for as long as it can."""

    at: float
    why: str


class Unfit(msgspec.Struct, frozen=True, tag="unfit"):
    """Failed its check, and takes no part."""

    at: float
    why: str


class CutOff(msgspec.Struct, frozen=True, tag="cut-off"):
    """One end of a broken link: the job does without it until it reaches the others again."""

    at: float
    why: str


Health = Unchecked | Awaited | Fit | Slow | LeftOut | CutOff | Unfit


@dataclass
class Node:
    """One node's current or last incarnation."""

    node_id: str
    incarnation: str
    info: NodeInfo
    joined_at: float
    join_order: int
    standing: Standing = Present()
    link: Link = Linked()
    store_port: int = 0
    parked: int = 0
    """Spares that wait on it, ready to take a rank."""
    parked_at: float = 0.0
    """When their number was last heard."""
    health: Health = Unchecked()
    reputation: Reputation = Reputation()
    """What its machine was known for when it joined."""
    cut_offs: int = 0
    """How often it was left out for a broken link."""
    admitted: bool = False
    """Whether it may take part despite its reputation, as there are no other nodes."""

    @property
    def machine(self) -> str:
        """Return the name by which its machine is known across jobs."""
        return self.info.machine or self.info.host

    @property
    def is_last_resort(self) -> bool:
        """Return whether it is only used if the job could not start or go on without it."""
        return self.reputation.grade in LAST_RESORT and not self.admitted

    @property
    def alive(self) -> bool:
        """Return whether it is not declared gone."""
        return isinstance(self.standing, Present | Draining)

    @property
    def eligible(self) -> bool:
        """Return whether it may take part in the next view."""
        return self.is_here and self.is_fit and not self.is_last_resort

    @property
    def is_fit(self) -> bool:
        """Return whether its health lets it take part."""
        return isinstance(self.health, Unchecked | Fit | Slow)

    @property
    def is_here(self) -> bool:
        """Return whether it is present and connected, whatever its health."""
        return isinstance(self.standing, Present) and isinstance(self.link, Linked)

    @property
    def is_awaited(self) -> bool:
        """Return whether it is here and must be checked before it takes part."""
        return self.is_here and isinstance(self.health, Awaited)

    @property
    def is_reserve(self) -> bool:
        """Return whether it is here, and only used if the job cannot do without it."""
        return self.is_last_resort and self.alive and isinstance(self.link, Linked)

    @property
    def stays(self) -> bool:
        """Return whether it is alive, not leaving and not left out for a broken link."""
        return isinstance(self.standing, Present) and not isinstance(self.health, CutOff)

    @property
    def unlinked_until(self) -> float | None:
        """Return when its broken connection must be back; None if it is connected, or gone."""
        return self.link.deadline if self.alive and isinstance(self.link, Unlinked) else None

    @property
    def doubtful(self) -> bool:
        """Return whether it is present, but its connection is broken and it may be declared lost."""
        return isinstance(self.standing, Present) and isinstance(self.link, Unlinked)


class Gathering(msgspec.Struct, frozen=True, tag="gathering"):
    """No view is in force: waiting for nodes."""

    since: float
    deadline: float
    why: str


class Serving(msgspec.Struct, frozen=True, tag="serving"):
    """`JobState.view` is in force."""


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """Over. Final."""

    record: JobFinished


Phase = Gathering | Serving | Finished


@dataclass
class Incident:
    """One recovery under way."""

    number: int
    kind: IncidentKind
    cause: str
    view_before: int
    happened_at: float
    """As far as is known, from failures' own times and when nodes were last heard."""
    detected_at: float
    decided_view: int = 0
    decided_at: float = 0.0
    strategy: Strategy | None = None
    why: str = ""
    rebuilt_at: float = 0.0
    nodes_awaited_until: float = 0.0
    """How long the survivors wait for a replacement, with the view in force; 0: they do not."""
    failures: list[Failure] = field(default_factory=list)
    failures_dropped: int = 0
    failed: set[tuple[int, int]] = field(default_factory=set)
    """View and rank of each of them, also of those that were dropped: none is counted twice."""
    tries: dict[Strategy, int] = field(default_factory=dict)
    """How often each strategy was chosen."""
    tries_for: dict[tuple[Strategy, str], int] = field(default_factory=dict)
    """How often for what (rung_tries.py)."""
    losses: dict[str, int] = field(default_factory=dict)
    """How often each node was lost in it."""
    answered: set[tuple[Strategy, str]] = field(default_factory=set)
    """Which failures (problems.marks) it was chosen for: one that comes back is not answered by the same rung again."""
    newcomers: dict[tuple[str, int], Strategy] = field(default_factory=dict)
    """Workers (node, local rank) that this recovery has brought in, and by which rung. Until a step is committed their
    failures say more about how they were made than about the job."""
    has_spare_failed: bool = False
    """Whether a parked spare was given a rank and then failed by itself: the next one would too."""


@dataclass
class LinkProbe:
    """A question to the members of a view: whom they cannot reach (health/peer_links.py)."""

    deadline: float
    unreachable: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By member that has answered."""
    is_judged: bool = False
    broken: tuple[tuple[str, str], ...] = ()
    why_kept: str = ""


@dataclass
class ViewProgress:
    """What is known of the workers of the view in force. A new view starts with an empty one."""

    released: dict[str, str] = field(default_factory=dict)
    """By node: incarnations that the view left out by plan. Their workers leave at the step boundary."""
    started: set[str] = field(default_factory=set)
    """Nodes whose workers all run."""
    succeeded: set[WorkerKey] = field(default_factory=set)
    """Workers that ended with exit code zero."""
    failed: dict[WorkerKey, Failure] = field(default_factory=dict)
    """Workers that failed, except those of nodes on their way out."""
    interrupted: dict[WorkerKey, StepError] = field(default_factory=dict)
    """Workers whose step failed; their processes live and wait for the next view."""
    echoes: set[WorkerKey] = field(default_factory=set)
    """Further workers whose steps were interrupted by what happened to others. Not journaled one by one."""
    failing: dict[WorkerKey, WorkerFailingRecord] = field(default_factory=dict)
    """Workers whose script has failed and whose process is about to end."""
    stalled: dict[str, WorkersStalledRecord] = field(default_factory=dict)
    """By node: its last report that none of its workers makes progress. It holds until the node reports that something
    moves there."""
    waiting: set[str] = field(default_factory=set)
    """Nodes all of whose workers wait for other ranks, for longer than a step takes. Not journaled: if it lasts, the
    nodes report a stall."""
    link_probe: LinkProbe | None = None
    """What the members know of the links between them, once they were asked."""
    slow_links: set[frozenset[str]] = field(default_factory=set)
    """Links that were found to be slow, each named once."""
    failing_since: float = 0.0
    """When the first failure, interrupted step or stall was recorded. Before there is any: when something was last
    reported that may make the view impossible to repair (a worker ended, or holds less state than was assumed)."""
    joined: set[str] = field(default_factory=set)
    """Nodes whose workers have all joined the view, with state."""
    all_joined_at: float = 0.0
    """When the last node joined; 0 while one is missing."""
    is_closed: bool = False
    """Whether the workers have left their training loop."""
    first_committed: int = -1
    """The first step that was committed in the view; -1 before."""
    layout: ShardLayout | None = None
    """How the state of the nodes that joined is sharded."""
    holders: dict[str, NodeHolders] = field(default_factory=dict)
    """By node: what state its live workers hold, including state from earlier views."""
    holders_before: dict[str, NodeHolders] = field(default_factory=dict)
    """The same for the view before, for reports about it that arrive late."""
    step_times: dict[WorkerKey, float] = field(default_factory=dict)
    """Each worker's own time in a step, as last reported."""
    step_time_norm: tuple[float, float, float] = (0.0, 0.0, 1.0)
    """When it was last computed, the ranks' median step time, and its deviation; used where there are many ranks."""
    slow_reports: dict[WorkerKey, int] = field(default_factory=dict)
    """In how many reports in a row each worker was slower than the others; only of those that were in the last."""
    stragglers: dict[WorkerKey, float] = field(default_factory=dict)
    """The stragglers that were found, each with its speed as a share of the usual one."""


@dataclass
class TrainingState:
    """Where the workers' training state is, and how safe it is."""

    session: SessionInfo | None = None
    """What kind of state the workers have, as last reported; None if they do not use Holdfast, or have not said."""
    committed: int = -1
    """The highest step that is known to have been committed in any view."""
    repeated: int = 0
    """How many committed steps were made again because the state after them was lost."""
    retries: dict[int, int] = field(default_factory=dict)
    """By rank: how many collectives it has run again below a step."""
    placement: ReplicaPlacement = NOWHERE
    """Which nodes of the view keep whose snapshots. It follows from the views there were, so no record contains it."""
    parity_groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By node: its parity group, where snapshots are kept as parity."""
    images: dict[str, tuple[ImageReport, ...]] = field(default_factory=dict)
    """By live node: the images in its memory."""
    images_heard: int = 0
    """How many reports of images have come since all were last looked at together."""
    snapshot_stats_by_node: dict[str, SnapshotStats] = field(default_factory=dict)
    checkpoint_step: int = -1
    """The step of the newest checkpoint of this job."""
    checkpoint_url: str = ""
    resumed_step: int = -1
    """The step at which all ranks last started from a state that was saved before; -1: they never did."""
    resumed_from: str = ""
    """Where it came from: a checkpoint, or the nodes' memory."""
    resumed_view: int = 0
    reloaded: int = -1
    """The step in memory that all workers last started from without using up a restart."""
    durability: Durability = Durability()
    """As last written to the journal."""
    durability_at: float = 0.0
    snapshot_stats: SnapshotStats = SnapshotStats()
    """Of all nodes together, written to the journal with the durability."""


@dataclass
class DataState:
    """What is known of the training data that the steps used."""

    audit: SampleAudit = field(default_factory=SampleAudit)
    """Which samples the committed steps were made of."""
    streams: Streams = field(default_factory=Streams)
    """Which shards were leased, and which could not be read."""


@dataclass
class NodeChecks:
    """The checks of nodes (health/)."""

    checkup: Checkup | None = None
    """The check under way. It is not journaled, only its result is."""
    started: int = 0
    """How many checks this term of the master has started."""
    last: CheckConcluded | None = None
    """The last check that was completed."""
    norms: dict[Stage, Norm] = field(default_factory=dict)
    """How long the stages of checks take on the nodes of this job."""


@dataclass
class IncidentHistory:
    """What went wrong so far, and what was done about it."""

    current: Incident | None = None
    closed: list[IncidentClosed] = field(default_factory=list)
    opened: int = 0
    faults: int = 0
    """How many of the incidents were not planned changes."""
    restarts_used: int = 0
    past_failures: list[PastFailure] = field(default_factory=list)
    """The last failures, in short."""
    cordons: list[NodeCordoned] = field(default_factory=list)
    """Nodes that were evicted for a fault."""
    cleared: set[str] = field(default_factory=set)
    """The incarnations of them that turned out not to be at fault."""
    views_formed_at: list[float] = field(default_factory=list)
    """When the last views were formed."""
    node_s: float = 0.0
    """How long nodes were in views before the one in force, all together."""
    faults_per_node_day: float = FAULTS_PER_NODE_DAY
    """The estimated fault rate when the view in force was formed."""


@dataclass
class JobState:
    """Everything the master knows about its job. The first fields are its membership."""

    job_id: str = ""
    settings: Settings = field(default_factory=Settings)
    created_settings: Settings = field(default_factory=Settings)
    """The settings at creation, with which agents are started, whatever the job was resized to since."""
    created_at: float = 0.0
    recorded_at: float = 0.0
    """The latest time of a record."""
    term: int = 0
    phase: Phase = Gathering(since=0.0, deadline=0.0, why="the job has not been created")
    nodes: dict[str, Node] = field(default_factory=dict)
    bans: dict[str, float] = field(default_factory=dict)
    """By node that is a last resort: when its machine's ban runs out."""
    join_count: int = 0
    """How many joins there have been: the next node's position in the join order."""
    view: View | None = None
    """The view in force; while gathering, the last one, whose ranks are kept where possible."""
    members: dict[str, Member] = field(default_factory=dict)
    """Its members by node."""
    shape: ViewShape = ViewShape()
    """What follows from the view for all of its members' orders."""
    progress: ViewProgress = field(default_factory=ViewProgress)
    state: TrainingState = field(default_factory=TrainingState)
    data: DataState = field(default_factory=DataState)
    checks: NodeChecks = field(default_factory=NodeChecks)
    incidents: IncidentHistory = field(default_factory=IncidentHistory)
    sets: NodeSets = field(default_factory=NodeSets)
    held: HeldShards = field(default_factory=HeldShards)
    """Both follow from the other fields (node_sets.py)."""

    @property
    def formed_at(self) -> float:
        """Return when the last view was formed; 0 before the first."""
        return self.incidents.views_formed_at[-1] if self.incidents.views_formed_at else 0.0

    @property
    def is_complete(self) -> bool:
        """Return whether all workers have succeeded. In a planned change whose new workers came too late, those that
        held state are enough: they have made their last step and will not join the view."""
        assert self.view is not None
        progress = self.progress
        if len(progress.succeeded) == self.view.world_size:
            return True
        is_planned = self.view.keeps_workers and self.view.planned
        if not progress.succeeded or not is_planned or progress.first_committed >= 0:
            return False
        workers = ((m.node_id, i) for m in self.view.members for i in range(m.workers))
        left = [worker for worker in workers if worker not in progress.succeeded]
        return not any(i < len(held := progress.holders.get(n, ())) and held[i] is not None for n, i in left)

    @property
    def stall(self) -> dict[str, WorkersStalledRecord]:
        """Return the reports of a stall, if nothing moves on any member with workers left; else none. A node whose
        workers are busy reports nothing: then the others wait for it, and nothing is wrong. Where a worker is asleep
        it is enough that the other nodes' workers wait."""
        return self.stall_if(self.progress.waiting)

    @property
    def joins_slowly(self) -> bool:
        """Return whether all wait for one another on their way into a view. That may be because state is sent over a
        slow network, so it is a stall only after `joining_stall_s`."""
        return self._all_join(self._standing_still(self.progress.waiting))

    def stall_if(self, waiting: Collection[str]) -> dict[str, WorkersStalledRecord]:
        """Return the reports of a stall, if the workers of these nodes wait for other ranks. Which do is not journaled:
        `evolve`, which must come to the same result from the journal, asks with all members, or none."""
        reports = self._standing_still(waiting)
        lasted_s = min((report.stalled_s for report in reports.values()), default=0.0)
        return {} if self._all_join(reports) and lasted_s < self.settings.joining_stall_s else reports

    def _all_join(self, reports: dict[str, WorkersStalledRecord]) -> bool:
        vectors = [vector for report in reports.values() for vector in report.worker_progress]
        return bool(vectors) and all(vector.joining and vector.waiting for vector in vectors)

    def _standing_still(self, waiting: Collection[str]) -> dict[str, WorkersStalledRecord]:
        """Return the reports if nothing moves on any member, and a rank or a node waits for that."""
        progress, reports = self.progress, self.progress.stalled
        interrupted = [*progress.interrupted, *progress.echoes] if reports else []
        heard = len(reports) + len(interrupted) + len(waiting) + len(progress.succeeded)
        if not reports or heard < len(self.members):
            return {}  # whatever they say, others have said nothing
        vectors = [vector for report in reports.values() for vector in report.worker_progress]
        still = {*reports, *(n for n, _ in interrupted)}
        if len(progress.interrupted) >= ECHOES_LISTED_MAX:
            still |= set(waiting)  # `evolve` does not know of the others, so it counts on all
        if any(vector.asleep for vector in vectors):
            still |= set(waiting)
            is_waited_for = waiting or progress.interrupted or not all(vector.asleep for vector in vectors)
            if not is_waited_for and not all(report.is_overdue for report in reports.values()):
                return {}  # all of them sleep: a script may do that
        unfinished = {
            m.node_id
            for m in self.members.values()
            if any((m.node_id, i) not in progress.succeeded for i in range(m.workers))
        }
        return dict(reports) if unfinished <= still else {}

    @property
    def able(self) -> list[Node]:
        """Return the nodes that the job can count on: those that may take part in the next view, and suspected members
        (health/checkup.py), which work on and may take part once they have passed their check."""
        suspects = {node_id for node_id in self.sets.awaited if self.is_suspect(self.nodes[node_id])}
        found = [self.nodes[node_id] for node_id in suspects | self.sets.eligible.keys()]
        return sorted(found, key=lambda node: node.join_order)

    def is_suspect(self, node: Node) -> bool:
        """Return whether this incarnation of the node is a member of the view and must be checked before it takes part
        in a view in which all workers start again."""
        member = self.members.get(node.node_id)
        is_working = member is not None and member.incarnation == node.incarnation
        return is_working and node.is_here and isinstance(node.health, Awaited)

    def live(self, node_id: str, incarnation: str) -> Node | None:
        """Return the node, if this incarnation of it is the current one and alive."""
        node = self.nodes.get(node_id)
        return node if node and node.incarnation == incarnation and node.alive else None
