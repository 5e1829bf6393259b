"""A model that is cut along a mesh, in a function that is entered again when the number of its replicas changes.

    elastic_layouts.py LAYOUT STEPS [--fault POINT:STEP:RANK]… [--world-at STEP:WORLD]…

LAYOUT   pipeline (1F1B × DDP), tensor (replicate × TP), hybrid (HSDP), experts (by hand, declared): two shards each
WORK/ledger        step rank pid world loss samples…, one line a committed step and rank; the loss is this rank's part
                   of the global mean, and of ranks with the same batches one tells the samples
WORK/entered       pid rank world, one line each time the function is entered
WORK/state-RANK.pt the parameters and the optimizer's state at the end
POINT    forward barrier
         build join: on the way into a view, after another fault. The process is killed there, once
After a --world-at step everybody waits until a view is planned, if the size of the world is another one.
"""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf
from holdfast.worker.collectives import groups
from holdfast.worker.restore import from_twins

SHARDS = 2
WAIT_S = 50.0

parser = argparse.ArgumentParser()
parser.add_argument("layout", choices=["pipeline", "tensor", "hybrid", "experts"])
parser.add_argument("steps", type=int)
parser.add_argument("--fault", action="append", default=[])
parser.add_argument("--world-at", action="append", default=[])
arguments = parser.parse_args()
work = Path(os.environ["WORK"])
faults = [(index, *text.split(":")) for index, text in enumerate(arguments.fault)]
world_at = dict(tuple(map(int, text.split(":"))) for text in arguments.world_at)


def append(name: str, line: str) -> None:
    with (work / name).open("a") as file:
        file.write(line + "\n")


def hurt(point: str) -> None:
    for index, where, step, rank in faults:
        fired = work / f"fired-{index}"
        if (where, int(step), int(rank)) == (point, job.step, dist.get_rank()) and not fired.exists():
            fired.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def hurt_later(point: str) -> None:
    """Once another fault has happened."""
    if list(work.glob("fired-*")):
        hurt(point)


def agree_and_be_hurt(values, agree=groups.agree):
    if len(values) > 4:  # the commit's
        hurt("barrier")
    return agree(values)


def send_and_be_hurt(snapshot, to, send=from_twins.send_snapshot):
    hurt_later("join")
    return send(snapshot, to)


groups.agree = agree_and_be_hurt
from_twins.send_snapshot = send_and_be_hurt


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator), int(index % 4), index


class Half(nn.Module):
    """One half of the model, by the names that its layers have in the whole."""

    def __init__(self, halves: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [
            nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.LayerNorm(32)),
            nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)),
        ]
        self.halves = nn.ModuleDict({str(number): layers[number] for number in halves})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for half in self.halves.values():
            x = half(x)
        hurt("forward")
        return x


class Experts(nn.Module):
    """An expert on each rank of a pair, cut by hand: names and shapes are the same on both."""

    def __init__(self, mesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 4)
        experts = [nn.Linear(32, 32), nn.Linear(32, 32)]
        self.expert, self.group = experts[mesh["ep"].get_local_rank()], mesh["ep"].get_group()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed.nn.functional import all_reduce

        hurt("forward")
        x = torch.relu(self.first(x))
        return self.last(x + all_reduce(self.expert(x), group=self.group) / SHARDS)


