"""What hf.Loader and hf.Stream have in common: a place in the world, and what is known of the batch handed out last.

**Weights of batches.** A mean over samples needs only the plan, which everybody knows. A mean over something else, the
tokens that count for example, needs what is in the batches of all ranks. So, with `weight`, a rank takes all its
batches of a step before it hands out the first, and one small all-reduce tells everybody the weight of each slot. They
are added up exactly, so that shares do not depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from holdfast.data.slots import slot_counts, slots_of
from holdfast.errors import UsageError

Weight = Callable[[Any], float]
"""How much a batch counts in the mean."""


class Handed(NamedTuple):
    """A batch that was handed out."""

    loss_scale: float = 1.0
    share: float = 1.0
    is_last: bool = True
    slot: int = 0
    is_ghost: bool = False


class Handing:
    """Hands out a rank's batches, slot by slot if the global batch is cut (`slots=`), else all slots in one."""

    rank: int
    world_size: int
    weights: tuple[float, ...] | None

    def __init__(self, slots_total: int, is_cut: bool) -> None:
        self._slots_total, self._is_cut = slots_total, is_cut
        self._handed = Handed()
        self.even_batches = False
        """Whether all ranks get as many batches of a step as the one that has most, the others with ghosts after their
        own: for models whose forward pass communicates (FSDP, SyncBatchNorm). A session sees to it."""

    @property
    def loss_scale(self) -> float:
        """What to multiply the mean loss of the batch handed out last with, where ranks' gradients are averaged."""
        return self._handed.loss_scale

    @property
    def share(self) -> float:
        """The part of the global batch that the batch handed out last is: as `loss_scale`, where they are summed."""
        return self._handed.share

    @property
    def is_last_of_step(self) -> bool:
        """Whether the batch handed out last was this rank's last of the step: the one whose backward synchronises."""
        return self._handed.is_last

    @property
    def slot(self) -> int:
        """The slot of the batch handed out last; the first one, where it has several."""
        return self._handed.slot

    @property
    def is_ghost(self) -> bool:
        """Whether the batch handed out last is another rank's, and counts nothing here."""
        return self._handed.is_ghost

    def set_place(self, rank: int, world_size: int, weights: Sequence[float] | None = None) -> None:
        """Another view: from the next batch on, this rank has other slots."""
        slots_of(rank, world_size, self._slots_total, weights)  # refuses what cannot be
        self.rank, self.world_size = rank, world_size
        self.weights = None if weights is None else tuple(weights)

    def bearable(self, world_size: int, weights: Sequence[float]) -> Sequence[float] | None:
        """The weights that are wanted, if there are any and they help: not if they leave a rank without a slot, nor if
        all ranks have to make as many passes as the one with most. The same on all ranks."""
        if not weights or (self.even_batches and self._is_cut):
            return None
        return weights if min(slot_counts(world_size, self._slots_total, tuple(weights))) > 0 else None

    def _slots(self) -> range:
        return slots_of(self.rank, self.world_size, self._slots_total, self.weights)

    def _units(self) -> tuple[range, ...]:
        """The runs of slots that become one batch each. A rank without slots has an empty one."""
        slots = self._slots()
        return tuple(range(slot, slot + 1) for slot in slots) or (range(0),) if self._is_cut else (slots,)

    def _ghosts(self, own: int, has_samples: Callable[[int], bool]) -> int:
        """How many batches this rank, which has so many in the step, lacks."""
        if not self.even_batches or not self._is_cut:
            return 0
        filled = [has_samples(slot) for slot in range(self._slots_total)]
        ranks = (slots_of(rank, self.world_size, self._slots_total, self.weights) for rank in range(self.world_size))
        return max(own, *(sum(filled[slots.start : slots.stop]) for slots in ranks)) - own

    def _weighted(self, batches: Iterator[Any], weight: Weight) -> Iterator[Any]:
        """The same batches, by what is in them."""
        held = [(batch, self._handed, self._weight_of(batch, weight)) for batch in batches]
        total = self._total({handed.slot: own for _, handed, own in held if not handed.is_ghost})
        for batch, handed, own in held:
            self._handed = handed._replace(loss_scale=own * self.world_size / total, share=own / total)
            yield batch

    def _weight_of(self, batch: Any, weight: Weight) -> float:
        own = 0.0 if self._handed.is_ghost else float(weight(batch))
        if not 0 <= own < math.inf:
            raise UsageError(f"a batch of slot {self.slot} weighs {own}: a weight is 0 or more, such as a count")
        return own

    def _total(self, own: dict[int, float]) -> float:
        """Of all ranks' slots, in an order that does not depend on who has them."""
        values = [0.0] * (self._slots_total if self._is_cut else self.world_size)
        for slot, value in own.items():
            values[slot if self._is_cut else self.rank] = value
        total = math.fsum(over_all_ranks(values, torch.float64, self.world_size))
        if not total:
            raise UsageError("all batches of the step weigh nothing: there is no mean of them")
        return total


def over_all_ranks(values: list[Any], dtype: torch.dtype, world_size: int) -> list[Any]:
    """The element-wise maximum."""
    if world_size == 1:
        return values
    if not dist.is_available() or not dist.is_initialized():
        raise UsageError("the ranks must agree on what a step has: initialise torch.distributed first")
    device = torch.accelerator.current_accelerator() if dist.get_backend() == "nccl" else "cpu"
    tensor = torch.tensor(values, dtype=dtype, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return list(tensor.tolist())
