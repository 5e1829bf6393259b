"""DistributedDataParallel on elastic groups: one layout of buckets, and clean starts after broken passes."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.worker.collectives import groups
from holdfast.worker.parallel import ddp
from support.crowd import TIMEOUT, Crowd, Member, together
from worker.collectives.test_groups import hung, revoke_when_told

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "view": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


class Net(nn.Module):
    """Used in another order than defined, so that DDP would rebuild its buckets if it could."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 8)
        self.first = nn.Linear(16, 64)
        self.middle = nn.Linear(64, 64)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(torch.relu(self.middle(torch.relu(self.first(value)))))
        return result


def build(variant: str) -> DistributedDataParallel:
    torch.manual_seed(0)
    # Small buckets: several of them, of which each rank has some ready before others.
    return DistributedDataParallel(Net(), bucket_cap_mb=0.01, **VARIANTS[variant])


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + rank))


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    model(batch(step, rank)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def reference(rank: int, size: int, variant: str, steps: int) -> list[torch.Tensor]:
    """What an undisturbed run ends with, in a view of its own."""
    model = build(variant)
    ddp.pin_buckets(model)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(steps):
        one_step(model, optimizer, step, rank)
    return weights(model)


class Break(Exception):
    pass


def broken_pass(model: DistributedDataParallel, where: str, rank: int) -> None:
    """Ends in the middle, on every rank alike."""
    value = batch(77, rank).requires_grad_()
    handle = None
    if where == "backward":
        inner: Any = model.module
        handle = inner.middle.weight.register_hook(raise_break)
    try:
        if where == "accumulating":
            with model.no_sync():
                model(value).sum().backward()
        elif where == "no backward":
            model(value)
        else:
            model(value).sum().backward()
    except Break:
        pass
    finally:
        if handle is not None:
            handle.remove()


def raise_break(_: torch.Tensor) -> None:
    raise Break


def abort_and_go_on(member: Member, rank: int, size: int, variant: str) -> None:
    member.start(rank, size)
    wanted = reference(rank, size, variant, 4)
    member.switch(rank, size, 2)
    model = build(variant)
    ddp.pin_buckets(model)
    optimizer = torch.optim.Adam(model.parameters())
    view = 2
    for step, where in enumerate(("backward", "no backward", "accumulating", "backward")):
        broken_pass(model, where, rank)
        view += 1
        groups.revoke("broken", view=view - 1)
        member.switch(rank, size, view)
        optimizer.zero_grad()
        ddp.reset(model)
        one_step(model, optimizer, step, rank)
    assert equal(weights(model), wanted)


@pytest.mark.parametrize("variant", VARIANTS)
def test_after_a_broken_pass_the_next_gives_the_same_bits(variant: str) -> None:
    together(abort_and_go_on, 2, variant)


# A killed rank and its replacement


def veteran(member: Member, rank: int, size: int, variant: str) -> Any:
    member.start(rank, size)
    wanted = reference(rank, size, variant, 6)
    member.switch(rank, size, 2)
    revoke_when_told(member, "dead", 2)
    model = build(variant)
    ddp.pin_buckets(model)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(3):
        one_step(model, optimizer, step, rank)
    if rank == 1:
        member.say("hanging")
        time.sleep(60)
    hung(lambda: model(batch(3, rank)).square().mean().backward())
    member.hear("dead")
    return go_on(member, rank, size, model, optimizer) and equal(weights(model), wanted)


def go_on(member: Member, rank: int, size: int, model: Any, optimizer: Any) -> bool:
    member.switch(rank, size, 3)
    optimizer.zero_grad()
    ddp.reset(model)
    for tensor in state_of(model, optimizer):
        groups.broadcast(tensor, 0)
    for step in range(3, 6):
        one_step(model, optimizer, step, rank)
    return True


def state_of(model: Any, optimizer: Any) -> list[torch.Tensor]:
    if not optimizer.state:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [*(parameter.data for parameter in model.parameters()), *moments]


def replacement(member: Member, rank: int, size: int, variant: str) -> bool:
    member.start(0, size, 0, believe=True)
    model = build(variant)
    ddp.pin_buckets(model)
    optimizer = torch.optim.Adam(model.parameters())
    member.hear("dead")
    return go_on(member, rank, size, model, optimizer)


@pytest.mark.parametrize("variant", ["plain", "static"])
def test_a_rank_killed_in_backward_is_replaced_and_the_bits_stay(variant: str) -> None:
    with Crowd() as crowd:
        for rank in range(3):
            crowd.add(veteran, rank, 3, variant)
        crowd.add(replacement, 1, 3, variant)
        crowd.hear("hanging")
        crowd.kill(1)
        crowd.say("dead")
        assert crowd.results() == [True, None, True, True]


def shrink(member: Member, rank: int, size: int) -> Any:
    member.start(rank, size)
    model = build("plain")
    ddp.pin_buckets(model)
    model(batch(0, rank)).sum().backward()
    if rank == size - 1:
        return None
    member.switch(rank, size - 1, 2)
    ddp.reset(model)
    model.zero_grad()
    model(batch(1, rank)).sum().backward()
    alone = Net()
    alone.load_state_dict(model.module.state_dict())
    sum(alone(batch(1, other)).sum() for other in range(size - 1)).backward()
    for ours, whole in zip(model.parameters(), alone.parameters(), strict=True):
        assert whole.grad is not None
        torch.testing.assert_close(ours.grad, whole.grad / (size - 1))
    return None


def test_the_divisor_follows_the_world() -> None:
    together(shrink, 3)


def same_as_plain_gloo(member: Member, rank: int, size: int, variant: str) -> bool:
    plain = dist.PrefixStore("plain", member.store)
    dist.init_process_group("gloo", store=plain, rank=rank, world_size=size, timeout=TIMEOUT)
    wanted = reference(rank, size, variant, 4)
    dist.destroy_process_group()
    member.start(rank, size)
    return equal(reference(rank, size, variant, 4), wanted)


@pytest.mark.parametrize("variant", ["plain", "unused"])
def test_training_gives_the_same_bits_as_plain_gloo(variant: str) -> None:
    assert together(same_as_plain_gloo, 3, variant) == [True] * 3
