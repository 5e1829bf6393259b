"""Each record as one sentence: the same in the log, in `holdfast events`, in the API and on the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from holdfast.core import records as r
from holdfast.core.durability import Durability
from holdfast.core.events import DataSource
from holdfast.core.faults.failures import Failure, describe, describe_error
from holdfast.core.faults.fault_types import describe_fault
from holdfast.core.health.findings import LinkVerdict, NodeVerdict
from holdfast.core.health.peer_links import broken_sentence
from holdfast.core.health.verdicts import milliseconds
from holdfast.core.shard_leases import Lease, ShardProblem
from holdfast.core.wording import bracketed, counted, explained

STRETCHES_SHOWN_MAX = 5


def sentence(record: r.Record) -> str:
    """Return the record as a sentence for people."""
    match record:
        case r.JobCreated(job_id=job_id, settings=s):
            nodes = f"{s.nodes_min}" if s.nodes_min == s.nodes_max else f"{s.nodes_min} to {s.nodes_max}"
            noun = f"node{'s' * (s.nodes_max != 1)}"
            return f"job {job_id} created for {nodes} {noun}, {counted(s.restarts_max, 'restart')} allowed"
        case r.TermBegan(term=term):
            return "the master has started" if term == 1 else f"the master has restarted (term {term})"
        case r.NodeJoined(node_id=node_id, info=info):
            known = record.reputation
            but = f"; machine {info.machine or info.host} is {known.grade.value}: {known.why}" if known.why else ""
            return f"node {node_id} joined with {counted(info.workers, 'worker')} ({info.host}){but}"
        case r.NodeReputationChanged(node_id=node_id, reputation=reputation):
            return explained(f"node {node_id} may take part again", reputation.why or "its machine was let back")
        case r.NodeAdmitted(node_id=node_id, why=why):
            return explained(f"node {node_id} is admitted as a last resort", why)
        case r.NodeCordoned(node_id=node_id, machine=machine, lasting=lasting, why=why):
            beyond = f"machine {machine} is cordoned" if lasting else f"machine {machine} is on probation"
            return f"{explained(f'node {node_id} is evicted', why)}; {beyond}"
        case r.NodeCleared(node_id=node_id, machine=machine, why=why):
            return explained(f"node {node_id} (machine {machine}) was not at fault", why)
        case r.NodeLost(node_id=node_id, why=why):
            return explained(f"node {node_id} is lost", why)
        case r.NodeDraining(node_id=node_id, why=why):
            return explained(f"node {node_id} is leaving", why)
        case r.NodeLeftRecord(node_id=node_id):
            return f"node {node_id} has left"
        case r.GatheringBegan(at=at, deadline=deadline, why=why):
            wait = f"waiting for up to {deadline - at:.0f} s"
            return f"{why}: {wait}" if why else wait
        case r.ViewFormed(view=view, why=why):
            size = f"{counted(view.world_size, 'rank')} on {counted(len(view.members), 'node')}"
            return f"view {view.number} formed: {size}{bracketed(why)}"
        case r.WorkersStartedRecord(node_id=node_id, view=view_number):
            return f"workers of {node_id} started in view {view_number}"
        case r.WorkerSucceededRecord(node_id=node_id, local_rank=local_rank):
            return f"worker {local_rank} of {node_id} succeeded"
        case r.WorkerFailedRecord(failure=failure, late=late):
            return f"{describe(failure)}{' (in an earlier view)' if late else ''}"
        case r.ViewJoinedRecord(node_id=node_id, view=view_number):
            return f"workers of {node_id} joined view {view_number} with state"
        case r.SessionRevisedRecord(session=session):
            own = (
                "each rank has state of its own"
                if session.per_rank
                else "ranks with the same shard have the same state"
            )
            fixed = f"; the number of workers is fixed: {session.why_fixed}" if session.why_fixed else ""
            return f"the workers' state changed: {own}{fixed}"
        case r.StepInterruptedRecord(node_id=node_id, step_error=step_error):
            error = describe_error(step_error.exception, step_error.message)
            what = f"rank {step_error.rank} on {node_id} was interrupted in step {step_error.step}"
            return explained(f"{what} and waits for the next view", error)
        case r.WorkersStalledRecord(node_id=node_id, stalled_s=stalled_s):
            return f"no progress on {node_id} for {stalled_s:.1f} s"
        case r.WorkersMovedRecord(node_id=node_id):
            return f"progress on {node_id} again"
        case r.WorkersWaitingRecord(node_id=node_id, waiting_s=waiting_s):
            return f"all workers of {node_id} have waited for other ranks for {waiting_s:.1f} s"
        case r.WaitEnded(node_id=node_id):
            return f"the workers of {node_id} wait no longer"
        case r.TrainingClosedRecord(view=view_number, step=step):
            return f"training closed after {counted(step, 'step')}, in view {view_number}"
        case r.StepCommittedRecord(view=view_number, step=step, repeats=repeats):
            again = repeated_sentence(repeats)
            return f"step {step} is committed, the first of view {view_number}{again and '; '}{again}"
        case r.TrainingResumed(step=step, source=source):
            return f"resumed at step {step} from {source}"
        case r.JobResized(nodes=nodes, why=why):
            return explained(f"the job is resized to {counted(nodes, 'node')}", why)
        case r.DataAnnouncedRecord(sources=sources):
            return "; ".join(_source(one) for one in sources) or "no loader is tracked"
        case r.DataSkippedRecord(name=name, first_step=first, end_step=end, why=why):
            steps = f"step {first}" if end - first == 1 else f"steps {first} to {end - 1}"
            return explained(f"{name or 'the loader'} skips {steps}", why)
        case r.StepsAudited():
            return _audited(record)
        case r.SamplesReportedRecord(parts=parts):
            return f"{counted(len(parts), 'sample report')} received"
        case r.ShardsLeased(stream=stream, leases=leases):
            return f"{stream}: {leased(leases)}"
        case r.ShardFailed(stream=stream, problem=problem):
            return f"{stream}: {unread(problem)}; it will be retried ({problem.tries} failed so far)"
        case r.ShardQuarantined(stream=stream, problem=problem):
            tries = f"{problem.tries} {'try' if problem.tries == 1 else 'tries'}"
            return f"{stream}: {unread(problem)}; it is quarantined for this epoch, after {tries}"
        case r.StepTimesReportedRecord(node_id=node_id, step_times=step_times):
            return f"{node_id} reported the step times of {counted(len(step_times), 'worker')}"
        case r.CollectivesRetriedRecord(node_id=node_id, retries=retries):
            return f"a connection of {node_id} broke; run again: {counted(sum(retries.values()), 'collective')}"
        case r.StragglerFound(node_id=node_id, rank=rank, own_s=own_s, usual_s=usual_s):
            times = f"{own_s / usual_s:.1f} times as long" if usual_s > 0 else "longer"
            return (
                f"rank {rank} on {node_id} is a straggler: {own_s * 1000:.1f} ms a step before its first collective,"
                f" {times} as the others ({usual_s * 1000:.1f} ms)"
            )
        case r.CountersReadRecord(node_id=node_id, readings=readings):
            return f"device counters of {node_id}: {'; '.join(readings) or 'nothing is wrong'}"
        case r.AnomalyFound(rank=rank, step=step, outcome=outcome):
            what = record.what or "odd numbers"
            ends = {
                "repeated": f"{what}: the step is repeated",
                "passed": "the values are normal after the step was repeated",
                "skipped": f"{what}, again: the batch is skipped, the step has no update",
                "kept": f"{what}, again: the step is kept as it is",
                "stopped": f"{what}, again: the job stops",
            }
            return f"step {step}, rank {rank}: {ends.get(outcome, what + bracketed(outcome))}"
        case r.SparesChangedRecord(node_id=node_id, parked=parked):
            return f"{node_id} has {counted(parked, 'spare')} parked"
        case r.ImagesReportedRecord(node_id=node_id, images=images):
            return f"{node_id} holds {counted(len(images), 'part')} of the state"
        case r.DurabilityChanged(durability=durability):
            return f"the state is safe: {safe(durability)}"
        case r.CheckpointPublishedRecord(step=step, url=url):
            return f"checkpoint of step {step} is published: {url}"
        case r.CheckConcluded():
            return _checked(record)
        case r.NodeSuspected(node_id=node_id, why=why):
            return explained(f"node {node_id} is suspected and must be checked", why)
        case r.NodeReadmitted(node_id=node_id, why=why):
            return explained(f"node {node_id} is readmitted", why)
        case r.LinkProbeBegan(view=view_number):
            return f"the nodes of view {view_number} are asked whom they cannot reach"
        case r.PeerLinksProbedRecord(node_id=node_id, unreachable=()):
            return f"{node_id} reaches its neighbours"
        case r.PeerLinksProbedRecord(node_id=node_id, unreachable=unreachable):
            return f"{node_id} cannot reach {', '.join(unreachable)}"
        case r.PeerLinksJudged(links=links, left_out=left_out, why_kept=why_kept):
            if not links:
                return "the nodes reach each other: no link is the cause"
            out = f"{', '.join(left_out)} {'is' if len(left_out) == 1 else 'are'} left out"
            outcome = out if left_out else f"no node is left out: {why_kept}"
            return f"{broken_sentence(links)}; {outcome}"
        case r.PeerLinksRestored(node_id=node_id):
            return f"node {node_id} reaches the others again and may take part"
        case r.PeerLinkSlowedRecord(node_id=node_id, peer=peer, taken_s=taken_s, usual_s=usual_s):
            times = f"{taken_s * 1000:.0f} ms for a small transfer, {usual_s * 1000:.1f} ms is usual"
            return f"the link {node_id} – {peer} is slow: {times}"
        case r.CheckupBegan(why=why, incarnations=incarnations):
            return explained(f"checking {counted(len(incarnations), 'node')}", why)
        case r.RoundBegan(round=number, tasks=tasks):
            return f"round {number} of the check: {counted(len(tasks), 'node')}"
        case r.NodeCheckedRecord(node_id=node_id, round=number):
            return f"{node_id} completed round {number} of the check"
        case r.CheckupDropped(why=why):
            return explained("the check of nodes is cancelled", why)
        case r.IncidentOpened(number=number, kind=kind, cause=cause):
            return explained(f"{incident_noun(kind)} {number}", cause)
        case r.IncidentDecided(number=number, kind=kind, strategy=strategy, why=why):
            reason = f", because {why}" if why else ""
            return f"{incident_noun(kind)} {number}: {strategy.value}{reason}"
        case r.NodesAwaited(at=at, number=number, deadline=deadline, why=why):
            wait = f"the others hold their state and wait for a replacement, for up to {deadline - at:.0f} s"
            return f"{explained(f'incident {number}', why)}; {wait}"
        case r.IncidentClosed():
            return receipt(record)
        case r.JobFinished(outcome=outcome, why=why):
            return explained(f"the job {outcome.value}", why)
        case r.LinkBrokeRecord(node_id=node_id):
            return f"the connection to {node_id} broke"
        case r.LinkRestored(node_id=node_id):
            return f"{node_id} is connected again"
        case r.StepEchoRecord(node_id=node_id, local_rank=local_rank):
            return f"worker {local_rank} on {node_id} was interrupted too"
        case r.WorkerFailingRecord(node_id=node_id, local_rank=local_rank, message=message):
            why = f": {message}" if message else ""
            return f"worker {local_rank} of {node_id} has failed and its process is about to end{why}"
        case r.StoreOfferedRecord(node_id=node_id, port=port):
            return f"{node_id} has a store ready on port {port}"
        case r.NodeRefused(node_id=node_id, why=why):
            return explained(f"{node_id} was refused", why)
        case _:
            assert_never(record)


def safe(durability: Durability) -> str:
    """Return which step survives which loss."""
    known = [
        (durability.memory, "in memory (survives all workers)"),
        (durability.elsewhere, "on a second node (survives a node)"),
        (durability.storage, "on storage (survives the job)"),
    ]
    said = [f"step {step} {where}" for step, where in known if step >= 0]
    return ", ".join(said) or "only in the workers' memory"


def _checked(record: r.CheckConcluded) -> str:
    bad = [node_sentence(verdict) for verdict in record.nodes if verdict.fitness != "fit"]
    bad += [link_sentence(link) for link in record.links]
    found = "; ".join(bad) or ("it is fit" if len(record.nodes) == 1 else "all are fit")
    if not record.nodes:
        found = "; ".join(bad) or "none was checked"
    return f"checked {counted(len(record.nodes), 'node')} in {record.took_s:.1f} s{bracketed(record.why)}: {found}"


def incident_noun(kind: r.IncidentKind) -> str:
    """Return what a person calls it: what is done by plan, as a node that joins or is drained, is no incident."""
    return "change" if kind == "planned" else "incident"


def _source(source: DataSource) -> str:
    size, batch = counted(source.size, "sample"), f"{source.global_batch_size:,} a step"
    return explained(source.name or "data", f"{size}, {batch}, seed {source.seed or 'none'}")


def node_sentence(verdict: NodeVerdict) -> str:
    """Return a verdict on a node."""
    left_out = ", and is excluded" if verdict.is_left_out else ""
    return f"node {verdict.node_id} is {verdict.fitness}{left_out}{f': {verdict.why}' if verdict.why else ''}"


def measured_sentence(verdict: NodeVerdict) -> str:
    """Return all that was measured of a node, and what was expected."""
    cells = [
        f"{m.stage}{f' with {m.partner}' if m.partner else ''} {milliseconds(m.value_s)}"
        f" (expected {milliseconds(m.expected_s)}{', SLOW' if m.is_slow else ''})"
        for m in verdict.measured
    ]
    return f"{verdict.node_id} is {verdict.fitness}: {', '.join(cells) or 'nothing was measured'}"


def link_sentence(link: LinkVerdict) -> str:
    """Return a verdict on the link between two nodes."""
    return f"the link between {link.first} and {link.second} is {link.state}: {link.why}"


def _audited(record: r.StepsAudited) -> str:
    is_one = record.first_step == record.last_step
    steps = f"step {record.first_step}" if is_one else f"steps {record.first_step} to {record.last_step}"
    steps += f": {counted(record.samples, 'sample')} audited"
    skipped = f", skipped {stretches(record.skipped)}" if record.skipped else ""
    missing = f", UNKNOWN {stretches(record.unaudited)}" if record.unaudited else ""
    return steps + skipped + missing


def stretches(pairs: Sequence[tuple[int, int]]) -> str:
    """Return (first, last) pairs as text."""
    shown = [f"{first}" if first == last else f"{first} to {last}" for first, last in pairs[:STRETCHES_SHOWN_MAX]]
    more = f" and {len(pairs) - STRETCHES_SHOWN_MAX} more" if len(pairs) > STRETCHES_SHOWN_MAX else ""
    return ", ".join(shown) + more


def leased(leases: Sequence[Lease]) -> str:
    """Return which slot reads which shard."""
    if not leases:
        return "no shard is read"
    shown = [
        f"slot {lease.slot} reads {lease.shard} in epoch {lease.epoch}"
        + (f" from record {lease.first:,} on" if lease.first else "")
        for lease in leases[:STRETCHES_SHOWN_MAX]
    ]
    more = f" and {len(leases) - STRETCHES_SHOWN_MAX} more" if len(leases) > STRETCHES_SHOWN_MAX else ""
    return ", ".join(shown) + more


def unread(problem: ShardProblem) -> str:
    """Return what could not be read, and why."""
    what = f"{problem.shard} could not be read from record {problem.cursor:,} on in epoch {problem.epoch}"
    return f"{what}: {problem.why}" if problem.why else what


def repeated_sentence(steps: int) -> str:
    """Return how many committed steps are repeated; empty if none is."""
    if not steps:
        return ""
    what = "1 committed step is" if steps == 1 else f"{steps} committed steps are"
    return f"{what} repeated, as the state after {'it' if steps == 1 else 'them'} was lost"


def receipt(record: r.IncidentClosed) -> str:
    """Return a recovery in one line: cause, strategy, and how long each phase took."""
    phases = ", ".join(f"{name} {duration_s * 1000:.0f} ms" for name, duration_s in phase_durations(record))
    total_s = record.at - record.happened_at
    folded = f"; {counted(record.collateral, 'collateral failure')}" if record.collateral else ""
    closed = f"{incident_noun(record.kind)} {record.number} closed after {total_s * 1000:.0f} ms ({phases})"
    return (
        f"{explained(closed, record.cause)};"
        f" {record.strategy.value}, view {record.view_before} → {record.view_after},"
        f" {_outcome(record)}{folded}"
    )


def _outcome(record: r.IncidentClosed) -> str:
    if record.step >= 0:
        return f"step {record.step} committed"
    return f"{counted(record.restarts_used, 'restart')} used"


def phase_durations(record: r.IncidentClosed) -> list[tuple[str, float]]:
    """Return how long each phase took, in seconds; they add up to the total."""
    marks = [("detected", record.detected_at), ("decided", record.decided_at), ("rebuilt", record.rebuilt_at)]
    if record.step < 0:
        marks.append(("workers up", record.at))
    else:
        marks += [("restored", record.restored_at), ("first step", record.at)]
    durations, last = [], record.happened_at
    for name, at in marks:
        at = max(at, last)  # a phase that was skipped takes no time
        durations.append((name, at - last))
        last = at
    return durations


def failure_report(failure: Failure) -> str:
    """Return what is known of the failure that ended a run: where it was, then its traceback or its last lines. What it
    was is the last line of the run, which follows."""
    process = f"local rank {failure.local_rank}, process {failure.pid}, view {failure.view}"
    step = f", in step {failure.step}" if failure.step >= 0 else ""
    lines = [f"root cause: rank {failure.rank} on {failure.node_id} ({process}){step}"]
    facts = [
        ("fault", describe_fault(failure.fault) if failure.fault else ""),
        ("error file", failure.error_file),
        ("log", failure.log_file),
    ]
    lines += [f"  {name}: {value}" for name, value in facts if value]
    if failure.traceback:
        lines += ["", *failure.traceback.rstrip().splitlines()]
    elif failure.log_tail:
        lines += ["", "last lines of its log:", *(f"  {line}" for line in failure.log_tail)]
    return "\n".join(lines)
