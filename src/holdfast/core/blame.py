"""Whose fault it is, and what follows from it for the ladder. Pure.

the script's      A script that a session refuses (ScriptError) ends the job at once.
                  The same exception at the same step twice is a bug: a third time would be the same. The job stops,
                  with a checkpoint of the last committed step if that can be had, whatever restarts are left.
                  But not if only workers raised it that the recovery under way had brought in.
a node's          The node leaves the job, so that nothing is started on it again; for good (until a person lets it
                  back) if the fault is critical or the user's monitor says so. Within limits: the job keeps its
                  minimum of nodes, and at most `--cordon-limit` nodes a day are evicted, a share of
                  the view's with a floor. One that must be kept is treated as if its process had failed by itself.
no machine's      The same fault on several machines within `same_fault_window_s` is not hardware, which does not
                  fail by appointment: a driver was rolled out, a switch went. No node is evicted for it, and one
                  that was evicted for it a moment before is cleared. So it is with nodes that fall silent.
anything else's   What a kind of fault forbids (fault_types.py) is not tried; the rest of the ladder is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import msgspec

from holdfast.core.faults.failures import SIGNATURE_CHARS_MAX, Failure, is_collateral, is_from_outside
from holdfast.core.faults.fault_types import Blame, Severity
from holdfast.core.health.reputation import DAY_S, Grade
from holdfast.core.records import NodeCordoned
from holdfast.core.state import PAST_FAILURES_MAX, JobState, Node, PastFailure, Present
from holdfast.core.strategies import FailoverStrategy, Strategy, Verdict
from holdfast.core.wording import counted

LOSS = "node-lost"
_CHANGING = re.compile(r"0x[0-9a-fA-F]+|\d+")
"""What differs between two messages of the same error: addresses, process ids, sizes."""


class Eviction(msgspec.Struct, frozen=True):
    """A node that must be evicted."""

    node: Node
    fault: str
    lasting: bool
    why: str


# --- what is kept of a failure


def note(job: JobState, failure: Failure, at: float) -> None:
    """Record what later failures are compared with. Only evolve calls this."""
    if failure.fault is None or is_collateral(failure):
        return
    noted = PastFailure(
        at=at,
        rank=failure.rank,
        pid=failure.pid,
        machine=machine_of(job, failure.node_id),
        fault=failure.fault.name,
        is_of_node=failure.fault.blame is Blame.NODE,
        signature=signature_of(failure),
        step=failure.step,
        attempt=attempt_of(job, failure),
        is_newcomer=is_newcomer(job, failure),
    )
    job.incidents.past_failures = [*job.incidents.past_failures[-PAST_FAILURES_MAX + 1 :], noted]


def record_node_loss(job: JobState, node_id: str, at: float) -> None:
    """Record that a node fell silent: if others do at the same moment, the network was at fault. Only evolve calls
    this."""
    noted = PastFailure(
        at=at, rank=-1, pid=-1, machine=machine_of(job, node_id), fault=LOSS, is_of_node=False, signature="", step=-1
    )
    job.incidents.past_failures = [*job.incidents.past_failures[-PAST_FAILURES_MAX + 1 :], noted]


def signature_of(failure: Failure) -> str:
    """Return an exception in a form that is the same when it happens again."""
    return without_numbers(f"{failure.exception}: {failure.message}") if failure.exception else ""


def without_numbers(text: str) -> str:
    """Return a text without what differs between two messages of the same error."""
    return _CHANGING.sub("#", text)[:SIGNATURE_CHARS_MAX]


def machine_of(job: JobState, node_id: str) -> str:
    """Return the name by which a node's machine is known across jobs."""
    node = job.nodes.get(node_id)
    return node.machine if node else node_id


# --- the script's


def refusal(job: JobState) -> str:
    """Return why the job is to end without another try: a session cannot run its script. Empty if it can."""
    refused = any(failure.fault and failure.fault.name == "script-refused" for failure in job.progress.failed.values())
    return "the script must be changed first, so it is not retried" if refused else ""


def bug(job: JobState) -> str:
    """Return why the job must stop: the same exception in the same step twice. Empty if that has not happened."""
    for failure in job.progress.failed.values():
        signature = signature_of(failure)
        if failure.blame is not Blame.USER_CODE or failure.step < 0 or not signature:
            continue
        same = [
            n
            for n in job.incidents.past_failures
            if (n.signature, n.step) == (signature, failure.step) and _was_before(job, n, failure)
        ]
        if same and not (is_newcomer(job, failure) and all(n.is_newcomer for n in same)):
            return (
                f"the same exception in step {failure.step} twice is a bug, which a retry would hit again"
                f" ({failure.exception})"
            )
    return ""


def is_newcomer(job: JobState, failure: Failure) -> bool:
    """Return whether the worker was started by the recovery under way, before any step was committed. An exception that
    only such workers raise is no bug in the step: the others have not raised it."""
    incident = job.incidents.current
    if incident is None or failure.view <= incident.view_before:
        return False
    return (failure.node_id, failure.local_rank) in incident.newcomers


def is_failed_newcomer(job: JobState, failure: Failure) -> bool:
    """Return whether a worker that the recovery started has failed for a reason of its own."""
    return is_newcomer(job, failure) and not is_collateral(failure) and not is_from_outside(failure)


def attempt_of(job: JobState, failure: Failure) -> int:
    """Return the view in which the failed step was tried. A worker that has not joined the view under which its failure
    is reported has not tried anything in it: its process took longer to end than the view to come."""
    is_of_this_view = job.view is not None and failure.view == job.view.number
    has_joined = failure.node_id in job.progress.joined or job.progress.first_committed >= 0
    return failure.view if has_joined or not is_of_this_view else failure.view - 1


