"""Each record as one sentence: the same in the log, in `holdfast events`, in the API and on the page."""

from __future__ import annotations

from typing import assert_never

from holdfast.core import records as r
from holdfast.core.faults import Failure, describe


def sentence(record: r.Record) -> str:
    """What a person should read."""
    match record:
        case r.JobCreated(job_id=job_id, settings=s):
            nodes = f"{s.nodes_min}" if s.nodes_min == s.nodes_max else f"{s.nodes_min} to {s.nodes_max}"
            return f"job {job_id} created for {nodes} node{'s' * (s.nodes_max > 1)}, {s.restarts_max} restarts allowed"
        case r.TermBegan(term=term):
            return "the master is up" if term == 1 else f"the master is up again (term {term})"
        case r.NodeJoined(node_id=node_id, info=info):
            return f"node {node_id} joined with {info.workers} worker{'s' * (info.workers > 1)} ({info.host})"
        case r.NodeLost(node_id=node_id, why=why):
            return f"node {node_id} is lost: {why}"
        case r.NodeDraining(node_id=node_id, why=why):
            return f"node {node_id} is leaving: {why}"
        case r.NodeLeft(node_id=node_id):
            return f"node {node_id} has left"
        case r.GatheringBegan(at=at, deadline=deadline, why=why):
            return f"{why}: waiting for up to {deadline - at:.0f} s"
        case r.ViewFormed(view=view, why=why):
            size = f"{view.world_size} ranks on {len(view.members)} node{'s' * (len(view.members) > 1)}"
            return f"view {view.number} formed: {size} ({why})"
        case r.NodeStarted(node_id=node_id, view=view_number):
            return f"workers of {node_id} run in view {view_number}"
        case r.WorkerDone(node_id=node_id, local_rank=local_rank):
            return f"worker {local_rank} of {node_id} succeeded"
        case r.WorkerLost(failure=failure, late=late):
            return f"{describe(failure)}{' (in the view before)' if late else ''}"
        case r.IncidentOpened(number=number, cause=cause):
            return f"incident {number}: {cause}"
        case r.IncidentDecided(number=number, strategy=strategy, why=why):
            return f"incident {number}: {strategy.value}, as {why}"
        case r.IncidentClosed():
            return receipt(record)
        case r.JobFinished(outcome=outcome, why=why):
            return f"the job {outcome.value}: {why}"
        case r.LinkLost(node_id=node_id):
            return f"the connection to {node_id} broke"
        case r.LinkRestored(node_id=node_id):
            return f"{node_id} is connected again"
        case r.StoreReady(node_id=node_id, port=port):
            return f"{node_id} has a store ready on port {port}"
        case r.NodeRefused(node_id=node_id, why=why):
            return f"{node_id} was refused: {why}"
        case _:
            assert_never(record)


def receipt(record: r.IncidentClosed) -> str:
    """A recovery in one line: cause, strategy, and where the time went."""
    phases = ", ".join(f"{name} {duration_s * 1000:.0f} ms" for name, duration_s in phase_durations(record))
    total_s = record.at - record.happened_at
    folded = f"; {record.collateral} collateral failure{'s' * (record.collateral > 1)}" if record.collateral else ""
    return (
        f"incident {record.number} over after {total_s * 1000:.0f} ms ({phases}): {record.cause};"
        f" {record.strategy.value}, view {record.view_before} → {record.view_after},"
        f" {record.restarts_used} restart{'s' * (record.restarts_used != 1)} used{folded}"
    )


def phase_durations(record: r.IncidentClosed) -> list[tuple[str, float]]:
    """How long each phase took, in seconds: they add up to the whole."""
    marks = [
        ("detected", record.detected_at),
        ("decided", record.decided_at),
        ("rebuilt", record.rebuilt_at),
        ("workers up", record.at),
    ]
    durations, last = [], record.happened_at
    for name, at in marks:
        at = max(at, last)  # a phase that was skipped takes no time
        durations.append((name, at - last))
        last = at
    return durations


def failure_report(failure: Failure) -> str:
    """A failure for a person at the end of a run: who and how, then the traceback or the last lines."""
    lines = [f"root cause: {describe(failure)}"]
    facts = [
        ("node", failure.node_id),
        ("rank", f"{failure.rank} (local {failure.local_rank}), process {failure.pid}, view {failure.view}"),
        ("exit code", str(failure.exit_code)),
        ("error file", failure.error_file),
        ("log", failure.log_file),
    ]
    lines += [f"  {name}: {value}" for name, value in facts if value]
    if failure.traceback:
        lines += ["", *failure.traceback.rstrip().splitlines()]
    elif failure.log_tail:
        lines += ["", "last lines of its log:", *(f"  {line}" for line in failure.log_tail)]
    return "\n".join(lines)
