"""A session that adds up the gradients of many micro-batches a step: DDP or canonical, Adam, dropout, BatchNorm.

    micro_batches.py STEPS SLOTS [--fault POINT:STEP:RANK:ACTION]… [--canonical] [--batch-norm] [--bucket-views]
                     [--whole]

WORK/ledger        step rank pid view world loss (hexadecimal sum of all micro-batches), one line a committed step, rank
WORK/rounds        step slot rank pid, one line a micro-batch whose backward is through
WORK/final-RANK    step, digest of all tracked tensors
A fault happens once, and not before those that are named before it.
POINT    a number: before the micro-batch with this number, once all ranks have finished as many. The others wait in
         theirs until they have been told that the view is over.
         backward: in the middle of the last micro-batch's backward; top: before the loop; behind: after it
ACTION   kill raise cut
"""

import argparse
import faulthandler
import hashlib
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf
from holdfast.worker.collectives import groups

DEADLINE_S = 30.0
faulthandler.register(signal.SIGUSR2)
parser = argparse.ArgumentParser()
parser.add_argument("steps", type=int)
parser.add_argument("slots", type=int)
parser.add_argument("--fault", action="append", default=[])
parser.add_argument("--canonical", action="store_true")
parser.add_argument("--batch-norm", action="store_true")
parser.add_argument("--bucket-views", action="store_true", help="gradients are views of DDP's buckets")
parser.add_argument("--whole", action="store_true", help="do not keep micro-batches")
arguments = parser.parse_args()
work = Path(os.environ["WORK"])
faults = [text.split(":") for text in arguments.fault]
armed = None


def opened(name: str) -> int:
    return os.open(work / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


ledger, rounds = opened("ledger"), opened("rounds")


def wait_until(condition) -> None:
    give_up_at = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.001)


def finished(number: int) -> bool:
    """Whether all ranks have finished as many micro-batches of this step."""
    lines = [line.split() for line in (work / "rounds").read_text().splitlines()]
    seen = [(int(words[2]), words[1]) for words in lines if int(words[0]) == job.step]
    return all(len({slot for who, slot in seen if who == rank}) >= number for rank in range(job.world_size))


def has_fired(index: int) -> bool:
    return (work / f"fired-{index}").exists()


def arm() -> None:
    """Choose, at the top of a step, the fault that may happen in it."""
    global armed
    armed = next((index for index in range(len(faults)) if not has_fired(index)), None)


def hurt(point: str) -> None:
    where, step, rank, action = faults[armed] if armed is not None else ("", "-1", "0", "")
    if (where, int(step)) != (point, job.step):
        return
    is_victim = job.rank == int(rank)
    if point.isdigit():
        wait_until((lambda: finished(int(point))) if is_victim else groups.is_revoked)
    if not is_victim or has_fired(armed):
        return
    os.close(os.open(work / f"fired-{armed}", os.O_CREAT | os.O_EXCL))
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "raise":
        raise hf.RetryableError("worth a second try")
    groups.current_connections().mesh.shut()


class Hurting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if data.is_last_of_step:
            hurt("backward")
        return gradient


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 4)
        self.norm = nn.BatchNorm1d(64) if arguments.batch_norm else nn.LayerNorm(64)

    def forward(self, x):
        x = Hurting.apply(torch.relu(self.norm(self.first(x))))
        return self.last(torch.dropout(torch.relu(self.middle(x)), 0.2, train=True))


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return torch.randn(16, generator=torch.Generator().manual_seed(index)), int(index)


def digest(*states) -> str:
    found = hashlib.sha256()

    def add(value) -> None:
        match value:
            case torch.Tensor():
                found.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            case dict():
                add(list(value.items()))
            case list() | tuple():
                for item in value:
                    add(item)
            case _:
                found.update(repr(value).encode())

    add(states)
    return found.hexdigest()[:16]


job = hf.init(seed=3, reduction="canonical" if arguments.canonical else "average")
torch.manual_seed(0)
# Small buckets, so that some are reduced while the backward still runs.
model = DistributedDataParallel(Net(), bucket_cap_mb=0.01, gradient_as_bucket_view=arguments.bucket_views)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
data = hf.Loader(Data(), global_batch_size=3 * arguments.slots, seed=7, slots=arguments.slots)
job.track(model=model, optimizer=optimizer, data=data)

for step in job.steps(arguments.steps):
    with step:
        rank, world_size = job.rank, job.world_size
        arm()
        hurt("top")
        for x, y in step.batches(data, keep=not arguments.whole):
            hurt(str(data.slot - rank * arguments.slots // world_size))
            loss = nn.functional.cross_entropy(model(x), y % 4)
            step.backward(loss)
            step.add(loss=loss)
            os.write(rounds, f"{step.number} {data.slot} {rank} {os.getpid()}\n".encode())
        hurt("behind")
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        step.log(last=loss)
    if step.is_committed:
        text = f"{job.logged['loss'].hex()}/{job.logged['last'].hex()}"
        os.write(ledger, f"{step.number} {rank} {os.getpid()} {job.view} {world_size} {text}\n".encode())
(work / f"final-{job.rank}").write_text(f"{job.step} {digest(model.state_dict(), optimizer.state_dict())}")
