"""What happened: the core's input. Each names the node's incarnation, so that a dead life is not heard."""

from __future__ import annotations

import msgspec

from holdfast.core.faults import Failure


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says of itself when it joins."""

    host: str
    address: str
    """Where other nodes reach it; the rendezvous store of a view it hosts listens there."""
    machine_id: str
    boot_id: str
    pid: int
    workers: int
    role: str = "default"
    requested_rank: int | None = None
    log_dir: str = ""
    """Where its workers' output is kept: <log_dir>/attempt_<view - 1>/<local rank>/."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent was told about the job. It must agree with what the master was told."""

    run_id: str
    """Empty if the user gave none."""
    nodes_min: int
    nodes_max: int
    restarts_max: int


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """An agent's first words on a connection, the first or a later one."""

    node_id: str
    incarnation: str
    info: NodeInfo
    spec: JobSpec
    store_port: int
    """A port this node already listens on, for the store of the next view it may host; 0 if none."""
    serving: int = 0
    """The view whose workers it runs; 0 if none."""
    term: int = 0
    """The highest master term it has seen."""
    dead_lives: tuple[str, ...] = ()
    """Incarnations it has seen to be dead with its own eyes: their process is gone from this machine."""
    leaving: int = 0
    """The signal by which it was told to go before it could join; 0 if it means to stay."""


class LinkBroke(msgspec.Struct, frozen=True, kw_only=True, tag="link-broke"):
    """The connection to a node ended without a goodbye."""

    node_id: str
    incarnation: str


class NodeSilent(msgspec.Struct, frozen=True, kw_only=True, tag="node-silent"):
    """A node has not been heard for longer than the silence timeout. Whoever says so ends its connection as well:
    should it live after all, it says hello again and is told to rejoin."""

    node_id: str
    incarnation: str
    silent_s: float


class WorkersStarted(msgspec.Struct, frozen=True, kw_only=True, tag="workers-started"):
    """All of a node's workers of a view are running."""

    node_id: str
    incarnation: str
    view: int
    pids: tuple[int, ...]


class WorkerSucceeded(msgspec.Struct, frozen=True, kw_only=True, tag="worker-succeeded"):
    """A worker ended with exit code zero."""

    node_id: str
    incarnation: str
    view: int
    local_rank: int


class WorkerFailed(msgspec.Struct, frozen=True, kw_only=True, tag="worker-failed"):
    """A worker ended otherwise, or could not be started."""

    node_id: str
    incarnation: str
    view: int
    failure: Failure


class StoreOffered(msgspec.Struct, frozen=True, kw_only=True, tag="store-offered"):
    """A node listens on a fresh port for the store of a later view."""

    node_id: str
    incarnation: str
    port: int


class NodeLeaving(msgspec.Struct, frozen=True, kw_only=True, tag="node-leaving"):
    """A node was told to go (a preemption notice, Ctrl-C) and is stopping its workers."""

    node_id: str
    incarnation: str
    signal: int
    why: str


class NodeGone(msgspec.Struct, frozen=True, kw_only=True, tag="node-gone"):
    """A node's goodbye: its workers are stopped, its agent ends."""

    node_id: str
    incarnation: str


Event = (
    Hello
    | LinkBroke
    | NodeSilent
    | WorkersStarted
    | WorkerSucceeded
    | WorkerFailed
    | StoreOffered
    | NodeLeaving
    | NodeGone
)
