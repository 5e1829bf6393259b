"""Copies of a tracked model that a script keeps in dictionaries and lists of its own: an average by hand, slow weights.

    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    …
    with step:
        …
        for name, p in model.named_parameters():
            shadow[name].lerp_(p.detach(), 0.1)         # not rolled back with the step, not given to a replacement

They are looked for where a script has them: in the variables of its functions and modules that are running, in what
its functions have closed over, in the attributes of its objects. What counts is a dictionary or list that has a tensor
of its own for every trainable parameter of a tracked model, before the step and after it, with other numbers. One that
is filled by a step for the first time is left alone: it may follow from that step alone, as a list of gradients does.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from holdfast.state.dtensors import local_of
from holdfast.torch_compat import version_of
from holdfast.worker.frame_variables import variables_of
from holdfast.worker.param_checksums import checksum, is_comparable
from holdfast.worker.snapshot.copy_schedule import memory_of

TENSORS_MAX = 20_000
"""The longest dictionary or list that is looked at."""
PARAMETERS_MIN = 2
"""Of a model. What has a single tensor is too easily taken for a copy of a smaller one."""

MODULE = "<module>"
"""The name of the code of a module, whose variables are its globals."""
FIRST = 3
"""How many items are looked at to see whether there are tensors in a container at all."""

Shapes = Counter[torch.Size]
IsOwn = Callable[[Any], bool]
"""Whether a module of this name is the user's or a framework's."""


class Holding(NamedTuple):
    """A place in the script where a dictionary or list is."""

    where: str
    read: Callable[[], Any]
    owner: Any
    """The object that has it as an attribute, or None."""


class FoundCopy(NamedTuple):
    """A copy of a model, as it was at the start of a step."""

    holding: Holding
    tensors: list[torch.Tensor]
    """Alive, so that no other gets the id of one that was there."""
    marks: list[tuple[int, int, int]]


def shapes_of_models(modules: Iterable[Module]) -> list[Shapes]:
    """Return the shapes of what is trained of each model: of the whole tensors, and of this rank's parts."""
    found: list[Shapes] = []
    for module in modules:
        parameters = [one for one in module.parameters() if one.requires_grad]
        if len(parameters) >= PARAMETERS_MIN:
            found += [Counter(one.shape for one in parameters), Counter(local_of(one).shape for one in parameters)]
    return found


class CopiesOfModels:
    """The copies there are at the start of a step. `models`: of `shapes_of_models`. `is_known`: whether a container, or
    the object that holds it, is tracked or ignored. `memory`: where the memory of known tensors begins."""

    def __init__(
        self,
        models: list[Shapes],
        is_own: IsOwn,
        is_known: Callable[[Any], bool],
        memory: set[int],
    ) -> None:
        self._models, self._is_known = models, is_known
        self._found: list[FoundCopy] = []
        seen: dict[int, Any] = {}
        for holding in holdings(is_own, is_container) if models else ():
            container = holding.read()
            if id(container) not in seen and (tensors := self._copy_in(container, memory)):
                seen[id(container)] = container
                self._found.append(FoundCopy(holding, tensors, marks_of(tensors)))

    def finding(self, memory: set[int]) -> str:
        """Return what to say of the first copy that is another now; empty if there is none."""
        for holding, _, before in self._found:
            container = holding.read()
            tensors = self._copy_in(container, memory)
            if not tensors or marks_of(tensors) == before:
                continue
            if not self._is_known(container) and not (holding.owner is not None and self._is_known(holding.owner)):
                return (
                    f"{holding.where} has a copy of the parameters of a tracked model, which changes in this step and"
                    " is not tracked: a replaced worker would not get it. Hold it in an object with state_dict and"
                    " load_state_dict (for an average, torch.optim.swa_utils.AveragedModel) and add that to"
                    " job.track(…), or declare with job.ignore(…) that it is not part of the state"
                )
        return ""

    def _copy_in(self, container: Any, memory: set[int]) -> list[torch.Tensor]:
        """Return the tensors of a container that is a copy of a model; empty if it is none."""
        tensors = [one for one in tensors_in(container) if memory_of(one) not in memory]
        if len(tensors) < PARAMETERS_MIN:
            return []
        shapes = Counter(one.shape for one in tensors), Counter(local_of(one).shape for one in tensors)
        return tensors if any(model <= mine for model in self._models for mine in shapes) else []


def holdings(is_own: IsOwn, is_wanted: Callable[[Any], bool]) -> Iterator[Holding]:
    """Yield where the script has things of a kind."""
    kinds: dict[type, bool] = {}
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if is_own(frame.f_globals.get("__name__", "")):
            yield from _variables_of(frame, is_wanted)
        frame = frame.f_back
    for thing in gc.get_objects():
        kind = type(thing)
        if kind is FunctionType:
            if thing.__closure__ and is_own(thing.__module__):
                yield from _closed_over(thing, is_wanted)
            continue
        if kind not in kinds:
            kinds[kind] = bool(getattr(kind, "__dictoffset__", 0)) and is_own(getattr(kind, "__module__", ""))
        if kinds[kind] and not issubclass(kind, Module | torch.optim.Optimizer | torch.Tensor | type):
            for name, value in list(vars(thing).items()):
                if is_wanted(value):
                    yield Holding(f"{name} of a {kind.__name__}", partial(_attribute, thing, name), thing)


def _variables_of(frame: FrameType, is_wanted: Callable[[Any], bool]) -> Iterator[Holding]:
    variables = variables_of(frame)
    for name, value in variables.items():
        if is_wanted(value):
            yield Holding(f"the variable {name}", partial(_local, frame, name), None)
    if frame.f_code.co_name != MODULE:
        for name, value in list(frame.f_globals.items()):
            if is_wanted(value):
                yield Holding(f"the variable {name}", partial(frame.f_globals.get, name), None)


def _closed_over(function: FunctionType, is_wanted: Callable[[Any], bool]) -> Iterator[Holding]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if is_wanted(_content_of(cell)):
            yield Holding(f"the variable {name}", partial(_content_of, cell), None)


def _attribute(thing: Any, name: str) -> Any:
    return vars(thing).get(name)


def _local(frame: FrameType, name: str) -> Any:
    return variables_of(frame).get(name)


def _content_of(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def is_container(value: Any) -> bool:
    """Return whether a value may hold a copy of a model. By type(): isinstance() asks lazy proxies for their class."""
    return issubclass(type(value), dict | list | tuple) and PARAMETERS_MIN <= len(value) <= TENSORS_MAX


def tensors_in(container: Any) -> list[torch.Tensor]:
    """Return the tensors of a container whose bits can be added up."""
    if not is_container(container):
        return []
    values = list(container.values() if issubclass(type(container), dict) else container)
    if not any(issubclass(type(one), torch.Tensor) for one in values[:FIRST]):
        return []  # most are long lists of other things
    return [one for one in values if issubclass(type(one), torch.Tensor) and is_comparable(one)]


def marks_of(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int, int]]:
    """Return what tells whether one of the tensors was changed, or another has taken its place."""
    return [(id(one), version_of(one), checksum([one])) for one in tensors]
