"""What a new view would look like under each rung of the ladder; None where the rung does not fit the damage. Pure.

A plan keeps the live workers. It is only valid if they hold a complete copy of the state: a worker that the plan
ends or leaves behind does not count. Where the world stays as large, every rank stays where it is: a node that takes
another's place gets its ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from holdfast.core import rung_tries
from holdfast.core.assess import ended_workers, living_holders, own_errors, signature_of, suspects
from holdfast.core.health.reputation import preference
from holdfast.core.node_sets import what_is_missing
from holdfast.core.state import JobState, Node
from holdfast.core.state_coverage import WorkerKey, missing_shards
from holdfast.core.strategies import Strategy
from holdfast.core.views import Member
from holdfast.core.whole_replicas import SeatedWorker, surplus, whole_size
from holdfast.core.wording import counted


class PlannedNode(msgspec.Struct, frozen=True, gc=False):
    """A node of the next view. With a group rank, it is to have that one, if the view is large enough."""

    node_id: str
    workers: int
    group_rank: int | None


class RungPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The next view, as far as it is a matter of choice."""

    strategy: Strategy
    """By which the incident is handled."""
    places: tuple[PlannedNode, ...]
    why: str
    replaced: tuple[WorkerKey, ...] = ()
    surplus: tuple[WorkerKey, ...] = ()
    """Workers that are well and have no rank: with them the world would be no whole number of replicas."""
    planned: bool = False
    fills: bool = False
    """It starts workers beside those of its strategy, from parked ones first."""
    weights: tuple[float, ...] | None = None
    """Other shares of the global batch; None: as they are."""


class ViewDamage(msgspec.Struct, frozen=True):
    """What the view has lost."""

    gone: tuple[Member, ...]
    """Members whose nodes are not there any more, or are going."""
    dead: dict[str, int]
    """By node that stays: how many of its workers died, or hang and are to be ended."""
    replaced: tuple[WorkerKey, ...]
    """The latter."""

    @property
    def is_none(self) -> bool:
        return not self.gone and not self.dead


def assess(job: JobState, *, can_retry: bool) -> ViewDamage:
    """Return what is lost. A worker whose step failed by its own error is not lost, unless that error came back or the
    step may not be retried."""
    assert job.view is not None
    gone = tuple(sorted((job.members[node_id] for node_id in job.sets.off), key=lambda member: member.group_rank))
    left = job.members.keys() - job.sets.off
    replaced = tuple(
        worker for worker in _to_be_ended(job, can_retry) if worker[0] in left and worker not in job.progress.failed
    )
    dead: dict[str, int] = {}
    for node_id, _ in (*job.progress.failed, *replaced):
        if node_id in left:
            dead[node_id] = dead.get(node_id, 0) + 1
    return ViewDamage(gone, dead, replaced)


def _to_be_ended(job: JobState, can_retry: bool) -> list[WorkerKey]:
    found = suspects(job)
    if found:
        return [worker for worker, _ in found]
    answered = {mark for _, mark in job.incidents.current.answered} if job.incidents.current else set()
    return [
        worker
        for worker, step_error in own_errors(job).items()
        if not can_retry or signature_of(step_error) in answered
    ]


# --- the rungs


def retry(job: JobState, damage: ViewDamage) -> RungPlan | None:
    """Plan the same workers and the same step."""
    if not damage.is_none or not (job.progress.interrupted or job.stall):
        return None
    why = "all processes are alive: the step is retried"
    return _checked(job, RungPlan(strategy=Strategy.RETRY, places=_kept(job, damage), why=why))


def recover_from_suspects(job: JobState, damage: ViewDamage) -> RungPlan | None:
    """Plan standby nodes instead of suspects with dead workers, as far as there are enough. The suspects can then be
    checked while the others go on; those that cannot be replaced are checked before the next restart."""
    assert job.view is not None
    dead = sorted((job.members[node_id] for node_id in damage.dead), key=lambda m: m.group_rank)
    suspects = [m for m in dead if job.is_suspect(job.nodes[m.node_id])]
    plans = (recover(job, _with_gone(damage, suspects[:count])) for count in range(len(suspects), 0, -1))
    return next((plan for plan in plans if plan), None)


