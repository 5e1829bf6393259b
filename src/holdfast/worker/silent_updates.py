"""Finds updates that run no hook: of a captured CUDA graph that is replayed, or of a kernel that writes by pointer.

A step is committed before its update, or its state copied, in the optimizer's hook. A replay runs none: to the session
the step makes no update, and if it is repeated the optimizer's averages take the same gradient twice, on every rank
alike, so that nothing differs. What gives it away is that the state of an optimizer changes in a step in which its hook
was not called. That is looked for in the first steps, and again in steps after one that made no update though the one
before it did: a graph is captured after some steps of warming up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch.optim import Optimizer

from holdfast.errors import ScriptError
from holdfast.state.optimizers import unwrapped
from holdfast.state.tracked import Tracked
from holdfast.torch_compat import device_generator
from holdfast.worker.param_checksums import checksum

LOOKS_MAX = 4
"""How often it is looked for after the first steps: accumulating gradients looks the same at first, and each look reads
the optimizers' state."""
REMEDY = (
    "leave optimizer.step() out of what is captured (a graph of forward and backward alone is fine, if it has no"
    " collectives), do not write parameters behind the optimizer's back, and if it updates by another optimizer that it"
    " has inside, track that too"
)


class SilentUpdates:
    """The search, for one worker."""

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._before: dict[int, int] | None = None
        """By id() of the optimizer, a checksum of its state at the start of the step; None: it is not looked at."""
        self._looks_left = LOOKS_MAX
        self._is_odd = False

    def begin(self, is_trial: bool) -> None:
        """Remember what the optimizers' states are at the start of a step, if this one is looked at."""
        self._before = None
        if is_trial or self._is_odd:
            self._is_odd = False
            self._before = {id(one): checksum(_tensors(one)) for one in self._tracked.optimizers().values()}

    def drop(self) -> None:
        """Do not look at this step: it is not known which optimizers update in it."""
        self._before = None

    def check(self, updating: Collection[int]) -> None:
        """Raise ScriptError if an optimizer that is not among these, whose hooks were called, has changed its state."""
        before, self._before = self._before, None
        optimizers = self._tracked.optimizers()
        for name, optimizer in optimizers.items() if before else ():
            # SAM, for one, updates by an optimizer that it has inside.
            if any(isinstance(inner, Optimizer) and id(inner) in updating for inner in vars(optimizer).values()):
                continue
            if id(optimizer) not in updating and (before or {}).get(id(optimizer)) != checksum(_tensors(optimizer)):
                raise ScriptError(
                    f"the state of {name} changed in a step in which {name}.step() was not called, as when a captured"
                    f" CUDA graph is replayed: such an update can be neither committed nor undone; {REMEDY}"
                )

    def committed(self, has_updated: bool, updated_before: bool) -> None:
        """Look at the next step too, if this one is the first that made no update."""
        if updated_before and not has_updated and self._looks_left:
            self._looks_left -= 1
            self._is_odd = True


def refuse_capture(optimizer_name: str) -> None:
    """Raise ScriptError if an update is being captured into a graph of the device, to be replayed without us."""
    device = device_generator()
    is_capturing = getattr(device[1], "is_current_stream_capturing", None) if device is not None else None
    if is_capturing is not None and is_capturing():
        raise ScriptError(
            f"{optimizer_name}.step() is captured into a graph of the device: its replays call no hooks, so that a step"
            f" can be neither committed nor undone; {REMEDY}"
        )


def _tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in unwrapped(optimizer).state.values():
        for value in state.values() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor):
                yield value
