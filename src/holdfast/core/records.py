"""Records: what was decided, in the past tense. They are the journal's contents; replaying them rebuilds the job.

A record says when (`at`), and a record of a choice says why. Soft records are applied like the others but never
journaled: they describe connections, which do not outlive the master that has them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from holdfast.core.durability import Durability, ImageReport, SnapshotStats
from holdfast.core.events import DataSource, NodeInfo, SessionInfo, SessionPart, StepError, StepTime, WorkerProgress
from holdfast.core.faults.failures import Failure
from holdfast.core.health.findings import CheckResult, CheckTask, LinkVerdict, NodeVerdict, Norm
from holdfast.core.health.reputation import Reputation
from holdfast.core.settings import Settings
from holdfast.core.shard_leases import Lease, ShardProblem
from holdfast.core.strategies import Strategy as Strategy
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
    reputation: Reputation = Reputation()
    """What its machine is known for."""


class NodeReputationChanged(msgspec.Struct, frozen=True, kw_only=True, tag="node-reputation-changed"):
    """The ban of a node's machine has run out, or a person has let it back."""

    at: float
    node_id: str
    incarnation: str
    reputation: Reputation


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
    """No other job may use the machine either, until a person uncordons it."""
    why: str


class NodeCleared(msgspec.Struct, frozen=True, kw_only=True, tag="node-cleared"):
    """A node that was sent away for a fault was not to blame for it."""

    at: float
    node_id: str
    incarnation: str
    """The one that was sent away; earlier ones may have been at fault all the same."""
    machine: str
    fault: str
    why: str


class NodeLost(msgspec.Struct, frozen=True, kw_only=True, tag="node-lost"):
    at: float
    node_id: str
    incarnation: str
    certain: bool
    """Whether it is known to be dead; else it may be alive behind a network partition."""
    since: float
    """When it was last heard."""
    why: str


class NodeDraining(msgspec.Struct, frozen=True, kw_only=True, tag="node-draining"):
    at: float
    node_id: str
    incarnation: str
    signal: int
    why: str


class NodeLeftRecord(msgspec.Struct, frozen=True, kw_only=True, tag="node-left"):
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


class WorkersStartedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="workers-started"):
    """All workers of a node run in the view."""

    at: float
    node_id: str
    view: int
    pids: tuple[int, ...]
    logs: tuple[str, ...] = ()
    """The directory of each one's output, within the node's; empty: that of the view."""


class WorkerSucceededRecord(msgspec.Struct, frozen=True, kw_only=True, tag="worker-succeeded"):
    at: float
    node_id: str
    view: int
    local_rank: int


class WorkerFailedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="worker-failed"):
    at: float
    failure: Failure
    late: bool
    """Of a view that is over: evidence for the open incident, not a new fault."""


class ViewJoinedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="view-joined"):
    """All workers of a node are in the view, with the state of the agreed step."""

    at: float
    node_id: str
    view: int
    session: SessionInfo
    news: bool
    """Whether it says something else about the state than was known: every node is to hear of it."""


class SessionRevisedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="session-revised"):
    """The workers' state turned out to be of another kind than was known: every node is to hear of it."""

    at: float
    node_id: str
    view: int
    session: SessionInfo


class StepInterruptedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="step-interrupted"):
    """A worker's step failed; the worker is well and waits for a view."""

    at: float
    node_id: str
    view: int
    step_error: StepError


class StepEchoRecord(msgspec.Struct, frozen=True, kw_only=True, tag="step-echo"):
    """One more worker's step was interrupted by what happened to another. The first of them are journaled; of these,
    which may be all ranks there are, only how many."""

    at: float
    node_id: str
    view: int
    local_rank: int


class WorkersStalledRecord(msgspec.Struct, frozen=True, kw_only=True, tag="workers-stalled"):
    """Nothing moves on a node any more."""

    at: float
    node_id: str
    view: int
    stalled_s: float
    worker_progress: tuple[WorkerProgress, ...]
    is_overdue: bool = True
    """Whether it has lasted for longer than anything may. Otherwise it is only proved who sleeps, which is a stall if
    other ranks wait for it."""


class WorkersWaitingRecord(msgspec.Struct, frozen=True, kw_only=True, tag="workers-waiting"):
    """All of a node's workers wait for other ranks."""

    at: float
    node_id: str
    view: int
    waiting_s: float


class WorkersMovedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="workers-moved"):
    """Something moves again on a node that had reported a stall."""

    at: float
    node_id: str
    view: int


class WaitEnded(msgspec.Struct, frozen=True, kw_only=True, tag="wait-ended"):
    """Something moves again on a node whose workers waited for other ranks."""

    at: float
    node_id: str
    view: int


class TrainingClosedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="training-closed"):
    """All steps are made. What fails from now on fails as in any script."""

    at: float
    node_id: str
    view: int
    step: int


class StepCommittedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="step-committed"):
    """The first step committed in the view: every rank of it has come through its barrier."""

    at: float
    node_id: str
    view: int
    step: int
    repeats: int = 0
    """How many steps, from this one on, had been committed before: the state after them is lost, and they are made once
    more."""