def recover_in_place(job: JobState, damage: ViewDamage) -> RungPlan | None:
    """Plan new processes for the dead workers, on their nodes."""
    if damage.gone or not damage.dead:
        return None
    why = f"{_processes(damage)} on {_names(damage)} can be restarted, and the other workers have the state"
    plan = RungPlan(strategy=Strategy.RECOVER_IN_PLACE, places=_kept(job, damage), why=why, replaced=damage.replaced)
    return _checked(job, plan)


def recover_from_parked(job: JobState, damage: ViewDamage) -> RungPlan | None:
    """Plan parked spares for the dead workers, on their nodes."""
    if _has_spare_failed(job, damage):
        return None  # they are made alike
    if damage.gone or not damage.dead or any(job.nodes[n].parked < dead for n, dead in damage.dead.items()):
        return None
    why = f"spares parked on {_names(damage)} take over, faster than new processes could"
    plan = RungPlan(strategy=Strategy.RECOVER, places=_kept(job, damage), why=why, replaced=damage.replaced)
    return _checked(job, plan)


def _has_spare_failed(job: JobState, damage: ViewDamage) -> bool:
    """Return whether a spare that this recovery gave a rank has failed by itself, or hangs."""
    incident = job.incidents.current
    if incident is None:
        return False
    hangs = any(incident.newcomers.get(worker) is Strategy.RECOVER for worker in damage.replaced)
    return incident.has_spare_failed or hangs


def recover_by_moving(job: JobState, damage: ViewDamage) -> RungPlan | None:
    """Plan the same where a node that came back must take another's ranks, as only it is large enough."""
    return recover(job, damage, may_move=True)


def recover(
    job: JobState, damage: ViewDamage, *, waiting: list[Node] | None = None, may_move: bool = False
) -> RungPlan | None:
    """Plan standby nodes for those that are gone, or that have dead workers and no spares. The remaining nodes may
    restart their dead workers, if that is allowed and has not failed for them."""
    assert job.view is not None
    if damage.is_none:
        return None
    hurt = [m for node_id in damage.dead if (m := job.members[node_id]) not in damage.gone]
    unfit = [m for m in hurt if not _may_stay(job, m, damage)]
    leaving = sorted((*damage.gone, *unfit), key=lambda m: m.group_rank)
    if not leaving:
        return None  # recover_from_parked says so better
    waiting = available(job) if waiting is None else waiting
    substitutes = find_substitutes(job, waiting, leaving, may_move=may_move)
    if len(substitutes) < len(leaving):
        return None
    places = [PlannedNode(m.node_id, m.workers, m.group_rank) for m in job.view.members]
    for m in leaving:
        places[m.group_rank] = PlannedNode(substitutes[m.node_id].node_id, m.workers, m.group_rank)
    left_out = {m.node_id for m in leaving}
    why = f"a node stands by for each that is lost ({', '.join(_taken(job, substitutes, leaving))})"
    replaced = tuple(worker for worker in damage.replaced if worker[0] not in left_out)
    return _checked(job, RungPlan(strategy=Strategy.RECOVER, places=tuple(places), why=why, replaced=replaced))


def _may_stay(job: JobState, member: Member, damage: ViewDamage) -> bool:
    """Return whether the member's dead workers, if it has any, can be replaced on its node."""
    dead = damage.dead.get(member.node_id, 0)
    if not dead or (job.nodes[member.node_id].parked >= dead and not _has_spare_failed(job, damage)):
        return True
    is_allowed = bool(damage.gone) and Strategy.RECOVER_IN_PLACE in job.settings.recovery
    return is_allowed and rung_tries.may_cure(job, Strategy.RECOVER_IN_PLACE, member.node_id)


def _taken(job: JobState, substitutes: dict[str, Node], leaving: list[Member]) -> list[str]:
    suspected = {m.node_id for m in leaving if (node := job.nodes.get(m.node_id)) and job.is_suspect(node)}
    return [
        f"{substitutes[m.node_id].node_id} for {m.node_id}{', which must be checked' * (m.node_id in suspected)}"
        for m in leaving
    ]


