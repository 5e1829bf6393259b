"""An update that calls no hook, as a replayed CUDA graph makes, is found in the first steps and refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from holdfast.errors import ScriptError
from holdfast.state.tracked import Tracked
from holdfast.torch_compat import never_compiled
from holdfast.wire.progress_page import ProgressPage
from holdfast.worker import silent_updates
from holdfast.worker.transaction import TRIAL_STEPS, StepTransaction
from holdfast.worker.undo_copy import UndoCopy


class Loop:
    """Steps of a model with Adam. Those in `silent` are what a replayed graph would do: no hook, no new version."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.tracked = Tracked(model=self.model, optimizer=self.optimizer)
        self.transaction = StepTransaction(self.tracked, ProgressPage.private(), UndoCopy(self.tracked))
        self.optimizer.register_step_pre_hook(never_compiled(lambda *_: self._before()))

    def _before(self) -> None:
        if self.transaction.begin_update(self.optimizer):
            with self.transaction.committing():
                pass
        self.transaction.updating()

    def step(self, *, is_silent: bool = False, is_update: bool = True) -> None:
        self.transaction.remember()
        self.transaction.begin()
        self.model(torch.ones(3, 4)).sum().backward()
        if is_update and is_silent:
            self.replay()
        elif is_update:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.transaction.end_body():
            with self.transaction.committing():
                pass
        self.transaction.close()

    def replay(self) -> None:
        for parameter in self.model.parameters():
            state = self.optimizer.state[parameter]
            if not state:
                state |= {"step": torch.zeros(()), "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
            state["exp_avg"].data.add_(0.5)
            parameter.data.sub_(0.1)


def test_a_replayed_update_is_refused_in_the_first_step() -> None:
    with pytest.raises(ScriptError, match=r"the state of optimizer changed .* optimizer.step\(\) was not called"):
        Loop().step(is_silent=True)


@pytest.mark.parametrize("steps", [TRIAL_STEPS, TRIAL_STEPS + 3])
def test_a_graph_that_is_captured_later_is_found_when_it_is_replayed_for_the_second_time(steps: int) -> None:
    loop = Loop()
    for _ in range(steps):
        loop.step()
    loop.step(is_silent=True)
    with pytest.raises(ScriptError, match="captured CUDA graph"):
        loop.step(is_silent=True)


def test_accumulated_gradients_are_no_silent_updates() -> None:
    loop = Loop()
    for number in range(12):
        loop.step(is_update=number % 3 == 0)


@pytest.mark.parametrize("is_captured", [True, False])
def test_an_update_that_is_captured_into_a_graph_is_refused_then_and_there(
    is_captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(is_current_stream_capturing=lambda: is_captured)
    monkeypatch.setattr(silent_updates, "device_generator", lambda: ("cuda", device))
    if not is_captured:
        silent_updates.refuse_capture("adam")
        return
    with pytest.raises(ScriptError, match=r"adam.step\(\) is captured into a graph of the device"):
        silent_updates.refuse_capture("adam")


def test_an_update_by_an_optimizer_inside_of_another_is_that_of_both() -> None:
    """As SAM's: the outer one has a state too, which changes before the inner one updates."""
    loop = Loop()
    outer = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    outer.base_optimizer = loop.optimizer  # type: ignore[attr-defined]
    loop.tracked.add("outer", outer)
    for parameter in loop.model.parameters():
        outer.state[parameter]["old"] = parameter.detach().clone()
    for _ in range(TRIAL_STEPS + 1):
        for parameter in loop.model.parameters():
            parameter.register_hook(lambda gradient, kept=outer.state[parameter]["old"]: kept.add_(1) * 0 + gradient)
        loop.step()


@pytest.mark.filterwarnings("default")
def test_a_compiled_update_calls_its_hooks() -> None:
    """And they are not compiled with it: what they do is not for a tracer."""
    loop = Loop()
    eager, loop.optimizer.step = loop.optimizer.step, torch.compile(loop.optimizer.step, backend="eager")  # type: ignore[method-assign]
    for _ in range(TRIAL_STEPS + 2):
        loop.step()
        assert loop.transaction.has_updated
    assert eager is not loop.optimizer.step
