"""What hf.Loader and hf.Stream have in common: rank and world size, and the facts about the last batch.

**Weights of batches.** A mean over samples needs only the plan, which every rank knows. A mean over something else, the
tokens that count for example, needs what is in the batches of all ranks. So, with `weight`, a rank fetches all its
batches of a step before it hands out the first, and one small all-reduce gives every rank the weight of each slot. They
are added exactly, so that shares do not depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from holdfast.data.cursor import RankAssignment
from holdfast.data.slots import slot_counts, slots_of
from holdfast.errors import UsageError

Weight = Callable[[Any], float]
"""How much a batch counts in the mean."""


class BatchInfo(NamedTuple):
    """The facts about a batch that was handed out."""

    loss_scale: float = 1.0
    share: float = 1.0
    is_last: bool = True
    slot: int = 0
    is_ghost: bool = False


class BatchSource(RankAssignment):
    """The base of Loader and Stream: it gives a rank's batches, slot by slot if the global batch has slots (`slots=`),
    else all slots in one."""

    weights: tuple[float, ...] | None

    def __init__(self, slots_total: int, has_slots: bool) -> None:
        self._slots_total, self._has_slots = slots_total, has_slots
        self._last_batch = BatchInfo()
        self.before_pass: Callable[[], None] | None = None
        """Called when a loop over this object itself begins. A session refuses it, as its steps have their batches."""
        self.even_batches = False
        """Whether all ranks get as many batches of a step as the one that has most, the others with ghosts after their
        own: for models whose forward pass communicates (FSDP, SyncBatchNorm). A session sees to it."""

    @property
    def loss_scale(self) -> float:
        """Return the factor for the mean loss of the last batch, where ranks' gradients are averaged."""
        return self._last_batch.loss_scale

    @property
    def share(self) -> float:
        """Return the fraction of the global batch that the last batch is: as `loss_scale`, where gradients are
        summed."""
        return self._last_batch.share

    @property
    def is_last_of_step(self) -> bool:
        """Return whether the last batch was this rank's last of the step: the one whose backward synchronises."""
        return self._last_batch.is_last

    @property
    def slot(self) -> int:
        """Return the slot of the last batch; the first one, where it has several."""
        return self._last_batch.slot

    @property
    def is_ghost(self) -> bool:
        """Return whether the last batch is another rank's, and counts nothing here."""
        return self._last_batch.is_ghost

    def set_assignment(self, rank: int, world_size: int, weights: Sequence[float] | None = None) -> None:
        """Change the slots of this rank from the next batch on, for another view: rank, size and weights are those of
        all ranks of the job, also with a mesh."""
        own, size, shares = rank, world_size, self._shared_weights(weights)
        if self.coordinates is not None:
            own, size = self.coordinates.of(rank, world_size), self.coordinates.count
        slots_of(own, size, self._slots_total, shares)  # refuses what cannot be
        self._assignment, self.weights = (rank, world_size), shares

    def bearable(self, world_size: int, weights: Sequence[float]) -> Sequence[float] | None:
        """Return the weights that are wanted, if there are any and they help: not if they leave a rank without a slot,
        nor if all ranks have to make as many passes as the one with most. The result is the same on all ranks."""
        if not weights or (self.even_batches and self._has_slots):
            return None
        shares = self._shared_weights(weights) or ()
        size = world_size if self.coordinates is None else self.coordinates.count
        return weights if min(slot_counts(size, self._slots_total, shares)) > 0 else None

    def _slots(self) -> range:
        return slots_of(self.rank, self.world_size, self._slots_total, self.weights)

    def _units(self) -> tuple[range, ...]:
        """Return the runs of slots that become one batch each. A rank without slots has an empty one."""
        slots = self._slots()
        return tuple(range(slot, slot + 1) for slot in slots) or (range(0),) if self._has_slots else (slots,)

    def _ghosts(self, own: int, has_samples: Callable[[int], bool]) -> int:
        """Return how many batches this rank, which has `own` in the step, is short of."""
        if not self.even_batches or not self._has_slots:
            return 0
        filled = [has_samples(slot) for slot in range(self._slots_total)]
        ranks = (slots_of(rank, self.world_size, self._slots_total, self.weights) for rank in range(self.world_size))
        return max(own, *(sum(filled[slots.start : slots.stop]) for slots in ranks)) - own

    def _weighted(self, batches: Iterator[Any], weight: Weight) -> Iterator[Any]:
        """Return the same batches, weighted by what is in them."""
        weighed = [(batch, self._last_batch, self._weight_of(batch, weight)) for batch in batches]
        total = self._total({batch_info.slot: own for _, batch_info, own in weighed if not batch_info.is_ghost})
        for batch, batch_info, own in weighed:
            self._last_batch = batch_info._replace(loss_scale=own * self.world_size / total, share=own / total)
            yield batch

    def _weight_of(self, batch: Any, weight: Weight) -> float:
        own = 0.0 if self._last_batch.is_ghost else float(weight(batch))
        if not 0 <= own < math.inf:
            raise UsageError(f"a batch of slot {self.slot} weighs {own}: a weight is 0 or more, such as a count")
        return own

    def _total(self, own: dict[int, float]) -> float:
        """Return the sum over all ranks' slots, in an order that does not depend on which rank has them."""
        values = [0.0] * (self._slots_total if self._has_slots else self.world_size)
        for slot, value in own.items():
            values[slot if self._has_slots else self.rank] = value
        total = math.fsum(over_all_ranks(values, torch.float64, self._job_size))
        if not total:
            raise UsageError("all batches of the step weigh nothing: there is no mean of them")
        return total


def over_all_ranks(values: list[Any], dtype: torch.dtype, world_size: int) -> list[Any]:
    """Return the element-wise maximum."""
    if world_size == 1:
        return values
    if not dist.is_available() or not dist.is_initialized():
        raise UsageError("the ranks must agree on what a step has: initialise torch.distributed first")
    device = torch.accelerator.current_accelerator() if dist.get_backend() == "nccl" else "cpu"
    tensor = torch.tensor(values, dtype=dtype, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return list(tensor.tolist())
