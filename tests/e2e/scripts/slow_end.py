"""Rank 1 fails by an error of its own and leaves the group at once, so that the others fail for it; then its process
takes long to end, as those do that have large libraries, or upload a last log."""

import atexit
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 1:
    atexit.register(time.sleep, float(sys.argv[1]))
try:
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    if rank == 1:
        raise ValueError("sample 2 is broken")
    dist.all_reduce(torch.ones(1))
finally:
    dist.destroy_process_group()
