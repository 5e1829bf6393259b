"""The policy: what follows from what is known. Level-triggered: it looks at the job as it is, not at what just
happened, so that a restarted master goes on from its journal by asking the same question.

`conclude` returns the next record, or None when there is nothing to do until something happens or
`next_deadline` comes. A driver evolves the record and asks again. A deadline is always still to come: whatever it
waits for, `conclude` acts on it when it is there, so that a driver neither sleeps for ever nor spins.

In order, the first that applies:

1. a connection is broken for longer than its grace      the node is lost
   nodes are to be checked (health/checkup.py)            the next round, or the verdicts
2. no view is in force                                    form one when the nodes are there, or give up in time
3. all workers of the view succeeded                      the job succeeded; or its checkpoint is written, if that is
                                                          what they were kept for
4. the view cannot stay (troubles.py), or another is wanted (planned.py)
       an incident opens; while the picture is incomplete, wait a moment
       (a node's verdict is out, or what is known may be an echo); then nodes are sent away (blame.py) or suspected
       (health/suspects.py), and strategy.py chooses, once a view
5. a view whose workers were kept has committed a step,   the incident closes
   or all workers of one that started anew run
6. witnesses of steps are due for the journal             a piece of their chain (ledger.py); before the end, all

Why wait for verdicts: when a node dies, the first news is often another rank's broken collective. A view formed
then would still contain the dead node and would have to be formed again.
"""

from __future__ import annotations

import heapq

from holdfast.core import blame, ledger, planned, stragglers, strategy, troubles
from holdfast.core import records as r
from holdfast.core.faults import Failure, describe, is_collateral, root_cause
from holdfast.core.forming import form_anew, form_kept, store_among
from holdfast.core.health import checkup, suspects
from holdfast.core.health.reputation import Grade, preference
from holdfast.core.ladder import LADDER
from holdfast.core.state import Finished, Gathering, Incident, Job, Left, Linked, Lost, Unlinked
from holdfast.core.troubles import Trouble
from holdfast.core.views import View

EXIT_FAILED = 1
EXIT_NODES_MISSING = 3
EXIT_DUMPED = 7
EXIT_SIGNAL_BASE = 128
KEEPING = frozenset(LADDER) - {r.Strategy.EXIT}
"""Strategies whose view keeps the workers that live. They are chosen when the view can be formed, and again to form it:
between the two nothing changes that a choice depends on."""


def conclude(job: Job, now: float) -> r.Record | None:
    """The next thing that follows from the job's state, or None."""
    if isinstance(job.phase, Finished):
        return None
    following = _of_the_job(job, now)
    if following is None or isinstance(following, r.JobFinished):
        witnessed = ledger.conclude(job.ledger, now, is_final=following is not None)
        return witnessed or following
    return following


def _of_the_job(job: Job, now: float) -> r.Record | None:
    if lost := _overdue_link(job, now):
        return lost
    if cleared := _cleared(job, now):
        return cleared
    if checked := checkup.conclude(job, now):
        return checked
    if isinstance(job.phase, Gathering):
        return _while_gathering(job, job.phase, now)
    assert job.view is not None
    if job.is_through:
        return _all_done(job, now)
    if trouble := troubles.fault(job) or planned.wish(job, now):
        return _while_troubled(job, job.view, trouble, now)
    if job.incident and _is_over(job, job.view):
        return _close(job, job.incident, job.view, now)
    return stragglers.conclude(job, now) if job.incident is None else None


def next_deadline(job: Job) -> float | None:
    """When to ask again, if nothing happens before."""
    if isinstance(job.phase, Finished):
        return None
    deadlines = [n.link.deadline for n in job.nodes.values() if n.alive and isinstance(n.link, Unlinked)]
    if _verdict_is_out(job):
        return min(deadlines)  # nothing else is concluded before
    if (check_at := checkup.next_deadline(job)) is not None:
        deadlines.append(check_at)
    if isinstance(job.phase, Gathering):
        if job.checkup:
            return min(deadlines)  # the view waits for it
        settled_at = _settled_at(job, job.phase.since)
        deadlines.append(job.phase.deadline if settled_at is None else settled_at)
    elif trouble := troubles.fault(job):
        deadlines += _fault_deadlines(job, trouble)
    elif job.incident and _decided(job):
        deadlines.append(_storeless_until(job, job.incident))
    elif (due_at := planned.due_at(job)) is not None:
        deadlines.append(due_at)
    return min(deadlines, default=None)


