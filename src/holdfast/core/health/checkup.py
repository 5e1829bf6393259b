"""Checks of nodes: when they are due, what each node does in a round, and what follows.

With `--node-check` a node takes part in a view only after a check. One that joins or comes back is *awaited*, and so is
one that is suspected after a fault; the others are not asked again. Who is checked, and when:

    no view is in force     all that are awaited, once the minimum has been there for the settling time, together: they
                            are compared with each other
    a view is in force      awaited nodes that stand by, at once; and standby nodes whose last check is long ago

Where only one or two are due, nodes that are known to be well and have nothing to do help, as partners of the
collectives; the stages alone are then compared with those of earlier checks of the job. Training is not disturbed.

A check goes from round to round (tournament.py): tasks go out with the standing orders, results come back as events.
Its progress is not journaled: a master that takes over starts another check. The result is one record.

    unfit       takes no part, until it passes a later check: while a view is in force, as all standby nodes
    slow        takes part; with --exclude-straggler it is left out, the slowest first, as long as the minimum holds
    broken link one of its ends is left out, as long as the minimum holds

After a fault only suspects are checked. A node is a suspect when one of its workers ended by a fault that is blamed on
the node, or whose type says that a broken machine may be behind it (`FaultType.examine`). It is not when the script is
to blame, when the process was killed from outside, when the failure is collateral, or when the user's error monitor
pardons it. A node that is evicted for the fault (blame.py) is not checked: its next incarnation is, as every node that
joins.

A suspect is *awaited* from the moment its view has a problem. Training is not interrupted for it:

    all workers restart                         it is checked before they do
    they are kept, and another node stands by   that node takes over its ranks (rung_plans.recover_from_suspects); the
                                                suspect is checked, and stands by if it passes
    they are kept, and none stands by           it works on (`JobState.is_suspect`), and is checked at the next restart
                                                or when it is no longer a member; in any case before it takes part again
"""

from __future__ import annotations

from typing import assert_never

import msgspec

from holdfast import exit_codes
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.faults.failures import Failure, describe, is_collateral
from holdfast.core.faults.fault_types import Blame
from holdfast.core.health.check_rounds import (
    Checkup,
    PlayedRound,
    evidence_of,
    incarnations_of,
    is_busy,
    is_unheard,
    machines_of,
    partners_of,
    takes_part,
    tasks_of,
    usual_accelerator,
)
from holdfast.core.health.findings import (
    RESULT_ENTRIES_MAX,
    TEXT_CHARS_MAX,
    CheckProblem,
    CheckResult,
    CheckTask,
    LinkVerdict,
    NodeVerdict,
    Timing,
)
from holdfast.core.health.tournament import next_round
from holdfast.core.health.verdicts import Evidence, judge, norms
from holdfast.core.state import (
    Awaited,
    Fit,
    Gathering,
    Health,
    JobState,
    LeftOut,
    Node,
    Serving,
    Slow,
    Unchecked,
    Unfit,
)
from holdfast.core.strategies import Verdict
from holdfast.core.wording import counted

ALONE_TIMEOUT_S = 60.0
"""A node that is alive answers in two seconds; one that is twenty times as slow, in this."""
PAIR_TIMEOUT_S = 40.0
"""The pair itself gives up well before, and so does the agent."""
PAUSE_S = 10.0
"""Before a node that failed by what may pass is looked at again: a process that was killed gives back a device's memory
within seconds."""
PLAYERS_WANTED = 3
"""Of whom a bad one can be told from a bad link."""


# --- the questions of others


def health_of_newcomer(job: JobState) -> Health:
    """Return the health of a node that joins."""
    return Awaited("it joined") if job.settings.node_check else Unchecked()


def task_of(job: JobState, node: Node) -> CheckTask | None:
    """Return the node's newest task in the check under way. Between two of its rounds it waits with its store open."""
    current = job.checks.checkup
    if current is None or not takes_part(job, current, node.node_id):
        return None
    tasks = (played.tasks[node.node_id] for played in reversed(current.rounds) if node.node_id in played.tasks)
    return next(tasks, None)


def why_held(job: JobState, node: Node) -> str:
    """Return why a node without a task takes no part; empty if its health is no reason."""
    match node.health:
        case Awaited():
            return "this node must be checked first"
        case Unfit(why=why):
            return f"this node failed its check and takes no part: {why}"
        case LeftOut(why=why):
            return f"this node is excluded: {why}"
        case _:
            return ""


