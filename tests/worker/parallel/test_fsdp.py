"""FSDP2 and HSDP on elastic groups: broken passes, killed ranks, newcomers that made believe."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast import torch_compat
from holdfast.worker.collectives import elastic_group, groups
from holdfast.worker.parallel import fsdp
from support.crowd import Crowd, Member, together
from worker.collectives.test_groups import hung, revoke_when_told

KINDS = {"sharded": 2, "hybrid": 4}


def build(kind: str) -> nn.Sequential:
    size = dist.get_world_size()
    if kind == "hybrid":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 33), nn.ReLU(), nn.Linear(33, 32), nn.ReLU(), nn.Linear(32, 4))
    layers: list[Any] = [fully_shard(layer, mesh=mesh) for layer in model if isinstance(layer, nn.Linear)]
    fully_shard(model, mesh=mesh)
    layers[0].set_modules_to_forward_prefetch([layers[1]])
    layers[2].set_modules_to_backward_prefetch([layers[1]])
    return model


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    model(batch(step, rank)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [local(parameter.data).clone() for parameter in model.parameters()]


def equal(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def reference(rank: int, kind: str, steps: int) -> list[torch.Tensor]:
    model = build(kind)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(steps):
        one_step(model, optimizer, step, rank)
    return weights(model)


class Break(Exception):
    pass


def raise_break(*_: Any) -> None:
    raise Break


def broken_pass(model: nn.Sequential, where: str, rank: int) -> None:
    value = batch(77, rank)
    handles: list[Any] = []
    if where == "forward":
        handles.append(model[2].register_forward_hook(raise_break))
    elif where == "backward":
        handles.append(model[2].register_full_backward_pre_hook(raise_break))
    try:
        if where == "accumulating":
            model.set_requires_gradient_sync(False)  # type: ignore[operator]
        output = model(value)
        if where != "no backward":
            output.sum().backward()
    except Break:
        pass
    finally:
        model.set_requires_gradient_sync(True)  # type: ignore[operator]
        for handle in handles:
            handle.remove()


def abort_and_go_on(member: Member, rank: int, size: int, kind: str) -> None:
    member.start(rank, size)
    wanted = reference(rank, kind, 5)
    member.switch(rank, size, 2)
    model = build(kind)
    optimizer = torch.optim.Adam(model.parameters())
    assert fsdp.is_sharded(model) and fsdp.shards_of(model) == 2
    assert not fsdp.is_sharded(nn.Linear(1, 1)) and fsdp.shards_of(nn.Linear(1, 1)) == 1
    for step, where in enumerate(("forward", "backward", "no backward", "accumulating", "backward")):
        broken_pass(model, where, rank)
        groups.revoke("broken", view=step + 2)
        member.switch(rank, size, step + 3)
        optimizer.zero_grad()
        torch_compat.reset_fsdp(model)
        one_step(model, optimizer, step, rank)
    assert equal(weights(model), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_broken_pass_the_next_gives_the_same_bits(kind: str) -> None:
    together(abort_and_go_on, KINDS[kind], kind)


# A killed rank and its replacement


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    if not optimizer.state:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    moments = [local(value) for state in optimizer.state.values() for value in state.values()]
    return [*(local(parameter.data) for parameter in model.parameters()), *moments]


def veteran(member: Member, rank: int, size: int, kind: str) -> Any:
    member.start(rank, size)
    wanted = reference(rank, kind, 6)
    member.switch(rank, size, 2)
    revoke_when_told(member, "dead", 2)
    model = build(kind)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(3):
        one_step(model, optimizer, step, rank)
    # What rank 1 has at this step is held by its neighbour too. Shards differ in size.
    saved = torch.cat([tensor.reshape(-1) for tensor in state_of(model, optimizer)])
    sizes = [size for (size,) in groups.gather([saved.numel()])]
    copy = torch.empty(sizes[1])
    if rank == 0:
        groups.recv(copy, 1)
    elif rank == 1:
        groups.send(saved, 0)
        member.say("hanging")
        time.sleep(60)
    hung(lambda: model(batch(3, rank)).square().mean().backward())
    member.hear("dead")
    member.switch(rank, size, 3)
    if rank == 0:
        groups.send(copy, 1)
    return go_on(model, optimizer, rank), equal(weights(model), wanted)


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> bool:
    optimizer.zero_grad()
    torch_compat.reset_fsdp(model)
    for step in range(3, 6):
        one_step(model, optimizer, step, rank)
    return True


def replacement(member: Member, rank: int, size: int, kind: str) -> bool:
    member.start(rank, size, 2, believe=True)
    build(kind)  # as the veterans did for comparison: subgroups find each other by the order in which they are made
    model = build(kind)
    optimizer = torch.optim.Adam(model.parameters())
    tensors = state_of(model, optimizer)
    member.hear("dead")
    member.switch(rank, size, 3)
    whole = torch.empty(sum(tensor.numel() for tensor in tensors))
    groups.recv(whole, 0)
    for tensor, part in zip(tensors, whole.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
    return go_on(model, optimizer, rank)


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_rank_is_replaced_and_the_bits_stay(kind: str) -> None:
    size = KINDS[kind]
    with Crowd() as crowd:
        for rank in range(size):
            crowd.add(veteran, rank, size, kind)
        crowd.add(replacement, 1, size, kind)
        crowd.hear("hanging")
        crowd.kill(1)
        crowd.say("dead")
        results = crowd.results()
        assert results[1] is None and results[-1] is True
        assert all(result == (True, True) for result in [results[0], *results[2:-1]])


def warm(member: Member) -> list[float]:
    hook, threads, random = sys.excepthook, threading.active_count(), torch.get_rng_state()
    fsdp.warm_up()
    assert not dist.is_initialized() and sys.excepthook is hook and threading.active_count() == threads
    assert torch.equal(torch.get_rng_state(), random) and elastic_group.state.connections is None
    member.start(0, 1)
    assert groups.default_group().group_name == "0"
    return reference(0, "sharded", 1)[0].flatten().tolist()


def test_warming_up_leaves_nothing_behind() -> None:
    with Crowd() as crowd:
        crowd.add(warm)
        assert crowd.results()[0]
