"""What the policy asks of all nodes at every turn, kept up to date by `evolve` so that a turn costs what it changes.

    evolve applies a record, then calls `follow`: the nodes that the record names are looked at again; after a new view
    those that are members now and were none, or the reverse; after a new term all of them
    everything else only reads

Nothing here is known that does not follow from the job's nodes, members and holders: `differences` compares it with
what does, after every turn of the tests.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.core import records as r
from holdfast.core.health.reputation import preference
from holdfast.core.state_coverage import NodeHolders, ShardLayout, StateHolder, missing_shards
from holdfast.core.views import Member, View

if TYPE_CHECKING:
    from holdfast.core.state import JobState, Node

NodeIds = dict[str, None]
"""A set that has an order."""

OF_ALL_HOLDERS = (r.ViewFormed, r.GatheringBegan, r.SessionRevisedRecord)
OF_NO_NODE = (
    r.WorkersStartedRecord,
    r.WorkerSucceededRecord,
    r.WorkerFailedRecord,
    r.WorkerFailingRecord,
    r.StepInterruptedRecord,
    r.StepEchoRecord,
    r.ViewJoinedRecord,
    r.ImagesReportedRecord,
    r.StepTimesReportedRecord,
    r.CollectivesRetriedRecord,
    r.SparesChangedRecord,
)
"""Records that name a node and change nothing that is kept of it."""


OF_THE_PAST = frozenset({"deadlines", "broken_together", "restored_at"})
"""What does not follow from the nodes as they are."""


@dataclass
class NodeSets:
    """Which nodes are what."""

    alive: NodeIds = field(default_factory=dict)
    here: NodeIds = field(default_factory=dict)
    aside: NodeIds = field(default_factory=dict)
    """Here, and no members of the view."""
    awaited: NodeIds = field(default_factory=dict)
    """Here, and to be checked before they take part."""
    eligible: dict[str, float] = field(default_factory=dict)
    """Those that may take part in the next view, and when they joined."""
    joined_at: list[tuple[float, str]] = field(default_factory=list)
    """The same, in the order in which they joined."""
    last_resorts: NodeIds = field(default_factory=dict)
    """Alive, connected, and only used if the job cannot do without them."""
    unlinked: dict[str, float] = field(default_factory=dict)
    """Alive, with a broken connection; each with its deadline."""
    deadlines: list[tuple[float, int, str]] = field(default_factory=list)
    """The same as a heap, with entries that are out of date; the first never is."""
    broken_together: int = 0
    """How many connections were broken at once, at most, since the last time that none was."""
    restored_at: float = 0.0
    """When a connection came back last."""
    doubtful: NodeIds = field(default_factory=dict)
    stores: NodeIds = field(default_factory=dict)
    """Those that have offered a store."""
    standby: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Eligible and no members, each with its place in line: by reputation, then in join order."""
    line: list[tuple[int, int, str]] = field(default_factory=list)
    """The same, in that order."""
    off: NodeIds = field(default_factory=dict)
    """Members that do not stay: gone, leaving, or left out for a broken link."""
    short: NodeIds = field(default_factory=dict)
    """Members with fewer workers than their nodes can run."""

    @property
    def first_deadline(self) -> float | None:
        """Return when the first broken connection must be back; None if there is none."""
        return self.deadlines[0][0] if self.deadlines else None


@dataclass
class HeldShards:
    """What the living workers of members that stay hold, counted, so that it is known at once whether it is all."""

    by_node: dict[str, tuple[StateHolder, ...]] = field(default_factory=dict)
    """Parts of a state that is cut, by nodes that are not `full`."""
    counted: dict[str, NodeHolders] = field(default_factory=dict)
    """By node: what of the job that came from."""
    full: NodeIds = field(default_factory=dict)
    """Nodes with a worker that holds all of the state by itself."""
    cuts: dict[int, HeldCut] = field(default_factory=dict)
    """By layout: what is held of a state that is cut."""
    answer: str | None = None
    """What is missing, where it takes longer to say; None: not asked since something changed."""


@dataclass
class HeldCut:
    """What is held of one layout."""

    layout: ShardLayout
    shards: Counter[int] = field(default_factory=Counter)
    ranks: Counter[int] = field(default_factory=Counter)

    @property
    def is_complete(self) -> bool:
        """Return whether every shard, and every rank's own state, has a living holder, copies not counted."""
        is_own_held = not self.layout.per_rank or len(self.ranks) == self.layout.world_size
        return len(self.shards) == self.layout.shards and is_own_held


class ChangedMembers(NamedTuple):
    """How the members of a view differ from those before it."""

    gone: list[str]
    """Nodes that are members no more."""
    others: list[str]
    """New members, and those of which another incarnation is one, or with another number of workers."""


