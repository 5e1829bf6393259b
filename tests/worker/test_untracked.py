"""What changes in a step and is not tracked is found, and nothing else is."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils
from torch.utils.data import DataLoader, TensorDataset

from holdfast.errors import ScriptError
from holdfast.state.tracked import Tracked
from holdfast.worker.untracked import Known, Survey, check_optimizer, check_parameters


class Both:
    """A user's own class, which gives the state of what it holds."""

    def __init__(self, *inner: Any) -> None:
        self.inner = {"all": list(inner)}

    def state_dict(self) -> dict[str, Any]:
        return {str(index): thing.state_dict() for index, thing in enumerate(self.inner["all"])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class World:
    """A model with an optimizer, and what else a script may have."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.ignored: list[Any] = []
        self.tracked: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def train(self) -> torch.Tensor:
        output = self.model(torch.randn(3, 4))
        output.sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return output.detach()


def found(prepare: Callable[[World], Callable[[], Any]]) -> str:
    """Return what is said of a step of this body; empty if nothing is."""
    world = World()
    body = prepare(world)
    survey = Survey(Known(Tracked(**world.tracked), world.ignored))
    world.train()
    body()
    try:
        survey.check()
    except ScriptError as error:
        return str(error)
    return ""


def scheduler(world: World) -> Callable[[], Any]:
    return lr_scheduler.StepLR(world.optimizer, 1).step


def scheduler_of_a_plateau(world: World) -> Callable[[], Any]:
    rate = lr_scheduler.ReduceLROnPlateau(world.optimizer)
    return lambda: rate.step(1.0)


def scheduler_of_another_optimizer(world: World) -> Callable[[], Any]:
    rate = lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1), 1)
    return lambda: rate.last_epoch


def tracked_schedulers(world: World) -> Callable[[], Any]:
    inner = [lr_scheduler.ConstantLR(world.optimizer), lr_scheduler.StepLR(world.optimizer, 1)]
    world.tracked["rate"] = lr_scheduler.SequentialLR(world.optimizer, inner, [2])
    world.tracked["own"] = Both(lr_scheduler.StepLR(world.optimizer, 1))
    return world.tracked["rate"].step


def forgotten_scheduler(world: World) -> Callable[[], Any]:
    rate = lr_scheduler.StepLR(world.optimizer, 1)
    rate.itself = rate  # type: ignore[attr-defined]  # garbage until the collector comes
    return lambda: None


def scaler(world: World) -> Callable[[], Any]:
    scale = torch.amp.GradScaler("cpu")
    return lambda: scale.scale(torch.ones(()))


def scaler_that_is_off(world: World) -> Callable[[], Any]:
    scale = torch.amp.GradScaler("cpu", enabled=False)
    return lambda: scale.scale(torch.ones(()))


def averaged_model(world: World) -> Callable[[], Any]:
    average = swa_utils.AveragedModel(world.model)
    return lambda: average.update_parameters(world.model)


def average_by_hand(world: World) -> Callable[[], Any]:
    average = copy.deepcopy(world.model)
    return lambda: [mine.data.mul_(0.5) for mine in average.parameters()]


def running_numbers(world: World) -> Callable[[], Any]:
    norm = nn.BatchNorm1d(4, affine=False)
    return lambda: norm(torch.randn(3, 4))


def gradient(world: World) -> Callable[[], Any]:
    head = nn.Linear(4, 1)
    return lambda: head(torch.randn(3, 4)).sum().backward()


def teacher(world: World) -> Callable[[], Any]:
    other = nn.Linear(4, 1).requires_grad_(False)
    return lambda: other(world.train()).sum()


def ignored(world: World) -> Callable[[], Any]:
    other = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    world.ignored += [other, lr_scheduler.StepLR(world.optimizer, 1)]
    return lambda: other(torch.randn(3, 4)).sum().backward()


def built_in_the_step(world: World) -> Callable[[], Any]:
    return lambda: nn.Linear(4, 1)(torch.randn(3, 4)).sum().backward()


def shared_parameters(world: World) -> Callable[[], Any]:
    other = nn.Sequential(world.model[0])
    return lambda: other(torch.randn(3, 4)).sum().backward()


class Momentum:
    """An optimizer that is not torch's. `is_lazy`: its state is made at the first update."""

    def __init__(self, model: nn.Module, is_lazy: bool = False) -> None:
        self.parameters = list(model.parameters())
        self.momentum = {} if is_lazy else dict(enumerate(map(torch.zeros_like, self.parameters)))

    @torch.no_grad()
    def step(self) -> None:
        for index, parameter in enumerate(self.parameters):
            momentum = self.momentum.setdefault(index, torch.zeros_like(parameter))
            momentum.mul_(0.9).add_(parameter)
            parameter.sub_(momentum, alpha=0.1)


class Stateful:
    """What is tracked of an optimizer of the user's own."""

    def __init__(self, momentum: Momentum) -> None:
        self.momentum = momentum

    def state_dict(self) -> dict[int, torch.Tensor]:
        return dict(self.momentum.momentum)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class Clipper:
    """Holds the parameters, and numbers that follow from each step alone."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.norm = torch.zeros(())

    def step(self) -> None:
        self.norm = torch.stack([parameter.detach().norm() for parameter in self.parameters]).norm()


class Inspector:
    """Holds the parameters, views of them and of their gradients, and what the tracked optimizer has beside them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.parameters = list(model.parameters())
        self.views = [parameter.data for parameter in self.parameters]
        self.gradients: list[torch.Tensor] = []
        self.moments: list[torch.Tensor] = []
        self.optimizer = optimizer

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.gradients = [parameter.grad.detach() for parameter in self.parameters if parameter.grad is not None]
        self.moments = [moment for state in self.optimizer.state.values() for moment in state.values()]


def inspector_by_hand(world: World) -> Callable[[], Any]:
    world.optimizer = world.tracked["optimizer"] = torch.optim.Adam(world.model.parameters(), lr=0.1)
    return Inspector(world.model, world.optimizer).step


class Outer(torch.optim.Optimizer):
    """An optimizer that updates by another one, as SAM does. `is_complete`: its state is that of the other."""

    def __init__(self, inner: torch.optim.Optimizer, is_complete: bool = False) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups, self.is_complete = inner, inner.param_groups, is_complete

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict() if self.is_complete else super().state_dict()


def nested(world: World, *, is_complete: bool = False, momentum: float = 0.9) -> torch.optim.Optimizer:
    inner = torch.optim.SGD(world.model.parameters(), lr=0.1, momentum=momentum)
    world.optimizer = world.tracked["optimizer"] = Outer(inner, is_complete)
    return inner


def optimizer_inside(world: World) -> Callable[[], Any]:
    nested(world)
    return lambda: None


def optimizer_inside_without_state(world: World) -> Callable[[], Any]:
    nested(world, momentum=0.0)
    return lambda: None


def optimizer_inside_whose_state_is_given(world: World) -> Callable[[], Any]:
    nested(world, is_complete=True)
    return lambda: None


def tracked_optimizer_inside(world: World) -> Callable[[], Any]:
    world.tracked["base"] = nested(world)
    return lambda: None


def momentum_by_hand(world: World) -> Callable[[], Any]:
    return Momentum(world.model).step


def lazy_momentum_by_hand(world: World) -> Callable[[], Any]:
    return Momentum(world.model, is_lazy=True).step


def ignored_momentum_by_hand(world: World) -> Callable[[], Any]:
    world.ignored = [momentum := Momentum(world.model)]
    return momentum.step


def tracked_momentum_by_hand(world: World) -> Callable[[], Any]:
    momentum = Momentum(world.model)
    world.tracked["momentum"] = Stateful(momentum)
    return momentum.step


def clipper_by_hand(world: World) -> Callable[[], Any]:
    return Clipper(world.model).step


def average_in_a_dictionary(world: World) -> Callable[[], Any]:
    shadow = {name: value.clone() for name, value in world.model.state_dict().items()}

    def follow() -> None:
        for name, value in world.model.state_dict().items():
            if value.is_floating_point():
                shadow[name].lerp_(value, 0.1)

    return follow


def average_made_again(world: World) -> Callable[[], Any]:
    """Another list of other tensors after each step."""
    shadow = [parameter.detach().clone() for parameter in world.model.parameters()]

    def follow() -> None:
        nonlocal shadow
        shadow = [(old + new.detach()) / 2 for old, new in zip(shadow, world.model.parameters(), strict=True)]

    return follow


class Average:
    """As it is often written: it has the model, and a dictionary of what it averages."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shadow = {name: one.detach().clone() for name, one in model.named_parameters() if one.requires_grad}

    @torch.no_grad()
    def update(self) -> None:
        for name, parameter in self.model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * parameter

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.shadow

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.shadow = dict(state)


def average_of_a_class(world: World) -> Callable[[], Any]:
    return Average(world.model).update


def tracked_average_of_a_class(world: World) -> Callable[[], Any]:
    world.tracked["average"] = average = Average(world.model)
    return average.update


def dictionary_of(update: Callable[[], Any]) -> dict[str, torch.Tensor]:
    """Return the dictionary that a function has closed over."""
    cells = inspect.getclosurevars(update).nonlocals
    return next(value for value in cells.values() if isinstance(value, dict))


def average_that_a_tracked_object_has(world: World) -> Callable[[], Any]:
    update = average_in_a_dictionary(world)
    world.tracked["average"] = average = Average(world.model)
    average.shadow = dictionary_of(update)
    return update


def ignored_dictionary(world: World) -> Callable[[], Any]:
    update = average_in_a_dictionary(world)
    world.ignored = [dictionary_of(update)]
    return update


def what_does_not_change(world: World) -> Callable[[], Any]:
    """Where the training began."""
    start = {name: value.clone() for name, value in world.model.state_dict().items()}
    return lambda: [start[name].sub(value).sum() for name, value in world.model.state_dict().items()]


class Observer:
    """Has the model, and keeps what follows from each step alone."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.last, self.gradients = model, torch.zeros(4, 4), list[torch.Tensor]()
        self.state = model.state_dict()
        self.views = [parameter.data for parameter in model.parameters()]

    def step(self) -> None:
        self.last = torch.randn(4, 4)
        self.gradients = [torch.randn_like(parameter) for parameter in self.model.parameters()]


def observer_by_hand(world: World) -> Callable[[], Any]:
    return Observer(world.model).step


@pytest.mark.parametrize(
    ("prepare", "text"),
    [
        (scheduler, "the scheduler StepLR sets a tracked optimizer's"),
        (scheduler_of_a_plateau, "the scheduler ReduceLROnPlateau sets a tracked optimizer's"),
        (scaler, "the GradScaler scales the loss in this step and is not tracked"),
        (averaged_model, "the AveragedModel is not tracked"),
        (average_by_hand, "of a Linear changes in this step, and the module is not tracked"),
        (running_numbers, "running_mean of a BatchNorm1d changes in this step"),
        (gradient, "weight of a Linear gets a gradient in this step"),
        (
            momentum_by_hand,
            "a Momentum holds parameters that are tracked, and tensors like them (momentum) that change",
        ),
        (lazy_momentum_by_hand, "tensors like them (momentum) that change in this step"),
        (optimizer_inside, "the SGD inside a Outer has a state of its own, which the state_dict() of the Outer leaves"),
        (optimizer_inside_without_state, ""),
        (optimizer_inside_whose_state_is_given, ""),
        (tracked_optimizer_inside, ""),
        (average_in_a_dictionary, "the variable shadow has a copy of the parameters of a tracked model, which"),
        (average_made_again, "the variable shadow has a copy of the parameters"),
        (average_of_a_class, "shadow of a Average has a copy of the parameters"),
        (tracked_average_of_a_class, ""),
        (average_that_a_tracked_object_has, ""),
        (ignored_dictionary, ""),
        (what_does_not_change, ""),
        (observer_by_hand, ""),
        (ignored_momentum_by_hand, ""),
        (tracked_momentum_by_hand, ""),
        (clipper_by_hand, ""),
        (inspector_by_hand, ""),
        (scheduler_of_another_optimizer, ""),
        (tracked_schedulers, ""),
        (forgotten_scheduler, ""),
        (scaler_that_is_off, ""),
        (teacher, ""),
        (ignored, ""),
        (built_in_the_step, ""),
        (shared_parameters, ""),
    ],
)
def test_what_changes_in_a_step_and_is_not_tracked(prepare: Callable[[World], Callable[[], Any]], text: str) -> None:
    said = found(prepare)
    assert text in said and bool(text) == bool(said), said


class Noise:
    """Generators of the script's own."""

    def __init__(self) -> None:
        self.torch = torch.Generator().manual_seed(5)
        self.numpy = np.random.default_rng(5)
        self.python = random.Random(5)
        self.shuffle = torch.Generator().manual_seed(5)
        self.loader = DataLoader(TensorDataset(torch.zeros(4)), shuffle=True, generator=self.shuffle)


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda noise: torch.randn(2, generator=noise.torch), "torch"),
        (lambda noise: noise.numpy.random(), "numpy"),
        (lambda noise: noise.python.random(), "python"),
        (lambda noise: torch.randn(2, generator=noise.torch.manual_seed(7)), ""),
        (lambda noise: list(noise.loader), ""),
        (lambda noise: (torch.randn(2), np.random.rand(), random.random()), ""),
    ],
)
def test_generators_of_the_scripts_own_are_warned_of(draw: Callable[[Noise], Any], name: str) -> None:
    world, noise = World(), Noise()
    surveys = [
        Survey(Known(Tracked(**world.tracked), ignored)) for ignored in ([], [noise.torch, noise.numpy, noise.python])
    ]
    draw(noise)
    assert (f"{name} of a Noise is a random generator" if name else "") in surveys[0].warning()
    assert bool(name) == bool(surveys[0].warning()) and not surveys[1].warning()


def test_an_optimizer_that_updates_must_be_tracked_or_inside_what_is() -> None:
    world = World()
    inside, other = (torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1) for _ in range(2))
    rate = lr_scheduler.StepLR(other, 1)
    known = Known(Tracked(**world.tracked, own=Both(inside), rate=rate), [])
    check_optimizer(world.optimizer, known)
    check_optimizer(inside, known)
    with pytest.raises(ScriptError, match="the optimizer SGD updates parameters in this step and is not tracked"):
        check_optimizer(other, known)  # its scheduler is tracked, which does not have its state


def test_the_parameters_of_a_tracked_optimizer_must_be_tracked_too() -> None:
    world = World()
    check_parameters("optimizer", world.optimizer, Known(Tracked(**world.tracked), []))
    check_parameters("optimizer", world.optimizer, Known(Tracked(optimizer=world.optimizer), [world.model]))
    check_parameters("optimizer", world.optimizer, Known(Tracked(own=Both(world.model)), []))
    known = Known(Tracked(optimizer=world.optimizer), [])
    with pytest.raises(ScriptError, match=r"optimizer updates a parameter of shape \(4, 4\) that is not tracked"):
        check_parameters("optimizer", world.optimizer, known)
