"""What happened: the core's input. Each names the node's incarnation, so that those of a former one are ignored."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from holdfast.core.durability import ImageReport, SnapshotStats
from holdfast.core.faults.failures import Failure
from holdfast.core.health.findings import CheckResult
from holdfast.core.health.reputation import Reputation
from holdfast.core.shard_leases import Lease, ShardProblem
from holdfast.core.shard_map import ALL_OF_IT, ShardMap


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
    machine: str = ""
    """The name by which the machine is known across jobs; empty: its host's."""
    log_dir: str = ""
    """Where its workers' output is kept: <log_dir>/attempt_<view - 1>/<local rank>/."""
    domain: str = ""
    """What it would go down with (a rack, a power supply); empty: its machine."""
    bulk_port: int = 0
    """Where it takes in other nodes' snapshots; 0: it takes none."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent was told about the job. It must agree with what the master was told."""

    run_id: str
    """Empty if the user gave none."""
    nodes_min: int
    nodes_max: int
    restarts_max: int


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What kind of state the workers have, from those that speak to Holdfast."""

    shard_map: ShardMap = ALL_OF_IT
    """Which shard of it each rank has."""
    replicas: int = 0
    """Copies in the memory of other ranks, of each shard that would be lost with one node."""
    resizable: bool = True
    """Whether the workers can go on in a world of another size."""
    per_rank: bool = False
    """Whether each rank has state of its own, beside what all ranks with the same shard have alike."""
    local_replicas: int = 0
    """Copies of each rank's own state in the memory of other ranks."""
    why_fixed: str = ""
    """Why the workers cannot go on in a world of another size, where that is not plain from how their state is cut."""
    world_multiple: int = 1
    """Of which number the size of another world must be a multiple: that of the ranks of one whole replica."""
    world_size: int = 0
    """The size of the world that the map is of; 0: not said."""

    def map_in(self, world_size: int) -> ShardMap | None:
        """Return the map, if it is one of a world of this size; else None: the ranks there have yet to say theirs."""
        return self.shard_map if self.world_size in (0, world_size) and self.shard_map.fits(world_size) else None

    @property
    def shards(self) -> int:
        """Into how many different shards the state is cut."""
        return self.shard_map.shards


def combined(sessions: Iterable[SessionInfo]) -> SessionInfo:
    """Return what several workers say together, the newest last: some of them may not know yet that state differs
    between ranks."""
    said = list(sessions)
    copies = [session.local_replicas for session in said if session.per_rank]
    return SessionInfo(
        shard_map=max((session.shard_map for session in said), key=lambda shard_map: shard_map.shards),
        replicas=max(session.replicas for session in said),
        resizable=all(session.resizable for session in said),
        per_rank=bool(copies),
        local_replicas=min(copies, default=0),
        why_fixed=next((session.why_fixed for session in reversed(said) if session.why_fixed), ""),
        world_multiple=max(session.world_multiple for session in said),
        world_size=said[-1].world_size,
    )


class StepError(msgspec.Struct, frozen=True, kw_only=True):
    """A step that failed in a worker that is well, and waits for a view."""

    rank: int
    local_rank: int
    step: int
    at: float
    exception: str
    message: str
    traceback: str
    collateral: bool
    """Whether it is what a healthy rank suffers when another one goes; else an error of its own that may be retried."""


class WorkerProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a worker has come, when nothing moves any more. See assess.py for who is suspected."""

    rank: int
    local_rank: int
    step: int
    phase: int
    collectives: int
    waiting: bool
    """Whether it waits for other ranks or for a view, in a call that says so on the worker's progress page."""
    joining: bool = False
    """Whether it is between two views: it waits for one, or joins one, or gets or sends state."""
    asleep: bool = False
    """Whether it sleeps (`time.sleep`), has not run since, and nothing else of its processes runs: proof enough that it
    will not come, if all others wait."""
    view: int = 0
    """The newest view that it has tried to join."""
    stack: str = ""
    log_file: str = ""
    log_tail: tuple[str, ...] = ()
    """The last that it wrote there."""


class DataSource(msgspec.Struct, frozen=True, kw_only=True):
    """What the order of a loader's samples follows from: enough to compute the samples of any step."""

    name: str
    size: int
    seed: str
    """As text: it may be any whole number."""
    global_batch_size: int
    slots: int
    shuffle: bool
    last_batch: str
    locality: tuple[int, ...]
    fingerprint: str


