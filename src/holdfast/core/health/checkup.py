"""Checks of nodes: when they are due, what each node does in a round, and what follows.

With `--node-check` a node takes part in a view only after a check. One that joins or comes back is *awaited*, and so is
one that is suspected after a fault; the others are not asked again. Who is checked, and when:

    no view is in force     all that are awaited, once the minimum is there and has settled, together: they are compared
                            with each other
    a view is in force      awaited nodes that stand by, at once; and whoever has stood by for long since its last check

Where only one or two are due, nodes that are known to be well and have nothing to do help, as partners of the
collectives; the stages alone are then compared with those of earlier checks of the job. Nobody who trains is disturbed.

A check goes from round to round (tournament.py): tasks go out with the standing orders, results come back as events.
Its progress is not journaled: a master that takes over begins anew, under another name. What came of it is one record.

    unfit       takes no part, until it passes a later check: while a view is in force, as everybody who stands by
    slow        takes part; with --exclude-straggler it is left out, the slowest first, as long as the minimum holds
    broken link one of its ends is left out, as long as the minimum holds

After a fault only suspects are checked (suspects.py).
"""

from __future__ import annotations

from typing import assert_never

import msgspec

from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.health.check_rounds import (
    Checkup,
    Played,
    evidence_of,
    is_busy,
    is_unheard,
    lives_of,
    machines_of,
    partners_of,
    takes_part,
    tasks_of,
    usual_accelerator,
)
from holdfast.core.health.findings import (
    RESULT_ENTRIES_MAX,
    TEXT_CHARS_MAX,
    CheckResult,
    CheckTask,
    LinkVerdict,
    NodeVerdict,
    Problem,
    Timing,
)
from holdfast.core.health.tournament import next_round
from holdfast.core.health.verdicts import Evidence, judge, norms
from holdfast.core.state import Awaited, Fit, Gathering, Health, Job, LeftOut, Node, Serving, Slow, Unchecked, Unfit

ALONE_TIMEOUT_S = 60.0
"""A node that is alive answers in two seconds; one that is twenty times as slow, in this."""
PAIR_TIMEOUT_S = 40.0
"""The pair itself gives up well before, and so does the agent."""
PAUSE_S = 10.0
"""Before a node that failed by what may pass is looked at again: a process that was killed gives back a device's memory
within seconds."""
PLAYERS_WANTED = 3
"""Of whom a bad one can be told from a bad link."""
EXIT_UNFIT = 8


# --- the questions of others


def health_of_newcomer(job: Job) -> Health:
    """Of a node that joins."""
    return Awaited("it joined") if job.settings.node_check else Unchecked()


def task_of(job: Job, node: Node) -> CheckTask | None:
    """Its newest in the check under way: between two of its rounds it waits with its store open."""
    current = job.checkup
    if current is None or not takes_part(job, current, node.node_id):
        return None
    tasks = (played.tasks[node.node_id] for played in reversed(current.rounds) if node.node_id in played.tasks)
    return next(tasks, None)


def why_held(job: Job, node: Node) -> str:
    """Why a node without a task takes no part; empty if its health is no reason."""
    match node.health:
        case Awaited():
            return "this node is to be checked"
        case Unfit(why=why):
            return f"this node failed its check and takes no part: {why}"
        case LeftOut(why=why):
            return f"this node is left out: {why}"
        case _:
            return ""


def why_missing(job: Job) -> str:
    """Nodes that are here and cannot take part, for the sentence that too few are there."""
    unfit = [f"{n.node_id} ({n.health.why})" for n in job.nodes.values() if n.is_here and isinstance(n.health, Unfit)]
    return f"; failed their check: {'; '.join(unfit)}" if unfit else ""


def awaited(job: Job) -> list[Node]:
    """Nodes that are here and may take part once they have been checked."""
    return [node for node in job.nodes.values() if node.is_here and isinstance(node.health, Awaited)]


def ended(job: Job, now: float) -> r.JobFinished | None:
    """The end of a job that was nothing but a check."""
    checked = job.checked
    if not job.settings.check_only or checked is None:
        return None
    bad = [v.node_id for v in checked.nodes if v.fitness != "fit"]
    links = [f"{link.first} – {link.second}" for link in checked.links]
    if not bad and not links:
        why = "every node passed the check" if len(checked.nodes) > 1 else "the node passed the check"
        return r.JobFinished(at=now, outcome=r.Outcome.SUCCEEDED, exit_code=0, why=why)
    found = [f"bad nodes: {', '.join(bad)}"] if bad else []
    found += [f"bad links: {', '.join(links)}"] if links else []
    return r.JobFinished(at=now, outcome=r.Outcome.FAILED, exit_code=EXIT_UNFIT, why="; ".join(found))


