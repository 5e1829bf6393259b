"""A small data-parallel training script as anybody would write it for torchrun: it knows nothing of who launched it.

Its one addition is a diary, a line for each milestone of each life of each rank, in $BENCH_DIARY/<rank>:

    event rank world step pid time          event: started, imported, joined, wrapped, step
"""

import os
import time

STARTED_AT = time.time()

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS_MAX = 100_000
STEP_PAUSE_S = 0.01  # so that two ranks on two cores leave room for the launcher

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
diary = open(os.path.join(os.environ["BENCH_DIARY"], str(rank)), "a", buffering=1)  # noqa: SIM115  # for life


def note(event: str, at: float, step: int = 0) -> None:
    diary.write(f"{event} {rank} {world} {step} {os.getpid()} {at:.6f}\n")


note("started", STARTED_AT)
note("imported", time.time())
torch.manual_seed(0)
dist.init_process_group("gloo")
note("joined", time.time())
network = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
model = DistributedDataParallel(network)
optimizer = torch.optim.AdamW(model.parameters())
note("wrapped", time.time())
for step in range(1, STEPS_MAX + 1):
    optimizer.zero_grad()
    model(torch.randn(32, 256)).square().mean().backward()
    optimizer.step()
    note("step", time.time(), step)
    time.sleep(STEP_PAUSE_S)