def elastic(job: JobState, damage: ViewDamage) -> RungPlan | None:
    """Plan fewer ranks, of the live workers."""
    assert job.view is not None and job.state.session is not None
    if damage.is_none or not job.state.session.resizable:
        return None
    left = RungPlan(
        strategy=Strategy.ELASTIC_TRAINING, places=_survivors(job, damage), why="", replaced=damage.replaced
    )
    plan = in_whole_replicas(job, left)
    if plan is None or len(plan.places) < job.settings.nodes_min:
        return None
    ranks, without = sum([place.workers for place in plan.places]), _ranks_of(left) - _ranks_of(plan)
    why = f"{ranks} of {job.view.world_size} ranks are left and can share all the data"
    if without:
        why += f", in whole replicas of {job.state.session.world_multiple}; {counted(without, 'worker')} left over"
    return _checked(job, msgspec.structs.replace(plan, why=why))


def fill_minimum(job: JobState, damage: ViewDamage, *, waiting: list[Node] | None = None) -> RungPlan | None:
    """Plan fewer ranks, of the live workers and as many standby nodes as the minimum needs."""
    assert job.view is not None and job.state.session is not None
    places = _survivors(job, damage)
    missing = job.settings.nodes_min - len(places)
    if missing <= 0 or not damage.gone or not places or not job.state.session.resizable:
        return None
    # Nodes of their own id first, so that each of them gets its former rank again.
    waiting = sorted(available(job) if waiting is None else waiting, key=lambda n: n.node_id not in job.members)
    if len(waiting) < missing:
        return None
    former = {m.node_id: m.group_rank for m in damage.gone}
    new = [PlannedNode(n.node_id, n.info.workers, former.get(n.node_id)) for n in waiting[:missing]]
    left = RungPlan(
        strategy=Strategy.ELASTIC_TRAINING, places=(*places, *new), why="", replaced=damage.replaced, fills=True
    )
    plan = in_whole_replicas(job, left)
    if plan is None or len(plan.places) < job.settings.nodes_min:
        return None
    ranks = counted(_ranks_of(plan), "rank")
    why = f"{', '.join(place.node_id for place in new)} stand by for the minimum of nodes: {ranks}"
    return _checked(job, msgspec.structs.replace(plan, why=why))


def in_whole_replicas(job: JobState, plan: RungPlan) -> RungPlan | None:
    """Return the plan with as many ranks as make whole replicas of the model; None if they do not make one. Workers
    that would have to be started are left out first."""
    assert job.state.session is not None
    multiple = job.state.session.world_multiple
    excess = _ranks_of(plan) - whole_size(_ranks_of(plan), multiple)
    if not plan.places or excess == _ranks_of(plan):
        return None
    if not excess:
        return plan
    living = {place.node_id: _living_of(job, plan, place.node_id) for place in plan.places}
    fewer = dict.fromkeys(living, 0)
    for place in reversed(plan.places):
        started = max(place.workers - len(living[place.node_id]), 0)
        fewer[place.node_id] = min(started, excess)
        excess -= fewer[place.node_id]
    idle = surplus([worker for workers in living.values() for worker in workers], excess)
    for worker in idle:
        fewer[worker.node] += 1
    places = (msgspec.structs.replace(place, workers=place.workers - fewer[place.node_id]) for place in plan.places)
    kept = tuple(place for place in places if place.workers)
    return msgspec.structs.replace(
        plan, places=kept, surplus=tuple((worker.node, worker.local_rank) for worker in idle)
    )


def _ranks_of(plan: RungPlan) -> int:
    return sum([place.workers for place in plan.places])


def _living_of(job: JobState, plan: RungPlan, node_id: str) -> list[SeatedWorker]:
    """Return the workers of a node that go on under the plan."""
    member = job.members.get(node_id)
    if member is None or node_id in job.sets.off:
        return []
    ended, holders = {*ended_workers(job), *plan.replaced}, job.progress.holders.get(node_id, ())
    held = dict(enumerate(holders))
    return [
        SeatedWorker(
            node_id, local_rank, (holder.layout, holder.layout.shard_map.shard_of(holder.rank)) if holder else None
        )
        for local_rank in range(member.workers)
        if (node_id, local_rank) not in ended
        for holder in (held.get(local_rank),)
    ]


