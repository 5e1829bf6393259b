"""Meets the other ranks at an address that it is told by an argument, as under torchrun."""

import os
import sys

import torch
import torch.distributed as dist

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=world_size)
number = torch.tensor([rank + 1.0])
dist.all_reduce(number)
print(f"rank {rank}: {number.item()} at {os.environ['MASTER_ADDR']}", flush=True)
dist.barrier()
if rank == 0 and len(sys.argv) > 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit("once")
dist.destroy_process_group()
