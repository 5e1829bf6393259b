"""Newcomers get their state: the first thing that the members of a new view do together, before its first step.

Everybody knows from the settlement who has the state and who has not, so the plan needs no word of its own:

    every rank has all of it     from the nearest rank that has it: one of the same node, the work shared out in turn
    sharded, with copies by      from a rank that has the same shard
    the cut itself (HSDP)
    sharded                      from the rank that keeps the newcomer's replica (replicas.py)

Sources send from a copy made for the purpose; who has neither to send nor to receive goes on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.core.views import ring_partner
from holdfast.errors import SettleError
from holdfast.state.snapshot import Snapshot
from holdfast.state.tracked import Tracked
from holdfast.wire.session import Place
from holdfast.worker.memory.replicas import Ring
from holdfast.worker.memory.transfer import receive_snapshot, send_snapshot
from holdfast.worker.settling import Settlement


class Transfer(NamedTuple):
    """One newcomer's state, from whom."""

    source: int
    newcomer: int
    is_replica: bool
    """Whether the source sends the copy that it keeps, or its own state."""


def plan(
    settlement: Settlement, first_ranks: Sequence[int], world_size: int, shards: int, copies: int
) -> list[Transfer]:
    """Raises SettleError where nobody has what a newcomer needs."""
    transfers: list[Transfer] = []
    sent: dict[int, int] = {}
    for newcomer in settlement.newcomers:
        peers = [rank for rank in settlement.holders if rank % shards == newcomer % shards]
        if peers:
            node = bisect_right(first_ranks, newcomer)
            source = min(peers, key=lambda rank: (bisect_right(first_ranks, rank) != node, sent.get(rank, 0), rank))
            sent[source] = sent.get(source, 0) + 1
            transfers.append(Transfer(source, newcomer, False))
            continue
        partners = [ring_partner(first_ranks, world_size, newcomer, j) for j in range(1, copies + 1)]
        source = next((rank for rank in partners if rank in settlement.holders), -1)
        if source < 0:
            raise SettleError(f"nobody has the shard of rank {newcomer}: its replicas died with it")
        transfers.append(Transfer(source, newcomer, True))
    return transfers


def carry_out(
    transfers: Sequence[Transfer], settlement: Settlement, place: Place, tracked: Tracked, ring: Ring | None
) -> None:
    """Our part of the plan."""
    ours = [transfer for transfer in transfers if transfer.source == place.rank]
    if any(not transfer.is_replica for transfer in ours):
        snapshot = Snapshot()
        snapshot.take(tracked.state(), settlement.next_step)
        for sending in [send_snapshot(snapshot, transfer.newcomer) for transfer in ours if not transfer.is_replica]:
            sending.wait()
    for transfer in ours:
        if transfer.is_replica:
            assert ring is not None
            copy = ring.copy_of(transfer.newcomer, settlement.next_step)
            if copy is None:
                raise SettleError(f"the replica of rank {transfer.newcomer} is not of step {settlement.next_step}")
            send_snapshot(copy, transfer.newcomer).wait()
    for transfer in transfers:
        if transfer.newcomer == place.rank:
            receive(transfer.source, settlement.next_step, tracked)


def receive(source: int, step: int, tracked: Tracked) -> None:
    snapshot = receive_snapshot(source)
    if snapshot.step != step:
        raise SettleError(f"rank {source} sent its state of step {snapshot.step}; the settled step is {step}")
    snapshot.restore_into(tracked)
