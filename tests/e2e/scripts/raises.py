"""Rank 1 raises in its third step of DDP training; the others' collectives break because of it."""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel


def load_batch(step: int) -> torch.Tensor:
    if dist.get_rank() == 1 and step == 2:
        raise ValueError(f"sample {step} is broken")
    return torch.ones(4, 8)


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    for step in range(1000):
        model(load_batch(step)).sum().backward()
    dist.destroy_process_group()
    sys.exit(f"rank {os.environ['RANK']} should not have come this far")


if __name__ == "__main__":
    (record(main) if "--record" in sys.argv else main)()