def follow(job: JobState, record: r.Record, changed: ChangedMembers | None) -> None:
    """Look again at what a record may have changed; with a new view, at the members that it changes. Only `evolve`
    calls this."""
    if isinstance(record, r.TermBegan):
        job.sets = _all_nodes(job)
    elif isinstance(record, r.ViewFormed):
        assert changed is not None
        for node_id in (*changed.gone, *changed.others, record.view.store_node_id):
            _look_at(job, job.sets, node_id)
    elif isinstance(record, r.StoreOfferedRecord):
        _put(job.sets.stores, record.node_id, job.nodes[record.node_id].store_port > 0)
        return
    else:
        for node_id in _named(record):
            _look_at(job, job.sets, node_id)
    if isinstance(record, r.LinkRestored):
        job.sets.restored_at = record.at
    if isinstance(record, OF_ALL_HOLDERS):
        _count_changed(job)
    elif isinstance(record, r.WorkerFailedRecord):
        _count_held(job, job.held, record.failure.node_id)
    elif isinstance(record, r.WorkerSucceededRecord):
        _count_held(job, job.held, record.node_id)
    else:
        for node_id in _named(record):
            _count_held(job, job.held, node_id)


def changed_members(before: Mapping[str, Member], view: View) -> ChangedMembers:
    """Return how the members of a view differ from those before it."""
    others = [
        member.node_id
        for member in view.members
        if (former := before.get(member.node_id)) is not member
        and (former is None or former.workers != member.workers or former.incarnation != member.incarnation)
    ]
    new = sum(node_id not in before for node_id in others)
    if len(view.members) - new == len(before):
        return ChangedMembers([], others)
    members = {member.node_id for member in view.members}
    return ChangedMembers([node_id for node_id in before if node_id not in members], others)


def _named(record: r.Record) -> tuple[str, ...]:
    """Return the nodes whose state the record may have changed."""
    match record:
        case r.CheckConcluded(nodes=verdicts):
            return tuple(verdict.node_id for verdict in verdicts)
        case r.PeerLinksJudged(left_out=left_out):
            return left_out
        case _ if isinstance(record, OF_NO_NODE):
            return ()
        case _:
            node_id = getattr(record, "node_id", "")
            return (node_id,) if node_id else ()


def differences(job: JobState) -> list[str]:
    """Return what is kept and does not follow from the job; nothing, unless there is a bug."""
    sets, held = _all_nodes(job), _all_holders(job)
    names = [name for name in vars(sets) if name not in OF_THE_PAST]
    kept = [(name, getattr(job.sets, name), getattr(sets, name)) for name in names]
    found = [f"{name}: {known}, not {due}" for name, known, due in kept if known != due]
    if job.sets.first_deadline != min(sets.unlinked.values(), default=None):
        found.append(f"first deadline: {job.sets.first_deadline}")
    places = [{n: [*map(_place, one)] for n, one in which.by_node.items() if one} for which in (job.held, held)]
    if places[0] != places[1]:
        found.append(f"held: {job.held.by_node}, not {held.by_node}")
    if (job.held.full, job.held.cuts) != (held.full, held.cuts):
        found.append(f"counted: {job.held.full}, {job.held.cuts}, not {held.full}, {held.cuts}")
    lacking = missing_shards(holder for node_id in job.members for holder in _living(job, node_id))
    if job.view is not None and bool(what_is_missing(job)) != bool(lacking):
        found.append(f"missing: {what_is_missing(job)}, not {lacking}")
    return found


# --- nodes


def _all_nodes(job: JobState) -> NodeSets:
    sets = NodeSets()
    for node_id in job.nodes | job.members:
        _look_at(job, sets, node_id)
    return sets


def _look_at(job: JobState, sets: NodeSets, node_id: str) -> None:
    node, member = job.nodes.get(node_id), job.members.get(node_id)
    is_member = node is not None and member is not None and member.incarnation == node.incarnation
    is_eligible = node is not None and node.eligible
    _put(sets.alive, node_id, node is not None and node.alive)
    _put(sets.here, node_id, node is not None and node.is_here)
    _put(sets.aside, node_id, node is not None and node.is_here and not is_member)
    _put(sets.awaited, node_id, node is not None and node.is_awaited)
    _put(sets.last_resorts, node_id, node is not None and node.is_reserve)
    _put(sets.doubtful, node_id, node is not None and node.doubtful)
    _put(sets.stores, node_id, node is not None and node.store_port > 0)
    _put(sets.off, node_id, member is not None and not (is_member and node is not None and node.stays))
    _put(sets.short, node_id, is_member and node is not None and member is not None and _is_short(node, member.workers))
    _put_unlinked(sets, node_id, node)
    joined_at = node.joined_at if node is not None and is_eligible else None
    if sets.eligible.get(node_id) != joined_at:
        _resort(sets.joined_at, (sets.eligible.pop(node_id, None),), (joined_at,), node_id)
        if joined_at is not None:
            sets.eligible[node_id] = joined_at
    place = (preference(node.reputation), node.join_order) if node and is_eligible and not is_member else None
    if sets.standby.get(node_id) != place:
        _resort(sets.line, sets.standby.pop(node_id, (None,)), place or (None,), node_id)
        if place is not None:
            sets.standby[node_id] = place


def _is_short(node: Node, workers: int) -> bool:
    return workers < node.info.workers