def _fault_deadlines(job: Job, trouble: Trouble) -> list[float]:
    """Of a fault, nothing is left to do but to wait for a store or for the picture to be complete."""
    if job.incident and (_decided(job) or _lacks_store(job, trouble)):
        return [_storeless_until(job, job.incident)]
    complete_at = _complete_at(job)
    return [complete_at] if complete_at else []


def _complete_at(job: Job) -> float:
    return troubles.complete_at(job, can_retry=strategy.is_open(job, r.Strategy.RETRY))


def _overdue_link(job: Job, now: float) -> r.NodeLost | None:
    for node in job.nodes.values():
        if node.alive and isinstance(node.link, Unlinked) and node.link.deadline <= now:
            waited_s = now - node.link.since
            why = (
                f"its connection closed and did not come back in {waited_s:.1f} s"
                if node.link.certain
                else f"it did not come back to the restarted master in {waited_s:.1f} s"
            )
            return r.NodeLost(
                at=now,
                node_id=node.node_id,
                incarnation=node.incarnation,
                certain=node.link.certain,
                since=node.link.since,
                why=why,
            )
    return None


def _cleared(job: Job, now: float) -> r.NodeCleared | None:
    node_id = blame.wrongly_accused(job)
    if not node_id:
        return None
    cordoned = next(c for c in job.cordons if c.node_id == node_id)
    why = f"{cordoned.fault} came to several machines within {job.settings.same_fault_window_s:.0f} s"
    return r.NodeCleared(
        at=now, node_id=node_id, machine=cordoned.machine, fault=cordoned.fault, why=why
    )


def _all_done(job: Job, now: float) -> r.JobFinished:
    if not troubles.dumping(job):
        return r.JobFinished(at=now, outcome=r.Outcome.SUCCEEDED, exit_code=0, why="all workers succeeded")
    incident = job.incident
    cause = incident.cause if incident else "the job could not go on"
    why = f"{cause}; a checkpoint of the last committed step was written, and the next start goes on from it"
    failure = root_cause(incident.failures) if incident else None
    return r.JobFinished(at=now, outcome=r.Outcome.FAILED, exit_code=EXIT_DUMPED, why=why, cause=failure)


def _verdict_is_out(job: Job) -> bool:
    return any(n.doubtful for n in job.nodes.values())


# --- no view in force


def _while_gathering(job: Job, phase: Gathering, now: float) -> r.Record | None:
    if stopped := _stopped(job, now):
        return stopped
    if _verdict_is_out(job) or job.checkup:
        return None
    if ended := checkup.ended(job, now):
        return ended
    eligible = [n for n in job.nodes.values() if n.eligible]
    settled_at = _settled_at(job, phase.since)
    if settled_at is not None:
        here = sum(n.is_here for n in job.nodes.values())  # also those that did not pass their check
        if here < job.settings.nodes_max and now < settled_at:
            return None
        return form_anew(job, eligible, now, f"{len(eligible)} of {job.settings.nodes_max} nodes here")
    if admitted := _admitted(job, len(eligible), phase, now):
        return admitted
    if now < phase.deadline:
        return None
    if len(eligible) >= job.settings.nodes_min:
        return _no_store(phase.since, now)
    came = len(eligible) + len(checkup.awaited(job))
    why = (
        f"waited {now - phase.since:.0f} s for {job.settings.nodes_min} nodes, {came} came:"
        " start the missing ones, lower the minimum of --nnodes, or raise join_timeout in --rdzv-conf"
        f"{checkup.why_missing(job)}"
    )
    return r.JobFinished(at=now, outcome=r.Outcome.FAILED, exit_code=EXIT_NODES_MISSING, why=why)


