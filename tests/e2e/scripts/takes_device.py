"""A session that notes which device its process takes (lab/holdfast_sim.py), and draws from it in each step.

    takes_device.py STEPS [KILLED_STEP]     rank 1 kills itself once, in this step

WORK/device-PID     rank, local rank, LOCAL_RANK before and after `hf.init()`, CUDA_VISIBLE_DEVICES, device
WORK/drawn          per committed step: step, rank, the number drawn on the device
TOUCH=1             the process uses device 0 before it has a rank, as a careless script does
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

import holdfast as hf

work = Path(os.environ["WORK"])
total, killed_step = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else -1
if os.environ.get("TOUCH"):
    torch.sim.manual_seed(1)
before = os.environ.get("LOCAL_RANK") if os.environ.get("ASK") else "unasked"
job = hf.init(seed=5)
visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
noted = [job.rank, job.local_rank, before, os.environ["LOCAL_RANK"], visible, torch.sim.current_device()]
(work / f"device-{os.getpid()}").write_text(" ".join(map(str, noted)))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.track(model=model, optimizer=optimizer)
for step in job.steps(total):
    with step:
        number = torch.sim.rand()
        step.backward(model(torch.full((2, 3), number)).sum())
        if (step.number, job.rank) == (killed_step, 1):
            while "--spares" in os.environ.get("FLAGS", "") and not (work / "go").exists():
                time.sleep(0.01)
            try:
                os.close(os.open(work / "killed", os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)
            except FileExistsError:
                pass
        optimizer.step()
        optimizer.zero_grad()
    if step.is_committed:
        with (work / "drawn").open("a") as file:
            file.write(f"{step.number} {job.rank} {number}\n")
