"""A small session, DDP or FSDP2, in which ranks hang or die where they are told to.

    hanging.py ddp|fsdp STEPS STEP_SECONDS [POINT:STEP:RANK:ACTION]…

POINT    data forward collective barrier update capture between join settle restore restored build spare close epilogue
         capture is in the middle of a copy of the state for a snapshot, in this step or the first one after it;
         restore is before newcomers get their state, on ranks that send and that receive, restored after it;
         build is in a process that replaces another, spare in one without a rank
ACTION   stop (SIGSTOP to itself)   sleep (for ever)   kill
         lock (wait for a lock that it has)   spin (an endless loop)
Each fault happens once. WORK/ledger: a line for each committed step and rank, and one for each fault.
"""

import hashlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf
from holdfast.state import copier
from holdfast.worker import engine, membership, parking
from holdfast.worker.collectives import groups
from holdfast.worker.restore import from_peers
from holdfast.worker.resume_point import RankStatus

model_kind, steps, step_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
faults = [text.split(":") for text in sys.argv[4:]]
work = Path(os.environ["WORK"])
ledger = os.open(work / "ledger", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def write(*words: object) -> None:
    os.write(ledger, f"{' '.join(map(str, words))}\n".encode())


def hurt(point: str, step: int, rank: int) -> None:
    for index, (where, at, whom, action) in enumerate(faults):
        is_time = step >= int(at) if point == "capture" else step == int(at)
        if (where, int(whom)) != (point, rank) or not is_time:
            continue
        try:
            os.close(os.open(work / f"fired-{index}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        write("fault", time.monotonic(), index, rank, os.getpid())
        if action == "sleep":
            time.sleep(1e6)
        if action == "lock":
            lock = threading.Lock()
            while lock.acquire():
                pass
        while action == "spin":
            pass
        os.kill(os.getpid(), signal.SIGSTOP if action == "stop" else signal.SIGKILL)


def hurt_inside(owner: object, name: str, point: str, is_meant=lambda *_: True) -> None:
    """Hurt before a function of Holdfast's own."""
    inner = getattr(owner, name)

    def hurting(*arguments, **named):
        if is_meant(*arguments):
            hurt(point, job.step, job.rank)
        return inner(*arguments, **named)

    setattr(owner, name, hurting)


def restoring_hurts() -> None:
    carry_out = from_peers.carry_out

    def hurting(transfers, resume, *others):
        if transfers:
            hurt("restore", resume.next_step, job.rank)
        carry_out(transfers, resume, *others)
        if transfers:
            hurt("restored", resume.next_step, job.rank)

    from_peers.carry_out = hurting


def digest(*trees: object) -> str:
    found = hashlib.sha256()

    def add(value) -> None:
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
        if isinstance(value, torch.Tensor):
            found.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in value:
                add(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)

    for tree in trees:
        add(tree)
    return found.hexdigest()[:16]


def build():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    if model_kind == "ddp":
        return DistributedDataParallel(net)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(net[2], mesh=mesh)
    return fully_shard(net, mesh=mesh)


job = hf.init()
if (spare := parking.current()) is not None and spare.assignment is None:
    hurt("spare", -1, -1)
elif (work / "fired-0").exists():
    hurt("build", -1, job.rank)
hurt_inside(groups, "agree", "barrier", lambda values: len(values) > 2)
hurt_inside(groups, "gather", "settle", lambda values: isinstance(values, RankStatus) and values.next_step > 0)
hurt_inside(membership.Membership, "_join", "join")
hurt_inside(copier.StateCopy, "_copy", "capture")
restoring_hurts()
hurt_inside(engine.Engine, "close", "close")
model = build()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
job.track(model=model, optimizer=optimizer)
for step in job.steps(steps):
    with step:
        rank = job.rank
        hurt("data", step.number, rank)
        torch.manual_seed(step.number * 1000 + rank)
        x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
        time.sleep(step_s)
        hurt("forward", step.number, rank)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if any((point, int(at)) == ("collective", step.number) for point, at, *_ in faults):
            under_way = dist.all_reduce(torch.zeros(1000), async_op=True)
            hurt("collective", step.number, rank)
            under_way.wait()
        optimizer.step()
        hurt("update", step.number, rank)
        optimizer.zero_grad()
    if step.is_committed:
        write("step", time.monotonic(), step.number, rank, os.getpid(), loss.item().hex())
    hurt("between", step.number, rank)
hurt("epilogue", -1, job.rank)
write("end", time.monotonic(), job.rank, os.getpid(), digest(model.state_dict(), optimizer.state_dict()))
