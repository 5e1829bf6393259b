"""One rank of canonical.py: blocks of steps with one reduction and the other, in turn, of the same model and slots.

canonical.py ROUNDS STEPS WIDTH LAYERS SLOTS BATCH OUTPUT
"""

import json
import random
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf

rounds, steps, width, layers, slots, batch = map(int, sys.argv[1:7])
job = hf.init(seed=0, reduction="canonical")
torch.manual_seed(0)
parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
model = DistributedDataParallel(nn.Sequential(*parts))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
samples = torch.randn(4 * batch, width)
data = hf.Loader(samples, global_batch_size=batch, slots=slots, seed_samples=False)
job.track(model=model, optimizer=optimizer, data=data)
canonical = job._canonical  # a job has one reduction; here it is taken away for every other block

order = random.Random(0)
blocks = [name for _ in range(rounds + 1) for name in order.sample(["average", "canonical"], 2)]
found: list[tuple[int, str, float]] = []
began = time.perf_counter()
for step in job.steps(len(blocks) * steps):
    block, within = divmod(step.number, steps)
    if within == 0:
        job._canonical = canonical if blocks[block] == "canonical" else None
        torch.distributed.barrier()
        began = time.perf_counter()
    with step:
        for x in step.batches(data):
            step.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    if within == steps - 1:
        found.append((block // 2, blocks[block], (time.perf_counter() - began) / steps))
if job.rank == 0:
    kept = [(name, seconds) for number, name, seconds in found if number]  # the first round warms up
    megabytes = sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6
    Path(sys.argv[7]).write_text(json.dumps({"blocks": kept, "gradient_mb": megabytes}))
