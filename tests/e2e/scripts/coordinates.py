"""A session whose ranks share data coordinates: a mesh of 2 × 2, and a model with dropout that every rank has all of.

    coordinates.py STEPS [--fault STEP:RANK]… [--wrong STEP] [--slots N] [--stages]

--fault      kill -9 in the backward pass of this step, once
--wrong      in this step rank 3 is given the batch of the other coordinate
--stages     the ranks of a coordinate are stages of a pipeline: only the last has a loss
WORK/ledger  step rank pid view world loss, one line a committed step and rank; the loss of ranks without one is `none`
WORK/final-R step and digest of the state
"""

import argparse
import hashlib
import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf

parser = argparse.ArgumentParser()
parser.add_argument("steps", type=int)
parser.add_argument("--fault", action="append", default=[])
parser.add_argument("--wrong", type=int, default=-1)
parser.add_argument("--slots", type=int)
parser.add_argument("--stages", action="store_true")
arguments = parser.parse_args()
work = Path(os.environ["WORK"])


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 90

    def __getitem__(self, sample: int) -> torch.Tensor:
        return torch.randn(8, generator=torch.Generator().manual_seed(sample))


def hurt(gradient: torch.Tensor) -> torch.Tensor:
    mark = work / f"fired-{job.step}-{job.rank}"
    if f"{job.step}:{job.rank}" in arguments.fault and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return gradient


def digest() -> str:
    found = hashlib.sha256()
    for tensor in (*model.state_dict().values(), *(s["momentum_buffer"] for s in optimizer.state.values())):
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


job = hf.init(seed=1)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.3), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = hf.Loader(Data(), global_batch_size=12, seed=0, slots=arguments.slots, mesh=mesh["dp"])
job.track(model=model, optimizer=optimizer, data=data)
twins = mesh["tp"].get_group()
for step in job.steps(arguments.steps):
    with step:
        if step.number == arguments.wrong and job.rank == 3:
            data._slots = lambda: range(6)  # those of the other coordinate
        losses = []
        for x in step.batches(data):
            y = model(x)
            y.register_hook(hurt)
            loss = (y - x.sum(dim=1, keepdim=True)).square().mean()
            other = loss.detach().clone()
            torch.distributed.broadcast(other, group=twins, group_src=0)
            assert step.number == arguments.wrong or torch.equal(other, loss), "ranks of a coordinate drew differently"
            assert step.loss_scale == data.loss_scale
            (loss * step.loss_scale).backward()
            losses.append(loss.item())
        if step.number == arguments.wrong and job.rank == 3:
            del data._slots
        optimizer.step()
        optimizer.zero_grad()
        has_loss = not arguments.stages or mesh.get_coordinate()[1] == 1
        if has_loss:
            step.log(loss=sum(losses))
    if step.is_committed:
        logged = job.logged["loss"].hex() if has_loss else "none"
        with (work / "ledger").open("a") as file:
            file.write(f"{step.number} {job.rank} {os.getpid()} {job.view} {job.world_size} {logged}\n")
(work / f"final-{job.rank}").write_text(f"{job.step} {digest()}\n")
