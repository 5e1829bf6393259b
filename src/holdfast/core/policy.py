"""The policy: what follows from what is known. Level-triggered: it looks at the job as it is, not at what just
happened, so that a restarted master goes on from its journal by asking the same question.

`conclude` returns the next record, or None when there is nothing to do until something happens or
`next_deadline` comes. A driver evolves the record and asks again. A deadline is always still to come: whatever it
waits for, `conclude` acts on it when it is there, so that a driver neither sleeps forever nor spins.

In order, the first that applies:

1. a connection is broken for longer than its grace      the node is lost
   a ban has run out                                      the node may take part
   nodes are to be checked (health/checkup.py)            the next round, or the verdicts
2. no view is in force                                    form one when the nodes are there, or give up in time
3. all workers of the view succeeded                      the job succeeded; or its checkpoint is written, if that is
                                                          what they were kept for
   all wait for one another on the way into the view      the members are asked for a broken link (health/peer_links.py)
4. the view cannot stay (assess.py), or another is wanted (planned_changes.py)
       an incident opens; while the picture is incomplete, wait a moment
       (a node may be lost, or what is known may be collateral); if a broken link would explain it, the members are
       asked (health/peer_links.py); then nodes are evicted (blame.py) or suspected (health/checkup.py), and
       choose_strategy.py chooses, once a view: not before what it chooses can be done
5. a view whose workers were kept has committed a step,   the incident closes
   or after a restart all workers run
6. sample reports are due for the journal                 a segment of their chain (sample_audit.py); at the end, all

Why wait for verdicts: when a node dies, the first news is often another rank's broken collective. A view formed
then would still contain the dead node and would have to be formed again. A node that stands by is waited for only
where something better could be chosen with it: that its link flaps is no concern of those who train.

Why wait for a store before the choice, and not after it: the problem may pass, or another one appear.
The journal would then contain a choice that was never carried out, perhaps with a restart used up for it.
"""

from __future__ import annotations

import msgspec

from holdfast import exit_codes
from holdfast.core import assess, blame, choose_strategy, planned_changes, sample_audit, stragglers
from holdfast.core import records as r
from holdfast.core.assess import ViewProblem
from holdfast.core.faults.failures import Failure, describe, is_collateral, root_cause
from holdfast.core.form_view import (
    awaits_store,
    eligible_nodes,
    form_recovery_view,
    form_restart_view,
    store_among_eligible,
)
from holdfast.core.health import checkup, peer_links
from holdfast.core.health.reputation import Grade, Reputation, preference
from holdfast.core.settings import reconnect_allowance
from holdfast.core.state import Finished, Gathering, Incident, JobState, Left, Lost, Node, Present, Unlinked
from holdfast.core.strategies import LADDER
from holdfast.core.views import Member, View
from holdfast.core.wording import counted

KEEPING = frozenset(LADDER) - {r.Strategy.EXIT}
"""Strategies whose view keeps the workers that live. They are chosen when the view can be formed, and again to form it:
between the two nothing changes that a choice depends on."""

LESSER = frozenset({r.Strategy.ELASTIC_TRAINING, r.Strategy.DUMP, r.Strategy.WAIT, r.Strategy.EXIT})
"""Strategies that go on with fewer nodes than there were, or not at all."""


def conclude(job: JobState, now: float) -> r.Record | None:
    """Return the next record that follows from the job's state, or None."""
    if isinstance(job.phase, Finished):
        return None
    following = _conclude_job(job, now)
    if following is None or isinstance(following, r.JobFinished):
        audited = sample_audit.conclude(job.data.audit, now, is_final=following is not None)
        return audited or following
    return following


def _conclude_job(job: JobState, now: float) -> r.Record | None:
    if lost := _overdue_link(job, now):
        return lost
    if cleared := _cleared(job, now):
        return cleared
    if lapsed := _lapsed(job, now):
        return lapsed
    if checked := checkup.conclude(job, now):
        return checked
    if isinstance(job.phase, Gathering):
        return _while_gathering(job, job.phase, now)
    assert job.view is not None
    if job.is_complete:
        return _all_done(job, now)
    if job.joins_slowly and (probed := peer_links.conclude(job, now)):
        return probed
    if problem := assess.fault(job) or planned_changes.next_change(job, now):
        return _while_failing(job, job.view, problem, now)
    if job.incidents.current and _is_over(job, job.view):
        return _close(job, job.incidents.current, job.view, now)
    return stragglers.conclude(job, now) if job.incidents.current is None else None


