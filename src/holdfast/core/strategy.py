"""What is wrong with the view in force, and the cheapest thing to do about it.

The ladder, for scripts that do not speak to Holdfast and so cannot be repaired in place:

    restart   every worker starts again in a new view, on the nodes there are; from the warm fork server
    wait      too few nodes are left: workers stop until enough are back
    exit      no restart is left: the job ends with the cause

What counts against `--max-restarts` is blame: a worker that failed by itself counts, and so do collateral
errors whose cause nobody can name; a node that is lost, leaves or joins does not.
"""

from __future__ import annotations

from itertools import chain

import msgspec

from holdfast.core.faults import describe, is_collateral, root_cause
from holdfast.core.records import IncidentKind, Strategy
from holdfast.core.state import Draining, Job, Lost, Node, Serving


class Trouble(msgspec.Struct, frozen=True):
    """Why the view cannot stay as it is."""

    kind: IncidentKind
    text: str


class Choice(msgspec.Struct, frozen=True):
    """A rung of the ladder, and why it is the one."""

    strategy: Strategy
    counted: bool
    why: str


def trouble(job: Job, now: float) -> Trouble | None:
    """The first reason to leave the view in force, or None."""
    assert job.view is not None
    gone = members_gone(job)
    if lost := [text for text, draining in gone if not draining]:
        return Trouble("node", _listed(lost))
    if job.failed:
        first = root_cause(job.failed.values())
        assert first is not None
        if not (gone and is_collateral(first)):
            return Trouble("worker", describe(first))
    if gone:
        return Trouble("planned", _listed([text for text, _ in gone]))
    if newcomers := _due_newcomers(job, now):
        return Trouble("planned", _listed([f"node {n.node_id} joined" for n in newcomers]))
    return None


def choose(job: Job) -> Choice:
    """The cheapest strategy that can work."""
    settings = job.settings
    real = any(not is_collateral(f) for f in job.failed.values())
    counted = real or (bool(job.failed) and not members_gone(job))
    if counted and job.restarts_used >= settings.restarts_max:
        left = "no restart is allowed" if not settings.restarts_max else "all restarts are used up"
        return Choice(Strategy.EXIT, False, f"{left} (--max-restarts {settings.restarts_max})")
    eligible = sum(n.eligible for n in job.nodes.values())
    if eligible < settings.nodes_min:
        why = f"{eligible} of at least {settings.nodes_min} nodes are left"
        return Choice(Strategy.WAIT, counted, why)
    nodes = min(eligible, settings.nodes_max)
    return Choice(Strategy.RESTART, counted, f"{nodes} of {settings.nodes_max} nodes can go on")


def members_gone(job: Job) -> list[tuple[str, bool]]:
    """Members of the view that are no longer there or are going: what happened, and whether by request. A node whose
    workers have all succeeded has done its part: it may go without costing the others anything."""
    assert job.view is not None
    gone: list[tuple[str, bool]] = []
    for member in job.view.members:
        node = job.nodes.get(member.node_id)
        if all((member.node_id, local_rank) in job.done for local_rank in range(member.workers)):
            continue
        if node is None or node.incarnation != member.incarnation:
            gone.append((f"node {member.node_id} was replaced by its next life", False))
        elif isinstance(node.standing, Draining):
            gone.append((f"node {member.node_id} is leaving: {node.standing.why}", True))
        elif not node.alive:
            why = node.standing.why if isinstance(node.standing, Lost) else "it left"
            gone.append((f"node {member.node_id} was lost: {why}", False))
    return gone


def newcomers(job: Job) -> list[Node]:
    """Nodes for which the view in force has room, in the order in which they came; none while they must wait."""
    if job.view is None or not isinstance(job.phase, Serving):
        return []
    room = job.settings.nodes_max - len(job.view.members)
    if room <= 0 or job.done:
        return []  # nobody is restarted for a newcomer once workers have finished
    if job.incident and job.incident.kind != "planned":
        return []  # one thing at a time
    waiting = [n for n in job.nodes.values() if n.eligible and n.node_id not in job.members]
    first = sorted(waiting, key=lambda n: n.join_order)[:room]
    return first if first and _can_grow(job, first) else []


def _can_grow(job: Job, waiting: list[Node]) -> bool:
    """A change nobody needs waits for verdicts and for a store, so that once begun it goes through."""
    if any(n.doubtful for n in job.nodes.values()):
        return False
    members = (n for n in job.nodes.values() if n.eligible and n.node_id in job.members)
    return any(n.store_port for n in chain(waiting, members))


def newcomers_due_at(job: Job) -> float | None:
    """When the waiting newcomers are to be taken in; None if there are none."""
    waiting = newcomers(job)
    if not waiting:
        return None
    assert job.view is not None
    if len(job.view.members) + len(waiting) >= job.settings.nodes_max:
        return waiting[0].joined_at
    return waiting[0].joined_at + job.settings.settle_s


def _due_newcomers(job: Job, now: float) -> list[Node]:
    due_at = newcomers_due_at(job)
    return newcomers(job) if due_at is not None and due_at <= now else []


def _listed(texts: list[str], shown_max: int = 3) -> str:
    more = f"; and {len(texts) - shown_max} more" if len(texts) > shown_max else ""
    return "; ".join(texts[:shown_max]) + more
