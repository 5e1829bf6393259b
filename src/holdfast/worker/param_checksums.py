"""Silent corruption: ranks that should have the same parameters compare a checksum of them, every so many steps.

At a commit ranks with the same shard (all of them, where the model is replicated) must have the same bits. A rank that
differs from the majority raises CorruptionError: its process is replaced, its state comes from a peer that is right,
and the step is repeated. Where there is no majority, as among two, all raise: no rank's state can be trusted, and all
start again from the last checkpoint. Copies in memory of what a rank that raises had since it last agreed with the
others are given up: they may have the same fault, and would spread it.

The checksum is a sum over the bits as whole numbers, computed where the parameters are: any single flip changes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import Buffer, Parameter

from holdfast.core.shard_map import ShardMap
from holdfast.core.stacks import ranks_text
from holdfast.errors import CorruptionError
from holdfast.state.dtensors import local_of

MODULUS = 2**61 - 1
FACTOR = 1_000_003
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the size of an element, what its bits are added up as."""

Gather = Callable[[list[int]], list[list[int]]]


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """Return a checksum of all bits of all tensors, in order."""
    found = 0
    with torch.no_grad():
        for tensor in tensors:
            local = local_of(tensor).detach()
            whole = torch.view_as_real(local) if local.is_complex() else local
            words = whole.contiguous().view(-1).view(WORDS[min(whole.element_size(), 8)])
            found = (found * FACTOR + int(words.sum(dtype=torch.int64))) % MODULUS
    return found


def is_comparable(tensor: Any) -> bool:
    """Return whether the tensor has memory whose bits can be added up."""
    if not isinstance(tensor, DTensor) and type(tensor) not in (torch.Tensor, Parameter, Buffer):
        return False  # a subclass of its own, whose memory only it knows
    return tensor.layout is torch.strided and tensor.device.type != "meta" and not tensor.is_inference()


class ParamChecksums:
    """Of one worker. `parameters` are its own; `distrust` is told after which step copies of the state may be wrong."""

    def __init__(
        self, parameters: Callable[[], Iterable[torch.Tensor]], every: int, distrust: Callable[[int], None]
    ) -> None:
        self._parameters, self._every, self._distrust = parameters, every, distrust
        self._agreed = -1
        """The last step before which all were alike."""

    def before_commit(self, step: int, rank: int, shard_map: ShardMap, gather: Gather) -> None:
        """Compare the parameters with those of other ranks. Raises CorruptionError on a rank whose parameters are not
        those of the others."""
        if step == 0 or step % self._every:
            return
        rows = [row[0] for row in gather([checksum(self._parameters())])]
        by_shard = (shard_map.ranks_of(shard, len(rows)) for shard in range(shard_map.shards))
        if all(len({rows[other] for other in ranks}) == 1 for ranks in by_shard):
            self._agreed = step
            return
        text = verdict(rows, rank, shard_map)
        if text:
            self._distrust(self._agreed)
        gather([0])  # the job may end with the first that says so: by then the others have discarded theirs too
        if text:
            raise CorruptionError(f"before step {step} {text}")
        self._agreed = step


def verdict(sums: list[int], rank: int, shard_map: ShardMap) -> str:
    """Return what is wrong with this rank's parameters, from every rank's checksums; empty if nothing is."""
    twins = {other: sums[other] for other in shard_map.ranks_of(shard_map.shard_of(rank), len(sums))}
    (most, count), *_ = Counter(twins.values()).most_common(1)
    if count == len(twins):
        return ""
    if 2 * count <= len(twins):
        return f"the parameters of {ranks_text(twins)} differ, and none of them has a majority"
    if sums[rank] == most:
        return ""
    right = [other for other, value in twins.items() if value == most]
    return f"this rank's parameters differ from those of {ranks_text(right)}, which agree"
