"""The job as data. Only evolve.py changes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from holdfast.core.copies import Layout, Seats
from holdfast.core.events import NodeInfo, SessionInfo, Stumble
from holdfast.core.faults import Failure
from holdfast.core.health.findings import Norm, Stage
from holdfast.core.health.reputation import LAST_RESORT, Repute
from holdfast.core.interval import FAULTS_PER_NODE_DAY
from holdfast.core.kept import KeptImage, Pacing, Safety
from holdfast.core.ladder import Strategy
from holdfast.core.leases import Streams
from holdfast.core.ledger import Ledger
from holdfast.core.placement import NOWHERE, Placement
from holdfast.core.records import (
    IncidentClosed,
    IncidentKind,
    JobFinished,
    NodeCordoned,
    NodesChecked,
    WorkersStuck,
)
from holdfast.core.settings import Settings
from holdfast.core.views import Member, View

if TYPE_CHECKING:
    from holdfast.core.health.check_rounds import Checkup

GONE_NODES_MAX = 1_000
"""Ended lives that are remembered, for the guard of their ids and for `holdfast status`."""
INCIDENTS_KEPT_MAX = 1_000
FAILURES_PER_INCIDENT_MAX = 64
NOTED_MAX = 256
FORMED_KEPT_MAX = 256
CORDONS_KEPT_MAX = 256


class Noted(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of a failure, to compare later ones with (blame.py)."""

    at: float
    rank: int
    pid: int
    machine: str
    fault: str
    is_of_node: bool
    mark: str
    """Its exception, in a form that is the same when it comes back; empty if there was none."""
    step: int


class Present(msgspec.Struct, frozen=True, tag="present"):
    """Alive, as far as is known."""


class Draining(msgspec.Struct, frozen=True, tag="draining"):
    """On its way out, by request."""

    signal: int
    why: str


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """Declared gone."""

    at: float
    certain: bool
    since: float
    """The last sign of life."""
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
    """Nobody wanted a check."""


class Awaited(msgspec.Struct, frozen=True, tag="awaited"):
    """To be checked before it takes part."""

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


Health = Unchecked | Awaited | Fit | Slow | LeftOut | Unfit


@dataclass
class Node:
    """One node's current or last life."""

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
    repute: Repute = Repute()
    """What its machine was known for when it joined."""
    admitted: bool = False
    """Whether it may take part whatever it is known for, as there is nobody else."""

    @property
    def machine(self) -> str:
        """The name by which its machine is known across jobs."""
        return self.info.machine or self.info.host

    @property
    def is_last_resort(self) -> bool:
        """Whether it is here, and only taken if the job could not start or go on without it."""
        return self.repute.grade in LAST_RESORT and not self.admitted

    @property
    def alive(self) -> bool:
        """Not declared gone."""
        return isinstance(self.standing, Present | Draining)

    @property
    def eligible(self) -> bool:
        """May take part in the next view."""
        is_fit = isinstance(self.health, Unchecked | Fit | Slow)
        return self.is_here and is_fit and not self.is_last_resort

    @property
    def is_here(self) -> bool:
        """Present and connected, whatever its health."""
        return isinstance(self.standing, Present) and isinstance(self.link, Linked)

    @property
    def doubtful(self) -> bool:
        """Present, but its connection is broken and the verdict is still out."""
        return isinstance(self.standing, Present) and isinstance(self.link, Unlinked)


class Gathering(msgspec.Struct, frozen=True, tag="gathering"):
    """No view is in force: waiting for nodes."""

    since: float
    deadline: float
    why: str


class Serving(msgspec.Struct, frozen=True, tag="serving"):
    """`Job.view` is in force."""


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
    """As far as is known, from failures' own times and nodes' last signs of life."""
    detected_at: float
    decided_view: int = 0
    decided_at: float = 0.0
    strategy: Strategy | None = None
    why: str = ""
    rebuilt_at: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    failures_dropped: int = 0
    tries: dict[Strategy, int] = field(default_factory=dict)
    """How often each strategy was chosen."""
    answered: set[tuple[Strategy, str]] = field(default_factory=set)
    """Which failures (troubles.marks) it was chosen for: one that comes back is not answered by the same rung again."""