def _admitted(job: Job, eligible: int, phase: Gathering, now: float) -> r.NodeAdmitted | None:
    """The next of those that stand by as a last resort, if with all of them there are enough: when the time is up, or
    at once if it is merely banned and nobody else may come."""
    here = [n for n in job.nodes.values() if n.is_last_resort and n.alive and isinstance(n.link, Linked)]
    if eligible >= job.settings.nodes_min or eligible + len(here) < job.settings.nodes_min:
        return None
    is_full = eligible + len(here) >= job.settings.nodes_max + job.settings.spare_nodes
    best = min(here, key=lambda n: (preference(n.repute), n.join_order))
    if now < phase.deadline and not (is_full and best.repute.grade is Grade.BANNED):
        return None
    reason = "nobody else may come" if now < phase.deadline else "the time is up"
    why = f"there are {eligible} of at least {job.settings.nodes_min} nodes without it, and {reason}"
    return r.NodeAdmitted(at=now, node_id=best.node_id, incarnation=best.incarnation, why=why)


def _settled_at(job: Job, since: float) -> float | None:
    """When the minimum, with a store to meet at, has been there for the settling time; None while it is not there."""
    eligible = [n for n in job.nodes.values() if n.eligible]
    if len(eligible) < job.settings.nodes_min or not store_among(job, eligible):
        return None
    joined = heapq.nsmallest(job.settings.nodes_min, (n.joined_at for n in eligible))
    return max(joined[-1], since) + job.settings.settle_s


def _stopped(job: Job, now: float) -> r.JobFinished | None:
    """The job ends when the last node to go was told to: there is nobody left to wait with, and nobody to wait for.
    One that was lost may come back, whoever left before it."""
    ended = [n.standing for n in job.nodes.values() if isinstance(n.standing, Lost | Left)]
    if not ended or len(ended) < len(job.nodes):
        return None
    last_at = max(standing.at for standing in ended)
    signals = [standing.signal for standing in ended if isinstance(standing, Left) and standing.at == last_at]
    if not signals:
        return None
    code = EXIT_SIGNAL_BASE + max(signals) if any(signals) else EXIT_FAILED
    return r.JobFinished(at=now, outcome=r.Outcome.STOPPED, exit_code=code, why="the last node left by request")


# --- trouble


def _while_troubled(job: Job, view: View, trouble: Trouble, now: float) -> r.Record | None:
    incident = job.incident
    if incident is None:
        number = job.incidents_opened + 1
        return r.IncidentOpened(
            at=now, number=number, view=view.number, kind=trouble.kind, cause=trouble.text
        )
    if _verdict_is_out(job) or now < _complete_at(job):
        return None
    if found := blame.accused(job, now):
        return _cordon(found, now)
    if suspected := suspects.suspect(job, now):
        return suspected
    if _decided(job) and incident.strategy not in KEEPING:
        return _act(job, incident, trouble, now)
    choice = strategy.choose(job, trouble)
    if choice.plan and not planned.has_store(job, choice.plan):
        return _storeless(job, incident, now)
    if choice.plan and _decided(job) and choice.strategy is incident.strategy:
        return form_kept(job, choice.plan, now, trouble.text)
    return _decide(incident, view, trouble, choice, blame.kept_note(job, now), now)


def _cordon(found: blame.Accusation, now: float) -> r.NodeCordoned:
    return r.NodeCordoned(
        at=now,
        node_id=found.node.node_id,
        incarnation=found.node.incarnation,
        machine=found.node.machine,
        fault=found.fault,
        lasting=found.lasting,
        why=found.why,
    )


def _decide(
    incident: Incident, view: View, trouble: Trouble, choice: strategy.Choice, note: str, now: float
) -> r.IncidentDecided:
    return r.IncidentDecided(
        at=now,
        number=incident.number,
        view=view.number,
        kind=trouble.kind,
        cause=trouble.text,
        strategy=choice.strategy,
        counted=choice.counted,
        why=f"{choice.why}; {note}" if note else choice.why,
        reload=choice.reload,
    )


