"""What is wrong with the view in force: which nodes are gone, which processes died or hang, which steps failed; and
whether the picture is complete.

Why wait for a moment: the first news of a death is often another rank's broken collective. What is known for certain is
acted on at once; what may be the echo of something else is given `collect_window_s`:

    a member is gone, a worker died by itself, a step failed by an error of its own     complete
    only collateral errors, and a worker that has said that its script failed           wait for its end, up to
                                                                                        `ENDING_TIMEOUT_S`
    only collateral errors, and workers that have said nothing                          wait for the cause
    only collateral errors, of every worker there is                                    complete: connections broke;
                                                                                        but wait if the step may not be
                                                                                        tried again, as a cause would
                                                                                        leave more to choose from
    nothing moves on some nodes, and others have not said so                            nothing is wrong: they wait
    nothing moves on any node, by reports that hold until a node says that something    complete: a worker hangs
    moves again

Which worker hangs, of those that have made no progress:

    all that are asleep, while all others wait            proved, so that there is no need to wait any longer
    of those that do not wait for other ranks, the one    ranks of different roles make different numbers of
    that has made the least progress                      collectives, so what counts is who waits
    if all wait: the one that has made the least          a message was lost, or a collective does not match
    if all wait to join a view: no worker                 the view is tried again

The least progress: by view, step, collectives, phase. A worker that is stopped (SIGSTOP) is none of this: its agent
ends it, and it is one that died.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from holdfast.core.events import StepError, WorkerProgress
from holdfast.core.faults.failures import (
    SIGNATURE_CHARS_MAX,
    Failure,
    describe,
    describe_end,
    describe_error,
    is_collateral,
    is_collateral_error,
    is_from_outside,
    root_cause,
)
from holdfast.core.health.peer_links import describe_broken
from holdfast.core.node_sets import what_is_missing
from holdfast.core.records import IncidentKind, WorkerFailingRecord, WorkersStalledRecord
from holdfast.core.state import CutOff, Draining, JobState, Lost, Node, Serving
from holdfast.core.state_coverage import NodeHolders, StateHolder, WorkerKey, missing_shards
from holdfast.core.strategies import Strategy
from holdfast.core.views import Member
from holdfast.core.wording import counted, listed

if TYPE_CHECKING:
    from holdfast.core.rung_plans import RungPlan

ENDING_TIMEOUT_S = 30.0
"""How long the process of a failed script may take to come down: exit handlers, threads, an upload of the last log.
Its agent ends it then."""


class ViewProblem(msgspec.Struct, frozen=True):
    """Why the view cannot stay as it is."""

    kind: IncidentKind
    text: str
    plan: RungPlan | None = None
    """The plan of a planned change. None: choose_strategy.py chooses."""


def fault(job: JobState) -> ViewProblem | None:
    """Return what forces the job to leave the view in force, or None. A member that was asked to leave forces nothing
    as long as it can go at a step boundary (planned_changes.py)."""
    assert job.view is not None
    gone = members_gone(job)
    if lost := [text for text, by_request in gone if not by_request]:
        return ViewProblem("node", listed(lost))
    if text := _worker_problem(job, collateral_counts=not gone):
        return ViewProblem("worker", text)
    if gone and (has_problems(job) or not can_repair_online(job)):
        return ViewProblem("planned", listed([text for text, _ in gone]))
    is_unproved = job.view.keeps_workers and job.progress.first_committed < 0 and not job.progress.succeeded
    if is_unproved and (missing := what_is_missing(job)):
        return ViewProblem("worker", missing)
    return None


def _worker_problem(job: JobState, *, collateral_counts: bool) -> str:
    first = root_cause(job.progress.failed.values())
    cause = _failing_text(job)
    if cause and collateral_counts and has_problems(job) and (first is None or is_collateral(first)):
        return cause
    if first and (collateral_counts or not is_collateral(first)) and not (is_collateral(first) and own_errors(job)):
        return describe(first)
    if errors := own_errors(job):
        (node_id, _), step_error = min(errors.items(), key=lambda item: (item[1].at, item[1].rank))
        return f"rank {step_error.rank} on {node_id} failed in step {step_error.step}: {_error(step_error)}"
    if (broken := describe_broken(job)) and collateral_counts and has_problems(job):
        return broken
    if job.stall and collateral_counts:
        return _stall_text(job)
    if job.progress.interrupted and collateral_counts:
        ranks = sorted(step_error.rank for step_error in job.progress.interrupted.values())
        if len(ranks) == 1:
            return f"connections broke: rank {ranks[0]} was interrupted"
        count = len(ranks) + len(job.progress.echoes)
        return f"connections broke: {counted(count, 'rank')} were interrupted, rank {ranks[0]} first"
    return ""


def _failing_text(job: JobState) -> str:
    """Return which script has failed by an error of its own, where its process has not ended yet; empty if none has."""
    failing = failing_by_themselves(job)
    if not failing:
        return ""
    first = min(failing, key=lambda record: (record.at, record.local_rank))
    rank = job.members[first.node_id].first_rank + first.local_rank
    what = first.message or first.exception
    return f"rank {rank} on {first.node_id} failed{f': {what}' if what else ''}"


def failing_by_themselves(job: JobState) -> list[WorkerFailingRecord]:
    """Return the workers whose scripts have failed and whose processes are about to end, without those that suffer from
    the failure of another."""
    return [one for one in job.progress.failing.values() if not is_collateral_error(one.exception, one.message)]


def members_gone(job: JobState) -> list[tuple[str, bool]]:
    """Return the members of the view that are gone or leaving: what happened, and whether by request. A node whose
    workers have all succeeded is not among them: it may go without cost to the others."""
    assert job.view is not None
    gone: list[tuple[str, bool]] = []
    off = (job.members[node_id] for node_id in job.sets.off)
    for member in sorted(off, key=lambda one: one.group_rank):
        node = job.nodes.get(member.node_id)
        if all((member.node_id, local_rank) in job.progress.succeeded for local_rank in range(member.workers)):
            continue
        if node is None or node.incarnation != member.incarnation:
            gone.append((f"node {member.node_id} was replaced by its next incarnation", False))
        elif isinstance(node.standing, Draining):
            gone.append((f"node {member.node_id} is leaving: {node.standing.why}", True))
        elif not node.alive:
            why = node.standing.why if isinstance(node.standing, Lost) else "it left"
            gone.append((f"node {member.node_id} was lost: {why}", False))
        elif isinstance(node.health, CutOff):
            gone.append((f"node {member.node_id} is left out: {node.health.why}", False))
    return gone


def staying(job: JobState, member: Member) -> Node | None:
    """Return the member's node, if it is alive, not leaving and not left out for a broken link."""
    node = job.live(member.node_id, member.incarnation)
    return node if node and node.stays else None