def why_not_elastic(job: JobState) -> str:
    """Return why the script cannot run with fewer ranks; empty if it can."""
    session = job.state.session
    if session is None or session.resizable or Strategy.ELASTIC_TRAINING not in job.settings.recovery:
        return ""
    return f"; no elastic-training: {session.why_fixed}" if session.why_fixed else ""


def dump(job: JobState, damage: ViewDamage) -> RungPlan | None:
    """Plan a checkpoint by the live workers that hold the state, after which the job ends. New workers without state
    are left out."""
    damage = _with_stateless_workers(job, damage)
    places = _survivors(job, damage)
    if not places or (
        job.state.session and job.state.session.per_rank
    ):  # a dump has no place for what each rank has for itself
        return None
    why = f"no other strategy can continue, and the survivors hold a complete copy of the state{why_not_elastic(job)}"
    plans = (
        RungPlan(strategy=Strategy.DUMP, places=writers, why=why, replaced=damage.replaced)
        for writers in _with_one_directory(job, places)
    )
    return next((plan for plan in plans if _checked(job, plan)), None)


def _with_one_directory(job: JobState, places: tuple[PlannedNode, ...]) -> list[tuple[PlannedNode, ...]]:
    """Return groups of nodes that write into one checkpoint directory: all, or where none was named those of each
    machine. A checkpoint whose parts are in several directories could not be read."""
    if not job.settings.checkpoints_apart:
        return [places]
    machines: dict[str, list[PlannedNode]] = {}
    for place in places:
        machines.setdefault(job.nodes[place.node_id].info.machine_id, []).append(place)
    return [tuple(found) for found in machines.values()]


def why_no_dump(job: JobState) -> str:
    """Return why a state that is spread over several machines cannot be dumped; empty if it can."""
    if (
        job.state.session is None
        or job.state.session.shards == 1
        or not job.settings.checkpoints_apart
        or job.view is None
    ):
        return ""
    machines = _with_one_directory(job, _kept(job, ViewDamage((), {}, ())))
    why = "state on one machine"
    if any(keeps_full_state(job, RungPlan(strategy=Strategy.DUMP, places=places, why=why)) for places in machines):
        return ""
    return (
        f"the state is spread over {len(machines)} machines, each with a checkpoint directory of its own, and none of"
        " them holds all of it: name a directory that all of them share with --checkpoint-dir"
    )


# --- what they share


def standby(job: JobState, count: int | None = None) -> list[Node]:
    """Return the first, or all, of the nodes that could take part and do not: by reputation, then in join order."""
    return [job.nodes[node_id] for _, _, node_id in job.sets.line[:count]]


def available(job: JobState) -> list[Node]:
    """Return those of them that were not lost again and again in this incident."""
    return [node for node in standby(job) if not rung_tries.is_given_up(job, node.node_id)]


def may_resize(job: JobState) -> bool:
    """Return whether the world size may change while workers run."""
    return bool(
        job.state.session and job.state.session.resizable and Strategy.ELASTIC_TRAINING in job.settings.recovery
    )


def last_resorts(job: JobState) -> list[Node]:
    """Return the nodes that could take part if their machines were not banned or cordoned, the better first."""
    rest = (job.nodes[node_id] for node_id in job.sets.last_resorts)
    found = (n for n in rest if n.is_here and n.is_fit and not is_member(job, n))
    return sorted(found, key=lambda n: (preference(n.reputation), n.join_order))


def is_member(job: JobState, node: Node) -> bool:
    """Return whether this incarnation of the node is a member of the view."""
    member = job.members.get(node.node_id)
    return member is not None and member.incarnation == node.incarnation


