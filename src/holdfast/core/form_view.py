"""Forming the next view: from the nodes that are there when all workers restart, by a plan when they are kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.core import records as r
from holdfast.core.batch_shares import carried
from holdfast.core.health import checkup
from holdfast.core.health.reputation import preference
from holdfast.core.rung_plans import PlannedNode, RungPlan
from holdfast.core.state import JobState, Node
from holdfast.core.strategies import Strategy
from holdfast.core.views import Member, NodeCandidate, View, assign_group_ranks, choose, make_members


def eligible_nodes(job: JobState) -> list[Node]:
    """Return the nodes that may take part in the next view, in join order."""
    return sorted((job.nodes[node_id] for node_id in job.sets.eligible), key=lambda node: node.join_order)


def store_among_eligible(job: JobState) -> bool:
    """Return whether one of the nodes that would take part has offered a store."""
    if len(job.sets.eligible) <= job.settings.nodes_max:
        return not job.sets.stores.keys().isdisjoint(job.sets.eligible)
    return any(job.nodes[c.node_id].store_port for c in _chosen(job, eligible_nodes(job)))


def awaits_store(job: JobState) -> bool:
    """Return whether all workers could restart now, if one of the nodes that would take part had offered a store."""
    if len(job.sets.eligible) < job.settings.nodes_min or checkup.members_awaited(job):
        return False  # nodes are waited for first
    return not store_among_eligible(job)


def form_restart_view(job: JobState, eligible: list[Node], now: float, why: str) -> r.ViewFormed | None:
    """Return the next view, in which all workers restart; None until a member has offered a store."""
    view = _assemble(job, _chosen(job, eligible))
    return r.ViewFormed(at=now, view=view, why=why) if view else None


def form_recovery_view(job: JobState, plan: RungPlan, now: float, why: str) -> r.ViewFormed | None:
    """Return the next view, in which live workers keep running; None until a member has offered a store."""
    seated, moved = _placed(job, plan.places)
    view = _assemble(job, moved, plan, seated)
    return r.ViewFormed(at=now, view=view, why=why) if view else None


def _assemble(
    job: JobState, candidates: list[NodeCandidate], plan: RungPlan | None = None, seated: Iterable[Member] = ()
) -> View | None:
    members = make_members(assign_group_ranks(candidates, seated))
    host = next((m.node_id for m in members if job.nodes[m.node_id].store_port), None)
    if host is None:
        return None
    return View(
        number=job.view.number + 1 if job.view else 1,
        members=members,
        world_size=members[-1].first_rank + members[-1].workers,
        store_node_id=host,
        store_host=job.nodes[host].info.address,
        store_port=job.nodes[host].store_port,
        restart_count=job.incidents.restarts_used,
        keeps_workers=plan is not None,
        planned=plan is not None and plan.planned,
        strategy=_strategy(plan) if plan else None,
        replaced=plan.replaced if plan else (),
        surplus=plan.surplus if plan else (),
        weights=plan.weights if plan and plan.weights is not None else carried(job, members),
    )


def _strategy(plan: RungPlan) -> Strategy:
    """Return the strategy as agents understand it: `recover` fills local ranks from parked workers first."""
    return Strategy.RECOVER if plan.fills else plan.strategy


def _chosen(job: JobState, eligible: list[Node]) -> list[NodeCandidate]:
    candidates = [_candidate(node, job.members.get(node.node_id)) for node in eligible]
    return choose(candidates, job.settings.nodes_max)


def _candidate(node: Node, member: Member | None) -> NodeCandidate:
    return NodeCandidate(
        node_id=node.node_id,
        incarnation=node.incarnation,
        workers=node.info.workers,
        role=node.info.role,
        requested_rank=node.info.requested_rank,
        join_order=node.join_order,
        current_rank=member.group_rank if member else None,
        preference=preference(node.reputation),
    )


def _placed(job: JobState, places: Sequence[PlannedNode]) -> tuple[list[Member], list[NodeCandidate]]:
    """Return the members that stay as they are, and all others."""
    members, nodes, size = job.members, job.nodes, len(places)
    seated: list[Member] = []
    moved: list[NodeCandidate] = []
    for place in places:
        node, member = nodes[place.node_id], members.get(place.node_id)
        if (
            member is not None
            and member.group_rank == place.group_rank
            and member.workers == place.workers
            and member.incarnation == node.incarnation
            and member.group_rank < size
        ):
            seated.append(member)
        else:
            moved.append(_moved(node, place))
    return seated, moved


def _moved(node: Node, place: PlannedNode) -> NodeCandidate:
    return NodeCandidate(
        node_id=node.node_id,
        incarnation=node.incarnation,
        workers=place.workers,
        role=node.info.role,
        requested_rank=node.info.requested_rank,
        join_order=node.join_order,
        current_rank=place.group_rank,
    )
