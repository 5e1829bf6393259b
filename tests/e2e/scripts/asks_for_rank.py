"""A session that depends on its rank while it is built, in one of many ways; rank 1 kills itself when told.

    asks_for_rank.py WAY STEPS [kill]

WORK/begun-PID       the script has begun; its content is written once it knows its rank: the rank and world size it saw
WORK/main            a line for each process that ran set-up code under `if rank == 0`
WORK/go              once it is there, rank 1 kills itself; until then every step takes a while
WORK/trained         step rank pid samples, one line a committed step and rank
WORK/final-RANK      digest of the parameters
"""

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

way, steps, kills = sys.argv[1], int(sys.argv[2]), "kill" in sys.argv
work = Path(os.environ["WORK"])
begun = work / f"begun-{os.getpid()}"
begun.touch()
found: list[int] = []
if way == "environment":
    found = [int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])]
elif way == "copy":
    copied = dict(os.environ)
    found = [int(copied["RANK"]), int(copied["WORLD_SIZE"])]
elif way == "membership":
    assert "RANK" in os.environ  # is it distributed?

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import holdfast as hf

job = hf.init()
torch.manual_seed(0)
group = None
match way:
    case "job":
        found = [job.rank, job.world_size]
    case "torch":
        found = [dist.get_rank(), dist.get_world_size()]
    case "local":
        found = [job.local_rank, job.world_size]
    case "subgroup":
        group = dist.new_group([0, 1])
        found = [dist.get_rank(), dist.get_world_size()]
    case "mesh":
        mesh = dist.init_device_mesh("cpu", (job.world_size,))
        found = [mesh.get_local_rank(), mesh.size()]
    case "collective":
        mine = torch.zeros(1)
        dist.all_reduce(mine)
        found = [dist.get_rank(), dist.get_world_size()]
    case "thread":
        import threading

        thread = threading.Thread(target=lambda: found.extend([dist.get_rank(), dist.get_world_size()]))
        thread.start()
        thread.join()
dataset = TensorDataset(torch.randn(600, 8), torch.arange(600))
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
if way == "loader":
    data = hf.Loader(dataset, global_batch_size=12, seed=1)
    job.track(model=model, optimizer=optimizer, data=data)
else:
    job.track(model=model, optimizer=optimizer)
if not found:
    found = [job.rank, job.world_size]  # everything is built
if way != "loader":
    sampler = DistributedSampler(dataset, found[1], found[0], shuffle=True, seed=1)
    data = DataLoader(dataset, batch_size=4, sampler=sampler)
if found[0] == 0:
    with (work / "main").open("a") as file:
        file.write(f"{os.getpid()}\n")
begun.write_text(f"{found[0]} {found[1]}")
for step in job.steps(steps):
    samples: list[int] = []
    with step:
        for x, numbers in step.batches(data):
            samples += numbers.tolist()
            if kills and not (work / "go").exists():
                time.sleep(0.05)
            elif kills and job.rank == 1 and not (work / "killed").exists():
                (work / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(model(x).pow(2).mean())
        if group is not None and job.rank < 2:
            dist.all_reduce(torch.zeros(1), group=group)
        optimizer.step()
        optimizer.zero_grad()
    if step.is_committed:
        with (work / "trained").open("a") as file:
            file.write(f"{step.number} {job.rank} {os.getpid()} {','.join(map(str, samples))}\n")
values = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
(work / f"final-{job.rank}").write_text(hashlib.sha256(values).hexdigest())
