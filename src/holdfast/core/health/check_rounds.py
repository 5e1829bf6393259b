"""The rounds of a check under way: who takes part, what each is told, what is known so far. Pure; checkup.py drives it.

Its progress is not journaled, so it is no part of what a journal rebuilds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from holdfast.core.health.findings import CheckResult, CheckTask, Problem, Timing
from holdfast.core.health.tournament import COMPUTING, Round, pair_of
from holdfast.core.health.verdicts import Evidence, deserves_another_look, problems_of, without_what_passed
from holdfast.core.state import Job, Node, Serving

CPU = "cpu"
MACHINES_COMPARED_MIN = 2
WAITED_MAX = 0.95
"""Of the time of a pair: something was done, too."""


@dataclass
class Played:
    """One round."""

    tasks: dict[str, CheckTask]
    deadline: float
    heard_at: float
    """When the last result came; before any, when it began."""
    results: dict[str, CheckResult] = field(default_factory=dict)


@dataclass
class Checkup:
    """A check under way."""

    name: str
    why: str
    began_at: float
    lives: dict[str, str]
    partners: dict[str, str]
    """As `lives`, of those that only help."""
    rounds: list[Played] = field(default_factory=list)


def takes_part(job: Job, current: Checkup, node_id: str) -> bool:
    """Whether this life of the node is still here, and has nothing better to do."""
    node = job.nodes.get(node_id)
    life = current.lives.get(node_id) or current.partners.get(node_id)
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


def machines_of(job: Job) -> dict[str, str]:
    """By node: what it may share with others. Those that see the same boot are on one machine, whatever its names."""
    return {node_id: node.info.boot_id or node.info.machine_id for node_id, node in job.nodes.items()}


def evidence_of(job: Job, current: Checkup) -> Evidence:
    """What is known. Who did not answer in time failed; who is gone says nothing."""
    evidence = Evidence(lives=lives_of(job, current), alone={}, pairs={}, before=dict(job.norms))
    kind = usual_accelerator(job, current)
    for played in current.rounds:
        for node_id, task in played.tasks.items():
            if not takes_part(job, current, node_id):
                continue
            result = played.results.get(node_id) or _no_answer(played, task)
            if task.kind != "pair":
                _add(evidence, node_id, task, _of_kind(result, kind))
            elif task.rank == 0 and takes_part(job, current, task.partner):
                other = played.results.get(task.partner) or _no_answer(played, played.tasks[task.partner])
                evidence.pairs.setdefault(pair_of(node_id, task.partner), []).append(_both(result, other))
    evidence.asleep = {node_id for node_id in evidence.alone if not store_port(current, node_id)}
    alone = {node_id: without_what_passed(tries) for node_id, tries in evidence.alone.items()}
    evidence.alone = _with_what_machines_cost(alone, machines_of(job))
    return evidence


def _add(evidence: Evidence, node_id: str, task: CheckTask, result: CheckResult) -> None:
    """One of a node alone. To be ready is no measurement, and says something only where it fails, or failed before."""
    tries = evidence.alone.setdefault(node_id, [])
    if task.kind == "alone" or problems_of([*tries[-1:], result]):
        tries.append(result)
    evidence.again.pop(node_id, None)
    if deserves_another_look(tries):
        evidence.again[node_id] = task.kind


def usual_accelerator(job: Job, current: Checkup) -> str:
    """What the nodes were checked as before, else what most of them are checked as; empty if nothing is known. The CPU
    is what is found where nothing else is: of as many it is the exception."""
    if job.checked and job.checked.accelerator:
        return job.checked.accelerator
    told = ((n, result.accelerator) for played in current.rounds for n, result in played.results.items())
    kinds = Counter(dict(one for one in told if one[1]).values())
    return max(kinds, key=lambda kind: (kinds[kind], kind != CPU), default="")


def _of_kind(result: CheckResult, kind: str) -> CheckResult:
    """The result, if it can be compared with others: another processor has other work to do."""
    if result.accelerator in ("", kind):
        return result
    text = f"it is checked as {result.accelerator}, and others as {kind}: a device is missing, or --accelerator differs"
    timings = tuple(timing for timing in result.timings if timing.stage not in COMPUTING)
    problems = (*result.problems, Problem("device", "device-missing", text))
    return msgspec.structs.replace(result, timings=timings, problems=problems)


def _with_what_machines_cost(
    alone: dict[str, list[CheckResult]], machines: dict[str, str]
) -> dict[str, list[CheckResult]]:
    """A machine that others use is slow, and so are all nodes on it, in the same way: they were measured one after the
    other, and who came at a worse moment is no worse. What counts is the best moment of all. Where all are on one
    machine there is none to compare it with, and its nodes are no slower than they were when it was idle."""
    if len({machines[node_id] for node_id, tries in alone.items() if tries}) < MACHINES_COMPARED_MIN:
        return {node_id: [_lengthened(result, 0.0) for result in tries] for node_id, tries in alone.items()}
    least: dict[str, float] = {}
    for node_id, tries in alone.items():
        shares = [t.waited for result in tries for t in result.timings if t.stage in COMPUTING]
        least[machines[node_id]] = min([*shares, least.get(machines[node_id], 1.0)])
    return {n: [_lengthened(result, least[machines[n]]) for result in tries] for n, tries in alone.items()}


def _lengthened(result: CheckResult, waited: float) -> CheckResult:
    timings = (
        msgspec.structs.replace(t, best_s=t.best_s / (1 - waited) if t.stage in COMPUTING else t.best_s, waited=0.0)
        for t in result.timings
    )
    return msgspec.structs.replace(result, timings=tuple(timings))


def _no_answer(played: Played, task: CheckTask) -> CheckResult:
    return CheckResult(problems=(Problem("examination", "no-answer", f"no answer in round {task.round}"),))


def _both(one: CheckResult, other: CheckResult) -> CheckResult:
    """What two say of their collectives: the slower counts, and what either waited for."""
    slower: dict[tuple[str, int], Timing] = {}
    waited: dict[tuple[str, int], float] = {}
    for timing in (*one.timings, *other.timings):
        key = (timing.stage, timing.device)
        waited[key] = waited.get(key, 0.0) + timing.waited
        if key not in slower or timing.best_s > slower[key].best_s:
            slower[key] = timing
    timings = (msgspec.structs.replace(t, waited=min(waited[key], WAITED_MAX)) for key, t in slower.items())
    return CheckResult(timings=tuple(timings), problems=(*one.problems, *other.problems))


def tasks_of(job: Job, current: Checkup, step: Round, number: int) -> Iterator[tuple[str, CheckTask]]:
    """What each node of a round is told."""
    for node_id in step.alone:
        yield node_id, CheckTask(checkup=current.name, round=number, kind="alone", stages=step.stages)
    for node_id in step.ready:
        yield node_id, CheckTask(checkup=current.name, round=number, kind="ready")
    for pair in step.pairs:
        host, port = job.nodes[pair[0]].info.address, store_port(current, pair[0])
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


def store_port(current: Checkup, node_id: str) -> int:
    """Where its store is, by its last result; 0 if that says there is none, or never came: the process is gone."""
    asked = (played for played in reversed(current.rounds) if node_id in played.tasks)
    last = next(asked, None)
    return last.results[node_id].store_port if last and node_id in last.results else 0


def is_busy(job: Job, node: Node) -> bool:
    """Whether this life of the node has a place in the view, or its workers are yet to leave at a step boundary."""
    member = job.members.get(node.node_id)
    is_leaving = job.proved < 0 and job.released.get(node.node_id) == node.incarnation
    return is_leaving or (member is not None and member.incarnation == node.incarnation)