def _was_before(job: JobState, noted: PastFailure, failure: Failure) -> bool:
    """Return whether an earlier failure belongs to an earlier attempt at the step. All ranks may raise in one attempt,
    and some are reported under the view that answers the first of them. But a rank that fails again has tried again.
    No clock is asked: the nodes' differ."""
    if noted.rank == failure.rank:
        return noted.pid != failure.pid
    return noted.attempt < attempt_of(job, failure)


def forbidden(job: JobState) -> dict[Strategy, str]:
    """Return the strategies that would not help, each with the fault that rules it out."""
    return {
        strategy: failure.fault.name
        for failure in job.progress.failed.values()
        if failure.fault and not is_collateral(failure)
        for strategy in failure.fault.forbids
    }


# --- a node's


def to_evict(job: JobState, now: float) -> Eviction | None:
    """Return a node that must be evicted now, or None."""
    return next((found for found in _accused(job) if not why_not_evicted(job, found, now)), None)


def why_not_evicted_note(job: JobState, now: float) -> str:
    """Return why nodes at fault stay all the same; empty if there are none."""
    return "; ".join(
        f"node {found.node.node_id} is not evicted though at fault ({found.fault}): {why}"
        for found in _accused(job)
        if (why := why_not_evicted(job, found, now))
    )


def _accused(job: JobState) -> Iterator[Eviction]:
    for failure in job.progress.failed.values():
        node = job.nodes.get(failure.node_id)
        if node is None or not isinstance(node.standing, Present):
            continue
        if failure.advice is FailoverStrategy.NODE_FAILOVER:
            why = "its worker failed, and the failover extension blames the node"
            yield Eviction(node, failure.fault.name if failure.fault else "", False, why)
        elif is_of_node(job, failure):
            assert failure.fault is not None
            is_asked = failure.verdict is Verdict.CORDON
            why = f"{failure.fault.name}: {failure.fault.meaning}{', by the error monitor' * is_asked}"
            yield Eviction(node, failure.fault.name, is_asked or failure.fault.severity is Severity.CRITICAL, why)


def is_of_node(job: JobState, failure: Failure) -> bool:
    """Return whether the failure is blamed on its node."""
    return is_evidence(job, failure) and (failure.verdict is Verdict.CORDON or failure.blame is Blame.NODE)


def is_evidence(job: JobState, failure: Failure) -> bool:
    """Return whether the failure may be held against its node at all: it is not collateral, not pardoned, and not seen
    on several machines. An error monitor that blames the node is believed."""
    if failure.fault is None or failure.verdict is Verdict.PARDON or is_collateral(failure):
        return False
    return failure.verdict is Verdict.CORDON or not is_widespread(job, failure.fault.name)


def is_widespread(job: JobState, fault: str) -> bool:
    """Return whether the fault was seen on several machines within the window before its last occurrence."""
    return len(machines_with(job, fault)) > 1


def machines_with(job: JobState, fault: str) -> set[str]:
    """Return the machines on which the fault was seen within the window before its last occurrence."""
    since = seen_since(job, fault)
    return {noted.machine for noted in job.incidents.past_failures if noted.fault == fault and noted.at >= since}


def seen_since(job: JobState, fault: str) -> float:
    """Return the start of the window before the fault's last occurrence."""
    seen = [noted.at for noted in job.incidents.past_failures if noted.fault == fault]
    return seen[-1] - job.settings.same_fault_window_s if seen else 0.0


def why_not_evicted(job: JobState, found: Eviction, now: float) -> str:
    """Return why a node at fault is not evicted; empty if it is."""
    if "failover extension" in found.why:
        return ""  # the user knows what it costs
    others = sum(node is not found.node for node in job.able)
    if others < job.settings.nodes_min:
        return f"{others} of at least {counted(job.settings.nodes_min, 'node')} would remain"
    lately = [c for c in job.incidents.cordons if c.at > now - DAY_S]
    if len(lately) >= cordon_limit(job):
        return f"{counted(len(lately), 'node')} evicted within a day, the limit (--cordon-limit)"
    return ""


def cordon_limit(job: JobState) -> int:
    """Return how many nodes may be evicted within a day."""
    return max(job.settings.cordon_limit, math.ceil(job.settings.cordon_share * len(job.members)))


def wrongly_evicted(job: JobState) -> NodeCordoned | None:
    """Return the eviction of a node for a fault that turned out to be on several machines; None if there is none."""
    cleared, widespread_since = job.incidents.cleared, dict[str, float | None]()
    for cordoned in job.incidents.cordons:
        fault = cordoned.fault
        if not fault or cordoned.incarnation in cleared:
            continue
        if fault not in widespread_since:
            widespread_since[fault] = seen_since(job, fault) if is_widespread(job, fault) else None
        since = widespread_since[fault]
        if since is not None and cordoned.at >= since:
            return cordoned
    return None


def is_excused(job: JobState, failure: Failure) -> bool:
    """Return whether the failure is blamed on a node that is leaving: then it uses up no restart."""
    node = job.nodes.get(failure.node_id)
    is_leaving = node is None or not isinstance(node.standing, Present)
    return is_leaving and (failure.blame is Blame.NODE or failure.verdict is Verdict.CORDON)


def doubtful_nodes(job: JobState) -> frozenset[str]:
    """Return the nodes that should hold no replicas if others can: machines on probation, and those with a fault of
    their own in this job within a day of the last fault."""
    newest = job.incidents.past_failures[-1].at if job.incidents.past_failures else 0.0
    faulty = {n.machine for n in job.incidents.past_failures if n.at > newest - DAY_S and n.is_of_node}
    return frozenset(
        node.node_id for node in job.nodes.values() if node.reputation.grade is not Grade.GOOD or node.machine in faulty
    )
