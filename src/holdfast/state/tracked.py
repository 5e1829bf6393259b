"""The objects a script names with `job.track`: their state, out of them and back into them.

    tracked = Tracked(model=model, optimizer=optimizer, scheduler=scheduler)
    flat = tracked.state()        # the live tensors, in an order that is the same on every rank
    tracked.load(flat)            # in place where possible; the same bits afterwards

Each name is a branch of the state. Modules are looked into (modules.py), optimizers too (optimizers.py); all others
give their state_dict() and take it back. Optimizers are loaded last: their groups have the learning rate that counts,
whatever a scheduler did on its way in.

What does not fit is refused with its name before or while it is loaded; after a refusal the objects may hold a mixture
and must be loaded from another source.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from holdfast.errors import StateError
from holdfast.state.copies import revived
from holdfast.state.generators import generators
from holdfast.state.modules import load_module, load_transient, module_state, transient_state, unwrapped
from holdfast.state.optimizers import load_optimizer, optimizer_state, parameters_of
from holdfast.state.tree import Flat, flatten, unflatten
from holdfast.state.volatile import (
    SavedGradients,
    Slot,
    Volatile,
    capture,
    capture_gradients,
    find_extras,
    find_slots,
    put_gradient,
    restore,
    restore_buffers,
    restore_gradients,
)

GRADIENTS = "@gradients"
"""The branch of gradients that are accumulated over steps, by the parameters' order."""
TRANSIENT = "@transient"
"""The branch of the buffers that modules leave out of their state_dict(). No object can have this name."""
GENERATORS = "@generators"
"""The branch of the random generators of the rank whose image it is."""


