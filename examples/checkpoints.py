"""Checkpoints written in the background of your own training loop. Kill it and start it again: it resumes from the last
checkpoint and ends with the same bits.

    python examples/checkpoints.py runs/7
    holdfast run --nproc-per-node 2 --max-restarts 3 examples/checkpoints.py runs/7
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

import holdfast as hf

parser = argparse.ArgumentParser()
parser.add_argument("directory", help="directory of the checkpoints, or a URL like s3://bucket/run")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--every", type=int, default=50)
arguments = parser.parse_args()

if "RANK" in os.environ:
    dist.init_process_group("gloo")
rank = dist.get_rank() if dist.is_initialized() else 0
torch.manual_seed(0)
model: nn.Module = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32))
if dist.is_initialized():
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())

with hf.Checkpointer(arguments.directory, keep="last:2,best:loss:min:1") as checkpoints:
    start = checkpoints.load(model=model, optimizer=optimizer) or 0
    if rank == 0:
        print(f"starting at step {start}")
    for step in range(start, arguments.steps):
        sample = torch.randn(64, 32, generator=torch.Generator().manual_seed(step * 1_000 + rank))
        loss = (model(sample) - sample).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % arguments.every == 0:
            checkpoints.save(step + 1, model=model, optimizer=optimizer, metrics={"loss": loss.item()})
if rank == 0:
    print(f"step {arguments.steps}, loss {loss.item():.4f}")
del model
if dist.is_initialized():
    dist.destroy_process_group()
