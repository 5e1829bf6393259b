"""The rounds of a check under way: who takes part, what each is told, what is known so far. Pure; checkup.py drives it.

Its progress is not journaled, so it is no part of what a journal rebuilds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from holdfast.core.health.findings import CheckProblem, CheckResult, CheckTask, Timing
from holdfast.core.health.tournament import COMPUTING, Round, pair_of
from holdfast.core.health.verdicts import Evidence, drop_transient_failures, may_retry_failure, problems_of
from holdfast.core.state import JobState, Node, Serving

CPU = "cpu"
MACHINES_COMPARED_MIN = 2
WAITED_MAX = 0.95
"""Of the time of a pair: something was done, too."""


@dataclass
class PlayedRound:
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
    incarnations: dict[str, str]
    partners: dict[str, str]
    """As `incarnations`, of those that only help."""
    rounds: list[PlayedRound] = field(default_factory=list)


def takes_part(job: JobState, current: Checkup, node_id: str) -> bool:
    """Return whether this incarnation of the node is still here and runs no workers."""
    node = job.nodes.get(node_id)
    incarnation = current.incarnations.get(node_id) or current.partners.get(node_id)
    if node is None or not node.is_here or node.incarnation != incarnation:
        return False
    return not (isinstance(job.phase, Serving) and is_busy(job, node))


def incarnations_of(job: JobState, current: Checkup) -> dict[str, str]:
    """Return the nodes that are judged and still take part."""
    return {
        node_id: incarnation
        for node_id, incarnation in current.incarnations.items()
        if takes_part(job, current, node_id)
    }


def partners_of(job: JobState, current: Checkup) -> tuple[str, ...]:
    """Return the nodes that only help and still take part."""
    return tuple(node_id for node_id in current.partners if takes_part(job, current, node_id))


def is_unheard(job: JobState, current: Checkup) -> bool:
    """Return whether a result of the last round is still to come."""
    if not current.rounds:
        return False
    last = current.rounds[-1]
    return any(n not in last.results and takes_part(job, current, n) for n in last.tasks)


def machines_of(job: JobState) -> dict[str, str]:
    """Return by node the machine that it may share with others. Nodes with the same boot id are on one machine,
    whatever its names."""
    return {node_id: node.info.boot_id or node.info.machine_id for node_id, node in job.nodes.items()}


def evidence_of(job: JobState, current: Checkup) -> Evidence:
    """Return what is known. A node that did not answer in time has failed; a node that is gone is left out."""
    evidence = Evidence(incarnations=incarnations_of(job, current), alone={}, pairs={}, before=dict(job.checks.norms))
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
    alone = {node_id: drop_transient_failures(tries) for node_id, tries in evidence.alone.items()}
    evidence.alone = _adjusted_for_shared_machines(alone, machines_of(job))
    return evidence


def _add(evidence: Evidence, node_id: str, task: CheckTask, result: CheckResult) -> None:
    """Add a result of a node alone. A `ready` task measures nothing and only counts if it failed, or failed before."""
    tries = evidence.alone.setdefault(node_id, [])
    if task.kind == "alone" or problems_of([*tries[-1:], result]):
        tries.append(result)
    evidence.again.pop(node_id, None)
    if may_retry_failure(tries):
        evidence.again[node_id] = task.kind


def usual_accelerator(job: JobState, current: Checkup) -> str:
    """Return what the nodes were checked as before, else what most of them are checked as; empty if nothing is known.
    In a tie the CPU loses, as it is what is found where nothing else is."""
    if job.checks.last and job.checks.last.accelerator:
        return job.checks.last.accelerator
    told = ((n, result.accelerator) for played in current.rounds for n, result in played.results.items())
    kinds = Counter(dict(one for one in told if one[1]).values())
    return max(kinds, key=lambda kind: (kinds[kind], kind != CPU), default="")


def _of_kind(result: CheckResult, kind: str) -> CheckResult:
    """Return the result without what cannot be compared: another processor has other work to do."""
    if result.accelerator in ("", kind):
        return result
    text = f"it is checked as {result.accelerator}, and others as {kind}: a device is missing, or --accelerator differs"
    timings = tuple(timing for timing in result.timings if timing.stage not in COMPUTING)
    problems = (*result.problems, CheckProblem("device", "device-missing", text))
    return msgspec.structs.replace(result, timings=timings, problems=problems)


def _adjusted_for_shared_machines(
    alone: dict[str, list[CheckResult]], machines: dict[str, str]
) -> dict[str, list[CheckResult]]:
    """Return the results with the least waiting time of each machine. A machine that others use is slow for all nodes
    on it, and these were measured one after the other, so the best moment counts. If all nodes are on one machine there
    is none to compare it with, and no waiting time counts."""
    if len({machines[node_id] for node_id, tries in alone.items() if tries}) < MACHINES_COMPARED_MIN:
        return {node_id: [_adjusted(result, 0.0) for result in tries] for node_id, tries in alone.items()}
    least: dict[str, float] = {}
    for node_id, tries in alone.items():
        shares = [t.waited for result in tries for t in result.timings if t.stage in COMPUTING]
        least[machines[node_id]] = min([*shares, least.get(machines[node_id], 1.0)])
    return {n: [_adjusted(result, least[machines[n]]) for result in tries] for n, tries in alone.items()}


def _adjusted(result: CheckResult, waited: float) -> CheckResult:
    timings = (
        msgspec.structs.replace(t, best_s=t.best_s / (1 - waited) if t.stage in COMPUTING else t.best_s, waited=0.0)
        for t in result.timings
    )
    return msgspec.structs.replace(result, timings=tuple(timings))


def _no_answer(played: PlayedRound, task: CheckTask) -> CheckResult:
    return CheckResult(problems=(CheckProblem("examination", "no-answer", f"no answer in round {task.round}"),))


def _both(one: CheckResult, other: CheckResult) -> CheckResult:
    """Return what both nodes of a pair measured: the slower time counts, and what either waited for."""
    slower: dict[tuple[str, int], Timing] = {}
    waited: dict[tuple[str, int], float] = {}
    for timing in (*one.timings, *other.timings):
        key = (timing.stage, timing.device)
        waited[key] = waited.get(key, 0.0) + timing.waited
        if key not in slower or timing.best_s > slower[key].best_s:
            slower[key] = timing
    timings = (msgspec.structs.replace(t, waited=min(waited[key], WAITED_MAX)) for key, t in slower.items())
    return CheckResult(timings=tuple(timings), problems=(*one.problems, *other.problems))


def tasks_of(job: JobState, current: Checkup, step: Round, number: int) -> Iterator[tuple[str, CheckTask]]:
    """Yield the task of each node in a round."""
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
    """Return the port of the node's store, by its last result; 0 if it has none or its process is gone."""
    asked = (played for played in reversed(current.rounds) if node_id in played.tasks)
    last = next(asked, None)
    return last.results[node_id].store_port if last and node_id in last.results else 0


def is_busy(job: JobState, node: Node) -> bool:
    """Return whether this incarnation of the node is a member of the view, or its workers have yet to leave at a step
    boundary."""
    member = job.members.get(node.node_id)
    is_leaving = job.progress.first_committed < 0 and job.progress.released.get(node.node_id) == node.incarnation
    return is_leaving or (member is not None and member.incarnation == node.incarnation)
