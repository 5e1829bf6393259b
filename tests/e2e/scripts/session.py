"""A session that trains and can hurt itself: Adam, dropout, BatchNorm-free or not, DDP, FSDP2 or HSDP.

    session.py MODEL STEPS [--fault POINT:STEP:RANK:ACTION]… [--pause SECONDS] [--features …] [--evaluate STEP:SECONDS]

WORK/ledger        step rank pid view world loss (hexadecimal), one line a committed step and rank
WORK/saved-S-RANK  with the feature outside: digest of the state before step S, taken outside of the step before
WORK/final-RANK    step, digest of parameters, optimizer and scheduler state, plain values
WORK/samples       step and numbers of the samples of a step, where a dataset is used
WORK/trained       step, rank and numbers of the samples of a committed step, where a dataset is used
WORK/hurry         once it is there, nobody pauses between steps any more; until then, in the second half of the steps
                   for ten times as long, and with --until-hurry the last steps take a minute (pacing.py)
WORK/wait          while it is there, processes wait before they join
WORK/stillborn-X   while it is there, processes of the node whose agent has NODE=X end before they join
A fault happens once, in whichever process has the rank when the step comes; one whose action ends in ! each time.
POINT    data forward backward collective barrier-before barrier-in update-before update-middle update-after
         capture copy outside between settle restore restored tree-up tree-root tree-down
         settle, restore and restored are of a recovery: before all agree on the step, before and after newcomers get
         their state.
         tree-up and tree-down, with the feature tree: before a leader says for its group, and before it hands the
         answer down; tree-root: before the root hands it to the other leaders.
         copy is in the middle of a snapshot for the agent: one piece of it is copied, the others are not.
ACTION   kill raise bug cut stop exit linger
         linger waits until all other faults have happened.
"""

import argparse
import atexit
import faulthandler
import hashlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from calm import wait_until_calm
from pacing import pause
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf
from holdfast.worker.collectives import agreement_tree, groups
from holdfast.worker.restore import from_peers
from holdfast.worker.resume_point import RankStatus

faulthandler.register(signal.SIGUSR2)  # so that a person can ask where it is
parser = argparse.ArgumentParser()
parser.add_argument("model", choices=["ddp", "fsdp", "hsdp", "alone"])
parser.add_argument("steps", type=int)
parser.add_argument("--fault", action="append", default=[])
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--until-hurry", action="store_true")
parser.add_argument("--features", default="", help="tail,clip,scaler,accumulate,batchnorm,loader,ema,early,…")
parser.add_argument("--apart", action="store_true", help="no fault before the incident of the last one is closed")
parser.add_argument("--slow-exit", type=float, default=0.0, help="how long the process of a bug takes to come down")
parser.add_argument("--together", action="store_true", help="who dies at a point waits for the others that do")
parser.add_argument("--resizable", choices=["yes", "auto"], default="yes", help="of scripts without a loader")
parser.add_argument("--slots", type=int, default=0)
parser.add_argument("--evaluate", default="", help="before this step, take so long, with hangs off")
arguments = parser.parse_args()
features = set(arguments.features.split(","))
if "double" in features:  # sums in another order differ too little to turn the sign of an activation some day
    torch.set_default_dtype(torch.float64)
