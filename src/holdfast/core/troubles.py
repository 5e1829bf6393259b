"""What is wrong with the view in force: who is gone, whose process died, who hangs, whose step failed; and whether the
picture is complete.

Why wait for a moment: the first news of a death is often another rank's broken collective. What is known for certain is
acted on at once; what may be the echo of something else is given `collect_window_s`:

    a member is gone, a worker died by itself, a step failed by an error of its own     complete
    only collateral errors, and workers that have said nothing                          wait for the cause
    only collateral errors, of every worker there is                                    complete: connections broke;
                                                                                        but wait if the step may not be
                                                                                        tried again, as a cause would
                                                                                        leave more to choose from
    nothing moves on some nodes, and others have not said so                            nothing is wrong: they wait
    nothing moves on any node                                                           complete: somebody hangs

Who hangs: of all workers, the one that has come least far (step, then collectives, then whether it waits for others).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import msgspec

from holdfast.core.copies import Holder, Seats, lack
from holdfast.core.events import Stumble, Vector
from holdfast.core.faults import Failure, Signalled, describe, describe_end, describe_error, is_collateral, root_cause
from holdfast.core.ladder import Strategy
from holdfast.core.records import IncidentKind
from holdfast.core.state import Draining, Job, Lost, Node, Present, Serving
from holdfast.core.views import Member

if TYPE_CHECKING:
    from holdfast.core.plans import Plan

MARK_CHARS_MAX = 300
"""Of a failure's text, for telling whether it came back."""

Seat = tuple[str, int]
"""A worker of the view: its node and local rank."""


class Trouble(msgspec.Struct, frozen=True):
    """Why the view cannot stay as it is."""

    kind: IncidentKind
    text: str
    plan: Plan | None = None
    """Of a change that nobody was forced to: what it comes to. None: strategy.py chooses."""


def fault(job: Job) -> Trouble | None:
    """What forces the job to leave the view in force, or None. A member that was asked to leave forces nothing as long
    as it can go at a step boundary (planned.py)."""
    assert job.view is not None
    gone = members_gone(job)
    if lost := [text for text, by_request in gone if not by_request]:
        return Trouble("node", listed(lost))
    if text := _worker_trouble(job, collateral_counts=not gone):
        return Trouble("worker", text)
    if gone and (is_disturbed(job) or not online(job)):
        return Trouble("planned", listed([text for text, _ in gone]))
    is_unproved = job.view.kept and job.proved < 0 and not job.done
    if is_unproved and (missing := lack(living_holders(job))):
        return Trouble("worker", missing)
    return None


def _worker_trouble(job: Job, *, collateral_counts: bool) -> str:
    first = root_cause(job.failed.values())
    if first and (collateral_counts or not is_collateral(first)) and not (is_collateral(first) and own_errors(job)):
        return describe(first)
    if errors := own_errors(job):
        (node_id, _), stumble = min(errors.items(), key=lambda item: (item[1].at, item[1].rank))
        return f"rank {stumble.rank} on {node_id} failed in step {stumble.step}: {_error(stumble)}"
    if job.stall and collateral_counts:
        return _stall_text(job)
    if job.held and collateral_counts:
        ranks = sorted(stumble.rank for stumble in job.held.values())
        return f"connections broke: {counted(len(ranks), 'rank')}, {ranks[0]} first, left the step"
    return ""


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


def staying(job: Job, member: Member) -> Node | None:
    """The member's node, if it is there and means to stay."""
    node = job.live(member.node_id, member.incarnation)
    return node if node and isinstance(node.standing, Present) else None


# --- when the picture is complete


def complete_at(job: Job, *, can_retry: bool) -> float:
    """When to stop waiting for more news; 0 if there is nothing to wait for."""
    window_over_at = job.failing_since + job.settings.collect_window_s
    if members_gone(job) or own_errors(job) or any(not is_collateral(f) for f in job.failed.values()):
        return 0.0
    if job.failed:
        return window_over_at
    if job.stall:
        return 0.0
    if job.held:
        assert job.view is not None
        return 0.0 if can_retry and len(job.held) == job.view.world_size else window_over_at
    return 0.0


# --- whose fault it is


def own_errors(job: Job) -> dict[Seat, Stumble]:
    """Failed steps that are no echo of another's."""
    return {seat: stumble for seat, stumble in job.held.items() if not stumble.collateral}


