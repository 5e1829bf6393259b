"""A module's state, out of it and back into it, in place.

The names are those of the model itself: what only wraps it (DistributedDataParallel, torch.compile) is skipped,
so that a state fits whether the model is wrapped or not. Buffers that the module leaves out of its state_dict() are
saved beside it (`transient`): a counter among them decides bits too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import Module
from torch.nn.parallel import DataParallel, DistributedDataParallel

from holdfast.errors import StateError
from holdfast.state.dtensors import local_of
from holdfast.state.tensor_copy import cloned, copy_into, misfit
from holdfast.torch_compat import COMPILED_MODULE, copy_metadata, tensors_held

NAMES_SHOWN_MAX = 5
EXTRA = "_extra_state"


def unwrapped(module: Module) -> Module:
    """Return the model inside of its wrappers."""
    while True:
        if isinstance(module, DistributedDataParallel | DataParallel):
            module = module.module
        elif isinstance(inner := getattr(module, COMPILED_MODULE, None), Module):
            module = inner
        else:
            return module


def module_state(module: Module) -> dict[str, Any]:
    """Return parameters, buffers and extra state by name; the tensors are the live ones."""
    return dict(unwrapped(module).state_dict())


def buffer_slots(module: Module) -> Iterator[tuple[str, Module, str]]:
    """Yield all buffers of a module: full name, owner, name in the owner."""
    for prefix, owner in unwrapped(module).named_modules():
        for name, buffer in tensors_held(owner)[1].items():
            if buffer is not None:
                yield f"{prefix}.{name}" if prefix else name, owner, name


def transient_state(module: Module) -> dict[str, torch.Tensor]:
    """Return the buffers that state_dict() leaves out."""
    return {
        full: tensors_held(owner)[1][name].detach()
        for full, owner, name in buffer_slots(module)
        if name in owner._non_persistent_buffers_set
    }


def load_module(module: Module, saved: dict[str, Any], path: str) -> None:
    """Put a state into the live module. Its tensors stay the objects they are."""
    model = unwrapped(module)
    live = model.state_dict()
    check_names(set(live), set(saved), path)
    if not _is_live(model, live):
        _load_by_itself(model, saved, live, path)
        return
    for name, value in live.items():
        if isinstance(value, torch.Tensor) and not name.endswith(EXTRA):
            copy_into(value, saved[name], f"{path}.{name}")
        else:
            owner = name.removesuffix(EXTRA).removesuffix(".")
            model.get_submodule(owner).set_extra_state(cloned(saved[name]))


def load_transient(module: Module, saved: dict[str, Any]) -> None:
    """Put the buffers back that state_dict() leaves out. One whose size changed (a cache) is replaced."""
    slots = {full: (owner, name) for full, owner, name in buffer_slots(module)}
    for full, value in saved.items():
        if full not in slots:
            continue  # made lazily by a forward: it will be made again
        owner, name = slots[full]
        buffer = tensors_held(owner)[1][name]
        if buffer is not None and misfit(buffer, value) is None:
            copy_into(buffer, value, full)
        elif buffer is not None and isinstance(value, torch.Tensor):
            tensors_held(owner)[1][name] = value.clone().to(buffer.device)


def check_names(live: set[str], saved: set[str], path: str) -> None:
    """Raise StateError unless a module has the names that were saved."""
    for names, text in ((live - saved, "has no saved value for"), (saved - live, "does not have")):
        if names:
            some = ", ".join(sorted(names)[:NAMES_SHOWN_MAX]) + (" …" if len(names) > NAMES_SHOWN_MAX else "")
            raise StateError(f"{path} {text} {some}: the model is not the one that was saved")


def _is_live(model: Module, state: dict[str, Any]) -> bool:
    """Return whether state_dict() consists of the module's own memory, and nothing in it is made by hooks."""
    own = {local_of(tensor).data_ptr() for tensor in (*model.parameters(), *model.buffers())} | {0}
    return all(
        isinstance(value, torch.Tensor) and local_of(value).data_ptr() in own
        for name, value in state.items()
        if not name.endswith(EXTRA)
    )


def _load_by_itself(model: Module, saved: dict[str, Any], live: dict[str, Any], path: str) -> None:
    """Load through the module's own load_state_dict, because its hooks transform the state. A plain value that no hook
    accepts is one that the module creates again each time."""
    result = model.load_state_dict(_with_metadata(saved, live), strict=False)
    left = [name for name in result.unexpected_keys if isinstance(saved.get(name), torch.Tensor)]
    if left or result.missing_keys:
        some = ", ".join([*result.missing_keys, *left][:NAMES_SHOWN_MAX])
        raise StateError(f"{path} cannot take back {some}, which its own state_dict() has: give it a hook that does")


def _with_metadata(saved: dict[str, Any], live: dict[str, Any]) -> dict[str, Any]:
    state = OrderedDict((name, cloned(value)) for name, value in saved.items())
    copy_metadata(live, state)
    return state
