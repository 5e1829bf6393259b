"""What a worker and its agent say to one another, in frames (wire/local.py) on the agent's unix socket.

The worker speaks from a thread of its own, so that it hears a new view while its main thread hangs in a collective.

    worker → agent     Enrol, Ready, Joined, Committed, Interrupted, Released, Skipped, Shards, Numbers, Stacks,
                       NeedRoom, Sealed, AskHeld
    agent → worker     Welcome, Prepare, Assign, Revoke, Release, ShowStacks, Room, Held, Written

A worker's life in these words:

    Enrol → Welcome(place)       it belongs to a view: the script builds its model under that rank
          → Welcome(spare)       it waits; Prepare(sharded=False) sends it on to its first step, with a make-believe
                                 group, Prepare(sharded=True) keeps it where it is, since a shard depends on the rank
    Ready                        it is at its first step (a spare: parked)
    Assign                       a new view: whatever it does, it leaves the old one and joins this one
    Joined                       it is in the view: its group is made, its state is that of the settled step
    Committed                    the first step that it committed in the view
    Interrupted                  its step failed, it lives and waits for a view
"""

from __future__ import annotations

import msgspec

from holdfast.core.events import DataSource, SessionInfo
from holdfast.core.interval import FAULTS_PER_NODE_DAY
from holdfast.core.leases import Lease, Trouble


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's place in a view."""

    view: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_rank: int
    group_world_size: int
    store_host: str
    store_port: int
    first_ranks: tuple[int, ...]
    """The first rank of each node, in the order of group ranks: who shares a machine with whom."""
    strategy: str
    """By which the view came about; empty for a first one or a change that nobody needed."""
    planned: bool = False
    """Nothing is wrong: change at the next step boundary."""
    newcomer: bool = False
    """The others train already: build everything under this rank, with a make-believe group, then join them."""
    begun: int = -1
    """The highest step that a dead worker of this node is known to have begun to apply."""
    whole: int = -1
    """The last snapshot that a worker of this node, dead or alive, knew to be whole everywhere, as a word
    (`slots.Seat.whole_word`); -1: none, or all start anew."""
    dump: str = ""
    """Where to write a checkpoint of the last committed step, and end; empty: train on."""
    weights: tuple[float, ...] = ()
    """Of all ranks' shares of the global batch; empty: all alike."""
    run: str = ""
    """Which run of the job this is (`Serve.run`)."""
    faults_per_node_day: float = FAULTS_PER_NODE_DAY
    """Of this job, as far as it is known."""


class Enrol(msgspec.Struct, frozen=True, tag="enrol"):
    """A script called hf.init(). `worker` is HOLDFAST_WORKER, which tells two lives of a seat apart."""

    worker: str
    pid: int
    repairs: bool = True
    """Whether it has a session. Otherwise it only has its state kept: to its agent it is a program like any other."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """At the first step. What kind of state it has is known now."""

    session: SessionInfo
    data: tuple[DataSource, ...] = ()
    """The loaders it tracks."""


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    view: int
    step: int
    """The next one to run."""


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """The first step committed in a view; later ones are in the progress record only."""

    view: int
    step: int


class Interrupted(msgspec.Struct, frozen=True, kw_only=True, tag="interrupted"):
    """A step failed in this view; the process is well and holds."""

    view: int
    step: int
    at: float
    exception: str
    message: str
    traceback: str
    collateral: bool
    """Whether it is what a healthy rank suffers when another one goes."""


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """It has made its last step, and so have all: from now on it is a program like any other."""

    view: int
    step: int


class Released(msgspec.Struct, frozen=True, tag="released"):
    """It has left the view at a step boundary, as asked, and is about to exit with code zero."""

    view: int
    step: int


class Skipped(msgspec.Struct, frozen=True, tag="skipped"):
    """A loader, the source-th that is tracked, will pass over these steps."""

    source: int
    name: str
    first_step: int
    end_step: int
    why: str


class Shards(msgspec.Struct, frozen=True, kw_only=True, tag="shards"):
    """What the commit of a step has granted to slots of this worker's stream, and what failed in them."""

    view: int
    stream: str
    step: int
    leases: tuple[Lease, ...]
    troubles: tuple[Trouble, ...]


class Numbers(msgspec.Struct, frozen=True, kw_only=True, tag="numbers"):
    """Odd numbers in a step, and what became of it: repeated, passed (as they were fine the second time), skipped,
    kept, stopped."""

    step: int
    what: str
    outcome: str


class Stacks(msgspec.Struct, frozen=True, tag="stacks"):
    request: int
    text: str


class NeedRoom(msgspec.Struct, frozen=True, tag="need-room"):
    """Two images of this size are needed for this worker's seat; see slots.py."""

    size_bytes: int


class Sealed(msgspec.Struct, frozen=True, tag="sealed"):
    """A slot of this worker's seat holds a whole image of the state before this step."""

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


class AskHeld(msgspec.Struct, frozen=True, tag="ask-held"):
    """Which images are in this node's memory?"""

    request: int


class Snapshots(msgspec.Struct, frozen=True, kw_only=True):
    """When a worker is to copy its state for its agent to keep."""

    every: int = 0
    """Steps; 0: as often as it costs next to nothing; -1: never."""
    checkpoint_every_steps: int = 0
    checkpoint_every_s: float = 0.0
    """How often one of them becomes a checkpoint; 0: never."""
    checkpoint_at_end: bool = False


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The answer to Enrol. Without a place, it is a spare."""

    place: Place | None
    replicas: int
    """In-memory copies of each shard that other ranks are to hold."""
    checkpoint_dir: str
    snapshots: Snapshots = Snapshots(every=-1)


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """To a spare: what the job's state is like, and how large the world is."""

    sharded: bool
    world_size: int


class Assign(msgspec.Struct, frozen=True, tag="assign"):
    place: Place


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


class Room(msgspec.Struct, frozen=True, kw_only=True, tag="room"):
    """Where the images of the worker's seat are, or why there are none."""

    directory: str
    size_bytes: int
    why: str = ""


class HeldImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image in this node's memory: one part of the state before a step."""

    path: str
    step: int
    part: int
    shards: int
    shares: int
    size_bytes: int
    seed: int
    first_step: int
    view: int = 0
    """In which it was copied: parts of one step, but of two views, do not belong together."""
    checksums: tuple[int, ...] = ()
    """Of its blocks (storage/image.py), where they are known."""
    is_guest: bool = False
    """Held for another node."""


class Written(msgspec.Struct, frozen=True, tag="written"):
    """What came of a state that was to become a checkpoint."""

    step: int
    why: str
    """Why it did not; empty if it did."""
    created_ns: int = 0
    """Which image of the step it is about, as `Sealed` said."""


class Held(msgspec.Struct, frozen=True, tag="held"):
    request: int
    images: tuple[HeldImage, ...]


FromWorker = (
    Enrol
    | Ready
    | Joined
    | Committed
    | Interrupted
    | Closed
    | Released
    | Skipped
    | Shards
    | Numbers
    | Stacks
    | NeedRoom
    | Sealed
    | AskHeld
)
ToWorker = Welcome | Prepare | Assign | Revoke | Release | ShowStacks | Room | Held | Written
