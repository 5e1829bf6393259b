"""What a worker and its agent say to one another, in frames (wire/launch_messages.py) on the agent's unix socket.

The worker speaks from a thread of its own, so that it hears a new view while its main thread hangs in a collective.

    worker → agent     Enrol, WorkerReady, SessionRevised…, ViewJoined…, StepCommitted…, StepInterrupted…,
                       WorkerFailing…, TrainingClosed…, WorkerReleased, DataSkipped…, StreamReported…,
                       NumbersReported…, Stacks…, AllocateBuffers, SnapshotSealed, ListImages
    agent → worker     Welcome, Prepare, Assign, Revoke, Release, ShowStacks, BuffersReady, CheckpointNotice, ImageList

Where a name ends with …, the class has Message behind it. The messages of one worker, in order:

    Enrol → Welcome(assignment)  it belongs to a view: the script builds its model under that rank
          → Welcome(spare)       it runs on, without a rank, to the first thing that depends on one (parking.py);
                                 Prepare says what to import on the way
    WorkerReady                  it is at its first step (a spare: parked)
    Assign                       a new view: whatever it does, it leaves the old one and joins this one
    ViewJoined…                  it is in the view: its group is made, its state is that of the settled step
    StepCommitted…               the first step that it committed in the view
    StepInterrupted…             its step failed, its process lives and waits for a view
    WorkerFailing…               its script has failed: the process ends by itself, which takes a while
"""

from __future__ import annotations

import msgspec

from holdfast.core.events import DataSource, SessionInfo
from holdfast.core.image_info import ImageInfo
from holdfast.core.shard_leases import Lease, ShardProblem
from holdfast.core.shard_map import ShardMap
from holdfast.core.snapshot_interval import FAULTS_PER_NODE_DAY


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told of its part in a view."""

    view: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_rank: int
    group_world_size: int
    device: int | None = None
    """The number of its device on the node, which stays the same as long as the process lives; None: the local rank."""
    visible_devices: str = ""
    """With --virtual-local-rank: the one device that the process sees, as CUDA_VISIBLE_DEVICES names it."""
    numa_binding: str = ""
    """How a spare is bound to processors, once it is known which device it has; others are bound when they start."""
    role_rank: int = 0
    role_world_size: int = 1
    store_host: str
    store_port: int
    first_ranks: tuple[int, ...]
    """The first rank of each node, in the order of group ranks: who shares a machine with whom."""
    strategy: str
    """The strategy that led to the view; empty for a first one or a planned change."""
    planned: bool = False
    """Nothing is wrong: change at the next step boundary."""
    newcomer: bool = False
    """The others train already: build everything under this rank, with a make-believe group, then join them."""
    applied_step: int = -1
    """The highest step that a dead worker of this node is known to have begun to apply."""
    complete_version: int = -1
    """The last snapshot that a worker of this node, dead or alive, knew to be complete on all ranks, as a packed
    version (core/image_info.py); -1: there is none, or all workers start again."""
    is_last_holder: bool = False
    """Whether no other worker of the job is left that has the state: it is to be in the agent's memory before newcomers
    are waited for. Known where one node has all ranks."""
    dump: str = ""
    """Where to write a checkpoint of the last committed step, and end; empty: train on."""
    weights: tuple[float, ...] = ()
    """Of all ranks' shares of the global batch; empty: all alike."""
    run: str = ""
    """Which run of the job this is (`Serve.run`)."""
    faults_per_node_day: float = FAULTS_PER_NODE_DAY
    """Of this job, as far as it is known."""
    shard_map: ShardMap | None = None
    """To a newcomer: which shard of the state each rank has."""

    @property
    def device_index(self) -> int:
        """The number of its device as the process sees it, which the script finds in LOCAL_RANK."""
        if self.visible_devices:
            return 0
        return self.local_rank if self.device is None else self.device


class Enrol(msgspec.Struct, frozen=True, tag="enrol"):
    """A script called hf.init(). `worker` is HOLDFAST_WORKER, which differs between two workers that had the same local
    rank."""

    worker: str
    pid: int
    repairs: bool = True
    """Whether it has a session. Otherwise it only has its state kept: to its agent it is a program like any other."""


class ScriptFailed(msgspec.Struct, frozen=True, tag="script-failed"):
    """The only message of a worker without a session, on a connection of its own: its script has ended with an error.
    What it was is in the error file; the interpreter still has to come down."""

    worker: str
    pid: int


class WorkerReady(msgspec.Struct, frozen=True, tag="worker-ready"):
    """At the first step. What kind of state it has is known now."""

    session: SessionInfo
    data: tuple[DataSource, ...] = ()
    """The loaders it tracks."""
    answers: bytes = b""
    """What its collectives answered while it was built, for a later worker of its rank
    (worker/collectives/recorded_answers.py);
    empty: there were none."""


class SessionRevisedMessage(msgspec.Struct, frozen=True, tag="session-revised"):
    """Its state is of another kind than it said: found out at a commit, or from the others of a view."""

    session: SessionInfo


class ViewJoinedMessage(msgspec.Struct, frozen=True, tag="view-joined"):
    view: int
    step: int
    """The next one to run."""
    source: str = ""
    """Where the state comes from that all ranks start with: a checkpoint, or the nodes' memory; empty: from nowhere, or
    from ranks that train."""


class StepCommittedMessage(msgspec.Struct, frozen=True, tag="step-committed"):
    """The first step committed in a view; later ones are in the progress record only."""

    view: int
    step: int


class StepInterruptedMessage(msgspec.Struct, frozen=True, kw_only=True, tag="step-interrupted"):
    """A step failed in this view; the process is well and holds."""

    view: int
    step: int
    at: float
    exception: str
    message: str
    traceback: str
    collateral: bool
    """Whether it is what a healthy rank suffers when another one goes."""


