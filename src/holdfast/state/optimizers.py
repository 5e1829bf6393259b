"""An optimizer's state, out of it and back into it, with the same bits.

torch numbers the parameters; we name them, by the tracked module they belong to, as a number means another parameter
once the world changes. Parameters of no tracked module keep their numbers.

    live state has the saved structure    copied in place, no memory moves
    fresh or different                    load_state_dict, then our bits over what it cast to the parameter's dtype
    own load_state_dict, or hooks         theirs alone: only they know what the state means
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.errors import StateError
from holdfast.state.dtensors import Sharded, copied_to, into
from holdfast.state.tensor_copy import cloned, misfit, overwrite, revived
from holdfast.torch_compat import has_state_dict_hooks

MARK_MAX = 2**31 - 1
Names = Mapping[int, str]
"""id() of a parameter → its name."""


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that has this rank's state: ZeRO's is inside of the given one, whose own state_dict()
    communicates."""
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return optimizer.optim if zero and isinstance(optimizer, zero.ZeroRedundancyOptimizer) else optimizer


def is_split(optimizer: Optimizer) -> bool:
    """Return whether each rank has another part of its state, so that it belongs to the rank (per_rank_state.py)."""
    return unwrapped(optimizer) is not optimizer


def optimizer_state(optimizer: Optimizer, names: Names) -> dict[str, Any]:
    """Return what state_dict() says, with parameters named, in their order; the tensors are the live ones."""
    inner = unwrapped(optimizer)
    state = dict(inner.state_dict())
    numbered = _numbered(inner, state)
    if numbered is None:
        return state
    labels = {number: names.get(id(parameter), number) for number, parameter in numbered.items()}
    others = [key for key in state["state"] if key not in labels]
    ordered = [number for number in labels if number in state["state"]]
    state["state"] = {labels.get(key, key): state["state"][key] for key in (*ordered, *others)}
    # Schedulers change the settings of the outer one; ZeRO hands them inwards at its next step.
    outer = optimizer.param_groups if inner is not optimizer else [{}] * len(state["param_groups"])
    state["param_groups"] = [
        {**group, **settings_of(newer), "params": [labels[number] for number in group["params"]]}
        for group, newer in zip(state["param_groups"], outer, strict=True)
    ]
    return state


def group_labels(optimizer: Optimizer, names: Names) -> list[list[str | int]] | None:
    """Return the parameters of each group by their names, or their numbers; None if its state is not in torch's
    form."""
    inner = unwrapped(optimizer)
    numbered = _numbered(inner, inner.state_dict())
    if numbered is None:
        return None
    numbers = {id(parameter): number for number, parameter in numbered.items()}
    return [
        [names.get(id(parameter), numbers[id(parameter)]) for parameter in group["params"]]
        for group in inner.param_groups
    ]


def load_optimizer(optimizer: Optimizer, saved: dict[str, Any], names: Names, path: str, is_ours: bool = False) -> None:
    """Put a state into the live optimizer, whether it has made a step yet or not.

    `is_ours`: no other code uses the saved tensors, so that they may become the live ones without a copy.
    """
    inner = unwrapped(optimizer)
    groups, state = inner.param_groups, inner.state
    numbered = _numbered(inner, inner.state_dict())
    if numbered is None:
        inner.load_state_dict(revived(saved, inner.state_dict))
    else:
        _load_numbered(inner, _renumbered(saved, numbered, names, path), numbered, path, is_ours)
    # torch replaces both, and another optimizer may share them, as SAM and the one that it updates by.
    if inner.param_groups is not groups:
        groups[:] = inner.param_groups
        inner.param_groups = groups
    if inner.state is not state:
        state.clear()
        state.update(inner.state)
        inner.state = state
    if inner is not optimizer:
        for ours, theirs in zip(optimizer.param_groups, inner.param_groups, strict=True):
            ours.update(settings_of(theirs))


