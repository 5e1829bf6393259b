"""Gradients that one optimizer carries over another's update are refused; what is left over and cleared is not."""

from typing import Any

import pytest
import torch

from holdfast.errors import ScriptError
from holdfast.state.tracked import Tracked
from holdfast.wire.progress_page import ProgressPage
from holdfast.worker.transaction import StepTransaction
from holdfast.worker.undo_copy import UndoCopy


class Pair:
    """Two models with an optimizer each, and a transaction over both."""

    def __init__(self) -> None:
        self.models = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in self.models]
        first, second = self.optimizers
        self.tracked = Tracked(a=self.models[0], b=self.models[1], first=first, second=second)
        self.transaction = StepTransaction(self.tracked, ProgressPage.private(), UndoCopy(self.tracked))

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Do what the engine does before an optimizer's update."""
        assert not self.transaction.begin_update(optimizer), "a copy is kept: it is committed at the end"
        self.transaction.updating()

    def finish(self) -> None:
        """Do what the engine does at the end of a step's body."""
        assert self.transaction.end_body()
        with self.transaction.committing():
            pass
        self.transaction.close()

    def step(self, *updates: int, clears: tuple[int, ...] = (), set_to_none: bool = True) -> None:
        """Clear, run both models backward, update some, and clear those."""
        self.transaction.remember()
        self.transaction.begin()
        for index in clears:
            self.optimizers[index].zero_grad(set_to_none)
        sum(model(torch.ones(1, 2)).sum() for model in self.models).backward()
        for index in updates:
            self.update(self.optimizers[index])
            self.optimizers[index].step()
            self.optimizers[index].zero_grad(set_to_none)
        self.finish()


def test_an_accumulation_over_another_optimizers_update_is_refused() -> None:
    pair = Pair()
    pair.step(0)
    with pytest.raises(ScriptError, match="second applies gradients that it has accumulated"):
        pair.step(0, 1)


def test_what_lies_there_before_an_update_that_computes_is_let_be() -> None:
    """LBFGS: its closure clears the gradients, and makes them again."""
    pair = Pair()
    for _ in range(3):
        pair.transaction.remember()
        pair.transaction.begin()
        assert not pair.transaction.begin_update(pair.optimizers[0], computes=True)
        pair.transaction.updating()
        pair.optimizers[0].zero_grad()
        pair.models[0](torch.ones(1, 2)).sum().backward()
        pair.optimizers[0].step()
        pair.finish()


def test_what_is_cleared_before_the_backward_is_left_over() -> None:
    pair = Pair()
    for _ in range(3):
        pair.step(0, clears=(0,))
        pair.step(1, clears=(1,))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_optimizers_that_update_together_are_let_be(set_to_none: bool) -> None:
    pair = Pair()
    for _ in range(3):
        pair.step(0, 1, set_to_none=set_to_none)


def test_an_accumulation_of_all_is_let_be() -> None:
    pair = Pair()
    for _ in range(2):
        pair.step()
        pair.step(0, 1)


@pytest.mark.parametrize("writes", [lambda p: p.data.add_(1), lambda p: p.detach().add_(1)])
def test_parameters_changed_before_the_update_are_put_back_however_they_were_written(writes: Any) -> None:
    pair = Pair()
    for is_broken in (False, False, True):
        before = [parameter.detach().clone() for parameter in pair.models[0].parameters()]
        pair.transaction.remember()
        pair.transaction.begin()
        for parameter in pair.models[0].parameters():
            writes(parameter)
        pair.transaction.undo() if is_broken else pair.finish()
    assert all(map(torch.equal, before, pair.models[0].parameters()))


def test_a_cleared_gradient_that_comes_back_as_the_same_object_is_let_be() -> None:
    pair = Pair()
    views = {parameter: torch.ones_like(parameter) for parameter in pair.models[1].parameters()}  # DDP's bucket views

    def step(*updates: int) -> None:
        pair.transaction.remember()
        pair.transaction.begin()
        for index in updates:
            pair.optimizers[index].zero_grad()
            for parameter in pair.models[index].parameters():
                parameter.grad = views.get(parameter, torch.ones_like(parameter))
            pair.update(pair.optimizers[index])
            pair.optimizers[index].step()
        pair.finish()

    for updates in ((0, 1), (0,), (0, 1)):
        step(*updates)


def test_a_delayed_update_is_refused() -> None:
    """Apply what the step before has left, then compute what the next one applies."""
    pair = Pair()

    def step() -> None:
        pair.transaction.remember()
        pair.transaction.begin()
        for optimizer in pair.optimizers:
            pair.update(optimizer)
            optimizer.step()
            optimizer.zero_grad()
        sum(model(torch.ones(1, 2)).sum() for model in pair.models).backward()
        pair.finish()

    step()
    with pytest.raises(ScriptError, match="applies the gradients of the step before"):
        step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_cleared_at_the_start_of_a_step_are_let_be(set_to_none: bool) -> None:
    pair = Pair()
    for _ in range(3):
        pair.transaction.remember()
        pair.transaction.begin()
        for optimizer in pair.optimizers:
            optimizer.zero_grad(set_to_none)
        sum(model(torch.ones(1, 2)).sum() for model in pair.models).backward()
        for optimizer in pair.optimizers:
            pair.update(optimizer)
            optimizer.step()
        pair.finish()
