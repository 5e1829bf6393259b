"""Changes that nobody is forced to: nodes come, are asked to leave, or another number of them is wanted.

Workers that speak to Holdfast change over at a step boundary: the next view is formed while they train. For that it
must be calm: the view in force is proved or settled, and no other incident is open. Then, the first that applies:

    a member is leaving       a node that stands by takes its ranks; else the others go on with fewer
    there are too many        the newest leave
    there is room             nodes that wait are taken in, once their workers are parked or have had the time to
    seats are empty           they are filled from the node's parked workers
    a rank is a straggler     with `--straggler-action shift` the others take a part of its share of the global batch

All but the last and the first half of the first case change the size of the world: they need workers that can cope
with that, and `elastic-training` among the allowed rungs. Where a member that leaves can neither be replaced nor done
without, all workers start anew without it. A change waits for verdicts and for a store, so that once begun it goes
through.

Workers that do not speak to Holdfast are started anew for a change, as soon as it is due.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.health.reputation import preference
from holdfast.core.ladder import Strategy
from holdfast.core.plans import Place, Plan, find_substitute, keeps_a_copy, standby
from holdfast.core.shares import can_shift, shifted
from holdfast.core.state import Job, Node, Serving
from holdfast.core.stragglers import untold
from holdfast.core.troubles import Trouble, counted, dumping, is_disturbed, listed, members_gone, online, staying


def wish(job: Job, now: float) -> Trouble | None:
    """The change that is due, or None."""
    if job.session is None:
        return _restart_for(job, now)
    if not calm(job):
        return None
    if leaving := [text for text, _ in members_gone(job)]:
        plan = _without_the_leaving(job)
        return None if plan and not has_store(job, plan) else Trouble("planned", listed(leaving), plan)
    plan = _shrunk(job) or _grown(job, now) or _shifted(job)
    return Trouble("planned", plan.why, plan) if plan and has_store(job, plan) else None


def due_at(job: Job) -> float | None:
    """When a change will be due that is not yet; None if only events can bring one."""
    if job.session is None:
        return _newcomers_due_at(job)
    if not _can_grow(job) or members_gone(job):
        return None
    return min((_taken_in_at(job, node) for node in _arrivals(job)), default=None)


def has_store(job: Job, plan: Plan) -> bool:
    """Whether one of those who would take part has a store to offer."""
    return any(job.nodes[place.node_id].store_port for place in plan.places)


def calm(job: Job) -> bool:
    """Whether workers that speak to Holdfast can be asked to change over at a step boundary."""
    if not isinstance(job.phase, Serving) or dumping(job) or not online(job):
        return False
    if any(n.doubtful for n in job.nodes.values()) or is_disturbed(job):
        return False
    incident = job.incident
    if incident and (incident.kind != "planned" or incident.rebuilt_at):
        return False
    return job.proved >= 0 or job.settled == set(job.members)


def may_resize(job: Job) -> bool:
    """Whether the world may change its size while workers run."""
    return bool(job.session and job.session.resizable and Strategy.ELASTIC_TRAINING in job.settings.recovery)


# --- fewer


def _without_the_leaving(job: Job) -> Plan | None:
    assert job.view is not None
    waiting, places = standby(job), []
    for member in job.view.members:
        node = staying(job, member)
        if node is None and (node := find_substitute(job, waiting, member)):
            waiting.remove(node)
        if node:
            places.append(Place(node.node_id, member.workers, member.group_rank))
    whole = len(places) == len(job.view.members)
    if not whole and (not may_resize(job) or len(places) < max(job.settings.nodes_min, 1)):
        return None
    plan = Plan(
        strategy=Strategy.RECOVER if whole else Strategy.ELASTIC_TRAINING,
        places=tuple(places),
        why=_who_goes_on(job, places, whole),
        planned=True,
        fills=any(place.node_id not in job.members for place in places),
    )
    return plan if keeps_a_copy(job, plan) else None


def _who_goes_on(job: Job, places: list[Place], whole: bool) -> str:
    if not whole:
        return "the others go on with fewer ranks"
    new = [place.node_id for place in places if place.node_id not in job.members]
    return f"{', '.join(new)} takes over at a step boundary"


def _shrunk(job: Job) -> Plan | None:
    """Without the newest, when there are more nodes than wanted."""
    assert job.view is not None
    excess = len(job.view.members) - job.settings.nodes_max
    if excess <= 0 or not may_resize(job):
        return None
    newest = sorted(job.members, key=lambda node_id: job.nodes[node_id].join_order)[-excess:]
    places = [place for place in _as_they_are(job) if place.node_id not in newest]
    plan = Plan(
        strategy=Strategy.ELASTIC_TRAINING,
        places=tuple(places),
        why=f"{counted(job.settings.nodes_max, 'node')} wanted: {', '.join(newest)} may go",
        planned=True,
    )
    return plan if keeps_a_copy(job, plan) else None


# --- more


def _grown(job: Job, now: float) -> Plan | None:
    if not _can_grow(job):
        return None
    arrivals = _due_arrivals(job, now)
    empty = {n.node_id: _empty_seats(job, n) for n in _with_seats_to_fill(job)}
    if not arrivals and not empty:
        return None
    kept = [Place(p.node_id, p.workers + empty.get(p.node_id, 0), p.group_rank) for p in _as_they_are(job)]
    new = [Place(n.node_id, n.info.workers, None) for n in arrivals]
    texts = [f"node {n.node_id} joined" for n in arrivals]
    texts += [f"{node_id} has workers parked for {counted(n, 'empty seat')}" for node_id, n in empty.items()]
    return Plan(
        strategy=Strategy.ELASTIC_TRAINING,
        places=(*kept, *new),
        why=listed(texts),
        planned=True,
        fills=True,
    )


def _can_grow(job: Job) -> bool:
    """A store on a member: whoever else is taken in, it is there."""
    if not may_resize(job) or not calm(job):
        return False
    return any(node.store_port for member in job.members.values() if (node := staying(job, member)))


def _as_they_are(job: Job) -> list[Place]:
    assert job.view is not None
    return [Place(m.node_id, m.workers, m.group_rank) for m in job.view.members]


def _empty_seats(job: Job, node: Node) -> int:
    return node.info.workers - job.members[node.node_id].workers


def _with_seats_to_fill(job: Job) -> Iterable[Node]:
    """Members whose empty seats can all be filled. To be at work comes before to be spare."""
    for node_id in job.members:
        node = job.nodes[node_id]
        if node.parked >= _empty_seats(job, node) > 0:
            yield node


def _arrivals(job: Job) -> list[Node]:
    assert job.view is not None
    return standby(job)[: max(job.settings.nodes_max - len(job.view.members), 0)]


def _due_arrivals(job: Job, now: float) -> list[Node]:
    """All whose workers are parked, as soon as one is due; and who has had its time."""
    waiting = _arrivals(job)
    due = [n for n in waiting if _taken_in_at(job, n) <= now]
    return [n for n in waiting if n in due or (due and _is_parked(n))]


def _taken_in_at(job: Job, node: Node) -> float:
    """When its workers are parked: at once if nobody else is on the way, else after a moment for others to come."""
    if not _is_parked(node):
        return max(node.joined_at, job.formed_at, job.settled_at) + job.settings.park_timeout_s
    alone = all(_is_parked(n) for n in _arrivals(job))
    return node.parked_at if alone else node.parked_at + job.settings.settle_s


def _is_parked(node: Node) -> bool:
    return node.parked >= node.info.workers


# --- other shares


def _shifted(job: Job) -> Plan | None:
    """Once for all stragglers that are known. Who stays slow will be found again, in the view that follows."""
    assert job.view is not None
    if job.settings.straggler_action != "shift" or not job.stragglers or not can_shift(job):
        return None
    if job.incident is None and untold(job):
        return None
    weights = shifted(job)
    if weights == job.view.weights:
        return None  # they have the least already
    slow = [f"rank {job.members[n].first_rank + i} on {n}" for n, i in job.stragglers]
    why = f"slower than the others: {listed(slow)}; a part of its share of the global batch goes to them"
    return Plan(
        strategy=Strategy.ELASTIC_TRAINING, places=tuple(_as_they_are(job)), why=why, planned=True, weights=weights
    )


# --- workers that do not speak to Holdfast


def _restart_for(job: Job, now: float) -> Trouble | None:
    at = _newcomers_due_at(job)
    if at is not None and at <= now:
        return Trouble("planned", listed([f"node {n.node_id} joined" for n in _newcomers(job)]))
    if _is_shrinkable(job):
        return Trouble("planned", f"{counted(job.settings.nodes_max, 'node')} wanted")
    return None


def _is_shrinkable(job: Job) -> bool:
    assert job.view is not None
    if job.done or (job.incident and job.incident.kind != "planned") or _verdict_or_store_is_out(job, []):
        return False
    return len(job.view.members) > job.settings.nodes_max


def _newcomers(job: Job) -> list[Node]:
    """Nodes for which the view in force has room, in the order in which they came; none while they must wait."""
    if job.view is None or not isinstance(job.phase, Serving):
        return []
    room = job.settings.nodes_max - len(job.view.members)
    if room <= 0 or job.done:
        return []  # nobody is restarted for a newcomer once workers have finished
    if job.incident and job.incident.kind != "planned":
        return []  # one thing at a time
    waiting = [n for n in job.nodes.values() if n.eligible and n.node_id not in job.members]
    first = sorted(waiting, key=lambda n: (preference(n.repute), n.join_order))[:room]
    return [] if _verdict_or_store_is_out(job, first) else first


def _verdict_or_store_is_out(job: Job, waiting: list[Node]) -> bool:
    """A change nobody needs waits for verdicts and for a store, so that once begun it goes through."""
    if any(n.doubtful for n in job.nodes.values()):
        return True
    members = [n for n in job.nodes.values() if n.eligible and n.node_id in job.members]
    return not any(n.store_port for n in (*waiting, *members))


def _newcomers_due_at(job: Job) -> float | None:
    """When the waiting newcomers are to be taken in; None if there are none."""
    waiting = _newcomers(job)
    if not waiting:
        return None
    assert job.view is not None
    if len(job.view.members) + len(waiting) >= job.settings.nodes_max:
        return waiting[0].joined_at
    return waiting[0].joined_at + job.settings.settle_s
