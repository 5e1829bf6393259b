"""What stands around the models and optimizers that a script names in `job.track`: found, looked through, or refused.

    the inner module of a DistributedDataParallel    its wrapper is tracked in its place, as it is the wrapper whose
                                                     communication must be put in order after a fault
    a part of what is wrapped                        refused, with the class of what is wrapped
    a module that is wrapped after `job.track`, or   refused at the first step, with the class of what is wrapped
    that another tracked object holds
    optimizers and schedulers of `accelerate`        what is inside of them is tracked: they have no state of their own
    DDP's communication hooks with state             refused: the state (errors that are fed back, averages) is another
                                                     on each rank, and would be lost with a worker

A wrapper cannot be found from the module that it wraps, so wrappers are noted when they are made: `note_wrappers`,
called by `hf.init()`, adds one line to `DistributedDataParallel.__init__`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

from torch.distributed import ProcessGroup
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast.errors import ScriptError
from holdfast.state.modules import unwrapped
from holdfast.torch_compat import comm_hooks
from holdfast.worker.parallel.models import data_parallels

_made: list[weakref.ref[DistributedDataParallel]] = []
"""Every wrapper since `hf.init()`, the newest last."""
_NOTED = "_holdfast_notes"


def note_wrappers() -> None:
    """Have every DistributedDataParallel noted from now on. May be called again."""
    make = DistributedDataParallel.__init__
    if hasattr(make, _NOTED):
        return

    @functools.wraps(make)
    def noted(self: DistributedDataParallel, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        _made.append(weakref.ref(self, _made.remove))

    setattr(noted, _NOTED, True)
    DistributedDataParallel.__init__ = noted  # type: ignore[method-assign]


def resolved(objects: dict[str, Any]) -> dict[str, Any]:
    """Return what is to be tracked in place of what was named. Raises ScriptError for a part of what is wrapped."""
    found = {name: _with_wrapper(_without_accelerate(thing)) for name, thing in objects.items()}
    modules = [thing for thing in found.values() if isinstance(thing, Module)]
    tracked = {id(wrapper) for wrapper in data_parallels(modules)}
    for wrapper in _alive():
        if id(wrapper) not in tracked:
            for name, thing in found.items():
                if isinstance(thing, Module):
                    _refuse_part(name, thing, wrapper)
    return found


def not_among(modules: Iterable[Module]) -> list[DistributedDataParallel]:
    """Return the wrappers that are not among the modules, nor around the same as one of them."""
    tracked = [unwrapped(wrapper) for wrapper in data_parallels(modules)]
    return [wrapper for wrapper in _alive() if not any(unwrapped(wrapper) is inner for inner in tracked)]


def refuse_stateful_hooks(modules: Iterable[Module]) -> None:
    """Raise ScriptError for a communication hook whose state cannot be kept."""
    for wrapper in data_parallels(modules):
        for hook, state in comm_hooks(wrapper):
            if state is not None and not isinstance(state, ProcessGroup):
                raise ScriptError(
                    f"the communication hook {getattr(hook, '__name__', hook)} keeps state of its own on each rank"
                    f" ({type(state).__name__}), which a replaced worker would not have: use one without state, such as"
                    " fp16_compress_hook, or run this script without a session"
                )


def _alive() -> list[DistributedDataParallel]:
    return [wrapper for reference in reversed(_made) if (wrapper := reference()) is not None]


def _with_wrapper(thing: Any) -> Any:
    """Return the newest wrapper around a module, or the thing itself."""
    if not isinstance(thing, Module) or data_parallels([thing]):
        return thing
    inner = unwrapped(thing)
    return next((wrapper for wrapper in _alive() if unwrapped(wrapper) is inner), thing)


def _refuse_part(name: str, module: Module, wrapper: DistributedDataParallel) -> None:
    """Raise ScriptError if the module shares parts with what a wrapper that is not tracked has inside."""
    whole, part = unwrapped(wrapper), unwrapped(module)
    is_inside = any(one is part for one in whole.modules())
    if is_inside or any(one is whole for one in part.modules()):
        relation = "a part of" if is_inside else "around"
        raise ScriptError(
            f"{name} ({type(part).__name__}) is {relation} the {type(whole).__name__} that a DistributedDataParallel"
            f" wraps, and the wrapper is not tracked: track the wrapper, as in job.track({name}=ddp_model)"
        )


def _without_accelerate(thing: Any) -> Any:
    """Return what a wrapper of an optimizer or a scheduler holds, if it has no state of its own. By its shape:
    accelerate is not imported for it."""
    inner = getattr(thing, "optimizer", None)
    if isinstance(thing, Optimizer) and isinstance(inner, Optimizer) and thing.param_groups is inner.param_groups:
        return inner
    inner = getattr(thing, "scheduler", None)
    if not isinstance(thing, Module | Optimizer | LRScheduler) and isinstance(inner, LRScheduler):
        return inner if set(vars(thing)) >= {"scheduler", "optimizers"} else thing
    return thing