class SessionPart(msgspec.Struct, frozen=True, array_like=True):
    """What some ranks of a view were handed in one step of one source. See core/sample_audit.py."""

    source: int
    view: int
    world_size: int
    ranks: tuple[int, ...]
    step: int
    count: int
    """-1: it is lost what it was."""
    total: bytes
    committed: bool
    """Whether these ranks know that the step was committed; else they died before they could."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """An agent's first words on a connection, the first or a later one."""

    node_id: str
    incarnation: str
    info: NodeInfo
    spec: JobSpec
    store_port: int
    """A port this node already listens on, for the store of the next view it may host; 0 if none."""
    term: int = 0
    """The highest master term it has seen."""
    dead_incarnations: tuple[str, ...] = ()
    """Incarnations it has seen to be dead with its own eyes: their process is gone from this machine."""
    leaving: int = 0
    """The signal by which it was told to go before it could join; 0 if it means to stay."""
    parked: int = 0
    """Spares that wait here, ready to take a rank."""
    reputation: Reputation = Reputation()
    """What the machine is known for. The master looks it up; what an agent says of itself does not count."""


class LinkBroke(msgspec.Struct, frozen=True, kw_only=True, tag="link-broke"):
    """The connection to a node ended without a goodbye."""

    node_id: str
    incarnation: str


class NodeSilent(msgspec.Struct, frozen=True, kw_only=True, tag="node-silent"):
    """A node has not been heard for longer than the silence timeout. The master that says so ends its connection as
    well: should it live after all, it says hello again and is told to rejoin."""

    node_id: str
    incarnation: str
    silent_s: float


class WorkersStarted(msgspec.Struct, frozen=True, kw_only=True, tag="workers-started"):
    """All of a node's workers of a view are running."""

    node_id: str
    incarnation: str
    view: int
    pids: tuple[int, ...]
    logs: tuple[str, ...] = ()
    """The directory of each one's output, within the node's: a worker that is kept stays with the one it began with.
    Empty: as after a restart of all workers, `attempt_<view - 1>/<local rank>`."""


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


class NodeLeft(msgspec.Struct, frozen=True, kw_only=True, tag="node-left"):
    """A node's goodbye: its workers are stopped, its agent ends."""

    node_id: str
    incarnation: str


class ViewJoined(msgspec.Struct, frozen=True, kw_only=True, tag="view-joined"):
    """All of a node's workers are in the view, with the state of the settled step: from now on it can be repaired."""

    node_id: str
    incarnation: str
    view: int
    session: SessionInfo
    step: int = -1
    """The next step to run."""
    source: str = ""
    """Where the state comes from that all ranks start with: a checkpoint, or the nodes' memory; empty: from nowhere, or
    from ranks that train."""


class SessionRevised(msgspec.Struct, frozen=True, kw_only=True, tag="session-revised"):
    """The workers' state is of another kind than they said when the view began: found out at a commit."""

    node_id: str
    incarnation: str
    view: int
    session: SessionInfo


class StepInterrupted(msgspec.Struct, frozen=True, kw_only=True, tag="step-interrupted"):
    """A worker's step failed; it lives and waits for a view."""

    node_id: str
    incarnation: str
    view: int
    step_error: StepError


class WorkerFailing(msgspec.Struct, frozen=True, kw_only=True, tag="worker-failing"):
    """A worker's script has failed; its process is about to end, and its end will say how."""

    node_id: str
    incarnation: str
    view: int
    local_rank: int
    exception: str = ""
    """The type of the exception that it failed with; empty: not known."""
    message: str = ""


class WorkersStalled(msgspec.Struct, frozen=True, kw_only=True, tag="workers-stalled"):
    """Nothing has moved on a node for longer than steps take."""

    node_id: str
    incarnation: str
    view: int
    stalled_s: float
    worker_progress: tuple[WorkerProgress, ...]
    is_overdue: bool = True
    """Whether it has lasted for longer than anything may. Otherwise it is only proved who sleeps, which is a stall if
    other ranks wait for it."""


class PeerLinksProbed(msgspec.Struct, frozen=True, kw_only=True, tag="peer-links-probed"):
    """Which of its neighbours a node cannot reach; it was asked."""

    node_id: str
    incarnation: str
    view: int
    unreachable: tuple[str, ...]


class PeerLinkSlowed(msgspec.Struct, frozen=True, kw_only=True, tag="peer-link-slowed"):
    """A small transfer to a neighbour takes many times as long as to others, again and again."""

    node_id: str
    incarnation: str
    view: int
    peer: str
    taken_s: float
    usual_s: float


class WorkersWaiting(msgspec.Struct, frozen=True, kw_only=True, tag="workers-waiting"):
    """All of a node's workers have waited for other ranks for longer than a step takes: the one that hangs, if one
    does, is on another node."""

    node_id: str
    incarnation: str
    view: int
    waiting_s: float


class WorkersMoved(msgspec.Struct, frozen=True, kw_only=True, tag="workers-moved"):
    """Something moves again on a node that has reported a stall, or that its workers wait."""

    node_id: str
    incarnation: str
    view: int


class TrainingClosed(msgspec.Struct, frozen=True, kw_only=True, tag="training-closed"):
    """A worker has left the loop of its steps, and so have all: what follows is not repaired."""

    node_id: str
    incarnation: str
    view: int
    step: int
    """As many were committed."""