def is_verdict_pending(job: JobState) -> bool:
    """Return whether a member may be lost: its connection is broken, and it may still come back. With no view in force
    every node counts as one."""
    if not isinstance(job.phase, Serving):
        return bool(job.sets.doubtful)
    return any(_is_of_view(job, node_id) for node_id in job.sets.doubtful)


def is_spare_doubtful(job: JobState) -> bool:
    """Return whether a node that could take a member's place may be lost, or come back in a moment."""
    return any(not _is_of_view(job, node_id) for node_id in job.sets.doubtful)


def _is_of_view(job: JobState, node_id: str) -> bool:
    member = job.members.get(node_id)
    return member is not None and member.incarnation == job.nodes[node_id].incarnation


# --- when the picture is complete


def complete_at(job: JobState, *, can_retry: bool) -> float:
    """Return when to stop waiting for further reports; 0 if there is nothing to wait for."""
    window_over_at = job.progress.failing_since + job.settings.collect_window_s
    if members_gone(job) or own_errors(job) or any(not is_collateral(f) for f in job.progress.failed.values()):
        return 0.0
    if failing := failing_by_themselves(job):
        return min(record.at for record in failing) + ENDING_TIMEOUT_S
    if job.progress.failed:
        return window_over_at
    if job.stall:
        return 0.0
    if job.progress.interrupted:
        assert job.view is not None
        heard = len(job.progress.interrupted) + len(job.progress.echoes)
        return 0.0 if can_retry and heard == job.view.world_size else window_over_at
    return 0.0


# --- whose fault it is


def own_errors(job: JobState) -> dict[WorkerKey, StepError]:
    """Return the interrupted steps that are not collateral of another failure."""
    return {worker: step_error for worker, step_error in job.progress.interrupted.items() if not step_error.collateral}


def suspects(
    job: JobState, stall: Mapping[str, WorkersStalledRecord] | None = None
) -> list[tuple[WorkerKey, WorkerProgress]]:
    """Return the workers that keep the stalled ones waiting; none if something else explains the stall. Several are
    only replaced together where the others hold a complete copy of the state; else the first of them."""
    stall = job.stall if stall is None else stall
    if job.progress.failed or own_errors(job) or members_gone(job) or describe_broken(job):
        return []
    known = [
        (node_id, vector)
        for node_id, stuck in stall.items()
        for vector in stuck.worker_progress
        if node_id in job.members and vector.local_rank < job.members[node_id].workers
    ]
    found = [((node_id, vector.local_rank), vector) for node_id, vector in suspects_among(known)]
    if len(found) > 1 and missing_shards(living_holders(job, [worker for worker, _ in found])):
        return found[:1]
    return found


def suspects_among(known: Collection[tuple[str, WorkerProgress]]) -> list[tuple[str, WorkerProgress]]:
    """Return those, of all that have made no progress, that hang, the one that has made the least progress first. Where
    all wait for one another and several have come equally far, no rank is to blame for its number: none is returned."""
    in_order = sorted(known, key=lambda pair: (*_distance(pair[1]), pair[1].rank))
    if asleep := [pair for pair in in_order if pair[1].asleep]:
        return asleep
    idle = [pair for pair in in_order if not pair[1].waiting]
    stepping = [pair for pair in in_order if not pair[1].joining]
    if not idle and len(stepping) > 1 and _distance(stepping[0][1]) == _distance(stepping[1][1]):
        return []
    return (idle or stepping)[:1]


