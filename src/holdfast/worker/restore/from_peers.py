"""Newcomers get their state: the first thing that the members of a new view do together, before its first step.

Everybody knows from the resume who has the state and who has not, so the plan needs no word of its own:

    every rank has all of it     from the nearest rank that has it: one of the same node, the work shared out in turn
    sharded, with replicas       from a rank that has the same shard
    (HSDP, pipeline × data, …)
    sharded                      from the rank that keeps the newcomer's replica (peer_replicas.py)
    what each rank has for       from the rank that keeps the newcomer's copy of it, beside the rest (local_state.py)
    itself

Tensors on a device go from device to device where the view has connected both ranks there (device_transfer.py). Else
sources send from a copy in host memory, made for the purpose. Who has neither to send nor to receive goes on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.core.shard_map import ShardMap
from holdfast.core.views import ring_partner
from holdfast.errors import StateConflictError, StateLostError
from holdfast.state.arena import Arena
from holdfast.state.per_rank_state import StatePart
from holdfast.state.tracked import Tracked
from holdfast.state.tree import unflatten
from holdfast.wire.worker_messages import Assignment
from holdfast.worker.restore.device_transfer import DeviceLink, link_to, receive_state, send_state
from holdfast.worker.restore.peer_replicas import ReplicaRing, receive_snapshot, send_snapshot
from holdfast.worker.resume_point import ResumePoint


class StateTransfer(NamedTuple):
    """One newcomer's state, from whom."""

    source: int
    newcomer: int
    is_replica: bool
    """Whether the source sends the copy that it keeps, or its own state."""
    part: StatePart = StatePart.SHARED
    """What it sends: all of it, or what ranks share, or what the newcomer has for itself."""


def plan(
    resume: ResumePoint,
    first_ranks: Sequence[int],
    world_size: int,
    shard_map: ShardMap,
    copies: int,
    local_copies: int | None = None,
) -> list[StateTransfer]:
    """Return who sends what to which newcomer. Raises StateLostError where no rank has what a newcomer needs.
    `local_copies`: of what each rank has for itself; None: there is no such thing, or the replicas of shards have
    it."""
    transfers: list[StateTransfer] = []
    sent: dict[int, int] = {}
    for newcomer in resume.newcomers:
        peers = [rank for rank in resume.holders if shard_map.shard_of(rank) == shard_map.shard_of(newcomer)]
        if peers:
            node = bisect_right(first_ranks, newcomer)
            source = min(peers, key=lambda rank: (bisect_right(first_ranks, rank) != node, sent.get(rank, 0), rank))
            sent[source] = sent.get(source, 0) + 1
            transfers.append(StateTransfer(source, newcomer, False))
            continue
        source = _copy_holder(resume, first_ranks, world_size, newcomer, copies)
        if source < 0:
            raise StateLostError(f"no rank has the shard of rank {newcomer}: its replicas died with it")
        transfers.append(StateTransfer(source, newcomer, True, StatePart.ALL))
    if local_copies is not None:  # after all others, on every rank: no rank waits for one that waits for it
        transfers += [_own(resume, first_ranks, world_size, rank, local_copies) for rank in resume.newcomers]
    return transfers


def _own(resume: ResumePoint, first_ranks: Sequence[int], world_size: int, newcomer: int, copies: int) -> StateTransfer:
    """Return the transfer of what the newcomer has for itself."""
    source = _copy_holder(resume, first_ranks, world_size, newcomer, copies)
    if source < 0:
        raise StateLostError(f"no rank has what rank {newcomer} had for itself: the rank that kept its copy died too")
    return StateTransfer(source, newcomer, True, StatePart.LOCAL)


def _copy_holder(resume: ResumePoint, first_ranks: Sequence[int], world_size: int, rank: int, copies: int) -> int:
    """Return the nearest rank on the ring that lives and keeps a copy of a rank's; -1 if there is none."""
    partners = [ring_partner(first_ranks, world_size, rank, nth) for nth in range(1, copies + 1)]
    return next((partner for partner in partners if partner in resume.holders), -1)


def carry_out(
    transfers: Sequence[StateTransfer],
    resume: ResumePoint,
    assignment: Assignment,
    tracked: Tracked,
    rings: Mapping[StatePart, ReplicaRing | None],
) -> None:
    """Carry out our part of the plan."""
    ours = [transfer for transfer in transfers if transfer.source == assignment.rank]
    links = {transfer: link_of(transfer, assignment.rank) for transfer in transfers}
    by_host = [transfer for transfer in ours if not transfer.is_replica and links[transfer] is None]
    if by_host:
        snapshot = Arena(is_kept=False)
        snapshot.take(tracked.state(StatePart.SHARED), resume.next_step)
        for sending in [send_snapshot(snapshot, transfer.newcomer) for transfer in by_host]:
            sending.wait()
    for transfer in ours:
        link, step = links[transfer], resume.next_step
        if transfer.is_replica:
            ring = rings.get(transfer.part)
            copy = ring.copy_of(transfer.newcomer, step) if ring is not None else None
            if copy is None:
                raise StateLostError(f"the replica of rank {transfer.newcomer} is not of step {step}")
            if link is None:
                send_snapshot(copy, transfer.newcomer).wait()
            else:
                send_state(link, copy.flat(), tracked.state(transfer.part), step, transfer.newcomer)
        elif link is not None:
            state = tracked.state(StatePart.SHARED)
            send_state(link, state, state, step, transfer.newcomer)
    received = []
    for transfer in transfers:
        if transfer.newcomer == assignment.rank:
            link = links[transfer]
            if link is None:
                received.append(receive(transfer.source, resume.next_step))
            else:
                received.append(receive_state(link, tracked, transfer.source, resume.next_step))
    if received:
        is_ours = any(link is not None for link in links.values())
        tracked.load_tree({name: branch for tree in received for name, branch in tree.items()}, is_ours)


def link_of(transfer: StateTransfer, rank: int) -> DeviceLink | None:
    """Return what carries out a transfer of ours from device to device; None for one that goes through the hosts, as
    what a rank has for itself always does: it is little."""
    if rank not in transfer[:2] or transfer.part is StatePart.LOCAL:
        return None
    return link_to(transfer.newcomer if rank == transfer.source else transfer.source)


def receive(source: int, step: int) -> dict[str, Any]:
    """Receive a part of the state, as a tree."""
    snapshot = receive_snapshot(source)
    if snapshot.step != step:
        raise StateConflictError(f"rank {source} sent its state of step {snapshot.step}; the settled step is {step}")
    flat = snapshot.flat()
    tree = unflatten(flat.skeleton, flat.tensors)
    if not isinstance(tree, dict):
        raise StateConflictError(f"rank {source} sent something that is no state of tracked objects")
    return tree
