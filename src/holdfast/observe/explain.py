"""An incident's report, from the journal alone: the root cause first, then what it looked like everywhere else, then
what was decided and why. Pure.

    cause        the failure that came first, with its fault, traceback and log's end; or whose node went, or who hangs
    others       failures that are no echo of it, and how many are
    stacks       of all ranks when nothing moved, or of steps that failed: those that are in the same place, once
    progress     how far each rank had come
    hung         when nothing moved, who has come least far, and the end of what they wrote
    nodes        what is known of the nodes concerned, of a hang those of who has come least far: what they were known
                 for, what their counters said when it failed, what the last check of them measured, and what became of
                 them
    kept         which step of the state was where, as last written down before
    decisions    each with its reason, and the step in memory that all started from; and what became of them

What belongs to an incident: everything since the view that it hit was formed, up to its receipt, the job's end, or now.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from holdfast.core import records as r
from holdfast.core.diagnosis import group_stacks
from holdfast.core.events import Stumble, Vector
from holdfast.core.fault_table import fault_of
from holdfast.core.fault_types import Fault
from holdfast.core.faults import Failure, describe, describe_error, is_collateral, root_cause
from holdfast.core.sentences import measured_sentence, phase_durations, receipt, safe, sentence
from holdfast.journal import Entry
from holdfast.wire.progress import Phase

TIMELINE_MAX = 200
"""Entries that are told one by one; in a large job the rest is counted."""
OTHERS_SHOWN_MAX = 16
PROGRESS_SHOWN_MAX = 1_024

FACTS = (r.WorkerLost, r.StepBroken, r.WorkersStuck, r.NodeLost, r.NodeDraining, r.NodeCordoned)
CONCERNING = (r.NodeLost, r.NodeCordoned, r.NodeDraining, r.NodeSuspected)
PROBLEMS_SHOWN_MAX = 16
HUNG_SHOWN_MAX = 8
DATA = (r.StepsWitnessed, r.ShardsLeased, r.ShardFailed, r.ShardQuarantined, r.DataDescribed, r.DataSkipped)
"""What comes all the time and has nothing to do with it."""


class StackGroup(msgspec.Struct, frozen=True):
    """Ranks that are in the same place."""

    ranks: tuple[int, ...]
    stack: str


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a rank had come."""

    rank: int
    node_id: str
    step: int
    phase: str
    collectives: int
    is_waiting: bool
    """For others, in a collective."""
    is_suspect: bool
    """It has come least far."""


class Hung(msgspec.Struct, frozen=True, kw_only=True):
    """One that has come least far when nothing moved, and the last that it wrote."""

    rank: int
    local_rank: int
    node_id: str
    log_file: str
    log_tail: tuple[str, ...]


class NodeNote(msgspec.Struct, frozen=True):
    """Something about a node concerned."""

    node_id: str
    text: str


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What was decided, in which view, and why."""

    at: float
    view: int
    strategy: r.Strategy
    counted: bool
    why: str
    reload: int = -1
    """The step in the nodes' memory that all workers started from; -1: none."""


