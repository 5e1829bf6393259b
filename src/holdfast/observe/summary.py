"""The job on one page: what `holdfast status` shows and prints as JSON. Pure.

Only what the journal has is shown. Connections are not in it: a node is `present` until it is declared lost. Times are
seconds since the epoch, by the master's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from holdfast.core import records as r
from holdfast.core.durability import Durability, SnapshotStats
from holdfast.core.faults.failures import Failure, describe
from holdfast.core.sentences import phase_durations, receipt
from holdfast.core.shard_leases import ShardProblem, StreamState
from holdfast.core.snapshot_interval import advise
from holdfast.core.state import Finished, Gathering, Incident, JobState, Serving
from holdfast.core.transact import replay
from holdfast.journal import JournalEntry
from holdfast.observe.node_summary import NodeSummary, summarise_nodes

INCIDENTS_SHOWN_MAX = 10
QUARANTINED_SHOWN_MAX = 100


class OpenIncident(msgspec.Struct, frozen=True, kw_only=True):
    """A recovery under way. Until it is decided there is no strategy and no why."""

    number: int
    kind: r.IncidentKind
    cause: str
    since: float
    strategy: r.Strategy | None
    why: str


class ClosedIncident(msgspec.Struct, frozen=True, kw_only=True):
    """A recovery with its receipt: the sentence, and how long each phase took. The phases add up to `total_s`."""

    number: int
    kind: r.IncidentKind
    cause: str
    strategy: r.Strategy
    happened_at: float
    closed_at: float
    total_s: float
    phases_s: dict[str, float]
    view_before: int
    view_after: int
    collateral: int
    receipt: str


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """The failure that ended the job; `holdfast logs --failed` has its traceback."""

    sentence: str
    node_id: str
    rank: int
    exit_code: int
    exception: str
    log_file: str


class StreamSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Streamed shards, by the name under which they are tracked."""

    name: str
    epoch: int
    """The highest epoch of which a shard was leased."""
    leases: int
    failures: int
    quarantined_total: int
    quarantined: tuple[ShardProblem, ...]
    """The last ones, the newest last."""


class StateSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Which step of the state survives which loss: steps, -1 for none. Nodes report their memory now and then only."""

    memory: int
    """Complete in the nodes' memory: survives the loss of all workers."""
    elsewhere: int
    """Complete in memory without any one node: survives the loss of a node."""
    storage: int
    """The newest checkpoint: survives the end of the job."""
    storage_url: str
    reported_at: float
    """When memory was reported; 0: never."""
    snapshot_stats: SnapshotStats = SnapshotStats()
    """How often snapshots are taken and what they cost, reported with it."""
    interval_why: str = ""
    """Why snapshots are taken as often as that."""


class ResumedFrom(msgspec.Struct, frozen=True, kw_only=True):
    """The saved state with which all ranks last started."""

    step: int
    """The first step that was run with it."""
    source: str
    """The checkpoint, or that it was in the nodes' memory."""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """The end of the job."""

    outcome: r.Outcome
    exit_code: int
    cause: Cause | None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A job at the moment `read_at`, by the reader's clock."""

    job_id: str
    phase: Literal["gathering", "serving", "finished"]
    since: float
    why: str
    read_at: float
    created_at: float
    last_record_at: float
    uptime_s: float
    """From the job's creation to now, or to its end."""
    term: int
    view: int
    """Number of the view in force, or of the last one; 0 before the first."""
    world_size: int
    nodes_min: int
    nodes_max: int
    restarts_used: int
    restarts_max: int
    state: StateSummary
    nodes: tuple[NodeSummary, ...]
    open_incident: OpenIncident | None
    incidents: tuple[ClosedIncident, ...]
    """The last ones, the newest last."""
    incidents_total: int
    changes_total: int
    """Planned changes: nodes that joined, were drained or added. They are in `incidents` too, by their kind."""
    resumed: ResumedFrom | None
    repeated_steps: int
    """The number of committed steps that were repeated because the state after them was lost."""
    ending: Ending | None
    master_seen: bool
    """Whether a master was seen alive: it answered, or it holds the journal on this machine."""
    streams: tuple[StreamSummary, ...] = ()
    check: r.CheckConcluded | None = None
    """The last check of nodes that is over."""
    retries: int = 0
    """How many collectives were run again below a step, over all ranks: connections broke, and no step did."""


