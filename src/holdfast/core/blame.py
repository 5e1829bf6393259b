"""Whose fault it is, and what follows from it for the ladder. Pure.

    the script's      The same exception at the same step twice is a bug: a third time would be the same. The job stops,
                      with a checkpoint of the last committed step if that can be had, whatever restarts are left.
    a node's          The node leaves the job, so that nothing is started on it again; for good (until somebody lets it
                      back) if the fault is critical or the user's monitor says so. Within limits: the job keeps its
                      minimum of nodes, and `--cordon-limit` nodes a day are sent away, not more. One that must be kept
                      is treated as if its process had failed by itself.
    everybody's       The same fault on several machines within `same_fault_window_s` is not hardware, which does not
                      fail by appointment: a driver was rolled out, a switch went. Nobody is sent away for it, and who
                      was sent away for it a moment before is cleared. So it is with nodes that fall silent.
    anything else's   What a kind of fault forbids (fault_types.py) is not tried; the rest of the ladder is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from holdfast.core.fault_types import Blame, Severity
from holdfast.core.faults import Failure, is_collateral
from holdfast.core.health.reputation import DAY_S, Grade
from holdfast.core.ladder import FailoverStrategy, Strategy, Verdict
from holdfast.core.state import NOTED_MAX, Job, Node, Noted, Present

LOSS = "node-lost"
MARK_CHARS_MAX = 300
_CHANGING = re.compile(r"0x[0-9a-fA-F]+|\d+")
"""What differs between two messages of the same error: addresses, process ids, sizes."""


class Accusation(msgspec.Struct, frozen=True):
    """A node that is to be sent away."""

    node: Node
    fault: str
    lasting: bool
    why: str


# --- what is kept of a failure


def note(job: Job, failure: Failure, at: float) -> None:
    """Remember what later failures are compared with. Part of evolve."""
    if failure.fault is None or is_collateral(failure):
        return
    noted = Noted(
        at=at,
        rank=failure.rank,
        pid=failure.pid,
        machine=machine_of(job, failure.node_id),
        fault=failure.fault.name,
        is_of_node=failure.fault.blame is Blame.NODE,
        mark=mark_of(failure),
        step=failure.step,
    )
    job.noted = [*job.noted[-NOTED_MAX + 1 :], noted]


def note_loss(job: Job, node_id: str, at: float) -> None:
    """The same of a node that fell silent: if others do at the same moment it was what lies between. Part of evolve."""
    noted = Noted(
        at=at, rank=-1, pid=-1, machine=machine_of(job, node_id), fault=LOSS, is_of_node=False, mark="", step=-1
    )
    job.noted = [*job.noted[-NOTED_MAX + 1 :], noted]


def mark_of(failure: Failure) -> str:
    """An exception in a form that is the same when it comes back."""
    return f"{failure.exception}: {_CHANGING.sub('#', failure.message)}"[:MARK_CHARS_MAX] if failure.exception else ""


def machine_of(job: Job, node_id: str) -> str:
    """The name by which a node's machine is known across jobs."""
    node = job.nodes.get(node_id)
    return node.machine if node else node_id


# --- the script's


def bug(job: Job) -> str:
    """Why the job is to stop: the same exception at the same step twice. Empty if there is no such thing."""
    for failure in job.failed.values():
        mark = mark_of(failure)
        if failure.blame is not Blame.USER_CODE or failure.step < 0 or not mark:
            continue
        if any((n.mark, n.step) == (mark, failure.step) and _was_before(job, n, failure) for n in job.noted):
            return (
                f"the same exception in step {failure.step} twice is a bug, and would come back a third time"
                f" ({failure.exception})"
            )
    return ""


def _was_before(job: Job, noted: Noted, failure: Failure) -> bool:
    """Whether an earlier failure is of an earlier attempt at the step. All ranks may raise in one attempt, and some are
    reported under the view that answers the first of them. But a rank that fails again has tried again; and so has any
    other that raised after the first view that followed."""
    if noted.rank == failure.rank:
        return noted.pid != failure.pid
    answered_at = next((at for at in job.formed_times if at >= noted.at), None)
    return answered_at is not None and failure.failed_at > answered_at


def forbidden(job: Job) -> dict[Strategy, str]:
    """Strategies that would not help, each with the fault that rules it out."""
    return {
        strategy: failure.fault.name
        for failure in job.failed.values()
        if failure.fault and not is_collateral(failure)
        for strategy in failure.fault.forbids
    }


