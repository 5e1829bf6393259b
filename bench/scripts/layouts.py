"""A training script of one layout, for bench/layouts.py: a session under Holdfast, the same unrepaired under torchrun.

    layouts.py LAYOUT STEPS OUTPUT [STEP]…

Rank 1 is killed once in each of the STEPs named. Lines of OUTPUT: `step NUMBER RANK TIME`, `kill NUMBER RANK TIME`.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf

layout, steps, output, kills = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), set(map(int, sys.argv[4:]))
WIDTH, CLASSES, BATCH = 256, 16, 64
job = hf.init(seed=0)
torch.manual_seed(0)
plan = None


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES))


def note(what: str, number: int) -> None:
    with output.open("a") as file:
        file.write(f"{what} {number} {job.rank} {time.time()}\n")


match layout:
    case "ddp":
        mesh = init_device_mesh("cpu", (job.world_size,), mesh_dim_names=("dp",))
        model = DistributedDataParallel(net())
    case "fsdp2":
        mesh = init_device_mesh("cpu", (job.world_size,), mesh_dim_names=("dp",))
        model = fully_shard(net(), mesh=mesh)
    case "hsdp":
        mesh = init_device_mesh("cpu", (2, job.world_size // 2), mesh_dim_names=("replicate", "dp"))
        model = fully_shard(net(), mesh=mesh)
    case "fsdp2_tp":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (job.world_size // 2, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize_module(
            net(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()}, src_data_rank=None
        )
        model = fully_shard(model, mesh=mesh["dp"])
    case "pipeline_ddp":
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        mesh = init_device_mesh("cpu", (2, job.world_size // 2), mesh_dim_names=("pp", "dp"))
        number = mesh["pp"].get_local_rank()
        whole = net()
        half = nn.Sequential()
        for name, layer in list(whole.named_children())[2 * number : 2 * number + 2]:
            half.add_module(name, layer)  # by its name in the whole model: the other half has others
        model = DistributedDataParallel(half, process_group=mesh["dp"].get_group())
        stage = PipelineStage(model, number, 2, torch.device("cpu"), group=mesh["pp"].get_group())
        plan = Schedule1F1B(stage, n_microbatches=4, loss_fn=cross_entropy)
    case _:
        raise SystemExit(f"no layout is called {layout}")

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
named = {"model": model, "optimizer": optimizer} | ({"pipeline": plan} if plan is not None else {})
samples = torch.utils.data.TensorDataset(torch.randn(4096, WIDTH), torch.randint(0, CLASSES, (4096,)))
data = hf.Loader(samples, global_batch_size=BATCH, seed=0, mesh=mesh if layout == "hsdp" else mesh["dp"])
job.track(**named, data=data)

for step in job.steps(steps):
    with step:
        for x, y in step.batches(data):
            if plan is None:
                step.backward(cross_entropy(model(x), y))
            elif stage.is_first:
                plan.step(x)
            else:
                plan.step(target=y)
        mark = output.with_name(f"killed-{step.number}")
        if step.number in kills and job.rank == 1 and not mark.exists():
            mark.touch()
            note("kill", step.number)
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
    if step.is_committed:
        note("step", step.number)