class TrainingResumed(msgspec.Struct, frozen=True, kw_only=True, tag="training-resumed"):
    """All ranks of the view start from a state that was saved before."""

    at: float
    view: int
    step: int
    """The next one to run."""
    source: str
    """The checkpoint, or that it was in the nodes' memory."""


class JobResized(msgspec.Struct, frozen=True, kw_only=True, tag="job-resized"):
    """Another number of nodes is wanted from now on."""

    at: float
    nodes: int
    why: str


class DataAnnouncedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="data-announced"):
    """What the samples of each step follow from, from this view on."""

    at: float
    view: int
    sources: tuple[DataSource, ...]


class DataSkippedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="data-skipped"):
    """The script passes over a stretch of steps of a source."""

    at: float
    view: int
    source: int
    name: str
    first_step: int
    end_step: int
    why: str


class StepsAudited(msgspec.Struct, frozen=True, kw_only=True, tag="steps-audited"):
    """A piece of the chain of what was handed out; see sample_audit.py. Stretches are (first, last)."""

    at: float
    since_view: int
    """The first view since all workers last restarted."""
    source: int
    first_step: int
    last_step: int
    samples: int
    chain: str
    """The link of the last step."""
    unaudited: tuple[tuple[int, int], ...] = ()
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
    problem: ShardProblem


class ShardQuarantined(msgspec.Struct, frozen=True, kw_only=True, tag="shard-quarantined"):
    """A shard failed too often: the rest of it is not read in this epoch."""

    at: float
    view: int
    stream: str
    step: int
    problem: ShardProblem


class AnomalyFound(msgspec.Struct, frozen=True, kw_only=True, tag="anomaly-found"):
    """A step's loss or gradient was odd, and what became of it: repeated, passed, skipped, kept or stopped."""

    at: float
    node_id: str
    view: int
    rank: int
    step: int
    what: str
    outcome: str


class CountersReadRecord(msgspec.Struct, frozen=True, kw_only=True, tag="counters-read"):
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


class CheckConcluded(msgspec.Struct, frozen=True, kw_only=True, tag="check-concluded"):
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
    """The view whose problem it is about: a fault during a recovery is decided again, in a later view."""
    kind: IncidentKind
    cause: str
    strategy: Strategy
    counted: bool
    """Whether it uses up one of the restarts."""
    why: str
    reload: int = -1
    """The step in the nodes' memory that all workers start from; -1: there is none."""
    echoes: int = 0
    """How many workers were interrupted by what happened to others, beside those that have records of their own."""


class NodesAwaited(msgspec.Struct, frozen=True, kw_only=True, tag="nodes-awaited"):
    """The survivors hold their state and wait for a node to replace those that are gone."""

    at: float
    number: int
    """Of the incident."""
    deadline: float
    why: str


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
    restored_at: float = 0.0
    """When all nodes had joined the view with state; 0 if they were not asked to or had not all reported it."""
    step: int = -1
    """The first step committed in the view, which proves the recovery; -1 where workers do not say so."""


class JobFinished(msgspec.Struct, frozen=True, kw_only=True, tag="job-finished"):
    at: float
    outcome: Outcome
    exit_code: int
    why: str
    cause: Failure | None = None


class CheckpointPublishedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint-published"):
    at: float
    step: int
    url: str


class DurabilityChanged(msgspec.Struct, frozen=True, kw_only=True, tag="durability-changed"):
    """What of the state is where; said now and then."""

    at: float
    durability: Durability
    snapshot_stats: SnapshotStats = SnapshotStats()


class LinkBrokeRecord(msgspec.Struct, frozen=True, kw_only=True, tag="link-broke"):
    at: float
    node_id: str
    deadline: float


class LinkRestored(msgspec.Struct, frozen=True, kw_only=True, tag="link-restored"):
    at: float
    node_id: str


class StoreOfferedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="store-offered"):
    at: float
    node_id: str
    port: int


class SparesChangedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="spares-changed"):
    at: float
    node_id: str
    parked: int


class ImagesReportedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="images-reported"):
    at: float
    node_id: str
    images: tuple[ImageReport, ...]
    snapshot_stats: SnapshotStats = SnapshotStats()
    is_looked_at: bool = False
    """Whether it was looked at together with those of all other nodes."""


class SamplesReportedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="samples-reported"):
    at: float
    parts: tuple[SessionPart, ...]


class StepTimesReportedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="step-times-reported"):
    at: float
    node_id: str
    step_times: tuple[StepTime, ...]


class CollectivesRetriedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="collectives-retried"):
    """Collectives were run again below the step: nothing is decided because of it."""

    at: float
    node_id: str
    retries: dict[int, int]
    """How many, by rank."""


class CheckupBegan(msgspec.Struct, frozen=True, kw_only=True, tag="checkup-began"):
    """A check of nodes began. A master that takes over starts another."""

    at: float
    checkup: str
    why: str
    incarnations: dict[str, str]
    """By node id: incarnations of those that are to be judged."""
    partners: tuple[str, ...] = ()
    """Nodes known to be well, which only help."""