# --- a node's


def accused(job: Job, now: float) -> Accusation | None:
    """A node that is to be sent away now."""
    return next((found for found in _accused(job) if not why_kept(job, found, now)), None)


def kept_note(job: Job, now: float) -> str:
    """Of nodes that are to blame and stay all the same; empty if there are none."""
    return "; ".join(
        f"node {found.node.node_id} stays though it is to blame ({found.fault}): {why}"
        for found in _accused(job)
        if (why := why_kept(job, found, now))
    )


def _accused(job: Job) -> Iterator[Accusation]:
    for failure in job.failed.values():
        node = job.nodes.get(failure.node_id)
        if node is None or not isinstance(node.standing, Present):
            continue
        if failure.advice is FailoverStrategy.NODE_FAILOVER:
            why = "its worker failed, and the failover extension blames the node"
            yield Accusation(node, failure.fault.name if failure.fault else "", False, why)
        elif is_of_node(job, failure):
            assert failure.fault is not None
            is_asked = failure.verdict is Verdict.CORDON
            why = f"{failure.fault.name}: {failure.fault.meaning}{', says the error monitor' * is_asked}"
            yield Accusation(node, failure.fault.name, is_asked or failure.fault.severity is Severity.CRITICAL, why)


def is_of_node(job: Job, failure: Failure) -> bool:
    """Whether the failure is its node's."""
    return is_evidence(job, failure) and (failure.verdict is Verdict.CORDON or failure.blame is Blame.NODE)


def is_evidence(job: Job, failure: Failure) -> bool:
    """Whether the failure may be held against its node at all: it is no echo, not pardoned, and not everybody's. A
    monitor that blames the node knows better."""
    if failure.fault is None or failure.verdict is Verdict.PARDON or is_collateral(failure):
        return False
    return failure.verdict is Verdict.CORDON or not is_widespread(job, failure.fault.name)


def is_widespread(job: Job, fault: str) -> bool:
    """Whether the fault was seen on several machines within the window before its last occurrence."""
    return len(machines_with(job, fault)) > 1


def machines_with(job: Job, fault: str) -> set[str]:
    """Those on which the fault was seen within the window before its last occurrence."""
    since = seen_since(job, fault)
    return {noted.machine for noted in job.noted if noted.fault == fault and noted.at >= since}


def seen_since(job: Job, fault: str) -> float:
    """Where the window before the fault's last occurrence begins."""
    seen = [noted.at for noted in job.noted if noted.fault == fault]
    return seen[-1] - job.settings.same_fault_window_s if seen else 0.0


def why_kept(job: Job, found: Accusation, now: float) -> str:
    """Why a node that is to blame is not sent away; empty if it is."""
    if "failover extension" in found.why:
        return ""  # the user knows what it costs
    others = sum(node is not found.node for node in job.able)
    if others < job.settings.nodes_min:
        return f"{others} of at least {job.settings.nodes_min} nodes would be left"
    lately = [c for c in job.cordons if c.at > now - DAY_S]
    if len(lately) >= job.settings.cordon_limit:
        return f"{len(lately)} nodes were sent away within a day, and no more may be (--cordon-limit)"
    return ""


def wrongly_accused(job: Job) -> str:
    """The node that was sent away for what has turned out to be everybody's fault; empty if there is none."""
    for cordoned in job.cordons:
        is_open = cordoned.node_id not in job.cleared and cordoned.fault
        if is_open and is_widespread(job, cordoned.fault) and cordoned.at >= seen_since(job, cordoned.fault):
            return cordoned.node_id
    return ""


def is_excused(job: Job, failure: Failure) -> bool:
    """Whether the failure is its node's, and the node is on its way out: no restart is used up for it."""
    node = job.nodes.get(failure.node_id)
    is_leaving = node is None or not isinstance(node.standing, Present)
    return is_leaving and (failure.blame is Blame.NODE or failure.verdict is Verdict.CORDON)


def doubtful_nodes(job: Job) -> frozenset[str]:
    """Nodes to which nothing should be entrusted that is needed when another one fails: no replicas there, if others
    are to be had. They are on probation, or something of theirs failed in this job within a day of the last fault."""
    newest = job.noted[-1].at if job.noted else 0.0
    faulty = {n.machine for n in job.noted if n.at > newest - DAY_S and n.is_of_node}
    return frozenset(
        node.node_id for node in job.nodes.values() if node.repute.grade is not Grade.GOOD or node.machine in faulty
    )
