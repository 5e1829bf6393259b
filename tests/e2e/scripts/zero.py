"""A session with an optimizer of which each rank has another part."""

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import holdfast as hf

job = hf.init()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
job.track(model=model, optimizer=optimizer)
for step in job.steps(6):
    with step:
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
