"""From measurements to verdicts. Pure statistics: hundreds of simulated clusters go through this very code
(tests/core/health/test_verdicts.py).

**What is slow.** For each stage the expected time is the median over the nodes (of an even number, the lower of the two
in the middle, so that of two nodes the faster one counts, and half of the nodes may be bad). A value is slow beyond

    expected · (1 + max(floor, DEVIATIONS_MAX · deviation))

where the deviation is the larger of two: how much the nodes differ (the median absolute deviation, 1.4826 times,
corrected for small numbers) and how much the blocks of one and the same node differ. The floor is 5 %: less is not
worth a node. So a quiet cluster finds a node that is 6 % slow, and a noisy one accuses no node.

A slow node is measured again, unless it is beyond doubt, together with as many that were well: if all have become
slower, none is at fault. Each try has its own norm, and a node is slow if it is slow in every try.

Of pairs, the better half is what is normal: one bad node of three spoils two pairs of three.

**Whose fault a slow pair is.** A node with one good pairing is *cleared*. Then

    a slow pair of two that are cleared                                         the link between them is bad
    slow with two partners that are cleared, and good with none                 the node is bad
    slow with one such partner, and there is no other to try                    the link, or the node: unknown

A pair that failed counts as slow, without a value. A pair that is five times worse than its ends are with others is a
bad link also where one of them is bad.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from holdfast.core.health.findings import (
    ALONE,
    PAIRED,
    CheckProblem,
    CheckResult,
    LinkVerdict,
    Measured,
    NodeVerdict,
    Norm,
    Stage,
    TaskKind,
    Timing,
)

FLOOR = 0.05
FLOORS: Mapping[Stage, float] = {"disk": 0.5}
"""Of other stages. A disk waits for its neighbours and for its own cache: half as long again says nothing."""
FLOOR_BY_HISTORY = 0.2
"""Where too few are measured at once and an earlier check of the job must do: the conditions were others."""
DEVIATIONS_MAX = 5.0
MAD_TO_DEVIATION = 1.4826
HALF_TO_WHOLE: Mapping[Stage, float] = dict.fromkeys(PAIRED, 2.0)
"""The better half of many values differs less than all of them do."""
COMPARED_MIN = 3
"""Values from which a norm is taken rather than from an earlier one, if there is one."""
ACCUSERS_MIN = 2
OUT_OF_PROPORTION = 5.0
TRIES_MAX = 3
"""Of a node or a pair that was slow."""
TRIES_OF_CLEAR_MAX = 2
CLEARLY = 3.0
"""Times the limit: who was that slow twice need not be tried a third time."""
TRIES_OF_FAILURES_MAX = 2
"""Of a pair that did not come through: each may take as long as it may take."""
BEYOND_DOUBT_S = 1.0
"""A piece of work of milliseconds that takes this long was not disturbed by chance, and to repeat it takes long."""

LOOKS_MAX = 2
"""At a node that fails by what may pass."""
PASSING = frozenset({"device-memory-taken", "device-out-of-memory", "disk-error", "check-failed", "no-answer"})
"""Faults that may be gone a moment later: of the job before, of a full disk, of a process that did not come up. A wrong
result, a counter and what the accelerator's table knows are final."""

Norms = list[dict[Stage, Norm]]
"""By the number of the try."""
Pair = tuple[str, str]
"""Two node ids, the lower one first."""


class Evidence(msgspec.Struct, kw_only=True):
    """All results of one check so far. All first results are compared with each other, then all second ones."""

    incarnations: dict[str, str]
    """By node id: whose verdicts are wanted, and their incarnations."""
    alone: dict[str, list[CheckResult]]
    pairs: dict[Pair, list[CheckResult]]
    before: dict[Stage, Norm]
    """Norms of an earlier check."""
    again: dict[str, TaskKind] = msgspec.field(default_factory=dict)
    """By node, if its last result is a failure that may have passed by now: what it failed in."""
    asleep: set[str] = msgspec.field(default_factory=set)
    """Nodes whose process is gone: it must be started again before they are paired."""


class Slowness(msgspec.Struct, frozen=True):
    """What is known of pairs."""

    slow: frozenset[Pair]
    cleared: frozenset[str]

    def accusers(self, node_id: str) -> list[str]:
        """Return the cleared partners with which the node was slow."""
        partners = (_other(pair, node_id) for pair in sorted(self.slow) if node_id in pair)
        return [partner for partner in partners if partner in self.cleared]


# --- norms


