"""The parameter groups of an optimizer, which a script may add to in the middle of a run.

repeated step     groups that the aborted attempt added go again, with the state of their parameters
state to load     groups that were added since the script built the optimizer are made, by the names of their
                  parameters; groups that the state does not have are removed
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.errors import StateError
from holdfast.state.optimizers import is_split, put_settings, settings_of
from holdfast.state.tensor_copy import cloned

Parameters = Mapping[str, torch.Tensor]
"""Name of a parameter → the parameter."""


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A group at one moment."""

    group: dict[str, Any]
    parameters: list[torch.Tensor]
    settings: dict[str, Any]


def capture_groups(optimizer: Optimizer) -> list[SavedGroup]:
    """Save the groups: which there are, their parameters, and a copy of their settings, which schedulers change."""
    return [SavedGroup(group, list(group["params"]), cloned(settings_of(group))) for group in optimizer.param_groups]


def restore_groups(optimizer: Optimizer, saved: list[SavedGroup]) -> None:
    """Put the groups back, and forget the state of parameters that are in none of them."""
    live = optimizer.param_groups
    before = [parameter for group in live for parameter in group["params"]]
    remaining = [
        live[index] if index < len(live) and _is_same(live[index]["params"], one.parameters) else one.group
        for index, one in enumerate(saved)
    ]
    if not _is_same(live, remaining):
        live[:] = remaining
    for group, one in zip(remaining, saved, strict=True):
        if not _is_same(group["params"], one.parameters):
            group["params"][:] = one.parameters
        for key in [key for key in settings_of(group) if key not in one.settings]:
            del group[key]
        put_settings(group, one.settings)
    _forget(optimizer, before)


def group_sizes(optimizers: Iterable[Optimizer]) -> list[list[int]]:
    """Return how many parameters each group of each optimizer has: what changes when a group is added."""
    return [[len(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers]


def align_groups(optimizer: Optimizer, saved: Any, candidates: Iterable[Parameters], path: str) -> bool:
    """Give the live optimizer as many groups as the saved one had. Whether there was something to do.

    `candidates` are ways of naming the parameters of the tracked modules; the saved names are all of one of them.
    """
    shown = saved.get("param_groups") if isinstance(saved, dict) else None
    if not isinstance(shown, list) or is_split(optimizer):
        return False  # of its own kind: it loads what it can
    live = optimizer.param_groups
    if len(live) > len(shown):
        before = [parameter for group in live for parameter in group["params"]]
        del live[len(shown) :]
        _forget(optimizer, before)
        return True
    missing = shown[len(live) :]
    if not missing:
        return False
    labels = {label for group in shown for label in group["params"] if isinstance(label, str)}
    labels |= {label for group in missing for label in group["params"]}
    named = next((names for names in candidates if all(label in names for label in labels)), None)
    if named is None:
        raise StateError(
            f"{path} was saved with {len(shown)} parameter groups and has {len(live)}; the parameters of the others are"
            " in no tracked module: track the module they belong to, or make all groups before job.track"
        )
    for group in missing:
        settings = cloned({key: value for key, value in group.items() if key != "params"})
        optimizer.add_param_group({**settings, "params": [named[label] for label in group["params"]]})
    return True


def _forget(optimizer: Optimizer, parameters: list[torch.Tensor]) -> None:
    """Drop the state of those that are in no group any more."""
    remaining = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in parameters:
        if id(parameter) not in remaining:
            optimizer.state.pop(parameter, None)


def _is_same(ones: list[Any], others: list[Any]) -> bool:
    """Return whether two lists hold the same objects. Tensors cannot be compared with `==`."""
    return len(ones) == len(others) and all(one is other for one, other in zip(ones, others, strict=True))