class StepCommitted(msgspec.Struct, frozen=True, kw_only=True, tag="step-committed"):
    """The first step that one of a node's workers committed in a view."""

    node_id: str
    incarnation: str
    view: int
    step: int


class SparesChanged(msgspec.Struct, frozen=True, kw_only=True, tag="spares-changed"):
    """How many spares of a node are parked and ready."""

    node_id: str
    incarnation: str
    parked: int


class ImagesReported(msgspec.Struct, frozen=True, kw_only=True, tag="images-reported"):
    """The images of states in a node's memory."""

    node_id: str
    incarnation: str
    images: tuple[ImageReport, ...]
    snapshot_stats: SnapshotStats = SnapshotStats()


class CheckpointPublished(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint-published"):
    """A checkpoint of the state before this step is complete."""

    node_id: str
    incarnation: str
    step: int
    url: str


class DataAnnounced(msgspec.Struct, frozen=True, kw_only=True, tag="data-announced"):
    """The loaders that the workers of a view track, in order."""

    node_id: str
    incarnation: str
    view: int
    sources: tuple[DataSource, ...]


class SamplesReported(msgspec.Struct, frozen=True, kw_only=True, tag="samples-reported"):
    """What workers of a node were handed, in the order of steps."""

    node_id: str
    incarnation: str
    parts: tuple[SessionPart, ...]


class DataSkipped(msgspec.Struct, frozen=True, kw_only=True, tag="data-skipped"):
    """A loader will pass over these steps."""

    node_id: str
    incarnation: str
    view: int
    source: int
    name: str
    first_step: int
    end_step: int
    why: str


class StreamReported(msgspec.Struct, frozen=True, kw_only=True, tag="stream-reported"):
    """What the commit of a step granted to slots of a worker, and what failed in them. Reported again in each view."""

    node_id: str
    incarnation: str
    view: int
    stream: str
    step: int
    leases: tuple[Lease, ...]
    problems: tuple[ShardProblem, ...]


class NumbersReported(msgspec.Struct, frozen=True, kw_only=True, tag="numbers-reported"):
    """A worker's step had odd numbers."""

    node_id: str
    incarnation: str
    view: int
    rank: int
    step: int
    what: str
    outcome: str


class CountersRead(msgspec.Struct, frozen=True, kw_only=True, tag="counters-read"):
    """What is wrong with a node by its devices' counters, after something failed on it in the view."""

    node_id: str
    incarnation: str
    view: int
    readings: tuple[str, ...]


class StepTime(msgspec.Struct, frozen=True):
    """A worker's own time in a step, without what it waits for others: the median over its last steps."""

    local_rank: int
    own_s: float
    steps: int


class StepTimesReported(msgspec.Struct, frozen=True, kw_only=True, tag="step-times-reported"):
    """How fast a node's workers are."""

    node_id: str
    incarnation: str
    view: int
    step_times: tuple[StepTime, ...]


class RetryCount(msgspec.Struct, frozen=True):
    """How many collectives a worker has run again since the last report."""

    local_rank: int
    count: int


class CollectivesRetried(msgspec.Struct, frozen=True, kw_only=True, tag="collectives-retried"):
    """Connections between workers broke, and collectives were run again below the step."""

    node_id: str
    incarnation: str
    view: int
    retries: tuple[RetryCount, ...]


class NodeChecked(msgspec.Struct, frozen=True, kw_only=True, tag="node-checked"):
    """What came of a task of a check."""

    node_id: str
    incarnation: str
    checkup: str
    round: int
    result: CheckResult


class DrainRequested(msgspec.Struct, frozen=True, kw_only=True, tag="drain-requested"):
    """A person wants a node to leave at a step boundary."""

    node_id: str
    why: str


class ResizeRequested(msgspec.Struct, frozen=True, kw_only=True, tag="resize-requested"):
    """A person wants another number of nodes."""

    nodes: int
    why: str


Event = (
    Hello
    | ViewJoined
    | SessionRevised
    | StepInterrupted
    | WorkerFailing
    | PeerLinksProbed
    | PeerLinkSlowed
    | WorkersStalled
    | WorkersWaiting
    | WorkersMoved
    | StepCommitted
    | TrainingClosed
    | SparesChanged
    | ImagesReported
    | CheckpointPublished
    | DataAnnounced
    | SamplesReported
    | DataSkipped
    | StreamReported
    | NumbersReported
    | CountersRead
    | StepTimesReported
    | CollectivesRetried
    | NodeChecked
    | DrainRequested
    | ResizeRequested
    | LinkBroke
    | NodeSilent
    | WorkersStarted
    | WorkerSucceeded
    | WorkerFailed
    | StoreOffered
    | NodeLeaving
    | NodeLeft
)
