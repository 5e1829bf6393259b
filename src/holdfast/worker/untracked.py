"""State that a script changes in its steps and has not named in `job.track`.

Such state is not handed to a replacement and not put back when a step is repeated: the ranks would go on with different
numbers. It is looked for in two ways:

    optimizers    every update passes a global hook of torch: whatever updates must be tracked, with the models of the
                  parameters that it updates, as an optimizer's own state does not have them
    all others    once, around the first step of a fresh start, the objects of the process are looked at (`Survey`):
                  learning rate schedulers of tracked optimizers, gradient scalers in use, averaged models, modules
                  whose parameters or buffers changed in the step, or got a gradient, and objects of the user's own
                  that hold tracked parameters and tensors of the same shapes that changed in the step: optimizers by
                  hand; copies of a model in dictionaries and lists: averages by hand (untracked_copies.py);
                  iterators that the step draws from by hand (own_iterators.py). A
                  replacement does not look: the script is the one that was looked at

What belongs to a tracked object is known: the modules inside a module, and schedulers and optimizers inside an object
that gives their state with its own (SequentialLR, a user's own class). What the script declares with `job.ignore` is
left out.

Why the objects of the process and not hooks on modules: hooks that are there while a model is compiled become part of
what is compiled.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Sampler

from holdfast.errors import ScriptError
from holdfast.state.modules import unwrapped
from holdfast.state.optimizers import unwrapped as unwrapped_optimizer
from holdfast.state.tracked import Tracked
from holdfast.state.tree import flatten
from holdfast.torch_compat import is_scaler_in_use, tensors_held, version_of
from holdfast.worker.own_generators import OwnGenerators
from holdfast.worker.own_iterators import OwnIterators
from holdfast.worker.param_checksums import checksum, is_comparable
from holdfast.worker.snapshot.copy_schedule import memory_of
from holdfast.worker.untracked_copies import CopiesOfModels, shapes_of_models

DEPTH_MAX = 4
"""How deep the attributes of a tracked object are looked through for what it contains."""
ITEMS_MAX = 1000
"""The longest list or dictionary that is looked through: a longer one is data."""
FOREIGN_PACKAGES = frozenset({"torch", "holdfast", "numpy", "builtins", *sys.stdlib_module_names} - {"__main__"})
"""Whose objects are no optimizers written by hand."""
REMEDY = "add it to job.track(…), or declare with job.ignore(…) that it is not part of the state"


class Known:
    """The objects whose state is tracked, and those that the script declared as not part of it."""

    def __init__(self, tracked: Tracked, ignored: Iterable[Any]) -> None:
        self._kept: list[Any] = []  # alive, so that no other object gets the id of one that is known
        self._ids: set[int] = set()
        self.models = shapes_of_models(tracked.modules().values())
        self.inside: list[tuple[Optimizer, Optimizer]] = []
        """Optimizers that tracked optimizers have inside and that are not tracked themselves: (outer, inner)."""
        named = {id(thing) for thing in (*tracked.objects().values(), *ignored)}
        for thing in (*tracked.objects().values(), *ignored):
            self._add(thing, DEPTH_MAX)
        for outer in tracked.optimizers().values():
            inner = [one for one in vars(outer).values() if isinstance(one, Optimizer) and id(one) not in named]
            self.inside += [(outer, one) for one in inner if unwrapped_optimizer(outer) is not one]

    def __contains__(self, thing: Any) -> bool:
        return id(thing) in self._ids

    def memory(self) -> set[int]:
        """Return where the memory of the known tensors begins: of parameters and buffers, of their gradients, and of
        what known optimizers have beside them now. Another tensor there is a view of one of these."""
        tensors = [thing for thing in self._kept if isinstance(thing, torch.Tensor)]
        for optimizer in (thing for thing in self._kept if isinstance(thing, Optimizer)):
            tensors += [value for state in optimizer.state.values() for value in state.values()]
        tensors += [tensor.grad for tensor in tensors if isinstance(tensor, Parameter) and tensor.grad is not None]
        return {memory_of(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor) and is_comparable(tensor)}

    def holds(self, thing: Any) -> bool:
        """Return whether the attributes of a known object lead to this one: its state may be given with theirs."""
        level = [known for known in self._kept if not isinstance(known, Module | torch.Tensor)]
        for _ in range(DEPTH_MAX):
            if any(one is thing for one in level):
                return True
            level = [inner for one in level for inner in _values(one) if not isinstance(inner, Module | torch.Tensor)]
        return False

    def _remember(self, thing: Any) -> None:
        self._ids.add(id(thing))
        self._kept.append(thing)

    def _add(self, thing: Any, depth: int) -> None:
        if id(thing) in self._ids:
            return
        self._remember(thing)
        if isinstance(thing, Module):
            # Its state is that of its modules. An optimizer in an attribute of it is not part of its state_dict().
            for part in thing.modules():
                self._remember(part)
                for tensor in chain.from_iterable(table.values() for table in tensors_held(part)):
                    if tensor is not None:
                        self._remember(tensor)
        elif depth and not isinstance(thing, torch.Tensor):
            for inner in contents(thing):
                # A scheduler's state is that of the schedulers inside it; its optimizer has a state of its own.
                if not (isinstance(thing, LRScheduler) and isinstance(inner, Optimizer)):
                    self._add(inner, depth - 1)


def contents(thing: Any) -> Iterator[Any]:
    """Yield what an object holds in its attributes, lists and dictionaries, where that may have state of its own."""
    for value in _values(thing):
        if isinstance(value, dict | list | tuple) or callable(getattr(value, "state_dict", None)):
            yield value


def _values(thing: Any) -> Iterable[Any]:
    """Return the values of a list or dictionary that is not too long, or of an object's attributes."""
    if isinstance(thing, dict):
        return thing.values() if len(thing) <= ITEMS_MAX else ()
    if isinstance(thing, list | tuple):
        return thing if len(thing) <= ITEMS_MAX else ()
    attributes = getattr(thing, "__dict__", None)
    return attributes.values() if isinstance(attributes, dict) else ()


