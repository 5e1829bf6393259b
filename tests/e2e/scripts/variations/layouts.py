"""Models that are cut along a mesh: tensor, pipeline and expert parallel, with and without data parallelism.

Ranks of one data coordinate have the same batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import holdfast as hf

from .bench import CLASSES, DDP, FEATURES, GLOBAL_BATCH, WIDTH, Bench, Net, Samples, Training, variation

MICRO_BATCHES = 4


def loader(mesh: DeviceMesh) -> hf.Loader:
    """Batches that belong to the coordinates of a mesh."""
    return hf.Loader(Samples(256), global_batch_size=2 * GLOBAL_BATCH, seed=3, mesh=mesh)  # no step is short


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh(os.environ.get("BENCH_DEVICE", "cpu"), tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def hurting(bench: Bench, module: nn.Module) -> nn.Module:
    """Have the points `forward` and `backward` in the middle of a module's passes, where its neighbours wait."""
    module.register_forward_pre_hook(lambda *_: bench.hurt("forward"))
    module.register_full_backward_pre_hook(lambda *_: bench.hurt("backward"))
    return module


def whole(bench: Bench) -> Net:
    """A model to be cut, which has the points."""
    net = Net()
    hurting(bench, net.middle)
    return net


def parallel(net: nn.Module, mesh: DeviceMesh, first: str = "first", second: str = "middle") -> Any:
    """Cut two layers as tensor parallelism does."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(net, mesh, {first: ColwiseParallel(), second: RowwiseParallel()})


def replicate(net: nn.Module, mesh: DeviceMesh) -> Any:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate(net, mesh=mesh)


@variation(ranks=4)
def fsdp_and_tensor_parallel(bench: Bench) -> Training:
    mesh = mesh_of(dp=2, tp=2)
    return Training(fully_shard(parallel(whole(bench), mesh["tp"]), mesh=mesh["dp"]), data=loader(mesh["dp"]))


@variation(ranks=4)
def replicate_and_tensor_parallel(bench: Bench) -> Training:
    mesh = mesh_of(dp=2, tp=2)
    return Training(replicate(parallel(whole(bench), mesh["tp"]), mesh["dp"]), data=loader(mesh["dp"]))


@variation(ranks=8)
def hsdp_and_tensor_parallel(bench: Bench) -> Training:
    mesh = mesh_of(replicate=2, shard=2, tp=2)
    model = fully_shard(parallel(whole(bench), mesh["tp"]), mesh=mesh["replicate", "shard"])
    return Training(model, data=loader(mesh["replicate", "shard"]))


# --- pipelines


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.2)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1  # the exchange of shapes is none of the training's passes
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Stage(nn.Module):
    """Some of the model's blocks, by their numbers in the whole model."""

    def __init__(self, blocks: range, count: int) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH) if 0 in blocks else nn.Identity()
        self.blocks = nn.ModuleDict({str(number): Block() for number in blocks})
        self.last = nn.Linear(WIDTH, CLASSES) if count - 1 in blocks else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks.values():
            x = block(x)
        return self.last(x)


def stages(numbers: list[int], count: int) -> list[Stage]:
    """These stages of a model of `count` blocks; every rank makes the same model."""
    torch.manual_seed(0)
    whole = Stage(range(count), count).state_dict()
    found = []
    for number in numbers:
        stage = Stage(range(number, number + 1), count)
        stage.load_state_dict({name: whole[name] for name in stage.state_dict()})
        found.append(stage)
    return found


def pipeline(
    bench: Bench, mesh: DeviceMesh, wrap: Callable[[nn.Module], Any], schedule: str, rounds: int = 1
) -> Training:
    """A training by a schedule of torch's, over the dimension pp of the mesh."""
    from torch.distributed.pipelining import PipelineStage, schedules

    pp = mesh["pp"]
    own, size = pp.get_local_rank(), pp.size()
    numbers = [own + nth * size for nth in range(rounds)]
    if schedule == "ScheduleZBVZeroBubble":
        numbers = [own, 2 * size - 1 - own]
    modules = [wrap(stage) for stage in stages(numbers, size * rounds)]
    for module in modules:
        for block in module.modules():
            if isinstance(block, Block):
                hurting(bench, block.up)
    parts = [
        PipelineStage(
            module, number, size * rounds, torch.device(os.environ.get("BENCH_DEVICE", "cpu")), group=pp.get_group()
        )
        for module, number in zip(modules, numbers, strict=True)
    ]
    plan = getattr(schedules, schedule)(
        parts if rounds > 1 else parts[0], n_microbatches=MICRO_BATCHES, loss_fn=cross_entropy, scale_grads=True
    )
    is_first, is_last = any(part.is_first for part in parts), any(part.is_last for part in parts)

    def compute(step: hf.Step) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        for x, y in bench.batches(step):
            plan.step(*([x] if is_first else []), **({"target": y, "losses": losses} if is_last else {}))
        return torch.stack([loss.detach() for loss in losses]).mean() if losses else torch.zeros(())

    model = modules[0] if rounds == 1 else nn.ModuleList(modules)
    return Training(model, tracked={"pipeline": plan}, data=loader(mesh["dp"]), compute=compute)


