"""The report of an incident, from the journal alone: the root cause first, then what it looked like everywhere else,
then what was decided and why. Pure.

    cause        the failure that came first, with its fault, traceback and the end of its log; or the lost node, or the
                 ranks that hang
    others       failures that are not collateral, and the number of those that are
    stacks       of all ranks in a hang, or of steps that failed; ranks with the same stack are shown once
    progress     how far each rank had come
    suspects     in a hang, the ranks that have come least far, and the end of their logs
    nodes        the nodes concerned: the reputation of their machines, the device counters after the fault, what the
                 last check measured, and what was done about them
    durability   which step of the state was where, as of the last record before the incident
    decisions    each with its reason, and the step in memory that all started from

An incident consists of everything since the view that it hit was formed, up to its receipt, the job's end, or now.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from holdfast.core import records as r
from holdfast.core.assess import suspects_among
from holdfast.core.events import StepError, WorkerProgress
from holdfast.core.faults.failures import Failure, describe, describe_error, is_collateral, root_cause
from holdfast.core.faults.fault_table import fault_of
from holdfast.core.faults.fault_types import Fault
from holdfast.core.sentences import measured_sentence, phase_durations, receipt, safe, sentence
from holdfast.core.stacks import group_stacks
from holdfast.journal import JournalEntry
from holdfast.wire.progress_page import WorkerPhase

TIMELINE_MAX = 200
"""Entries that are shown one by one; in a large job the rest is counted."""
OTHERS_SHOWN_MAX = 16
PROGRESS_SHOWN_MAX = 1_024

FACTS = (
    r.WorkerFailedRecord,
    r.StepInterruptedRecord,
    r.WorkersStalledRecord,
    r.NodeLost,
    r.NodeDraining,
    r.NodeCordoned,
    r.PeerLinksJudged,
)
CONCERNING = (r.NodeLost, r.NodeCordoned, r.NodeDraining, r.NodeSuspected)
PROBLEMS_SHOWN_MAX = 16
SUSPECTS_SHOWN_MAX = 8
DATA_RECORDS = (
    r.StepsAudited,
    r.ShardsLeased,
    r.ShardFailed,
    r.ShardQuarantined,
    r.DataAnnouncedRecord,
    r.DataSkippedRecord,
)
"""Records that come all the time and have nothing to do with an incident."""


class StackGroup(msgspec.Struct, frozen=True):
    """Ranks with the same stack."""

    ranks: tuple[int, ...]
    stack: str


class RankProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a rank."""

    rank: int
    node_id: str
    step: int
    phase: str
    collectives: int
    is_waiting: bool
    """Whether it waits for other ranks in a collective."""
    is_asleep: bool
    """Whether it sleeps (`time.sleep`), and so waits for no rank."""
    is_suspect: bool
    """Whether it has come least far."""


class SuspectRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that had come least far in a hang, and the end of its log."""

    rank: int
    local_rank: int
    node_id: str
    log_file: str
    log_tail: tuple[str, ...]


class NodeNote(msgspec.Struct, frozen=True):
    """A sentence about a node concerned."""

    node_id: str
    text: str


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A decision: the view it was made in, the strategy, and why."""

    at: float
    view: int
    strategy: r.Strategy
    counted: bool
    why: str
    reload: int = -1
    """The step in the nodes' memory that all workers started from; -1: none."""


