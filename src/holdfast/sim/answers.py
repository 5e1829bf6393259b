"""Questions about a fleet, each a set of scenarios, and what follows from their runs.

    goodput    the scenario itself: what comes of it, and where the time went
    spares     the same job with more and more machines beside it: how many keep it at its speed, and what they cost
    cadence    with checkpoints taken more or less often
    strategy   with each way of answering faults
    nines      what one more nine of the job's speed costs, from the runs of `spares`

Every figure is a mean over seeds with its 95 % confidence interval (Student's t).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import StrEnum
from statistics import mean, stdev

import msgspec

from holdfast.sim.fault_models import FaultModel
from holdfast.sim.outages import DAY_S
from holdfast.sim.parallel_runs import RunTask
from holdfast.sim.scenario import RecoveryPlan, Scenario
from holdfast.sim.simulation import SimulatedRun

SPARE_SHARES = (0.0, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08)
"""Machines that are tried beside those with ranks, as a share of these. On a public trace 2.3 % are in repair on the
average, and 7.8 % at the worst of a hundred days."""
CADENCES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Intervals that are tried, as multiples of the optimum by Young's and Daly's formula."""
CADENCE_MIN_S = 10.0
NINES = (0.9, 0.99, 0.999, 0.9999)
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t for 1, 2, ... degrees of freedom; above, the normal distribution's is near enough."""
T_95_LARGE = 2.1


class Question(StrEnum):
    """What can be asked."""

    GOODPUT = "goodput"
    SPARES = "spares"
    CADENCE = "cadence"
    STRATEGY = "strategy"
    NINES = "nines"


class Estimate(msgspec.Struct, frozen=True):
    """A mean over seeds."""

    mean: float
    plus_minus: float = 0.0
    """Half of its 95 % confidence interval; 0 with one seed."""


class Variant(msgspec.Struct, frozen=True):
    """One of the scenarios that are compared."""

    label: str
    scenario: Scenario
    amount: float = 0.0
    """What differs, as a number: spares, seconds."""


class VariantOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a variant over all seeds."""

    label: str
    amount: float
    nodes: int
    spares: int
    goodput: Estimate
    job_rate: Estimate
    bound: Estimate
    accounts: dict[str, float]
    jobs_ended: float
    """A run, on the average; so are these."""
    incidents: float
    faults: float

    @property
    def share_of_bound(self) -> float:
        """Return the goodput as a share of what no job can exceed."""
        return self.goodput.mean / self.bound.mean if self.bound.mean else 0.0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a question: a sentence, and the figures it follows from."""

    question: Question
    sentence: str
    outcomes: tuple[VariantOutcome, ...]


def variants(question: Question, scenario: Scenario) -> list[Variant]:
    """Return the scenarios that a question compares."""
    match question:
        case Question.GOODPUT:
            return [Variant(scenario.plan.value, scenario)]
        case Question.SPARES | Question.NINES:
            return [_with_spares(scenario, count) for count in _spare_counts(scenario)]
        case Question.CADENCE:
            optimum = optimal_interval_s(scenario)
            return [_with_cadence(scenario, max(optimum * times, CADENCE_MIN_S)) for times in CADENCES]
        case Question.STRATEGY:
            return [Variant(plan.value, msgspec.structs.replace(scenario, plan=plan)) for plan in RecoveryPlan]


def _spare_counts(scenario: Scenario) -> list[int]:
    tried = {math.ceil(share * scenario.working_nodes) for share in SPARE_SHARES}
    return sorted({*tried, scenario.spares})


def _with_spares(scenario: Scenario, count: int) -> Variant:
    """Return the same job with this many machines beside it: they are bought in addition."""
    nodes = scenario.working_nodes + count
    return Variant(f"{count}", msgspec.structs.replace(scenario, nodes=nodes, spares=count), float(count))


def _with_cadence(scenario: Scenario, every_s: float) -> Variant:
    return Variant(duration(every_s), msgspec.structs.replace(scenario, checkpoint_every_s=every_s), every_s)


def optimal_interval_s(scenario: Scenario) -> float:
    """Return the optimum by Young's and Daly's formula, if each fault costs the work since the last checkpoint."""
    stall_s = mean(scenario.times.checkpoint_stall)
    return math.sqrt(2.0 * max(stall_s, 1e-3) * DAY_S / max(faults_per_day(scenario), 1e-9))


def faults_per_day(scenario: Scenario) -> float:
    """Return how many machines fail a day."""
    if scenario.trace is not None:
        per_node = len(scenario.trace.outages) / (scenario.trace.nodes * scenario.trace.span_s / DAY_S)
        return per_node * scenario.nodes
    return scenario.model.per_node_day * scenario.nodes if isinstance(scenario.model, FaultModel) else 0.0


