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

from collections.abc import Sequence

from holdfast.core.views import ring_partner
from holdfast.state.snapshot import Snapshot
from holdfast.state.tracked import Tracked
from holdfast.worker.memory.transfer import receive_snapshot, send_snapshot


class Ring:
    """The replicas of one worker; also its way back from an update (transaction.Undo)."""

    def __init__(self, tracked: Tracked, copies: int) -> None:
        self._tracked, self._copies = tracked, copies
        self.cost_s = 0.0
        self._first_ranks: Sequence[int] = ()
        self._rank = self._world_size = 0
        self.ours: Snapshot | None = None
        self._ours_next: Snapshot | None = None
        self.theirs: dict[int, Snapshot] = {}
        """By the rank whose shard it is."""
        self._theirs_next: dict[int, Snapshot] = {}

    def place(self, first_ranks: Sequence[int], rank: int, world_size: int) -> None:
        """Another view."""
        self._first_ranks, self._rank, self._world_size = first_ranks, rank, world_size

    def before_update(self) -> None:
        """Nothing to do: the copy of the last committed step is there."""

    def restore(self, with_others: bool = True) -> None:
        assert self.ours is not None, "no copy was made"
        self.ours.restore_into(self._tracked, with_others)

    def exchange(self, step: int) -> None:
        """Copy our shard of the state before `step`, and swap copies around the ring."""
        flat = self._tracked.state()
        if self._ours_next is None:
            self._ours_next = Snapshot(flat)
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
        """Who keeps a rank's copies. Nodes of different sizes may give one rank two to keep, and another none."""
        found = {
            ring_partner(self._first_ranks, self._world_size, rank, nth) for nth in range(1, self._copies + 1)
        }
        return sorted(found - {rank})

    def promote(self) -> None:
        """The step is committed: the newer copies are the ones that count, the older ones are room for the next."""
        self.ours, self._ours_next = self._ours_next, self.ours
        self.theirs, self._theirs_next = self._theirs_next, self.theirs

    def copies_at(self, step: int, shard: int) -> dict[int, Snapshot]:
        """All whole copies of the state before `step` that are here, our own included, by shard."""
        found = {rank: copy for rank in {*self.theirs, *self._theirs_next} if (copy := self.copy_of(rank, step))}
        for copy in (self.ours, self._ours_next):
            if copy is not None and copy.is_whole and copy.step == step:
                found[shard] = copy
        return found

    def copy_of(self, rank: int, step: int) -> Snapshot | None:
        """A whole copy of a rank's shard of the state before `step`."""
        for held in (self.theirs, self._theirs_next):
            if rank in held and held[rank].is_whole and held[rank].step == step:
                return held[rank]
        return None
