"""How to handle what is wrong with the view in force: the ladder, and what stands beside it.

Workers that use Holdfast keep running (`can_repair_online`): a new view gives the live ones their ranks. Of the rungs,
from the cheapest, the first is chosen that is allowed (`--recovery`), fits the damage, leaves a complete copy of the
state among the workers that stay, and has not failed in this incident:

    rung               fits when                                           the next view
    retry              all processes live: connections broke, or a step    the same workers, the same step
                       failed by an error that may pass
    recover-in-place   processes died or hang, on nodes that live          new processes with their local ranks
    recover            ... and each such node has spares parked: then it   spares with their local ranks
                       comes first, as a spare is there sooner
                       nodes are gone, and others stand by                 those take over their ranks
                       processes died on a node that is suspected          the same, before anything else: then it can
                       (health/checkup.py), and another stands by         be examined while the job goes on
    elastic-training   the workers can work in a world of another size,    the living, fewer ranks
                       and the minimum of nodes is left
                       ... or is, with nodes that stand by                 these too, and no more
    recover            only a node that came back is large enough for      it takes those over
                       another's ranks
    dump               always                                              the living; they write a checkpoint and end
    exit               always                                              none: the job ends with the cause

A rung has failed for a problem when it was tried `rung_tries_max` times in the incident for one of the same failures,
or of the same node, or once for the same failure of the same rank; a loss is held against the node alone
(rung_tries.py). A rank that hangs again in its new process may wait for something that will come, as storage that is
away: before anything is given up it is replaced in place as often as a rung may be tried, after four times as long each
time (agent/hangs.py). Spares have failed when one of them was given a rank and failed by itself: new processes come
next. Where such new processes fail by themselves too, every worker starts again before anything is dumped, if a restart
is left, which is counted. None of the rungs counts against `--max-restarts`: a committed step proves it, or it was of
no use. A worker whose own error comes back, or may not be retried, is replaced like one that died. Before anything is
dumped, machines that are a last resort are admitted if they are enough. The last rung needs no permission.

Scripts that do not use Holdfast, and workers that have finished or hold no complete copy any more:

    restart   every worker starts again in a new view, on the nodes there are; from the warm fork server
    wait      too few nodes are left: workers stop until enough are back
    exit      no restart is left: the job ends with the cause

What counts against `--max-restarts` is blame: a worker that failed by itself counts, and so do collateral errors whose
cause is unknown; a node that is lost, leaves or joins does not. Nor does a restart from snapshots in the nodes'
memory, if no worker raised an error of its own and the snapshots are newer than those of the last such restart.

What the fault is (blame.py) rules some of this out: a bug stops the job, and so does a script that a session refuses; a
node that is to blame has left by now.

A failover extension's advice goes before all this: abortion ends the job; global restarts all workers, and counts;
node sends the node away, which leaves one member less.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast.core import blame, rung_plans
from holdfast.core.assess import (
    ViewProblem,
    can_repair_online,
    has_problems,
    is_dumping,
    living_holders,
    members_gone,
    own_errors,
    signatures,
    suspects,
)
from holdfast.core.durability import newest_complete_step
from holdfast.core.faults.failures import Failure, is_collateral
from holdfast.core.health.reputation import Grade
from holdfast.core.rung_plans import RungPlan, ViewDamage
from holdfast.core.rung_tries import HANG, HANG_TIMES, is_tried_out
from holdfast.core.state import JobState
from holdfast.core.state_coverage import missing_shards
from holdfast.core.strategies import FailoverStrategy, Strategy
from holdfast.core.wording import counted

STATE_LOST = "StateLostError"
"""The exception (errors.py) of a worker that finds a part of the state gone with those who had it."""


class StrategyChoice(msgspec.Struct, frozen=True):
    """A strategy, and why it is the one."""

    strategy: Strategy
    counted: bool
    why: str
    plan: RungPlan | None = None
    """The next view, where workers are kept."""
    reload: int = -1
    """The step in the nodes' memory to start from, where they are not."""
    waits: bool = False
    """It is the last resort: a node that joined would make a better one possible."""
    admits: str = ""
    """A node that is a last resort and must be admitted first."""


