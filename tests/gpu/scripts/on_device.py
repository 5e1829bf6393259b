"""A session on real devices, one a rank, that can hurt itself; with GPU_SUITE_DEVICE=soft or cpu without any.

    on_device.py STEPS [POINT:STEP:RANK:ACTION]…

MODEL=ddp|fsdp2|hsdp   LOSS_FOR_LOG=1: all ranks average the loss after the update   COMPILE=MODE: of torch.compile
EXCHANGE=1: two ranks send each other 32 MB in each step, by batch_isend_irecv   CHECKPOINTING=1: of activations
OPTIMIZER=fused|foreach   SCALER=1: a GradScaler   GRAPHED=1: forward and backward are captured graphs
SET_DEVICE=before|after: hf.init, the script chooses its device by LOCAL_RANK   ATTENTION=1: with dropout in it
POINT   backward (queued, not agreed), update (committed), between (steps)
ACTION  kill, stop (SIGSTOP), illegal (an access to memory that is not there), spin (a kernel that does not end),
        graph (the update is captured in a CUDA graph)
WORK/final-RANK   number of steps, digest of parameters and optimizer state
WORK/pids-RANK    every process that had the rank
WORK/free-RANK    the device's free memory at the end of each step, by the processes that had the rank
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import holdfast as hf

work = Path(os.environ["WORK"])
total, faults = int(sys.argv[1]), [fault.split(":") for fault in sys.argv[2:]]
torch.use_deterministic_algorithms(True)
device = torch.device(os.environ["GPU_SUITE_DEVICE"])


def set_device(when: str) -> None:
    if os.environ.get("SET_DEVICE") == when and device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))


set_device("before")
job = hf.init(seed=4)
set_device("after")
with (work / f"pids-{job.rank}").open("a") as file:
    file.write(f"{os.getpid()}\n")


def hurt(point: str, number: int) -> None:
    for index, (where, step, rank, action) in enumerate(faults):
        if (where, int(step), int(rank)) != (point, number, job.rank):
            continue
        try:
            os.close(os.open(work / f"fired-{index}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif action == "spin":
            torch.get_device_module(device)._sleep(10**13)
        elif action == "illegal":
            table = torch.zeros(4, device=device)
            table.index_select(0, torch.full((1,), 2**40, device=device))  # a device-side assertion: as sticky
            torch.accelerator.synchronize()


torch.manual_seed(0)
model: nn.Module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 8)).to(device)
if "GRAPHED" in os.environ:
    model = torch.cuda.make_graphed_callables(model, (torch.randn(32, 64, device=device, requires_grad=True),))
if os.environ.get("MODEL") == "fsdp2":
    fully_shard(model, mesh=init_device_mesh(device.type, (job.world_size,)))
elif os.environ.get("MODEL") == "hsdp":
    fully_shard(
        model, mesh=init_device_mesh(device.type, (2, job.world_size // 2), mesh_dim_names=("copies", "shards"))
    )
else:
    model = DistributedDataParallel(model, bucket_cap_mb=1)
forward = torch.compile(model, mode=os.environ["COMPILE"]) if "COMPILE" in os.environ else model
kind: dict[str, bool] = {os.environ["OPTIMIZER"]: True} if "OPTIMIZER" in os.environ else {}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=device.type == "cuda" and not kind, **kind)
scaler = torch.amp.GradScaler(device.type, enabled="SCALER" in os.environ)
job.track(model=model, optimizer=optimizer, **({"scaler": scaler} if scaler.is_enabled() else {}))


def exchange(number: int) -> torch.Tensor:
    """Send the other rank more than NCCL's buffers hold, and receive as much."""
    mine = torch.full((2**23,), float(number + job.rank), device=device)
    theirs, peer = torch.empty_like(mine), 1 - job.rank
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)]):
        work.wait()
    return theirs.mean()


graph = None
for step in job.steps(total):
    with step:
        number = step.number
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(100 * number + job.rank)).to(device)
        if "ATTENTION" in os.environ:
            heads = x.view(4, 8, 64)
            x = scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2).reshape(32, 64)
        if "EXCHANGE" in os.environ:
            x = x + 1e-3 * exchange(number)
        with torch.autocast(device.type, torch.bfloat16, enabled="GRAPHED" not in os.environ):
            out = checkpoint(forward, x, use_reentrant=False) if "CHECKPOINTING" in os.environ else forward(x)
            loss = (out - x[:, :8]).float().square().mean()
        step.backward(scaler.scale(loss))
        hurt("backward", number)
        if any(action == "graph" for *_, action in faults) and number > 2:
            if graph is None:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    optimizer.step()
            graph.replay()
        else:
            scaler.step(optimizer)
            scaler.update()
        if "LOSS_FOR_LOG" in os.environ:
            dist.all_reduce(loss.detach())
        hurt("update", number)
        optimizer.zero_grad(set_to_none=graph is None)
    if step.is_committed:
        if device.type == "cuda":
            with (work / f"free-{job.rank}").open("a") as file:
                file.write(f"{os.getpid()} {torch.cuda.mem_get_info()[0]}\n")
        hurt("between", number)
tensors = [*model.state_dict().values()]
tensors += [value for entry in optimizer.state.values() for value in entry.values()]
own = [(one.to_local() if hasattr(one, "to_local") else one).detach().cpu() for one in tensors]
digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in own)).hexdigest()
(work / f"final-{job.rank}").write_text(f"{job.step} {digest}")
