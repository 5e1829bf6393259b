"""The objects a script names with `job.track`: their state, out of them and back into them.

    tracked = Tracked(model=model, optimizer=optimizer, scheduler=scheduler)
    flat = tracked.state()        # the live tensors, in an order that is the same on every rank
    tracked.load(flat)            # in place where possible; the same bits afterwards

What a rank has for itself (`add(…, is_local=True)`) is a branch of its own: per_rank_state.py.

Each name is a branch of the state. Modules are looked into (modules.py), optimizers too (optimizers.py); all others
give their state_dict() and take it back. Optimizers are loaded last: their groups have the learning rate that counts,
whatever a scheduler did on its way in.

What does not fit is refused with its name before or while it is loaded; after a refusal the objects may hold a mixture
and must be loaded from another source.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from holdfast.errors import ScriptError, StateError
from holdfast.state.generators import generators
from holdfast.state.module_flags import Flags
from holdfast.state.modules import load_module, load_transient, module_state, transient_state, unwrapped
from holdfast.state.optimizers import is_split, load_optimizer, optimizer_state, parameters_of
from holdfast.state.param_groups import align_groups, group_sizes
from holdfast.state.per_rank_state import LOCAL, StatePart, own_branches, owner_key
from holdfast.state.step_backup import (
    SavedGradients,
    Slot,
    StepBackup,
    capture,
    capture_gradients,
    find_extras,
    find_slots,
    put_gradient,
    restore,
    restore_buffers,
    restore_gradients,
)
from holdfast.state.tensor_copy import revived
from holdfast.state.tree import FlatTree, flatten, unflatten

GRADIENTS = "@gradients"
"""The branch of gradients that are accumulated over steps, by the parameters' order."""
TRANSIENT = "@transient"
"""The branch of the buffers that modules leave out of their state_dict(). No object can have this name."""
FLAGS = "@flags"
"""The branch of what the script's loop has switched for good: flags of modules and parameters, settings."""
GENERATORS = "@generators"
"""The branch of the random generators of the rank whose image it is."""


