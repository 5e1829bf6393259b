"""The job on one page: what `holdfast status` shows and prints as JSON. Pure.

Only what the journal holds is told. Which connections are up is not in it, so nothing is said about them: a node is
`present` until it is declared lost. Times are seconds since the epoch, by the master's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from holdfast.core import records as r
from holdfast.core.faults import Failure, describe
from holdfast.core.interval import advise
from holdfast.core.kept import Pacing, Safety
from holdfast.core.leases import StreamState, Trouble
from holdfast.core.sentences import phase_durations, receipt
from holdfast.core.state import Finished, Gathering, Incident, Job, Serving
from holdfast.core.transact import replay
from holdfast.journal import Entry
from holdfast.observe.nodes import NodeSummary, summarise_nodes

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
    """The highest of which a shard was leased."""
    leases: int
    failures: int
    quarantined_total: int
    quarantined: tuple[Trouble, ...]
    """The last ones, the newest last."""


class StateSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What of the state is safe against what: steps, -1 for none. Memory is told now and then only."""

    memory: int
    """Whole in the nodes' memory: survives all workers."""
    elsewhere: int
    """The same without any one node: survives a node."""
    storage: int
    """The newest checkpoint: survives the job."""
    storage_url: str
    said_at: float
    """When memory was told of; 0: never."""
    pacing: Pacing = Pacing()
    """How snapshots are made, told with it."""
    pacing_why: str = ""
    """Why as often as that."""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How the job ended."""

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
    ending: Ending | None
    master_seen: bool
    """Whether a master was seen alive: it answered, or it holds the journal on this machine."""
    streams: tuple[StreamSummary, ...] = ()
    check: r.NodesChecked | None = None
    """The last check of nodes that is over."""


def summarise(entries: Sequence[Entry], now: float, *, master_seen: bool) -> Summary:
    """What the records so far come to."""
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
        restarts_used=job.restarts_used,
        restarts_max=job.settings.restarts_max,
        state=_state(job),
        nodes=summarise_nodes(job, entries),
        open_incident=_open(job.incident) if job.incident and not finished else None,
        incidents=tuple(_closed(record) for record in job.incidents[-INCIDENTS_SHOWN_MAX:]),
        incidents_total=job.incidents_opened,
        ending=_ending(finished) if finished else None,
        master_seen=master_seen,
        check=job.checked,
        streams=tuple(_stream(name, state) for name, state in job.streams.by_name.items()),
    )


def _state(job: Job) -> StateSummary:
    """Memory only while the job lives: it goes with it."""
    is_over = isinstance(job.phase, Finished)
    safety, pacing = (Safety(), Pacing()) if is_over else (job.safety, job.pacing)
    return StateSummary(
        memory=safety.memory,
        elsewhere=safety.elsewhere,
        storage=job.checkpoint,
        storage_url=job.checkpoint_url,
        said_at=job.safety_at if safety.memory >= 0 else 0.0,
        pacing=pacing,
        pacing_why=_why(pacing, job) if pacing.every else "",
    )


def _why(pacing: Pacing, job: Job) -> str:
    if pacing.is_asked:
        return "as --snapshots says"
    return advise(pacing.step_s, pacing.stall_s, len(job.members), job.faults_per_node_day).why


def _stream(name: str, state: StreamState) -> StreamSummary:
    return StreamSummary(
        name=name,
        epoch=state.epoch,
        leases=state.leases,
        failures=state.failures,
        quarantined_total=len(state.quarantined),
        quarantined=tuple(state.quarantined.values())[-QUARANTINED_SHOWN_MAX:],
    )


def _phase(job: Job, entries: Sequence[Entry]) -> tuple[Literal["gathering", "serving", "finished"], float, str]:
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