class Inquiry:
    """Some questions about one scenario. Runs that several of them need are made once."""

    def __init__(self, scenario: Scenario, questions: Sequence[Question], seeds: int, target: float) -> None:
        self._scenario, self._target, self._seeds = scenario, target, seeds
        self._variants = {question: variants(question, scenario) for question in dict.fromkeys(questions)}
        self._keys: dict[bytes, int] = {}
        self.tasks: list[RunTask] = []
        for variant in (one for found in self._variants.values() for one in found):
            if (key := _key(variant)) not in self._keys:
                self._keys[key] = len(self.tasks)
                self.tasks += [RunTask(variant.scenario, seed) for seed in range(seeds)]

    def answers(self, runs: Sequence[SimulatedRun]) -> list[Answer]:
        """Return the answers that the results of `tasks` give."""
        found = []
        for question, compared in self._variants.items():
            outcomes = tuple(self._outcome(variant, runs) for variant in compared)
            sentence = _SENTENCES[question](outcomes, self._scenario, self._target)
            found.append(Answer(question=question, sentence=sentence, outcomes=outcomes))
        return found

    def first_run(self, runs: Sequence[SimulatedRun]) -> SimulatedRun:
        """Return the run whose course a picture shows: of the scenario itself, or of the first variant."""
        own = _key(Variant("", self._scenario))
        return runs[self._keys.get(own, 0)]

    def _outcome(self, variant: Variant, runs: Sequence[SimulatedRun]) -> VariantOutcome:
        first = self._keys[_key(variant)]
        own = runs[first : first + self._seeds]
        names = dict.fromkeys(name for run in own for name in run.accounts)
        accounts = {name: mean(run.accounts.get(name, 0.0) for run in own) for name in names}
        return VariantOutcome(
            label=variant.label,
            amount=variant.amount,
            nodes=variant.scenario.nodes,
            spares=variant.scenario.spares,
            goodput=estimate([run.goodput for run in own]),
            job_rate=estimate([run.job_rate for run in own]),
            bound=estimate([run.bound for run in own]),
            accounts=dict(sorted(accounts.items(), key=lambda pair: -pair[1])),
            jobs_ended=mean(run.jobs_ended for run in own),
            incidents=mean(run.incidents for run in own),
            faults=mean(run.faults for run in own),
        )


def _key(variant: Variant) -> bytes:
    return msgspec.msgpack.encode(variant.scenario)


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of values and half of its 95 % confidence interval."""
    if len(values) < 2:
        return Estimate(values[0])
    t = T_95[len(values) - 2] if len(values) - 2 < len(T_95) else T_95_LARGE
    return Estimate(mean(values), t * stdev(values) / math.sqrt(len(values)))


# --- sentences


def _goodput_sentence(outcomes: Sequence[VariantOutcome], scenario: Scenario, target: float) -> str:
    (one,) = outcomes
    lost = one.bound.mean - one.goodput.mean
    return (
        f"{percent(one.goodput)} of all {scenario.nodes} machines' time is work that counts, spares charged: "
        f"{100 * one.share_of_bound:.2f} % of the bound of {100 * one.bound.mean:.2f} % that repairs leave to any job"
        f" ({100 * max(lost, 0.0):.2f} % of the time is lost beside them)"
    )


def _spares_sentence(outcomes: Sequence[VariantOutcome], scenario: Scenario, target: float) -> str:
    enough = next((one for one in outcomes if one.job_rate.mean >= target), None)
    best = max(outcomes, key=lambda one: one.goodput.mean)
    most = f"most work for the money comes with {best.label}: an idle spare raises the job's rate, and is paid for"
    if enough is None:
        top = max(outcomes, key=lambda one: one.job_rate.mean)
        return (
            f"no number of spares keeps {scenario.working_nodes} machines at {100 * target:g} % of their speed: the"
            f" best is {percent(top.job_rate)} with {top.label}; {most}"
        )
    return (
        f"{enough.label} spares keep a job of {scenario.working_nodes} machines at {percent(enough.job_rate)} of its"
        f" speed (wanted {100 * target:g} %); {most}"
    )


def _cadence_sentence(outcomes: Sequence[VariantOutcome], scenario: Scenario, target: float) -> str:
    best = max(outcomes, key=lambda one: one.goodput.mean)
    worst = min(outcomes, key=lambda one: one.goodput.mean)
    margin = best.goodput.mean - worst.goodput.mean
    return (
        f"a checkpoint every {best.label} is best ({percent(best.goodput)}); from {outcomes[0].label} to"
        f" {outcomes[-1].label} it makes a difference of {100 * margin:.2f} points"
    )


def _strategy_sentence(outcomes: Sequence[VariantOutcome], scenario: Scenario, target: float) -> str:
    in_order = sorted(outcomes, key=lambda one: -one.goodput.mean)
    best, restart = in_order[0], next(one for one in outcomes if one.label == RecoveryPlan.RESTART.value)
    machines = (best.goodput.mean - restart.goodput.mean) * scenario.nodes
    return (
        f"{best.label} pays most, with {percent(best.goodput)}; {restart.label} has {percent(restart.goodput)}, as if"
        f" {machines:.0f} of {scenario.nodes} machines were not there"
    )


def _nines_sentence(outcomes: Sequence[VariantOutcome], scenario: Scenario, target: float) -> str:
    texts = []
    for nine in NINES:
        found = next((one for one in outcomes if one.job_rate.mean >= nine), None)
        if found is None:
            top = max(outcomes, key=lambda one: one.job_rate.mean)
            texts.append(f"{100 * nine:g} % is not reached (the best is {percent(top.job_rate)})")
            break
        extra = 100.0 * found.spares / scenario.working_nodes
        texts.append(f"{100 * nine:g} % takes {found.label} spares ({extra:.1f} % more machines)")
    return f"of the job's full speed, {'; '.join(texts)}"


_SENTENCES: dict[Question, Callable[[Sequence[VariantOutcome], Scenario, float], str]] = {
    Question.GOODPUT: _goodput_sentence,
    Question.SPARES: _spares_sentence,
    Question.CADENCE: _cadence_sentence,
    Question.STRATEGY: _strategy_sentence,
    Question.NINES: _nines_sentence,
}


def percent(value: Estimate) -> str:
    """Return a share for people, with its uncertainty."""
    around = f" ± {100 * value.plus_minus:.2f}" if value.plus_minus else ""
    return f"{100 * value.mean:.2f}{around} %"


def duration(seconds: float) -> str:
    """Return a duration in the largest unit that fits."""
    for size, name in ((DAY_S, "d"), (3_600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {name}"
    return f"{seconds:.3g} s"
