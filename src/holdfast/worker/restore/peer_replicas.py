"""Copies of shards in other ranks' memory: what a sharded run (FSDP2) needs to survive the loss of a rank.

After each step every rank copies its shard of the state and sends the copy to its partner on another node
(`core.views.ring_partner`; on one node, the next rank), before the step is committed. So when a step is committed,
each shard of its state exists twice, and the copies from before it are still whole: a step that breaks is rolled back
to them.

    ours       our shard after the last committed step, and room for the next one
    theirs     the same of the rank whose partner we are

`promote` is called at the commit, and makes the newer ones the ones that count.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from holdfast.core.shard_map import ShardMap
from holdfast.core.views import ring_partner
from holdfast.errors import StateError
from holdfast.state.arena import Arena
from holdfast.state.per_rank_state import StatePart
from holdfast.state.tracked import Tracked
from holdfast.state.tree import SKELETON_BYTES_MAX


class ReplicaRing:
    """The replicas of one worker; if they are of all its state, also its way back from an update (transaction.Undo).
    `part`: what is copied; of a model that is not sharded, only what each rank has for itself (local_state.py)."""

    def __init__(self, tracked: Tracked, copies: int, part: StatePart = StatePart.ALL) -> None:
        self._tracked, self._copies, self._part = tracked, copies, part
        self.cost_s = 0.0
        self._first_ranks: Sequence[int] = ()
        self._rank = self._world_size = 0
        self._copied: Collection[int] = ()
        self.ours: Arena | None = None
        self._ours_next: Arena | None = None
        self.theirs: dict[int, Arena] = {}
        """By the rank whose shard it is."""
        self._theirs_next: dict[int, Arena] = {}

    def assignment(
        self, first_ranks: Sequence[int], rank: int, world_size: int, copied: Collection[int] | None = None
    ) -> None:
        """Follow another view. `copied`: the ranks whose state is copied to others; None: all."""
        self._first_ranks, self._rank, self._world_size = first_ranks, rank, world_size
        self._copied = range(world_size) if copied is None else copied

    def before_update(self) -> None:
        """Do nothing: the copy of the last committed step is there."""

    def restore(self, with_others: bool = True) -> None:
        assert self.ours is not None, "no copy was made"
        self.ours.restore_into(self._tracked, with_others)

    def release(self) -> None:
        """Do nothing: the copies are needed at all times."""

    def exchange(self, step: int) -> None:
        """Copy our shard of the state before `step`, and swap copies around the ring."""
        flat = self._tracked.state(self._part)
        if self._ours_next is None:
            self._ours_next = Arena(flat)
        self._ours_next.take(flat, step)
        sending = [send_snapshot(self._ours_next, to) for to in self._partners(self._rank)]
        self._theirs_next = {
            rank: receive_snapshot(rank, self._theirs_next.get(rank))
            for rank in range(self._world_size)
            if self._rank in self._partners(rank)
        }
        for one in sending:
            one.wait()

    def _partners(self, rank: int) -> list[int]:
        """Return the ranks that keep a rank's copies. Nodes of different sizes may give one rank two to keep, and
        another none."""
        if rank not in self._copied:
            return []
        found = {ring_partner(self._first_ranks, self._world_size, rank, nth) for nth in range(1, self._copies + 1)}
        return sorted(found - {rank})

    def promote(self) -> None:
        """Let the newer copies count, as the step is committed; the memory of the older ones is for the next."""
        self.ours, self._ours_next = self._ours_next, self.ours
        self.theirs, self._theirs_next = self._theirs_next, self.theirs

    def copies_at(self, step: int, shard_map: ShardMap, own_rank: int) -> dict[int, Arena]:
        """Return all complete copies of the state before `step` that are here, our own included, by shard."""
        ranks = {*self.theirs, *self._theirs_next}
        found = {shard_map.shard_of(rank): copy for rank in ranks if (copy := self.copy_of(rank, step))}
        for copy in (self.ours, self._ours_next):
            if copy is not None and copy.is_complete and copy.step == step:
                found[shard_map.shard_of(own_rank)] = copy
        return found

    def copy_of(self, rank: int, step: int) -> Arena | None:
        """Return a complete copy of a rank's shard of the state before `step`."""
        for held in (self.theirs, self._theirs_next):
            if rank in held and held[rank].is_complete and held[rank].step == step:
                return held[rank]
        return None


# --- how a state travels from one rank's memory to another's: a header, the structure, and a few ranges of bytes
#
# The structure is msgpack of plain values (state/tree.py), the bytes are the tensors: nothing that is received is ever
# executed. The receiver allocates what the structure asks for, within bounds.

_TAG_HEADER, _TAG_SKELETON, _TAG_PARTS = 9001, 9002, 9003


class Sending(NamedTuple):
    """What is on its way, and the memory it comes from."""

    works: list[Any]
    kept: list[torch.Tensor]

    def wait(self) -> None:
        """Wait until everything has left."""
        for work in self.works:
            work.wait()


def send_snapshot(snapshot: Arena, to: int) -> Sending:
    """Begin to send. The snapshot must not be overwritten before the sending is through."""
    skeleton = torch.frombuffer(bytearray(snapshot.skeleton), dtype=torch.uint8)
    header = torch.tensor([snapshot.step, skeleton.numel()], device="cpu")
    pieces = [(header, _TAG_HEADER), (skeleton, _TAG_SKELETON)]
    pieces += [(part, _TAG_PARTS + index) for index, part in enumerate(snapshot.parts())]
    return Sending([dist.isend(piece, to, tag=tag) for piece, tag in pieces], [header, skeleton])


def receive_snapshot(of: int, memory: Arena | None = None) -> Arena:
    """Receive a snapshot from a rank; in the memory of an older one where it fits."""
    snapshot = memory or Arena()
    header = torch.empty(2, dtype=torch.int64, device="cpu")
    dist.recv(header, of, tag=_TAG_HEADER)
    step, skeleton_bytes = (int(number) for number in header)
    if not 0 < skeleton_bytes <= SKELETON_BYTES_MAX:
        raise StateError(f"rank {of} announced a structure of {skeleton_bytes} bytes, which cannot be")
    skeleton = torch.empty(skeleton_bytes, dtype=torch.uint8, device="cpu")
    dist.recv(skeleton, of, tag=_TAG_SKELETON)
    for index, part in enumerate(snapshot.receive(bytes(skeleton.tolist()), step)):
        dist.recv(part, of, tag=_TAG_PARTS + index)
    snapshot.seal()
    return snapshot