def next_deadline(job: JobState) -> float | None:
    """Return when to ask again, if nothing happens before."""
    if isinstance(job.phase, Finished):
        return None
    deadlines = [at for at in (_first_verdict_at(job),) if at is not None]
    if assess.is_verdict_pending(job):
        return min((*deadlines, *job.bans.values()))  # nothing else is concluded before
    deadlines += job.bans.values()
    if (check_at := checkup.next_deadline(job)) is not None:
        deadlines.append(check_at)
    if isinstance(job.phase, Gathering):
        if job.checks.checkup:
            return min(deadlines)  # the view waits for it
        ready_at = _minimum_reached_at(job, job.phase.since)
        deadlines.append(job.phase.deadline if ready_at is None else ready_at)
    elif problem := assess.fault(job):
        deadlines += _fault_deadlines(job, problem)
    else:
        answered_at = peer_links.next_deadline(job) if job.joins_slowly else None
        deadlines += [at for at in (answered_at, planned_changes.due_at(job)) if at is not None]
    return min(deadlines, default=None)


def _fault_deadlines(job: JobState, problem: ViewProblem) -> list[float]:
    """Return when to look at a fault again that waits for a store, or for the picture to be complete."""
    complete_at = _complete_at(job)
    if (answered_at := peer_links.next_deadline(job)) is not None:
        return [max(answered_at, complete_at)]
    if job.incidents.current is None:
        return [complete_at] if complete_at else []
    choice = choose_strategy.choose(job, problem)
    if not _decided(job) and _awaits_spare(job, choice, problem):
        return []  # its link's deadline is the next
    if _waits_for_nodes(job, choice) and not _awaits_store(job, choice):
        return [max(job.incidents.current.nodes_awaited_until, complete_at)]
    if _decided(job) or _awaits_store(job, choice):
        return [max(_store_deadline(job, job.incidents.current), complete_at)]
    return [complete_at] if complete_at else []


def _complete_at(job: JobState) -> float:
    return assess.complete_at(job, can_retry=choose_strategy.is_open(job, r.Strategy.RETRY))


def _overdue_link(job: JobState, now: float) -> r.NodeLost | None:
    verdict_at = _first_verdict_at(job)
    if verdict_at is None or verdict_at > now:
        return None
    node = job.nodes[job.sets.deadlines[0][-1]]
    assert isinstance(node.link, Unlinked), f"{node.node_id} is not among those whose connection is broken"
    waited_s = now - node.link.since
    why = (
        f"its connection closed and was not restored within {waited_s:.1f} s"
        if node.link.certain
        else f"it did not reconnect to the restarted master within {waited_s:.1f} s"
    )
    return r.NodeLost(
        at=now,
        node_id=node.node_id,
        incarnation=node.incarnation,
        certain=node.link.certain,
        since=node.link.since,
        why=why,
    )


def _first_verdict_at(job: JobState) -> float | None:
    """Return when the first node whose link is broken is lost. Many that break together were not all lost: their agents
    connect again one after another, and a master that was slow has yet to hear them. So while they come back, the last
    has as long as all of them may take; those that are left when no more come do not."""
    sets = job.sets
    at = sets.first_deadline
    if at is None:
        return None
    ends_at = max(at + reconnect_allowance(len(sets.unlinked)), sets.restored_at + job.settings.reconnect_grace_s)
    return min(ends_at, at + reconnect_allowance(sets.broken_together))


def _cleared(job: JobState, now: float) -> r.NodeCleared | None:
    cordoned = blame.wrongly_evicted(job)
    if cordoned is None:
        return None
    return r.NodeCleared(
        at=now,
        node_id=cordoned.node_id,
        incarnation=cordoned.incarnation,
        machine=cordoned.machine,
        fault=cordoned.fault,
        why=f"{cordoned.fault} was seen on several machines within {job.settings.same_fault_window_s:.0f} s",
    )


