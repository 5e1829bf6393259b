"""`fully_shard` modules (FSDP2, HSDP) under changing membership.

An aborted forward or backward leaves a sharded model half-way: parameters gathered, gathers in flight, gradients of
whole parameters waiting to be scattered, the engine's final callback announced but never called. `reset` puts it back
to where a step begins. torch 2.13 has the like for errors that happen between collectives; here the collectives
themselves are what broke, so nothing is waited for, and gradients that were not reduced are dropped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from holdfast.worker.collectives import groups


def is_sharded(model: nn.Module) -> bool:
    return next(states_of(model), None) is not None


def shards_of(model: nn.Module) -> int:
    """How many different shards its parameters are cut into, over all ranks; 1 if they are not."""
    groups = (group for state in states_of(model) for group in state._fsdp_param_groups)
    return max((int(getattr(group.mesh_info, "shard_mesh_size", 1)) for group in groups), default=1)


def reset(model: nn.Module) -> None:
    """Idle, sharded, nothing pending. Reduced gradients of the sharded parameters are not touched."""
    states = list(states_of(model))
    if any(state._device.type != "cpu" for state in states):
        torch.accelerator.synchronize()  # what is dropped below may be in use on another stream
    for state in states:
        reset_contexts(state)
        for group in state._fsdp_param_groups:
            reset_group(group)


def states_of(model: nn.Module) -> Iterator[Any]:
    """Each once: one state can serve several modules."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

    seen: set[int] = set()
    for module in model.modules():
        state = _get_module_fsdp_state(module)
        if state is not None and id(state) not in seen:
            seen.add(id(state))
            yield state


def reset_contexts(state: Any) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    state._training_state = TrainingState.IDLE
    state._modules_to_run_forward.clear()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    communication = state._comm_ctx
    if hasattr(communication, "post_forward_order"):  # made by the first forward
        communication.all_gather_state = None
        for name in ("post_forward_order", "reduce_scatter_states", "_last_post_reduce_events"):
            getattr(communication, name, []).clear()


def reset_group(group: Any) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
    from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

    group._training_state = TrainingState.IDLE
    for name in (
        "_all_gather_result",
        "_post_reduce_event",
        "_all_reduce_state",
        "_reshard_after_forward_event",
        "_partial_reduce_output",
    ):
        setattr(group, name, None)
    group._post_forward_indices.clear()
    for parameter in group.fsdp_params:
        parameter.unsharded_accumulated_grad = None
        parameter.grad_offload_event = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None
        parameter.to_sharded()  # each, as the pass may have ended between two of them
    group._sharded_state = ShardedState.SHARDED


def warm_up() -> None:
    """What the first `fully_shard`, the first pass and the first updates import and look up, done once. Leaves no group
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
        model(torch.zeros(1, 1)).sum().backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def fully_shard_on_cpu(module: nn.Module) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
