"""What a forward and a backward change before the update: saved at a step's start, restored when it is repeated.

    buffers      copied every time: BatchNorm's kernels and writes through `.data` leave no trace in `_version`
    extra state  of modules that have some (get_extra_state): scales of low-precision layers
    groups       of the optimizers' parameters: which there are, and their settings, which schedulers change
    others       the state_dict() of whatever is neither module nor optimizer: schedulers, scalers, loaders
    flags        of modules, parameters and the process, and hooks (module_flags.py)
    gradients    by the rule below

A gradient that was None becomes None. One that existed is zeroed if the step before made an update, as what is left
of it is to be cleared anyway; if not, an accumulation is in flight: it was cloned at the start and is put back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from holdfast.state.dtensors import Sharded, copied_to, into, local_of
from holdfast.state.module_flags import Flags, SavedFlags
from holdfast.state.modules import buffer_slots
from holdfast.state.param_groups import SavedGroup, capture_groups, restore_groups
from holdfast.state.tensor_copy import cloned, overwrite
from holdfast.torch_compat import forget_unscaled, tensors_held

Slot = tuple[dict[str, torch.Tensor | None], str]
"""Where a buffer is registered: replacing it is a change too."""


@dataclass(frozen=True, slots=True)
class StepBackup:
    """The data to undo a step's forward and backward."""

    buffers: list[tuple[Slot, torch.Tensor, torch.Tensor]]
    extras: list[tuple[Module, Any]]
    groups: list[tuple[Optimizer, list[SavedGroup]]]
    others: list[tuple[Any, Any]]
    flags: tuple[Flags, SavedFlags]


@dataclass(frozen=True, slots=True)
class SavedGradients:
    """The gradients at a step's beginning: the live tensor, and its copy where an accumulation is in progress."""

    items: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]


def find_slots(modules: Iterable[Module]) -> list[Slot]:
    """Return every buffer of the modules, once."""
    found = {
        (id(owner), name): (tensors_held(owner)[1], name)
        for module in modules
        for _, owner, name in buffer_slots(module)
    }
    return list(found.values())


def find_extras(modules: Iterable[Module]) -> list[Module]:
    """Return every inner module that has extra state, once."""
    inner = {id(owner): owner for module in modules for owner in module.modules()}
    return [owner for owner in inner.values() if type(owner).get_extra_state is not Module.get_extra_state]


def capture(
    slots: Iterable[Slot],
    extras: Iterable[Module],
    optimizers: Iterable[Optimizer],
    others: Mapping[str, Any],
    flags: Flags,
) -> StepBackup:
    """Copy what a forward and a backward may change."""
    buffers = [
        (slot, buffer, local_of(buffer).clone()) for slot in slots if (buffer := slot[0].get(slot[1])) is not None
    ]
    return StepBackup(
        buffers,
        extras=[(owner, cloned(owner.get_extra_state())) for owner in extras],
        groups=[(optimizer, capture_groups(optimizer)) for optimizer in optimizers],
        others=[(thing, cloned(thing.state_dict())) for thing in others.values()],
        flags=(flags, flags.capture()),
    )


def restore(saved: StepBackup) -> None:
    """Put it back. May be done more than once with the same copy."""
    flags, flags_then = saved.flags
    flags.restore(flags_then)
    restore_buffers(saved)
    for thing, state in saved.others:
        thing.load_state_dict(cloned(state))
        if isinstance(thing, GradScaler):
            forget_unscaled(thing)
    for optimizer, groups in saved.groups:
        restore_groups(optimizer, groups)


def restore_buffers(saved: StepBackup) -> None:
    """Undo what the forward changed in the modules' buffers."""
    with torch.no_grad():
        for (owner, name), buffer, content in saved.buffers:
            owner[name] = buffer
            local_of(buffer).copy_(content)
    for owner_of_extra, extra in saved.extras:
        owner_of_extra.set_extra_state(cloned(extra))


def capture_gradients(parameters: Iterable[torch.Tensor], is_after_update: bool) -> SavedGradients:
    """Save the gradients as they are at a step's start."""
    items: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = []
    for parameter in parameters:
        gradient = parameter.grad
        copy = None if gradient is None or is_after_update else local_of(gradient).clone()
        items.append((parameter, gradient, copy))
    return SavedGradients(items)


def restore_gradients(saved: SavedGradients) -> None:
    """Make the gradients what they were, by the rule. The tensors stay the same: DDP's are views of its buckets."""
    with torch.no_grad():
        for parameter, gradient, copy in saved.items:
            if gradient is not None and copy is not None:
                local_of(gradient).copy_(copy)
            elif gradient is not None:
                local_of(gradient).zero_()
            parameter.grad = gradient


def put_gradient(parameter: torch.Tensor, saved: Any) -> None:
    """Make a parameter's gradient what was saved: of another process, or None."""
    if saved is None:
        parameter.grad = None
    elif parameter.grad is not None:
        overwrite(parameter.grad, saved)
    elif isinstance(parameter, DTensor) and isinstance(saved, Sharded):
        parameter.grad = into(saved, parameter)
    else:
        parameter.grad = copied_to(saved, parameter.device)
