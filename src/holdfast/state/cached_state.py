"""The state of tracked objects, quickly, when it has been asked for before: a roll call instead of a census.

`Tracked.state()` looks through every object. Between two steps nothing of what it finds has changed but values: the
same tensors stand in the same places. So their places are remembered, and the next time it is only looked whether each
is still there, at the same address. What is plain (settings of optimizers, schedulers, positions in the data) is taken
again each time and put between the parts of the skeleton that stay as they are.

Objects that cannot be watched so (a state_dict of their own, hooks, tensors in a scheduler's state, gradients under
way) are looked through every time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import msgspec
import torch
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from holdfast.state.dtensors import local_of
from holdfast.state.encode import StateEncoder
from holdfast.state.generators import generators
from holdfast.state.modules import EXTRA, module_state, transient_state, unwrapped
from holdfast.state.optimizers import is_plain, optimizer_state, settings_of
from holdfast.state.per_rank_state import LOCAL
from holdfast.state.tracked import FLAGS, GENERATORS, TRANSIENT, Tracked
from holdfast.state.tree import VERSION, FlatTree
from holdfast.torch_compat import children_of, tensors_held


class _Watched(NamedTuple):
    """The owner of a value: a tensor, a module, the state of an optimizer, or nothing yet."""

    holder: dict[Any, Any]
    key: Any
    thing: Any
    signature: tuple[Any, ...] | None = None
    """For a tensor only: its memory may be exchanged while it stays the same object (`parameter.data = …`)."""


@dataclass
class _Walk:
    """The result of the last full walk."""

    flat: FlatTree
    watched: list[_Watched]
    sizes: list[tuple[Any, int]]
    """Containers, and how many they held."""
    fixed: dict[str, msgspec.Raw]
    """Parts of the skeleton: of a module, and of an optimizer's state, by name."""
    labels: dict[str, list[list[Any]]]
    """For each optimizer the names of the parameters of each group."""

    def is_as_it_was(self) -> bool:
        if any(len(container) != size for container, size in self.sizes):
            return False
        return all(
            place.holder.get(place.key) is place.thing
            and (not place.signature or _signature(cast(torch.Tensor, place.thing)) == place.signature)
            for place in self.watched
        )


class CachedState:
    """A cached walk of a set of tracked objects."""

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._walk: _Walk | None = None

    def state(self) -> FlatTree:
        """Return what `Tracked.state()` returns. While nothing but values changes, the list of tensors is the same
        object each time."""
        walk = self._walk
        if walk is not None and not self._tracked.is_accumulating and walk.is_as_it_was():
            writer = StateEncoder()
            node = self._node(walk, writer)
            if not writer.tensors:
                skeleton = msgspec.msgpack.encode([VERSION, node])
                return FlatTree(skeleton, walk.flat.tensors, walk.flat.specs)
        flat = self._tracked.state()
        self._walk = self._watch(flat)
        return flat

    def _node(self, walk: _Walk, writer: StateEncoder) -> list[Any]:
        node: list[Any] = ["d"]
        local = self._tracked.local_names()
        for name, thing in self._tracked.objects().items():
            if name in local:
                continue
            match thing:
                case Module():
                    value: Any = walk.fixed[name]
                case Optimizer():
                    groups = [
                        {**settings_of(group), "params": labels}
                        for group, labels in zip(thing.param_groups, walk.labels[name], strict=True)
                    ]
                    value = ["d", "state", walk.fixed[name], "param_groups", writer.node(groups, (name,))]
                case _:
                    value = writer.node(thing.state_dict(), (name,))
            node += (name, value)
        if TRANSIENT in walk.fixed:
            node += (TRANSIENT, walk.fixed[TRANSIENT])
        if switched := self._tracked.flags.changed():
            node += (FLAGS, writer.node(switched, (FLAGS,)))
        if self._tracked.generators_of is not None:
            node += (GENERATORS, writer.node(generators(), (GENERATORS,)))
        if local:
            node += (LOCAL, writer.node(self._tracked.local_tree()[LOCAL], (LOCAL,)))
        return node

    def _watch(self, flat: FlatTree) -> _Walk | None:
        """Return what to watch; None if some of it cannot be watched."""
        if self._tracked.is_accumulating:
            return None
        objects = self._tracked.objects()
        writer, walk = StateEncoder(), _Walk(flat, [], [(objects, len(objects))], {}, {})
        names = self._tracked.parameter_names()
        local = self._tracked.local_names()
        for name, thing in objects.items():
            if name in local:
                continue  # its values are taken again each time; with tensors in it, so is everything else
            match thing:
                case Module():
                    fits = _watch_module(name, thing, writer, walk)
                case Optimizer():
                    fits = _watch_optimizer(name, thing, names, writer, walk)
                case _:
                    fits = True
            if not fits:
                return None
        shared = {name: one for name, one in self._tracked.modules().items() if name not in local}
        if left_out := {name: found for name, one in shared.items() if (found := transient_state(one))}:
            walk.fixed[TRANSIENT] = _raw(writer.node(left_out, (TRANSIENT,)))
        is_all = len(writer.tensors) == len(flat.tensors) and all(
            own.data_ptr() == its.data_ptr() for own, its in zip(writer.tensors, flat.tensors, strict=True)
        )
        return walk if is_all else None