class Tracked:
    """Named objects that together are the state of the job on this rank."""

    def __init__(self, **objects: Any) -> None:
        self._objects: dict[str, Any] = {}
        self._slots: list[Slot] = []
        self._extras: list[Module] = []
        self._parameters: list[torch.Tensor] = []
        self._free: list[torch.Tensor] = []
        self.is_accumulating = False
        """Whether the last step made no update, so that gradients are part of the state."""
        self.generators_of: int | None = None
        """The rank whose random generators are kept with the state; None: nobody's."""
        self.saved_generators: dict[str, Any] | None = None
        """Of that rank, as they were found with what was loaded last; to be set by who knows that all is loaded."""
        for name, thing in objects.items():
            self.add(name, thing)

    def add(self, name: str, thing: Any) -> None:
        """Track one more object. Raises StateError for one that has no state_dict and load_state_dict."""
        if not name.isidentifier():
            raise StateError(f"{name!r} is no name: use a word like model or optimizer")
        if name in self._objects and self._objects[name] is not thing:
            raise StateError(f"{name} is tracked already: give the other object another name")
        missing = [word for word in ("state_dict", "load_state_dict") if not callable(getattr(thing, word, None))]
        if missing:
            kind = type(thing).__name__
            raise StateError(
                f"{name} is a {kind}, which has no {' and no '.join(missing)}: give it both, or leave it out"
            )
        self._objects[name] = thing
        self.refresh()

    def refresh(self) -> None:
        """Look for parameters and buffers anew: call it after a tracked module got other ones."""
        self._slots = find_slots(self.modules().values())
        self._extras = find_extras(self.modules().values())
        found: dict[int, torch.Tensor] = {}
        found |= {id(item): item for module in self.modules().values() for item in unwrapped(module).parameters()}
        found |= {id(item): item for optimizer in self.optimizers().values() for item in parameters_of(optimizer)}
        self._parameters = list(found.values())
        owned = {id(item) for optimizer in self.optimizers().values() for item in parameters_of(optimizer)}
        self._free = [item for item in self._parameters if id(item) not in owned and item.requires_grad]

    def __len__(self) -> int:
        return len(self._objects)

    def __contains__(self, name: str) -> bool:
        return name in self._objects

    def objects(self) -> dict[str, Any]:
        """All of them, in the order in which they were named."""
        return self._objects

    def modules(self) -> dict[str, Module]:
        """The tracked modules, as they were given."""
        return {name: thing for name, thing in self._objects.items() if isinstance(thing, Module)}

    def optimizers(self) -> dict[str, Optimizer]:
        """The tracked optimizers."""
        return {name: thing for name, thing in self._objects.items() if isinstance(thing, Optimizer)}

    def others(self) -> dict[str, Any]:
        """What is neither module nor optimizer: schedulers, scalers, loaders, the user's own."""
        return {name: thing for name, thing in self._objects.items() if not isinstance(thing, Module | Optimizer)}

    def parameters(self) -> list[torch.Tensor]:
        """Every parameter of the modules and optimizers, once. The list is kept: FSDP swaps them during a forward."""
        return self._parameters

    def free_parameters(self) -> list[torch.Tensor]:
        """Those that no tracked optimizer updates: of averaged models, or of models that are updated by hand."""
        return self._free

    def state(self) -> Flat:
        """The state as it is now. Its tensors are the live ones: copy them before the next update."""
        return flatten(self.tree())

    def load(self, flat: Flat, is_ours: bool = False, with_others: bool = True) -> None:
        """Make the objects what they were when the state was taken. The state's tensors are copied, not kept.

        `is_ours`: nobody else uses them, so that an optimizer without state may keep them. What is the live tensor's
        own memory is not copied at all. `with_others`: see `others()`.
        """
        self.load_tree(unflatten(flat.skeleton, flat.tensors), is_ours, with_others)

    def tree(self) -> dict[str, Any]:
        """The state before it is flattened: name → what the object says."""
        names = self.parameter_names()
        tree = {name: self._state_of(name, thing, names) for name, thing in self._objects.items()}
        left_out = {name: transient_state(module) for name, module in self.modules().items()}
        if left_out := {name: buffers for name, buffers in left_out.items() if buffers}:
            tree[TRANSIENT] = left_out
        if self.is_accumulating:
            tree[GRADIENTS] = {
                str(index): item.grad for index, item in enumerate(self._parameters) if item.grad is not None
            }
        if self.generators_of is not None:
            tree[GENERATORS] = generators()
        return tree

    def load_tree(self, tree: Any, is_ours: bool = False, with_others: bool = True) -> None:
        """Load what `tree()` gave, or what was put together from several."""
        self.check_names(tree)
        left_out = tree.get(TRANSIENT, {})
        for name, module in self.modules().items():
            load_module(module, tree[name], name)
            load_transient(module, left_out.get(name, {}))
        for name, thing in self.others().items() if with_others else ():
            _noting(f"loading {name}", partial(_load_other, thing, tree[name]))
        names = self.parameter_names()
        for name, optimizer in self.optimizers().items():
            load_optimizer(optimizer, tree[name], names, name, is_ours)
        self.load_gradients(tree.get(GRADIENTS))

    def parameter_names(self) -> dict[int, str]:
        """id() of each parameter → its name. With several modules, the tracked name comes first."""
        modules = {name: unwrapped(module) for name, module in self.modules().items()}
        owned = {id(item) for optimizer in self.optimizers().values() for item in parameters_of(optimizer)}
        owners = [name for name, module in modules.items() if any(id(item) in owned for item in module.parameters())]
        names: dict[int, str] = {}
        for name in owners:
            for path, parameter in modules[name].named_parameters():
                names.setdefault(id(parameter), path if len(owners) == 1 else f"{name}.{path}")
        return names

    def load_gradients(self, saved: dict[str, Any] | None) -> None:
        """Those of an accumulation over several steps. Without one, gradients are nobody's state."""
        self.is_accumulating = saved is not None
        if saved is not None:
            for index, parameter in enumerate(self._parameters):
                put_gradient(parameter, saved.get(str(index)))

    def volatile(self) -> Volatile:
        """A copy of what a forward and a backward change, for the case that the step is repeated."""
        return capture(self._slots, self._extras, self.optimizers().values(), self.others())

    def restore_volatile(self, saved: Volatile) -> None:
        """Put back what `volatile()` copied."""
        restore(saved)

    def restore_buffers(self, saved: Volatile) -> None:
        """Put back those of the modules alone, and their extra state."""
        restore_buffers(saved)

    def gradients(self, is_after_update: bool) -> SavedGradients:
        """Remember the gradients at a step's start. `is_after_update`: whether the step before made an update."""
        return capture_gradients(self._parameters, is_after_update)

    def restore_gradients(self, saved: SavedGradients) -> None:
        """Make the gradients what they were at the step's start."""
        restore_gradients(saved)

    def _state_of(self, name: str, thing: Any, names: dict[int, str]) -> Any:
        match thing:
            case Module():
                return _noting(f"taking the state of {name}", lambda: module_state(thing))
            case Optimizer():
                return _noting(f"taking the state of {name}", lambda: optimizer_state(thing, names))
            case _:
                return _noting(f"taking the state of {name}", thing.state_dict)

    def check_names(self, tree: Any) -> None:
        """Raise StateError unless what was saved is what is tracked."""
        if not isinstance(tree, dict):
            raise StateError("what was saved is not the state of tracked objects")
        saved, live = set(tree) - {TRANSIENT, GRADIENTS, GENERATORS}, set(self._objects)
        if missing := sorted(live - saved):
            raise StateError(f"nothing was saved for {', '.join(missing)}: track what was tracked when it was saved")
        if extra := sorted(map(str, saved - live)):
            raise StateError(f"{', '.join(extra)} was saved and is not tracked: track it, as when it was saved")


def _load_other(thing: Any, saved: Any) -> None:
    thing.load_state_dict(revived(saved, thing.state_dict))


def _noting(what: str, action: Callable[[], Any]) -> Any:
    """Let a user's exception say where it happened."""
    try:
        return action()
    except Exception as error:  # whatever a user's own state_dict raises; it goes on as it is
        error.add_note(f"while {what}")
        raise
