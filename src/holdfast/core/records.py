"""What was decided, in the past tense: the journal's contents. Replaying them rebuilds the job.

A record says when (`at`), and those that come from a choice say why. The soft ones are evolved like the
others but never journaled: they describe connections, which do not outlive the master that has them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from holdfast.core.events import DataSource, NodeInfo, Pace, Part, SessionInfo, Stumble, Vector
from holdfast.core.faults import Failure
from holdfast.core.health.findings import CheckResult, CheckTask, LinkVerdict, NodeVerdict, Norm
from holdfast.core.health.reputation import Repute
from holdfast.core.kept import KeptImage, Pacing, Safety
from holdfast.core.ladder import Strategy as Strategy
from holdfast.core.leases import Lease, Trouble
from holdfast.core.settings import Settings
from holdfast.core.views import View


class Outcome(StrEnum):
    """How a job ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


IncidentKind = Literal["worker", "node", "planned"]
"""A worker failed; a node went; or nothing is wrong and the membership changes by request."""


class JobCreated(msgspec.Struct, frozen=True, kw_only=True, tag="job-created"):
    at: float
    job_id: str
    settings: Settings


class TermBegan(msgspec.Struct, frozen=True, kw_only=True, tag="term-began"):
    """A master took the job over; its orders outrank those of every term before."""

    at: float
    term: int


class NodeJoined(msgspec.Struct, frozen=True, kw_only=True, tag="node-joined"):
    at: float
    node_id: str
    incarnation: str
    info: NodeInfo
    repute: Repute = Repute()
    """What its machine is known for."""


class NodeAdmitted(msgspec.Struct, frozen=True, kw_only=True, tag="node-admitted"):
    """A node that was a last resort may take part after all."""

    at: float
    node_id: str
    incarnation: str
    why: str


class NodeCordoned(msgspec.Struct, frozen=True, kw_only=True, tag="node-cordoned"):
    """A node is to blame for a fault, and leaves the job."""

    at: float
    node_id: str
    incarnation: str
    machine: str
    fault: str
    lasting: bool
    """No other job is to have it either, until somebody lets it back."""
    why: str


class NodeCleared(msgspec.Struct, frozen=True, kw_only=True, tag="node-cleared"):
    """A node that was sent away for a fault was not to blame for it."""

    at: float
    node_id: str
    machine: str
    fault: str
    why: str


class NodeLost(msgspec.Struct, frozen=True, kw_only=True, tag="node-lost"):
    at: float
    node_id: str
    incarnation: str
    certain: bool
    """Whether its life is known to have ended, or it may live on behind a partition."""
    since: float
    """The last sign of its life."""
    why: str


class NodeDraining(msgspec.Struct, frozen=True, kw_only=True, tag="node-draining"):
    at: float
    node_id: str
    incarnation: str
    signal: int
    why: str


class NodeLeft(msgspec.Struct, frozen=True, kw_only=True, tag="node-left"):
    at: float
    node_id: str
    incarnation: str


class GatheringBegan(msgspec.Struct, frozen=True, kw_only=True, tag="gathering-began"):
    at: float
    deadline: float
    why: str


class ViewFormed(msgspec.Struct, frozen=True, kw_only=True, tag="view-formed"):
    at: float
    view: View
    why: str


class NodeStarted(msgspec.Struct, frozen=True, kw_only=True, tag="node-started"):
    """All workers of a node run in the view."""

    at: float
    node_id: str
    view: int
    pids: tuple[int, ...]
    logs: tuple[str, ...] = ()
    """The directory of each one's output, within the node's; empty: that of the view."""


class WorkerDone(msgspec.Struct, frozen=True, kw_only=True, tag="worker-done"):
    at: float
    node_id: str
    view: int
    local_rank: int


class WorkerLost(msgspec.Struct, frozen=True, kw_only=True, tag="worker-lost"):
    at: float
    failure: Failure
    late: bool
    """Of a view that is over: evidence for the open incident, not a new fault."""


class NodeSettled(msgspec.Struct, frozen=True, kw_only=True, tag="node-settled"):
    """All workers of a node are in the view, with the state of the settled step."""

    at: float
    node_id: str
    view: int
    session: SessionInfo
    news: bool
    """Whether it says something else about the state than was known: every node is to hear of it."""


class StepBroken(msgspec.Struct, frozen=True, kw_only=True, tag="step-broken"):
    """A worker's step failed; the worker is well and waits for a view."""

    at: float
    node_id: str
    view: int
    stumble: Stumble


class WorkersStuck(msgspec.Struct, frozen=True, kw_only=True, tag="workers-stuck"):
    """Nothing moves on a node any more."""

    at: float
    node_id: str
    view: int
    stalled_s: float
    vectors: tuple[Vector, ...]


class TrainingEnded(msgspec.Struct, frozen=True, kw_only=True, tag="training-ended"):
    """All steps are made. What fails from now on fails as in any script."""

    at: float
    node_id: str
    view: int
    step: int


