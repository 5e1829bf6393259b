"""The members of a view of another size fill objects that are cut as before: each from a rank that had the same shard.

A model of which there are more, or fewer, replicas now is cut into the same shards (core/whole_replicas.py). The
objects are new, and what they are to hold lies in copies of whole shards (worker_state.py), so nothing is divided
again. Any rank can be given any shard. All together:

    1  everybody says which shards it has a copy of, and what is in them, as a number (holdings.py; one gather)
    2  if each shard of the new world is among them, a rank that has a copy of its own shard takes that, and any other
       gets it from the nearest rank that has one, the work shared out in turn

Otherwise the model is cut in another way now, and the copies are divided again (reshard_live.py). A fault in the middle
leaves the objects half filled, and the copies as they are: it is all done again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from holdfast.state.arena import Arena
from holdfast.state.tracked import Tracked
from holdfast.wire.worker_messages import Assignment
from holdfast.worker.collectives import groups
from holdfast.worker.restore.from_peers import StateTransfer, receive
from holdfast.worker.restore.peer_replicas import send_snapshot

OFFERS_MAX = 32
"""How many copies one rank may offer: its own, and the replicas it keeps, of two cuts."""


class ShardKey(NamedTuple):
    """A shard, as ranks of different worlds know it."""

    shards: int
    """How many there are."""
    shard: int
    holdings: int
    """What its ranks hold of the models (parallel/holdings.py)."""


def carry_out(
    offers: Mapping[ShardKey, Arena],
    wanted: Sequence[ShardKey | None],
    step: int,
    assignment: Assignment,
    tracked: Tracked,
) -> bool:
    """Fill our objects; all ranks at once. `wanted`: by rank, the shard that it needs; None: it has it. Return whether
    that was possible; if not, nothing was changed, on any rank."""
    words = [word for key in sorted(offers)[:OFFERS_MAX] for word in key]
    rows = groups.gather([*words, *[0] * (3 * OFFERS_MAX - len(words))])
    offered = [{ShardKey(*row[at : at + 3]) for at in range(0, len(row), 3) if row[at]} for row in rows]
    transfers = plan(offered, wanted, assignment.first_ranks)
    if transfers is None:
        return False
    sending = [
        send_snapshot(offers[key], transfer.newcomer)
        for transfer in transfers
        if transfer.source == assignment.rank and (key := wanted[transfer.newcomer]) is not None
    ]
    own = wanted[assignment.rank]
    if own is not None and own in offers:
        offers[own].restore_into(tracked)
    for transfer in transfers:
        if transfer.newcomer == assignment.rank:
            tracked.load_tree(receive(transfer.source, step))
    for one in sending:
        one.wait()
    return True


def plan(
    offered: Sequence[set[ShardKey]], wanted: Sequence[ShardKey | None], first_ranks: Sequence[int]
) -> list[StateTransfer] | None:
    """Return who sends its shard to which rank; None where no rank has one that is needed. `first_ranks`: the first
    rank of each node."""
    sent = [0] * len(offered)
    transfers = []
    for rank, key in enumerate(wanted):
        if key is None or key in offered[rank]:
            continue
        node = bisect_right(first_ranks, rank)
        having = [other for other, keys in enumerate(offered) if key in keys]
        if not having:
            return None
        source = min(having, key=lambda other: (bisect_right(first_ranks, other) != node, sent[other], other))
        sent[source] += 1
        transfers.append(StateTransfer(source, rank, False))
    return transfers