def _lapsed(job: JobState, now: float) -> r.NodeReputationChanged | None:
    """Return the end of a ban that has run out."""
    node_id = min(job.bans, key=lambda one: job.bans[one], default="")
    if not node_id or job.bans[node_id] > now:
        return None
    node = job.nodes[node_id]
    reputation = Reputation(Grade.PROBATION, "its machine's ban has run out")
    return r.NodeReputationChanged(at=now, node_id=node_id, incarnation=node.incarnation, reputation=reputation)


def _all_done(job: JobState, now: float) -> r.JobFinished:
    if not assess.is_dumping(job):
        return r.JobFinished(at=now, outcome=r.Outcome.SUCCEEDED, exit_code=0, why="all workers succeeded")
    incident = job.incidents.current
    cause = incident.cause if incident else "the job could not continue"
    why = f"{cause}; the last committed step was saved as a checkpoint"
    failure = root_cause(incident.failures) if incident else None
    return r.JobFinished(at=now, outcome=r.Outcome.FAILED, exit_code=exit_codes.DUMPED, why=why, cause=failure)


# --- no view in force


def _while_gathering(job: JobState, phase: Gathering, now: float) -> r.Record | None:
    if stopped := _stopped(job, now):
        return stopped
    if assess.is_verdict_pending(job) or job.checks.checkup:
        return None
    if ended := checkup.ended(job, now):
        return ended
    eligible = len(job.sets.eligible)
    ready_at = _minimum_reached_at(job, phase.since)
    if ready_at is not None:
        here = len(job.sets.here)  # also those that did not pass their check
        if here < job.settings.nodes_max and now < ready_at:
            return None
        return form_restart_view(
            job, eligible_nodes(job), now, f"{eligible} of {counted(job.settings.nodes_max, 'node')} joined"
        )
    if admitted := _admitted(job, eligible, phase, now):
        return admitted
    if now < phase.deadline:
        return None
    if eligible >= job.settings.nodes_min:
        return _no_store(phase.since, now)
    came = eligible + len(job.sets.awaited)
    why = (
        f"waited {now - phase.since:.0f} s for {counted(job.settings.nodes_min, 'node')}, {came} joined:"
        " start the missing ones, lower the minimum of --nnodes, or raise join_timeout in --rdzv-conf"
        f"{checkup.why_missing(job)}"
    )
    return r.JobFinished(at=now, outcome=r.Outcome.FAILED, exit_code=exit_codes.NODES_MISSING, why=why)


def _admitted(job: JobState, eligible: int, phase: Gathering, now: float) -> r.NodeAdmitted | None:
    """Return the next last-resort node to admit, if all of them together are enough: when the time is up, or at once if
    it is merely banned and no other node may come."""
    here = [job.nodes[node_id] for node_id in job.sets.last_resorts]
    if eligible >= job.settings.nodes_min or eligible + len(here) < job.settings.nodes_min:
        return None
    is_full = eligible + len(here) >= job.settings.nodes_max + job.settings.spare_nodes
    best = min(here, key=lambda n: (preference(n.reputation), n.join_order))
    if now < phase.deadline and not (is_full and best.reputation.grade is Grade.BANNED):
        return None
    reason = "no other node may join" if now < phase.deadline else "the time is up"
    why = f"{eligible} of at least {counted(job.settings.nodes_min, 'node')} there without it, and {reason}"
    return r.NodeAdmitted(at=now, node_id=best.node_id, incarnation=best.incarnation, why=why)


def _minimum_reached_at(job: JobState, since: float) -> float | None:
    """Return when the minimum of nodes, with a store, will have been there for the settling time; None while it is not
    there."""
    if len(job.sets.eligible) < job.settings.nodes_min or not store_among_eligible(job):
        return None
    last_joined_at = job.sets.joined_at[job.settings.nodes_min - 1][0] if job.settings.nodes_min else 0.0
    return max(last_joined_at, since) + job.settings.settle_s


