"""Gradients that an optimizer carries over a step in which there was an update: noticed, and refused.

Gradients are part of the state in steps that make no update. Where one optimizer updates in a step, what the gradients
of another hold is taken for what is left over and about to be cleared. A script that adds to them instead would lose
them when its step is repeated or its process replaced. Whether it does is seen at that optimizer's next update: the
gradients that were there when the step began are still the same tensors, never cleared.

The same holds for an optimizer that applies in one step what the backward of the step before has left after its update
(a delayed update). It shows in the second step already, so only the first steps are looked at.
"""

from __future__ import annotations

import weakref

import torch
from torch.optim import Optimizer

from holdfast.errors import ScriptError
from holdfast.state.dtensors import local_of
from holdfast.state.optimizers import parameters_of
from holdfast.state.tracked import Tracked
from holdfast.torch_compat import version_of

WATCHED_STEPS = 4
"""How many steps are looked at for delayed updates."""


class CarriedGradients:
    """The gradients that are there at the start of a step though the step before made an update."""

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._updated: set[int] = set()
        self._carried: dict[int, torch.Tensor] = {}
        self._left: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        """By id() of a parameter whose optimizer updated in the last step: its gradient, and the version of that."""
        self._steps = 0

    def begin(self) -> None:
        """Begin a step, or repeat it from its beginning."""
        self._carried, self._left, updated = {}, {}, self._updated
        optimizers = self._tracked.optimizers().values()
        for optimizer in optimizers if updated else ():
            if id(optimizer) not in updated:
                for parameter in parameters_of(optimizer):
                    if parameter.grad is not None and _is_nonzero(parameter.grad):
                        # An object of its own: with gradient_as_bucket_view DDP gives a cleared gradient the same one.
                        parameter.grad = parameter.grad.detach()
                        self._carried[id(parameter)] = parameter.grad
            elif self._steps < WATCHED_STEPS:
                for parameter in parameters_of(optimizer):
                    if (gradient := parameter.grad) is not None:
                        self._left[id(parameter)] = (weakref.ref(gradient), version_of(gradient))

    def committed(self, updated: set[int]) -> None:
        """Record that a step was committed in which the optimizers with these id() have updated."""
        self._updated = set(updated)
        self._steps += 1

    def check(self, optimizer: Optimizer) -> None:
        """Raise ScriptError if an optimizer is about to apply gradients that it has carried over such a step."""
        for parameter in parameters_of(optimizer) if self._left else ():
            known, version = self._left.get(id(parameter), (None, 0))
            gradient = parameter.grad
            if gradient is None or known is None or known() is not gradient:
                continue
            if version_of(gradient) == version and _is_nonzero(gradient):
                name = self._name_of(optimizer)
                raise ScriptError(
                    f"{name} applies the gradients of the step before, which were left after its update there: they"
                    f" cannot be kept through a fault. Make backward and {name}.step() in the same step, in this order"
                )
        for parameter in parameters_of(optimizer) if self._carried else ():
            if (carried := self._carried.get(id(parameter))) is not None and parameter.grad is carried:
                name = self._name_of(optimizer)
                raise ScriptError(
                    f"{name} applies gradients that it has accumulated over a step in which another optimizer updated:"
                    " they cannot be kept through a fault. Update all optimizers in the same steps, or clear what is"
                    f" left with {name}.zero_grad(), which sets it to None, before its backward"
                )

    def _name_of(self, optimizer: Optimizer) -> str:
        return next((name for name, one in self._tracked.optimizers().items() if one is optimizer), "an optimizer")


def _is_nonzero(gradient: torch.Tensor) -> bool:
    return gradient.is_sparse or bool(local_of(gradient).any())