def _watch_module(name: str, module: Module, writer: StateEncoder, walk: _Walk) -> bool:
    model = unwrapped(module)
    state = module_state(module)
    if any(key.endswith(EXTRA) or not isinstance(value, torch.Tensor) for key, value in state.items()):
        return False
    owners = list(model.modules())
    children = [_Watched(children_of(owner), key, one) for owner in owners for key, one in children_of(owner).items()]
    holders = [one for owner in owners for one in tensors_held(owner)]
    watched = [_watched(holder, key, tensor) for holder in holders for key, tensor in holder.items()]
    addresses = {_address(place.thing) for place in watched if place.thing is not None} | {0}
    if any(_address(tensor) not in addresses for tensor in state.values()):
        return False  # made by hooks
    walk.watched += watched + children
    walk.sizes += [(holder, len(holder)) for holder in (*holders, *(children_of(owner) for owner in owners))]
    walk.fixed[name] = _raw(writer.node(state, (name,)))
    return True


def _watch_optimizer(name: str, optimizer: Optimizer, names: dict[int, str], writer: StateEncoder, walk: _Walk) -> bool:
    if not is_plain(optimizer):
        return False
    found = [one for one in optimizer.state.values() if isinstance(one, dict)]
    if any(not isinstance(value, torch.Tensor) for one in found for value in one.values()):
        return False
    described = optimizer_state(optimizer, names)
    if list(described) != ["state", "param_groups"]:
        return False
    groups = optimizer.param_groups
    walk.sizes += [(one, len(one)) for one in (optimizer.state, groups, *found, *(group["params"] for group in groups))]
    walk.watched += [_Watched(vars(optimizer), key, getattr(optimizer, key)) for key in ("state", "param_groups")]
    walk.watched += [_Watched(optimizer.state, key, one) for key, one in optimizer.state.items()]
    walk.watched += [_Watched(group, "params", group["params"]) for group in groups]
    walk.watched += [_watched(one, key, tensor) for one in found for key, tensor in one.items()]
    walk.fixed[name] = _raw(writer.node(described["state"], (name, "state")))
    walk.labels[name] = [group["params"] for group in described["param_groups"]]
    return True


def _watched(holder: dict[Any, Any], key: Any, tensor: torch.Tensor | None) -> _Watched:
    return _Watched(holder, key, tensor, _signature(tensor) if tensor is not None else None)


def _signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what a copy of a tensor depends on, values aside."""
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    return local.data_ptr(), local.shape, local.stride(), local.dtype


def _address(tensor: torch.Tensor) -> int:
    return local_of(tensor).data_ptr() if isinstance(tensor, DTensor) else tensor.data_ptr()


def _raw(node: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(node))