@dataclass
class Job:
    """Everything the master knows."""

    job_id: str = ""
    settings: Settings = field(default_factory=Settings)
    asked: Settings = field(default_factory=Settings)
    """As it was created: what agents were started with, whatever it was resized to since."""
    created_at: float = 0.0
    term: int = 0
    phase: Phase = Gathering(since=0.0, deadline=0.0, why="the job has not been created")
    nodes: dict[str, Node] = field(default_factory=dict)
    joins: int = 0
    """How many joins there have been: the next node's place in the order."""
    view: View | None = None
    """The view in force, or while gathering the last one, whose ranks are kept where possible."""
    members: dict[str, Member] = field(default_factory=dict)
    """Its members by node."""
    formed_at: float = 0.0
    """When it was formed."""
    released: dict[str, str] = field(default_factory=dict)
    """Lives (by node) that the view in force left out by plan: their workers leave at the step boundary."""
    restarts_used: int = 0
    started: set[str] = field(default_factory=set)
    """Nodes whose workers all run in the current view."""
    done: set[tuple[str, int]] = field(default_factory=set)
    """Workers (node, local rank) of the current view that succeeded."""
    failed: dict[tuple[str, int], Failure] = field(default_factory=dict)
    """Workers of the current view that failed, but for those of nodes on their way out."""
    held: dict[tuple[str, int], Stumble] = field(default_factory=dict)
    """Workers of the current view whose step failed; they live, and wait for a view."""
    stuck: dict[str, WorkersStuck] = field(default_factory=dict)
    """Nodes of the current view on which nothing moves."""
    failing_since: float = 0.0
    """When the first of the current view's failures, failed steps and stalls was recorded."""
    session: SessionInfo | None = None
    """What kind of state the workers have, as last said; None while, or if, they do not speak to Holdfast."""
    settled: set[str] = field(default_factory=set)
    """Nodes whose workers are all in the current view, with state."""
    settled_at: float = 0.0
    """When the last of them was; 0 while one is missing."""
    is_closed: bool = False
    """Whether the workers of this view have made all their steps."""
    proved: int = -1
    """The first step committed in the current view; -1 before."""
    layout: Layout | None = None
    """How the state of those who settled in the current view is cut."""
    crew: dict[str, Seats] = field(default_factory=dict)
    """By node of the current view: what its living workers hold, also from views before."""
    crew_before: dict[str, Seats] = field(default_factory=dict)
    """The same of the view before, for news of it that come late."""
    ledger: Ledger = field(default_factory=Ledger)
    """Which samples the committed steps were made of."""
    placement: Placement = NOWHERE
    """Which nodes of the view keep whose snapshots. Follows from the views there were, so no record tells it."""
    parity: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The same where they are kept as parity: the group of each."""
    streams: Streams = field(default_factory=Streams)
    """Which shards were leased, and which could not be read."""
    images: dict[str, tuple[KeptImage, ...]] = field(default_factory=dict)
    """By node that is alive: what of the state is in its memory."""
    pacings: dict[str, Pacing] = field(default_factory=dict)
    """By node: how its snapshots are made."""
    checkpoint: int = -1
    """The step of the newest checkpoint of this job."""
    checkpoint_url: str = ""
    reloaded: int = -1
    """The step in memory that all workers last started from without using up a restart."""
    safety: Safety = Safety()
    """As last written down."""
    safety_at: float = 0.0
    pacing: Pacing = Pacing()
    """Of all nodes, written down with it."""
    noted: list[Noted] = field(default_factory=list)
    """The last failures, in short."""
    paces: dict[tuple[str, int], float] = field(default_factory=dict)
    """Workers' own time in a step, as last reported in this view."""
    pace_norm: tuple[float, float, float] = (0.0, 0.0, 1.0)
    """When it was last looked, what ranks take, and how much they differ; where there are many."""
    slow: dict[tuple[str, int], int] = field(default_factory=dict)
    """In how many reports in a row each was slower than the others."""
    stragglers: dict[tuple[str, int], float] = field(default_factory=dict)
    """Those of this view that are known, each with its pace as a share of the usual one."""
    formed_times: list[float] = field(default_factory=list)
    """When the last views were formed."""
    cordons: list[NodeCordoned] = field(default_factory=list)
    """Nodes that were sent away for a fault."""
    cleared: set[str] = field(default_factory=set)
    """Those of them that were not to blame after all."""
    checkup: Checkup | None = None
    """The check of nodes under way. It is not journaled, only what came of it."""
    checkups: int = 0
    """How many this term has begun."""
    checked: NodesChecked | None = None
    """The last check that is over."""
    norms: dict[Stage, Norm] = field(default_factory=dict)
    """What the stages of checks take on the nodes of this job."""
    incident: Incident | None = None
    incidents: list[IncidentClosed] = field(default_factory=list)
    incidents_opened: int = 0
    faults: int = 0
    """How many of them were not by request."""
    node_s: float = 0.0
    """How long nodes were in views before the one in force, all together."""
    faults_per_node_day: float = FAULTS_PER_NODE_DAY
    """As far as it was known when the view in force was formed."""

    @property
    def is_through(self) -> bool:
        """Whether all workers have succeeded; or all that ever had a part in it, in a change by plan for which
        newcomers came too late: the others had made their last step, and nobody will meet them."""
        assert self.view is not None
        if len(self.done) == self.view.world_size:
            return True
        if not self.done or not (self.view.kept and self.view.planned) or self.proved >= 0:
            return False
        left = [(m.node_id, i) for m in self.view.members for i in range(m.workers) if (m.node_id, i) not in self.done]
        return not any(i < len(seats := self.crew.get(node_id, ())) and seats[i] is not None for node_id, i in left)

    @property
    def stall(self) -> dict[str, WorkersStuck]:
        """The reports of a stall, once every member with workers left has sent one and they are of the same time. A
        node whose workers are busy sends none: then the others wait for it, and nothing is wrong."""
        newest_at = max((report.at for report in self.stuck.values()), default=0.0)
        together = {n: s for n, s in self.stuck.items() if s.at >= newest_at - self.settings.stall_window_s}
        at_work = {
            m.node_id for m in self.members.values() if any((m.node_id, i) not in self.done for i in range(m.workers))
        }
        if not any(not vector.joining for report in together.values() for vector in report.vectors):
            return {}
        return together if at_work <= {*together, *(n for n, _ in self.held)} else {}

    @property
    def able(self) -> list[Node]:
        """Nodes that the job can count on: those that may take part in the next view, and members that are suspected
        (health/suspects.py), which work on and may take part once they have passed their check."""
        return [node for node in self.nodes.values() if node.eligible or self.is_suspect(node)]

    def is_suspect(self, node: Node) -> bool:
        """Whether this life of the node has a place in the view, and is to be checked before it has one in a view in
        which all workers start anew."""
        member = self.members.get(node.node_id)
        is_at_work = member is not None and member.incarnation == node.incarnation
        return is_at_work and node.is_here and isinstance(node.health, Awaited)

    def live(self, node_id: str, incarnation: str) -> Node | None:
        """The node, if this life of it is the current one and not over."""
        node = self.nodes.get(node_id)
        return node if node and node.incarnation == incarnation and node.alive else None