class StepProved(msgspec.Struct, frozen=True, kw_only=True, tag="step-proved"):
    """The first step committed in the view: every rank of it has come through its barrier."""

    at: float
    node_id: str
    view: int
    step: int


class JobResized(msgspec.Struct, frozen=True, kw_only=True, tag="job-resized"):
    """Another number of nodes is wanted from now on."""

    at: float
    nodes: int
    why: str


class DataDescribed(msgspec.Struct, frozen=True, kw_only=True, tag="data-described"):
    """What the samples of each step follow from, from this view on."""

    at: float
    view: int
    sources: tuple[DataSource, ...]


class DataSkipped(msgspec.Struct, frozen=True, kw_only=True, tag="data-skipped"):
    """The script passes over a stretch of steps of a source."""

    at: float
    view: int
    source: int
    name: str
    first_step: int
    end_step: int
    why: str


class StepsWitnessed(msgspec.Struct, frozen=True, kw_only=True, tag="steps-witnessed"):
    """A piece of the chain of what was handed out; see ledger.py. Stretches are (first, last)."""

    at: float
    since_view: int
    """The first view of the life that it belongs to."""
    source: int
    first_step: int
    last_step: int
    samples: int
    chain: str
    """The link of the last step."""
    unwitnessed: tuple[tuple[int, int], ...] = ()
    """Of which it cannot be known any more what they were made of."""
    skipped: tuple[tuple[int, int], ...] = ()


class ShardsLeased(msgspec.Struct, frozen=True, kw_only=True, tag="shards-leased"):
    """The commit of a step has given shards of a stream to slots."""

    at: float
    view: int
    stream: str
    step: int
    leases: tuple[Lease, ...]


class ShardFailed(msgspec.Struct, frozen=True, kw_only=True, tag="shard-failed"):
    """A shard could not be read to its end; the rest of it is leased again."""

    at: float
    view: int
    stream: str
    step: int
    trouble: Trouble


class ShardQuarantined(msgspec.Struct, frozen=True, kw_only=True, tag="shard-quarantined"):
    """A shard failed too often: the rest of it is not read in this epoch."""

    at: float
    view: int
    stream: str
    step: int
    trouble: Trouble


class NumbersOdd(msgspec.Struct, frozen=True, kw_only=True, tag="numbers-odd"):
    """A step's loss or gradient was odd, and what became of it: repeated, passed, skipped, kept or stopped."""

    at: float
    node_id: str
    view: int
    rank: int
    step: int
    what: str
    outcome: str


class CountersNoted(msgspec.Struct, frozen=True, kw_only=True, tag="counters-noted"):
    """What is wrong with a node by its devices' counters, after something failed on it in the view."""

    at: float
    node_id: str
    view: int
    readings: tuple[str, ...]


class StragglerFound(msgspec.Struct, frozen=True, kw_only=True, tag="straggler-found"):
    """A rank has been slower than all others for a while."""

    at: float
    view: int
    node_id: str
    rank: int
    local_rank: int
    own_s: float
    usual_s: float
    score: float


class NodesChecked(msgspec.Struct, frozen=True, kw_only=True, tag="nodes-checked"):
    """A check of nodes is over: what was measured, what was expected, and what is concluded."""

    at: float
    checkup: str
    why: str
    """What it was for."""
    took_s: float
    accelerator: str
    nodes: tuple[NodeVerdict, ...]
    links: tuple[LinkVerdict, ...] = ()
    """Bad ones only."""
    norms: tuple[Norm, ...] = ()


class NodeSuspected(msgspec.Struct, frozen=True, kw_only=True, tag="node-suspected"):
    """A fault that may be the node's: it is checked before it takes part again."""

    at: float
    node_id: str
    incarnation: str
    why: str


class NodeReadmitted(msgspec.Struct, frozen=True, kw_only=True, tag="node-readmitted"):
    """A slow node was left out, and the job cannot do without it any more."""

    at: float
    node_id: str
    incarnation: str
    why: str


class IncidentOpened(msgspec.Struct, frozen=True, kw_only=True, tag="incident-opened"):
    at: float
    number: int
    view: int
    kind: IncidentKind
    cause: str


class IncidentDecided(msgspec.Struct, frozen=True, kw_only=True, tag="incident-decided"):
    at: float
    number: int
    view: int
    """The view whose trouble it is about: a fault during a recovery is decided anew, in a later view."""
    kind: IncidentKind
    cause: str
    strategy: Strategy
    counted: bool
    """Whether it uses up one of the restarts."""
    why: str
    reload: int = -1
    """The step in the nodes' memory that all workers start from; -1: there is none."""


class IncidentClosed(msgspec.Struct, frozen=True, kw_only=True, tag="incident-closed"):
    """The receipt: when each phase was reached, on the master's clock but for `happened_at`."""

    at: float
    number: int
    kind: IncidentKind
    cause: str
    strategy: Strategy
    happened_at: float
    detected_at: float
    decided_at: float
    rebuilt_at: float
    view_before: int
    view_after: int
    restarts_used: int
    collateral: int
    """How many failures were folded under the cause."""
    settled_at: float = 0.0
    """When all nodes had settled in the view; 0 if they were not asked to or had not all said so."""
    step: int = -1
    """The first step committed in the view, which proves the recovery; -1 where workers do not say so."""


