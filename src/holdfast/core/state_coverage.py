"""Who holds the state, and whether what is left is a complete copy. Pure, and careful: in doubt a worker holds nothing.

The state is cut into shards, which ranks hold as a map says (shard_map.py). With replicas, a rank also keeps copies of
the shards of ranks before it on the ring (views.ring_partner): of those shards that would be lost with one node.

    a worker holds           from the moment its node has settled in a view, until it dies or is ended
    a newcomer holds         nothing before that, however long it has run
    its copies of others     from then on too: they are exchanged before the first step of a view, then with each step

What a rank has for itself (`ShardLayout.per_rank`) is held by that rank, and by those that keep its copy on the ring;
no other rank's will do.

A worker that lives holds what it has across views: a fault during a recovery finds the survivors of the view before.
What they hold is cut as it was when they last settled (`ShardLayout`); shards of two different cuts do not make one
copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from holdfast.core.events import SessionInfo
from holdfast.core.shard_map import ShardMap, lonely_shards
from holdfast.core.views import View, reassign_local_ranks, ring_partner


class ShardLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How the state is cut and copied."""

    shard_map: ShardMap
    replicas: int
    world_size: int
    first_ranks: tuple[int, ...]
    per_rank: bool = False
    """Whether each rank has state of its own."""
    local_replicas: int = 0
    """Copies of each rank's own state, on the ring."""

    @property
    def shards(self) -> int:
        """Into how many different shards the state is cut."""
        return self.shard_map.shards


class StateHolder(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a living worker holds: the shard of the rank under which it last settled."""

    view: int
    """In which it settled."""
    rank: int
    layout: ShardLayout


WorkerKey = tuple[str, int]
"""A worker of a view: its node and its local rank."""
NodeHolders = tuple[StateHolder | None, ...]
"""By local rank of a node: what its worker holds; None: nothing."""


def layout_of(view: View, session: SessionInfo, known: ShardLayout | None = None) -> ShardLayout:
    """Return how the state of a view's workers is sharded; the known layout, if it has not changed."""
    size, first_ranks = view.world_size, known.first_ranks if known else tuple([m.first_rank for m in view.members])
    shard_map = session.shard_map.fitted(size)
    found = revised(ShardLayout(shard_map=shard_map, replicas=0, world_size=size, first_ranks=first_ranks), session)
    return known if known == found else found


def revised(layout: ShardLayout, session: SessionInfo) -> ShardLayout:
    """Return the layout with what is now known of the workers' state. One of another world is cut as it was."""
    return msgspec.structs.replace(
        layout,
        shard_map=session.map_in(layout.world_size) or layout.shard_map,
        replicas=session.replicas,
        per_rank=session.per_rank,
        local_replicas=session.local_replicas,
    )


def carry_holders(holders: NodeHolders, dead: Collection[int], workers: int) -> NodeHolders:
    """Return what a node's workers hold in its next view, by their new local ranks."""
    if not dead and len(holders) == workers:
        return holders
    live = {local_rank: True for local_rank in range(len(holders)) if local_rank not in dead}
    carried: list[StateHolder | None] = [None] * workers
    for before, after in reassign_local_ranks(live, len(holders), workers).items():
        carried[after] = holders[before]
    return tuple(carried)


def missing_shards(holders: Iterable[StateHolder]) -> str:
    """Return what is missing of a complete copy, in words; empty if nothing is."""
    groups: list[tuple[ShardLayout, list[int]]] = []
    last: ShardLayout | None = None
    ranks: list[int] = []
    for holder in holders:
        if holder.layout is not last:  # almost always it is: layouts of a thousand nodes are long to compare
            last = holder.layout
            if last.shards == 1 and not last.per_rank:
                return ""
            ranks = next((group for layout, group in groups if layout == last), [])
            if not ranks:
                groups.append((last, ranks))
        ranks.append(holder.rank)
    missing = [_missing(layout, set(group)) for layout, group in groups]
    if not missing:
        return "no worker that holds the state is left"
    fewest = min(missing, key=len)
    if not fewest:
        return ""
    more = f" and {len(fewest) - 1} more" if len(fewest) > 1 else ""
    return f"{fewest[0]}{more} has no live copy left"


def _missing(layout: ShardLayout, held: set[int]) -> list[str]:
    shards = [f"shard {shard} of {layout.shards}" for shard in _missing_shards(layout, held)]
    return shards + [f"the own state of rank {rank}" for rank in _missing_ranks(layout, held)]


def _missing_ranks(layout: ShardLayout, held: set[int]) -> list[int]:
    """Return the ranks whose own state is lost; `held` are those whose state there is."""
    if not layout.per_rank:
        return []
    missing = [rank for rank in range(layout.world_size) if rank not in held]
    return [rank for rank in missing if not _is_replicated(layout, rank, layout.local_replicas, held)]


def _missing_shards(layout: ShardLayout, held: set[int]) -> list[int]:
    shards, shard_map = layout.shards, layout.shard_map
    held_shards = held if shards == layout.world_size else {shard_map.shard_of(rank) for rank in held}
    if len(held_shards) == shards:
        return []
    missing = [shard for shard in range(shards) if shard not in held_shards]
    if missing and layout.replicas:
        lonely = lonely_shards(shard_map, layout.first_ranks, layout.world_size)
        missing = [shard for shard in missing if shard not in lonely or not _is_copied(layout, shard, held)]
    return missing


def _is_copied(layout: ShardLayout, shard: int, ranks_left: set[int]) -> bool:
    """Return whether one of these ranks keeps a copy of the shard."""
    ranks = layout.shard_map.ranks_of(shard, layout.world_size)
    return any(_is_replicated(layout, rank, layout.replicas, ranks_left) for rank in ranks)


def _is_replicated(layout: ShardLayout, rank: int, copies: int, ranks_left: set[int]) -> bool:
    """Return whether one of the holders has a copy of this rank's state."""
    ring = (ring_partner(layout.first_ranks, layout.world_size, rank, nth) for nth in range(1, copies + 1))
    return any(partner in ranks_left for partner in ring)