def _decided(job: Job) -> bool:
    """Whether the strategy for the trouble of this very view is chosen."""
    return bool(job.incident and job.view and job.incident.decided_view == job.view.number)


def _lacks_store(job: Job, trouble: Trouble) -> bool:
    plan = strategy.choose(job, trouble).plan
    return plan is not None and not planned.has_store(job, plan)


def _act(job: Job, incident: Incident, trouble: Trouble, now: float) -> r.Record | None:
    if incident.strategy is r.Strategy.EXIT:
        return _give_up(job, incident, trouble, now)
    eligible = [n for n in job.nodes.values() if n.eligible]
    if awaited := suspects.members_awaited(job):
        deadline = now + job.settings.join_timeout_s
        return r.GatheringBegan(at=now, deadline=deadline, why=f"{', '.join(awaited)} to be checked first")
    if len(eligible) >= job.settings.nodes_min:
        if formed := form_anew(job, eligible, now, trouble.text):
            return formed
        return _storeless(job, incident, now)
    deadline = now + job.settings.join_timeout_s
    why = f"{len(eligible)} of at least {job.settings.nodes_min} nodes are left"
    return r.GatheringBegan(at=now, deadline=deadline, why=why)


def _give_up(job: Job, incident: Incident, trouble: Trouble, now: float) -> r.JobFinished:
    cause = root_cause(job.failed.values()) or root_cause(incident.failures)
    why = f"{describe(cause) if cause else trouble.text}; {incident.why}"
    return r.JobFinished(at=now, outcome=r.Outcome.FAILED, exit_code=EXIT_FAILED, why=why, cause=cause)


def _storeless_until(job: Job, incident: Incident) -> float:
    """From the newest of all that may have made a store necessary."""
    lost = (n.standing.at for n in job.nodes.values() if isinstance(n.standing, Lost) and n.node_id in job.members)
    since = max(incident.decided_at, incident.detected_at, incident.rebuilt_at, job.failing_since, *lost)
    return since + job.settings.join_timeout_s


def _storeless(job: Job, incident: Incident, now: float) -> r.JobFinished | None:
    until = _storeless_until(job, incident)
    return _no_store(until - job.settings.join_timeout_s, now) if until <= now else None


def _no_store(since: float, now: float) -> r.JobFinished:
    why = f"no node offered a port for the workers' store in {now - since:.0f} s: look for errors in the agents' logs"
    return r.JobFinished(at=now, outcome=r.Outcome.FAILED, exit_code=EXIT_NODES_MISSING, why=why)


def _is_over(job: Job, view: View) -> bool:
    """A recovery that kept the workers is over when it is proved; one that started them anew, when all run."""
    return job.proved >= 0 if view.kept else len(job.started) == len(view.members)


def _close(job: Job, incident: Incident, view: View, now: float) -> r.IncidentClosed:
    cause = root_cause(incident.failures) if incident.kind == "worker" else None
    return r.IncidentClosed(
        at=now,
        number=incident.number,
        kind=incident.kind,
        cause=describe(cause) if cause else incident.cause,
        strategy=incident.strategy or r.Strategy.RESTART,
        happened_at=min([incident.happened_at, *(f.failed_at for f in incident.failures)]),
        detected_at=incident.detected_at,
        decided_at=incident.decided_at,
        rebuilt_at=incident.rebuilt_at,
        view_before=incident.view_before,
        view_after=view.number,
        restarts_used=job.restarts_used,
        collateral=_folded(incident, view, cause),
        settled_at=job.settled_at if view.kept else 0.0,
        step=job.proved if view.kept else -1,
    )


def _folded(incident: Incident, view: View, cause: Failure | None) -> int:
    """Where workers are kept, a further failure is one of its own unless it says otherwise; else all fell together."""
    if view.kept:
        return sum(is_collateral(f) for f in incident.failures if f is not cause)
    return max(len(incident.failures) + incident.failures_dropped - (cause is not None), 0)
