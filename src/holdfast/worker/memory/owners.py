"""Which tensors stand still until an update, and whose: they can be copied later, all others at once.

A script may change parameters otherwise than by an optimizer's update: clip weights in the body of a step, say. The
copy that this spoils shows what moved, and that is copied at once from then on. If something else moves too, all of it
is: copies may cost what they cost, but there are some.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from holdfast.state.copier import Task, Work
from holdfast.state.optimizers import parameters_of
from holdfast.state.sharded import local_of
from holdfast.state.tracked import Tracked
from holdfast.storage.image import Layout

SHARED, AT_ONCE = -1, -2
"""Who owns a tensor that no optimizer does: any update may be followed by a change of it, or anything at all."""


class Shared(NamedTuple):
    """A copy's tensors, shared out."""

    at_once: tuple[list[torch.Tensor], list[torch.Tensor]]
    """Targets and sources."""
    later: Work


class Owners:
    """Of the tensors of tracked objects."""

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._restless: set[int] = set()
        """Memory that was seen to move while it was copied."""
        self._is_all_at_once = False

    def share_out(self, layout: Layout, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Shared:
        """What is to be copied at once, and what can wait until an update."""
        owners = self._owners()
        tasks = [
            Task(target, source, owners.get(source.untyped_storage().data_ptr(), AT_ONCE), entry.name)
            for entry, target, source in zip(layout.entries, targets, sources, strict=True)
        ]
        at_once = [task for task in tasks if task.owner == AT_ONCE]
        later = Work(task for task in tasks if task.owner != AT_ONCE)
        return Shared(([task.target for task in at_once], [task.source for task in at_once]), later)

    def note_moved(self, moved: Iterable[Task], is_dear: bool) -> None:
        """A copy was spoiled. `is_dear`: there must not be another one."""
        self._is_all_at_once = is_dear or bool(self._restless)
        self._restless |= {task.source.untyped_storage().data_ptr() for task in moved}

    def _owners(self) -> dict[int, int]:
        """Memory that stands still until an update → whose update."""
        if self._is_all_at_once:
            return {}
        found = {memory_of(item): SHARED for item in self._tracked.parameters()}
        for number, optimizer in enumerate(self._tracked.optimizers().values()):
            for parameter in parameters_of(optimizer):
                found[memory_of(parameter)] = number
                for value in optimizer.state.get(parameter, {}).values():
                    if isinstance(value, torch.Tensor):
                        found[memory_of(value)] = number
        return {memory: owner for memory, owner in found.items() if memory not in self._restless}


def memory_of(tensor: torch.Tensor) -> int:
    """Where the memory of a tensor begins, of a cut one its local part's."""
    return local_of(tensor).untyped_storage().data_ptr()