work = Path(os.environ["WORK"])
ledger = os.open(work / "ledger", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
samples = os.open(work / "samples", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
trained = os.open(work / "trained", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
while (work / "wait").exists():
    time.sleep(0.01)
if (work / f"stillborn-{os.environ.get('NODE')}").exists():
    sys.exit(9)


class Fault:
    def __init__(self, text: str, index: int) -> None:
        self.point, step, rank, action = text.split(":")
        self.action, self.is_lasting = action.rstrip("!"), action.endswith("!")
        self.step, self.rank, self.index = int(step), int(rank), index

    @property
    def moment(self) -> tuple[str, int]:
        return self.point, self.step

    @property
    def has_fired(self) -> bool:
        return (work / f"fired-{self.index}").exists()


faults = [Fault(text, index) for index, text in enumerate(arguments.fault)]


def hurt(point: str, step: int | None = None) -> None:
    for fault in faults:
        if (fault.point, fault.step, fault.rank) != (point, job.step if step is None else step, job.rank):
            continue
        try:
            os.close(os.open(work / f"fired-{fault.index}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            if not fault.is_lasting:
                continue
        if arguments.apart:
            wait_until_calm()
        while arguments.together and not all(one.has_fired for one in faults if one.moment == fault.moment):
            time.sleep(0.001)
        os.write(ledger, f"# {point} {fault.action} step {job.step} rank {job.rank} pid {os.getpid()}\n".encode())
        act(fault.action)


def come_down_slowly() -> None:
    """As an interpreter does that closes connections long before it has ended."""
    groups.current_connections().mesh.shut()
    time.sleep(arguments.slow_exit)


def die_in_retry() -> None:
    """SIGKILL to this process when the default group is about to connect again."""
    group = groups.default_group()._inners["cpu"]
    while not group._is_retrying:
        time.sleep(0.0001)
    os.kill(os.getpid(), signal.SIGKILL)


def act(action: str) -> None:
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise hf.RetryableError("worth a second try")
        case "bug":
            if arguments.slow_exit:
                atexit.register(come_down_slowly)
            raise ValueError("a bug in the user's code")
        case "exit":
            sys.exit(3)
        case "linger":
            while not all(fault.has_fired for fault in faults):
                time.sleep(0.001)
        case "cut":
            groups.current_connections().mesh.shut()
        case "cut-and-kill":
            threading.Thread(target=die_in_retry, daemon=True).start()
            groups.current_connections().mesh.shut()


class Hurting(torch.autograd.Function):
    """Hurts in the backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        hurt("backward")
        return gradient


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 4)
        self.norm = nn.BatchNorm1d(64) if "batchnorm" in features else nn.Identity()

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        hurt("forward")
        x = Hurting.apply(x)
        return self.last(torch.dropout(torch.relu(self.middle(x)), 0.2, train=True))


class HurtAdam(torch.optim.Adam):
    """Hurts after half of an update."""

    def step(self, closure=None):
        middle = [f for f in faults if (f.point, f.step, f.rank) == ("update-middle", job.step, job.rank)]
        if middle and not (work / f"fired-{middle[0].index}").exists():
            groups_of_parameters = self.param_groups
            self.param_groups = groups_of_parameters[:1]
            super().step()
            self.param_groups = groups_of_parameters
            hurt("update-middle")
        return super().step(closure)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        os.write(samples, f"{job.step} {index} {job.rank}\n".encode())
        generator = torch.Generator().manual_seed(index)
        return torch.randn(16, generator=generator), int(index)


def batch(step: int, rank: int):
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    return torch.randn(8, 16, generator=generator), torch.randint(0, 4, (8,), generator=generator)


def build():
    torch.manual_seed(0)
    net = Net()
    if arguments.model == "ddp":
        return DistributedDataParallel(net)
    if arguments.model == "alone":
        return net
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world = dist.get_world_size()
    shape, names = ((world,), None) if arguments.model == "fsdp" else ((2, world // 2), ("replicate", "shard"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in (net.first, net.middle):
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def digest(*values) -> str:
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
        else:
            found.update(repr(value).encode())

    for value in values:
        add(value)
    return found.hexdigest()[:16]


def barrier_hurts() -> None:
    agree = groups.agree

    def hurting_agree(values):
        if len(values) > 1:  # the commit's
            hurt("barrier-before")
            if "tree" in features:
                return hurt_in_tree(lambda: agree(values))
            victims = [f for f in faults if (f.point, f.step, f.rank) == ("barrier-in", job.step, job.rank)]
            if victims and not (work / f"fired-{victims[0].index}").exists():
                contribution = torch.tensor(list(values), dtype=torch.int64)
                groups.default_group().allreduce([contribution], groups._maximum)
                hurt("barrier-in")
        return agree(values)

    groups.agree = hurting_agree


def grow_trees() -> None:
    """All views of more than two ranks agree by trees of pairs."""
    agreement_tree.FLAT_RANKS_MAX = agreement_tree.FAN_MAX = 2


def hurt_in_tree(agree):
    kind = agreement_tree.AgreementTree
    gather, broadcast = kind._gather, kind._broadcast

    def hurting_gather(self, height, *others):
        if height == 1:
            hurt("tree-up")
        return gather(self, height, *others)

    def hurting_broadcast(self, height, *others):
        hurt("tree-root" if height == 1 else "tree-down")
        return broadcast(self, height, *others)

    kind._gather, kind._broadcast = hurting_gather, hurting_broadcast
    try:
        return agree()
    finally:
        kind._gather, kind._broadcast = gather, broadcast


def capture_hurts() -> None:
    from holdfast.state.arena import Arena

    take = Arena.take

    def hurting_take(self, flat, step):
        hurt("capture")
        return take(self, flat, step)

    Arena.take = hurting_take


def copy_hurts() -> None:
    """Snapshots are copied in tiny pieces then, so that there is a middle."""
    from holdfast.state import copier

    if any(fault.point == "copy" for fault in faults):
        copier.CHUNK_BYTES = 1024
    copy = copier.StateCopy._copy

    def hurting_copy(self, piece):
        copy(self, piece)
        if not self.is_over:
            hurt("copy")

    copier.StateCopy._copy = hurting_copy


def recovery_hurts() -> None:
    gather, carry_out = groups.gather, from_peers.carry_out

    def hurting_gather(values):
        if isinstance(values, RankStatus) and values.next_step > 0:
            hurt("settle")
        return gather(values)

    def hurting_carry_out(transfers, settlement, *others):
        if transfers:
            hurt("restore", settlement.next_step)
        carry_out(transfers, settlement, *others)
        if transfers:
            hurt("restored", settlement.next_step)

    groups.gather, from_peers.carry_out = hurting_gather, hurting_carry_out


class Meter:
    """What one rank has for itself: sums over its own samples."""

    def __init__(self) -> None:
        self.seen, self.sums, self.of = 0, torch.zeros(3), -1

    def add(self, loss) -> None:
        self.seen, self.of = self.seen + 1, job.rank
        self.sums += loss * torch.arange(1, 4)

    def state_dict(self):
        return {"seen": self.seen, "sums": self.sums, "of": self.of}

    def load_state_dict(self, state):
        self.seen, self.sums, self.of = state["seen"], state["sums"].clone(), state["of"]


if "tree" in features:
    grow_trees()
# Without a loader each rank makes its batches of a step by its rank, whatever the size of the world.
is_fixed = arguments.resizable == "auto" or features & {"loader", "meter", "zero"}
job = hf.init(resizable=None if is_fixed else True)
barrier_hurts()
capture_hurts()
copy_hurts()
recovery_hurts()
model = build()
parameters = list(model.parameters())
optimizer = HurtAdam([{"params": parameters[:3]}, {"params": parameters[3:]}], lr=1e-2)
if "zero" in features:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
tracked = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "begun": 0, "weighed": 0.1}
if "ema" in features:
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    ema = torch.optim.swa_utils.AveragedModel(model.module, multi_avg_fn=average)
    tracked["ema"] = ema
if "scaler" in features:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    tracked["scaler"] = scaler
if "loader" in features:
    data = hf.Loader(Data(), global_batch_size=24, seed=7, slots=arguments.slots or None)
    tracked["data"] = data
if features & {"torch", "later"}:  # torch's own loader, shuffled by the global generator, with a process of its own
    batches = torch.utils.data.DataLoader(Data(), batch_size=8, shuffle=True, num_workers=1)
meter = Meter()
if "meter" in features:
    job.track_local(meter=meter)
job.track(**tracked)
optimizer.register_step_pre_hook(lambda *_: hurt("update-before"))
(work / f"started-{os.getpid()}").touch()


def averaged():
    return ema.state_dict() if "ema" in features else 0


def own():
    return meter.state_dict() if "meter" in features else 0


def is_updating(number: int) -> bool:
    return not features & {"micro", "nosync"} or number % 3 == 2


def one_loss(x, y, step):
    if "nosync" in features and not is_updating(step.number):
        if arguments.model != "ddp":
            model.set_requires_gradient_sync(False)
            return add_gradients(x, y, step)
        with model.no_sync():
            return add_gradients(x, y, step)
    return add_gradients(x, y, step)


def add_gradients(x, y, step):
    loss = nn.functional.cross_entropy(model(x), y % 4)
    if "scaler" in features:
        scaler.scale(step.scale(loss)).backward()
    else:
        step.backward(loss)
    return loss.detach()


def evaluate() -> None:
    step, _, seconds = arguments.evaluate.partition(":")
    if step == str(job.step):
        with job.paused("an evaluation"):
            time.sleep(float(seconds))


def train() -> None:
    for step in job.steps(arguments.steps):
        drawn: list[int] = []
        if "before" in features:
            scheduler.step()
        with step:
            rank, world_size = job.rank, job.world_size  # at the end of the step they may be those of the next
            job.values.begun += 1
            evaluate()
            hurt("data")
            if "loader" in features:
                losses = []
                for x, y in step.batches(data):
                    drawn += y.tolist()
                    losses.append(one_loss(x, y, step))
                if "later" in features and step.number >= 5:  # a source that nobody shares out
                    losses += [0 * x.sum() for x, _ in step.batches(batches)]
            elif "torch" in features:
                losses = [one_loss(x, y, step) for x, y in step.batches(batches)]
            else:
                halves = [batch(step.number, job.rank)]
                if "accumulate" in features:
                    x, y = halves[0]
                    halves = [(x[:4], y[:4]), (x[4:], y[4:])]
                losses = [one_loss(x, y, step) / len(halves) for x, y in halves]
            loss = torch.stack(losses).sum()
            if any((f.point, f.step, f.rank) == ("collective", step.number, job.rank) for f in faults):
                work_under_way = dist.all_reduce(torch.zeros(1000), async_op=True)
                hurt("collective")
                work_under_way.wait()
            elif any((f.point, f.step) == ("collective", step.number) for f in faults):
                dist.all_reduce(torch.zeros(1000))
            if "clip" in features:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if "early" in features:
                ema.update_parameters(model.module)
            if "scaler" in features:
                scaler.step(optimizer)
                scaler.update()
            elif is_updating(step.number):
                optimizer.step()
                optimizer.zero_grad()
            hurt("update-after")
            if "tail" in features and step.number % 3 == 0:
                dist.all_reduce(loss)
            if not features & {"before", "outside"}:
                scheduler.step()
            if "ema" in features and not features & {"early", "outside"}:
                ema.update_parameters(model.module)
            if is_updating(step.number):
                optimizer.zero_grad()
            if "meter" in features:
                meter.add(loss.detach())
            job.values.weighed = job.values.weighed / 3 + step.number  # another number if a step is missing, or twice
            step.log(loss=loss)
        if "outside" in features:
            scheduler.step()
            hurt("outside", step.number)
            if "ema" in features:
                ema.update_parameters(model.module)
        if step.is_committed:
            if "outside" in features:
                state = digest(model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), averaged())
                (work / f"saved-{job.step}-{rank}").write_text(state)
            line = f"{step.number} {rank} {os.getpid()} {job.view} {world_size} {job.logged['loss'].hex()}\n"
            os.write(ledger, line.encode())
            if drawn:
                os.write(trained, f"{step.number} {rank} {' '.join(map(str, drawn))}\n".encode())
        if "outside" in features:
            meter.seen += 1
        hurt("between")
        late = 10 if step.number > arguments.steps // 2 else 1
        pause(work, arguments.pause * late, arguments.steps - step.number - 1, arguments.until_hurry)


train()
hurt("epilogue")
inner = optimizer.optim if "zero" in features else optimizer
values = (job.values.begun, job.values.weighed)
(work / f"final-{job.rank}").write_text(
    f"{job.step} {digest(model.state_dict(), inner.state_dict(), scheduler.state_dict(), averaged(), own(), values)}"
)
