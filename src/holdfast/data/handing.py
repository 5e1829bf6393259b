"""What hf.Loader and hf.Stream have in common: a place in the world, and what is known of the batch handed out last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from holdfast.data.slots import slots_of
from holdfast.errors import UsageError


class Handed(NamedTuple):
    """A batch that was handed out."""

    loss_scale: float = 1.0
    is_last: bool = True
    slot: int = 0


class Handing:
    """Hands out a rank's batches, slot by slot if the global batch is cut (`slots=`), else all slots in one."""

    rank: int
    world_size: int
    weights: tuple[float, ...] | None

    def __init__(self, slots_total: int, is_cut: bool) -> None:
        self._slots_total, self._is_cut = slots_total, is_cut
        self._handed = Handed()

    @property
    def loss_scale(self) -> float:
        """What to multiply the mean loss of the batch handed out last with."""
        return self._handed.loss_scale

    @property
    def is_last_of_step(self) -> bool:
        """Whether the batch handed out last was this rank's last of the step: the one whose backward synchronises."""
        return self._handed.is_last

    @property
    def slot(self) -> int:
        """The slot of the batch handed out last; the first one, where it has several."""
        return self._handed.slot

    def set_place(self, rank: int, world_size: int, weights: Sequence[float] | None = None) -> None:
        """Another view: from the next batch on, this rank has other slots."""
        slots_of(rank, world_size, self._slots_total, weights)  # refuses what cannot be
        self.rank, self.world_size = rank, world_size
        self.weights = None if weights is None else tuple(weights)

    def _slots(self) -> range:
        return slots_of(self.rank, self.world_size, self._slots_total, self.weights)

    def _units(self) -> tuple[range, ...]:
        """The runs of slots that become one batch each. A rank without slots has an empty one."""
        slots = self._slots()
        return tuple(range(slot, slot + 1) for slot in slots) or (range(0),) if self._is_cut else (slots,)


def check_configuration(here: dict[str, Any], state: dict[str, Any], words: dict[str, str]) -> None:
    """Raise UsageError if a state was saved with other settings. `words` say what each is."""
    for name, value in here.items():
        saved = state.get(name)
        if (list(saved) if isinstance(saved, tuple) else saved) != value:
            raise UsageError(
                f"{words[name]} is {value!r} here and was {saved!r} when the state was saved. The order of samples"
                " depends on it: resume with the old value, or start the data anew without loading this state."
            )