class Moment(msgspec.Struct, frozen=True):
    """A line of the incident's timeline."""

    seq: int
    at: float
    kind: str
    sentence: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The report."""

    job_id: str
    number: int
    kind: r.IncidentKind
    cause: str
    fault: Fault | None
    root: Failure | None
    others: tuple[str, ...]
    collateral: int
    """Failures and failed steps that are echoes of others."""
    stacks: tuple[StackGroup, ...]
    progress: tuple[Progress, ...]
    hung: tuple[Hung, ...]
    nodes: tuple[NodeNote, ...]
    kept: str
    """What of the state was safe against what; empty: nothing was said of it."""
    decisions: tuple[Decision, ...]
    outcome: str
    phases_s: dict[str, float]
    """Of a closed one: where the time went."""
    timeline: tuple[Moment, ...]
    timeline_left_out: int = 0


def incident_numbers(entries: Iterable[Entry]) -> list[int]:
    """All there were, the oldest first."""
    return [entry.record.number for entry in entries if isinstance(entry.record, r.IncidentOpened)]


def explain(entries: Sequence[Entry], number: int) -> Explanation:
    """The report of an incident that the journal has."""
    own = list(_of_incident(entries, number))
    records = [entry.record for entry in own]
    opened = next(x for x in records if isinstance(x, r.IncidentOpened) and x.number == number)
    decided = [x for x in records if isinstance(x, r.IncidentDecided) and x.number == number]
    closed = next((x for x in records if isinstance(x, r.IncidentClosed) and x.number == number), None)
    failures = [x.failure for x in records if isinstance(x, r.WorkerLost)]
    stumbles = [(x.node_id, x.stumble) for x in records if isinstance(x, r.StepBroken)]
    kind = decided[0].kind if decided else opened.kind
    root = root_cause(failures) if kind == "worker" else None
    hung = tuple(_hung(records))[:HUNG_SHOWN_MAX]
    told = own[:TIMELINE_MAX]
    return Explanation(
        job_id=next((e.record.job_id for e in entries if isinstance(e.record, r.JobCreated)), ""),
        number=number,
        kind=kind,
        cause=describe(root) if root and not is_collateral(root) else decided[0].cause if decided else opened.cause,
        fault=_fault(root, records, kind),
        root=root,
        others=tuple(_others(root, failures, stumbles))[:OTHERS_SHOWN_MAX],
        collateral=sum(is_collateral(f) for f in failures if f is not root) + sum(s.collateral for _, s in stumbles),
        stacks=tuple(_stacks(records)),
        progress=tuple(_progress(records))[:PROGRESS_SHOWN_MAX],
        hung=hung,
        nodes=tuple(_nodes([*_until(entries, own[-1].seq, opened.view)], records, root, hung, opened.view)),
        kept=_kept(entries, opened),
        decisions=tuple(_decision(record) for record in decided),
        outcome=_outcome(records, closed),
        phases_s=dict(phase_durations(closed)) if closed else {},
        timeline=tuple(_moment(entry) for entry in told),
        timeline_left_out=len(own) - len(told),
    )


def _of_incident(entries: Sequence[Entry], number: int) -> Iterator[Entry]:
    opened = next(
        index
        for index, entry in enumerate(entries)
        if isinstance(entry.record, r.IncidentOpened) and entry.record.number == number
    )
    calm = [i for i, entry in enumerate(entries[:opened]) if isinstance(entry.record, r.ViewFormed | r.IncidentClosed)]
    first = calm[-1] + 1 if calm else 0
    for index, entry in enumerate(entries[first:], first):
        record = entry.record
        if (index >= opened or isinstance(record, FACTS)) and not isinstance(record, DATA):
            yield entry
        if isinstance(record, r.JobFinished) or (isinstance(record, r.IncidentClosed) and record.number == number):
            return


def _until(entries: Sequence[Entry], seq: int, view: int) -> Iterator[Entry]:
    """What was known at the end of the incident, and the counters of its view, which may have come later."""
    for entry in entries:
        if entry.seq <= seq or (isinstance(entry.record, r.CountersNoted) and entry.record.view == view):
            yield entry


def _fault(root: Failure | None, records: Sequence[r.DurableRecord], kind: r.IncidentKind) -> Fault | None:
    if root and not is_collateral(root):
        return root.fault
    if any(isinstance(record, r.NodeLost) for record in records) and kind == "node":
        return fault_of("node-lost")
    if any(isinstance(record, r.WorkersStuck) for record in records):
        return fault_of("hang")
    return root.fault if root else None


def _others(
    root: Failure | None, failures: Sequence[Failure], stumbles: Sequence[tuple[str, Stumble]]
) -> Iterator[str]:
    yield from (describe(failure) for failure in failures if failure is not root and not is_collateral(failure))
    for node_id, stumble in stumbles:
        if not stumble.collateral:
            error = describe_error(stumble.exception, stumble.message)
            yield f"rank {stumble.rank} on {node_id} failed in step {stumble.step}: {error}"


def _stacks(records: Sequence[r.DurableRecord]) -> Iterator[StackGroup]:
    """When nothing moved: of everybody, as of the last report of each node. Else of steps that failed by themselves."""
    stuck = {record.node_id: record for record in records if isinstance(record, r.WorkersStuck)}
    found = [(vector.rank, vector.stack) for record in stuck.values() for vector in record.vectors]
    if not found:
        broken = [record.stumble for record in records if isinstance(record, r.StepBroken)]
        found = [(stumble.rank, stumble.traceback) for stumble in broken if stumble.traceback]
    for ranks, stack in group_stacks(found):
        yield StackGroup(ranks, stack)


def _vectors(records: Sequence[r.DurableRecord]) -> list[tuple[str, Vector, bool]]:
    """By rank: how far each had come, as of the last report of its node, and whether that is least far."""
    stuck = {record.node_id: record for record in records if isinstance(record, r.WorkersStuck)}
    vectors = [(record.node_id, vector) for record in stuck.values() for vector in record.vectors]
    lowest = min((_distance(v) for _, v in vectors if not v.joining), default=None)
    return [
        (node_id, vector, not vector.joining and _distance(vector) == lowest)
        for node_id, vector in sorted(vectors, key=lambda pair: pair[1].rank)
    ]


def _hung(records: Sequence[r.DurableRecord]) -> Iterator[Hung]:
    for node_id, vector, is_suspect in _vectors(records):
        if is_suspect:
            yield Hung(
                rank=vector.rank,
                local_rank=vector.local_rank,
                node_id=node_id,
                log_file=vector.log_file,
                log_tail=vector.log_tail,
            )


def _progress(records: Sequence[r.DurableRecord]) -> Iterator[Progress]:
    for node_id, vector, is_suspect in _vectors(records):
        yield Progress(
            rank=vector.rank,
            node_id=node_id,
            step=vector.step,
            phase=Phase(vector.phase).name.lower() if vector.phase in set(Phase) else str(vector.phase),
            collectives=vector.collectives,
            is_waiting=vector.waiting,
            is_suspect=is_suspect,
        )


def _distance(vector: Vector) -> tuple[int, int, bool, int]:
    return (vector.step, vector.collectives, vector.waiting, vector.phase)


def _nodes(
    entries: Sequence[Entry],
    records: Sequence[r.DurableRecord],
    root: Failure | None,
    hung: Sequence[Hung],
    view: int,
) -> Iterator[NodeNote]:
    concerned = [root.node_id] if root else [one.node_id for one in hung]
    concerned += [x.node_id for x in records if isinstance(x, CONCERNING)]
    for node_id in dict.fromkeys(concerned):
        joined = [e.record for e in entries if isinstance(e.record, r.NodeJoined) and e.record.node_id == node_id]
        if joined:
            info, repute = joined[-1].info, joined[-1].repute
            known = f"{repute.grade.value}: {repute.why}" if repute.why else repute.grade.value
            yield NodeNote(node_id, f"machine {info.machine or info.host} on {info.host}, known as {known}")
        yield from _counters(entries, node_id, view)
        yield from _last_check(entries, node_id)
        for record in records:
            match record:
                case r.NodeLost(node_id=who) | r.NodeCordoned(node_id=who) | r.NodeCleared(node_id=who):
                    if who == node_id:
                        yield NodeNote(node_id, sentence(record))


def _counters(entries: Sequence[Entry], node_id: str, view: int) -> Iterator[NodeNote]:
    for entry in entries:
        match entry.record:
            case r.CountersNoted(node_id=who, view=when, readings=readings) if (who, when) == (node_id, view):
                yield from (NodeNote(node_id, f"counters after the fault: {reading}") for reading in readings)


def _last_check(entries: Sequence[Entry], node_id: str) -> Iterator[NodeNote]:
    """What was measured, and what its devices' counters said: a check after the fault, if there was one."""
    for entry in reversed(entries):
        record = entry.record
        verdicts = [one for one in record.nodes if one.node_id == node_id] if isinstance(record, r.NodesChecked) else []
        if isinstance(record, r.NodesChecked) and verdicts:
            verdict = verdicts[0]
            yield NodeNote(node_id, f"last check ({record.why}): {measured_sentence(verdict)}")
            for problem in verdict.problems[:PROBLEMS_SHOWN_MAX]:
                what = "counters" if problem.stage == "device" else problem.stage
                where = f", device {problem.device}" if problem.device >= 0 else ""
                yield NodeNote(node_id, f"last check, {what}{where}: {problem.text} ({problem.fault})")
            return


def _kept(entries: Sequence[Entry], opened: r.IncidentOpened) -> str:
    said = [entry.record for entry in entries if isinstance(entry.record, r.StateSafe) and entry.record.at <= opened.at]
    return safe(said[-1].safety) if said else ""


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


def _moment(entry: Entry) -> Moment:
    record = entry.record
    return Moment(entry.seq, record.at, str(record.__struct_config__.tag), sentence(record))
