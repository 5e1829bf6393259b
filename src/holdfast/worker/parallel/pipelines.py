"""Schedules of `torch.distributed.pipelining` under changing membership: GPipe, 1F1B, interleaved, zero-bubble.

A schedule's first step finds out the shapes that its stages exchange: each stage runs a forward and a backward with
made-up inputs, and sends what it found to its neighbours. A replacement has to do that, so the others do it again with
it: in every new view all schedules are put back to where they were before their first step (`reset`), which also drops
the activations and gradients of a step that broke.

What finding out the shapes leaves behind would make a run with a fault another one than a run without: the numbers that
dropout drew, the statistics that a batch norm counted, the gradients that were dropped, a DDP that waits for a backward
and reduces the first micro-batch. So it leaves nothing behind (`prepare`): generators, buffers, gradients and DDP's
flags are put back after it, in the first step of a run too.

A schedule is no part of the state, and is named in `job.track(pipeline=schedule)` all the same, so that it is found.
These names of torch are private; they were seen in 2.13.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from holdfast.data.randomness import preserved_generators
from holdfast.errors import ScriptError
from holdfast.torch_compat import private
from holdfast.worker.parallel.models import data_parallels

SCHEDULES = "torch.distributed.pipelining.schedules"
SINGLE = ("_stage_forward_initialized", "_stage_backward_initialized")
"""Of a schedule with one stage a rank: whether the shapes are known."""
MULTI = ("_stages_forward_initialized", "_stages_backward_initialized")
"""The same of one with several."""
INITIALIZE = "_initialize_pp_stages"
"""The method that finds out the shapes."""
CACHES = ("fwd_cache", "bwd_cache", "backward_state", "dw_runner", "args_recv_info", "act_send_info", "grad_recv_info")
"""What a stage holds of the step under way, and of the exchange."""
RUNTIME = ("backward_counter", "fwd_recv_ops", "bwd_recv_ops", "unshard_ops", "unsharded_stages")
"""What a schedule of several stages holds of the step under way, beside them."""


def is_schedule(thing: Any) -> bool:
    """Return whether it is a pipeline schedule; torch's module is not imported to find that out."""
    module = sys.modules.get(SCHEDULES)
    return module is not None and isinstance(thing, module._PipelineSchedule)


def stages_of(schedule: Any) -> list[Any]:
    """Return the stages that this rank has of a schedule."""
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def stage_number(schedules: Iterable[Any]) -> int:
    """Return the number of the first stage that this rank has; 0 without a pipeline."""
    return min((stage.stage_index for schedule in schedules for stage in stages_of(schedule)), default=0)


@private
def prepare(schedule: Any) -> None:
    """Have the exchange of shapes leave nothing behind on this rank."""
    initialize = getattr(schedule, INITIALIZE)
    modules = [stage.submod for stage in stages_of(schedule)]

    def initialize_without_trace(*arguments: Any, **named: Any) -> Any:
        with _without_trace(modules):
            return initialize(*arguments, **named)

    setattr(schedule, INITIALIZE, initialize_without_trace)


@contextmanager
def _without_trace(modules: list[nn.Module]) -> Iterator[None]:
    """Put back, after this context, what a forward and a backward change."""
    buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    gradients = [(parameter, parameter.grad) for module in modules for parameter in module.parameters()]
    wrappers = data_parallels(modules)
    flags = [(wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync) for wrapper in wrappers]
    for wrapper in wrappers:
        wrapper.require_backward_grad_sync = False
    try:
        with preserved_generators():
            yield
    finally:
        for wrapper, (reduces, syncs_buffers) in zip(wrappers, flags, strict=True):
            wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync = reduces, syncs_buffers
    with torch.no_grad():
        for buffer, copy in buffers:
            buffer.copy_(copy)
    for parameter, gradient in gradients:
        parameter.grad = gradient


@private
def reset(schedule: Any) -> None:
    """Put a schedule back to where it was before its first step."""
    for name in MULTI if hasattr(schedule, "_stages") else SINGLE:
        assert hasattr(schedule, name), name
        setattr(schedule, name, False)
    schedule._internal_losses.clear()
    for name in RUNTIME:
        getattr(schedule, name, {}).clear()
    for stage in stages_of(schedule):
        stage.clear_runtime_states()
        for name in CACHES:
            getattr(stage, name).clear()
        stage.grad_send_info = None


def refuse_untracked(tracked: Iterable[Any]) -> None:
    """Raise ScriptError for a schedule that the script has made and not named: after a fault it would wait for shapes
    that no other rank sends."""
    if SCHEDULES not in sys.modules:
        return
    known = {id(schedule) for schedule in tracked}
    if not _schedules_but(known):
        return
    gc.collect()  # one that the script has dropped may be part of a cycle
    if found := _schedules_but(known):
        raise ScriptError(
            f"{found[0]} is not named in job.track: name it there, as in job.track(model=stage_module,"
            " optimizer=optimizer, pipeline=schedule), so that it is put in order after a fault"
        )


def _schedules_but(known: set[int]) -> list[str]:
    """Return the kinds of the living schedules, without those that are known."""
    base = sys.modules[SCHEDULES]._PipelineSchedule
    # By its type: to ask some objects for their class is to have them warn, or import.
    return [
        type(thing).__name__ for thing in gc.get_objects() if issubclass(type(thing), base) and id(thing) not in known
    ]
