"""A state whose every bit is a function of the step and of the life that made it: a mixture of two shows at once.

A life is what runs between two kills. The state before step n that was made in life k differs from the one that life
k + 1 makes when it does step n - 1 again, as with any training that is not repeatable to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from holdfast.state.tracked import Tracked

SHAPES = ((97, 1031), (256, 513), (3, 5, 7), (1,))
BUFFER_SHAPE = (64, 9)
LIVES_MAX = 1_000_003
SHARD_STEP, RAMP_STEP = 2.0**-12, 2.0**-10
"""By which shards of a sharded state differ, and neighbours in a tensor. All sums are exact."""


class Model(nn.Module):
    def __init__(self, scale: int) -> None:
        super().__init__()
        for index, shape in enumerate(SHAPES):
            grown = (shape[0] * scale, *shape[1:])
            self.register_parameter(f"w{index}", nn.Parameter(torch.zeros(grown, dtype=torch.float64)))
        self.register_buffer("seen", torch.zeros(BUFFER_SHAPE, dtype=torch.float64))


class Filler(torch.optim.Optimizer):
    """Its update writes what the next step's state is to be."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.ramps = [_ramp(parameter) for parameter in self.param_groups[0]["params"]]

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for index, parameter in enumerate(self.param_groups[0]["params"]):
                if "moment" not in self.state[parameter]:
                    self.state[parameter]["moment"] = torch.empty_like(parameter)
                torch.add(self.ramps[index], value + index, out=parameter)
                torch.neg(parameter, out=self.state[parameter]["moment"])

    def step(self, closure: Any = None) -> None:
        raise NotImplementedError


class Count:
    """What is plain in a state."""

    step = 0
    life = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "life": self.life}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.life = state["step"], state["life"]


class State:
    """All of it. `scale`: how large."""

    def __init__(self, scale: int, shard: int = 0) -> None:
        self.model, self.count, self.shard = Model(scale), Count(), shard
        self.optimizer = Filler(self.model.parameters())
        self.optimizer.fill(0.0)
        self.tracked = Tracked(model=self.model, optimizer=self.optimizer, count=self.count)

    def become(self, step: int, life: int) -> None:
        """The state before a step."""
        self.forward(step, life)
        self.update(step, life)

    def forward(self, step: int, life: int) -> None:
        """What a forward changes."""
        with torch.no_grad():
            self.model.seen.fill_(self._value(step, life))

    def update(self, step: int, life: int) -> None:
        """What an update changes, and what follows it."""
        self.optimizer.fill(self._value(step, life))
        self.count.step, self.count.life = step, life

    def wrong(self, step: int) -> str:
        """What is not as it should be before this step, by whichever life; nothing if all is."""
        if self.count.step != step:
            return f"it says it is of step {self.count.step}"
        value = self._value(step, self.count.life)
        if not bool((self.model.seen == value).all()):
            return f"a buffer is not of step {step} and life {self.count.life}"
        for index, parameter in enumerate(self.model.parameters()):
            should = self.optimizer.ramps[index] + (value + index)
            moment = self.optimizer.state[parameter]["moment"]
            if not torch.equal(parameter, should) or not torch.equal(moment, -should):
                return f"parameter {index} is not of step {step} and life {self.count.life}"
        return ""

    def _value(self, step: int, life: int) -> float:
        return float(step * LIVES_MAX + life) + SHARD_STEP * self.shard


def _ramp(tensor: torch.Tensor) -> torch.Tensor:
    return torch.arange(tensor.numel(), dtype=tensor.dtype).mul_(RAMP_STEP).view(tensor.shape)
