"""What is tracked comes back with the same bits, into fresh objects and into used ones, and goes on the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from holdfast.data.loader import Loader
from holdfast.errors import StateError
from holdfast.state.step_backup import put_gradient
from holdfast.state.tracked import Tracked
from holdfast.state.tree import FlatTree, flatten

Optimizer = torch.optim.Optimizer
schedulers = torch.optim.lr_scheduler

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
    "adam, foreach": lambda parameters: torch.optim.Adam(parameters, 0.01, foreach=True),
    "adam, learning rate as a tensor": lambda parameters: torch.optim.Adam(parameters, torch.tensor(0.01)),
    "adamw, amsgrad": lambda parameters: torch.optim.AdamW(parameters, 0.01, amsgrad=True),
    "adamw, fused": lambda parameters: torch.optim.AdamW(parameters, 0.01, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "sgd, momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, 0.01, momentum=0.5, centered=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.1),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, 0.1),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, 0.1),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, 0.01),
    "muon": lambda parameters: torch.optim.Muon([item for item in parameters if item.dim() == 2], 0.01),
}
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "multi step": lambda optimizer: schedulers.MultiStepLR(optimizer, [2, 3]),
    "cosine": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 7),
    "one cycle": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.1, total_steps=20),
    "cyclic": lambda optimizer: schedulers.CyclicLR(optimizer, 0.01, 0.1, 3, cycle_momentum=False),
    "lambda": lambda optimizer: schedulers.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "sequential": lambda optimizer: schedulers.SequentialLR(
        optimizer, [schedulers.LinearLR(optimizer, total_iters=3), schedulers.ExponentialLR(optimizer, 0.9)], [2]
    ),
    "warm restarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 3),
}


class Counting(nn.Module):
    """A buffer that is left out of the state_dict, and extra state: both decide bits."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.extra = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.extra += 2
        return x * (1 + 0.01 * self.calls) + 0.01 * self.extra

    def get_extra_state(self) -> dict[str, int]:
        return {"extra": self.extra}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.extra = state["extra"]


class Run:
    """A small training run with everything that can be tracked."""

    def __init__(self, optimizer: str = "adam", scheduler: str = "multi step", seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), Counting(), nn.Linear(8, 8), nn.Linear(8, 2))
        self.model[4].weight.requires_grad_(seed >= 0)
        self.optimizer = OPTIMIZERS[optimizer](list(self.model.parameters()))
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        self.ema = AveragedModel(self.model, use_buffers=True)
        self.tracked = Tracked(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            ema=self.ema,
        )

    def forward_backward(self, step: int) -> float:
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        loss = self.model(x).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        return loss.item()

    def train(self, step: int) -> float:
        loss = self.forward_backward(step)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.ema.update_parameters(self.model)
        return loss

    def copy(self) -> FlatTree:
        flat = self.tracked.state()
        return FlatTree(flat.skeleton, [tensor.clone() for tensor in flat.tensors])


def assert_same(a: FlatTree, b: FlatTree) -> None:
    assert a.skeleton == b.skeleton
    for left, right in zip(a.tensors, b.tensors, strict=True):
        assert left.dtype == right.dtype and torch.equal(left, right)


