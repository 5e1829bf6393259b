"""Who holds the state, and whether what is left is a complete copy. Pure, and careful: in doubt a worker holds nothing.

The state is cut into shards: rank r has shard r % shards (one shard: every rank has all of it). With replicas, a rank
also keeps copies of the shards of the ranks before it on the ring (views.ring_partner).

    a worker holds           from the moment its node has settled in a view, until it dies or is ended
    a newcomer holds         nothing before that, however long it has run
    its copies of others     from the first commit after it joined: they travel with a step

A worker that lives holds what it has across views: a fault during a recovery finds the survivors of the view before.
What they hold is cut as it was when they last settled (`Layout`); shards of two different cuts do not make one copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from holdfast.core.events import SessionInfo
from holdfast.core.views import View, ring_partner


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """How the state is cut and copied."""

    shards: int
    replicas: int
    world_size: int
    first_ranks: tuple[int, ...]


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """What a living worker holds: the shard of the rank under which it last settled."""

    view: int
    """In which it settled."""
    rank: int
    layout: Layout
    fresh: bool
    """It has its own shard, but no copies of others' yet."""


Seats = tuple[Holder | None, ...]
"""A node's workers by local rank; None holds nothing."""


def layout_of(view: View, session: SessionInfo, known: Layout | None = None) -> Layout:
    """How the state of a view's workers is cut; the one that is known of this view, if it still is so."""
    if known and (known.shards, known.replicas) == (session.shards, session.replicas):
        return known
    return Layout(
        shards=session.shards,
        replicas=session.replicas,
        world_size=view.world_size,
        first_ranks=tuple(m.first_rank for m in view.members),
    )


def reseat(seats: Seats, dead: Collection[int], workers: int) -> Seats:
    """The seats of a node in its next view. Where it has as many workers as before, the living keep their seats and the
    empty ones are filled; where it has fewer, the living close up in order."""
    left = [None if local_rank in dead else holder for local_rank, holder in enumerate(seats)]
    if workers < len(seats):
        left = [holder for local_rank, holder in enumerate(left) if local_rank not in dead][:workers]
    return (*left, *[None] * (workers - len(left)))


def lack(holders: Iterable[Holder]) -> str:
    """What is missing of a complete copy, in words; empty if nothing is."""
    groups: list[list[Holder]] = []
    last: list[Holder] = []
    for holder in holders:
        if holder.layout.shards == 1:
            return ""
        if not last or not _same(holder, last[0]):
            last = next((group for group in groups if _same(holder, group[0])), [])
        if not last:
            groups.append(last)
        last.append(holder)
    missing = [_missing(group[0].layout, group) for group in groups]
    if not missing:
        return "no worker that holds the state is left"
    fewest, shards = min(missing, key=lambda m: len(m[0]))
    if not fewest:
        return ""
    more = f" and {len(fewest) - 1} more" if len(fewest) > 1 else ""
    return f"shard {fewest[0]} of {shards}{more} has no live copy left"


def _same(one: Holder, other: Holder) -> bool:
    return one.layout is other.layout or one.layout == other.layout  # layouts of a thousand nodes are long


def _missing(layout: Layout, holders: list[Holder]) -> tuple[list[int], int]:
    held = {holder.rank % layout.shards for holder in holders}
    missing = [shard for shard in range(layout.shards) if shard not in held]
    if missing and layout.replicas:
        keepers = {holder.rank for holder in holders if not holder.fresh}
        missing = [shard for shard in missing if not _is_copied(layout, shard, keepers)]
    return missing, layout.shards


def _is_copied(layout: Layout, shard: int, keepers: set[int]) -> bool:
    """Whether one of these ranks keeps a copy of the shard."""
    return any(
        ring_partner(layout.first_ranks, layout.world_size, rank, nth) in keepers
        for rank in range(shard, layout.world_size, layout.shards)
        for nth in range(1, layout.replicas + 1)
    )
