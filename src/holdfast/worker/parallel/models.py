"""What is done to a user's models: their communication made repeatable, and put back in order after a broken step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from holdfast import torch_compat
from holdfast.errors import ScriptError
from holdfast.worker.parallel import ddp, fsdp


def data_parallels(modules: Iterable[torch.nn.Module]) -> list[DistributedDataParallel]:
    """Return all DistributedDataParallel wrappers among the modules and inside them."""
    return [part for module in modules for part in module.modules() if isinstance(part, DistributedDataParallel)]


def prepare_models(modules: Iterable[torch.nn.Module]) -> None:
    """Make a newcomer's model communicate exactly as a veteran's; once, before the first step."""
    for wrapper in data_parallels(modules):
        ddp.pin_buckets(wrapper)
    for parameter in (one for module in modules for one in module.parameters() if isinstance(one, DTensor)):
        torch_compat.begin_dtensor_random(parameter.device_mesh)


def reset_models(modules: Iterable[torch.nn.Module]) -> None:
    """Remove what is left of a forward or backward that broke; in every new view, before its first step."""
    modules = list(modules)
    for wrapper in data_parallels(modules):
        ddp.reset(wrapper)
    for module in modules:
        if fsdp.is_sharded(module):
            torch_compat.reset_fsdp(module)


def check_unfrozen(modules: Iterable[torch.nn.Module]) -> None:
    """Raise ScriptError if a parameter was unfrozen that its DDP does not reduce."""
    for wrapper in data_parallels(modules):
        ddp.check_unfrozen(wrapper)


def align_buffers(modules: Iterable[torch.nn.Module]) -> None:
    """Give DDP's buffers the values of rank 0 before a commit. DDP does it at the start of the next forward; until then
    each rank has its own, and those of rank 0 would die with it."""
    for wrapper in data_parallels(modules):
        if wrapper.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            torch_compat.sync_buffers(wrapper)


def set_gradient_sync(modules: Iterable[torch.nn.Module], is_last: bool) -> None:
    """Set whether the next backward averages over ranks: only a step's last does, the others add up."""
    for module in modules:
        for part in module.modules():
            if isinstance(part, DistributedDataParallel):
                part.require_backward_grad_sync = is_last
            elif isinstance(part, FSDPModule):
                part.set_requires_gradient_sync(is_last, recurse=False)


def why_tied(modules: Iterable[torch.nn.Module]) -> str:
    """Return why a rank cannot leave out a forward and backward that do not reduce gradients, which other ranks make;
    empty if it can (micro_batches.py)."""
    modules = list(modules)
    if is_sharded(modules) or communicates_in_forward(modules):
        return "the model communicates in its forward pass (FSDP2, HSDP, SyncBatchNorm)"
    for wrapper in data_parallels(modules):
        # A reducer remembers which parameters were used since its last reduction. A new one has seen only the rest.
        for setting in ("static_graph", "find_unused_parameters"):
            if getattr(wrapper, setting):
                return f"DistributedDataParallel is built with {setting}=True"
    return ""


def leave_buffers(modules: Iterable[torch.nn.Module]) -> None:
    """Have DDP not broadcast its buffers in the next forward: the commit of the step before has aligned them."""
    for wrapper in data_parallels(modules):
        wrapper.require_forward_param_sync = False


def refuse_unreduced(modules: Iterable[torch.nn.Module]) -> None:
    """Raise ScriptError, at the commit of a step without an update, for gradients that are inside of the modules, where
    nothing keeps them."""
    if any(torch_compat.has_unreduced_gradients(module) for module in modules):
        raise ScriptError(
            "a step ended without an update and with gradients that are not reduced yet (set_requires_gradient_sync or"
            " set_requires_all_reduce is off): nothing keeps them between two steps. Take all the batches of an update"
            " in one `with step:` (hf.Loader with slots= does it), or have every backward reduce"
        )


def leave_reduction(modules: Iterable[torch.nn.Module]) -> None:
    """Have DDP communicate nothing of itself: neither gradients, nor buffers at the next forward."""
    for wrapper in data_parallels(modules):
        wrapper.require_backward_grad_sync = False
        wrapper.require_forward_param_sync = False


def refuse_other_reductions(modules: Iterable[torch.nn.Module]) -> None:
    """Raise ScriptError for a model whose gradients are reduced in another way than the canonical one."""
    modules = list(modules)
    if is_sharded(modules) or any(hasattr(p, "full_tensor") for module in modules for p in module.parameters()):
        raise ScriptError(
            "reduction='canonical' is for replicated models: the gradients of a sharded one are reduced by itself."
            " Use DistributedDataParallel, or the usual reduction"
        )
    for wrapper in data_parallels(modules):
        used = {
            "static_graph": wrapper.static_graph,
            "a communication hook": bool(torch_compat.comm_hooks(wrapper)),
            "mixed_precision": wrapper.mixed_precision is not None,
        }
        if found := [name for name, is_used in used.items() if is_used]:
            raise ScriptError(f"reduction='canonical' takes the place of DDP's: build DDP without {found[0]}")


def is_sharded(modules: Iterable[torch.nn.Module]) -> bool:
    """Return whether any of them is made for one rank of one world, be it a world of one."""
    return any(fsdp.is_sharded(module) for module in modules)


def cuts_for_any_world(modules: Iterable[torch.nn.Module]) -> bool:
    """Return whether FSDP2 alone cuts the modules, along all ranks of the world: then any number of ranks can."""
    modules, size = list(modules), dist.get_world_size()
    meshes = [one.device_mesh for module in modules for one in module.parameters() if isinstance(one, DTensor)]
    return shards_of(modules) == size and all(mesh.ndim == 1 and mesh.size() == size for mesh in meshes)


def communicates_in_forward(modules: Iterable[torch.nn.Module]) -> bool:
    """Return whether a forward pass is one of all ranks together, so that all must make as many."""
    parts = [part for module in modules for part in module.modules()]
    return any(isinstance(part, (FSDPModule, torch.nn.SyncBatchNorm)) for part in parts)


def gathering_devices(modules: Iterable[torch.nn.Module]) -> set[torch.device]:
    """Where sharded parameters are gathered and computed with. With offloading they are elsewhere in between."""
    return set().union(*map(fsdp.devices_of, modules))


def shards_of(modules: Iterable[torch.nn.Module]) -> int:
    """Return into how many different parts the state is cut; 1 if every rank has all of it."""
    return max((fsdp.shards_of(module) for module in modules), default=1)
