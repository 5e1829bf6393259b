"""What is done to a user's models: their communication made repeatable, and put back in order after a broken step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import UsageError
from holdfast.worker.parallel import data_parallel, fully_sharded


def data_parallels(modules: Iterable[torch.nn.Module]) -> list[DistributedDataParallel]:
    """All DistributedDataParallel wrappers among the modules and inside them."""
    return [part for module in modules for part in module.modules() if isinstance(part, DistributedDataParallel)]


def prepare_models(modules: Iterable[torch.nn.Module]) -> None:
    """Once, before the first step: so that a newcomer's model communicates exactly as a veteran's."""
    modules = list(modules)
    refuse_other_cuts(modules)
    for wrapper in data_parallels(modules):
        data_parallel.pin_buckets(wrapper)


def refuse_other_cuts(modules: Iterable[torch.nn.Module]) -> None:
    """Which rank has which part is known of `fully_shard` alone; taken for replicas, other parts would get lost."""
    for module in modules:
        for name, parameter in module.named_parameters():
            placements = parameter.placements if isinstance(parameter, DTensor) else ()
            cuts = [placement for placement in placements if not placement.is_replicate()]
            if len(cuts) > 1 or (cuts and not fully_sharded.is_sharded(module)):
                raise UsageError(
                    f"{name} is cut by something else than fully_shard ({placements}): tensor and pipeline parallel"
                    " models cannot be repaired online yet; run this script without a session"
                )


def reset_models(modules: Iterable[torch.nn.Module]) -> None:
    """In every new view, before its first step: nothing is left of a forward or backward that broke."""
    modules = list(modules)
    for wrapper in data_parallels(modules):
        data_parallel.reset(wrapper)
    for module in modules:
        if fully_sharded.is_sharded(module):
            fully_sharded.reset(module)


def align_buffers(modules: Iterable[torch.nn.Module]) -> None:
    """Before a commit: DDP's buffers as rank 0 has them. DDP does it at the start of the next forward; until then each
    rank has its own, and those of rank 0 would die with it."""
    for wrapper in data_parallels(modules):
        if wrapper.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            wrapper._sync_buffers()  # type: ignore[no-untyped-call]


def set_gradient_sync(modules: Iterable[torch.nn.Module], is_last: bool) -> None:
    """Whether the next backward averages over ranks: only a step's last does, the others add up."""
    for module in modules:
        for part in module.modules():
            if isinstance(part, DistributedDataParallel):
                part.require_backward_grad_sync = is_last
            elif isinstance(part, FSDPModule):
                part.set_requires_gradient_sync(is_last, recurse=False)


def leave_reduction(modules: Iterable[torch.nn.Module]) -> None:
    """DDP communicates nothing of itself: neither gradients, nor buffers at the next forward."""
    for wrapper in data_parallels(modules):
        wrapper.require_backward_grad_sync = False
        wrapper.require_forward_param_sync = False


def refuse_other_reductions(modules: Iterable[torch.nn.Module]) -> None:
    """Of a canonical reduction: raise UsageError for a model whose gradients somebody else reduces."""
    modules = list(modules)
    if is_sharded(modules) or any(hasattr(p, "full_tensor") for module in modules for p in module.parameters()):
        raise UsageError(
            "reduction='canonical' is for replicated models: the gradients of a sharded one are reduced by itself."
            " Use DistributedDataParallel, or the usual reduction"
        )
    for wrapper in data_parallels(modules):
        used = {
            "static_graph": wrapper.static_graph,
            "a communication hook": bool(wrapper._comm_hooks),
            "mixed_precision": wrapper.mixed_precision is not None,
        }
        if found := [name for name, is_used in used.items() if is_used]:
            raise UsageError(f"reduction='canonical' takes the place of DDP's: build DDP without {found[0]}")


def is_sharded(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether any of them is made for one rank of one world, be it a world of one."""
    return any(fully_sharded.is_sharded(module) for module in modules)


def communicates_in_forward(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether a forward pass is one of all ranks together, so that all must make as many."""
    parts = [part for module in modules for part in module.modules()]
    return any(isinstance(part, (FSDPModule, torch.nn.SyncBatchNorm)) for part in parts)


def shards_of(modules: Iterable[torch.nn.Module]) -> int:
    """Into how many different parts the state is cut; 1 if every rank has all of it."""
    return max((fully_sharded.shards_of(module) for module in modules), default=1)
