"""Planned changes: nodes join, are asked to leave, or another number of them is requested.

Workers that use Holdfast change over at a step boundary: the next view is formed while they train. For that the job
must be quiet: the view in force has committed a step or is complete, and no other incident is open. Then,
the first that applies:

    a member is leaving       a node that stands by takes its ranks; else the others go on with fewer
    there are too many        the newest leave
    there is room             nodes that wait are added, once their workers are parked or have had the time to
    ranks are missing         they are filled from the node's parked workers
    a rank is a straggler     with `--straggler-action shift` the others take a part of its share of the global batch

All but the last and the first half of the first case change the size of the world: they need workers that can cope
with that, and `elastic-training` among the allowed rungs. Where a member that leaves can neither be replaced nor done
without, all workers restart without it. A change waits for verdicts and for a store, so that once begun it goes
through.

Workers that do not use Holdfast are restarted for a change, as soon as it is due.

What waiting costs is weighed against what a newcomer brings, in nodes times seconds. A node that waits wastes its own
time; what it is taken in for wastes that of all members, once. It is waited for until both are equal, so that together
they are never more than twice the least that was possible:

    its workers cannot be parked           taken in as it is, all wait for it at the step boundary: `park_timeout_s` of
                                           all members
    workers that do not use Holdfast       all restart: `RESTART_COST_S` of all members, of the newcomers' time added
                                           up; at once where they are a `LARGE_SHARE` of the members
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from holdfast.core.assess import (
    ViewProblem,
    can_repair_online,
    has_problems,
    is_dumping,
    is_spare_doubtful,
    is_verdict_pending,
    members_gone,
)
from holdfast.core.batch_shares import can_shift, shifted
from holdfast.core.form_view import awaits_store
from holdfast.core.rung_plans import (
    PlannedNode,
    RungPlan,
    find_substitutes,
    in_whole_replicas,
    keeps_full_state,
    may_resize,
    standby,
)
from holdfast.core.state import JobState, Node, Serving
from holdfast.core.stragglers import unreported
from holdfast.core.strategies import Strategy
from holdfast.core.wording import counted, listed

RESTART_COST_S = 30.0
"""The least that a restart is likely to cost each node: its steps since the last checkpoint, and to load it again."""
LARGE_SHARE = 1 / 16


def next_change(job: JobState, now: float) -> ViewProblem | None:
    """Return the change that is due, or None."""
    if job.state.session is None:
        return _restart_for(job, now)
    if not is_quiet(job):
        return None
    if leaving := [text for text, _ in members_gone(job)]:
        plan = _replace_leaving(job)
        if (plan is None or plan.strategy is not Strategy.RECOVER) and is_spare_doubtful(job):
            return None  # one that could take over may be back in a moment
        is_wait_for_store = not has_store(job, plan) if plan else awaits_store(job)
        return None if is_wait_for_store else ViewProblem("planned", listed(leaving), plan)
    plan = _shrunk(job) or _grown(job, now) or _shifted(job)
    return ViewProblem("planned", plan.why, plan) if plan and has_store(job, plan) else None


def due_at(job: JobState) -> float | None:
    """Return when the next change will be due; None if only events can bring one."""
    if job.state.session is None:
        return _newcomers_due_at(job)
    if not _can_grow(job) or members_gone(job):
        return None
    due = sorted(_taken_in_at(job, node) for node in _arrivals(job))
    return next((at for at in due if _grown(job, at)), None)  # fewer may be no whole replica


def has_store(job: JobState, plan: RungPlan) -> bool:
    """Return whether one of the nodes that would take part has offered a store."""
    return any(job.nodes[place.node_id].store_port for place in plan.places)


def is_quiet(job: JobState) -> bool:
    """Return whether workers that use Holdfast can change over at a step boundary."""
    if not isinstance(job.phase, Serving) or is_dumping(job) or not can_repair_online(job):
        return False
    if is_verdict_pending(job) or has_problems(job):
        return False
    incident = job.incidents.current
    if incident and (incident.kind != "planned" or incident.rebuilt_at):
        return False
    return job.progress.first_committed >= 0 or len(job.progress.joined) == len(job.members)


# --- fewer


def _replace_leaving(job: JobState) -> RungPlan | None:
    assert job.view is not None
    leaving = [m for m in job.view.members if m.node_id in job.sets.off]
    substitutes, left = find_substitutes(job, standby(job), leaving), {m.node_id for m in leaving}
    nodes = [(m, substitutes[m.node_id].node_id if m.node_id in substitutes else m.node_id) for m in job.view.members]
    places = [
        PlannedNode(node_id, member.workers, member.group_rank)
        for member, node_id in nodes
        if node_id not in left or member.node_id in substitutes
    ]
    is_complete = len(places) == len(job.view.members)
    if not is_complete and (not may_resize(job) or len(places) < max(job.settings.nodes_min, 1)):
        return None
    plan = RungPlan(
        strategy=Strategy.RECOVER if is_complete else Strategy.ELASTIC_TRAINING,
        places=tuple(places),
        why=_replacement_text(job, places, is_complete),
        planned=True,
        fills=any(place.node_id not in job.members for place in places),
    )
    return plan if is_complete and keeps_full_state(job, plan) else None if is_complete else _fewer(job, plan)


def _fewer(job: JobState, plan: RungPlan) -> RungPlan | None:
    """Return a plan for fewer ranks, as whole replicas, if the state and enough nodes are left."""
    whole = in_whole_replicas(job, plan)
    if whole is None or len(whole.places) < max(job.settings.nodes_min, 1):
        return None
    return whole if keeps_full_state(job, whole) else None


def _replacement_text(job: JobState, places: list[PlannedNode], is_complete: bool) -> str:
    if not is_complete:
        return "the other nodes continue with fewer ranks"
    new = [place.node_id for place in places if place.node_id not in job.members]
    return f"{', '.join(new)} takes over at a step boundary"


def _shrunk(job: JobState) -> RungPlan | None:
    """Return a plan without the newest nodes, if there are more than wanted."""
    assert job.view is not None
    excess = len(job.view.members) - job.settings.nodes_max
    if excess <= 0 or not may_resize(job):
        return None
    newest = sorted(job.members, key=lambda node_id: job.nodes[node_id].join_order)[-excess:]
    places = [place for place in _current_nodes(job) if place.node_id not in newest]
    plan = RungPlan(
        strategy=Strategy.ELASTIC_TRAINING,
        places=tuple(places),
        why=f"{counted(job.settings.nodes_max, 'node')} requested: {', '.join(newest)} leave",
        planned=True,
    )
    return _fewer(job, plan)


# --- more


def _grown(job: JobState, now: float) -> RungPlan | None:
    if not _can_grow(job):
        return None
    arrivals = _due_arrivals(job, now)
    empty = {n.node_id: _missing_workers(job, n) for n in _members_to_fill(job)}
    if not arrivals and not empty:
        return None
    kept = _current_nodes(job)
    for node_id, missing in empty.items():
        member = job.members[node_id]
        kept[member.group_rank] = PlannedNode(node_id, member.workers + missing, member.group_rank)
    new = [PlannedNode(n.node_id, n.info.workers, None) for n in arrivals]
    assert job.view is not None
    full = RungPlan(strategy=Strategy.ELASTIC_TRAINING, places=(*kept, *new), why="", planned=True, fills=True)
    plan = in_whole_replicas(job, full)
    if plan is None or sum([place.workers for place in plan.places]) <= job.view.world_size:
        return None
    workers = {place.node_id: place.workers for place in plan.places}
    texts = [f"node {n.node_id} joined" for n in arrivals if n.node_id in workers]
    filled = {node_id: workers[node_id] - job.members[node_id].workers for node_id in empty}
    texts += [f"{node_id} has parked workers for {counted(n, 'missing rank')}" for node_id, n in filled.items() if n]
    return msgspec.structs.replace(plan, why=listed(texts))


def _can_grow(job: JobState) -> bool:
    """Return whether nodes may be added: the workers can be resized, nothing else goes on, and a member has offered a
    store."""
    if not may_resize(job) or not is_quiet(job):
        return False
    return any(node_id in job.members and node_id not in job.sets.off for node_id in job.sets.stores)


def _current_nodes(job: JobState) -> list[PlannedNode]:
    assert job.view is not None
    return [PlannedNode(m.node_id, m.workers, m.group_rank) for m in job.view.members]


def _missing_workers(job: JobState, node: Node) -> int:
    return node.info.workers - job.members[node.node_id].workers


def _members_to_fill(job: JobState) -> Iterable[Node]:
    """Yield the members whose missing workers can all be filled from parked ones: a parked worker is better used than
    spare."""
    for node_id in sorted(job.sets.short, key=lambda one: job.members[one].group_rank):
        node = job.nodes[node_id]
        if node.parked >= _missing_workers(job, node) > 0:
            yield node


def _arrivals(job: JobState) -> list[Node]:
    assert job.view is not None
    return standby(job, max(job.settings.nodes_max - len(job.view.members), 0))


def _due_arrivals(job: JobState, now: float) -> list[Node]:
    """Return the standby nodes to add now: as soon as one is due, all whose workers are parked."""
    waiting = _arrivals(job)
    due = [n for n in waiting if _taken_in_at(job, n) <= now]
    return [n for n in waiting if n in due or (due and _is_parked(n))]


def _taken_in_at(job: JobState, node: Node) -> float:
    """Return when the node is added: when its workers are parked, at once if no other node is on its way, else after
    the settling time."""
    if not _is_parked(node):
        wait_s = job.settings.park_timeout_s * len(job.members)
        return max(node.joined_at, job.formed_at, job.progress.all_joined_at) + wait_s
    alone = all(_is_parked(n) for n in _arrivals(job))
    return node.parked_at if alone else node.parked_at + job.settings.settle_s


def _is_parked(node: Node) -> bool:
    return node.parked >= node.info.workers


# --- other shares


def _shifted(job: JobState) -> RungPlan | None:
    """Return a plan with smaller shares for all known stragglers. Those that stay slow are found again in the next
    view."""
    assert job.view is not None
    if job.settings.straggler_action != "shift" or not job.progress.stragglers or not can_shift(job):
        return None
    if job.incidents.current is None and unreported(job):
        return None
    weights = shifted(job)
    if weights == job.view.weights:
        return None  # they have the least already
    slow = [f"rank {job.members[n].first_rank + i} on {n}" for n, i in job.progress.stragglers]
    why = f"slower than the others: {listed(slow)}; they take over a part of its share of the global batch"
    return RungPlan(
        strategy=Strategy.ELASTIC_TRAINING, places=tuple(_current_nodes(job)), why=why, planned=True, weights=weights
    )


# --- workers that do not speak to Holdfast


def _restart_for(job: JobState, now: float) -> ViewProblem | None:
    at = _newcomers_due_at(job)
    if at is not None and at <= now:
        return ViewProblem("planned", listed([f"node {n.node_id} joined" for n in _newcomers(job)]))
    if _is_shrinkable(job):
        return ViewProblem("planned", f"{counted(job.settings.nodes_max, 'node')} requested")
    return None


def _is_shrinkable(job: JobState) -> bool:
    assert job.view is not None
    if (
        len(job.view.members) <= job.settings.nodes_max
        or job.progress.succeeded
        or (job.incidents.current and job.incidents.current.kind != "planned")
    ):
        return False
    return not _is_verdict_or_store_pending(job, [])


def _newcomers(job: JobState) -> list[Node]:
    """Return the nodes for which the view in force has room, in join order; none while they must wait."""
    if job.view is None or not isinstance(job.phase, Serving):
        return []
    room = job.settings.nodes_max - len(job.view.members)
    if room <= 0 or job.progress.succeeded:
        return []  # no restart for a new node once workers have finished
    if job.incidents.current and job.incidents.current.kind != "planned":
        return []  # one thing at a time
    first = [node for node in standby(job) if node.node_id not in job.members][:room]
    return [] if _is_verdict_or_store_pending(job, first) else first


def _is_verdict_or_store_pending(job: JobState, waiting: list[Node]) -> bool:
    """Return whether a planned change must wait for a verdict or for a store, so that it goes through once begun."""
    if is_verdict_pending(job) or awaits_store(job):
        return True
    new = {node.node_id for node in waiting}
    return not any(n in new or (n in job.members and n in job.sets.eligible) for n in job.sets.stores)


def _newcomers_due_at(job: JobState) -> float | None:
    """Return when the waiting nodes are to be added; None if there are none."""
    waiting = _newcomers(job)
    if not waiting:
        return None
    assert job.view is not None
    members = len(job.view.members)
    if len(waiting) < LARGE_SHARE * members:
        worth_it_at = (RESTART_COST_S * members + sum(node.joined_at for node in waiting)) / len(waiting)
        return max(worth_it_at, waiting[-1].joined_at)
    if members + len(waiting) >= job.settings.nodes_max:
        return waiting[0].joined_at
    return waiting[0].joined_at + job.settings.settle_s