class Tracked:
    """The named objects that together are the state of the job on this rank."""

    def __init__(self, **objects: Any) -> None:
        self._objects: dict[str, Any] = {}
        self._slots: list[Slot] = []
        self._extras: list[Module] = []
        self._parameters: list[torch.Tensor] = []
        self._free: list[torch.Tensor] = []
        self._group_sizes: list[list[int]] = []
        self._local: set[str] = set()
        self.flags = Flags()
        self.owner = (0, 1)
        """The rank that these objects are of, and the size of its world: whose the local state is."""
        self.gradients_are_local = False
        """Whether gradients that are accumulated over steps differ between ranks that share everything else."""
        self.is_part = False
        """Whether other ranks have parameters of other names (the stages of a pipeline): then what was saved may have
        names that these objects do not have."""
        self.is_accumulating = False
        """Whether the last step made no update, so that gradients are part of the state."""
        self.generators_of: int | None = None
        """The rank whose random generators are saved with the state; None: no rank's."""
        self.saved_generators: dict[str, Any] | None = None
        """The generators of that rank in the state that was loaded last; the caller sets them when all is loaded."""
        for name, thing in objects.items():
            self.add(name, thing)

    def add(self, name: str, thing: Any, *, is_local: bool = False) -> None:
        """Track one more object; with `is_local` each rank has its own. Raise StateError for one without state_dict and
        load_state_dict."""
        if not name.isidentifier():
            raise StateError(f"{name!r} is not a valid name: use one like model or optimizer")
        if name in self._objects and self._objects[name] is not thing:
            raise StateError(f"{name} is tracked already: give the other object another name")
        missing = [word for word in ("state_dict", "load_state_dict") if not callable(getattr(thing, word, None))]
        if missing:
            kind = type(thing).__name__
            raise StateError(
                f"{name} is a {kind}, which has no {' and no '.join(missing)}: give it both, or leave it out"
            )
        self._objects[name] = thing
        if is_local:
            self._local.add(name)
        self.refresh()

    def refresh(self) -> None:
        """Find parameters and buffers again: call it after a tracked module got other ones."""
        self._group_sizes = group_sizes(self.optimizers().values())
        self._slots = find_slots(self.modules().values())
        self._extras = find_extras(self.modules().values())
        optimizers = {name: one for name, one in self.optimizers().items() if not _is_split(one)}
        self.flags.refresh(self.modules(), optimizers, self._local)
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
        """Return all objects, in the order in which they were named."""
        return self._objects

    def modules(self) -> dict[str, Module]:
        """Return the tracked modules, as they were given."""
        return {name: thing for name, thing in self._objects.items() if isinstance(thing, Module)}

    def optimizers(self) -> dict[str, Optimizer]:
        """Return the tracked optimizers."""
        return {name: thing for name, thing in self._objects.items() if isinstance(thing, Optimizer)}

    def others(self) -> dict[str, Any]:
        """Return what is neither module nor optimizer: schedulers, scalers, loaders, the user's own."""
        return {name: thing for name, thing in self._objects.items() if not isinstance(thing, Module | Optimizer)}

    def local_names(self) -> list[str]:
        """Return the objects of which each rank has its own state, in the order in which they were named."""
        return [name for name, thing in self._objects.items() if name in self._local or _is_split(thing)]

    @property
    def has_local(self) -> bool:
        """Return whether there is state now that belongs to this rank alone."""
        return bool(self.local_names()) or (self.gradients_are_local and self.is_accumulating)

    def parameters(self) -> list[torch.Tensor]:
        """Return every parameter of the modules and optimizers, once. The list is cached: FSDP swaps them during a
        forward."""
        return self._parameters

    def free_parameters(self) -> list[torch.Tensor]:
        """Return the parameters that no tracked optimizer updates: those of averaged models, or of models that are
        updated by hand."""
        return self._free

    def state(self, part: StatePart = StatePart.ALL) -> FlatTree:
        """Return the state as it is now. Its tensors are the live ones: copy them before the next update."""
        return flatten(self.tree(part))

    def load(self, flat: FlatTree, is_ours: bool = False, with_others: bool = True) -> None:
        """Make the objects what they were when the state was taken. The state's tensors are copied, not kept.

        `is_ours`: no other code uses them, so that an optimizer without state may keep them. What is the live tensor's
        own memory is not copied at all. `with_others`: see `others()`.
        """
        self.load_tree(unflatten(flat.skeleton, flat.tensors), is_ours, with_others)

    def tree(self, part: StatePart = StatePart.ALL) -> dict[str, Any]:
        """Return the state before it is flattened: name → what the object's state_dict() returns."""
        local = self.local_names()
        tree: dict[str, Any] = {}
        if part is not StatePart.LOCAL:
            shared = [name for name in self._objects if name not in local]
            tree |= self._branches(shared, with_gradients=not self.gradients_are_local)
            if switched := self.flags.changed():
                tree[FLAGS] = switched
            if self.generators_of is not None:
                tree[GENERATORS] = generators()
        if part is not StatePart.SHARED and self.has_local:
            tree |= self.local_tree()
        return tree

    def local_tree(self) -> dict[str, Any]:
        """Return the branch of this rank's own state."""
        own = self._branches(self.local_names(), with_gradients=self.gradients_are_local)
        return {LOCAL: {owner_key(self.owner): own}}

    def _branches(self, names: Collection[str], with_gradients: bool) -> dict[str, Any]:
        labels = self.parameter_names()
        tree = {name: self._state_of(name, self._objects[name], labels) for name in names}
        left_out = {name: transient_state(module) for name, module in self.modules().items() if name in names}
        if left_out := {name: buffers for name, buffers in left_out.items() if buffers}:
            tree[TRANSIENT] = left_out
        if with_gradients and self.is_accumulating:
            tree[GRADIENTS] = {
                str(index): item.grad for index, item in enumerate(self._parameters) if item.grad is not None
            }
        return tree

    def load_tree(self, tree: Any, is_ours: bool = False, with_others: bool = True) -> None:
        """Load what `tree()` gave, or what was put together from several."""
        own = self.check_names(tree)
        saved = {**tree, **own}
        left_out = {**tree.get(TRANSIENT, {}), **own.get(TRANSIENT, {})}
        for name, module in self.modules().items():
            load_module(module, saved[name], name)
            load_transient(module, left_out.get(name, {}))
        for name, thing in self.others().items() if with_others else ():
            _noting(f"loading {name}", partial(_load_other, thing, saved[name]))
        self.align_groups(saved)
        names = self.parameter_names()
        for name, optimizer in self.optimizers().items():
            load_optimizer(optimizer, saved[name], names, name, is_ours)
        if with_others:
            self.load_flags(tree)
        self.gradients_are_local |= GRADIENTS in own
        self.load_gradients(saved.get(GRADIENTS))

    def parameter_names(self) -> dict[int, str]:
        """Return id() of each parameter → its name. With several modules, the tracked name comes first."""
        modules = {name: unwrapped(module) for name, module in self.modules().items()}
        owned = {id(item) for optimizer in self.optimizers().values() for item in parameters_of(optimizer)}
        owners = [name for name, module in modules.items() if any(id(item) in owned for item in module.parameters())]
        names: dict[int, str] = {}
        for name in owners:
            for path, parameter in modules[name].named_parameters():
                names.setdefault(id(parameter), path if len(owners) == 1 else f"{name}.{path}")
        return names

    def known_names(self) -> set[str]:
        """Return the names that parameters of the tracked modules may have in an optimizer's state."""
        modules = {name: dict(unwrapped(module).named_parameters()) for name, module in self.modules().items()}
        return {path for named in modules.values() for path in named} | {
            f"{name}.{path}" for name, named in modules.items() for path in named
        }

    def align_groups(self, saved: dict[str, Any]) -> None:
        """Give the optimizers the parameter groups that they had when the state was saved."""
        modules = {name: dict(unwrapped(module).named_parameters()) for name, module in self.modules().items()}
        owned = {id(item) for optimizer in self.optimizers().values() for item in parameters_of(optimizer)}
        # As `parameter_names` has it: the path in the one module that optimizers have parameters of, or with its name.
        plain = sorted(modules.values(), key=lambda named: not any(id(item) in owned for item in named.values()))
        full = {f"{name}.{path}": item for name, named in modules.items() for path, item in named.items()}
        found = [
            align_groups(optimizer, saved[name], [*plain, full], name) for name, optimizer in self.optimizers().items()
        ]
        if any(found):
            self.refresh()

    def _notice_groups(self) -> None:
        """Check for groups that the script has added. Raise ScriptError for one that no replacement worker could
        make."""
        if group_sizes(self.optimizers().values()) == self._group_sizes:
            return
        known = {id(item) for item in self._parameters}
        self.refresh()
        for name, optimizer in self.optimizers().items():
            if any(id(item) not in known for item in parameters_of(optimizer)):
                raise ScriptError(
                    f"{name} got parameters in the loop that belong to no tracked module: a replacement worker could"
                    " not find them. Track the module they are of, or give them to the optimizer before job.track"
                )

    def load_flags(self, tree: dict[str, Any]) -> None:
        """Set the flags that were changed in the state of this tree. Older states have none."""
        self.flags.load(tree.get(FLAGS, {}))

    def load_gradients(self, saved: dict[str, Any] | None) -> None:
        """Restore the gradients of an accumulation over several steps. Without one, gradients are not part of the
        state."""
        self.is_accumulating = saved is not None
        if saved is not None:
            for index, parameter in enumerate(self._parameters):
                put_gradient(parameter, saved.get(str(index)))

    def volatile(self) -> StepBackup:
        """Return a copy of what a forward and a backward change, in case the step is repeated."""
        self._notice_groups()
        return capture(self._slots, self._extras, self.optimizers().values(), self.others(), self.flags)

    def restore_volatile(self, saved: StepBackup) -> None:
        """Put back what `volatile()` copied."""
        restore(saved)

    def restore_buffers(self, saved: StepBackup) -> None:
        """Put back those of the modules alone, and their extra state."""
        restore_buffers(saved)

    def gradients(self, is_after_update: bool) -> SavedGradients:
        """Save the gradients at a step's start. `is_after_update`: whether the step before made an update."""
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

    def check_names(self, tree: Any) -> dict[str, Any]:
        """Raise StateError unless what was saved is what is tracked. Returns what was saved of this rank's own."""
        if not isinstance(tree, dict):
            raise StateError("what was saved is not the state of tracked objects")
        local = set(self.local_names())
        own = own_branches(tree, self.owner, local)
        for saved, live in ((tree, set(self._objects) - local), (own, local)):
            names = set(saved) - {TRANSIENT, GRADIENTS, FLAGS, GENERATORS, LOCAL}
            if missing := sorted(live - names):
                raise StateError(
                    f"nothing was saved for {', '.join(missing)}: track what was tracked when it was saved"
                )
            if (extra := sorted(map(str, names - live))) and not self.is_part:
                raise StateError(f"{', '.join(extra)} was saved and is not tracked: track it, as when it was saved")
        return own


def _is_split(thing: Any) -> bool:
    return isinstance(thing, Optimizer) and is_split(thing)


def _load_other(thing: Any, saved: Any) -> None:
    thing.load_state_dict(revived(saved, thing.state_dict))


def _noting(what: str, action: Callable[[], Any]) -> Any:
    """Let a user's exception say where it happened."""
    try:
        return action()
    except Exception as error:  # whatever a user's own state_dict raises; it goes on as it is
        error.add_note(f"while {what}")
        raise
