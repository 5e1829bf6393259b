"""A session on an hf.Loader, for what the journal tells of its data.

    exact.py STEPS [--seed N] [--size N] [--slots N] [--fault POINT:STEP:RANK]… [--skip AT:FIRST:END] [--wrong STEP]

POINT     forward, middle (after the first of its batches), between; kill -9 once. RANK may be `last`
--workers         processes of the loader
--skip    before step AT of the job the loader is told to pass over its steps FIRST to END - 1
--wrong   in this step rank 0 leaves its last batch out
--sample  seconds that each sample takes, and times as many on rank SLOW: SECONDS:SLOW:TIMES
WORK/used         step rank samples…, of committed steps
WORK/read         samples as the dataset itself was asked for them, by the pid of the training process
WORK/hurry        no more pauses
"""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
from pacing import pause
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf

parser = argparse.ArgumentParser()
parser.add_argument("steps", type=int)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--size", type=int, default=203)
parser.add_argument("--batch", type=int, default=12)
parser.add_argument("--slots", type=int)
parser.add_argument("--fault", action="append", default=[])
parser.add_argument("--skip", default="")
parser.add_argument("--skip-rank", type=int, default=-1)
parser.add_argument("--wrong", type=int, default=-1)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--until-hurry", action="store_true")
parser.add_argument("--sample", default="0:0:1")
arguments = parser.parse_args()
work = Path(os.environ["WORK"])


def hurt(point: str, step: int, rank: int) -> None:
    for index, text in enumerate(arguments.fault):
        mark = work / f"fired-{index}"
        names = {f"{point}:{step}:{rank}"} | ({f"{point}:{step}:last"} if rank == job.world_size - 1 else set())
        if text in names and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def work_on(samples: int) -> None:
    seconds, slow, times = arguments.sample.split(":")
    if float(seconds) and not (work / "hurry").exists():
        time.sleep(samples * float(seconds) * (float(times) if job.rank == int(slow) else 1))


class Logged(torch.utils.data.Dataset):
    """Writes down what it is asked for."""

    def __len__(self) -> int:
        return arguments.size

    def __getitem__(self, sample: int) -> tuple[torch.Tensor, torch.Tensor]:
        is_worker = torch.utils.data.get_worker_info() is not None
        with (work / "read").open("a") as file:
            file.write(f"{os.getppid() if is_worker else os.getpid()} {sample}\n")
        return torch.full((4,), float(sample % 7)), torch.tensor([sample])


job = hf.init(seed=1)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = hf.Loader(
    Logged(),
    global_batch_size=arguments.batch,
    seed=arguments.seed,
    slots=arguments.slots,
    num_workers=arguments.workers,
)
job.track(model=model, optimizer=optimizer, data=data)
for step in job.steps(arguments.steps):
    if arguments.skip:
        at, first, end = map(int, arguments.skip.split(":"))
        if at == step.number and step.attempt == 0 and arguments.skip_rank in (-1, job.rank):
            data.skip(range(first, end), why="the loss went up")
    with step:
        used: list[int] = []
        hurt("forward", step.number, job.rank)
        for x, number in step.batches(data):
            work_on(len(x))
            step.backward(model(x).mean())
            used += number.flatten().tolist() if step.scale(torch.ones(())) else []
            hurt("middle", step.number, job.rank)
            if step.number == arguments.wrong and job.rank == 0:
                data.is_last_of_step or model.zero_grad()
                break
        optimizer.step()
        optimizer.zero_grad()
    if step.is_committed:
        with (work / "used").open("a") as file:
            file.write(" ".join(map(str, [step.number, job.rank, *used])) + "\n")
    hurt("between", step.number, job.rank)
    pause(work, arguments.pause, arguments.steps - step.number - 1, arguments.until_hurry)