def check_optimizer(optimizer: Optimizer, known: Known) -> None:
    """Raise ScriptError for an optimizer that updates parameters and is not known."""
    if optimizer not in known:
        raise ScriptError(
            f"the optimizer {type(optimizer).__name__} updates parameters in this step and is not tracked, so that a"
            f" replaced worker would not get its state: {REMEDY}"
        )


def check_parameters(name: str, optimizer: Optimizer, known: Known) -> None:
    """Raise ScriptError for a tracked optimizer that updates a parameter of no tracked module."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in known:
                raise ScriptError(
                    f"{name} updates a parameter of shape {tuple(parameter.shape)} that is not tracked, so that a"
                    " replaced worker would not get it: add the model to job.track(…) too, or declare with"
                    " job.ignore(…) that it is not part of the state"
                )


def check_wrapper(wrapper: DistributedDataParallel, known: Known, ignored: Known) -> None:
    """Raise ScriptError for a wrapper that is not tracked itself, where what it wraps is: its communication would not
    be put in order after a fault."""
    whole = unwrapped(wrapper)
    if not any(part in known for part in (wrapper, *whole.modules())) or wrapper in ignored or whole in ignored:
        return
    raise ScriptError(
        f"a DistributedDataParallel around a {type(whole).__name__} is not tracked, though what it wraps is: it was"
        " made after job.track, or another tracked object holds it. Make it first, and name it itself, as in"
        " job.track(model=ddp_model), or declare with job.ignore(ddp_model) that no step uses it"
    )


class Marks(NamedTuple):
    """What a tensor was at the start of a step."""

    version: int
    bits: int
    gradient: tuple[int, int] | None
    """Identity and version of its gradient."""


class Survey:
    """The objects of this process around one step. Make it at the start of the step, `check` it at its end."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._marks = {
            id(tensor): (tensor, marks_of(tensor)) for _, _, tensor in tensors_of(objects_of(Module), self._known)
        }
        memory = known.memory()
        self._holders = [
            (thing, parameters, kept_beside(thing, parameters, memory))
            for thing, parameters in holders_of_parameters(known)
        ]
        self._copies = CopiesOfModels(known.models, _is_own_module, self._is_declared, memory)
        self._iterators = OwnIterators(_is_own_module, self._is_declared)
        self._generators = OwnGenerators(_is_own_module, self._is_declared, objects_of(DataLoader, Sampler))

    def check(self, drawn: Iterable[Any] = ()) -> None:
        """Raise ScriptError for the first thing that must be tracked and is not. `drawn`: what `step.batches` draws
        from."""
        if self._finding(drawn):
            gc.collect()  # what is found may be garbage that is not used any more
            if text := self._finding(drawn):
                raise ScriptError(text)

    def warning(self) -> str:
        """Return what to warn of; empty if there is nothing."""
        return self._generators.finding()

    def _finding(self, drawn: Iterable[Any]) -> str:
        found = objects_of(LRScheduler, GradScaler, Module)
        text = self._of_helpers(found) or self._of_modules(found) or self._of_holders() or self._of_inner_optimizers()
        return text or self._copies.finding(self._known.memory()) or self._iterators.finding(drawn)

    def _is_declared(self, thing: Any) -> bool:
        return thing in self._known or self._known.holds(thing)

    def _of_helpers(self, found: list[Any]) -> str:
        for thing in found:
            if thing in self._known:
                continue
            kind = type(thing).__name__
            if isinstance(thing, LRScheduler) and getattr(thing, "optimizer", None) in self._known:
                return f"the scheduler {kind} sets a tracked optimizer's learning rate and is not tracked: {REMEDY}"
            if isinstance(thing, GradScaler) and is_scaler_in_use(thing):
                return f"the {kind} scales the loss in this step and is not tracked: {REMEDY}"
            if isinstance(thing, AveragedModel):
                return f"the {kind} is not tracked: {REMEDY}"
        return ""

    def _of_inner_optimizers(self) -> str:
        for outer, inner in self._known.inside:
            own = {memory_of(value) for state in inner.state.values() for value in _tensors_among(state)}
            if own and not own <= {memory_of(value) for value in flatten(outer.state_dict()).tensors}:
                return (
                    f"the {type(inner).__name__} inside a {type(outer).__name__} has a state of its own, which the"
                    f" state_dict() of the {type(outer).__name__} leaves out: name it in job.track(…) too, as in"
                    " job.track(optimizer=optimizer, base=optimizer.base_optimizer)"
                )
        return ""

    def _of_holders(self) -> str:
        memory = self._known.memory() if self._holders else set()
        for thing, parameters, before in self._holders:
            now = kept_beside(thing, parameters, memory)
            changed = [name for name, (_, marks) in now.items() if name not in before or before[name][1] != marks]
            if changed and not self._known.holds(thing):
                return (
                    f"a {type(thing).__name__} holds parameters that are tracked, and tensors like them ({changed[0]})"
                    " that change in this step, and is not tracked: give it state_dict and load_state_dict and"
                    " add it to job.track(…), or declare with job.ignore(…) that it is not part of the state"
                )
        return ""

    def _of_modules(self, found: list[Any]) -> str:
        for module, name, tensor in tensors_of(found, self._known):
            _, before = self._marks.get(id(tensor), (None, None))
            if before is None:
                continue  # made in this step
            now = marks_of(tensor)
            where = f"{name} of a {type(module).__name__}"
            if (now.version, now.bits) != (before.version, before.bits):
                return f"{where} changes in this step, and the module is not tracked: {REMEDY}"
            if now.gradient is not None and now.gradient != before.gradient:
                return (
                    f"{where} gets a gradient in this step, and the module is not tracked: {REMEDY};"
                    " if it is not trained, set requires_grad_(False)"
                )
        return ""