# --- decide


def decide(job: Job, event: e.NodeExamined, now: float) -> list[r.Record]:
    """A result, if it is of the round under way."""
    current = job.checkup
    if current is None or event.checkup != current.name or job.live(event.node_id, event.incarnation) is None:
        return []
    number = event.round
    if number != len(current.rounds) - 1:
        return []
    played = current.rounds[number]
    if event.node_id not in played.tasks or event.node_id in played.results:
        return []
    result = _bounded(event.result)
    return [r.RoundReported(at=now, node_id=event.node_id, checkup=current.name, round=number, result=result)]


def _bounded(result: CheckResult) -> CheckResult:
    problems = tuple(
        Problem(p.stage, p.fault[:TEXT_CHARS_MAX], p.text[:TEXT_CHARS_MAX], p.device)
        for p in result.problems[:RESULT_ENTRIES_MAX]
    )
    sound = tuple(t for t in result.timings[:RESULT_ENTRIES_MAX] if _is_sound(t))
    return msgspec.structs.replace(result, timings=sound, problems=problems)


def _is_sound(timing: Timing) -> bool:
    return 0 < timing.best_s < float("inf") and timing.spread >= 0 and 0 <= timing.waited < 1


# --- conclude


def conclude(job: Job, now: float) -> r.Record | None:
    """The next step of a check, or the beginning of one that is due."""
    if not job.settings.node_check or any(node.doubtful for node in job.nodes.values()):
        return None
    current = job.checkup
    if current is None:
        return _readmit(job, now) or _begin(job, now)
    if not lives_of(job, current):
        return r.CheckupDropped(at=now, checkup=current.name, why="none of the nodes is there any more")
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


def next_deadline(job: Job) -> float | None:
    """When a round is over at the latest, or a check is due; None if only events can bring one."""
    if not job.settings.node_check:
        return None
    if job.checkup:
        return _goes_on_at(job, job.checkup)
    if isinstance(job.phase, Gathering):
        return _gathered_at(job, job.phase)
    return min((at for node in _idle(job) if (at := _due_at(job, node)) is not None), default=None)


def _goes_on_at(job: Job, current: Checkup) -> float | None:
    """A round that everybody has answered is followed by the next at once, or by a pause."""
    if not current.rounds:
        return None
    last = current.rounds[-1]
    return last.deadline if is_unheard(job, current) else last.heard_at + PAUSE_S


def _begin(job: Job, now: float) -> r.CheckupBegan | None:
    due = _due(job, now)
    if not due:
        return None
    missing = max(PLAYERS_WANTED - len(due), 0) if len(due) < PLAYERS_WANTED else 0
    well = [n.node_id for n in _idle(job) if n.eligible and n not in due and not isinstance(n.health, Unchecked)]
    reasons = dict.fromkeys(_reason(job, node) for node in due)
    return r.CheckupBegan(
        at=now,
        checkup=f"{job.term}.{job.checkups + 1}",
        why=", ".join(reasons),
        lives={node.node_id: node.incarnation for node in due},
        partners=tuple(well[:missing]),
    )


def _due(job: Job, now: float) -> list[Node]:
    if isinstance(job.phase, Gathering):
        at = _gathered_at(job, job.phase)
        return awaited(job) if at is not None and at <= now else []
    return [node for node in _idle(job) if (at := _due_at(job, node)) is not None and at <= now]


def _gathered_at(job: Job, phase: Gathering) -> float | None:
    """When those who could take part, if they passed, have been enough for the settling time; None if nobody is
    awaited, or they are too few."""
    waiting = awaited(job)
    here = [*waiting, *(node for node in job.nodes.values() if node.eligible)]
    if not waiting or len(here) < job.settings.nodes_min:
        return None
    joined = sorted(node.joined_at for node in here)
    if len(here) >= job.settings.nodes_max:
        return max(node.joined_at for node in waiting)
    return max(joined[job.settings.nodes_min - 1], phase.since) + job.settings.settle_s