RUNGS: tuple[tuple[Strategy, Callable[[JobState, ViewDamage], RungPlan | None]], ...] = (
    (Strategy.RETRY, rung_plans.retry),
    (Strategy.RECOVER, rung_plans.recover_from_suspects),
    (Strategy.RECOVER, rung_plans.recover_from_parked),
    (Strategy.RECOVER_IN_PLACE, rung_plans.recover_in_place),
    (Strategy.RECOVER, rung_plans.recover),
    (Strategy.ELASTIC_TRAINING, rung_plans.elastic),
    (Strategy.ELASTIC_TRAINING, rung_plans.fill_minimum),
    (Strategy.RECOVER, rung_plans.recover_by_moving),
    (Strategy.DUMP, rung_plans.dump),
)


def choose(job: JobState, problem: ViewProblem) -> StrategyChoice:
    """Return the cheapest strategy that can work."""
    advice = {failure.advice for failure in job.progress.failed.values()}
    if FailoverStrategy.ABORTION_FAILOVER in advice:
        return StrategyChoice(Strategy.EXIT, False, "the failover extension ends the job")
    if refused := blame.refusal(job):
        return StrategyChoice(Strategy.EXIT, False, refused)
    if problem.plan:
        return StrategyChoice(problem.plan.strategy, False, problem.plan.why, problem.plan)
    if is_dumping(job):
        failed = StrategyChoice(Strategy.EXIT, False, "the checkpoint could not be written")
        return _climb(job, problem) if can_repair_online(job) else failed
    if stop := blame.bug(job):
        return _stop(job, stop)
    by_request = problem.kind == "planned" and not has_problems(job)
    if FailoverStrategy.GLOBAL_FAILOVER in advice:
        return _restart(job, problem, "the failover extension restarts all workers")
    if all(strategy in blame.forbidden(job) for strategy, _ in RUNGS):
        restart = _restart(job, problem, "no worker's state can be trusted")
        return msgspec.structs.replace(restart, reload=-1)
    if by_request or not can_repair_online(job):
        return _restart(job, problem, _why_not_online(job))
    return _climb(job, problem)


# --- workers that are kept


def _climb(job: JobState, problem: ViewProblem) -> StrategyChoice:
    rungs = [rung for rung in RUNGS if is_open(job, rung[0])]
    if is_dumping(job):
        rungs = [rung for rung in rungs if rung[0] is Strategy.DUMP]
    damage = rung_plans.assess(job, can_retry=any(strategy is Strategy.RETRY for strategy, _ in rungs))
    for strategy, make in rungs:
        if strategy is Strategy.DUMP and (admission := _admit(job, damage)):
            return admission
        if strategy is Strategy.DUMP and (choice := _before_giving_up(job, problem, damage)):
            return choice
        if plan := make(job, damage):
            waits = strategy is Strategy.DUMP and _would_take_node(job, damage)
            return StrategyChoice(plan.strategy, False, plan.why, plan, waits=waits)
    if admission := _admit(job, damage):
        return admission
    if choice := _before_giving_up(job, problem, damage):
        return choice
    return StrategyChoice(Strategy.EXIT, False, _why_exit(job), waits=_would_take_node(job, damage))


def _before_giving_up(job: JobState, problem: ViewProblem, damage: ViewDamage) -> StrategyChoice | None:
    return _restart_for_newcomers(job, problem) or _hang_again(job, damage)


def _hang_again(job: JobState, damage: ViewDamage) -> StrategyChoice | None:
    """Return one more try in place for workers that hang in their new processes too: what they wait for may come, and
    each time their agents give them four times as long (agent/hangs.py). Twice as many tries where they sleep, and so
    are meant to wake up."""
    hung, incident, strategy = suspects(job), job.incidents.current, Strategy.RECOVER_IN_PLACE
    if not hung or incident is None or is_dumping(job) or not _is_allowed(job, strategy):
        return None
    tries_max = job.settings.rung_tries_max * (HANG_TIMES if all(vector.asleep for _, vector in hung) else 1)
    if incident.tries_for.get((strategy, HANG), 0) >= tries_max:
        return None
    plan = rung_plans.recover_in_place(job, damage)
    return StrategyChoice(plan.strategy, False, plan.why, plan) if plan else None


