"""How this worker's state is cut: which shard each rank has, as the members of a view agree on it.

seen         every rank says what it holds of the models, as a number; equal numbers are one shard (holdings.py)
declared     `hf.init(mesh=…, replicated=…)`, where the tensors do not show it; what is seen must not contradict it
told         a newcomer, which builds alone, is told by its agent; when it joins, what it holds must be what the
             replicas of the rank that it replaces hold
by content   ranks with the same shard must have the same bits at the first commits (replica_check.py)
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from holdfast.core.shard_map import ALL_OF_IT, ShardMap, lonely_shards
from holdfast.errors import ScriptError
from holdfast.state.tracked import Tracked
from holdfast.wire.worker_messages import Assignment
from holdfast.worker.collectives import groups
from holdfast.worker.parallel.holdings import DeclaredMesh, holdings_of, map_of_holdings, names_of
from holdfast.worker.parallel.models import cuts_for_any_world, is_sharded, shards_of
from holdfast.worker.restore.from_twins import ShardKey
from holdfast.worker.resume_point import ResumePoint


class StateSharding:
    """The cut of the tracked objects of one worker."""

    def __init__(self) -> None:
        self.declared: DeclaredMesh | None = None
        """How the script says that its model is cut."""
        self.shard_map = ALL_OF_IT
        """Which shard of the state each rank has."""
        self.holdings = 0
        """What the objects hold of the models, as a number."""
        self.is_known = False
        """Whether the map is that of the ranks there are; a process that builds alone, or is a spare, guesses."""
        self._holdings_of: dict[int, int] = {}
        """By shard, what its ranks hold of the models."""
        self._rank: int | None = None
        """The rank that the objects are made for, once it is known."""
        self._first_ranks: tuple[int, ...] = (0,)
        """The first rank of each node of the view."""

    @property
    def rank(self) -> int:
        """The rank that the objects are made for; in a view that only dumps, the group has another for this process."""
        return dist.get_rank() if self._rank is None else self._rank

    @property
    def shard(self) -> int:
        """The shard of this rank. A spare has no rank to be asked for; where every rank has all, none is needed."""
        return self.shard_map.shard_of(self.rank) if self.shard_map.shards > 1 else 0

    def is_cut(self, modules: Iterable[torch.nn.Module]) -> bool:
        """Return whether the objects are made for one rank of one world."""
        return self.shard_map.shards > 1 or self.declared is not None or is_sharded(modules)

    def measure(self, tracked: Tracked, *, is_alone: bool, expected: ShardMap | None) -> None:
        """Find out how the tracked objects are cut. `is_alone`: other ranks train already, and `expected` is how theirs
        are, as far as that is known; otherwise all ranks do this together."""
        modules, local = tracked.modules(), tracked.local_names()
        shared = {name: module for name, module in modules.items() if name not in local}
        self.holdings = holdings_of(shared)
        self.is_known = not is_alone
        if not is_alone:
            self._rank = dist.get_rank()
            holdings, names = zip(*groups.gather((self.holdings, names_of(shared))), strict=True)
            tracked.is_part = len(set(names)) > 1
            self.shard_map = map_of_holdings(holdings, self.declared)
            return
        self.shard_map = expected or ShardMap(shards_of(modules.values()))
        if self.shard_map.shards > 1 and not self.shard_map.fits(dist.get_world_size()):
            self.shard_map = ShardMap(shards_of(modules.values()))  # of the world before; it is known when it is joined

    def start_over(self) -> None:
        """Forget the objects: others will be built, and their cut declared again."""
        self.declared, self.is_known, self._rank = None, False, None

    def adopt(self, resume: ResumePoint, assignment: Assignment, *, is_filled: bool) -> None:
        """Know which shard each rank of the view has. `is_filled`: this rank has the state. Raises ScriptError where
        its objects are not those of the rank that it replaces."""
        self._first_ranks, self._rank = assignment.first_ranks, assignment.rank
        self._adopt_map(resume, assignment, is_filled)
        self.is_known = True
        self._holdings_of = {self.shard_map.shard_of(rank): holdings for rank, holdings in enumerate(resume.holdings)}

    def _adopt_map(self, resume: ResumePoint, assignment: Assignment, is_filled: bool) -> None:
        size, rank = assignment.world_size, assignment.rank
        known = assignment.shard_map if rank in resume.newcomers else self.shard_map if is_filled else None
        if resume.is_start or known is None or not known.fits(size):
            self.shard_map = map_of_holdings(resume.holdings, self.declared)
            return
        self.shard_map = known
        replicas = [other for other in known.ranks_of(known.shard_of(rank), size) if other in resume.holders]
        if rank in resume.newcomers and replicas and resume.holdings[rank] != resume.holdings[replicas[0]]:
            raise ScriptError(
                f"this process, which replaces rank {rank}, has built other tensors than rank {replicas[0]} has, whose"
                " state it is to be given: build the model from the rank, the world size and the configuration alone"
            )

    def key_of(self, shard: int) -> ShardKey:
        """Return what ranks of another world know this shard by."""
        return ShardKey(self.shard_map.shards, shard, self._holdings_of.get(shard, 0))

    def wanted(self, resume: ResumePoint) -> list[ShardKey | None]:
        """Return by rank the shard that it is to be given; None where it has its own."""
        held = dict(zip(resume.holders, resume.held, strict=False))
        keys = [self.key_of(self.shard_map.shard_of(rank)) for rank in range(len(resume.holdings))]
        return [None if held.get(rank) == key[:2] else key for rank, key in enumerate(keys)]

    def multiple(self, modules: Iterable[torch.nn.Module]) -> int:
        """Return of which number the size of another world must be a multiple: FSDP2 cuts a model for any number of
        ranks, and of one that is cut in another way there can be more or fewer replicas."""
        if not self.is_known or self.shard_map.shards == 1 or (self.declared is None and cuts_for_any_world(modules)):
            return 1
        return self.shard_map.shards

    @property
    def lonely_ranks(self) -> frozenset[int]:
        """The ranks whose shard is on no other node, or in no other process where there is one node."""
        if self.shard_map.shards == 1:
            return frozenset()
        size = dist.get_world_size()
        lonely = lonely_shards(self.shard_map, self._first_ranks, size)
        return frozenset(rank for rank in range(size) if self.shard_map.shard_of(rank) in lonely)
