"""A roll call gives the state bit for bit as a census does, whatever has changed since the last one."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from holdfast.state.cached_state import CachedState
from holdfast.state.tensor_specs import FlatTree
from holdfast.state.tracked import Tracked


class Net(nn.Module):
    """Parameters, buffers of all kinds, a child without any, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.norm, self.last = nn.Linear(6, 6), nn.ReLU(), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.tied = self.first
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("later", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.act(self.norm(self.tied(self.first(x)))))


class Training:
    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.tracked = Tracked(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            average=self.average,
        )
        self.cached_state = CachedState(self.tracked)

    def step(self) -> None:
        self.scaler.scale(self.model(torch.randn(4, 6)).square().sum()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.average.update_parameters(self.model)
        self.optimizer.zero_grad()

    def check(self) -> FlatTree:
        """The roll call, which is the same as the census."""
        found = self.cached_state.state()
        assert_same(found, self.tracked.state())
        return found


def assert_same(found: FlatTree, wanted: FlatTree) -> None:
    assert found.skeleton == wanted.skeleton
    assert found.specs == wanted.specs
    for mine, its in zip(found.tensors, wanted.tensors, strict=True):
        assert (mine.data_ptr(), mine.shape, mine.stride(), mine.dtype) == (
            its.data_ptr(),
            its.shape,
            its.stride(),
            its.dtype,
        )
        assert torch.equal(mine, its)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def test_a_training_from_its_first_step_on(optimizer: type[torch.optim.Optimizer]) -> None:
    training = Training(optimizer)
    training.check()
    for _ in range(4):
        training.step()
        training.check()


def test_while_only_values_change_the_list_of_tensors_stays() -> None:
    training = Training()
    training.step()
    first = training.check()
    training.step()
    second = training.check()
    assert second.tensors is first.tensors
    assert second.skeleton != first.skeleton  # the scheduler's count is in it


def swap_data(training: Training) -> None:
    training.model.last.weight.data = training.model.last.weight.data.clone()


def prune_rows(training: Training) -> None:
    """The same address, the same parameter, fewer rows."""
    training.model.last.bias.data = training.model.last.bias.data[:2]


def transpose(training: Training) -> None:
    training.model.first.weight.data = training.model.first.weight.data.t()


def replace_parameter(training: Training) -> None:
    training.model.last.weight = nn.Parameter(torch.ones(3, 6))


def add_parameter(training: Training) -> None:
    training.model.extra = nn.Parameter(torch.ones(2))


def add_module(training: Training) -> None:
    training.model.add_module("head", nn.Linear(3, 3))


def replace_module(training: Training) -> None:
    training.model.last = nn.Linear(6, 3)


def remove_module(training: Training) -> None:
    del training.model.norm


def replace_buffer(training: Training) -> None:
    training.model.norm.running_mean = torch.ones(6)


def first_buffer_of_a_module(training: Training) -> None:
    training.model.act.register_buffer("seen", torch.ones(1))


def buffer_that_was_none(training: Training) -> None:
    training.model.later = torch.ones(3)


def grow_what_is_left_out(training: Training) -> None:
    training.model.cache = torch.ones(5)


def clear_optimizer(training: Training) -> None:
    training.optimizer.state.clear()


def load_optimizer(training: Training) -> None:
    """Another dictionary, other tensors."""
    training.optimizer.load_state_dict(training.optimizer.state_dict())


def replace_moments(training: Training) -> None:
    training.optimizer.state[training.model.last.weight]["exp_avg"] = torch.ones(3, 6)


def unfreeze(training: Training) -> None:
    training.optimizer.add_param_group({"params": [training.average.module.get_parameter("last.bias")], "lr": 0.5})


def change_settings(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"] = 7.0


def settings_in_a_tensor(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"] = torch.tensor(7.0)


def accumulate(training: Training) -> None:
    training.model(torch.randn(4, 6)).sum().backward()
    training.tracked.is_accumulating = True


def load_all(training: Training) -> None:
    other = Training()
    other.step()
    training.tracked.load(other.tracked.state())


def track_more(training: Training) -> None:
    training.tracked.add("second", nn.Linear(2, 2))


CHANGES = [
    *(swap_data, prune_rows, transpose, replace_parameter, add_parameter, add_module, replace_module, remove_module),
    *(replace_buffer, first_buffer_of_a_module, buffer_that_was_none, grow_what_is_left_out),
    *(clear_optimizer, load_optimizer, replace_moments, unfreeze, change_settings, settings_in_a_tensor),
    *(accumulate, load_all, track_more),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_structure_is_noticed(change: Callable[[Training], None]) -> None:
    training = Training()
    training.step()
    training.check()
    change(training)
    training.check()
    training.check()


def test_what_cannot_be_watched_is_looked_through_each_time() -> None:
    class Own:
        def __init__(self) -> None:
            self.values = [torch.zeros(2)]

        def state_dict(self) -> dict[str, Any]:
            return {"values": self.values}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.values = state["values"]

    class Extra(nn.Linear):
        said: list[int]

        def get_extra_state(self) -> dict[str, Any]:
            return {"tensor": torch.full((2,), float(len(self.said)))}

        def set_extra_state(self, state: dict[str, Any]) -> None: ...

    own, extra = Own(), Extra(2, 2)
    extra.said = []
    training = Training()
    training.tracked.add("own", own)
    training.tracked.add("extra", extra)
    training.cached_state.state()
    own.values.append(torch.ones(3))
    extra.said.append(1)
    found = training.cached_state.state()
    assert found.skeleton == training.tracked.state().skeleton
    assert [t.tolist() for t in found.tensors] == [t.tolist() for t in training.tracked.state().tensors]


def test_generators_and_plain_values_of_hooks_are_those_of_now() -> None:
    class Counting(nn.Linear):
        runs = 0

    def say(module: Counting, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}runs"] = module.runs

    training = Training()
    training.tracked.generators_of = 0
    training.check()
    torch.rand(1)
    training.check()
    assert training.check().tensors is training.check().tensors, "they do not keep it from being quick"
    counting = Counting(2, 2)
    counting.register_state_dict_post_hook(say)
    training.tracked.add("counting", counting)
    for counting.runs in (1, 2):
        training.check()


def test_shards(tmp_path: Path) -> None:
    """FSDP2 in a world of two: DTensors, whose parameters are others during a forward."""
    children = [in_world(tmp_path, rank, 2, sharded_training) for rank in range(2)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]


def sharded_training() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 5))
    mesh = dist.init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tracked = Tracked(model=model, optimizer=optimizer)
    cached_state = CachedState(tracked)
    lists = []
    for _ in range(4):
        found = cached_state.state()
        assert_same(found, tracked.state())
        lists.append(found.tensors)
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert lists[-1] is lists[-2]
    with torch.no_grad():
        weight: Any = model[2].weight
        weight._local_tensor = weight._local_tensor.clone()
    assert_same(cached_state.state(), tracked.state())


def in_world(folder: Path, rank: int, size: int, run: Callable[[], None]) -> int:
    if child := os.fork():
        return child
    code = 1
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        run()
        dist.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