def _would_take_node(job: JobState, damage: ViewDamage) -> bool:
    """Return whether the job could go on if another node came."""
    if not damage.gone or is_dumping(job):
        return False
    return is_open(job, Strategy.RECOVER) or (rung_plans.may_resize(job) and is_open(job, Strategy.ELASTIC_TRAINING))


def _admit(job: JobState, damage: ViewDamage) -> StrategyChoice | None:
    """Return how the job goes on with nodes that are a last resort; None if they would be of no use, or there are
    none."""
    rest = rung_plans.last_resorts(job)
    if not rest or is_dumping(job):
        return None
    waiting = [*rung_plans.available(job), *rest]
    rungs = ((Strategy.RECOVER, rung_plans.recover), (Strategy.ELASTIC_TRAINING, rung_plans.fill_minimum))
    plans = (make(job, damage, waiting=waiting) for strategy, make in rungs if is_open(job, strategy))
    plan = next((plan for plan in plans if plan), None)
    admits = [node for node in rest if plan and node.node_id in {place.node_id for place in plan.places}]
    if plan is None or not admits:
        return None
    waits = admits[0].reputation.grade is Grade.CORDONED  # by a person, who may have a reason
    return StrategyChoice(plan.strategy, False, plan.why, plan, waits=waits, admits=admits[0].node_id)


def _restart_for_newcomers(job: JobState, problem: ViewProblem) -> StrategyChoice | None:
    """Return a restart of all workers, if one is left and workers that this recovery started keep failing: the state of
    the others may be what prevents them from joining."""
    if is_dumping(job) or not any(blame.is_failed_newcomer(job, failure) for failure in job.progress.failed.values()):
        return None
    choice = _restart(job, problem, "newly started workers fail by themselves")
    return choice if choice.strategy is Strategy.RESTART else None


def overlooked_plan(job: JobState) -> RungPlan | None:
    """Return how nodes that stand by could replace those that are gone, where nothing rules that out; None if they
    cannot. A job is neither dumped nor ended while there is such a plan."""
    advice = {failure.advice for failure in job.progress.failed.values()}
    is_over = FailoverStrategy.ABORTION_FAILOVER in advice or blame.refusal(job) or is_dumping(job) or blame.bug(job)
    if is_over or FailoverStrategy.GLOBAL_FAILOVER in advice or not can_repair_online(job):
        return None
    damage = rung_plans.assess(job, can_retry=is_open(job, Strategy.RETRY))
    if not damage.gone or not is_open(job, Strategy.RECOVER):
        return None
    return rung_plans.recover_by_moving(job, damage)


def _stop(job: JobState, why: str) -> StrategyChoice:
    """Return the strategy for a job that must not be retried: the last committed step is saved, if possible."""
    can_dump = can_repair_online(job) and is_open(job, Strategy.DUMP)
    if can_dump and (plan := rung_plans.dump(job, rung_plans.assess(job, can_retry=False))):
        return StrategyChoice(Strategy.DUMP, False, why, plan)
    return StrategyChoice(Strategy.EXIT, False, why)


def is_open(job: JobState, strategy: Strategy) -> bool:
    """Return whether the rung is allowed, permitted by the fault, and has not failed in this incident."""
    if not _is_allowed(job, strategy):
        return False
    return job.incidents.current is None or not (is_tried_out(job, strategy) or _was_no_help(job, strategy))


def _is_allowed(job: JobState, strategy: Strategy) -> bool:
    """Return whether the user and the fault permit the rung."""
    return strategy in job.settings.recovery and strategy not in blame.forbidden(job)


def _was_no_help(job: JobState, strategy: Strategy) -> bool:
    return bool(
        job.incidents.current and any((strategy, mark) in job.incidents.current.answered for mark in signatures(job))
    )


