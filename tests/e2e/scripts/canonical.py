"""A session with the canonical reduction: DDP, Adam, dropout, clipping, a schedule, an average of the model.

    canonical.py STEPS SLOTS [--fault POINT:STEP:RANK:ACTION]… [--pause SECONDS]

WORK/ledger        step rank pid view world loss, one line a committed step and rank
WORK/slots         step, slot and loss (hexadecimal) of each slot of a committed step, one line a step and rank
WORK/final-RANK    step, digest of all tracked tensors
WORK/hurry         once it is there, nobody pauses between steps any more
A fault happens once. RANK may be last: the last one in the world as it is.
POINT    forward scatter (before an all to all) gather (before an all gather)
ACTION   kill cut
"""

import argparse
import faulthandler
import hashlib
import os
import signal
from pathlib import Path

import torch
from pacing import pause
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf
from holdfast.worker.collectives import groups
from holdfast.worker.parallel import canonical

faulthandler.register(signal.SIGUSR2)
parser = argparse.ArgumentParser()
parser.add_argument("steps", type=int)
parser.add_argument("slots", type=int)
parser.add_argument("--fault", action="append", default=[])
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--until-hurry", action="store_true")
parser.add_argument("--reduction", default="canonical")
arguments = parser.parse_args()
work = Path(os.environ["WORK"])
ledger = os.open(work / "ledger", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
slots = os.open(work / "slots", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def hurt(point: str) -> None:
    for index, text in enumerate(arguments.fault):
        where, step, rank, action = text.split(":")
        who = job.world_size - 1 if rank == "last" else int(rank)
        if (where, int(step), who) != (point, job.step, job.rank):
            continue
        try:
            os.close(os.open(work / f"fired-{index}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        groups.current_connections().mesh.shut()


def hurting(point: str, exchange):
    def call(*values, **named):
        hurt(point)
        return exchange(*values, **named)

    return call


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 4)
        self.norm = nn.LayerNorm(64)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        hurt("forward")
        return self.last(torch.dropout(torch.relu(self.middle(x)), 0.2, train=True))


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return torch.randn(16, generator=torch.Generator().manual_seed(index)), int(index)


def digest(*states) -> str:
    found = hashlib.sha256()

    def add(value) -> None:
        if isinstance(value, torch.Tensor):
            found.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in value:
                add(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        else:
            found.update(repr(value).encode())

    for state in states:
        add(state)
    return found.hexdigest()[:16]


job = hf.init(reduction=arguments.reduction)
canonical.all_to_all = hurting("scatter", canonical.all_to_all)
canonical.all_gather = hurting("gather", canonical.all_gather)
torch.manual_seed(0)
model = DistributedDataParallel(Net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.95)
average = torch.optim.swa_utils.AveragedModel(
    model.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
)
data = hf.Loader(Data(), global_batch_size=24, seed=7, slots=arguments.slots)
job.track(model=model, optimizer=optimizer, scheduler=scheduler, average=average, data=data)

for step in job.steps(arguments.steps):
    losses: dict[int, float] = {}
    with step:
        rank, world_size = job.rank, job.world_size
        for x, y in step.batches(data):
            loss = nn.functional.cross_entropy(model(x), y % 4)
            step.backward(loss)
            if data.loss_scale:
                losses[data.slot] = float(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        average.update_parameters(model.module)
        optimizer.zero_grad()
    if step.is_committed:
        os.write(ledger, f"{step.number} {rank} {os.getpid()} {job.view} {world_size} 0\n".encode())
        lines = [f"{step.number} {slot} {loss.hex()}\n" for slot, loss in losses.items()]
        os.write(slots, "".join(lines).encode())
    pause(work, arguments.pause, arguments.steps - step.number - 1, arguments.until_hurry)
(work / f"final-{job.rank}").write_text(
    f"{job.step} {digest(model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), average.state_dict())}"
)