class JobFinished(msgspec.Struct, frozen=True, kw_only=True, tag="job-finished"):
    at: float
    outcome: Outcome
    exit_code: int
    why: str
    cause: Failure | None = None


class CheckpointPublished(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint-published"):
    at: float
    step: int
    url: str


class StateSafe(msgspec.Struct, frozen=True, kw_only=True, tag="state-safe"):
    """What of the state is where; said now and then."""

    at: float
    safety: Safety
    pacing: Pacing = Pacing()


class LinkLost(msgspec.Struct, frozen=True, kw_only=True, tag="link-lost"):
    at: float
    node_id: str
    deadline: float


class LinkRestored(msgspec.Struct, frozen=True, kw_only=True, tag="link-restored"):
    at: float
    node_id: str


class StoreReady(msgspec.Struct, frozen=True, kw_only=True, tag="store-ready"):
    at: float
    node_id: str
    port: int


class SparesKnown(msgspec.Struct, frozen=True, kw_only=True, tag="spares-known"):
    at: float
    node_id: str
    parked: int


class StateNoted(msgspec.Struct, frozen=True, kw_only=True, tag="state-noted"):
    at: float
    node_id: str
    images: tuple[KeptImage, ...]
    pacing: Pacing = Pacing()


class SamplesNoted(msgspec.Struct, frozen=True, kw_only=True, tag="samples-noted"):
    at: float
    parts: tuple[Part, ...]


class PacesNoted(msgspec.Struct, frozen=True, kw_only=True, tag="paces-noted"):
    at: float
    node_id: str
    paces: tuple[Pace, ...]


class CheckupBegan(msgspec.Struct, frozen=True, kw_only=True, tag="checkup-began"):
    """Nodes are to be checked. A master that takes over begins anew."""

    at: float
    checkup: str
    why: str
    lives: dict[str, str]
    """By node id: incarnations of those that are to be judged."""
    partners: tuple[str, ...] = ()
    """Nodes known to be well, which only help."""


class RoundBegan(msgspec.Struct, frozen=True, kw_only=True, tag="round-began"):
    at: float
    checkup: str
    round: int
    deadline: float
    tasks: dict[str, CheckTask]


class RoundReported(msgspec.Struct, frozen=True, kw_only=True, tag="round-reported"):
    at: float
    node_id: str
    checkup: str
    round: int
    result: CheckResult


class CheckupDropped(msgspec.Struct, frozen=True, kw_only=True, tag="checkup-dropped"):
    at: float
    checkup: str
    why: str


class NodeRefused(msgspec.Struct, frozen=True, kw_only=True, tag="node-refused"):
    at: float
    node_id: str
    incarnation: str
    why: str
    retry_after_s: float | None
    """None: coming back will not help."""
    rejoin: bool = False
    """This life was declared lost: end its workers and come back as a new one."""
    holder: str = ""
    """The incarnation that holds the id, and its process, so that a newcomer on its machine can look for it."""
    holder_pid: int = 0
    holder_machine_id: str = ""
    holder_boot_id: str = ""


DurableRecord = (
    JobCreated
    | TermBegan
    | NodeJoined
    | NodeAdmitted
    | NodeCordoned
    | NodeCleared
    | NodeLost
    | NodeDraining
    | NodeLeft
    | GatheringBegan
    | ViewFormed
    | NodeStarted
    | WorkerDone
    | WorkerLost
    | NodeSettled
    | StepBroken
    | WorkersStuck
    | StepProved
    | TrainingEnded
    | JobResized
    | DataDescribed
    | DataSkipped
    | StepsWitnessed
    | ShardsLeased
    | ShardFailed
    | ShardQuarantined
    | CheckpointPublished
    | StateSafe
    | NumbersOdd
    | CountersNoted
    | StragglerFound
    | NodesChecked
    | NodeSuspected
    | NodeReadmitted
    | IncidentOpened
    | IncidentDecided
    | IncidentClosed
    | JobFinished
)
SoftRecord = (
    LinkLost
    | LinkRestored
    | StoreReady
    | SparesKnown
    | StateNoted
    | SamplesNoted
    | PacesNoted
    | CheckupBegan
    | RoundBegan
    | RoundReported
    | CheckupDropped
    | NodeRefused
)
Record = DurableRecord | SoftRecord

SOFT_RECORDS = (
    LinkLost,
    LinkRestored,
    StoreReady,
    SparesKnown,
    StateNoted,
    SamplesNoted,
    PacesNoted,
    CheckupBegan,
    RoundBegan,
    RoundReported,
    CheckupDropped,
    NodeRefused,
)


def is_durable(record: Record) -> bool:
    """Whether the record belongs in the journal."""
    return not isinstance(record, SOFT_RECORDS)