def find_substitutes(
    job: JobState, waiting: list[Node], members: Iterable[Member], *, may_move: bool = False
) -> dict[str, Node]:
    """Return for members that are to be replaced, by their id, a node that can run as many workers; a member for which
    there is none is left out.

    Better is a node of the same role, of better reputation, with parked workers, and of the earliest join. A member's
    own next incarnation keeps its ranks, unless a better one is to spare; with `may_move` it takes another's if that
    one would be left without. The members that need most are served first, so that none gets a larger node than
    needed while another goes without.
    """
    in_order = sorted(members, key=lambda m: -m.workers)
    own = {n.node_id: n for n in waiting if n.node_id in job.members}
    free = [n for n in waiting if n.node_id not in job.members]
    found = {m.node_id: n for m in in_order if (n := own.get(m.node_id)) and n.info.workers >= m.workers}

    def take(member: Member, nodes: list[Node]) -> None:
        large = [n for n in nodes if n.info.workers >= member.workers]
        best = min(large, key=lambda n: (*_worth(n, member), n.join_order), default=None)
        now = found.get(member.node_id)
        if best and (now is None or _worth(best, member) < _worth(now, member)):
            nodes.remove(best)
            found[member.node_id] = best

    for member in (m for m in in_order if m.node_id not in found):
        take(member, free)
    for member in (m for m in in_order if m.node_id in own and found.get(m.node_id) is own[m.node_id]):
        take(member, free)
    used = {node.node_id for node in found.values()}
    others = [node for node_id, node in own.items() if node_id not in used and may_move]
    for member in (m for m in in_order if m.node_id not in found):
        take(member, others)
    return found


def _worth(node: Node, member: Member) -> tuple[bool, int, bool]:
    """Return how good a substitute the node is for a member: the smaller, the better."""
    return (node.info.role != member.role, preference(node.reputation), node.parked < member.workers)


def _with_gone(damage: ViewDamage, members: list[Member]) -> ViewDamage:
    """Return the damage if these members leave as well."""
    left = {m.node_id for m in members}
    dead = {node_id: count for node_id, count in damage.dead.items() if node_id not in left}
    replaced = tuple(worker for worker in damage.replaced if worker[0] not in left)
    return ViewDamage((*damage.gone, *members), dead, replaced)


def _with_stateless_workers(job: JobState, damage: ViewDamage) -> ViewDamage:
    """Return the damage if workers that hold no state are ended too."""
    gone, ended = {m.node_id for m in damage.gone}, {*ended_workers(job), *damage.replaced}
    empty = tuple(
        (node_id, local_rank)
        for node_id in job.members
        if node_id not in gone
        for local_rank, holder in enumerate(job.progress.holders.get(node_id, ()))
        if holder is None and (node_id, local_rank) not in ended
    )
    dead = dict(damage.dead)
    for node_id, _ in empty:
        dead[node_id] = dead.get(node_id, 0) + 1
    return ViewDamage(damage.gone, dead, (*damage.replaced, *empty))


def _kept(job: JobState, damage: ViewDamage) -> tuple[PlannedNode, ...]:
    assert job.view is not None
    gone = {m.node_id for m in damage.gone}
    return tuple([PlannedNode(m.node_id, m.workers, m.group_rank) for m in job.view.members if m.node_id not in gone])


def _survivors(job: JobState, damage: ViewDamage) -> tuple[PlannedNode, ...]:
    kept = _kept(job, damage)
    if not damage.dead:
        return kept
    left = (
        PlannedNode(place.node_id, place.workers - damage.dead.get(place.node_id, 0), place.group_rank)
        for place in kept
    )
    return tuple(place for place in left if place.workers > 0)


def _checked(job: JobState, plan: RungPlan) -> RungPlan | None:
    return plan if keeps_full_state(job, plan) else None


def keeps_full_state(job: JobState, plan: RungPlan) -> bool:
    """Return whether the workers that stay under the plan hold a complete copy of the state."""
    gone = (*plan.replaced, *plan.surplus)
    full, ended = job.held.full, {node_id for node_id, _ in gone}
    if any(place.node_id in full and place.node_id not in ended for place in plan.places):
        return True
    left_out = job.members.keys() - {place.node_id for place in plan.places}
    if not gone and left_out <= job.sets.off.keys():
        return not what_is_missing(job)  # known: all go on that can
    return not missing_shards(living_holders(job, gone, left_out))


def _processes(damage: ViewDamage) -> str:
    count = sum(damage.dead.values())
    return f"{count} process{'es' * (count > 1)}"


def _names(damage: ViewDamage) -> str:
    return ", ".join(sorted(damage.dead))