def _tensors_among(state: Any) -> list[torch.Tensor]:
    return [value for value in _values(state) if isinstance(value, torch.Tensor)]


def objects_of(*kinds: type) -> list[Any]:
    """Return all objects of these types that the garbage collector knows."""
    # By type(): isinstance() asks lazy proxies for their class, which may import a package.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kinds)]


def holders_of_parameters(known: Known) -> list[tuple[Any, list[torch.Tensor]]]:
    """Return the objects of the user's own classes that are not known and hold known parameters, with those."""
    found, own = list[tuple[Any, list[torch.Tensor]]](), dict[type, bool]()
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in own:
            own[kind] = _is_own_class(kind)
        if own[kind] and thing not in known:
            parameters: list[torch.Tensor] = [
                tensor for _, tensor in _tensors_held_by(thing) if isinstance(tensor, Parameter) and tensor in known
            ]
            if parameters:
                found.append((thing, parameters))
    return found


def kept_beside(
    thing: Any, parameters: list[torch.Tensor], memory: set[int]
) -> dict[str, tuple[list[torch.Tensor], Any]]:
    """Return the tensors in an object that are like the parameters it holds, and not in this memory (`Known.memory`),
    by attribute: themselves, and what tells whether they were changed."""
    shapes = {parameter.shape for parameter in parameters}
    found: dict[str, tuple[list[torch.Tensor], list[Any]]] = {}
    for name, tensor in _tensors_held_by(thing):
        if tensor.shape in shapes and tensor.dim() and is_comparable(tensor) and memory_of(tensor) not in memory:
            tensors, marks = found.setdefault(name, ([], []))
            tensors.append(tensor)
            marks.append((id(tensor), version_of(tensor), checksum([tensor])))
    return dict(found)


def _tensors_held_by(thing: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in an object's attributes, and in lists and dictionaries there: attribute, tensor."""
    for name, value in list(vars(thing).items()):
        kind = type(value)  # not isinstance(), which asks lazy proxies for their class
        for inner in list(_values(value)) if issubclass(kind, list | tuple | dict) else (value,):
            if issubclass(type(inner), torch.Tensor):
                yield name, inner


def _is_own_class(kind: type) -> bool:
    """Return whether a class is the user's or a framework's, and neither torch's, ours nor Python's."""
    if issubclass(kind, Module | Optimizer | LRScheduler | torch.Tensor | type) or not hasattr(kind, "__dict__"):
        return False
    return bool(kind.__dictoffset__) and _is_own_module(getattr(kind, "__module__", ""))


def _is_own_module(name: Any) -> bool:
    return str(name).partition(".")[0] not in FOREIGN_PACKAGES


def tensors_of(found: Iterable[Any], known: Known) -> Iterator[tuple[Module, str, torch.Tensor]]:
    """Yield the parameters and buffers of modules that are not known: module, name in it, tensor."""
    for module in found:
        if not issubclass(type(module), Module) or module in known:
            continue
        attributes = vars(module)
        for table in ("_parameters", "_buffers"):
            for name, tensor in (attributes.get(table) or {}).items():
                if is_comparable(tensor) and tensor not in known:
                    yield module, name, tensor


def marks_of(tensor: torch.Tensor) -> Marks:
    """Return what tells whether the tensor was changed. Bits too: writes through `.data` leave no other trace."""
    gradient = tensor.grad if tensor.is_leaf else None
    return Marks(
        version_of(tensor), checksum([tensor]), None if gradient is None else (id(gradient), version_of(gradient))
    )