def _stopped(job: JobState, now: float) -> r.JobFinished | None:
    """Return the end of the job if the last node to go left by request: no node is left, and none is expected. A node
    that was lost may still come back."""
    if job.sets.alive or not job.nodes:
        return None
    ended = [n.standing for n in job.nodes.values() if isinstance(n.standing, Lost | Left)]
    last_at = max(standing.at for standing in ended)
    signals = [standing.signal for standing in ended if isinstance(standing, Left) and standing.at == last_at]
    if not signals:
        return None
    code = exit_codes.SIGNAL_BASE + max(signals) if any(signals) else exit_codes.WORKER_FAILED
    return r.JobFinished(at=now, outcome=r.Outcome.STOPPED, exit_code=code, why="the last node left by request")


# --- problem


def _while_failing(job: JobState, view: View, problem: ViewProblem, now: float) -> r.Record | None:
    incident = job.incidents.current
    if incident is None:
        number = job.incidents.opened + 1
        return r.IncidentOpened(at=now, number=number, view=view.number, kind=problem.kind, cause=problem.text)
    if assess.is_verdict_pending(job) or now < _complete_at(job):
        return None
    if probed := peer_links.conclude(job, now):
        return probed
    if peer_links.is_pending(job, now):
        return None
    if found := blame.to_evict(job, now):
        return _cordon(found, now)
    if suspected := checkup.suspect(job, now):
        return suspected
    if _decided(job) and incident.strategy not in KEEPING:
        return _act(job, incident, problem, now)
    choice = choose_strategy.choose(job, problem)
    if _awaits_spare(job, choice, problem):
        return None
    if _waits_for_nodes(job, choice):
        if not incident.nodes_awaited_until:
            return _await_nodes(job, incident, problem, now)
        if now < incident.nodes_awaited_until:
            return None
    if _awaits_store(job, choice):
        return _wait_for_store(job, incident, now)
    if choice.admits:
        why = "the job cannot go on without it: no other node stands by"
        node = job.nodes[choice.admits]
        return r.NodeAdmitted(at=now, node_id=node.node_id, incarnation=node.incarnation, why=why)
    if choice.plan and _decided(job) and choice.strategy is incident.strategy:
        return form_recovery_view(job, choice.plan, now, problem.text)
    note = blame.why_not_evicted_note(job, now)
    if choice.waits and incident.nodes_awaited_until:
        none_came = f"no replacement came within {job.settings.wait_for_nodes_s:.0f} s"
        note = f"{none_came}; {note}" if note else none_came
        problem = msgspec.structs.replace(problem, text=f"{problem.text}; {none_came}")
    decided = _decide(incident, view, problem, choice, note, now)
    return msgspec.structs.replace(decided, echoes=len(job.progress.echoes)) if job.progress.echoes else decided


def _cordon(found: blame.Eviction, now: float) -> r.NodeCordoned:
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
    incident: Incident, view: View, problem: ViewProblem, choice: choose_strategy.StrategyChoice, note: str, now: float
) -> r.IncidentDecided:
    return r.IncidentDecided(
        at=now,
        number=incident.number,
        view=view.number,
        kind=problem.kind,
        cause=problem.text,
        strategy=choice.strategy,
        counted=choice.counted,
        why=f"{choice.why}; {note}" if note else choice.why,
        reload=choice.reload,
    )


def _decided(job: JobState) -> bool:
    """Return whether a strategy was chosen for the problem of this view."""
    return bool(job.incidents.current and job.view and job.incidents.current.decided_view == job.view.number)


def _waits_for_nodes(job: JobState, choice: choose_strategy.StrategyChoice) -> bool:
    """Return whether survivors hold their state for a while before this is done."""
    return choice.waits and job.settings.wait_for_nodes_s > 0 and not _decided(job)


def _await_nodes(job: JobState, incident: Incident, problem: ViewProblem, now: float) -> r.NodesAwaited:
    deadline = now + job.settings.wait_for_nodes_s
    return r.NodesAwaited(at=now, number=incident.number, deadline=deadline, why=problem.text)


