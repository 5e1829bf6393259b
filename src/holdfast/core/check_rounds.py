"""The rounds of a check under way: who takes part, what each is told, what is known so far. Pure; checkup.py drives it.

Its progress is not journaled, so it is no part of what a journal rebuilds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from holdfast.core.health import CheckResult, CheckTask, Problem, Timing
from holdfast.core.state import Job, Node, Serving
from holdfast.core.tournament import Round, pair_of
from holdfast.core.verdicts import Evidence, best_timings


@dataclass
class Played:
    """One round."""

    tasks: dict[str, CheckTask]
    deadline: float
    results: dict[str, CheckResult] = field(default_factory=dict)


@dataclass
class Checkup:
    """A check under way."""

    name: str
    why: str
    began_at: float
    lives: dict[str, str]
    partners: tuple[str, ...]
    rounds: list[Played] = field(default_factory=list)


def takes_part(job: Job, current: Checkup, node_id: str) -> bool:
    """Whether this life of the node is still here, and has nothing better to do."""
    node = job.nodes.get(node_id)
    life = current.lives.get(node_id, node.incarnation if node and node_id in current.partners else "")
    if node is None or not node.is_here or node.incarnation != life:
        return False
    return not (isinstance(job.phase, Serving) and is_busy(job, node))


def lives_of(job: Job, current: Checkup) -> dict[str, str]:
    """Of those that are to be judged."""
    return {node_id: life for node_id, life in current.lives.items() if takes_part(job, current, node_id)}


def partners_of(job: Job, current: Checkup) -> tuple[str, ...]:
    """Of those that only help."""
    return tuple(node_id for node_id in current.partners if takes_part(job, current, node_id))


def is_unheard(job: Job, current: Checkup) -> bool:
    """Whether a result of the last round is still to come."""
    if not current.rounds:
        return False
    last = current.rounds[-1]
    return any(n not in last.results and takes_part(job, current, n) for n in last.tasks)


def evidence_of(job: Job, current: Checkup) -> Evidence:
    """What is known. Who did not answer in time failed; who is gone says nothing."""
    evidence = Evidence(lives=lives_of(job, current), alone={}, pairs={}, before=dict(job.norms))
    for played in current.rounds:
        for node_id, task in played.tasks.items():
            if not takes_part(job, current, node_id):
                continue
            result = played.results.get(node_id) or _no_answer(played, task)
            if task.kind != "pair":
                evidence.alone.setdefault(node_id, []).append(result)
            elif task.rank == 0 and takes_part(job, current, task.partner):
                other = played.results.get(task.partner) or _no_answer(played, played.tasks[task.partner])
                evidence.pairs.setdefault(pair_of(node_id, task.partner), []).append(_both(result, other))
    return evidence


def _no_answer(played: Played, task: CheckTask) -> CheckResult:
    return CheckResult(problems=(Problem("examination", "no-answer", f"no answer in round {task.round}"),))


def _both(one: CheckResult, other: CheckResult) -> CheckResult:
    """What two say of their collectives: the slower counts."""
    slower: dict[tuple[str, int], Timing] = {}
    for timing in (*best_timings([one]), *best_timings([other])):
        key = (timing.stage, timing.device)
        if key not in slower or timing.best_s > slower[key].best_s:
            slower[key] = timing
    return CheckResult(timings=tuple(slower.values()), problems=(*one.problems, *other.problems))


def tasks_of(job: Job, current: Checkup, step: Round, number: int) -> Iterator[tuple[str, CheckTask]]:
    """What each node of a round is told."""
    for node_id in step.alone:
        yield node_id, CheckTask(checkup=current.name, round=number, kind="alone")
    for node_id in step.ready:
        yield node_id, CheckTask(checkup=current.name, round=number, kind="ready")
    for pair in step.pairs:
        host, port = job.nodes[pair[0]].info.address, _store_port(current, pair[0])
        for rank, node_id in enumerate(pair):
            yield (
                node_id,
                CheckTask(
                    checkup=current.name,
                    round=number,
                    kind="pair",
                    partner=pair[1 - rank],
                    rank=rank,
                    store_host=host,
                    store_port=port,
                ),
            )


def _store_port(current: Checkup, node_id: str) -> int:
    told = (played.results[node_id].store_port for played in reversed(current.rounds) if node_id in played.results)
    return next((port for port in told if port), 0)


def is_busy(job: Job, node: Node) -> bool:
    """Whether this life of the node has a place in the view."""
    member = job.members.get(node.node_id)
    return member is not None and member.incarnation == node.incarnation
