"""Decides which tensors can be copied while the step runs: those that do not change before an optimizer's update.

A script may change parameters in other ways than by an optimizer's update, for example clip weights in the body of a
step. The copy that this spoils shows which tensor changed, and that one is copied before the step from then on. If
another one changes too, all are copied before the step: that costs time, but there are snapshots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from holdfast.state.copier import CopyTask, CopyWork
from holdfast.state.dtensors import local_of
from holdfast.state.optimizers import parameters_of
from holdfast.state.tracked import Tracked
from holdfast.storage.image import ImageLayout

SHARED, AT_ONCE = -1, -2
"""Who owns a tensor that no optimizer owns: SHARED may change after any update, AT_ONCE at any time."""


class CopyPlan(NamedTuple):
    """What of a copy is done when."""

    at_once: tuple[list[torch.Tensor], list[torch.Tensor]]
    """Targets and sources that are copied before the step."""
    later: CopyWork
    """What is copied while the step runs."""


class CopySchedule:
    """The schedule of the tensors of tracked objects."""

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._unstable: set[int] = set()
        """Memory that was seen to change while it was copied."""
        self._is_all_at_once = False

    def plan(self, layout: ImageLayout, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> CopyPlan:
        """Return what is to be copied at once, and what can wait until an update."""
        owners = self._owners()
        tasks = [
            CopyTask(target, source, owners.get(source.untyped_storage().data_ptr(), AT_ONCE), entry.name)
            for entry, target, source in zip(layout.entries, targets, sources, strict=True)
        ]
        at_once = [task for task in tasks if task.owner == AT_ONCE]
        later = CopyWork(task for task in tasks if task.owner != AT_ONCE)
        return CopyPlan(([task.target for task in at_once], [task.source for task in at_once]), later)

    def record_changed(self, changed: Iterable[CopyTask], is_last: bool) -> None:
        """Record what changed while it was copied. `is_last`: no other copy may be spoiled."""
        self._is_all_at_once = is_last or bool(self._unstable)
        self._unstable |= {task.source.untyped_storage().data_ptr() for task in changed}

    def _owners(self) -> dict[int, int]:
        """Return the memory that does not change before an update, and whose update."""
        if self._is_all_at_once:
            return {}
        found = {memory_of(item): SHARED for item in self._tracked.parameters()}
        for number, optimizer in enumerate(self._tracked.optimizers().values()):
            for parameter in parameters_of(optimizer):
                found[memory_of(parameter)] = number
                for value in optimizer.state.get(parameter, {}).values():
                    if isinstance(value, torch.Tensor):
                        found[memory_of(value)] = number
        return {memory: owner for memory, owner in found.items() if memory not in self._unstable}


def memory_of(tensor: torch.Tensor) -> int:
    """Return where the memory of a tensor begins; for a DTensor, that of its local part."""
    return local_of(tensor).untyped_storage().data_ptr()