@pytest.mark.parametrize("steps_made", [0, 3], ids=["fresh", "used"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_bits_are_the_same_and_stay_so(optimizer: str, steps_made: int) -> None:
    run, other = Run(optimizer), Run(optimizer, seed=1)
    for step in range(4):
        run.train(step)
    for step in range(steps_made):
        other.train(100 + step)
    saved = run.copy()
    other.tracked.load(saved)
    assert_same(other.copy(), saved)
    for step in range(4, 7):
        assert run.train(step) == other.train(step)
        assert_same(run.copy(), other.copy())


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_go_on_as_they_would_have(scheduler: str) -> None:
    optimizer = "sgd, momentum" if scheduler == "one cycle" else "sgd"
    run, other = Run(optimizer, scheduler), Run(optimizer, scheduler, seed=1)
    for step in range(3):
        run.train(step)
    other.train(50)
    other.tracked.load(run.copy())
    for step in range(3, 8):
        assert run.train(step) == other.train(step)
        assert_same(run.copy(), other.copy())


def test_a_state_from_before_the_first_step_undoes_steps() -> None:
    run = Run()
    saved = run.copy()
    losses = [run.train(step) for step in range(2)]
    run.tracked.load(saved)
    assert_same(run.copy(), saved)
    assert [run.train(step) for step in range(2)] == losses


def test_live_tensors_stay_the_objects_they_are() -> None:
    run = Run()
    run.train(0)
    before = [tensor.data_ptr() for tensor in run.tracked.state().tensors]
    saved = run.copy()
    run.train(1)
    run.tracked.load(saved)
    assert [tensor.data_ptr() for tensor in run.tracked.state().tensors] == before
    assert_same(run.copy(), saved)


def test_the_saved_tensors_are_not_referenced_afterwards() -> None:
    run, other = Run(), Run(seed=1)
    run.train(0)
    saved = run.copy()
    other.tracked.load(saved)
    for tensor in saved.tensors:
        tensor.zero_()
    assert_same(other.copy(), run.copy())


def test_low_precision_parameters_keep_high_precision_state() -> None:
    """torch's load_state_dict would cast the state to the parameter's dtype."""

    def make() -> tuple[nn.Module, Optimizer]:
        model = nn.Linear(3, 3).to(torch.bfloat16)
        return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    model, optimizer = make()
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.rand(parameter.shape)
    saved = Tracked(model=model, optimizer=optimizer).state()
    fresh = Tracked(**dict(zip(("model", "optimizer"), make(), strict=True)))
    fresh.load(saved)
    assert_same(fresh.state(), saved)


def test_an_optimizers_state_is_named_by_its_parameters_in_their_order() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD([{"params": model[1].parameters()}, {"params": model[0].parameters()}], momentum=0.9)
    model[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    tree = Tracked(model=model, optimizer=optimizer).tree()
    names = ["1.weight", "1.bias", "0.weight", "0.bias"]
    assert list(tree["optimizer"]["state"]) == names
    assert [name for group in tree["optimizer"]["param_groups"] for name in group["params"]] == names


def test_two_models_with_an_optimizer_each() -> None:
    def make() -> Tracked:
        left, right = nn.Linear(2, 2), nn.Linear(2, 3)
        adam, sgd = torch.optim.Adam(left.parameters()), torch.optim.SGD(right.parameters(), momentum=0.9)
        (left(torch.ones(1, 2)).sum() + right(torch.ones(1, 2)).sum()).backward()
        adam.step()
        sgd.step()
        return Tracked(left=left, right=right, adam=adam, sgd=sgd)

    one, two = make(), make()
    two.load(one.state())
    assert_same(one.state(), two.state())
    assert "left.weight" in one.tree()["adam"]["state"]


def test_wrappers_are_looked_through() -> None:
    bare, wrapped = nn.Linear(2, 2), nn.Linear(2, 2)
    Tracked(model=torch.compile(wrapped, backend="eager")).load(Tracked(model=bare).state())
    assert torch.equal(bare.weight, wrapped.weight)


class Hooked(torch.optim.SGD):
    """An optimizer with a state_dict of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"mine": [group["lr"] for group in self.param_groups]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for group, rate in zip(self.param_groups, state["mine"], strict=True):
            group["lr"] = rate


def test_an_optimizer_with_its_own_state_dict_is_left_to_itself() -> None:
    model = nn.Linear(2, 2)
    one, two = Hooked(model.parameters(), 0.5), Hooked(model.parameters(), 0.1)
    Tracked(model=model, optimizer=two).load(Tracked(model=model, optimizer=one).state())
    assert two.param_groups[0]["lr"] == 0.5


def test_optimizers_that_share_groups_and_state_share_them_afterwards() -> None:
    """As an optimizer does that updates by another one: a scheduler of the outer one sets the inner one's rate."""

    def made(steps: int) -> tuple[Tracked, Optimizer, Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        outer = torch.optim.SGD(inner.param_groups, 0.1)
        outer.param_groups, outer.state = inner.param_groups, inner.state
        for _ in range(steps):
            model(torch.ones(1, 3)).sum().backward()
            inner.step()
            outer.param_groups[0]["lr"] *= 0.5
        return Tracked(model=model, outer=outer, inner=inner), outer, inner

    source, _, _ = made(3)
    fresh, outer, inner = made(0)
    fresh.load(source.state())
    assert outer.param_groups is inner.param_groups and outer.state is inner.state
    assert inner.param_groups[0]["lr"] == 0.1 * 0.5**3
    assert_same(fresh.state(), source.state())


@pytest.mark.parametrize(
    ("saved", "live", "message"),
    [
        ({"a": nn.Linear(2, 2)}, {"b": nn.Linear(2, 2)}, "nothing was saved for b"),
        ({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}, {"a": nn.Linear(2, 2)}, "b was saved and is not tracked"),
        ({"a": nn.Linear(2, 3)}, {"a": nn.Linear(2, 2)}, r"a\.weight: it is torch.float32 \[2, 2\]"),
        ({"a": nn.Linear(2, 2).double()}, {"a": nn.Linear(2, 2)}, r"a\.weight: .*saved was torch.float64"),
        ({"a": nn.Linear(2, 2, bias=False)}, {"a": nn.Linear(2, 2)}, "a has no saved value for bias"),
        ({"a": nn.Linear(2, 2)}, {"a": nn.Linear(2, 2, bias=False)}, "a does not have bias"),
    ],
)
def test_what_does_not_fit_is_named(saved: dict[str, Any], live: dict[str, Any], message: str) -> None:
    with pytest.raises(StateError, match=message):
        Tracked(**live).load(Tracked(**saved).state())


def test_another_optimizer_is_named() -> None:
    model = nn.Linear(2, 2)
    both = Tracked(model=model, optimizer=torch.optim.SGD(model.parameters()))
    half = Tracked(model=model, optimizer=torch.optim.SGD([model.weight]))
    with pytest.raises(StateError, match="optimizer does not have the parameter 'bias'"):
        half.load(both.state())
    with pytest.raises(StateError, match="optimizer has 2 parameters, saved were 1"):
        both.load(half.state())


@pytest.mark.parametrize("thing", [3, [nn.Linear(2, 2)], object()])
def test_an_object_without_a_state_is_refused(thing: Any) -> None:
    with pytest.raises(StateError, match=r"thing is a .* no state_dict"):
        Tracked(thing=thing)


def test_a_name_is_tracked_once() -> None:
    tracked = Tracked(model=nn.Linear(2, 2))
    with pytest.raises(StateError, match="model is tracked already"):
        tracked.add("model", nn.Linear(2, 2))


def test_a_state_that_is_not_one_of_tracked_objects_is_refused() -> None:
    with pytest.raises(StateError):
        Tracked(model=nn.Linear(2, 2)).load(flatten([1]))


def test_a_loader_is_tracked_like_anything_else() -> None:
    def make() -> Loader:
        return Loader(torch.arange(20.0), global_batch_size=4, seed=5, rank=0, world_size=1)

    run, other = make(), make()
    list(run.step_batches())
    run.commit()
    Tracked(data=other).load(Tracked(data=run).state())
    assert other.step == 1
    assert torch.equal(next(iter(run.step_batches())), next(iter(other.step_batches())))


class Own:
    """A user's own state with a tensor in it."""

    def __init__(self) -> None:
        self.values = {"seen": 0, "sum": torch.zeros(2)}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def test_a_step_is_repeated_from_where_it_began() -> None:
    """BatchNorm's buffers, the scaler (which forbids a second unscale_), the user's own state, the learning rate."""
    run, undisturbed = Run(), Run()
    for each in (run, undisturbed):
        each.own = Own()  # type: ignore[attr-defined]
        each.tracked.add("own", each.own)  # type: ignore[attr-defined]
        each.train(0)
    saved, gradients = run.tracked.volatile(), run.tracked.gradients(is_after_update=True)
    for _ in range(2):
        run.forward_backward(1)
        run.own.values["sum"] += 1  # type: ignore[attr-defined]
        run.optimizer.param_groups[0]["lr"] = 7.0
        run.model[2].calls = torch.full((), 9.0)
        run.tracked.restore_volatile(saved)
        run.tracked.restore_gradients(gradients)
    assert_same(run.copy(), undisturbed.copy())
    assert run.train(1) == undisturbed.train(1)
    assert_same(run.copy(), undisturbed.copy())


@pytest.mark.parametrize("is_after_update", [True, False])
def test_gradients_by_the_rule(is_after_update: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0](torch.ones(1, 2)).sum().backward()
    gradient = model[0].weight.grad
    before = copy.deepcopy(gradient)
    tracked = Tracked(model=model)
    saved = tracked.gradients(is_after_update)
    model(torch.ones(1, 2)).sum().backward()
    model[0].bias.grad = None
    tracked.restore_gradients(saved)
    assert model[1].weight.grad is None and model[1].bias.grad is None
    assert model[0].weight.grad is gradient
    expected = torch.zeros(2, 2) if is_after_update else before
    assert isinstance(gradient, torch.Tensor) and isinstance(expected, torch.Tensor)
    assert torch.equal(gradient, expected)
    assert model[0].bias.grad is not None


def test_parameters_are_listed_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    alone = nn.Parameter(torch.ones(1))
    tracked = Tracked(model=model, part=model[0], optimizer=torch.optim.SGD([*model.parameters(), alone]))
    assert len(tracked.parameters()) == 4
    assert list(tracked.modules()) == ["model", "part"] and list(tracked.optimizers()) == ["optimizer"]


def test_an_accumulated_gradient_from_the_host_goes_to_the_parameters_device() -> None:
    """A newcomer's parameters have none yet. `meta` is torch's device without memory."""
    parameter = nn.Parameter(torch.zeros(3, device="meta"))
    put_gradient(parameter, torch.ones(3))
    assert parameter.grad is not None and parameter.grad.device == parameter.device