def put_settings(group: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Overwrite the settings of a group; a learning rate that is a tensor stays the tensor it is."""
    for key, value in settings.items():
        if isinstance(live := group.get(key), torch.Tensor) and misfit(live, value) is None:
            overwrite(live, value)
        else:
            group[key] = cloned(value)


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return everything of a group but its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def mark_of_settings(optimizers: Iterable[Optimizer]) -> int:
    """Return a number that is equal where the optimizers have the same learning rates and other numbers as settings, to
    the bit. Those that are tensors are left out: on a device, to read one is to wait."""
    numbers: list[float] = []
    for optimizer in optimizers:
        for group in unwrapped(optimizer).param_groups:
            for value in group.values():
                if isinstance(value, float | int):
                    numbers.append(value)
                elif type(value) is tuple:  # betas
                    numbers += [one for one in value if isinstance(one, float | int)]
    return hash(tuple(one for one in numbers if one == one)) & MARK_MAX  # of numbers, it is the same in every process


def _numbered(optimizer: Optimizer, state: Any) -> dict[Any, torch.Tensor] | None:
    """Return number → parameter, in order; None if the state does not have torch's structure."""
    if not isinstance(state, dict) or not {"state", "param_groups"} <= set(state):
        return None
    live, shown = optimizer.param_groups, state["param_groups"]
    if [len(group["params"]) for group in live] != [len(group.get("params", ())) for group in shown]:
        return None
    pairs = zip(live, shown, strict=True)
    return {
        number: parameter
        for group, numbers in pairs
        for parameter, number in zip(group["params"], numbers["params"], strict=True)
    }


def _renumbered(saved: dict[str, Any], numbered: dict[Any, torch.Tensor], names: Names, path: str) -> dict[str, Any]:
    """Return the saved state with this optimizer's numbers."""
    numbers = {names.get(id(parameter), number): number for number, parameter in numbered.items()}
    if not isinstance(saved, dict) or not {"state", "param_groups"} <= set(saved):
        raise StateError(f"{path}: what was saved is not the state of an optimizer")
    listed = [label for group in saved["param_groups"] for label in group["params"]]
    if strangers := [label for label in (*listed, *saved["state"]) if label not in numbers]:
        raise StateError(f"{path} does not have the parameter {strangers[0]!r}: it is not the optimizer that was saved")
    if len(listed) != len(numbers):
        raise StateError(f"{path} has {len(numbers)} parameters, saved were {len(listed)}")
    return {
        **saved,
        "state": {numbers[label]: value for label, value in saved["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[label] for label in group["params"]]} for group in saved["param_groups"]
        ],
    }


def _load_numbered(
    optimizer: Optimizer, saved: dict[str, Any], numbered: dict[Any, torch.Tensor], path: str, is_ours: bool
) -> None:
    _check_groups(optimizer, saved, numbered, path)
    is_torchs = is_plain(optimizer)
    if is_torchs and _fits(optimizer, saved, numbered):
        for number, entry in saved["state"].items():
            _fill(optimizer.state[numbered[number]], entry)
        for group, values in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            put_settings(group, settings_of(values))
        return
    devices = _step_devices(saved, numbered)
    placed = {
        number: _placed_entry(entry, numbered[number], devices[number], path, is_ours)
        for number, entry in saved["state"].items()
    }
    optimizer.load_state_dict({**saved, "state": placed, "param_groups": cloned(saved["param_groups"])})
    if is_torchs:
        for number, entry in placed.items():
            optimizer.state[numbered[number]].update(entry)


def _check_groups(optimizer: Optimizer, saved: dict[str, Any], numbered: dict[Any, torch.Tensor], path: str) -> None:
    number_of = {id(parameter): number for number, parameter in numbered.items()}
    live = [[number_of[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    if live != [group["params"] for group in saved["param_groups"]]:
        raise StateError(f"{path} has other parameter groups than were saved: make the same groups in the same order")


def is_plain(optimizer: Optimizer) -> bool:
    """Return whether torch's own load_state_dict applies, without foreign hooks."""
    kind = type(optimizer)
    ours = kind.load_state_dict is Optimizer.load_state_dict and kind.state_dict is Optimizer.state_dict
    return ours and not has_state_dict_hooks(optimizer)


def _fits(optimizer: Optimizer, saved: dict[str, Any], numbered: dict[Any, torch.Tensor]) -> bool:
    """Return whether the live state has the saved structure, so that copying in place is enough."""
    live = optimizer.state
    if {id(key) for key in live} != {id(numbered[number]) for number in saved["state"]}:
        return False
    if any(set(mine) != set(group) for mine, group in zip(optimizer.param_groups, saved["param_groups"], strict=True)):
        return False
    return all(_entry_fits(live[numbered[number]], entry) for number, entry in saved["state"].items())


def _entry_fits(live: dict[Any, Any], saved: dict[Any, Any]) -> bool:
    return set(live) == set(saved) and all(
        misfit(value, saved[key]) is None
        if isinstance(value, torch.Tensor)
        else not isinstance(saved[key], torch.Tensor | Sharded)
        for key, value in live.items()
    )


def _fill(live: dict[Any, Any], saved: dict[Any, Any]) -> None:
    for key, value in saved.items():
        if isinstance(live[key], torch.Tensor):
            overwrite(live[key], value)
        else:
            live[key] = cloned(value)


def _step_devices(saved: dict[str, Any], numbered: dict[Any, torch.Tensor]) -> dict[Any, torch.device]:
    """Return where torch wants a parameter's `step`: on the host, unless the update runs entirely on the device."""
    return {
        number: numbered[number].device if group.get("capturable") or group.get("fused") else torch.device("cpu")
        for group in saved["param_groups"]
        for number in group["params"]
    }


def _placed_entry(
    entry: dict[Any, Any], parameter: torch.Tensor, step_device: torch.device, path: str, is_ours: bool
) -> dict[Any, Any]:
    """Return a parameter's state, in memory of its own, where this parameter needs it."""
    placed: dict[Any, Any] = {}
    for key, value in entry.items():
        if isinstance(value, Sharded) and isinstance(parameter, DTensor):
            placed[key] = into(value, parameter, is_ours)
        elif isinstance(value, Sharded):
            raise StateError(
                f"{path}: the saved one is a shard, the parameter is not: it must be resharded, not loaded"
            )
        elif isinstance(value, torch.Tensor):
            device = step_device if key == "step" else parameter.device
            placed[key] = value if is_ours and value.device == device else copied_to(value, device)
        else:
            placed[key] = cloned(value)
    return placed


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Return the parameters of all groups, in order."""
    for group in optimizer.param_groups:
        yield from group["params"]
