"""Pipeline schedules between views: the exchange of shapes leaves nothing behind, and a broken step neither."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.functional import mse_loss

from holdfast.errors import ScriptError
from holdfast.worker.collectives import groups
from holdfast.worker.parallel import pipelines


@pytest.fixture(autouse=True)
def world_of_one() -> Iterator[None]:
    groups.start(0, 1, None, view=1, timeout=timedelta(seconds=10))
    yield
    groups.close()


class Half(nn.Module):
    """Counts its passes, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: torch.Tensor
        self.layer, self.dropout = nn.Linear(2, 2), nn.Dropout(0.5)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return self.dropout(self.layer(x))


def schedule_of(*modules: Half) -> Any:
    stages = [PipelineStage(m, n, len(modules), torch.device("cpu")) for n, m in enumerate(modules)]
    if len(stages) == 1:
        return ScheduleGPipe(stages[0], n_microbatches=2, loss_fn=mse_loss)
    return ScheduleInterleaved1F1B([*stages], n_microbatches=2, loss_fn=mse_loss)


def step(schedule: Any) -> list[float]:
    torch.manual_seed(1)
    losses: list[torch.Tensor] = []
    schedule.step(torch.ones(4, 2), target=torch.zeros(4, 2), losses=losses)
    return [float(loss.detach()) for loss in losses]


def gradients(*modules: Half) -> list[list[float]]:
    found = [parameter.grad for module in modules for parameter in module.parameters()]
    return [gradient.flatten().tolist() for gradient in found if gradient is not None]


@pytest.mark.parametrize("count", [1, 2])
def test_the_exchange_of_shapes_leaves_nothing_behind(count: int) -> None:
    """The first step and the next ones count as many passes, draw the same numbers and have the same gradients."""
    torch.manual_seed(0)
    modules = [Half() for _ in range(count)]
    schedule = schedule_of(*modules)
    pipelines.prepare(schedule)
    first, of_first = step(schedule), gradients(*modules)
    assert [int(module.passes) for module in modules] == [2] * count
    for module in modules:
        module.zero_grad()
    assert (step(schedule), gradients(*modules)) == (first, of_first)
    assert [int(module.passes) for module in modules] == [4] * count


@pytest.mark.parametrize("count", [1, 2])
def test_a_step_that_broke_is_forgotten(count: int) -> None:
    torch.manual_seed(0)
    modules = [Half() for _ in range(count)]
    schedule = schedule_of(*modules)
    pipelines.prepare(schedule)
    expected = step(schedule)
    break_at = modules[-1].layer.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match="failed to run forward"):
        step(schedule)
    break_at.remove()
    pipelines.reset(schedule)
    for module in modules:
        module.zero_grad()
    assert step(schedule) == expected


def test_the_stage_is_the_lowest_of_the_rank() -> None:
    assert pipelines.stage_number([]) == 0
    assert pipelines.stage_number([schedule_of(Half(), Half())]) == 0


def test_a_schedule_that_is_not_tracked_is_refused() -> None:
    schedule = schedule_of(Half())
    assert pipelines.is_schedule(schedule) and not pipelines.is_schedule(Half())
    pipelines.refuse_untracked([schedule])
    with pytest.raises(ScriptError, match="ScheduleGPipe is not named"):
        pipelines.refuse_untracked([])
