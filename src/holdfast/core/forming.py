"""How the next view is made: of the nodes there are when all workers start anew, by a plan when they stay."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core import records as r
from holdfast.core.health.reputation import preference
from holdfast.core.ladder import Strategy
from holdfast.core.plans import Place, Plan
from holdfast.core.shares import carried
from holdfast.core.state import Job, Node
from holdfast.core.views import Candidate, Member, View, assign_group_ranks, choose, seat_members


def store_among(job: Job, eligible: list[Node]) -> bool:
    """Whether one of those who would take part has a store to offer."""
    if len(eligible) <= job.settings.nodes_max:
        return any(n.store_port for n in eligible)
    return any(job.nodes[c.node_id].store_port for c in _chosen(job, eligible))


def form_anew(job: Job, eligible: list[Node], now: float, why: str) -> r.ViewFormed | None:
    """The next view, in which every worker starts anew; None until some member has a store to offer."""
    view = _assemble(job, _chosen(job, eligible))
    return r.ViewFormed(at=now, view=view, why=why) if view else None


def form_kept(job: Job, plan: Plan, now: float, why: str) -> r.ViewFormed | None:
    """The next view, in which the living keep running; None until some member has a store to offer."""
    view = _assemble(job, [_placed(job, place) for place in plan.places], plan)
    return r.ViewFormed(at=now, view=view, why=why) if view else None


def _assemble(job: Job, candidates: Iterable[Candidate], plan: Plan | None = None) -> View | None:
    members = seat_members(assign_group_ranks(list(candidates)))
    host = next((m.node_id for m in members if job.nodes[m.node_id].store_port), None)
    if host is None:
        return None
    return View(
        number=job.view.number + 1 if job.view else 1,
        members=members,
        world_size=sum(m.workers for m in members),
        store_node_id=host,
        store_host=job.nodes[host].info.address,
        store_port=job.nodes[host].store_port,
        restart_count=job.restarts_used,
        kept=plan is not None,
        planned=plan is not None and plan.planned,
        strategy=_strategy(plan) if plan else None,
        replaced=plan.replaced if plan else (),
        weights=plan.weights if plan and plan.weights is not None else carried(job, members),
    )


def _strategy(plan: Plan) -> Strategy:
    """As agents understand it: `recover` fills seats from parked workers first."""
    return Strategy.RECOVER if plan.planned and plan.fills else plan.strategy


def _chosen(job: Job, eligible: list[Node]) -> list[Candidate]:
    candidates = [_candidate(node, job.members.get(node.node_id)) for node in eligible]
    return choose(candidates, job.settings.nodes_max)


def _candidate(node: Node, member: Member | None) -> Candidate:
    return Candidate(
        node_id=node.node_id,
        incarnation=node.incarnation,
        workers=node.info.workers,
        role=node.info.role,
        requested_rank=node.info.requested_rank,
        join_order=node.join_order,
        current_rank=member.group_rank if member else None,
        preference=preference(node.repute),
    )


def _placed(job: Job, place: Place) -> Candidate:
    node = job.nodes[place.node_id]
    return Candidate(
        node_id=node.node_id,
        incarnation=node.incarnation,
        workers=place.workers,
        role=node.info.role,
        requested_rank=node.info.requested_rank,
        join_order=node.join_order,
        current_rank=place.group_rank,
    )
