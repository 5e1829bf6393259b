"""A session that makes its steps slowly until the file that it is given exists, then without a pause."""

import sys
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf

STEPS = 300

job = hf.init()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
job.track(model=model, optimizer=optimizer)
for step in job.steps(STEPS):
    if not Path(sys.argv[1]).exists():
        time.sleep(0.05 + 0.002 * job.step)  # all of them in two minutes: it does not end before somebody looks
    with step:
        loss = model(torch.ones(2, 4)).pow(2).sum()
        step.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step.log(loss=loss)