class TimelineEntry(msgspec.Struct, frozen=True):
    """A line of the incident's timeline."""

    seq: int
    at: float
    kind: str
    sentence: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The report of an incident."""

    job_id: str
    number: int
    kind: r.IncidentKind
    cause: str
    fault: Fault | None
    root: Failure | None
    others: tuple[str, ...]
    collateral: int
    """The number of failures and failed steps that other failures caused."""
    stacks: tuple[StackGroup, ...]
    progress: tuple[RankProgress, ...]
    suspects: tuple[SuspectRank, ...]
    nodes: tuple[NodeNote, ...]
    durability: str
    """Which step of the state survived which loss; empty: nothing was reported."""
    decisions: tuple[Decision, ...]
    outcome: str
    repeats: int
    """The number of committed steps that were repeated because the state after them was lost."""
    phases_s: dict[str, float]
    """How long each phase of a closed incident took."""
    timeline: tuple[TimelineEntry, ...]
    timeline_omitted: int = 0


def is_running(entries: Sequence[JournalEntry]) -> bool:
    """Return whether the job has begun and is not over."""
    return bool(entries) and not any(isinstance(entry.record, r.JobFinished) for entry in entries)


def is_before_first_step(entries: Sequence[JournalEntry]) -> bool:
    """Return whether a running job has made no step that is known: a script without a session reports none."""
    return is_running(entries) and not any(isinstance(entry.record, r.StepCommittedRecord) for entry in entries)


def is_closed(entries: Iterable[JournalEntry], number: int) -> bool:
    """Return whether an incident is over."""
    return any(isinstance(entry.record, r.IncidentClosed) and entry.record.number == number for entry in entries)


def incident_numbers(entries: Iterable[JournalEntry]) -> list[int]:
    """Return the numbers of all incidents, the oldest first."""
    return [entry.record.number for entry in entries if isinstance(entry.record, r.IncidentOpened)]


def explain(entries: Sequence[JournalEntry], number: int) -> Explanation:
    """Return the report of an incident that the journal has."""
    own = list(_of_incident(entries, number))
    records = [entry.record for entry in own]
    opened = next(x for x in records if isinstance(x, r.IncidentOpened) and x.number == number)
    decided = [x for x in records if isinstance(x, r.IncidentDecided) and x.number == number]
    closed = next((x for x in records if isinstance(x, r.IncidentClosed) and x.number == number), None)
    failures = [x.failure for x in records if isinstance(x, r.WorkerFailedRecord)]
    step_errors = [(x.node_id, x.step_error) for x in records if isinstance(x, r.StepInterruptedRecord)]
    kind = decided[0].kind if decided else opened.kind
    root = root_cause(failures) if kind == "worker" else None
    suspects = tuple(_suspects(records))[:SUSPECTS_SHOWN_MAX]
    shown = own[:TIMELINE_MAX]
    return Explanation(
        job_id=next((e.record.job_id for e in entries if isinstance(e.record, r.JobCreated)), ""),
        number=number,
        kind=kind,
        cause=describe(root) if root and not is_collateral(root) else decided[0].cause if decided else opened.cause,
        fault=_fault(root, records, kind),
        root=root,
        others=tuple(_others(root, failures, step_errors))[:OTHERS_SHOWN_MAX],
        collateral=sum(is_collateral(f) for f in failures if f is not root)
        + sum(step_error.collateral for _, step_error in step_errors)
        + sum(record.echoes for record in decided),
        stacks=tuple(_stacks(records)),
        progress=tuple(_progress(records))[:PROGRESS_SHOWN_MAX],
        suspects=suspects,
        nodes=tuple(_nodes([*_until(entries, own[-1].seq, opened.view)], records, root, suspects, opened.view)),
        durability=_durability(entries, opened),
        decisions=tuple(_decision(record) for record in decided),
        outcome=_outcome(records, closed),
        repeats=_repeats(entries, decided),
        phases_s=dict(phase_durations(closed)) if closed else {},
        timeline=tuple(_timeline_entry(entry) for entry in shown),
        timeline_omitted=len(own) - len(shown),
    )


def _of_incident(entries: Sequence[JournalEntry], number: int) -> Iterator[JournalEntry]:
    opened = next(
        index
        for index, entry in enumerate(entries)
        if isinstance(entry.record, r.IncidentOpened) and entry.record.number == number
    )
    boundaries = [
        i for i, entry in enumerate(entries[:opened]) if isinstance(entry.record, r.ViewFormed | r.IncidentClosed)
    ]
    first = boundaries[-1] + 1 if boundaries else 0
    for index, entry in enumerate(entries[first:], first):
        record = entry.record
        if (index >= opened or isinstance(record, FACTS)) and not isinstance(record, DATA_RECORDS):
            yield entry
        if isinstance(record, r.JobFinished) or (isinstance(record, r.IncidentClosed) and record.number == number):
            return


def _until(entries: Sequence[JournalEntry], seq: int, view: int) -> Iterator[JournalEntry]:
    """Yield the records up to the incident's end, and the counters of its view, which may have come later."""
    for entry in entries:
        if entry.seq <= seq or (isinstance(entry.record, r.CountersReadRecord) and entry.record.view == view):
            yield entry


