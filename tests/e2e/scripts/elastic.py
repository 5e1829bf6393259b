"""A sharded session in a function that is entered again when the world changes.

    elastic.py MODEL STEPS [--fault POINT:STEP:RANK:ACTION]… [--world-at STEP:WORLD]…

WORK/ledger        step rank pid view world loss samples…, one line a committed step and rank; the loss is this rank's
                   part of the global mean
WORK/entered       pid rank world, and how many older models are still there; one line each time the function is entered
WORK/final-RANK    step, digest of all parameters and of the optimizer's state
WORK/state.pt      the same as tensors, from rank 0
POINT    forward barrier-before passed between
         rebuild reshard exchange agreed: on the way into a view, after another fault
ACTION   kill lost (the barrier's answer does not come, and somebody who got it dies first)
After a --world-at step everybody waits until a view is planned, if the size of the world is another one.
"""

import argparse
import faulthandler
import hashlib
import os
import signal
import time
import weakref
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf
from holdfast.worker.collectives import groups
from holdfast.worker.restore import reshard_live
from holdfast.worker.restore.peer_replicas import ReplicaRing

WAIT_S = 50.0

faulthandler.register(signal.SIGUSR2)
parser = argparse.ArgumentParser()
parser.add_argument("model", choices=["fsdp", "ddp", "mesh"])
parser.add_argument("steps", type=int)
parser.add_argument("--fault", action="append", default=[])
parser.add_argument("--world-at", action="append", default=[])
arguments = parser.parse_args()
work = Path(os.environ["WORK"])
faults = [(index, *text.split(":")) for index, text in enumerate(arguments.fault)]
world_at = dict(tuple(map(int, text.split(":"))) for text in arguments.world_at)


models: list[weakref.ref[nn.Module]] = []


def append(name: str, line: str) -> None:
    with (work / name).open("a") as file:
        file.write(line + "\n")


def due(point: str) -> tuple[int, str] | None:
    """A fault that is to happen here and now: its number and what it is."""
    for index, where, step, rank, action in faults:
        if (where, int(step), int(rank)) == (point, job.step, job.rank) and not (work / f"fired-{index}").exists():
            return index, action
    return None


def hurt(point: str) -> None:
    if (found := due(point)) is None:
        return
    index, action = found
    (work / f"fired-{index}").touch()
    append("ledger", f"# {point} {action} step {job.step} rank {job.rank} pid {os.getpid()}")
    os.kill(os.getpid(), signal.SIGKILL)


def hurt_later(point: str) -> None:
    """Once another fault has happened."""
    if list(work.glob("fired-*")):
        hurt(point)


def wait_until(condition) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def agree_and_be_hurt(values, agree=groups.agree):
    if len(values) < 4:  # not the commit's
        answer = agree(values)
        hurt_later("agreed")
        return answer
    hurt("barrier-before")
    answer = agree(values)
    if found := due("passed"):
        (work / f"fired-{found[0]}").touch()
        killer = next(index for index, point, _, _, action in faults if (point, action) == ("between", "kill"))
        wait_until(lambda: (work / f"fired-{killer}").exists())
        raise ConnectionError("the barrier's answer was lost")
    return answer


def reshard_and_be_hurt(skeletons, fetch, tracked, reshard=reshard_live.reshard):
    def fetch_and_be_hurt(shard, index):
        hurt_later("reshard")
        return fetch(shard, index)

    reshard(skeletons, fetch_and_be_hurt, tracked)


def exchange_and_be_hurt(self, step, exchange=ReplicaRing.exchange):
    hurt_later("exchange")
    exchange(self, step)


groups.agree = agree_and_be_hurt
reshard_live.reshard = reshard_and_be_hurt
ReplicaRing.exchange = exchange_and_be_hurt


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(7, 33), nn.LayerNorm(33), nn.Linear(33, 4)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        hurt("forward")
        return self.last(x)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(7, generator=generator), int(index % 4), index


def build():
    torch.manual_seed(0)
    net = Net()
    if arguments.model == "ddp":
        return DistributedDataParallel(net)
    if arguments.model == "mesh":
        mesh = init_device_mesh("cpu", (1, job.world_size), mesh_dim_names=("one", "other"))
        pair = torch.distributed.new_group([0, 1])
        net.pair = pair if job.rank < 2 else None
        return DistributedDataParallel(net, process_group=mesh["other"].get_group())
    mesh = init_device_mesh("cpu", (job.world_size,))
    fully_shard(net.first, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def whole(value):
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return value.full_tensor().clone() if hasattr(value, "full_tensor") else value


def leave_final(model, optimizer) -> None:
    named = {name: whole(value) for name, value in model.state_dict().items()}
    moments = {str(key): whole(value) for key, value in optimizer.state_dict()["state"].items()}
    found = hashlib.sha256()
    for tensor in (*named.values(), *(item for state in moments.values() for item in state.values())):
        found.update(tensor.detach().contiguous().numpy().tobytes())
    (work / f"final-{job.rank}").write_text(f"{job.step} {found.hexdigest()[:16]}")
    if job.rank == 0:
        torch.save({"model": named, "moments": moments}, work / "state.pt")


@hf.elastic
def train() -> None:
    global job
    job = hf.init(seed=5)
    append("entered", f"{os.getpid()} {job.rank} {job.world_size} {sum(old() is not None for old in models)}")
    hurt_later("rebuild")
    model = build()
    models.append(weakref.ref(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    data = hf.Loader(Data(), global_batch_size=24, seed=7)
    job.track(model=model, optimizer=optimizer, scheduler=scheduler, data=data)
    for step in job.steps(arguments.steps):
        with step:
            for x, y, numbers in step.batches(data):
                samples = numbers.tolist()
                loss = nn.functional.cross_entropy(model(x), y)
                step.backward(loss)
            if getattr(getattr(model, "module", None), "pair", None) is not None:
                torch.distributed.all_reduce(torch.zeros(1), group=model.module.pair)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step.log(loss=step.scale(loss) / job.world_size)
        hurt("between")
        if step.is_committed:
            shown = f"{job.logged['loss']!r} {' '.join(map(str, samples))}"
            append("ledger", f"{step.number} {job.rank} {os.getpid()} {job.view} {job.world_size} {shown}")
        if step.number in world_at and job.world_size != world_at[step.number]:
            with job.paused("until the world changes"):
                wait_until(lambda: job._engine._agent.newest_view > job.view)
    leave_final(model, optimizer)


train()
