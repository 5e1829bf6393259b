"""A session whose micro-batches take a fixed time, as on a device: MICRO_S MICROS STEPS AFTER KEEP PARAMETERS OUTPUT.

Rank 1 kills itself in every fifth step, once all ranks have finished AFTER micro-batches. OUTPUT gets a line a step
and process: step, rank, seconds, kill or none, micro-batches that this process has computed in it, seconds of the
copies of gradients.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf
from holdfast.worker.micro_batches import GradientCopy

LIMIT_S = 60.0
micro_s, micros, steps, after, keep, parameters = (float(word) for word in sys.argv[1:7])
output = Path(sys.argv[7])
job = hf.init(seed=0)
torch.manual_seed(0)
width = int(parameters**0.5)
model = DistributedDataParallel(nn.Linear(width, width, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
slots = int(micros) * job.world_size
data = hf.Loader([torch.ones(width)] * (slots * 4), global_batch_size=slots, slots=slots)
job.track(model=model, optimizer=optimizer, data=data)
copies = [0.0]
plain_take = GradientCopy.take


def take(self, parameters) -> None:
    began_at = time.monotonic()
    plain_take(self, parameters)
    copies[0] += time.monotonic() - began_at


GradientCopy.take = take


def finished(step: int, rank: int) -> Path:
    return output.with_name(f"finished-{step}-{rank}")


def kill_once(step: int) -> None:
    """When all ranks have come as far, and only once."""
    mark = output.with_name(f"killed-{step}")
    if job.rank != 1 or mark.exists():
        return
    give_up_at = time.monotonic() + LIMIT_S
    while not all(finished(step, rank).exists() for rank in range(job.world_size)):
        assert time.monotonic() < give_up_at
        time.sleep(0.0005)
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)


computed = {}
ended_at = time.monotonic()


def compute(step: int, x: torch.Tensor) -> torch.Tensor:
    computed[step] = computed.get(step, 0) + 1
    if step % 5 == 4 and computed[step] == after + 1:
        kill_once(step)
    time.sleep(micro_s)
    return model(x).mean()


for step in job.steps(int(steps)):
    with step:
        for x in step.batches(data, keep=bool(keep)):
            loss = compute(step.number, x)
            step.backward(loss)
            if step.number % 5 == 4 and computed[step.number] == after:
                finished(step.number, job.rank).touch()
        optimizer.step()
        optimizer.zero_grad()
    if step.is_committed:
        now = time.monotonic()
        kind = "kill" if step.number % 5 == 4 else "none"
        with output.open("a") as file:
            count = computed.pop(step.number)
            file.write(f"{step.number} {job.rank} {now - ended_at} {kind} {count} {copies[0]}\n")
        ended_at, copies[0] = now, 0.0