def summarise(entries: Sequence[JournalEntry], now: float, *, master_seen: bool) -> Summary:
    """Return the summary of the records so far."""
    job = replay(entry.record for entry in entries)
    phase, since, why = _phase(job, entries)
    finished = job.phase.record if isinstance(job.phase, Finished) else None
    return Summary(
        job_id=job.job_id,
        phase=phase,
        since=since if entries else now,
        why=why,
        read_at=now,
        created_at=job.created_at,
        last_record_at=entries[-1].record.at if entries else 0.0,
        uptime_s=max((finished.at if finished else now) - job.created_at, 0.0) if entries else 0.0,
        term=job.term,
        view=job.view.number if job.view else 0,
        world_size=job.view.world_size if job.view else 0,
        nodes_min=job.settings.nodes_min,
        nodes_max=job.settings.nodes_max,
        restarts_used=job.incidents.restarts_used,
        restarts_max=job.settings.restarts_max,
        state=_state(job),
        nodes=summarise_nodes(job, entries),
        open_incident=_open(job.incidents.current) if job.incidents.current and not finished else None,
        incidents=tuple(_closed(record) for record in job.incidents.closed[-INCIDENTS_SHOWN_MAX:]),
        incidents_total=job.incidents.faults,
        changes_total=job.incidents.opened - job.incidents.faults,
        resumed=_resumed(job),
        repeated_steps=job.state.repeated,
        ending=_ending(finished) if finished else None,
        master_seen=master_seen,
        check=job.checks.last,
        retries=sum(job.state.retries.values()),
        streams=tuple(_stream(name, state) for name, state in job.data.streams.by_name.items()),
    )


def _state(job: JobState) -> StateSummary:
    """Return what of the state is safe. Memory counts only while the job runs: it goes with the job."""
    is_over = isinstance(job.phase, Finished)
    durability, snapshot_stats = (
        (Durability(), SnapshotStats()) if is_over else (job.state.durability, job.state.snapshot_stats)
    )
    return StateSummary(
        memory=durability.memory,
        elsewhere=durability.elsewhere,
        storage=job.state.checkpoint_step,
        storage_url=job.state.checkpoint_url,
        reported_at=job.state.durability_at if durability.memory >= 0 else 0.0,
        snapshot_stats=snapshot_stats,
        interval_why=_interval_why(snapshot_stats, job) if snapshot_stats.every else "",
    )


def _resumed(job: JobState) -> ResumedFrom | None:
    if not job.state.resumed_from:
        return None
    return ResumedFrom(step=job.state.resumed_step, source=job.state.resumed_from)


def _interval_why(snapshot_stats: SnapshotStats, job: JobState) -> str:
    if snapshot_stats.is_asked:
        return "as --snapshots says"
    return advise(
        snapshot_stats.step_s, snapshot_stats.stall_s, len(job.members), job.incidents.faults_per_node_day
    ).why


def _stream(name: str, state: StreamState) -> StreamSummary:
    return StreamSummary(
        name=name,
        epoch=state.epoch,
        leases=state.leases,
        failures=state.failures,
        quarantined_total=len(state.quarantined),
        quarantined=tuple(state.quarantined.values())[-QUARANTINED_SHOWN_MAX:],
    )


def _phase(
    job: JobState, entries: Sequence[JournalEntry]
) -> tuple[Literal["gathering", "serving", "finished"], float, str]:
    match job.phase:
        case Gathering(since=since, why=why):
            return "gathering", since, why
        case Finished(record=finished):
            return "finished", finished.at, finished.why
        case Serving():
            formed = next(e.record for e in reversed(entries) if isinstance(e.record, r.ViewFormed))
            return "serving", formed.at, formed.why


def _open(incident: Incident) -> OpenIncident:
    return OpenIncident(
        number=incident.number,
        kind=incident.kind,
        cause=incident.cause,
        since=incident.detected_at,
        strategy=incident.strategy,
        why=incident.why,
    )


def _closed(record: r.IncidentClosed) -> ClosedIncident:
    return ClosedIncident(
        number=record.number,
        kind=record.kind,
        cause=record.cause,
        strategy=record.strategy,
        happened_at=record.happened_at,
        closed_at=record.at,
        total_s=record.at - record.happened_at,
        phases_s=dict(phase_durations(record)),
        view_before=record.view_before,
        view_after=record.view_after,
        collateral=record.collateral,
        receipt=receipt(record),
    )


def _ending(record: r.JobFinished) -> Ending:
    cause = _cause(record.cause) if record.cause else None
    return Ending(outcome=record.outcome, exit_code=record.exit_code, cause=cause)


def _cause(failure: Failure) -> Cause:
    return Cause(
        sentence=describe(failure),
        node_id=failure.node_id,
        rank=failure.rank,
        exit_code=failure.exit_code,
        exception=failure.exception,
        log_file=failure.log_file,
    )
