"""The plan of a run: which samples each step has. It follows from a handful of numbers, and not from the ranks.

A step takes the next `global_batch_size` positions. Where the epoch's size is no multiple of it, `last_batch` says what
happens at the end:

    short    the last step of the epoch is smaller. Every sample exactly once per epoch. The default.
    across   the step is filled with the first samples of the next epoch: every step is full, every sample still once.
    drop     what does not fill a step is left out, other samples each epoch if shuffled. As torch's drop_last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from holdfast.data.order import Indices, Locality, Order
from holdfast.data.slots import slot_positions, slots_of
from holdfast.errors import UsageError

LastBatch = Literal["short", "across", "drop"]
STATE_VERSION = 1

_DESCRIPTIONS = {
    "size": "the dataset's number of samples",
    "seed": "the seed",
    "global_batch_size": "the global batch size",
    "slots": "the number of slots",
    "shuffle": "the setting shuffle",
    "last_batch": "the setting last_batch",
    "locality": "the locality",
    "fingerprint": "the dataset's fingerprint",
}


@dataclass(frozen=True)
class StepPlan:
    """The samples of every step, and of every slot of it."""

    order: Order
    global_batch_size: int
    slots: int
    last_batch: LastBatch = "short"
    fingerprint: str = ""

    def __post_init__(self) -> None:
        if self.global_batch_size < 1:
            raise UsageError(f"a global batch of {self.global_batch_size} samples is not possible; give at least 1")
        if not 1 <= self.slots <= self.global_batch_size:
            raise UsageError(f"{self.slots} slots for a global batch of {self.global_batch_size}; give 1 to that many")
        if self.last_batch not in get_args(LastBatch):
            raise UsageError(f"last_batch is {self.last_batch!r}; it can be {', '.join(get_args(LastBatch))}")
        if self.last_batch == "drop" and self.order.size < self.global_batch_size:
            raise UsageError("the dataset is smaller than a global batch, and last_batch='drop' leaves no step at all")

    @property
    def _steps_each_epoch(self) -> int:
        if self.last_batch == "drop":
            return self.order.size // self.global_batch_size
        return -(-self.order.size // self.global_batch_size)

    def first_step(self, epoch: int) -> int:
        """Return the first step that begins in an epoch."""
        if self.last_batch == "across":
            return -(-epoch * self.order.size // self.global_batch_size)
        return epoch * self._steps_each_epoch

    def epoch_of(self, step: int) -> int:
        """Return the epoch in which a step begins."""
        if self.last_batch == "across":
            return step * self.global_batch_size // self.order.size
        return step // self._steps_each_epoch

    def span(self, step: int) -> range:
        """Return the positions of a step."""
        if self.last_batch == "across":
            return range(step * self.global_batch_size, (step + 1) * self.global_batch_size)
        epoch, within = divmod(step, self._steps_each_epoch)
        first = within * self.global_batch_size
        end = min(first + self.global_batch_size, self.order.size)
        return range(epoch * self.order.size + first, epoch * self.order.size + end)

    def step_at(self, position: int) -> int:
        """Return the step that begins at a position."""
        epoch, offset = self.order.place(position)
        if self.last_batch == "across":
            step = position // self.global_batch_size
        else:
            step = self.first_step(epoch) + offset // self.global_batch_size
        if position < 0 or self.span(step).start != position:
            raise UsageError(f"no step begins at position {position:,} with this global batch: the state is damaged")
        return step

    def step_with(self, position: int) -> int:
        """Return the step that has a position; for one that is left out at the end of an epoch, the next step."""
        if self.last_batch == "across":
            return position // self.global_batch_size
        epoch, offset = self.order.place(position)
        return self.first_step(epoch) + min(offset // self.global_batch_size, self._steps_each_epoch)

    def share(self, step: int, rank: int, world_size: int, weights: Sequence[float] | None = None) -> range:
        """Return the positions of a step that a rank has."""
        return slot_positions(self.span(step), slots_of(rank, world_size, self.slots, weights), self.slots)

    def slot_share(self, step: int, slots: range) -> range:
        """Return the positions of a step that these slots have."""
        return slot_positions(self.span(step), slots, self.slots)

    def samples(self, step: int) -> Indices:
        """Return all samples of a step, in the order of positions."""
        return self.order.samples_at(self.span(step))

    def samples_of(self, stretches: Sequence[range]) -> list[Indices]:
        """Return the samples of several ranges of positions, in as few vector operations as there are epochs among
        them."""
        offsets: dict[int, list[Indices]] = {}
        for stretch in stretches:
            for epoch, first, end in self.order.segments(stretch):
                offsets.setdefault(epoch, []).append(np.arange(first, end))
        # Stretches come in ascending order, so the epochs' results follow one another as the stretches do.
        found = [self.order.samples_of(epoch, np.concatenate(ranges)) for epoch, ranges in offsets.items()]
        flat = np.concatenate(found) if found else np.empty(0, dtype=np.int64)
        ends = np.cumsum([len(stretch) for stretch in stretches])
        return np.split(flat, ends[:-1])

    def configuration(self) -> dict[str, Any]:
        """Return the settings without which a saved position means nothing, as plain numbers and strings that any
        format can hold."""
        locality = self.order.locality
        return {
            "size": self.order.size,
            "seed": self.order.seed,
            "global_batch_size": self.global_batch_size,
            "slots": self.slots,
            "shuffle": self.order.shuffle,
            "last_batch": self.last_batch,
            "locality": [locality.shard_samples, locality.window_shards] if locality else [],
            "fingerprint": self.fingerprint,
        }

    def state(self, step: int) -> dict[str, Any]:
        """Return the whole state of a run's data before a step."""
        return {"version": STATE_VERSION, "position": self.span(step).start, **self.configuration()}

    def step_of_state(self, state: dict[str, Any]) -> int:
        """Return the step that a state is before; raise if the state is of another plan."""
        if state.get("version") != STATE_VERSION or not isinstance(state.get("position"), int):
            raise UsageError("this is not a data state of this version of Holdfast")
        check_configuration(self.configuration(), state, _DESCRIPTIONS)
        return self.step_at(state["position"])


def blocks(steps: range, steps_max: int) -> Iterator[range]:
    """Yield the same steps in blocks to compute at once: one step first, so that it is there soon, then ever more."""
    first, count = steps.start, 1
    while first < steps.stop:
        yield range(first, min(first + count, steps.stop))
        first, count = first + count, max(1, min(2 * count, steps_max))


def make_plan(
    size: int,
    *,
    global_batch_size: int,
    seed: int,
    slots: int | None = None,
    shuffle: bool = True,
    last_batch: LastBatch = "short",
    locality: Locality | None = None,
    fingerprint: str = "",
) -> StepPlan:
    """Return a plan from the settings of a sampler or loader. Without `slots` every sample is a slot of its own."""
    order = Order(size=size, seed=seed, shuffle=shuffle, locality=locality)
    return StepPlan(order, global_batch_size, slots or global_batch_size, last_batch, fingerprint)


def check_configuration(here: dict[str, Any], state: dict[str, Any], descriptions: dict[str, str]) -> None:
    """Raise UsageError if a state was saved with other settings. `words` say what each is."""
    for name, value in here.items():
        saved = state.get(name)
        if (list(saved) if isinstance(saved, tuple) else saved) != value:
            raise UsageError(
                f"{descriptions[name]} is {value!r} here and was {saved!r} when the state was saved. The order of"
                " samples depends on it: resume with the old value, or start the data from the beginning without"
                " loading this state."
            )
