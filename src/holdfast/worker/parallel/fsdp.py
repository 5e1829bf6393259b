"""`fully_shard` modules (FSDP2, HSDP) under changing membership.

An aborted forward or backward leaves a sharded model half-way: parameters gathered, gathers in flight, gradients of
whole parameters waiting to be scattered, the engine's final callback announced but never called.
`torch_compat.reset_fsdp` puts it back to where a step begins. torch 2.13 has the like for errors that happen between
collectives; here the collectives themselves are what broke, so nothing is waited for, and gradients that were not
reduced are dropped.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from holdfast.torch_compat import fsdp_devices, fsdp_groups, fsdp_states
from holdfast.worker.collectives import groups


def is_sharded(model: nn.Module) -> bool:
    return next(fsdp_states(model), None) is not None


def shards_of(model: nn.Module) -> int:
    """Return into how many different shards a model's parameters are cut, over all ranks; 1 if they are not."""
    return max((int(getattr(group.mesh_info, "shard_mesh_size", 1)) for group in fsdp_groups(model)), default=1)


def devices_of(model: nn.Module) -> set[torch.device]:
    """Return the devices on which a model's shards are gathered and computed with."""
    return fsdp_devices(model)


def warm_up() -> None:
    """Do once what the first `fully_shard`, the first pass and the first updates import and look up. Leaves no group
    and no state behind."""
    excepthook = sys.excepthook  # torch wraps it for good when a group is made
    # A view that no revoke can mean.
    groups.start(0, 1, None, view=sys.maxsize, timeout=timedelta(seconds=10))
    try:
        with torch.random.fork_rng(devices=[]):
            take_steps(fully_shard_on_cpu(nn.Linear(1, 1)))
    finally:
        groups.close()
        sys.excepthook = excepthook


def take_steps(model: nn.Module) -> None:
    parameters = list(model.parameters())
    for optimizer in (torch.optim.AdamW(parameters), torch.optim.SGD(parameters, momentum=0.9)):
        model(torch.zeros(1, 1, device="cpu")).sum().backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def fully_shard_on_cpu(module: nn.Module) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
