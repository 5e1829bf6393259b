"""DistributedDataParallel under changing membership: the same buckets on every rank, at any time.

The gradients of a bucket travel together, and ranks whose buckets differ crash each other inside gloo. Of itself DDP
lays its buckets out again after the first backward, by the order in which gradients came; a newcomer, whose first
backward is still to come, would have others than its peers. So the layout is fixed before the first step, as a function
of the model alone: parameters in reverse order, which is about the order in which gradients come, cut by the sizes that
DDP was given.

How: the reducer is made with the parameters reversed, told that their gradients came in just this order, and asked to
rebuild. That happens in a group of one, so no other rank is asked; and a reducer rebuilds only once in its life. With
`find_unused_parameters` it never does, and its first layout is a function of the model already.

Which parameters a reducer has is settled when DDP is built: those that require a gradient then. A script that freezes
or unfreezes parameters later changes nothing about it. So all reducers, of veterans and newcomers, are made for the
same set, whatever the flags are at the time.

After an aborted pass the same is done once more: a new reducer remembers nothing of the old one's half-done work. All
ranks must do it together, as in a static graph the first backward of a reducer communicates unlike the later ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel

from holdfast import torch_compat
from holdfast.errors import ScriptError
from holdfast.torch_compat import ProcessGroup
from holdfast.worker.collectives.local_only import LocalOnly

_reduced: WeakKeyDictionary[torch.nn.Module, frozenset[int]] = WeakKeyDictionary()
"""By DDP: id() of the parameters that its first reducer had. They live as long as it does."""


class LocalDdp(ProcessGroup):
    """A group of one, for asking a reducer to rebuild without asking others."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self._inner = LocalOnly(0, 1)

    def getSize(self) -> int:
        return 1

    def getRank(self) -> int:
        return 0

    def getBackendName(self) -> str:
        return "alone"

    def broadcast(self, tensors: Any, *options: Any) -> Any:
        return self._inner.broadcast(tensors, *options)


def pin_buckets(ddp: DistributedDataParallel) -> None:
    """Fix the layout of the buckets for good, before the first step, on every rank."""
    if hasattr(ddp, "reducer"):
        _reduced[ddp] = frozenset(map(id, torch_compat.reduced_parameters(ddp)))
    make_reducer(ddp)


def check_unfrozen(ddp: DistributedDataParallel) -> None:
    """Raise ScriptError for a parameter that DDP does not reduce, as it was frozen when DDP was built: each rank would
    train it with its own gradient, and no two ranks have the same model any more."""
    reduced = _reduced.get(ddp)
    if reduced is None or not ddp.require_forward_param_sync:  # or it is told to leave the reduction to others
        return
    for name, parameter in ddp.module.named_parameters():
        ignored = getattr(ddp, "parameters_to_ignore", ())
        if parameter.requires_grad and id(parameter) not in reduced and name not in ignored:
            raise ScriptError(
                f"{name} requires a gradient now and was frozen when DistributedDataParallel was built, which therefore"
                " does not average its gradient: the ranks' models would drift apart. Build DistributedDataParallel"
                " first, with find_unused_parameters=True, and freeze the parameter after that"
            )


@contextmanager
def flags_as_built(ddp: Any) -> Iterator[None]:
    """Have just the parameters of the first reducer require a gradient inside this block."""
    reduced = _reduced.get(ddp)
    parameters = list(ddp.module.parameters()) if reduced is not None else []
    now = [parameter.requires_grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.requires_grad_(reduced is not None and id(parameter) in reduced)
        yield
    finally:
        for parameter, is_on in zip(parameters, now, strict=True):
            parameter.requires_grad_(is_on)


def reset(ddp: DistributedDataParallel) -> None:
    """Start the next forward clean after an aborted pass, with the world as it is now; on every rank. Gradients that
    the aborted pass has left on the parameters are not touched."""
    make_reducer(ddp)


def make_reducer(ddp: Any) -> None:
    if not hasattr(ddp, "reducer"):
        return  # all its parameters are left to the user
    with flags_as_built(ddp):
        torch_compat.make_reducer(ddp, LocalDdp())
