"""Each record as one sentence: the same in the log, in `holdfast events`, in the API and on the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from holdfast.core import records as r
from holdfast.core.fault_types import describe_fault
from holdfast.core.faults import Failure, describe, describe_error
from holdfast.core.health.findings import LinkVerdict, NodeVerdict
from holdfast.core.health.verdicts import milliseconds
from holdfast.core.kept import Safety
from holdfast.core.leases import Lease, Trouble

STRETCHES_SHOWN_MAX = 5


def sentence(record: r.Record) -> str:
    """What a person should read."""
    match record:
        case r.JobCreated(job_id=job_id, settings=s):
            nodes = f"{s.nodes_min}" if s.nodes_min == s.nodes_max else f"{s.nodes_min} to {s.nodes_max}"
            return f"job {job_id} created for {nodes} node{'s' * (s.nodes_max > 1)}, {s.restarts_max} restarts allowed"
        case r.TermBegan(term=term):
            return "the master is up" if term == 1 else f"the master is up again (term {term})"
        case r.NodeJoined(node_id=node_id, info=info):
            known = record.repute
            but = f"; machine {info.machine or info.host} is {known.grade.value}: {known.why}" if known.why else ""
            return f"node {node_id} joined with {info.workers} worker{'s' * (info.workers > 1)} ({info.host}){but}"
        case r.NodeAdmitted(node_id=node_id, why=why):
            return f"node {node_id} is taken after all: {why}"
        case r.NodeCordoned(node_id=node_id, machine=machine, lasting=lasting, why=why):
            beyond = f"machine {machine} is cordoned" if lasting else f"machine {machine} is on probation"
            return f"node {node_id} is sent away, {why}; {beyond}"
        case r.NodeCleared(node_id=node_id, machine=machine, why=why):
            return f"node {node_id} (machine {machine}) was not to blame: {why}"
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
        case r.NodeSettled(node_id=node_id, view=view_number):
            return f"workers of {node_id} have the state and are in view {view_number}"
        case r.StepBroken(node_id=node_id, stumble=stumble):
            what = f"rank {stumble.rank} on {node_id} left step {stumble.step} and waits for a view"
            return f"{what}: {describe_error(stumble.exception, stumble.message)}"
        case r.WorkersStuck(node_id=node_id, stalled_s=stalled_s):
            return f"nothing has moved on {node_id} for {stalled_s:.1f} s"
        case r.TrainingEnded(view=view_number, step=step):
            return f"all {step} steps are made, in view {view_number}"
        case r.StepProved(view=view_number, step=step):
            return f"step {step} is committed, the first of view {view_number}"
        case r.JobResized(nodes=nodes, why=why):
            return f"the job is to run on {nodes} node{'s' * (nodes > 1)}: {why}"
        case r.DataDescribed(sources=sources):
            return "; ".join(
                f"{s.name}: {s.size:,} samples, {s.global_batch_size:,} a step, seed {s.seed}" for s in sources
            )
        case r.DataSkipped(name=name, first_step=first, end_step=end, why=why):
            return f"{name or 'the loader'} passes over steps {first} to {end - 1}{f': {why}' * bool(why)}"
        case r.StepsWitnessed():
            return _witnessed(record)
        case r.SamplesNoted(parts=parts):
            return f"{len(parts)} witnesses of steps came in"
        case r.ShardsLeased(stream=stream, leases=leases):
            return f"{stream}: {leased(leases)}"
        case r.ShardFailed(stream=stream, trouble=trouble):
            return f"{stream}: {unread(trouble)}; it will be tried again ({trouble.tries} failed so far)"
        case r.ShardQuarantined(stream=stream, trouble=trouble):
            return f"{stream}: {unread(trouble)}; it is in quarantine for this epoch, after {trouble.tries} tries"
        case r.PacesNoted(node_id=node_id, paces=paces):
            return f"{node_id} told how fast its {len(paces)} workers are"
        case r.StragglerFound(node_id=node_id, rank=rank, own_s=own_s, usual_s=usual_s):
            times = f"{own_s / usual_s:.1f} times as long" if usual_s > 0 else "longer"
            return (
                f"rank {rank} on {node_id} is a straggler: {own_s * 1000:.1f} ms a step before its first collective,"
                f" {times} as the others ({usual_s * 1000:.1f} ms)"
            )
        case r.CountersNoted(node_id=node_id, readings=readings):
            return f"by the counters of {node_id}: {'; '.join(readings)}"
        case r.NumbersOdd(rank=rank, step=step, what=what, outcome=outcome):
            ends = {
                "repeated": f"{what}: the step is repeated",
                "passed": "the numbers that were odd are fine, now that the step is repeated",
                "skipped": f"{what}, again: the batch is passed over, the step has no update",
                "kept": f"{what}, again: the step counts as it is",
                "stopped": f"{what}, again: the job stops",
            }
            return f"step {step}, rank {rank}: {ends.get(outcome, f'{what} ({outcome})')}"
        case r.SparesKnown(node_id=node_id, parked=parked):
            return f"{node_id} has {parked} spare{'s' * (parked != 1)} parked"
        case r.StateNoted(node_id=node_id, images=images):
            return f"{node_id} holds {len(images)} part{'s' * (len(images) != 1)} of the state"
        case r.StateSafe(safety=safety):
            return f"the state is safe: {safe(safety)}"
        case r.CheckpointPublished(step=step, url=url):
            return f"checkpoint of step {step} is complete: {url}"
        case r.NodesChecked():
            return _checked(record)
        case r.NodeSuspected(node_id=node_id, why=why):
            return f"node {node_id} is to be checked: {why}"
        case r.NodeReadmitted(node_id=node_id, why=why):
            return f"node {node_id} takes part after all: {why}"
        case r.CheckupBegan(why=why, lives=lives):
            return f"checking {_nodes(len(lives))}: {why}"
        case r.RoundBegan(round=number, tasks=tasks):
            return f"round {number} of the check: {_nodes(len(tasks))}"
        case r.RoundReported(node_id=node_id, round=number):
            return f"{node_id} is through round {number} of the check"
        case r.CheckupDropped(why=why):
            return f"the check of nodes is given up: {why}"
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


def safe(safety: Safety) -> str:
    """What of the state survives what."""
    known = [
        (safety.memory, "in memory (survives all workers)"),
        (safety.elsewhere, "on a second node (survives a node)"),
        (safety.storage, "on storage (survives the job)"),
    ]
    said = [f"step {step} {where}" for step, where in known if step >= 0]
    return ", ".join(said) or "nowhere but in its workers"


def _checked(record: r.NodesChecked) -> str:
    bad = [node_sentence(verdict) for verdict in record.nodes if verdict.fitness != "fit"]
    bad += [link_sentence(link) for link in record.links]
    found = "; ".join(bad) or ("it is fit" if len(record.nodes) == 1 else "all are fit")
    return f"checked {_nodes(len(record.nodes))} in {record.took_s:.1f} s ({record.why}): {found}"


def node_sentence(verdict: NodeVerdict) -> str:
    """A verdict on a node."""
    left_out = ", and is left out" if verdict.is_left_out else ""
    return f"node {verdict.node_id} is {verdict.fitness}{left_out}{f': {verdict.why}' if verdict.why else ''}"


def measured_sentence(verdict: NodeVerdict) -> str:
    """All that was measured of a node, and what was expected."""
    cells = [
        f"{m.stage}{f' with {m.partner}' if m.partner else ''} {milliseconds(m.value_s)}"
        f" (expected {milliseconds(m.expected_s)}{', SLOW' if m.is_slow else ''})"
        for m in verdict.measured
    ]
    return f"{verdict.node_id} is {verdict.fitness}: {', '.join(cells) or 'nothing was measured'}"


def link_sentence(link: LinkVerdict) -> str:
    """A verdict on the link between two nodes."""
    return f"the link between {link.first} and {link.second} is {link.state}: {link.why}"


def _nodes(count: int) -> str:
    return f"{count} node{'s' * (count != 1)}"


def _witnessed(record: r.StepsWitnessed) -> str:
    steps = f"steps {record.first_step} to {record.last_step}: {record.samples:,} samples witnessed"
    skipped = f", skipped {stretches(record.skipped)}" if record.skipped else ""
    missing = f", UNWITNESSED {stretches(record.unwitnessed)}" if record.unwitnessed else ""
    return steps + skipped + missing


def stretches(pairs: Sequence[tuple[int, int]]) -> str:
    """(first, last) pairs for a person."""
    shown = [f"{first}" if first == last else f"{first} to {last}" for first, last in pairs[:STRETCHES_SHOWN_MAX]]
    more = f" and {len(pairs) - STRETCHES_SHOWN_MAX} more" if len(pairs) > STRETCHES_SHOWN_MAX else ""
    return ", ".join(shown) + more


def leased(leases: Sequence[Lease]) -> str:
    """Which slot reads what."""
    shown = [
        f"slot {lease.slot} reads {lease.shard} in epoch {lease.epoch}"
        + (f" from record {lease.first:,} on" if lease.first else "")
        for lease in leases[:STRETCHES_SHOWN_MAX]
    ]
    more = f" and {len(leases) - STRETCHES_SHOWN_MAX} more" if len(leases) > STRETCHES_SHOWN_MAX else ""
    return ", ".join(shown) + more


def unread(trouble: Trouble) -> str:
    """What could not be read, and why."""
    what = f"{trouble.shard} could not be read from record {trouble.cursor:,} on in epoch {trouble.epoch}"
    return f"{what}: {trouble.why}" if trouble.why else what


def receipt(record: r.IncidentClosed) -> str:
    """A recovery in one line: cause, strategy, and where the time went."""
    phases = ", ".join(f"{name} {duration_s * 1000:.0f} ms" for name, duration_s in phase_durations(record))
    total_s = record.at - record.happened_at
    folded = f"; {record.collateral} collateral failure{'s' * (record.collateral > 1)}" if record.collateral else ""
    return (
        f"incident {record.number} over after {total_s * 1000:.0f} ms ({phases}): {record.cause};"
        f" {record.strategy.value}, view {record.view_before} → {record.view_after},"
        f" {_outcome(record)}{folded}"
    )


def _outcome(record: r.IncidentClosed) -> str:
    if record.step >= 0:
        return f"step {record.step} committed"
    return f"{record.restarts_used} restart{'s' * (record.restarts_used != 1)} used"


def phase_durations(record: r.IncidentClosed) -> list[tuple[str, float]]:
    """How long each phase took, in seconds: they add up to the whole."""
    marks = [("detected", record.detected_at), ("decided", record.decided_at), ("rebuilt", record.rebuilt_at)]
    if record.step < 0:
        marks.append(("workers up", record.at))
    else:
        marks += [("restored", record.settled_at), ("first step", record.at)]
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
        ("fault", describe_fault(failure.fault) if failure.fault else ""),
        ("node", failure.node_id),
        ("rank", f"{failure.rank} (local {failure.local_rank}), process {failure.pid}, view {failure.view}"),
        ("step", str(failure.step) if failure.step >= 0 else ""),
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