def with_ddp(mesh: DeviceMesh) -> Callable[[nn.Module], nn.Module]:
    return lambda stage: DDP(stage, process_group=mesh["dp"].get_group())


@variation(ranks=4)
def pipeline_1f1b_and_ddp(bench: Bench) -> Training:
    mesh = mesh_of(pp=2, dp=2)
    return pipeline(bench, mesh, with_ddp(mesh), "Schedule1F1B")


@variation(ranks=4)
def pipeline_gpipe_and_ddp(bench: Bench) -> Training:
    mesh = mesh_of(pp=2, dp=2)
    return pipeline(bench, mesh, with_ddp(mesh), "ScheduleGPipe")


@variation(ranks=4)
def pipeline_interleaved(bench: Bench) -> Training:
    mesh = mesh_of(pp=2, dp=2)
    return pipeline(bench, mesh, lambda stage: replicate(stage, mesh["dp"]), "ScheduleInterleaved1F1B", rounds=2)


@variation(ranks=4)
def pipeline_zero_bubble(bench: Bench) -> Training:
    mesh = mesh_of(pp=2, dp=2)
    return pipeline(bench, mesh, lambda stage: replicate(stage, mesh["dp"]), "ScheduleZBVZeroBubble", rounds=2)


@variation(ranks=4)
def pipeline_and_fsdp(bench: Bench) -> Training:
    mesh = mesh_of(pp=2, dp=2)
    return pipeline(bench, mesh, lambda stage: fully_shard(stage, mesh=mesh["dp"]), "Schedule1F1B")


@variation(ranks=8)
def pipeline_tensor_and_data_parallel(bench: Bench) -> Training:
    mesh = mesh_of(pp=2, dp=2, tp=2)

    def wrap(stage: nn.Module) -> Any:
        for block in stage.blocks.values():
            parallel(block, mesh["tp"], "up", "down")
        return replicate(stage, mesh["dp"])

    return pipeline(bench, mesh, wrap, "Schedule1F1B")


@variation(ranks=2, refused="is not named in job.track")
def pipeline_that_is_not_tracked(bench: Bench) -> Training:
    mesh = mesh_of(pp=2, dp=1)
    training = pipeline(bench, mesh, lambda stage: stage, "Schedule1F1B")
    training.kept = training.tracked.pop("pipeline")  # type: ignore[attr-defined]
    return training


# --- experts


class Experts(nn.Module):
    """One expert on each rank of a group; tokens travel there and back."""

    def __init__(self, group: Any, number: int) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, CLASSES)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(100 + number)
            self.expert = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed.nn.functional import all_to_all_single

        x = self.first(x)
        sent = torch.cat([x, x]) if x.shape[0] % 2 else x
        there = all_to_all_single(torch.empty_like(sent), sent.contiguous(), group=self._group)
        back = all_to_all_single(torch.empty_like(sent), self.expert(there).contiguous(), group=self._group)
        return self.last(x + back[: x.shape[0]] * torch.sigmoid(self.gate(x)))


def experts(bench: Bench) -> Training:
    import torch.distributed as dist

    mesh = mesh_of(dp=2, ep=2)
    model = Experts(mesh["ep"].get_group(), mesh["ep"].get_local_rank())
    own = {id(parameter) for parameter in model.expert.parameters()}
    training = Training(model, data=loader(mesh["dp", "ep"]))

    def update(step: hf.Step) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=mesh["dp"].get_group() if id(parameter) in own else None)
            parameter.grad /= bench.job.world_size
        training.optimizer.step()
        training.optimizer.zero_grad()

    training.update = update
    return training


@variation(ranks=4)
def experts_declared(bench: Bench) -> Training:
    hf.init(mesh={"dp": 2, "ep": 2}, replicated="dp")
    return experts(bench)


@variation(ranks=4, refused="hf.init(mesh=")
def experts_not_declared(bench: Bench) -> Training:
    return experts(bench)


@variation(ranks=4, refused="name in replicated= only dimensions along which the model is the same")
def declared_as_replicated_what_is_cut(bench: Bench) -> Training:
    mesh = mesh_of(dp=2, tp=2)
    hf.init(mesh=mesh, replicated=("dp", "tp"))
    return Training(replicate(parallel(Net(), mesh["tp"]), mesh["dp"]), data=loader(mesh["dp"]))