def lower_median(values: Iterable[float]) -> float:
    """Return the middle value, of an even number the lower of the two."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def norm_of(stage: Stage, timings: Sequence[Timing], before: Norm | None = None) -> Norm | None:
    """Return what is to be expected; None if nothing was measured."""
    if not timings:
        return None
    noise = _noise(timings)
    timings = _compared_ones(stage, timings)
    if before and len(timings) < COMPARED_MIN:
        floor = max(FLOOR_BY_HISTORY, FLOORS.get(stage, FLOOR))
        expected, deviation = before.expected_s, max(before.deviation, noise)
    else:
        floor = FLOORS.get(stage, FLOOR)
        expected = lower_median(timing.best_s for timing in timings)
        deviation = max(noise, _difference(timings, expected) * HALF_TO_WHOLE.get(stage, 1.0))
    limit_s = expected * (1 + max(floor, DEVIATIONS_MAX * deviation))
    return Norm(stage=stage, expected_s=expected, deviation=deviation, limit_s=limit_s, count=len(timings))


def norm_again(first: Norm, timings: Sequence[Timing], before: Norm | None = None) -> Norm | None:
    """Return the norm of a later try. How much nodes differ is known from the first; the noise of the blocks may be
    larger."""
    if not timings:
        return None
    if before and first.count < COMPARED_MIN:
        expected = before.expected_s
    else:
        expected = lower_median(timing.best_s for timing in _compared_ones(first.stage, timings))
    beyond = max(first.limit_s / first.expected_s, 1 + DEVIATIONS_MAX * _noise(timings))
    return msgspec.structs.replace(first, expected_s=expected, limit_s=expected * beyond, count=len(timings))


def _noise(timings: Sequence[Timing]) -> float:
    """Return how much the blocks of one measurement differ: the median, of an even number the larger of the two."""
    return sorted(timing.spread for timing in timings)[len(timings) // 2]


def _compared_ones(stage: Stage, timings: Sequence[Timing]) -> Sequence[Timing]:
    if stage in PAIRED:
        return sorted(timings, key=lambda timing: timing.best_s)[: (len(timings) + 1) // 2]
    return timings


def _difference(timings: Sequence[Timing], expected: float) -> float:
    """Return how much nodes differ, as a share. With few of them the lower median of their distances is too small, so
    it is corrected."""
    if expected <= 0:
        return 0.0
    distance = lower_median(abs(timing.best_s - expected) for timing in timings)
    return MAD_TO_DEVIATION * distance / expected * (1 + 2 / len(timings))


# --- alone


def norms(evidence: Evidence) -> Norms:
    """Return, for each try, the norms of all stages that were measured in it."""
    count = max((len(tries) for tries in (*evidence.alone.values(), *evidence.pairs.values())), default=1)
    found: Norms = [{} for _ in range(count)]
    for stage in (*ALONE, *PAIRED):
        before = evidence.before.get(stage)
        for number in range(count):
            timings = _timings(evidence, stage, number)
            first = found[0].get(stage)
            norm = norm_again(first, timings, before) if first else norm_of(stage, timings, before)
            if norm:
                found[number][stage] = norm
    return found


def _timings(evidence: Evidence, stage: Stage, number: int) -> list[Timing]:
    results = evidence.alone if stage in ALONE else evidence.pairs
    there = [tries[number] for tries in results.values() if number < len(tries)]
    return [timing for result in there for timing in result.timings if timing.stage == stage]


def measured(tries: Sequence[CheckResult], norms: Norms, partner: str = "") -> list[Measured]:
    """Return for each stage the worst device, each with its best try."""
    best: dict[tuple[Stage, int], Measured] = {}
    for known, result in zip(norms, tries, strict=False):
        for timing in result.timings:
            key = (timing.stage, timing.device)
            if norm := known.get(timing.stage):
                value = _compared(timing, norm, partner)
                best[key] = min(best.get(key, value), value, key=_by_limit)
    worst: dict[Stage, Measured] = {}
    for value in best.values():
        worst[value.stage] = max(worst.get(value.stage, value), value, key=_by_limit)
    return list(worst.values())


def _compared(timing: Timing, norm: Norm, partner: str) -> Measured:
    return Measured(
        stage=timing.stage,
        value_s=timing.best_s,
        expected_s=norm.expected_s,
        limit_s=norm.limit_s / (1 - timing.waited),  # so long it may have taken for others' sake
        device=timing.device,
        partner=partner,
    )


def _by_limit(value: Measured) -> float:
    return value.value_s / value.limit_s


def slow_alone(evidence: Evidence, stages: Sequence[Stage] = ALONE) -> list[str]:
    """Return the nodes that are slow in a stage of their own."""
    known = norms(evidence)
    tried = evidence.alone.items()
    return [n for n, tries in tried if any(m.is_slow and m.stage in stages for m in measured(tries, known))]


def slow_stages(tries: Sequence[CheckResult], known: Norms) -> set[Stage]:
    """Return the stages that were slow in every try."""
    return {value.stage for value in measured(tries, known) if value.is_slow}


def is_doubtful(tries: Sequence[CheckResult], known: Norms) -> bool:
    """Return whether to measure a slow result again: it may have been disturbed, or failed by chance."""
    values = measured(through(tries), known)
    if not values:
        return len(tries) < TRIES_OF_FAILURES_MAX
    if any(value.value_s > max(value.limit_s, BEYOND_DOUBT_S) for value in values):
        return False
    is_clear = any(_by_limit(value) > CLEARLY for value in values)
    return len(tries) < (TRIES_OF_CLEAR_MAX if is_clear else TRIES_MAX)


def through(tries: Sequence[CheckResult]) -> list[CheckResult]:
    """Return the results, with empty ones for those that failed: they say nothing about times."""
    return [CheckResult() if result.problems else result for result in tries]


def is_transient(result: CheckResult) -> bool:
    """Return whether the result failed only by faults that may be gone a moment later."""
    return bool(result.problems) and all(problem.fault in PASSING for problem in result.problems)


def may_retry_failure(tries: Sequence[CheckResult]) -> bool:
    """Return whether the last result failed by a transient fault that was not retried yet."""
    return bool(tries) and is_transient(tries[-1]) and sum(is_transient(result) for result in tries) < LOOKS_MAX


def drop_transient_failures(tries: Sequence[CheckResult]) -> list[CheckResult]:
    """Return the results without transient failures that a later result followed."""
    return [result for number, result in enumerate(tries, 1) if number == len(tries) or not is_transient(result)]


def problems_of(tries: Sequence[CheckResult]) -> tuple[CheckProblem, ...]:
    """Return the problems of all results."""
    return tuple(problem for result in tries for problem in result.problems)


# --- pairs


def slowness(evidence: Evidence) -> Slowness:
    """Return which pairs are slow, and which nodes are cleared by a good pair."""
    known = norms(evidence)
    slow = {pair for pair, tries in evidence.pairs.items() if is_slow_pair(tries, known)}
    cleared = {node_id for pair in evidence.pairs if pair not in slow for node_id in pair}
    return Slowness(frozenset(slow), frozenset(cleared))


def is_slow_pair(tries: Sequence[CheckResult], known: Norms) -> bool:
    """Return whether the pair is slow. One try that succeeded makes up for one that failed."""
    return all(result.problems for result in tries) or any(m.is_slow for m in measured(through(tries), known))


def _other(pair: Pair, node_id: str) -> str:
    return pair[1] if pair[0] == node_id else pair[0]


# --- verdicts


def judge(evidence: Evidence) -> tuple[list[NodeVerdict], list[LinkVerdict]]:
    """Return the verdicts on the nodes that are judged, and on bad links."""
    known, found = norms(evidence), slowness(evidence)
    bad = {n for n in evidence.incarnations if n not in found.cleared and len(found.accusers(n)) >= ACCUSERS_MIN}
    nodes = [_judge_node(evidence, node_id, known, found, node_id in bad) for node_id in evidence.incarnations]
    slow_nodes = {verdict.node_id for verdict in nodes if verdict.fitness != "fit"}
    links = [
        _judge_link(pair, evidence.pairs[pair], known, found)
        for pair in sorted(found.slow)
        if (not slow_nodes & set(pair) and _is_of_a_link(pair, found)) or _is_out_of_proportion(evidence, pair, known)
    ]
    return nodes, links


def _is_out_of_proportion(evidence: Evidence, pair: Pair, known: Norms) -> bool:
    """Return whether the pair is far worse than both ends are with others: then the link is bad, as a bad node is about
    as bad with every partner."""
    usual = [_usual_excess(evidence, node_id, pair, known) for node_id in pair]
    return _excess(evidence.pairs[pair], known) > OUT_OF_PROPORTION * max(usual)


def _usual_excess(evidence: Evidence, node_id: str, but: Pair, known: Norms) -> float:
    others = (tries for pair, tries in evidence.pairs.items() if node_id in pair and pair != but)
    return min((_excess(tries, known) for tries in others), default=float("inf"))


def _excess(tries: Sequence[CheckResult], known: Norms) -> float:
    """Return the time as a multiple of the expected one; infinite if all tries failed."""
    return max((m.times for m in measured(through(tries), known)), default=float("inf"))


def _is_of_a_link(pair: Pair, found: Slowness) -> bool:
    """Return whether a slow pair is the link's fault. With a node that is not cleared it is the node's, unless there
    was no other partner to try."""
    uncleared = [node_id for node_id in pair if node_id not in found.cleared]
    return all(len(found.accusers(node_id)) < ACCUSERS_MIN for node_id in uncleared)


def _judge_node(evidence: Evidence, node_id: str, known: Norms, found: Slowness, is_bad_partner: bool) -> NodeVerdict:
    tries = evidence.alone.get(node_id, [])
    problems = problems_of(tries)
    values = [*measured(tries, known), *_with_partners(evidence, node_id, known, found, is_bad_partner)]
    fitness, why = "fit", ""
    if problems:
        fitness, why = "unfit", "; ".join(dict.fromkeys(_problem_text(problem) for problem in problems))
    elif is_bad_partner and _always_fails(evidence, node_id):
        fitness, why = "unfit", f"collectives with it fail with every partner: {_failure(evidence, node_id)}"
    elif slow := [value for value in values if value.is_slow]:
        fitness, why = "slow", "; ".join(slow_text(value) for value in slow)
    return NodeVerdict(
        node_id=node_id,
        incarnation=evidence.incarnations[node_id],
        fitness=fitness,  # type: ignore[arg-type]  # one of the three literals above
        why=why,
        measured=tuple(values),
        problems=problems,
    )


def _with_partners(evidence: Evidence, node_id: str, known: Norms, found: Slowness, is_bad: bool) -> list[Measured]:
    """Return the node's best values: of a bad one against cleared partners, else against any."""
    partners = [_other(pair, node_id) for pair in evidence.pairs if node_id in pair]
    counted = [p for p in partners if p in found.cleared] if is_bad else partners
    best: dict[Stage, Measured] = {}
    for partner in counted:
        pair = (min(node_id, partner), max(node_id, partner))
        for value in measured(evidence.pairs[pair], known, partner):
            if value.stage not in best or value.value_s < best[value.stage].value_s:
                best[value.stage] = value
    values = list(best.values())
    # An unclear case is the link's: its ends are not to be called slow for it.
    return values if is_bad else [msgspec.structs.replace(v, limit_s=max(v.limit_s, v.value_s)) for v in values]