def _awaits_spare(job: JobState, choice: choose_strategy.StrategyChoice, problem: ViewProblem) -> bool:
    """Return whether a node that stands by may be back in a moment, and something better could be chosen with it."""
    if problem.plan or assess.is_dumping(job) or not assess.is_spare_doubtful(job):
        return False
    if assess.fault(job) is None:
        return False  # newcomers to workers that do not speak to Holdfast wait for no others
    if choice.strategy is r.Strategy.RESTART:
        return len(job.able) < job.settings.nodes_max
    return choice.strategy in LESSER or bool(choice.admits)


def _awaits_store(job: JobState, choice: choose_strategy.StrategyChoice) -> bool:
    """Return whether only a store is missing for the view that the choice leads to."""
    if choice.plan:
        return not planned_changes.has_store(job, choice.plan)
    return choice.strategy is r.Strategy.RESTART and awaits_store(job)


def _act(job: JobState, incident: Incident, problem: ViewProblem, now: float) -> r.Record | None:
    if incident.strategy is r.Strategy.EXIT:
        return _give_up(job, incident, problem, now)
    eligible = eligible_nodes(job)
    if awaited := checkup.members_awaited(job):
        deadline = now + job.settings.join_timeout_s
        return r.GatheringBegan(at=now, deadline=deadline, why=f"{', '.join(awaited)} must be checked first")
    if len(eligible) >= job.settings.nodes_min:
        if formed := form_restart_view(job, eligible, now, problem.text):
            return formed
        return _wait_for_store(job, incident, now)
    deadline = now + job.settings.join_timeout_s
    why = f"{len(eligible)} of at least {counted(job.settings.nodes_min, 'node')} left"
    return r.GatheringBegan(at=now, deadline=deadline, why=why)


def _give_up(job: JobState, incident: Incident, problem: ViewProblem, now: float) -> r.JobFinished:
    cause = root_cause(job.progress.failed.values()) or root_cause(incident.failures)
    why = f"{describe(cause) if cause else problem.text}; {incident.why}"
    return r.JobFinished(at=now, outcome=r.Outcome.FAILED, exit_code=exit_codes.WORKER_FAILED, why=why, cause=cause)


def _store_deadline(job: JobState, incident: Incident) -> float:
    """Return how long to wait for a store, counted from the last change that made one necessary."""
    marks = (_changed_at(member, job.nodes.get(member.node_id)) for member in job.members.values())
    known = (incident.decided_at, incident.detected_at, incident.rebuilt_at, incident.nodes_awaited_until)
    since = max(*known, job.progress.failing_since, *marks)
    return since + job.settings.join_timeout_s


def _changed_at(member: Member, node: Node | None) -> float:
    """Return when the member went, was asked to leave or came back as another incarnation; 0 if it is there and
    stays."""
    if node is None or isinstance(node.standing, Present):
        return node.joined_at if node and node.incarnation != member.incarnation else 0.0
    return node.standing.at


def _wait_for_store(job: JobState, incident: Incident, now: float) -> r.JobFinished | None:
    until = _store_deadline(job, incident)
    return _no_store(until - job.settings.join_timeout_s, now) if until <= now else None


def _no_store(since: float, now: float) -> r.JobFinished:
    why = (
        f"no node offered a port for the workers' store within {now - since:.0f} s: look for errors in the agents' logs"
    )
    return r.JobFinished(at=now, outcome=r.Outcome.FAILED, exit_code=exit_codes.NODES_MISSING, why=why)


def _is_over(job: JobState, view: View) -> bool:
    """Return whether the recovery is complete: a step is committed, or in a restart all workers run."""
    return job.progress.first_committed >= 0 if view.keeps_workers else len(job.progress.started) == len(view.members)


def _close(job: JobState, incident: Incident, view: View, now: float) -> r.IncidentClosed:
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
        restarts_used=job.incidents.restarts_used,
        collateral=_folded(incident, view, cause),
        restored_at=job.progress.all_joined_at if view.keeps_workers else 0.0,
        step=job.progress.first_committed if view.keeps_workers else -1,
    )


def _folded(incident: Incident, view: View, cause: Failure | None) -> int:
    """Return the number of collateral failures. In a restart all other failures are counted as such."""
    if view.keeps_workers:
        return sum(is_collateral(f) for f in incident.failures if f is not cause)
    return max(len(incident.failures) + incident.failures_dropped - (cause is not None), 0)