class Layout:
    """What one layout needs: the model, the loader's mesh, what is tracked beside, and a pass over a batch."""

    def __init__(self) -> None:
        replicas = job.world_size // SHARDS
        self.tracked: dict[str, object] = {}
        self.tells = True
        getattr(self, arguments.layout)(replicas)

    def pipeline(self, replicas: int) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        mesh = init_device_mesh("cpu", (SHARDS, replicas), mesh_dim_names=("pp", "dp"))
        number = mesh["pp"].get_local_rank()
        self.model = DistributedDataParallel(Half((number,)), process_group=mesh["dp"].get_group())
        stage = PipelineStage(self.model, number, SHARDS, torch.device("cpu"), group=mesh["pp"].get_group())
        self.schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=cross_entropy, scale_grads=True)
        self.data_mesh, self.tracked, self.tells = mesh["dp"], {"pipeline": self.schedule}, number == SHARDS - 1

    def tensor(self, replicas: int) -> None:
        from torch.distributed._composable.replicate_with_fsdp import replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (replicas, SHARDS), mesh_dim_names=("dp", "tp"))
        cuts = {"halves.1.0": ColwiseParallel(), "halves.1.2": RowwiseParallel()}
        self.model = replicate(parallelize_module(Half((0, 1)), mesh["tp"], cuts, src_data_rank=None), mesh=mesh["dp"])
        self.data_mesh, self.tells = mesh["dp"], mesh["tp"].get_local_rank() == 0

    def hybrid(self, replicas: int) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (replicas, SHARDS), mesh_dim_names=("replicate", "shard"))
        self.model, self.data_mesh = fully_shard(Half((0, 1)), mesh=mesh), mesh

    def experts(self, replicas: int) -> None:
        hf.init(mesh={"dp": replicas, "ep": SHARDS}, replicated="dp")
        mesh = init_device_mesh("cpu", (replicas, SHARDS), mesh_dim_names=("dp", "ep"))
        self.model, self.replicas, self.data_mesh = Experts(mesh), mesh["dp"].get_group(), mesh["dp"]
        self.tells = mesh["ep"].get_local_rank() == 0

    def train(self, step, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The gradients of a batch; return its loss."""
        if arguments.layout == "pipeline":
            losses: list[torch.Tensor] = []
            last = {"target": y, "losses": losses} if self.tells else {}
            self.schedule.step(*([] if self.tells else [x]), **last)
            return torch.stack([loss.detach() for loss in losses]).mean() if losses else torch.zeros(())
        loss = cross_entropy(self.model(x), y)
        step.backward(loss)
        if arguments.layout == "experts":
            for name, parameter in self.model.named_parameters():
                dist.all_reduce(parameter.grad, group=self.replicas)
                parameter.grad /= dist.get_world_size(self.replicas)
                if not name.startswith("expert"):  # its gradient is a half on each rank of a pair
                    dist.all_reduce(parameter.grad, group=self.model.group)
                    parameter.grad /= SHARDS
        return loss


def wait_until(condition) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def own(value):
    if isinstance(value, dict):
        return {key: own(item) for key, item in value.items()}
    return value.to_local().clone() if hasattr(value, "to_local") else value


@hf.elastic
def train() -> None:
    global job
    job = hf.init(seed=5)
    append("entered", f"{os.getpid()} {job.rank} {job.world_size}")
    hurt_later("build")
    layout = Layout()
    optimizer = torch.optim.SGD(layout.model.parameters(), lr=0.05, momentum=0.9)
    data = hf.Loader(Data(), global_batch_size=24, seed=7, mesh=layout.data_mesh)
    job.track(model=layout.model, optimizer=optimizer, data=data, **layout.tracked)
    coordinates = layout.data_mesh.size()
    for step in job.steps(arguments.steps):
        with step:
            for x, y, numbers in step.batches(data):
                samples = numbers.tolist() if layout.tells else []
                loss = layout.train(step, x, y) / coordinates
            optimizer.step()
            optimizer.zero_grad()
        if step.is_committed:
            told = f"{float(loss.detach()) * layout.tells!r} {' '.join(map(str, samples))}"
            append("ledger", f"{step.number} {job.rank} {os.getpid()} {job.world_size} {told}")
        if step.number in world_at and job.world_size != world_at[step.number]:
            with job.paused("until the world changes"):
                wait_until(lambda: job._engine._agent.newest_view > job.view)
    state = {"model": own(dict(layout.model.named_parameters())), "optimizer": own(optimizer.state_dict()["state"])}
    torch.save(state, work / f"state-{job.rank}.pt")


train()
