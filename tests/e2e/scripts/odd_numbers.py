"""A replicated model whose numbers go wrong on purpose, watched.

    odd_numbers.py POLICY STEPS [FLIPPED RANK]
WORK/steps     step, rank, pid and the digest of the parameters after it, one line a committed step and rank
WORK/once-*    what has happened already
"""

import hashlib
import os
import sys
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf

policy, steps = sys.argv[1], int(sys.argv[2])
flipped, rank = map(int, sys.argv[3:] or (15, 1))
work = Path(os.environ["WORK"])
out = os.open(work / "steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
job = hf.init(seed=1)
torch.manual_seed(0)
net = torch.nn.Linear(8, 1)
model = DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
job.track(model=model, optimizer=optimizer)
job.watch(numbers=policy, checksum_every=5)


def once(name: str) -> bool:
    try:
        os.close(os.open(work / f"once-{name}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


for step in job.steps(steps):
    with step:
        if step.number == flipped and job.rank == rank and once("flip"):
            net.weight.data.view(torch.int32)[0, 3] ^= 1 << 3
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step.number + job.rank))
        loss = model(x).square().mean()
        if step.number == 4 and job.rank == 1 and once("nan"):
            loss = loss * float("nan")
        if step.number == 7 and job.rank == 0:
            loss = loss * float("inf")
        step.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if not step.is_committed:
        continue
    digest = hashlib.sha256(net.weight.detach().numpy().tobytes()).hexdigest()[:12]
    os.write(out, f"{step.number} {job.rank} {os.getpid()} {digest}\n".encode())