def why_missing(job: JobState) -> str:
    """Return the nodes that are here and failed their check, for the error that too few nodes are there."""
    unfit = [f"{n.node_id} ({n.health.why})" for n in job.nodes.values() if n.is_here and isinstance(n.health, Unfit)]
    return f"; failed their check: {'; '.join(unfit)}" if unfit else ""


def awaited(job: JobState) -> list[Node]:
    """Return the nodes that are here and may take part once they have been checked."""
    return sorted((job.nodes[node_id] for node_id in job.sets.awaited), key=lambda node: node.join_order)


def ended(job: JobState, now: float) -> r.JobFinished | None:
    """Return the end of a job that consists of a check only."""
    checked = job.checks.last
    if not job.settings.check_only or checked is None:
        return None
    bad = [v.node_id for v in checked.nodes if v.fitness != "fit"]
    links = [f"{link.first} – {link.second}" for link in checked.links]
    if not bad and not links:
        why = "every node passed the check" if len(checked.nodes) > 1 else "the node passed the check"
        return r.JobFinished(at=now, outcome=r.Outcome.SUCCEEDED, exit_code=0, why=why)
    found = [f"bad nodes: {', '.join(bad)}"] if bad else []
    found += [f"bad links: {', '.join(links)}"] if links else []
    return r.JobFinished(at=now, outcome=r.Outcome.FAILED, exit_code=exit_codes.UNFIT, why="; ".join(found))


# --- suspects


def suspect(job: JobState, now: float) -> r.NodeSuspected | None:
    """Return a node of the view that must be checked and is not yet marked so."""
    if not job.settings.node_check:
        return None
    for failure in job.progress.failed.values():
        node = job.nodes.get(failure.node_id)
        if node and node.is_here and isinstance(node.health, Fit | Slow) and is_suspicious(failure):
            return r.NodeSuspected(
                at=now, node_id=node.node_id, incarnation=node.incarnation, why=f"after a fault: {describe(failure)}"
            )
    return None


def is_suspicious(failure: Failure) -> bool:
    """Return whether the failure is a reason to check its node."""
    if failure.fault is None or failure.verdict is Verdict.PARDON or is_collateral(failure):
        return False
    return failure.fault.blame is Blame.NODE or failure.fault.examine


def members_awaited(job: JobState) -> list[str]:
    """Return the nodes of the view in force that are suspected, and here."""
    awaited = (job.members[node_id] for node_id in job.sets.awaited if node_id in job.members)
    return [member.node_id for member in sorted(awaited, key=lambda one: one.group_rank)]


# --- decide


def decide(job: JobState, event: e.NodeChecked, now: float) -> list[r.Record]:
    """Return the record of a result, if it belongs to the round under way."""
    current = job.checks.checkup
    if current is None or event.checkup != current.name or job.live(event.node_id, event.incarnation) is None:
        return []
    number = event.round
    if number != len(current.rounds) - 1:
        return []
    played = current.rounds[number]
    if event.node_id not in played.tasks or event.node_id in played.results:
        return []
    result = _bounded(event.result)
    return [r.NodeCheckedRecord(at=now, node_id=event.node_id, checkup=current.name, round=number, result=result)]


def _bounded(result: CheckResult) -> CheckResult:
    problems = tuple(
        CheckProblem(p.stage, p.fault[:TEXT_CHARS_MAX], p.text[:TEXT_CHARS_MAX], p.device)
        for p in result.problems[:RESULT_ENTRIES_MAX]
    )
    sound = tuple(t for t in result.timings[:RESULT_ENTRIES_MAX] if _is_sound(t))
    return msgspec.structs.replace(result, timings=sound, problems=problems)


def _is_sound(timing: Timing) -> bool:
    return 0 < timing.best_s < float("inf") and timing.spread >= 0 and 0 <= timing.waited < 1


# --- conclude


def conclude(job: JobState, now: float) -> r.Record | None:
    """Return the next step of a check, or the start of one that is due."""
    if not job.settings.node_check or job.sets.doubtful:
        return None
    current = job.checks.checkup
    if current is None:
        return _readmit(job, now) or _begin(job, now)
    if not incarnations_of(job, current):
        return r.CheckupDropped(at=now, checkup=current.name, why="none of its nodes is left")
    if is_unheard(job, current) and now < current.rounds[-1].deadline:
        return None
    evidence = evidence_of(job, current)
    step = next_round(evidence, machines_of(job), partners_of(job, current))
    if step is None:
        return _verdicts(job, current, evidence, now)
    if step.after_pause and not is_unheard(job, current) and now < current.rounds[-1].heard_at + PAUSE_S:
        return None
    timeout_s = PAIR_TIMEOUT_S if step.pairs else ALONE_TIMEOUT_S
    number = len(current.rounds)
    tasks = dict(tasks_of(job, current, step, number))
    return r.RoundBegan(at=now, checkup=current.name, round=number, deadline=now + timeout_s, tasks=tasks)


