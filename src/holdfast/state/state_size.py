"""How large a state is, or will be once its optimizers have made theirs."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from holdfast.core.memory_plan import pinned_bytes
from holdfast.state.dtensors import local_of
from holdfast.state.tracked import Tracked


def expected_bytes(tracked: Tracked) -> int:
    """Return the bytes of this rank's state after its first update: most optimizers make their state in it."""
    now = sum(bytes_of(tensor) for tensor in tracked.state().tensors)
    return now + sum(_still_to_come(optimizer) for optimizer in tracked.optimizers().values())


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of this rank's part of a tensor."""
    own = local_of(tensor)
    return own.numel() * own.element_size()


def staging_bytes(tensors: list[torch.Tensor]) -> int:
    """Return the pinned memory through which tensors of a device pass on their way to the host."""
    return sum(pinned_bytes(bytes_of(tensor)) for tensor in tensors if not tensor.is_cpu)


def _still_to_come(optimizer: Optimizer) -> int:
    defaults = optimizer.defaults
    moments = 2 if "betas" in defaults else 1 if defaults.get("momentum") else 0
    if not moments:
        return 0
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return moments * sum(bytes_of(parameter) for parameter in parameters if not optimizer.state.get(parameter))
