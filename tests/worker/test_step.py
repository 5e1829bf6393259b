"""The gradient of a step is that of the mean over the global batch, however it is split: over ranks whose shares
differ, over slots that are accumulated, with replicated and sharded models, by samples and by tokens."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf
from holdfast.errors import UsageError
from holdfast.worker.step import Step
from support.crowd import Member, together

PADDING, LENGTH, BATCH, STEPS = -100, 7, 10, 3


def sample(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and targets of which some are padding: of sample 4 all but one."""
    generator = torch.Generator().manual_seed(number)
    targets = torch.randint(5, (LENGTH,), generator=generator)
    targets[1 + number * 3 % LENGTH if number != 4 else 1 :] = PADDING
    return torch.randn(LENGTH, 8, generator=generator).double(), targets


SAMPLES = [sample(number) for number in range(23)]
"""The third step has three: some of seven slots, and one of four ranks, have none."""


def tokens(batch: Any) -> int:
    return int((batch[1] != PADDING).sum())


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 5)).double()


def loss_of(model: nn.Module, batch: Any, *, by_token: bool) -> torch.Tensor:
    """The mean over the batch's tokens, or over its samples of each one's mean."""
    losses = nn.functional.cross_entropy(model(batch[0].flatten(0, 1)), batch[1].flatten(), reduction="none")
    losses = losses.view(batch[1].shape)
    if by_token:
        return losses.sum() / tokens(batch)
    return (losses.sum(dim=1) / (batch[1] != PADDING).sum(dim=1)).mean()


def whole(step: int) -> Any:
    chosen = SAMPLES[step * BATCH : (step + 1) * BATCH]
    return torch.stack([x for x, _ in chosen]), torch.stack([y for _, y in chosen])


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in model.parameters()]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in found if g is not None]


def split(member: Member, rank: int, size: int, kind: str, slots: int | None, by_token: bool, shares: Any) -> float:
    """The greatest difference from the gradient of the whole batch at once."""
    member.start(rank, size)
    job = hf.init(reduction="canonical" if kind == "canonical" else "average")
    model = build()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    data = hf.Loader(SAMPLES, global_batch_size=BATCH, slots=slots, shuffle=False, weights=shares)
    job.track(model=model, optimizer=optimizer, data=data)
    worst = 0.0
    for step in job.steps(STEPS):
        with step:
            for batch in step.batches(data, weight=tokens if by_token else None):
                step.backward(loss_of(model, batch, by_token=by_token))
            found = gradients_of(model)
            optimizer.step()
            optimizer.zero_grad()
        alone = build()
        loss_of(alone, whole(step.number), by_token=by_token).backward()
        differences = [(a - b).abs().max() for a, b in zip(found, gradients_of(alone), strict=True)]
        worst = max(worst, *map(float, differences))
    dist.barrier()
    return worst


@pytest.mark.parametrize("by_token", [False, True], ids=["samples", "tokens"])
@pytest.mark.parametrize(("kind", "slots"), [("ddp", None), ("ddp", 7), ("fsdp", None), ("fsdp", 7), ("canonical", 7)])
def test_it_is_the_mean_over_the_global_batch(kind: str, slots: int | None, by_token: bool) -> None:
    assert max(together(split, 4, kind, slots, by_token, None)) < 1e-15


def _weigh(weight: float, batch: object) -> float:
    return weight


def test_shares_of_different_size_change_nothing() -> None:
    assert max(together(split, 3, "ddp", 7, True, [1.0, 0.4, 0.6])) < 1e-15


def weights_that_cannot_be(member: Member, rank: int, size: int) -> list[str]:
    member.start(rank, size)
    job = hf.init()
    data = hf.Loader(SAMPLES, global_batch_size=BATCH, slots=4)
    job.track(data=data)
    sentences = []
    for step in job.steps(1):
        with step:
            for weight in (0, -1, math.nan, math.inf):
                with pytest.raises(UsageError) as caught:
                    list(step.batches(data, weight=partial(_weigh, weight)))
                sentences.append(str(caught.value))
            with pytest.raises(UsageError, match=r"weight= needs an hf\.Loader"):
                list(step.batches([1, 2], weight=lambda batch: 1.0))
    return sentences


def test_weights_that_cannot_be_are_refused() -> None:
    for none, *others in together(weights_that_cannot_be, 2):
        assert "all batches of the step weigh nothing" in none
        assert all("a weight is 0 or more" in sentence for sentence in others)


def test_numbers_are_added_up_exactly_and_in_any_order() -> None:
    step = Step(None, 0, 0)  # type: ignore[arg-type]
    for number in (1e16, torch.tensor(1.0, requires_grad=True), -1e16):
        step.add(loss=number, count=1)
    step.add(odd=math.inf)
    step.add(odd=-math.inf)
    assert (step.sums["loss"], step.sums["count"]) == (1.0, 3.0) and math.isnan(step.sums["odd"])
