"""The state of tracked objects, quickly, when it has been asked for before: a roll call instead of a census.

`Tracked.state()` looks through every object. Between two steps nothing of what it finds has changed but values: the
same tensors stand in the same places. So their places are remembered, and the next time it is only looked whether each
is still there, at the same address. What is plain (settings of optimizers, schedulers, positions in the data) is taken
anew each time and put between the parts of the skeleton that stay as they are.

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

from holdfast.state.generators import generators
from holdfast.state.modules import EXTRA, module_state, transient_state, unwrapped
from holdfast.state.optimizers import is_plain, optimizer_state, settings_of
from holdfast.state.sharded import local_of
from holdfast.state.tracked import GENERATORS, TRANSIENT, Tracked
from holdfast.state.tree import VERSION, Flat
from holdfast.state.writer import Writer


class _Place(NamedTuple):
    """Where something stands: a tensor, a module, the state of an optimizer, or nothing yet."""

    holder: dict[Any, Any]
    key: Any
    thing: Any
    look: tuple[Any, ...] | None = None
    """Of a tensor: its memory may be exchanged while it stays the same object (`parameter.data = …`)."""


@dataclass
class _Known:
    """What was found the last time."""

    flat: Flat
    places: list[_Place]
    sizes: list[tuple[Any, int]]
    """Containers, and how many they held."""
    fixed: dict[str, msgspec.Raw]
    """Parts of the skeleton: of a module, and of an optimizer's state, by name."""
    labels: dict[str, list[list[Any]]]
    """By optimizer: the names of the parameters of each group."""

    def is_as_it_was(self) -> bool:
        if any(len(container) != size for container, size in self.sizes):
            return False
        return all(
            place.holder.get(place.key) is place.thing
            and (not place.look or _look(cast(torch.Tensor, place.thing)) == place.look)
            for place in self.places
        )


class Roll:
    """One for a set of tracked objects."""

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._known: _Known | None = None

    def state(self) -> Flat:
        """As `Tracked.state()`. While nothing but values changes, the list of tensors is the same object each time."""
        known = self._known
        if known is not None and not self._tracked.is_accumulating and known.is_as_it_was():
            writer = Writer()
            node = self._node(known, writer)
            if not writer.tensors:
                skeleton = msgspec.msgpack.encode([VERSION, node])
                return Flat(skeleton, known.flat.tensors, known.flat.specs)
        flat = self._tracked.state()
        self._known = self._get_to_know(flat)
        return flat

    def _node(self, known: _Known, writer: Writer) -> list[Any]:
        node: list[Any] = ["d"]
        for name, thing in self._tracked.objects().items():
            match thing:
                case Module():
                    value: Any = known.fixed[name]
                case Optimizer():
                    groups = [
                        {**settings_of(group), "params": labels}
                        for group, labels in zip(thing.param_groups, known.labels[name], strict=True)
                    ]
                    value = ["d", "state", known.fixed[name], "param_groups", writer.node(groups, (name,))]
                case _:
                    value = writer.node(thing.state_dict(), (name,))
            node += (name, value)
        if TRANSIENT in known.fixed:
            node += (TRANSIENT, known.fixed[TRANSIENT])
        if self._tracked.generators_of is not None:
            node += (GENERATORS, writer.node(generators(), (GENERATORS,)))
        return node

    def _get_to_know(self, flat: Flat) -> _Known | None:
        """None if some of it cannot be watched."""
        if self._tracked.is_accumulating:
            return None
        objects = self._tracked.objects()
        writer, known = Writer(), _Known(flat, [], [(objects, len(objects))], {}, {})
        names = self._tracked.parameter_names()
        for name, thing in objects.items():
            match thing:
                case Module():
                    fits = _watch_module(name, thing, writer, known)
                case Optimizer():
                    fits = _watch_optimizer(name, thing, names, writer, known)
                case _:
                    fits = True
            if not fits:
                return None
        if left_out := {name: held for name, one in self._tracked.modules().items() if (held := transient_state(one))}:
            known.fixed[TRANSIENT] = _raw(writer.node(left_out, (TRANSIENT,)))
        is_all = len(writer.tensors) == len(flat.tensors) and all(
            mine.data_ptr() == its.data_ptr() for mine, its in zip(writer.tensors, flat.tensors, strict=True)
        )
        return known if is_all else None


def _watch_module(name: str, module: Module, writer: Writer, known: _Known) -> bool:
    model = unwrapped(module)
    state = module_state(module)
    if any(key.endswith(EXTRA) or not isinstance(value, torch.Tensor) for key, value in state.items()):
        return False
    owners = list(model.modules())
    children = [_Place(owner._modules, key, one) for owner in owners for key, one in owner._modules.items()]
    holders = [one for owner in owners for one in (owner._parameters, owner._buffers)]
    places = [_place(holder, key, tensor) for holder in holders for key, tensor in holder.items()]
    addresses = {_address(place.thing) for place in places if place.thing is not None} | {0}
    if any(_address(tensor) not in addresses for tensor in state.values()):
        return False  # made by hooks
    known.places += places + children
    known.sizes += [(holder, len(holder)) for holder in (*holders, *(owner._modules for owner in owners))]
    known.fixed[name] = _raw(writer.node(state, (name,)))
    return True


def _watch_optimizer(
    name: str, optimizer: Optimizer, names: dict[int, str], writer: Writer, known: _Known
) -> bool:
    if not is_plain(optimizer):
        return False
    held = [one for one in optimizer.state.values() if isinstance(one, dict)]
    if any(not isinstance(value, torch.Tensor) for one in held for value in one.values()):
        return False
    said = optimizer_state(optimizer, names)
    if list(said) != ["state", "param_groups"]:
        return False
    groups = optimizer.param_groups
    known.sizes += [(one, len(one)) for one in (optimizer.state, groups, *held, *(group["params"] for group in groups))]
    known.places += [_Place(vars(optimizer), key, getattr(optimizer, key)) for key in ("state", "param_groups")]
    known.places += [_Place(optimizer.state, key, one) for key, one in optimizer.state.items()]
    known.places += [_Place(group, "params", group["params"]) for group in groups]
    known.places += [_place(one, key, tensor) for one in held for key, tensor in one.items()]
    known.fixed[name] = _raw(writer.node(said["state"], (name, "state")))
    known.labels[name] = [group["params"] for group in said["param_groups"]]
    return True


def _place(holder: dict[Any, Any], key: Any, tensor: torch.Tensor | None) -> _Place:
    return _Place(holder, key, tensor, _look(tensor) if tensor is not None else None)


def _look(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a copy of it depends on, values aside."""
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    return local.data_ptr(), local.shape, local.stride(), local.dtype


def _address(tensor: torch.Tensor) -> int:
    return local_of(tensor).data_ptr() if isinstance(tensor, DTensor) else tensor.data_ptr()


def _raw(node: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(node))