def _idle(job: Job) -> list[Node]:
    """Nodes that are here and run no workers of a view."""
    here = [node for node in job.nodes.values() if node.is_here]
    if not isinstance(job.phase, Serving):
        return here
    return [node for node in here if not is_busy(job, node)]


def _due_at(job: Job, node: Node) -> float | None:
    """Of a node that stands by."""
    interval_s = job.settings.spare_check_interval_s
    match node.health:
        case Awaited():
            return node.joined_at
        case Fit(at=at) | Slow(at=at) | LeftOut(at=at) | Unfit(at=at) if interval_s > 0:
            return at + interval_s
        case _:
            return None


def _reason(job: Job, node: Node) -> str:
    if isinstance(node.health, Awaited) and node.health.why != "it joined":
        return node.health.why
    if job.view is None:
        return "before the job"
    return "it joined" if isinstance(node.health, Awaited) else "standing by"


# --- verdicts


def _verdicts(job: Job, current: Checkup, evidence: Evidence, now: float) -> r.NodesChecked:
    nodes, links = judge(evidence)
    left_out = _left_out(job, nodes, links)
    return r.NodesChecked(
        at=now,
        checkup=current.name,
        why=current.why,
        took_s=now - current.began_at,
        accelerator=usual_accelerator(job, current),
        nodes=tuple(msgspec.structs.replace(v, is_left_out=v.node_id in left_out) for v in nodes),
        links=tuple(links),
        norms=tuple(norms(evidence)[0].values()),
    )


def _left_out(job: Job, nodes: list[NodeVerdict], links: list[LinkVerdict]) -> set[str]:
    """An end of each broken link and, if that is wanted, the slow, as many as the job can do without."""
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


def _readmit(job: Job, now: float) -> r.NodeReadmitted | None:
    """While too few are there without it."""
    if not isinstance(job.phase, Gathering) or job.settings.check_only:
        return None
    able = sum(node.eligible or (node.is_here and isinstance(node.health, Awaited)) for node in job.nodes.values())
    waiting = [n for n in job.nodes.values() if n.is_here and isinstance(n.health, LeftOut)]
    if able >= job.settings.nodes_min or able + len(waiting) < job.settings.nodes_min or not waiting:
        return None
    node = min(waiting, key=lambda n: n.join_order)
    why = f"{able} of at least {job.settings.nodes_min} nodes are here without it"
    return r.NodeReadmitted(at=now, node_id=node.node_id, incarnation=node.incarnation, why=why)


# --- evolve

CheckRecord = (
    r.NodesChecked
    | r.NodeSuspected
    | r.NodeReadmitted
    | r.CheckupBegan
    | r.RoundBegan
    | r.RoundReported
    | r.CheckupDropped
)


def evolve(job: Job, record: CheckRecord) -> None:
    """Called by the one door."""
    match record:
        case r.CheckupBegan(at=at, checkup=name, why=why, lives=lives, partners=partners):
            helpers = {node_id: job.nodes[node_id].incarnation for node_id in partners}
            job.checkup = Checkup(name, why, at, dict(lives), helpers)
            job.checkups += 1
        case r.RoundBegan(at=at, tasks=tasks, deadline=deadline):
            assert job.checkup is not None, "a round of no check"
            job.checkup.rounds.append(Played(dict(tasks), deadline, heard_at=at))
        case r.RoundReported(at=at, node_id=node_id, round=number, result=result):
            assert job.checkup is not None, "a result of no check"
            job.checkup.rounds[number].results[node_id] = result
            job.checkup.rounds[number].heard_at = at
        case r.CheckupDropped():
            job.checkup = None
        case r.NodesChecked():
            _take_verdicts(job, record)
        case r.NodeSuspected(node_id=node_id, why=why):
            job.nodes[node_id].health = Awaited(why)
        case r.NodeReadmitted(at=at, node_id=node_id, why=why):
            job.nodes[node_id].health = Slow(at=at, why=why)
        case _:
            assert_never(record)


def _take_verdicts(job: Job, record: r.NodesChecked) -> None:
    job.checkup, job.checked = None, record
    for norm in record.norms:
        if norm.count >= PLAYERS_WANTED or norm.stage not in job.norms:
            job.norms[norm.stage] = norm
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
