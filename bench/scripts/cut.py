"""DDP in a session, the connections of which the last rank cuts before the backward pass of every tenth step.

    cut.py STEPS WIDTH CUTS OUT

Without CUTS (0) nothing is cut. OUT gets a line for each cut: the milliseconds from it to the commit of its step on
that rank; and at the end the milliseconds of a step that nothing disturbed, the median.
"""

import statistics
import sys
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf
from holdfast.worker.collectives import groups

WARM_STEPS = 20
EVERY = 10
steps, width, cuts, out = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
job = hf.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(6)]))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
job.track(model=model, optimizer=optimizer)
cut_in: dict[int, float] = {}
ordinary, lines = [], []
began_at = time.monotonic()
for step in job.steps(steps):
    with step:
        number = job.step
        optimizer.zero_grad()
        loss = model(torch.ones(4, width)).square().mean()
        is_due = cuts and number >= WARM_STEPS and number % EVERY == 0 and job.rank == job.world_size - 1
        if is_due and number not in cut_in:
            cut_in[number] = time.monotonic()
            groups.current_connections().mesh.shut()
        loss.backward()
        optimizer.step()
    ended_at = time.monotonic()
    if number in cut_in:
        lines.append(f"cut {1e3 * (ended_at - cut_in[number]):.3f}")
    elif number > WARM_STEPS:
        ordinary.append(1e3 * (ended_at - began_at))
    began_at = time.monotonic()
if job.rank == job.world_size - 1:
    with open(out, "w") as file:
        file.write("\n".join([*lines, f"step {statistics.median(ordinary):.3f}"]) + "\n")
