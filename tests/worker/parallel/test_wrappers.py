"""What stands around models and optimizers is found, looked through, or refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import ScriptError
from holdfast.state.tracked import Tracked
from holdfast.worker.parallel.wrappers import note_wrappers, refuse_stateful_hooks, resolved
from holdfast.worker.script_checks import ScriptChecks
from support.crowd import Member, together


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))


def said(call: Any) -> str:
    try:
        call()
    except ScriptError as error:
        return str(error)
    return ""


def wrapped(member: Member, rank: int, size: int) -> list[Any]:
    member.start(rank, size)
    note_wrappers()
    note_wrappers()
    model, other = net(), net()
    first = DistributedDataParallel(model)
    ddp = DistributedDataParallel(model)
    around = nn.ModuleDict({"inner": model, "other": other})
    del first
    return [
        resolved({"model": model})["model"] is ddp,
        resolved({"model": ddp})["model"] is ddp,
        resolved({"model": torch.compile(model, backend="eager")})["model"] is ddp,
        resolved({"model": other})["model"] is other,
        resolved({"model": model, "part": model[1]})["part"] is model[1],
        said(lambda: resolved({"part": model[1]})),
        said(lambda: resolved({"both": around})),
    ]


def test_the_wrapper_is_tracked_in_place_of_the_inner_module() -> None:
    for found in together(wrapped, 2):
        *right, part, both = found
        assert right == [True] * 5
        assert part == (
            "part (Sequential) is a part of the Sequential that a DistributedDataParallel wraps, and the wrapper is not"
            " tracked: track the wrapper, as in job.track(part=ddp_model)"
        )
        assert "both (ModuleDict) is around the Sequential" in both


class Trainer:
    """An object of the user's own that has a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])


def hidden(member: Member, rank: int, size: int) -> list[str]:
    """Return what is said at the first step of a model that is wrapped after `track`, and of one inside an object."""
    member.start(rank, size)
    note_wrappers()
    model, other = net(), net()
    ddp, unused = DistributedDataParallel(model), DistributedDataParallel(other)

    def first_step(ignored: Any = None, **objects: Any) -> str:
        return said(lambda: ScriptChecks(Tracked(**objects), [ignored]).close())

    assert unused is not ddp  # alive, and no business of the session's
    return [
        first_step(model=model),
        first_step(part=model[1]),
        first_step(trainer=Trainer(model)),
        first_step(trainer=Trainer(ddp)),
        first_step(model=ddp),
        first_step(model=ddp, trainer=Trainer(ddp)),
        first_step(ddp, trainer=Trainer(model)),
    ]


def test_a_wrapper_that_is_not_tracked_itself_is_refused_at_the_first_step() -> None:
    for found in together(hidden, 2):
        assert [bool(text) for text in found] == [True] * 4 + [False] * 3, found
        assert found[0].startswith("a DistributedDataParallel around a Sequential is not tracked, though"), found[0]
        assert "job.track(model=ddp_model)" in found[0]


def hooked(member: Member, rank: int, size: int, kind: str) -> str:
    member.start(rank, size)
    ddp = DistributedDataParallel(net())
    if kind == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif kind == "group":
        ddp.register_comm_hook(torch.distributed.group.WORLD, default_hooks.allreduce_hook)
    else:
        ddp.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    return said(lambda: refuse_stateful_hooks([ddp]))


@pytest.mark.parametrize("kind", ["fp16", "group", "powersgd"])
def test_communication_hooks_with_state_are_refused(kind: str) -> None:
    (text,) = together(hooked, 1, kind)
    assert bool(text) == (kind == "powersgd")
    assert not text or "powerSGD_hook keeps state of its own on each rank (PowerSGDState)" in text


ACCELERATE = """
import torch, accelerate
from holdfast.worker.parallel.wrappers import resolved
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
accelerator = accelerate.Accelerator(cpu=True)
model, wrapped, rate = accelerator.prepare(model, optimizer, scheduler)
assert wrapped is not optimizer and rate is not scheduler
found = resolved({"optimizer": wrapped, "scheduler": rate, "own": optimizer})
assert found == {"optimizer": optimizer, "scheduler": scheduler, "own": optimizer}, found
"""


def test_what_accelerate_wraps_is_looked_through() -> None:
    pytest.importorskip("accelerate")
    done = subprocess.run([sys.executable, "-c", ACCELERATE], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