def _always_fails(evidence: Evidence, node_id: str) -> bool:
    results = [result for pair, tries in evidence.pairs.items() if node_id in pair for result in tries]
    return all(result.problems for result in results)


def _failure(evidence: Evidence, node_id: str) -> str:
    texts = [p.text for pair, tries in evidence.pairs.items() if node_id in pair for p in problems_of(tries)]
    return texts[0] if texts else "no answer"


def _judge_link(pair: Pair, tries: Sequence[CheckResult], known: Norms, found: Slowness) -> LinkVerdict:
    slow = [value for value in measured(through(tries), known) if value.is_slow]
    doubt = [node_id for node_id in pair if node_id not in found.cleared]
    where = f"or at one of its ends ({' or '.join(doubt)}), as there was no other partner to try" if doubt else ""
    if slow:
        what = "; ".join(slow_text(value) for value in slow)
    else:
        what = "; ".join(dict.fromkeys(p.text for p in problems_of(tries))) or "no answer"
    return LinkVerdict(
        first=pair[0],
        second=pair[1],
        state="slow" if slow else "broken",
        why=f"{what}{f': the fault is there, {where}' if where else ''}",
        measured=tuple(slow),
    )


# --- words


def slow_text(value: Measured) -> str:
    """Return what was measured and expected, as text."""
    partner = f" with {value.partner}" if value.partner else ""
    device = f" on device {value.device}" if value.device > 0 else ""
    return (
        f"{value.stage}{device}{partner} took {milliseconds(value.value_s)}, {value.times:.2f} times the expected"
        f" {milliseconds(value.expected_s)} (at most {milliseconds(value.limit_s)})"
    )


def _problem_text(problem: CheckProblem) -> str:
    device = f"device {problem.device}: " if problem.device >= 0 else ""
    return f"{problem.stage} check: {device}{problem.text}"


def milliseconds(seconds: float) -> str:
    """Return a short time as text."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"