def _distance(vector: WorkerProgress) -> tuple[int, int, int, int]:
    return (vector.view, vector.step, vector.collectives, vector.phase)


def signatures(job: JobState, stall: Mapping[str, WorkersStalledRecord] | None = None) -> list[str]:
    """Return the current failures in a form that is the same when they happen again. Collateral failures have none."""
    failures = [
        failure_signature(f) for f in job.progress.failed.values() if not is_collateral(f) and not is_from_outside(f)
    ]
    errors = [signature_of(step_error) for step_error in own_errors(job).values()]
    hangs = hang_signatures(job, stall)
    return [*failures, *errors, *hangs]


def failure_signature(failure: Failure) -> str:
    """Return the signature of a failure."""
    text = f"rank {failure.rank}: {describe_end(failure.end)} {failure.exception} {failure.message}"
    return text[:SIGNATURE_CHARS_MAX]


def hang_signatures(job: JobState, stall: Mapping[str, WorkersStalledRecord] | None = None) -> list[str]:
    """Return the signatures of the workers that hang."""
    return [f"rank {vector.rank}: hangs" for _, vector in suspects(job, stall)]


def signature_of(step_error: StepError) -> str:
    """Return the signature of a step error."""
    return f"rank {step_error.rank}: {_error(step_error)}"[:SIGNATURE_CHARS_MAX]


def _error(step_error: StepError) -> str:
    return describe_error(step_error.exception, step_error.message)


def _stall_text(job: JobState) -> str:
    stalled_s = max(stuck.stalled_s for stuck in job.stall.values())
    found = suspects(job)
    if not found:
        return f"no progress for {stalled_s:.1f} s, and no rank has come less far than all others"
    (node_id, _), vector = found[0]
    more = "".join(f"; rank {other.rank} on {where} too" for (where, _), other in found[1:])
    place = f"step {vector.step}, {counted(vector.collectives, 'collective')}"
    if vector.asleep:
        why = f"it sleeps ({place}), and all others wait"
    elif not vector.waiting:
        why = f"it does not wait for other ranks ({place})"
    else:
        why = f"it has made the least progress ({place}) of all, which wait for one another"
    return f"rank {vector.rank} on {node_id} hangs: no progress for {stalled_s:.1f} s, and {why}{more}"


# --- who holds the state


def has_problems(job: JobState) -> bool:
    """Return whether a failure, an interrupted step or a stall was reported in the view."""
    return bool(job.progress.failed or job.progress.interrupted or job.stall)


def ended_workers(job: JobState) -> set[WorkerKey]:
    """Return the workers of the view that are known to have ended."""
    return {*job.progress.failed, *job.progress.succeeded}


def has_ended(job: JobState, worker: WorkerKey) -> bool:
    """Return whether this worker of the view is known to have ended."""
    return worker in job.progress.failed or worker in job.progress.succeeded


def living_holders(
    job: JobState, ended: Collection[WorkerKey] = (), without: Collection[str] = ()
) -> Iterator[StateHolder]:
    """Yield what the live workers hold on nodes that stay, except the workers in `ended` and the nodes in `without`."""
    assert job.view is not None
    all_ended = {*ended, *job.progress.failed, *job.progress.succeeded}
    touched = {node_id for node_id, _ in all_ended}
    for member in job.view.members:
        if member.node_id in without or staying(job, member) is None:
            continue
        is_touched = member.node_id in touched
        for local_rank, holder in enumerate(job.progress.holders.get(member.node_id, ())):
            if holder and not (is_touched and (member.node_id, local_rank) in all_ended):
                yield holder


def holders_without(job: JobState, node_id: str, local_rank: int, number: int) -> NodeHolders:
    """Return what a node's workers hold without a worker of an earlier view. If that is the view just before, the
    worker is recognised by what it held; else no worker that it could be is counted on."""
    assert job.view is not None
    before = job.progress.holders_before.get(node_id, ())
    exact = number == job.view.number - 1 and local_rank < len(before)
    gone = before[local_rank] if exact else None
    return tuple(
        None if holder and holder.view <= number and (not exact or holder == gone) else holder
        for holder in job.progress.holders.get(node_id, ())
    )


def can_repair_online(job: JobState) -> bool:
    """Return whether the view can be repaired without restarting all workers: none has finished, and the live ones that
    do not hang hold a complete copy of the state."""
    if job.state.session is None or job.view is None or not isinstance(job.phase, Serving):
        return False
    if job.progress.succeeded or job.progress.is_closed:
        return False
    hung = [worker for worker, _ in suspects(job)]
    return not (missing_shards(living_holders(job, hung)) if hung else what_is_missing(job))


def is_dumping(job: JobState) -> bool:
    """Return whether the view in force only exists to write a checkpoint and end."""
    return job.view is not None and job.view.strategy is Strategy.DUMP