class WorkerFailingMessage(msgspec.Struct, frozen=True, tag="worker-failing"):
    """The script has ended with an error. What it was is in the error file; the interpreter still has to come down."""

    view: int


class TrainingClosedMessage(msgspec.Struct, frozen=True, tag="training-closed"):
    """It has made its last step, and so have all: from now on it is a program like any other."""

    view: int
    step: int


class WorkerReleased(msgspec.Struct, frozen=True, tag="worker-released"):
    """It has left the view at a step boundary, as asked, and is about to exit with code zero."""

    view: int
    step: int


class DataSkippedMessage(msgspec.Struct, frozen=True, tag="data-skipped"):
    """A loader, the source-th that is tracked, will pass over these steps."""

    source: int
    name: str
    first_step: int
    end_step: int
    why: str


class StreamReportedMessage(msgspec.Struct, frozen=True, kw_only=True, tag="stream-reported"):
    """What the commit of a step has granted to slots of this worker's stream, and what failed in them."""

    view: int
    stream: str
    step: int
    leases: tuple[Lease, ...]
    problems: tuple[ShardProblem, ...]


class NumbersReportedMessage(msgspec.Struct, frozen=True, kw_only=True, tag="numbers-reported"):
    """Odd numbers in a step, and what became of it: repeated, passed (as they were fine the second time), skipped,
    kept, stopped."""

    step: int
    what: str
    outcome: str


class StacksMessage(msgspec.Struct, frozen=True, tag="stacks"):
    request: int
    text: str


class AllocateBuffers(msgspec.Struct, frozen=True, tag="allocate-buffers"):
    """The worker needs two buffers for images of this size; see snapshots/slot_file.py."""

    size_bytes: int
    staging_bytes: int = 0
    """What it will allocate itself, to get there from a device."""


class SnapshotSealed(msgspec.Struct, frozen=True, tag="snapshot-sealed"):
    """A slot of this worker holds a complete image of the state before this step."""

    step: int
    wanted: bool
    """Whether it is to become a checkpoint; only then the rest is said."""
    metrics: dict[str, float] = {}
    notes: dict[str, str] = {}
    url: str = ""
    """Where to; empty: where the job's checkpoints are. Of one that says so, it wants to know what comes of it."""
    keep: str = ""
    """Which checkpoints stay there; empty: as the job's do."""
    created_ns: int = 0
    """Of the image, as its record says: a step may be copied twice. 0: any of that step."""


class ListImages(msgspec.Struct, frozen=True, tag="list-images"):
    """Which images are in this node's memory?"""

    request: int


class SnapshotSettings(msgspec.Struct, frozen=True, kw_only=True):
    """When a worker is to copy its state for its agent to keep."""

    every: int = 0
    """Steps; 0: as often as it costs next to nothing; -1: never."""
    checkpoint_every_steps: int = 0
    checkpoint_every_s: float = 0.0
    """How often one of them becomes a checkpoint; 0: never."""
    checkpoint_at_end: bool = False


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The answer to Enrol. Without a place, it is a spare."""

    assignment: Assignment | None
    replicas: int
    """In-memory copies of each shard that other ranks are to hold."""
    are_replicas_default: bool = False
    """Whether the user has not said how many: on a device there are none then (core/memory_plan.py)."""
    checkpoint_dir: str
    snapshots: SnapshotSettings = SnapshotSettings(every=-1)
    answers: bytes = b""
    """To a newcomer: what the collectives of its rank answered when the job started."""


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """To a spare: what the job's state is like, and how large the world is."""

    shard_map: ShardMap
    world_size: int


class Assign(msgspec.Struct, frozen=True, tag="assign"):
    assignment: Assignment
    answers: bytes = b""
    """As in Welcome, for a spare."""


class Revoke(msgspec.Struct, frozen=True, tag="revoke"):
    """This view is over; the next one is not known yet. Leave its collectives and hold."""

    view: int
    why: str


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The next view has no place for this worker: leave at the step boundary before it, and exit well."""

    view: int
    """The view that begins without it."""


class ShowStacks(msgspec.Struct, frozen=True, tag="show-stacks"):
    request: int


class BuffersReady(msgspec.Struct, frozen=True, kw_only=True, tag="buffers-ready"):
    """Where the worker's buffers are, or why there are none."""

    directory: str
    size_bytes: int
    why: str = ""


class StoredImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image in this node's memory."""

    path: str
    info: ImageInfo
    is_replica: bool = False
    """Whether it is held for another node."""


class CheckpointNotice(msgspec.Struct, frozen=True, tag="checkpoint-notice"):
    """What came of a state that was to become a checkpoint."""

    step: int
    why: str
    """Why it did not; empty if it did."""
    created_ns: int = 0
    """Which image of the step it is about, as `SnapshotSealed` said."""


class ImageList(msgspec.Struct, frozen=True, tag="image-list"):
    request: int
    images: tuple[StoredImage, ...]


FromWorker = (
    Enrol
    | ScriptFailed
    | WorkerReady
    | SessionRevisedMessage
    | ViewJoinedMessage
    | StepCommittedMessage
    | StepInterruptedMessage
    | WorkerFailingMessage
    | TrainingClosedMessage
    | WorkerReleased
    | DataSkippedMessage
    | StreamReportedMessage
    | NumbersReportedMessage
    | StacksMessage
    | AllocateBuffers
    | SnapshotSealed
    | ListImages
)
ToWorker = Welcome | Prepare | Assign | Revoke | Release | ShowStacks | BuffersReady | ImageList | CheckpointNotice
