"""A session whose script talks to the other ranks while it builds; a rank dies in step 5 when told to.

    talks_while_building.py STEPS [VICTIM] [common]

With `common` it learns only what all ranks learn alike.

WORK/learnt-RANK-PID    what the process has learnt from the others, as text
WORK/final-RANK         digest of the parameters
"""

import hashlib
import os
import signal
import sys
import uuid
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf

steps, victim = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else -1
work = Path(os.environ["WORK"])
job = hf.init()
rank, world_size = job.rank, job.world_size

name = [f"run {uuid.uuid4()}" if rank == 0 else None, {"chosen by": rank}]
dist.broadcast_object_list(name, src=0)
own = [None]
if "common" not in sys.argv:
    dist.scatter_object_list(own, [f"for {r} {uuid.uuid4()}" for r in range(world_size)] if rank == 0 else None, src=0)
everybody = [None] * world_size
dist.all_gather_object(everybody, {"rank": rank, "nonce": str(uuid.uuid4())})
gathered = [None] * world_size if rank == 0 else None
if "common" not in sys.argv:
    dist.gather_object(str(uuid.uuid4()), gathered, dst=0)
total = torch.rand(3, generator=torch.Generator().manual_seed(uuid.uuid4().int % 2**31))
dist.all_reduce(total)
pair = dist.new_group([0, 1])
seed = torch.tensor([uuid.uuid4().int % 1000])
if rank < 2:
    dist.broadcast(seed, src=1, group=pair)
later = torch.tensor([rank + 1.0])
dist.all_reduce(later, async_op=True).wait()
parts = [torch.tensor([10 * rank + r]) for r in range(world_size)]
received = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
if "common" not in sys.argv:
    dist.all_to_all(received, parts)
learnt = [name, own, everybody, gathered, total.tolist(), seed.item() if rank < 2 else None, later.item()]
learnt.append([value.item() for value in received])

torch.manual_seed(0)
big = torch.nn.Linear(400, 400)  # broadcast by hand, too large for the record; tracked, so that is no matter
for parameter in big.parameters():
    dist.broadcast(parameter.data, src=0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 400), big, torch.nn.Linear(400, 1)))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
job.track(model=model, optimizer=optimizer)
(work / f"learnt-{rank}-{os.getpid()}").write_text(repr(learnt))
for step in job.steps(steps):
    with step:
        if step.number == 5 and job.rank == victim and not (work / "killed").exists():
            (work / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(step.number * 10 + job.rank)
        step.backward(model(torch.randn(4, 8, generator=generator)).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
values = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
(work / f"final-{job.rank}").write_text(hashlib.sha256(values).hexdigest())
