"""What this rank has for itself (state/per_rank_state.py), as the ranks of a view know of it together.

It is copied to another rank before each commit, on a ring of its own; where the model is sharded and the ring carries
everything (peer_replicas.py), on that one. A newcomer gets what all ranks share from any holder, and its own from the
rank
that keeps its copy. If that died too, no rank goes on with another's: StateLostError, and all start again from the
nodes' memory.

Objects that the script names are known from the start. Gradients that are accumulated over steps are found out about:
at each commit that leaves some, the ranks compare a checksum of them, until they differ for the first time:

    alike        (each backward averaged them)   every rank's are everybody's, as the parameters are
    different    (DDP's no_sync)                 from then on they belong to the rank: `since` is the first step that
                                                 begins with such gradients. If the step before it is not committed
                                                 after all, nothing was found out.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from holdfast.core.shard_map import ShardMap
from holdfast.errors import ScriptError
from holdfast.state.per_rank_state import StatePart
from holdfast.state.tracked import Tracked
from holdfast.state.tree import flatten
from holdfast.worker.collectives import groups
from holdfast.worker.parallel.models import refuse_unreduced
from holdfast.worker.param_checksums import checksum
from holdfast.worker.restore.peer_replicas import ReplicaRing

Fingerprint = tuple[bytes, int]


class LocalState:
    """Of one worker."""

    def __init__(self, tracked: Tracked, replicas: int) -> None:
        self._tracked, self._replicas = tracked, replicas
        self.ring: ReplicaRing | None = None
        """Of what this rank has for itself alone; None if there is nothing, or if another ring carries it."""
        self.since = -1
        """The first step that begins with gradients which differ between ranks; -1: there was none."""
        self._seen: Fingerprint | None = None
        """What the named objects were when they were copied last."""

    @property
    def is_there(self) -> bool:
        """Return whether ranks have state of their own, now or in some steps."""
        return bool(self._tracked.local_names()) or self._tracked.gradients_are_local

    def copies(self, world_size: int) -> int:
        """Return how many other ranks keep what one rank has for itself, where it has a ring of its own."""
        return min(self._replicas, world_size - 1) if self.is_there else 0

    def fit_ring(self, world_size: int, *, is_carried: bool) -> None:
        """Make a ring if one is needed. `is_carried`: another one carries everything."""
        copies = 0 if is_carried else self.copies(world_size)
        if not copies:
            self.ring = None
        elif self.ring is None:
            self.ring = ReplicaRing(self._tracked, copies, StatePart.LOCAL)

    def adopt(self, since: int) -> None:
        """Know what the members of the view know of the gradients."""
        self.since = since
        self._tracked.gradients_are_local = since >= 0

    def drop_uncommitted(self, next_step: int) -> None:
        """Forget what was found out at the commit of a step that is repeated: it is found out again."""
        if self.since > next_step:
            self.adopt(-1)

    def compare_gradients(self, step: int, shard_map: ShardMap) -> bool:
        """Compare gradients that a step leaves, at its commit, on all ranks. Return whether they are found to differ
        now, for the first time, between ranks that should have the same."""
        if not self._tracked.is_accumulating:
            return False
        refuse_unreduced(self._tracked.modules().values())
        if self._tracked.gradients_are_local:
            return False
        sums = [row[0] for row in groups.gather([checksum(self._gradients())])]
        by_shard = (shard_map.ranks_of(shard, len(sums)) for shard in range(shard_map.shards))
        if all(len({sums[rank] for rank in ranks}) == 1 for ranks in by_shard):
            return False
        self.adopt(step + 1)
        return True

    def _gradients(self) -> Iterator[torch.Tensor]:
        """Yield the gradients that there are, and which they are."""
        for index, parameter in enumerate(self._tracked.parameters()):
            if parameter.grad is not None:
                yield torch.tensor(index, device="cpu")
                yield parameter.grad

    # --- changes that no copy has

    def record_copied(self) -> None:
        """Record what the named objects are: they were copied just now."""
        self._seen = self._fingerprint() if self.ring is not None else None

    def check(self) -> None:
        """Raise ScriptError if the named objects were changed since they were copied: a newcomer would be given what
        they were before."""
        if self._seen is None or self._seen == self._fingerprint():
            return
        self._seen = None
        names = ", ".join(name for name in self._tracked.local_names() if name in self._tracked.others())
        raise ScriptError(
            f"what this rank has for itself ({names}) was changed between two steps, where no copy of it is made:"
            " change what job.track_local names inside `with step:`"
        )

    def _fingerprint(self) -> Fingerprint:
        """Return a checksum of what is neither module nor optimizer: those change by their update alone."""
        others = self._tracked.others()
        flat = flatten({name: others[name].state_dict() for name in self._tracked.local_names() if name in others})
        return flat.skeleton, checksum(flat.tensors)