class RoundBegan(msgspec.Struct, frozen=True, kw_only=True, tag="round-began"):
    at: float
    checkup: str
    round: int
    deadline: float
    tasks: dict[str, CheckTask]


class NodeCheckedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="node-checked"):
    at: float
    node_id: str
    checkup: str
    round: int
    result: CheckResult


class CheckupDropped(msgspec.Struct, frozen=True, kw_only=True, tag="checkup-dropped"):
    at: float
    checkup: str
    why: str


class WorkerFailingRecord(msgspec.Struct, frozen=True, kw_only=True, tag="worker-failing"):
    """A worker's script has failed; its process is about to end."""

    at: float
    node_id: str
    view: int
    local_rank: int
    exception: str = ""
    message: str = ""


class LinkProbeBegan(msgspec.Struct, frozen=True, kw_only=True, tag="link-probe-began"):
    """The members of the view are asked whom they cannot reach."""

    at: float
    view: int
    deadline: float


class PeerLinksProbedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="peer-links-probed"):
    at: float
    node_id: str
    view: int
    unreachable: tuple[str, ...]


class PeerLinksJudged(msgspec.Struct, frozen=True, kw_only=True, tag="peer-links-judged"):
    """All have answered, or had the time to: these links between two nodes are broken."""

    at: float
    view: int
    links: tuple[tuple[str, str], ...]
    left_out: tuple[str, ...]
    """One end of each, with which the job does not go on."""
    why_kept: str = ""
    """Why no end is left out, although links are broken."""


class PeerLinksRestored(msgspec.Struct, frozen=True, kw_only=True, tag="peer-links-restored"):
    """A node that was left out reaches the others again."""

    at: float
    node_id: str
    incarnation: str


class PeerLinkSlowedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="peer-link-slowed"):
    at: float
    view: int
    node_id: str
    peer: str
    taken_s: float
    usual_s: float


class NodeRefused(msgspec.Struct, frozen=True, kw_only=True, tag="node-refused"):
    at: float
    node_id: str
    incarnation: str
    why: str
    retry_after_s: float | None
    """None: coming back will not help."""
    rejoin: bool = False
    """This incarnation was declared lost: end its workers and join as a new one."""
    holder: str = ""
    """The incarnation that holds the id, and its process, so that a newcomer on its machine can look for it."""
    holder_pid: int = 0
    holder_machine_id: str = ""
    holder_boot_id: str = ""


DurableRecord = (
    JobCreated
    | TermBegan
    | NodeJoined
    | NodeReputationChanged
    | NodeAdmitted
    | NodeCordoned
    | NodeCleared
    | NodeLost
    | NodeDraining
    | NodeLeftRecord
    | GatheringBegan
    | ViewFormed
    | WorkersStartedRecord
    | WorkerSucceededRecord
    | WorkerFailedRecord
    | ViewJoinedRecord
    | SessionRevisedRecord
    | StepInterruptedRecord
    | WorkersStalledRecord
    | WorkersMovedRecord
    | StepCommittedRecord
    | TrainingClosedRecord
    | TrainingResumed
    | JobResized
    | DataAnnouncedRecord
    | DataSkippedRecord
    | StepsAudited
    | ShardsLeased
    | ShardFailed
    | ShardQuarantined
    | CheckpointPublishedRecord
    | DurabilityChanged
    | AnomalyFound
    | CountersReadRecord
    | StragglerFound
    | CheckConcluded
    | NodeSuspected
    | NodeReadmitted
    | PeerLinksJudged
    | PeerLinksRestored
    | PeerLinkSlowedRecord
    | IncidentOpened
    | IncidentDecided
    | NodesAwaited
    | IncidentClosed
    | JobFinished
    | CollectivesRetriedRecord
)
SoftRecord = (
    LinkBrokeRecord
    | LinkRestored
    | StoreOfferedRecord
    | WorkerFailingRecord
    | StepEchoRecord
    | SparesChangedRecord
    | ImagesReportedRecord
    | SamplesReportedRecord
    | StepTimesReportedRecord
    | WorkersWaitingRecord
    | WaitEnded
    | CheckupBegan
    | RoundBegan
    | NodeCheckedRecord
    | CheckupDropped
    | LinkProbeBegan
    | PeerLinksProbedRecord
    | NodeRefused
)
Record = DurableRecord | SoftRecord

SOFT_RECORDS = (
    LinkBrokeRecord,
    LinkRestored,
    StoreOfferedRecord,
    WorkerFailingRecord,
    StepEchoRecord,
    SparesChangedRecord,
    ImagesReportedRecord,
    SamplesReportedRecord,
    StepTimesReportedRecord,
    WorkersWaitingRecord,
    WaitEnded,
    CheckupBegan,
    RoundBegan,
    NodeCheckedRecord,
    CheckupDropped,
    LinkProbeBegan,
    PeerLinksProbedRecord,
    NodeRefused,
)


def is_durable(record: Record) -> bool:
    """Return whether the record belongs in the journal."""
    return not isinstance(record, SOFT_RECORDS)
