"""A worker for the soak: all-reduces in rounds until a file says stop, and ends well."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

stop = Path(os.environ["SOAK_STOP"])
dist.init_process_group("gloo")
while True:
    said = torch.tensor([float(stop.exists())])
    dist.all_reduce(said)  # all of them stop in the same round
    if said.item() > 0:
        break
    time.sleep(0.02)
dist.destroy_process_group()
