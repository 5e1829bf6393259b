"""How to handle what is wrong with the view in force: the ladder, and what stands beside it.

Workers that speak to Holdfast keep running (`online`): a new view gives those that live their places. Of the rungs,
from the cheapest, the first is taken that is allowed (`--recovery`), fits the damage, leaves a complete copy of the
state among those who live on, and has not failed in this incident:

    rung               fits when                                           the next view
    retry              all processes live: connections broke, or a step    the same workers, the same step
                       failed by an error that may pass
    recover-in-place   processes died or hang, on nodes that live          new processes in their seats
    recover            ... and each such node has spares parked: then it   spares in their seats
                       comes first, as a spare is there sooner
                       nodes are gone, and others stand by                 those take over their ranks
                       processes died on a node that is suspected          the same, before anything else: then it can
                       (health/suspects.py), and another stands by         be examined while the job goes on
    elastic-training   the workers can work in a world of another size,    the living, fewer ranks
                       and the minimum of nodes is left
    dump               always                                              the living; they write a checkpoint and end
    exit               always                                              none: the job ends with the cause

A rung has failed when it was tried `rung_tries_max` times in the incident, or once for the same failure of the same
rank. None of them counts against `--max-restarts`: a committed step proves it, or it was of no use. A worker whose own
error comes back, or may not be retried, is replaced like one that died. The last rung needs no permission.

Scripts that do not speak to Holdfast, and workers that have finished or hold no complete copy any more:

    restart   every worker starts again in a new view, on the nodes there are; from the warm fork server
    wait      too few nodes are left: workers stop until enough are back
    exit      no restart is left: the job ends with the cause

What counts against `--max-restarts` is blame: a worker that failed by itself counts, and so do collateral errors whose
cause nobody can name; a node that is lost, leaves or joins does not. Nor does a restart from snapshots in the nodes'
memory, if no worker raised an error of its own and the snapshots are newer than those of the last such restart.

What the fault is (blame.py) rules some of this out: a bug stops the job, a node that is to blame has left by now.

A failover extension's advice goes before all this: abortion ends the job; global starts every worker anew, and counts;
node sends the node away, which leaves one member less.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast.core import blame, plans
from holdfast.core.copies import lack
from holdfast.core.faults import Failure, is_collateral
from holdfast.core.kept import whole_at_least
from holdfast.core.ladder import FailoverStrategy, Strategy
from holdfast.core.plans import Damage, Plan
from holdfast.core.state import Job
from holdfast.core.troubles import (
    Trouble,
    dumping,
    is_disturbed,
    living_holders,
    marks,
    members_gone,
    online,
    own_errors,
)


class Choice(msgspec.Struct, frozen=True):
    """A strategy, and why it is the one."""

    strategy: Strategy
    counted: bool
    why: str
    plan: Plan | None = None
    """The next view, where workers are kept."""
    reload: int = -1
    """The step in the nodes' memory to start from, where they are not."""


RUNGS: tuple[tuple[Strategy, Callable[[Job, Damage], Plan | None]], ...] = (
    (Strategy.RETRY, plans.retry),
    (Strategy.RECOVER, plans.recover_from_suspects),
    (Strategy.RECOVER, plans.recover_from_parked),
    (Strategy.RECOVER_IN_PLACE, plans.recover_in_place),
    (Strategy.RECOVER, plans.recover),
    (Strategy.ELASTIC_TRAINING, plans.elastic),
    (Strategy.DUMP, plans.dump),
)


def choose(job: Job, trouble: Trouble) -> Choice:
    """The cheapest strategy that can work."""
    advice = {failure.advice for failure in job.failed.values()}
    if FailoverStrategy.ABORTION_FAILOVER in advice:
        return Choice(Strategy.EXIT, False, "the failover extension wants the job to end")
    if trouble.plan:
        return Choice(trouble.plan.strategy, False, trouble.plan.why, trouble.plan)
    if dumping(job):
        return _climb(job) if online(job) else Choice(Strategy.EXIT, False, "the checkpoint could not be written")
    if stop := blame.bug(job):
        return _stop(job, stop)
    by_request = trouble.kind == "planned" and not is_disturbed(job)
    if FailoverStrategy.GLOBAL_FAILOVER in advice:
        return _start_anew(job, trouble, "the failover extension wants every worker to start anew")
    if all(strategy in blame.forbidden(job) for strategy, _ in RUNGS):
        anew = _start_anew(job, trouble, "nobody's state can be trusted")
        return msgspec.structs.replace(anew, reload=-1)
    if by_request or not online(job):
        return _start_anew(job, trouble, _why_not_online(job))
    return _climb(job)


# --- workers that are kept


