"""What a forward and a backward change before the update: kept at a step's start, put back when it is repeated.

    buffers      copied every time: BatchNorm's kernels and writes through `.data` leave no trace in `_version`
    extra state  of modules that have some (get_extra_state): scales of low-precision layers
    settings     of the optimizers' groups, which schedulers change
    others       the state_dict() of whatever is neither module nor optimizer: schedulers, scalers, loaders
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

from holdfast.state.copies import cloned, overwrite
from holdfast.state.modules import buffer_slots
from holdfast.state.optimizers import group_values, set_group_values
from holdfast.state.sharded import Sharded, into, local_of

Slot = tuple[dict[str, torch.Tensor | None], str]
"""Where a buffer is registered: replacing it is a change too."""


@dataclass(frozen=True, slots=True)
class Volatile:
    """A step's beginning."""

    buffers: list[tuple[Slot, torch.Tensor, torch.Tensor]]
    extras: list[tuple[Module, Any]]
    settings: list[tuple[Optimizer, list[dict[str, Any]]]]
    others: list[tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class SavedGradients:
    """The gradients at a step's beginning: the live tensor, and its copy where an accumulation is in flight."""

    items: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]


def find_slots(modules: Iterable[Module]) -> list[Slot]:
    """Every buffer of the modules, once."""
    found = {(id(owner), name): (owner._buffers, name) for module in modules for _, owner, name in buffer_slots(module)}
    return list(found.values())


def find_extras(modules: Iterable[Module]) -> list[Module]:
    """Every module inside that has extra state, once."""
    inner = {id(owner): owner for module in modules for owner in module.modules()}
    return [owner for owner in inner.values() if type(owner).get_extra_state is not Module.get_extra_state]


def capture(
    slots: Iterable[Slot], extras: Iterable[Module], optimizers: Iterable[Optimizer], others: Mapping[str, Any]
) -> Volatile:
    """Copy what a forward and a backward may change."""
    buffers = [
        (slot, buffer, local_of(buffer).clone()) for slot in slots if (buffer := slot[0].get(slot[1])) is not None
    ]
    return Volatile(
        buffers,
        extras=[(owner, cloned(owner.get_extra_state())) for owner in extras],
        settings=[(optimizer, group_values(optimizer)) for optimizer in optimizers],
        others=[(thing, cloned(thing.state_dict())) for thing in others.values()],
    )


def restore(saved: Volatile) -> None:
    """Put it back. May be done more than once with the same copy."""
    restore_buffers(saved)
    for thing, state in saved.others:
        thing.load_state_dict(cloned(state))
        if isinstance(thing, GradScaler):
            thing._per_optimizer_states.clear()  # an unscale_() of the broken step would forbid the next
    for optimizer, values in saved.settings:
        set_group_values(optimizer, values)


def restore_buffers(saved: Volatile) -> None:
    """What the forward left in the modules."""
    with torch.no_grad():
        for (owner, name), buffer, content in saved.buffers:
            owner[name] = buffer
            local_of(buffer).copy_(content)
    for owner_of_extra, extra in saved.extras:
        owner_of_extra.set_extra_state(cloned(extra))


def capture_gradients(parameters: Iterable[torch.Tensor], is_after_update: bool) -> SavedGradients:
    """Remember the gradients as they are at a step's start."""
    items: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = []
    for parameter in parameters:
        gradient = parameter.grad
        kept = None if gradient is None or is_after_update else local_of(gradient).clone()
        items.append((parameter, gradient, kept))
    return SavedGradients(items)


def restore_gradients(saved: SavedGradients) -> None:
    """Make the gradients what they were, by the rule. The tensors stay the same: DDP's are views of its buckets."""
    with torch.no_grad():
        for parameter, gradient, kept in saved.items:
            if gradient is not None and kept is not None:
                local_of(gradient).copy_(kept)
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
        parameter.grad = saved.clone()
