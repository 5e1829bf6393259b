"""Parameter groups that come and go in the middle of a run: removed again, handed over, or refused."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from holdfast.errors import ScriptError, StateError
from holdfast.state.arena import Arena
from holdfast.state.cached_state import CachedState
from holdfast.state.tracked import Tracked

Objects = tuple[nn.Sequential, nn.Linear, torch.optim.Optimizer, Tracked]


def build(kind: Callable[..., torch.optim.Optimizer] = torch.optim.Adam) -> Objects:
    torch.manual_seed(0)
    model, head = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), nn.Linear(2, 2)
    optimizer = kind(model[0].parameters(), lr=0.1)
    tracked = Tracked(model=model, head=head, optimizer=optimizer)
    tracked.flags.begin()
    return model, head, optimizer, tracked


def train(model: nn.Module, head: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    head(model(torch.ones(4, 3))).square().sum().backward()
    optimizer.step()
    model.zero_grad()
    head.zero_grad()


def bits(*modules: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for module in modules for parameter in module.parameters()]


def test_a_group_of_an_aborted_attempt_is_removed_with_its_state() -> None:
    model, head, optimizer, tracked = build()
    train(model, head, optimizer)
    saved = tracked.volatile()
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.7})
    train(model, head, optimizer)
    tracked.restore_volatile(saved)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1]
    assert {id(parameter) for parameter in optimizer.state} == {id(parameter) for parameter in model[0].parameters()}
    optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.7})  # the repeat does it again


def test_parameters_appended_to_a_group_go_again() -> None:
    model, head, optimizer, tracked = build()
    saved = tracked.volatile()
    optimizer.param_groups[0]["params"].append(model[1].weight)
    train(model, head, optimizer)
    tracked.restore_volatile(saved)
    assert len(optimizer.param_groups[0]["params"]) == 2 and model[1].weight not in optimizer.state


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("of", ["the same module", "another module"])
def test_a_newcomer_gets_the_groups_it_lacks(kind: Callable[..., torch.optim.Optimizer], of: str) -> None:
    model, head, optimizer, tracked = build(kind)
    train(model, head, optimizer)
    added = head if of == "another module" else model[1]
    optimizer.add_param_group({"params": list(added.parameters()), "lr": 0.7})
    train(model, head, optimizer)
    tracked.volatile()
    snapshot = Arena()
    snapshot.take(tracked.state(), 1)
    other_model, other_head, other_optimizer, newcomer = build(kind)
    snapshot.restore_into(newcomer)
    assert [group["lr"] for group in other_optimizer.param_groups] == [0.1, 0.7]
    assert list(newcomer.parameter_names().values()) == list(tracked.parameter_names().values())
    train(model, head, optimizer)
    train(other_model, other_head, other_optimizer)
    pairs = zip(bits(model, head), bits(other_model, other_head), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    assert CachedState(newcomer).state().skeleton == newcomer.state().skeleton


def test_groups_that_the_state_does_not_have_are_removed() -> None:
    model, head, optimizer, tracked = build()
    train(model, head, optimizer)
    snapshot = Arena()
    snapshot.take(tracked.state(), 1)
    optimizer.add_param_group({"params": list(head.parameters())})
    train(model, head, optimizer)
    snapshot.restore_into(tracked)
    assert len(optimizer.param_groups) == 1 and len(optimizer.state) == 2


def test_what_is_free_follows_the_groups() -> None:
    _, head, optimizer, tracked = build()
    assert len(tracked.free_parameters()) == 4
    optimizer.add_param_group({"params": list(head.parameters())})
    tracked.volatile()
    assert len(tracked.free_parameters()) == 2


def test_a_group_that_cannot_be_made_is_refused() -> None:
    _, _, optimizer, tracked = build()
    extra = nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [extra]})
    state = tracked.state()
    _, _, _, newcomer = build()
    with pytest.raises(StateError, match="was saved with 2 parameter groups and has 1"):
        newcomer.load(state)
    with pytest.raises(ScriptError, match="belong to no tracked module"):
        tracked.volatile()