def _climb(job: Job) -> Choice:
    rungs = [rung for rung in RUNGS if is_open(job, rung[0])]
    if dumping(job):
        rungs = [rung for rung in rungs if rung[0] is Strategy.DUMP]
    damage = plans.assess(job, can_retry=any(strategy is Strategy.RETRY for strategy, _ in rungs))
    for _, make in rungs:
        if plan := make(job, damage):
            return Choice(plan.strategy, False, plan.why, plan)
    return Choice(Strategy.EXIT, False, _why_exit(job))


def _stop(job: Job, why: str) -> Choice:
    """Nothing is to be tried again: the last committed step is saved, if it can be."""
    can_dump = online(job) and is_open(job, Strategy.DUMP)
    if can_dump and (plan := plans.dump(job, plans.assess(job, can_retry=False))):
        return Choice(Strategy.DUMP, False, why, plan)
    return Choice(Strategy.EXIT, False, why)


def is_open(job: Job, strategy: Strategy) -> bool:
    """Whether the rung is allowed, the fault permits it, and it has not failed in this incident."""
    if strategy not in job.settings.recovery or strategy in blame.forbidden(job):
        return False
    return job.incident is None or not (_is_tried_out(job, strategy) or _was_no_help(job, strategy))


def _is_tried_out(job: Job, strategy: Strategy) -> bool:
    return bool(job.incident and job.incident.tries.get(strategy, 0) >= job.settings.rung_tries_max)


def _was_no_help(job: Job, strategy: Strategy) -> bool:
    return bool(job.incident and any((strategy, mark) in job.incident.answered for mark in marks(job)))


def _why_exit(job: Job) -> str:
    allowed = [s.value for s in job.settings.recovery if s is not Strategy.EXIT]
    if not allowed:
        return "nothing else is allowed (--recovery exit)"
    tried = [s.value for s in job.incident.tries if s is not Strategy.EXIT] if job.incident else []
    ruled_out = [f"{s.value} ({fault})" for s, fault in blame.forbidden(job).items() if s.value in allowed]
    why = f"none of the allowed strategies fits ({', '.join(allowed)})"
    why += f"; the fault rules out {', '.join(ruled_out)}" if ruled_out else ""
    return f"{why}; tried in this incident: {', '.join(tried)}" if tried else why


# --- workers that are not


def _start_anew(job: Job, trouble: Trouble, reason: str) -> Choice:
    settings = job.settings
    faults = [f for f in job.failed.values() if not is_collateral(f) and not blame.is_excused(job, f)]
    blamed = bool(faults) or bool(own_errors(job))
    counted = blamed or (trouble.kind == "worker" and not members_gone(job))
    reload = _in_memory(job)
    if reload > job.reloaded and not any(_is_own(failure) for failure in job.failed.values()):
        counted = False  # nobody's error or wish, nothing is lost, and it has come further than the last time
    prefix = f"{reason}; " if reason else ""
    if ruled_out := blame.forbidden(job).get(Strategy.RESTART):
        return Choice(Strategy.EXIT, False, f"{prefix}a restart would not help ({ruled_out})")
    if counted and job.restarts_used >= settings.restarts_max:
        left = "no restart is allowed" if not settings.restarts_max else "all restarts are used up"
        return Choice(Strategy.EXIT, False, f"{prefix}{left} (--max-restarts {settings.restarts_max})")
    able = len(job.able)
    if able < settings.nodes_min:
        return Choice(Strategy.WAIT, counted, f"{prefix}{able} of at least {settings.nodes_min} nodes are left")
    nodes = min(able, settings.nodes_max)
    why = f"{prefix}{nodes} of {settings.nodes_max} nodes can go on"
    return Choice(Strategy.RESTART, counted, why, reload=reload)


def _is_own(failure: Failure) -> bool:
    """Whether it is an error of the script, or the failover extension wants a restart for it, which counts."""
    is_wish = failure.advice is FailoverStrategy.GLOBAL_FAILOVER
    return is_wish or (bool(failure.exception) and not is_collateral(failure))


def _in_memory(job: Job) -> int:
    """A step that is whole in the memory of the nodes that can go on, as far as is known; -1: none."""
    able = {node.node_id for node in job.able}
    return whole_at_least(one for node_id, held in job.images.items() if node_id in able for one in held)


def _why_not_online(job: Job) -> str:
    """Of workers that could be kept if their state were there."""
    if job.session is None or online(job):
        return ""
    if job.done:
        return "some workers have finished already"
    missing = lack(living_holders(job)) if any(job.crew.values()) else "the workers have no state yet"
    step = _in_memory(job)
    source = f"step {step} or later in the nodes' memory" if step >= 0 else "the last checkpoint"
    return f"{missing}, so all start from {source}"
