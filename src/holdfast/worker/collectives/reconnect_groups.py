"""Connecting a view's groups on devices, before any rank goes on: all members together, in an order that all share.

What the last view had connected (the default group, the subgroups of a mesh) will be needed in the next step again.
Connected there, in the first collective, it would happen while other kernels run that may wait for one another, and a
view would be reported as joined which cannot communicate. A newcomer has used none of its groups, so each rank says in
the view's store which groups it has and on which devices they were connected; what all members have, and one has used,
is connected.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import msgspec

from holdfast.torch_compat import PrefixStore
from holdfast.worker.collectives.communicators import values
from holdfast.worker.collectives.elastic_group import ElasticGroup
from holdfast.worker.collectives.view_connections import ViewConnections


class UsedGroup(msgspec.Struct, frozen=True):
    """A group that a rank has."""

    name: str
    members: tuple[int, ...]
    used: tuple[str, ...]
    """Types of devices on which it was connected there."""


Wanted = tuple[str, tuple[int, ...], str]
"""Name, members, type of device."""


def connect_groups(connections: ViewConnections, groups: Sequence[ElasticGroup], timeout: timedelta) -> list[Wanted]:
    """Connect what the last view had connected; all ranks of the view must come. Returns what this rank has."""
    if connections.store is None:
        return []
    store = PrefixStore(f"view/{connections.view}/groups", connections.store)
    mine = {(group.name_in_store, group.members): group for group in groups if group.is_usable}
    own = [UsedGroup(name, members, tuple(sorted(group.devices_used))) for (name, members), group in mine.items()]
    store.set(str(connections.rank), msgspec.json.encode(own).decode())
    keys = [str(rank) for rank in range(connections.world_size)]
    try:
        store.wait(keys, timeout)
        told = [msgspec.json.decode(text, type=list[UsedGroup]) for text in values(store, keys)]
    except Exception:
        connections.check()  # the end of a view breaks the connections to its store
        raise
    found = [one for one in wanted(told) if one[:2] in mine]
    for name, members, device in found:
        mine[name, members].connect(connections, device)
    return found


def wanted(told: Sequence[Sequence[UsedGroup]]) -> list[Wanted]:
    """What is to be connected, in order, by what each rank has told: a group that not all of its members have, or not
    any more, cannot be."""
    has = [{(group.name, group.members) for group in groups} for groups in told]
    used = {(group.name, group.members, device) for groups in told for group in groups for device in group.used}
    return sorted(one for one in used if all(member < len(told) and one[:2] in has[member] for member in one[1]))