def next_deadline(job: JobState) -> float | None:
    """Return when a round ends at the latest, or a check is due; None if only events can bring one, or the end of a
    broken link."""
    if not job.settings.node_check or job.sets.doubtful:
        return None
    if job.checks.checkup:
        return _goes_on_at(job, job.checks.checkup)
    if isinstance(job.phase, Gathering):
        return _gathered_at(job, job.phase)
    return min((at for node in _idle(job) if (at := _due_at(job, node)) is not None), default=None)


def _goes_on_at(job: JobState, current: Checkup) -> float | None:
    """Return when the check goes on: a round that all have answered is followed by the next at once, or after a
    pause."""
    if not current.rounds:
        return None
    last = current.rounds[-1]
    return last.deadline if is_unheard(job, current) else last.heard_at + PAUSE_S


def _begin(job: JobState, now: float) -> r.CheckupBegan | None:
    due = _due(job, now)
    if not due:
        return None
    missing = max(PLAYERS_WANTED - len(due), 0) if len(due) < PLAYERS_WANTED else 0
    well = [n.node_id for n in _idle(job) if n.eligible and n not in due and not isinstance(n.health, Unchecked)]
    reasons = dict.fromkeys(_reason(job, node) for node in due)
    return r.CheckupBegan(
        at=now,
        checkup=f"{job.term}.{job.checks.started + 1}",
        why=", ".join(reasons),
        incarnations={node.node_id: node.incarnation for node in due},
        partners=tuple(well[:missing]),
    )


def _due(job: JobState, now: float) -> list[Node]:
    if isinstance(job.phase, Gathering):
        at = _gathered_at(job, job.phase)
        return awaited(job) if at is not None and at <= now else []
    return [node for node in _idle(job) if (at := _due_at(job, node)) is not None and at <= now]


def _gathered_at(job: JobState, phase: Gathering) -> float | None:
    """Return when the nodes that could take part, if they passed, have been enough for the settling time; None if none
    is awaited or they are too few."""
    waiting = awaited(job)
    if not waiting or len(waiting) + len(job.sets.eligible) < job.settings.nodes_min:
        return None
    here = [*waiting, *(job.nodes[node_id] for node_id in job.sets.eligible)]
    joined = sorted(node.joined_at for node in here)
    if len(here) >= job.settings.nodes_max:
        return max(node.joined_at for node in waiting)
    return max(joined[job.settings.nodes_min - 1], phase.since) + job.settings.settle_s


def _idle(job: JobState) -> list[Node]:
    """Return the nodes that are here and run no workers of a view."""
    is_serving = isinstance(job.phase, Serving)
    here = [job.nodes[node_id] for node_id in (job.sets.aside if is_serving else job.sets.here)]
    return sorted((n for n in here if not (is_serving and is_busy(job, n))), key=lambda node: node.join_order)


def _due_at(job: JobState, node: Node) -> float | None:
    """Return when a node that stands by is due for a check."""
    interval_s = job.settings.spare_check_interval_s
    match node.health:
        case Awaited():
            return node.joined_at
        case Fit(at=at) | Slow(at=at) | LeftOut(at=at) | Unfit(at=at) if interval_s > 0:
            return at + interval_s
        case _:
            return None


def _reason(job: JobState, node: Node) -> str:
    if isinstance(node.health, Awaited) and node.health.why != "it joined":
        return node.health.why
    if job.view is None:
        return "before the job"
    return "it joined" if isinstance(node.health, Awaited) else "standing by"


# --- verdicts


def _verdicts(job: JobState, current: Checkup, evidence: Evidence, now: float) -> r.CheckConcluded:
    nodes, links = judge(evidence)
    left_out = _left_out(job, nodes, links)
    return r.CheckConcluded(
        at=now,
        checkup=current.name,
        why=current.why,
        took_s=now - current.began_at,
        accelerator=usual_accelerator(job, current),
        nodes=tuple(msgspec.structs.replace(v, is_left_out=v.node_id in left_out) for v in nodes),
        links=tuple(links),
        norms=tuple(norms(evidence)[0].values()),
    )


