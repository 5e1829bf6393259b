"""What the rungs of the ladder were tried for in the open incident, and which are tried out. Pure.

A try of a rung is held against what it was meant to cure, not against the rung: in a burst of independent faults each
is answered as if it were alone. Counted is each of the following, and a rung that was tried `rung_tries_max` times for
one of those of the present problem is tried out for it:

    a worker that failed, or whose step did     its rank; its node; its error, whichever rank it comes to next, unless
                                                another process ended it
    a hang                                      any hang, twice as often: it may have been another rank's
    connections broke, for an unknown reason    as one failure, until a view answers something that is known

The loss of a node is held against that node: one that was lost `rung_tries_max` times in an incident takes no other's
place before it is over. So a burst ends a job only when no node is left to stand in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from holdfast.core.assess import failure_signature, hang_signatures, own_errors, signature_of, staying
from holdfast.core.blame import without_numbers
from holdfast.core.faults.failures import describe_end, is_collateral, is_from_outside
from holdfast.core.records import WorkersStalledRecord
from holdfast.core.state import Draining, Incident, JobState
from holdfast.core.state_coverage import WorkerKey
from holdfast.core.strategies import Strategy

HANG = "a hang"
UNKNOWN = "connections broke"
HANG_TIMES = 2


class Symptom(NamedTuple):
    """What is wrong with a worker."""

    signature: str
    """The same if the same failure comes to the same rank again; empty if another process ended it."""
    subjects: frozenset[str]
    """What a try is held against."""


def symptoms(job: JobState) -> dict[WorkerKey, Symptom]:
    """Return what is wrong with each worker that failed, or whose step did, by itself, on a node that stays."""
    found: dict[WorkerKey, Symptom] = {}
    for worker, failure in job.progress.failed.items():
        if is_collateral(failure) or staying(job, job.members[worker[0]]) is None:
            continue
        subjects = {f"rank {failure.rank}", f"node {failure.node_id}"}
        if is_from_outside(failure):
            found[worker] = Symptom("", frozenset(subjects))
            continue
        error = f"{describe_end(failure.end)}: {without_numbers(f'{failure.exception} {failure.message}')}"
        found[worker] = Symptom(failure_signature(failure), frozenset({*subjects, error}))
    for worker, step_error in own_errors(job).items():
        error = without_numbers(f"{step_error.exception} {step_error.message}")
        subjects = {f"rank {step_error.rank}", f"node {worker[0]}", error}
        if staying(job, job.members[worker[0]]):
            found[worker] = Symptom(signature_of(step_error), frozenset(subjects))
    return found


def subjects(job: JobState, stall: Mapping[str, WorkersStalledRecord] | None = None) -> frozenset[str]:
    """Return what a try to mend the view is held against."""
    found = frozenset(subject for symptom in symptoms(job).values() for subject in symptom.subjects)
    if hang_signatures(job, stall):
        found |= {HANG}
    return found or (frozenset() if lost_members(job) else frozenset({UNKNOWN}))


def lost_members(job: JobState) -> list[str]:
    """Return the members of the view that are gone and were not asked to go."""
    return [
        m.node_id
        for m in sorted((job.members[node_id] for node_id in job.sets.off), key=lambda member: member.group_rank)
        if not ((node := job.live(m.node_id, m.incarnation)) and isinstance(node.standing, Draining))
    ]


def is_tried_out(job: JobState, strategy: Strategy) -> bool:
    """Return whether the rung was tried often enough for what is wrong with the view."""
    return _is_tried_out_for(job, strategy, subjects(job)) if job.incidents.current else False


def may_cure(job: JobState, strategy: Strategy, node_id: str) -> bool:
    """Return whether the rung may be tried for the dead workers of one node: it has not failed to cure them before."""
    incident = job.incidents.current
    if incident is None:
        return True
    known = [symptom for (where, _), symptom in symptoms(job).items() if where == node_id]
    if any((strategy, symptom.signature) in incident.answered for symptom in known):
        return False
    return not _is_tried_out_for(job, strategy, {subject for symptom in known for subject in symptom.subjects})


def is_given_up(job: JobState, node_id: str) -> bool:
    """Return whether the node was lost so often in this incident that it takes no other's place."""
    incident = job.incidents.current
    return incident is not None and incident.losses.get(node_id, 0) >= job.settings.rung_tries_max


def _is_tried_out_for(job: JobState, strategy: Strategy, wrong: Iterable[str]) -> bool:
    incident, tries_max = job.incidents.current, job.settings.rung_tries_max
    if incident is None:
        return False
    return any(
        incident.tries_for.get((strategy, subject), 0) >= tries_max * (HANG_TIMES if subject == HANG else 1)
        for subject in wrong
    )


def record_try(job: JobState, incident: Incident, strategy: Strategy) -> None:
    """Count a try for what is wrong with the view that it leaves behind. Only evolve calls this."""
    wrong = subjects(job, job.stall_if(job.members))
    for subject in wrong:
        incident.tries_for[(strategy, subject)] = incident.tries_for.get((strategy, subject), 0) + 1
    if UNKNOWN not in wrong:
        incident.tries_for = {key: count for key, count in incident.tries_for.items() if key[1] != UNKNOWN}
    incident.losses = dict(Counter(incident.losses) + Counter(lost_members(job)))