def _put(where: NodeIds, node_id: str, is_so: bool) -> None:
    if is_so:
        where[node_id] = None
    else:
        where.pop(node_id, None)


def _resort(order: list[Any], before: tuple[Any, ...], after: tuple[Any, ...], node_id: str) -> None:
    """Move a node to another place of a sorted list. A key of None stands for no place."""
    if before[0] is not None:
        del order[bisect_left(order, (*before, node_id))]
    if after[0] is not None:
        insort(order, (*after, node_id))


def _put_unlinked(sets: NodeSets, node_id: str, node: Node | None) -> None:
    deadline = node.unlinked_until if node is not None else None
    if sets.unlinked.get(node_id) == deadline:
        return
    if node is None or deadline is None:
        sets.unlinked.pop(node_id, None)
    else:
        sets.unlinked[node_id] = deadline
        heapq.heappush(sets.deadlines, (deadline, node.join_order, node_id))
    sets.broken_together = max(sets.broken_together, len(sets.unlinked)) if sets.unlinked else 0
    while sets.deadlines and sets.unlinked.get(sets.deadlines[0][2]) != sets.deadlines[0][0]:
        heapq.heappop(sets.deadlines)


# --- the state


def what_is_missing(job: JobState) -> str:
    """Return what is missing of a complete copy of the state among the living workers of members that stay, in words;
    empty if nothing is."""
    held = job.held
    if held.full or any(cut.is_complete for cut in held.cuts.values()):
        return ""
    if held.answer is None:
        assert job.view is not None
        in_order = (held.by_node.get(member.node_id, ()) for member in job.view.members)
        held.answer = missing_shards(holder for holders in in_order for holder in holders)
    return held.answer


def _all_holders(job: JobState) -> HeldShards:
    held = HeldShards()
    for node_id in job.members:
        _count_held(job, held, node_id)
    return held


def count_held(job: JobState, node_ids: Iterable[str]) -> None:
    """Count again what the workers of these nodes hold, now that something else is known of it. Only `evolve` calls
    this."""
    holders, full, counted = job.progress.holders, job.held.full, job.held.counted
    layout, is_layout_full = None, False
    for node_id in node_ids:
        first = (known := holders[node_id])[0] if node_id in full else None
        if first is not None and first.layout is not layout:
            layout, is_layout_full = first.layout, is_full(first.layout)
        if first is not None and is_layout_full:
            counted[node_id] = known  # all of the state, as before
        else:
            _count_held(job, job.held, node_id)


def _count_held(job: JobState, held: HeldShards, node_id: str) -> None:
    """Count again. What workers hold in a new view of the same layout is the same."""
    if node_id not in job.members and node_id not in held.counted:
        return
    held.counted[node_id] = job.progress.holders.get(node_id, ())
    living = _living(job, node_id)
    has_all = any(is_full(holder.layout) for holder in living)
    if has_all != (node_id in held.full):
        held.answer = None
        _put(held.full, node_id, has_all)
    before, after = held.by_node.get(node_id, ()), () if has_all else living
    if [_place(holder) for holder in before] == [_place(holder) for holder in after]:
        return
    held.answer = None
    for holder in before:
        _count(held, holder, -1)
    for holder in after:
        _count(held, holder, 1)
    if after:
        held.by_node[node_id] = after
    else:
        del held.by_node[node_id]


def _count_changed(job: JobState) -> None:
    """Count again what the nodes hold whose workers hold something else than before."""
    holders, held = job.progress.holders, job.held
    gone = [node_id for node_id in held.counted if node_id not in holders or node_id not in job.members]
    changed = [node_id for node_id, one in holders.items() if held.counted.get(node_id) is not one]
    for node_id in (*gone, *changed):
        _count_held(job, held, node_id)
    for node_id in gone:
        del held.counted[node_id]


def _place(holder: StateHolder) -> tuple[int, int]:
    return id(holder.layout), holder.rank


def is_full(layout: ShardLayout) -> bool:
    """Return whether each worker holds all of the state."""
    return layout.shards == 1 and not layout.per_rank


def _living(job: JobState, node_id: str) -> tuple[StateHolder, ...]:
    """Return what the living workers of a node hold, if it is a member that stays."""
    member, holders, progress = job.members.get(node_id), job.progress.holders.get(node_id), job.progress
    node = job.nodes.get(node_id)
    if not holders or member is None or node is None or node.incarnation != member.incarnation or not node.stays:
        return ()
    return tuple(
        holder
        for local_rank, holder in enumerate(holders)
        if holder and (node_id, local_rank) not in progress.failed and (node_id, local_rank) not in progress.succeeded
    )


def _count(held: HeldShards, holder: StateHolder, by: int) -> None:
    cut = held.cuts.setdefault(id(holder.layout), HeldCut(holder.layout))
    for counts, key in ((cut.shards, holder.layout.shard_map.shard_of(holder.rank)), (cut.ranks, holder.rank)):
        counts[key] += by
        if not counts[key]:
            del counts[key]
    if not cut.ranks:
        del held.cuts[id(holder.layout)]