def _fault(root: Failure | None, records: Sequence[r.DurableRecord], kind: r.IncidentKind) -> Fault | None:
    if root and not is_collateral(root):
        return root.fault
    if any(isinstance(record, r.NodeLost) for record in records) and kind == "node":
        return fault_of("node-lost")
    if any(isinstance(record, r.WorkersStalledRecord) for record in records):
        return fault_of("hang")
    return root.fault if root else None


def _others(
    root: Failure | None, failures: Sequence[Failure], step_errors: Sequence[tuple[str, StepError]]
) -> Iterator[str]:
    yield from (describe(failure) for failure in failures if failure is not root and not is_collateral(failure))
    for node_id, step_error in step_errors:
        if not step_error.collateral:
            error = describe_error(step_error.exception, step_error.message)
            yield f"rank {step_error.rank} on {node_id} failed in step {step_error.step}: {error}"


def _stacks(records: Sequence[r.DurableRecord]) -> Iterator[StackGroup]:
    """Yield the stacks: in a hang of all ranks, by the last report of each node; else of steps that failed."""
    stalled = {record.node_id: record for record in records if isinstance(record, r.WorkersStalledRecord)}
    found = [(progress.rank, progress.stack) for record in stalled.values() for progress in record.worker_progress]
    if not found:
        interrupted = [record.step_error for record in records if isinstance(record, r.StepInterruptedRecord)]
        found = [(step_error.rank, step_error.traceback) for step_error in interrupted if step_error.traceback]
    for ranks, stack in group_stacks(found):
        yield StackGroup(ranks, stack)


def _progress_by_rank(records: Sequence[r.DurableRecord]) -> list[tuple[str, WorkerProgress, bool]]:
    """Return by rank how far each had come, by the last report of its node, and whether that is least far."""
    stalled = {record.node_id: record for record in records if isinstance(record, r.WorkersStalledRecord)}
    worker_progress = [(record.node_id, progress) for record in stalled.values() for progress in record.worker_progress]
    suspected = {progress.rank for _, progress in suspects_among(worker_progress)}
    return [
        (node_id, progress, progress.rank in suspected)
        for node_id, progress in sorted(worker_progress, key=lambda pair: pair[1].rank)
    ]


def _suspects(records: Sequence[r.DurableRecord]) -> Iterator[SuspectRank]:
    for node_id, progress, is_suspect in _progress_by_rank(records):
        if is_suspect:
            yield SuspectRank(
                rank=progress.rank,
                local_rank=progress.local_rank,
                node_id=node_id,
                log_file=progress.log_file,
                log_tail=progress.log_tail,
            )


def _progress(records: Sequence[r.DurableRecord]) -> Iterator[RankProgress]:
    for node_id, progress, is_suspect in _progress_by_rank(records):
        yield RankProgress(
            rank=progress.rank,
            node_id=node_id,
            step=progress.step,
            phase=WorkerPhase(progress.phase).name.lower()
            if progress.phase in set(WorkerPhase)
            else str(progress.phase),
            collectives=progress.collectives,
            is_waiting=progress.waiting,
            is_asleep=progress.asleep,
            is_suspect=is_suspect,
        )


