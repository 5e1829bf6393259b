"""What a new view would look like under each rung of the ladder; None where the rung does not fit the damage. Pure.

A plan keeps the workers that live. It is only a plan if they hold a complete copy of the state: a worker that the plan
ends or leaves behind does not count. Where the world stays as large, every rank stays where it is: a node that takes
another's place takes its ranks.
"""

from __future__ import annotations

import msgspec

from holdfast.core.copies import lack
from holdfast.core.health.reputation import preference
from holdfast.core.ladder import Strategy
from holdfast.core.state import Job, Node
from holdfast.core.troubles import Seat, dead_seats, living_holders, mark_of, own_errors, staying, suspect
from holdfast.core.views import Member


class Place(msgspec.Struct, frozen=True):
    """A node of the next view. With a group rank, it is to have that one, if the view is large enough."""

    node_id: str
    workers: int
    group_rank: int | None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The next view, as far as it is a matter of choice."""

    strategy: Strategy
    """By which the incident is handled."""
    places: tuple[Place, ...]
    why: str
    replaced: tuple[Seat, ...] = ()
    planned: bool = False
    fills: bool = False
    """A planned change that has seats to fill, from parked workers first."""
    weights: tuple[float, ...] | None = None
    """Other shares of the global batch; None: as they are."""


class Damage(msgspec.Struct, frozen=True):
    """What the view has lost."""

    gone: tuple[Member, ...]
    """Members whose nodes are not there any more, or are going."""
    dead: dict[str, int]
    """By node that stays: how many of its workers died, or hang and are to be ended."""
    replaced: tuple[Seat, ...]
    """The latter."""

    @property
    def is_none(self) -> bool:
        return not self.gone and not self.dead


def assess(job: Job, *, can_retry: bool) -> Damage:
    """What is lost. A worker whose step failed by an error of its own is well, unless that very error came back or
    the step may not be tried again."""
    assert job.view is not None
    gone = tuple(m for m in job.view.members if staying(job, m) is None)
    left = {m.node_id for m in job.view.members} - {m.node_id for m in gone}
    replaced = tuple(seat for seat in _to_be_ended(job, can_retry) if seat[0] in left and seat not in job.failed)
    dead: dict[str, int] = {}
    for node_id, _ in (*job.failed, *replaced):
        if node_id in left:
            dead[node_id] = dead.get(node_id, 0) + 1
    return Damage(gone, dead, replaced)


def _to_be_ended(job: Job, can_retry: bool) -> list[Seat]:
    found = suspect(job)
    if found:
        return [found[0]]
    answered = {mark for _, mark in job.incident.answered} if job.incident else set()
    return [seat for seat, stumble in own_errors(job).items() if not can_retry or mark_of(stumble) in answered]


# --- the rungs


def retry(job: Job, damage: Damage) -> Plan | None:
    """The same workers, the same step."""
    if not damage.is_none or not (job.held or job.stall):
        return None
    why = "all processes live: the step is repeated"
    return _checked(job, Plan(strategy=Strategy.RETRY, places=_kept(job, damage), why=why))


def recover_from_suspects(job: Job, damage: Damage) -> Plan | None:
    """Nodes that stand by take the places of suspects with dead workers, which can then be examined while the others go
    on. As far as there are enough; who cannot be replaced is examined before all workers start anew."""
    assert job.view is not None
    suspects = [m for m in job.view.members if m.node_id in damage.dead and job.is_suspect(job.nodes[m.node_id])]
    plans = (recover(job, _with_gone(damage, suspects[:count])) for count in range(len(suspects), 0, -1))
    return next((plan for plan in plans if plan), None)


def recover_in_place(job: Job, damage: Damage) -> Plan | None:
    """The dead start again on their nodes."""
    if damage.gone or not damage.dead:
        return None
    why = f"{_processes(damage)} on {_names(damage)} can start again, and the others have the state"
    plan = Plan(
        strategy=Strategy.RECOVER_IN_PLACE, places=_kept(job, damage), why=why, replaced=damage.replaced
    )
    return _checked(job, plan)


def recover_from_parked(job: Job, damage: Damage) -> Plan | None:
    """Spares of the same nodes take the places of the dead."""
    if damage.gone or not damage.dead or any(job.nodes[n].parked < dead for n, dead in damage.dead.items()):
        return None
    why = f"spares parked on {_names(damage)} can take over, sooner than new processes could"
    plan = Plan(strategy=Strategy.RECOVER, places=_kept(job, damage), why=why, replaced=damage.replaced)
    return _checked(job, plan)


def recover(job: Job, damage: Damage) -> Plan | None:
    """Spare nodes take the places of those that are gone, or that have dead workers and no spare of their own. Beside a
    node that is replaced, others may start their dead anew, if that is allowed."""
    assert job.view is not None
    if damage.is_none:
        return None
    may_fork = bool(damage.gone) and Strategy.RECOVER_IN_PLACE in job.settings.recovery
    waiting, places, taken = standby(job), [], []
    for member in job.view.members:
        dead = damage.dead.get(member.node_id, 0)
        if member not in damage.gone and (may_fork or job.nodes[member.node_id].parked >= dead):
            places.append(Place(member.node_id, member.workers, member.group_rank))
            continue
        substitute = find_substitute(job, waiting, member)
        if substitute is None:
            return None
        waiting.remove(substitute)
        is_suspect = job.is_suspect(job.nodes[member.node_id]) if member.node_id in job.nodes else False
        taken.append(f"{substitute.node_id} for {member.node_id}{', which is to be checked' * is_suspect}")
        places.append(Place(substitute.node_id, member.workers, member.group_rank))
    if not taken:
        return None  # recover_from_parked says so better
    why = f"a node stands by for each that is lost ({', '.join(taken)})"
    left = {place.node_id for place in places}
    replaced = tuple(seat for seat in damage.replaced if seat[0] in left)
    return _checked(job, Plan(strategy=Strategy.RECOVER, places=tuple(places), why=why, replaced=replaced))


def elastic(job: Job, damage: Damage) -> Plan | None:
    """The living go on with fewer ranks."""
    assert job.view is not None and job.session is not None
    places = _survivors(job, damage)
    if damage.is_none or not job.session.resizable or len(places) < job.settings.nodes_min or not places:
        return None
    ranks = sum(place.workers for place in places)
    why = f"{ranks} of {job.view.world_size} ranks are left and can share all of the data"
    plan = Plan(strategy=Strategy.ELASTIC_TRAINING, places=places, why=why, replaced=damage.replaced)
    return _checked(job, plan)


def dump(job: Job, damage: Damage) -> Plan | None:
    """Those who live and hold the state write a checkpoint, and the job ends. Newcomers that have not got it yet have
    nothing to write, and nobody waits for them."""
    damage = _and_the_empty_handed(job, damage)
    places = _survivors(job, damage)
    if not places:
        return None
    why = "no rung above can go on, and the survivors hold a complete copy of the state"
    return _checked(job, Plan(strategy=Strategy.DUMP, places=places, why=why, replaced=damage.replaced))


# --- what they share


def standby(job: Job) -> list[Node]:
    """Nodes that could take part and do not: good ones first, then in the order in which they came."""
    waiting = (n for n in job.nodes.values() if n.eligible and not is_member(job, n))
    return sorted(waiting, key=lambda n: (preference(n.repute), n.join_order))


def is_member(job: Job, node: Node) -> bool:
    """Whether this life of the node has a place in the view."""
    member = job.members.get(node.node_id)
    return member is not None and member.incarnation == node.incarnation


def find_substitute(job: Job, waiting: list[Node], member: Member) -> Node | None:
    """A node that can run as many workers: the member's own next life, which keeps its ranks; else one that has no
    ranks of its own to come back to, of the same role, of a good name, with its workers parked, the first."""
    large = [n for n in waiting if n.info.workers >= member.workers]
    return min(
        large,
        key=lambda n: (
            n.node_id != member.node_id,
            n.node_id in job.members,
            n.info.role != member.role,
            preference(n.repute),
            n.parked < member.workers,
            n.join_order,
        ),
        default=None,
    )


def _with_gone(damage: Damage, members: list[Member]) -> Damage:
    """The damage if these leave as well."""
    left = {m.node_id for m in members}
    dead = {node_id: count for node_id, count in damage.dead.items() if node_id not in left}
    replaced = tuple(seat for seat in damage.replaced if seat[0] not in left)
    return Damage((*damage.gone, *members), dead, replaced)


def _and_the_empty_handed(job: Job, damage: Damage) -> Damage:
    """The damage if workers that hold nothing are ended too."""
    gone, ended = {m.node_id for m in damage.gone}, {*dead_seats(job), *damage.replaced}
    empty = tuple(
        (node_id, local_rank)
        for node_id in job.members
        if node_id not in gone
        for local_rank, holder in enumerate(job.crew.get(node_id, ()))
        if holder is None and (node_id, local_rank) not in ended
    )
    dead = dict(damage.dead)
    for node_id, _ in empty:
        dead[node_id] = dead.get(node_id, 0) + 1
    return Damage(damage.gone, dead, (*damage.replaced, *empty))


def _kept(job: Job, damage: Damage) -> tuple[Place, ...]:
    assert job.view is not None
    return tuple(
        Place(m.node_id, m.workers, m.group_rank) for m in job.view.members if m not in damage.gone
    )


def _survivors(job: Job, damage: Damage) -> tuple[Place, ...]:
    left = (
        Place(place.node_id, place.workers - damage.dead.get(place.node_id, 0), place.group_rank)
        for place in _kept(job, damage)
    )
    return tuple(place for place in left if place.workers > 0)


def _checked(job: Job, plan: Plan) -> Plan | None:
    return plan if keeps_a_copy(job, plan) else None


def keeps_a_copy(job: Job, plan: Plan) -> bool:
    """Whether those who live on under the plan hold a complete copy of the state."""
    stay = {place.node_id for place in plan.places}
    return not lack(living_holders(job, plan.replaced, set(job.members) - stay))


def _processes(damage: Damage) -> str:
    count = sum(damage.dead.values())
    return f"{count} process{'es' * (count > 1)}"


def _names(damage: Damage) -> str:
    return ", ".join(sorted(damage.dead))
