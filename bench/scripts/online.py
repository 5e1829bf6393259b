"""A session for the online soak: it trains in slow steps, says what each of them did, and can be hurt from outside.

    online.py MODEL STEPS PAUSE_MS SLOTS

$WORK/ledger        tried STEP RANK VIEW WORLD PID LOSS SAMPLE,…   before the barrier, so also by who dies in it
                    done STEP RANK VIEW WORLD PID TIME             after the commit; view and rank of the attempt
$WORK/ears/PID      a pipe; a letter in it hurts: c cuts the mesh now, and at the next point of a step r raises an error
                    worth a retry, b one that is not, x exits
$WORK/final-RANK    steps, digest of parameters, optimizer and scheduler state, and the parameters
$WORK/fast          once it is there, steps are not slowed down any more

The pause is spread over all points of a step, so that a fault at a random moment hits any of them.
"""

import faulthandler
import hashlib
import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf
from holdfast.errors import HoldfastError
from holdfast.worker.collectives import groups

SAMPLES, GLOBAL_BATCH = 1_000, 24
POINTS = 7
faulthandler.register(signal.SIGUSR2)  # so that the soak can ask where it hangs
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
kind, steps, pause_s, slots = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]) / 1e3, int(sys.argv[4])
work = Path(os.environ["WORK"])
ledger = os.open(work / "ledger", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
asked: list[str] = []


def listen() -> None:
    """On a thread: a cut comes at any moment, also while the main thread hangs in a collective."""
    ear = work / "ears" / str(os.getpid())
    os.mkfifo(ear)
    with ear.open("r+b", buffering=0) as pipe:
        while letter := pipe.read(1).decode():
            if letter == "c":
                cut()
            else:
                asked.append(letter)


def cut() -> None:
    try:
        groups.current_connections().mesh.shut()
    except HoldfastError:
        pass  # in no view


def point(retryable: bool = True) -> None:
    """A place in a step where something may go wrong."""
    if not (work / "fast").exists():
        time.sleep(pause_s / POINTS)
    if asked and (retryable or asked[0] != "r"):
        match asked.pop(0):
            case "r":
                raise hf.RetryableError("worth a second try")
            case "b":
                raise ValueError("a bug in the script")
            case "x":
                sys.exit(3)


class Backward(torch.autograd.Function):
    """A point in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        point()
        return gradient


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        point()
        x = Backward.apply(x)
        return self.last(torch.dropout(torch.relu(self.middle(x)), 0.2, train=True))


class SlowAdam(torch.optim.Adam):
    """With a point in the middle of the update."""

    def step(self, closure: Any = None) -> Any:
        whole = self.param_groups
        try:
            for part in whole:
                self.param_groups = [part]
                super().step(closure)
                self.param_groups = whole
                point(retryable=False)
        finally:
            self.param_groups = whole


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(16, generator=generator, dtype=torch.get_default_dtype()), index % 4, index


def build() -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    if kind == "ddp":
        return DistributedDataParallel(net)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world = dist.get_world_size()
    shape, names = ((world,), None) if kind == "fsdp" else ((2, world // 2), ("replicate", "shard"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in (net.first, net.middle):
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def digest(*values: Any) -> str:
    found = hashlib.sha256()

    def add(value: Any) -> None:
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
        else:
            found.update(repr(value).encode())

    for value in values:
        add(value)
    return found.hexdigest()


def note(*words: object) -> None:
    os.write(ledger, (" ".join(map(str, words)) + "\n").encode())


threading.Thread(target=listen, daemon=True).start()
if slots:
    torch.set_default_dtype(torch.float64)  # another split is another order of additions: let it be small
job = hf.init(seed=1)
model = build()
parameters = list(model.parameters())
optimizer = SlowAdam([{"params": parameters[:3]}, {"params": parameters[3:]}], lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.95)
data = hf.Loader(Data(), global_batch_size=GLOBAL_BATCH, seed=7, slots=slots or None)
job.track(model=model, optimizer=optimizer, scheduler=scheduler, data=data)

for step in job.steps(steps):
    attempt: tuple[object, ...] = ()
    with step:
        point()
        total, samples = 0.0, []
        for x, y, index in step.batches(data):
            loss = nn.functional.cross_entropy(model(x), y)
            step.backward(loss)
            total += float(loss.detach()) * len(y)
            samples += index.tolist()
        point()
        attempt = (step.number, job.rank, job.view, job.world_size, os.getpid())
        note("tried", *attempt, (total / len(samples)).hex(), ",".join(map(str, samples)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step.log(loss=total)
    if step.is_committed:
        note("done", *attempt, time.time())
    if not (work / "fast").exists():
        time.sleep(pause_s / POINTS)

state = digest(model.state_dict(), optimizer.state_dict(), scheduler.state_dict())
final: dict[str, Any] = {"steps": job.step, "digest": state}
if kind == "ddp":
    final["parameters"] = [value for p in model.parameters() for value in p.detach().double().flatten().tolist()]
(work / f"final-{job.rank}").write_text(json.dumps(final))