def suspect(job: Job) -> tuple[Seat, Vector] | None:
    """Of workers that do not move, the one that keeps the others waiting. None if something else explains it."""
    if job.failed or own_errors(job) or members_gone(job):
        return None
    vectors = [(node_id, vector) for node_id, stuck in job.stall.items() for vector in stuck.vectors]
    known = [
        (n, v) for n, v in vectors if not v.joining and n in job.members and v.local_rank < job.members[n].workers
    ]
    if not known:
        return None
    node_id, lowest = min(known, key=lambda nv: _distance(nv[1]))
    return (node_id, lowest.local_rank), lowest


def _distance(vector: Vector) -> tuple[int, int, bool, int, int]:
    return (vector.step, vector.collectives, vector.waiting, vector.phase, vector.rank)


def marks(job: Job) -> list[str]:
    """The failures at hand in a form that is the same when they come back. Echoes of others have none."""
    failures = [
        f"rank {f.rank}: {describe_end(f.end)} {f.exception} {f.message}"
        for f in job.failed.values()
        if not is_collateral(f) and not _is_from_outside(f)
    ]
    errors = [mark_of(stumble) for stumble in own_errors(job).values()]
    found = suspect(job)
    hangs = [f"rank {found[1].rank}: hangs"] if found else []
    return [text[:MARK_CHARS_MAX] for text in (*failures, *errors, *hangs)]


def _is_from_outside(failure: Failure) -> bool:
    """Killed by somebody else: that it happens twice says nothing about the worker."""
    return isinstance(failure.end, Signalled) and failure.end.name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")


def mark_of(stumble: Stumble) -> str:
    """The same for a failed step."""
    return f"rank {stumble.rank}: {_error(stumble)}"[:MARK_CHARS_MAX]


def _error(stumble: Stumble) -> str:
    return describe_error(stumble.exception, stumble.message)


def _stall_text(job: Job) -> str:
    stalled_s = max(stuck.stalled_s for stuck in job.stall.values())
    found = suspect(job)
    if found is None:
        return f"nothing has moved for {stalled_s:.1f} s"
    (node_id, _), vector = found
    where = "waits for others" if vector.waiting else "does not wait for others"
    return (
        f"rank {vector.rank} on {node_id} hangs: nothing has moved for {stalled_s:.1f} s, and it has come least far"
        f" (step {vector.step}, {vector.collectives} collectives, {where})"
    )


# --- who holds the state


def is_disturbed(job: Job) -> bool:
    """Whether anything at all was heard of a worker that is not well."""
    return bool(job.failed or job.held or job.stall)


def dead_seats(job: Job) -> set[Seat]:
    """Workers of the view that are known to have ended."""
    return {*job.failed, *job.done}


def living_holders(job: Job, ended: Collection[Seat] = (), without: Collection[str] = ()) -> Iterator[Holder]:
    """What the workers hold that live on nodes that stay, but for those about to be ended and nodes left out."""
    assert job.view is not None
    dead = dead_seats(job)
    for member in job.view.members:
        if member.node_id in without or staying(job, member) is None:
            continue
        for local_rank, holder in enumerate(job.crew.get(member.node_id, ())):
            seat = (member.node_id, local_rank)
            if holder and seat not in dead and seat not in ended:
                yield holder


def seats_without(job: Job, node_id: str, local_rank: int, number: int) -> Seats:
    """A node's seats without a worker of an earlier view. Which one it is now is known, by what it held, if it is of
    the view just before; else none that it could be is counted on."""
    assert job.view is not None
    before = job.crew_before.get(node_id, ())
    exact = number == job.view.number - 1 and local_rank < len(before)
    gone = before[local_rank] if exact else None
    return tuple(
        None if holder and holder.view <= number and (not exact or holder == gone) else holder
        for holder in job.crew.get(node_id, ())
    )


def online(job: Job) -> bool:
    """Whether the view can be repaired without starting everything anew: nobody has finished, and the living workers
    hold a complete copy of the state."""
    if job.session is None or job.view is None or not isinstance(job.phase, Serving):
        return False
    return not job.done and not job.is_closed and not lack(living_holders(job))


def dumping(job: Job) -> bool:
    """Whether the view in force is there to write a checkpoint and end."""
    return job.view is not None and job.view.strategy is Strategy.DUMP


def counted(number: int, noun: str) -> str:
    """A number of things."""
    return f"{number} {noun}{'s' * (number != 1)}"


def listed(texts: list[str], shown_max: int = 3) -> str:
    """Several texts as one, the rest counted."""
    more = f"; and {len(texts) - shown_max} more" if len(texts) > shown_max else ""
    return "; ".join(texts[:shown_max]) + more