def _left_out(job: JobState, nodes: list[NodeVerdict], links: list[LinkVerdict]) -> set[str]:
    """Return one end of each broken link and, if stragglers are excluded, the slow nodes: as many as the job can
    spare."""
    judged = {verdict.node_id for verdict in nodes}
    able = {v.node_id for v in nodes if v.fitness != "unfit"}
    able |= {node.node_id for node in job.nodes.values() if node.eligible and node.node_id not in judged}
    out: set[str] = set()
    for link in links:
        ends = [end for end in (link.second, link.first) if end in judged]
        if link.state == "broken" and ends and not out & {link.first, link.second}:
            out.add(max(ends, key=lambda end: (_count_of(links, end), job.nodes[end].join_order)))
    if job.settings.exclude_straggler:
        slow = [v for v in nodes if v.fitness == "slow" and v.node_id not in out]
        out |= {v.node_id: None for v in sorted(slow, key=_worst, reverse=True)}.keys()
    spare = max(len(able) - job.settings.nodes_min, 0)
    ranked = sorted(out, key=lambda n: next(_worst(v) for v in nodes if v.node_id == n), reverse=True)
    return set(ranked[:spare])


def _count_of(links: list[LinkVerdict], node_id: str) -> int:
    return sum(node_id in (link.first, link.second) for link in links)


def _worst(verdict: NodeVerdict) -> float:
    return max((value.times for value in verdict.measured if value.is_slow), default=0.0)


def _readmit(job: JobState, now: float) -> r.NodeReadmitted | None:
    """Return a slow node that must take part after all, because there are too few without it."""
    if not isinstance(job.phase, Gathering) or job.settings.check_only:
        return None
    able = sum(node.eligible or (node.is_here and isinstance(node.health, Awaited)) for node in job.nodes.values())
    waiting = [n for n in job.nodes.values() if n.is_here and isinstance(n.health, LeftOut)]
    if able >= job.settings.nodes_min or able + len(waiting) < job.settings.nodes_min or not waiting:
        return None
    node = min(waiting, key=lambda n: n.join_order)
    why = f"{able} of at least {counted(job.settings.nodes_min, 'node')} here without it"
    return r.NodeReadmitted(at=now, node_id=node.node_id, incarnation=node.incarnation, why=why)


# --- evolve

CheckRecord = (
    r.CheckConcluded
    | r.NodeSuspected
    | r.NodeReadmitted
    | r.CheckupBegan
    | r.RoundBegan
    | r.NodeCheckedRecord
    | r.CheckupDropped
)


def evolve(job: JobState, record: CheckRecord) -> None:
    """Apply a record about checks. Only core/evolve.py calls this."""
    match record:
        case r.CheckupBegan(at=at, checkup=name, why=why, incarnations=incarnations, partners=partners):
            helpers = {node_id: job.nodes[node_id].incarnation for node_id in partners}
            job.checks.checkup = Checkup(name, why, at, dict(incarnations), helpers)
            job.checks.started += 1
        case r.RoundBegan(at=at, tasks=tasks, deadline=deadline):
            assert job.checks.checkup is not None, "a round of no check"
            job.checks.checkup.rounds.append(PlayedRound(dict(tasks), deadline, heard_at=at))
        case r.NodeCheckedRecord(at=at, node_id=node_id, round=number, result=result):
            assert job.checks.checkup is not None, "a result of no check"
            job.checks.checkup.rounds[number].results[node_id] = result
            job.checks.checkup.rounds[number].heard_at = at
        case r.CheckupDropped():
            job.checks.checkup = None
        case r.CheckConcluded():
            _apply_verdicts(job, record)
        case r.NodeSuspected(node_id=node_id, why=why):
            job.nodes[node_id].health = Awaited(why)
        case r.NodeReadmitted(at=at, node_id=node_id, why=why):
            job.nodes[node_id].health = Slow(at=at, why=why)
        case _:
            assert_never(record)


def _apply_verdicts(job: JobState, record: r.CheckConcluded) -> None:
    job.checks.checkup, job.checks.last = None, record
    for norm in record.norms:
        if norm.count >= PLAYERS_WANTED or norm.stage not in job.checks.norms:
            job.checks.norms[norm.stage] = norm
    for verdict in record.nodes:
        node = job.nodes.get(verdict.node_id)
        if node and node.incarnation == verdict.incarnation:
            node.health = _health(verdict, record.at)


def _health(verdict: NodeVerdict, at: float) -> Health:
    if verdict.fitness == "unfit":
        return Unfit(at=at, why=verdict.why)
    if verdict.is_left_out:
        return LeftOut(at=at, why=verdict.why or "it is one end of a broken link")
    return Slow(at=at, why=verdict.why) if verdict.fitness == "slow" else Fit(at=at)
