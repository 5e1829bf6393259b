"""Models of which each rank has a part."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_

import holdfast as hf

from .bench import DDP, Bench, Net, Training, variation


def shard(net: Net, **choices: Any) -> Net:
    for layer in (net.first, net.middle):
        fully_shard(layer, **choices)
    return fully_shard(net, **choices)


@variation()
def fsdp(bench: Bench) -> Training:
    return Training(shard(Net()))


@variation()
def fsdp_mixed_precision(bench: Bench) -> Training:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return Training(shard(Net(), mp_policy=policy))


@variation()
def fsdp_kept_after_forward(bench: Bench) -> Training:
    return Training(shard(Net(), reshard_after_forward=False))


@variation()
def fsdp_clipped(bench: Bench) -> Training:
    model = shard(Net())

    def update(step: hf.Step) -> None:
        clip_grad_norm_(model.parameters(), 0.1)
        training.optimizer.step()
        training.optimizer.zero_grad()

    training = Training(model, update=update)
    return training


@variation(ranks=4)
def hsdp(bench: Bench) -> Training:
    mesh = init_device_mesh(bench.device, (2, bench.job.world_size // 2), mesh_dim_names=("replicate", "shard"))
    return Training(shard(Net(), mesh=mesh))


@variation()
def zero_redundancy_optimizer(bench: Bench) -> Training:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported

    model = DDP(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)
    # Its own state_dict wants all ranks to consolidate it first.
    return Training(
        model, optimizer, state=lambda: {"model": model.state_dict(), "own part": optimizer.optim.state_dict()}
    )