def _why_exit(job: JobState) -> str:
    allowed = [s.value for s in job.settings.recovery if s is not Strategy.EXIT]
    if not allowed:
        return "nothing else is allowed (--recovery exit)"
    tried = [s.value for s in job.incidents.current.tries if s is not Strategy.EXIT] if job.incidents.current else []
    ruled_out = [f"{s.value} ({fault})" for s, fault in blame.forbidden(job).items() if s.value in allowed]
    why = f"none of the allowed strategies fits ({', '.join(allowed)})"
    no_dump = rung_plans.why_no_dump(job) if Strategy.DUMP in job.settings.recovery else ""
    why += f"; dump is impossible: {no_dump}" if no_dump else ""
    why += f"; the fault rules out {', '.join(ruled_out)}" if ruled_out else ""
    why += rung_plans.why_not_elastic(job)
    return f"{why}; tried in this incident: {', '.join(tried)}" if tried else why


# --- workers that are not


def _restart(job: JobState, problem: ViewProblem, reason: str) -> StrategyChoice:
    settings = job.settings
    faults = [f for f in job.progress.failed.values() if not is_collateral(f) and not blame.is_excused(job, f)]
    blamed = bool(faults) or bool(own_errors(job))
    is_counted = blamed or (problem.kind == "worker" and not members_gone(job))
    reload = _in_memory(job)
    if reload > job.state.reloaded and not any(_is_own(failure) for failure in job.progress.failed.values()):
        is_counted = False  # no error of the script, nothing is lost, and the job has made progress since the last time
    prefix = f"{reason}; " if reason else ""
    if ruled_out := blame.forbidden(job).get(Strategy.RESTART):
        return StrategyChoice(Strategy.EXIT, False, f"{prefix}a restart would not help ({ruled_out})")
    if is_counted and job.incidents.restarts_used >= settings.restarts_max:
        left = "no restart is allowed" if not settings.restarts_max else "all restarts are used up"
        return StrategyChoice(Strategy.EXIT, False, f"{prefix}{left} (--max-restarts {settings.restarts_max})")
    able = len(job.able)
    if able < settings.nodes_min:
        return StrategyChoice(
            Strategy.WAIT, is_counted, f"{prefix}{able} of at least {counted(settings.nodes_min, 'node')} left"
        )
    nodes = min(able, settings.nodes_max)
    why = f"{prefix}{nodes} of {counted(settings.nodes_max, 'node')} can continue"
    return StrategyChoice(Strategy.RESTART, is_counted, why, reload=reload)


def _is_own(failure: Failure) -> bool:
    """Return whether it is an error of the script, or the failover extension asked for a counted restart."""
    is_requested = failure.advice is FailoverStrategy.GLOBAL_FAILOVER
    is_loss = failure.exception.rpartition(".")[2] == STATE_LOST  # what a survivor raises for one that died
    return is_requested or (bool(failure.exception) and not is_loss and not is_collateral(failure))


def _in_memory(job: JobState) -> int:
    """Return a step that is complete in the memory of the nodes that can go on, as far as is known; -1: none."""
    able = {node.node_id for node in job.able}
    return newest_complete_step(one for node_id, held in job.state.images.items() if node_id in able for one in held)


def _why_not_online(job: JobState) -> str:
    """Return why workers that use Holdfast must all restart; empty if they do not use it or can go on."""
    if job.state.session is None or can_repair_online(job):
        return ""
    if job.progress.succeeded:
        return "some workers have finished already"
    if job.progress.is_closed:
        return (
            "at least one rank has left the loop of its steps, and others have not: leave it on all ranks after the"
            " same step, by a condition that is the same everywhere"
        )
    hung = [worker for worker, _ in suspects(job)]
    missing = missing_shards(living_holders(job, hung))
    if not any(job.progress.holders.values()):
        missing = "the workers have no state yet"
    step = _in_memory(job)
    source = f"step {step} or later in the nodes' memory" if step >= 0 else "the last checkpoint"
    start = f"all workers start from {source}"
    return f"{missing}, so {start}" if missing else start
