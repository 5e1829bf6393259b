"""The job as data. Only evolve.py changes it."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from holdfast.core.events import NodeInfo
from holdfast.core.faults import Failure
from holdfast.core.records import IncidentClosed, IncidentKind, JobFinished, Strategy
from holdfast.core.settings import Settings
from holdfast.core.views import Member, View

GONE_NODES_MAX = 1_000
"""Ended lives that are remembered, for the guard of their ids and for `holdfast status`."""
INCIDENTS_KEPT_MAX = 1_000
FAILURES_PER_INCIDENT_MAX = 64


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

    @property
    def alive(self) -> bool:
        """Not declared gone."""
        return isinstance(self.standing, Present | Draining)

    @property
    def eligible(self) -> bool:
        """May take part in the next view."""
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


@dataclass
class Job:
    """Everything the master knows."""

    job_id: str = ""
    settings: Settings = field(default_factory=Settings)
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
    restarts_used: int = 0
    started: set[str] = field(default_factory=set)
    """Nodes whose workers all run in the current view."""
    done: set[tuple[str, int]] = field(default_factory=set)
    """Workers (node, local rank) of the current view that succeeded."""
    failed: dict[tuple[str, int], Failure] = field(default_factory=dict)
    """Workers of the current view that failed, but for those of nodes on their way out."""
    failing_since: float = 0.0
    """When the first of them was recorded."""
    incident: Incident | None = None
    incidents: list[IncidentClosed] = field(default_factory=list)
    incidents_opened: int = 0

    def live(self, node_id: str, incarnation: str) -> Node | None:
        """The node, if this life of it is the current one and not over."""
        node = self.nodes.get(node_id)
        return node if node and node.incarnation == incarnation and node.alive else None