def _nodes(
    entries: Sequence[JournalEntry],
    records: Sequence[r.DurableRecord],
    root: Failure | None,
    suspects: Sequence[SuspectRank],
    view: int,
) -> Iterator[NodeNote]:
    concerned = [root.node_id] if root else [one.node_id for one in suspects]
    concerned += [x.node_id for x in records if isinstance(x, CONCERNING)]
    for node_id in dict.fromkeys(concerned):
        joined = [e.record for e in entries if isinstance(e.record, r.NodeJoined) and e.record.node_id == node_id]
        if joined:
            info, reputation = joined[-1].info, joined[-1].reputation
            known = f"{reputation.grade.value}: {reputation.why}" if reputation.why else reputation.grade.value
            yield NodeNote(node_id, f"machine {info.machine or info.host} on {info.host}, known as {known}")
        yield from _counters(entries, node_id, view)
        yield from _last_check(entries, node_id)
        for record in records:
            match record:
                case r.NodeLost(node_id=who) | r.NodeCordoned(node_id=who) | r.NodeCleared(node_id=who):
                    if who == node_id:
                        yield NodeNote(node_id, sentence(record))


def _counters(entries: Sequence[JournalEntry], node_id: str, view: int) -> Iterator[NodeNote]:
    for entry in entries:
        match entry.record:
            case r.CountersReadRecord(node_id=who, view=when, readings=readings) if (who, when) == (node_id, view):
                yield from (NodeNote(node_id, f"counters after the fault: {reading}") for reading in readings)


def _last_check(entries: Sequence[JournalEntry], node_id: str) -> Iterator[NodeNote]:
    """Yield what the last check of a node measured and found; that is one after the fault, if there was one."""
    for entry in reversed(entries):
        record = entry.record
        verdicts = (
            [one for one in record.nodes if one.node_id == node_id] if isinstance(record, r.CheckConcluded) else []
        )
        if isinstance(record, r.CheckConcluded) and verdicts:
            verdict = verdicts[0]
            yield NodeNote(node_id, f"last check ({record.why}): {measured_sentence(verdict)}")
            for problem in verdict.problems[:PROBLEMS_SHOWN_MAX]:
                what = "counters" if problem.stage == "device" else problem.stage
                where = f", device {problem.device}" if problem.device >= 0 else ""
                yield NodeNote(node_id, f"last check, {what}{where}: {problem.text} ({problem.fault})")
            return


def _durability(entries: Sequence[JournalEntry], opened: r.IncidentOpened) -> str:
    reports = [
        entry.record
        for entry in entries
        if isinstance(entry.record, r.DurabilityChanged) and entry.record.at <= opened.at
    ]
    return safe(reports[-1].durability) if reports else ""


def _decision(record: r.IncidentDecided) -> Decision:
    return Decision(
        at=record.at,
        view=record.view,
        strategy=record.strategy,
        counted=record.counted,
        why=record.why,
        reload=record.reload,
    )


def _outcome(records: Sequence[r.DurableRecord], closed: r.IncidentClosed | None) -> str:
    if closed:
        return receipt(closed)
    finished = [record for record in records if isinstance(record, r.JobFinished)]
    return sentence(finished[-1]) if finished else "not over yet"


def _repeats(entries: Sequence[JournalEntry], decided: Sequence[r.IncidentDecided]) -> int:
    """Return the repeated steps of the view that the last decision led to. Its first commit may come after the
    incident's end."""
    if not decided:
        return 0
    committed = (entry.record for entry in entries if isinstance(entry.record, r.StepCommittedRecord))
    return next((one.repeats for one in committed if one.view > decided[-1].view), 0)


def _timeline_entry(entry: JournalEntry) -> TimelineEntry:
    record = entry.record
    return TimelineEntry(entry.seq, record.at, str(record.__struct_config__.tag), sentence(record))
