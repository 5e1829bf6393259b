"""What all variations of a training script share: the loop, the faults, and the record of what happened.

A variation is a function that builds what one kind of script has, and says what its body does where that is not usual:

    @variation()
    def ema_by_hand(bench: Bench) -> Training:
        net = Net()
        shadow = copy.deepcopy(net)
        return Training(DDP(net), tracked={"shadow": shadow}, then=lambda step: follow(shadow, net))

The loop of every variation, with the points at which a fault can happen:

    for step in job.steps(n):
        with step:                          body        at its beginning
            loss = training.compute(step)   before      after it: gradients are there, nothing is updated
            training.update(step)           after       after it: the optimizers have stepped
            training.then(step)             end         after it: schedulers, averages, meters
        training.outside(step)              between     after it, and after the step was recorded

ACTION of a fault is kill (SIGKILL), raise (a ValueError) or exit (code 3). Each happens once, in the process that has
the rank when the step comes, and only when the one before is repaired and, with spares, another spare is parked.

Written to WORK:

    events         one JSON object a line: begin, drew, committed, fault and note, each with step, rank and pid
    final-RANK     the digest of everything at the end, by name
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

import holdfast as hf
from holdfast.wire.progress_page import ProgressPage, WorkerPhase

GLOBAL_BATCH = 16
FEATURES, WIDTH, CLASSES = 8, 16, 4
SPARE_DEADLINE_S = 20.0


@dataclass
class Training:
    """What a variation has built."""

    model: nn.Module
    optimizer: Any = None
    """Adam, unless given."""
    tracked: dict[str, Any] = field(default_factory=dict)
    """What is tracked besides the model, the optimizer and the loader."""
    local: dict[str, Any] = field(default_factory=dict)
    """What is tracked for each rank by itself."""
    untracked: tuple[str, ...] = ()
    """What a script forgets to track."""
    data: Any = None
    """For `step.batches`: an hf.Loader, unless given. Its batches are (inputs, targets, numbers of the samples)."""
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    """Of a batch; cross entropy of the model, unless given."""
    compute: Callable[[hf.Step], torch.Tensor] | None = None
    """From the batch to the gradients; returns the loss."""
    update: Callable[[hf.Step], None] | None = None
    then: Callable[[hf.Step], None] = lambda step: None
    outside: Callable[[hf.Step], None] = lambda step: None
    loop: Callable[[], None] | None = None
    """Instead of the loop of the steps."""
    state: Callable[[], dict[str, Any]] | None = None
    """What is compared at the end; what is tracked, unless given."""

    def __post_init__(self) -> None:
        if self.optimizer is None:
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)


@dataclass(frozen=True)
class Variation:
    """One kind of script, and what is expected of it."""

    name: str
    build: Callable[[Bench], Training]
    ranks: int = 2
    refused: str = ""
    """Part of the sentence with which it is refused; empty: it ends with the bits of an undisturbed run."""
    warned: str = ""
    """Part of a warning about something that a fault may restart all workers for; the bits are right all the same."""
    verify: Callable[[list[dict[str, Any]], list[dict[str, Any]]], None] | None = None
    """Looks at the events of a disturbed run and of the reference."""


def registry() -> tuple[dict[str, Variation], Callable[..., Callable[[Callable[[Bench], Training]], Variation]]]:
    """A new dictionary of variations and the decorator that fills it."""
    found: dict[str, Variation] = {}

    def variation(**choices: Any) -> Callable[[Callable[[Bench], Training]], Variation]:
        def add(build: Callable[[Bench], Training]) -> Variation:
            assert build.__name__ not in found, f"two variations are called {build.__name__}"
            return found.setdefault(build.__name__, Variation(build.__name__, build, **choices))

        return add

    return found, variation


ALL, variation = registry()


class Net(nn.Module):
    """Three layers with dropout. Makers of layers can be given."""

    def __init__(self, norm: Callable[[int], nn.Module] | None = None) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)
        self.norm = norm(WIDTH) if norm is not None else nn.Identity()
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(torch.relu(self.norm(self.first(x))))
        return self.last(torch.relu(self.middle(x)))


class Samples(torch.utils.data.Dataset):
    """Every sample a function of its number."""

    def __init__(self, count: int = 203) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        generator = torch.Generator("cpu").manual_seed(int(index))
        return torch.randn(FEATURES, generator=generator, device="cpu"), int(index) % CLASSES, int(index)


class Meter:
    """A running mean, as scripts have them."""

    def __init__(self) -> None:
        self.count, self.total = 0, 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.total = state["count"], state["total"]


class Fault:
    """One that is to happen."""

    def __init__(self, text: str, index: int) -> None:
        self.point, step, rank, self.action = text.split(":")
        self.step, self.rank, self.index = int(step), int(rank), index


class Bench:
    """One process of the job."""

    def __init__(self, steps: int, faults: list[str], *, has_spares: bool) -> None:
        self.steps, self._has_spares = steps, has_spares
        self._faults = [Fault(text, index) for index, text in enumerate(faults)]
        self._work = Path(os.environ["WORK"])
        self._events = os.open(self._work / "events", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.job = hf.init()
        self.device = os.environ.get("BENCH_DEVICE", "cpu")
        """Where the model is. What a variation makes is there if it says nothing else."""
        if self.device != "cpu":
            torch.set_default_device(self.device)
        self.loss = torch.zeros(())
        """Of the last batch."""
        self._drawn: list[int] = []
        self._number, self._rank = -1, -1
        """The step under way, and the rank that makes it: at the end of a step they may be those of the next."""

    # --- for variations

    def note(self, name: str, value: Any = None) -> None:
        """Something that `verify` wants to know of."""
        self._write("note", name=name, value=value)

    def hurt(self, point: str) -> None:
        """Have the fault that is due here, if there is one."""
        for fault in self._faults:
            if (fault.point, fault.step, fault.rank) == (point, self._number, self._rank):
                self._have(fault)

    def batches(self, step: hf.Step) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's batches of the step; their samples are recorded."""
        for x, y, samples in step.batches(self.training.data):
            self.record(samples)
            yield x.to(self.device), y.to(self.device)

    def record(self, samples: torch.Tensor) -> None:
        """The step uses these samples."""
        self._drawn += samples.tolist()

    def mean_loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss of a batch."""
        return (self.training.loss or self._cross_entropy)(x, y)

    def run_step(self, step: hf.Step) -> None:
        """A body, and what comes after the `with`."""
        training = self.training
        with step:
            self._number, self._rank, self._drawn = step.number, self.job.rank, []
            world_size = self.job.world_size
            self._write("begin", attempt=step.attempt, view=self.job.view, world_size=world_size)
            self.hurt("body")
            self.loss = (training.compute or self._compute)(step).detach()
            self._write("drew", samples=self._drawn)
            self.hurt("before")
            (training.update or self._update)(step)
            self.hurt("after")
            training.then(step)
            self.hurt("end")
        training.outside(step)
        if step.is_committed:
            self._write("committed", loss=float(self.loss).hex(), world_size=world_size)
            self.hurt("between")

    # --- the run

    def train(self, variation: Variation) -> None:
        """The whole script."""
        torch.manual_seed(0)
        self.training = training = variation.build(self)
        if training.data is None:
            training.data = hf.Loader(Samples(), global_batch_size=GLOBAL_BATCH, seed=3)
        tracked = self._tracked()
        if training.local:
            self.job.track_local(**training.local)
        if tracked:
            self.job.track(**tracked)
        (training.loop or self._loop)()
        finals = {name: digest(value) for name, value in self._final_state(tracked).items()}
        (self._work / f"final-{self.job.rank}").write_text(json.dumps(finals | {"steps": self.job.step}))

    def _loop(self) -> None:
        for step in self.job.steps(self.steps):
            self.run_step(step)

    def _tracked(self) -> dict[str, Any]:
        training = self.training
        found = {"model": training.model, "optimizer": training.optimizer, **training.tracked}
        if hasattr(training.data, "step_batches"):
            found["data"] = training.data
        return {name: thing for name, thing in found.items() if name not in training.untracked}

    def _final_state(self, tracked: dict[str, Any]) -> dict[str, Any]:
        model = self.training.model
        flags = {
            "training": [module.training for module in model.modules()],
            "requires grad": [parameter.requires_grad for parameter in model.parameters()],
            "gradients": [parameter.grad for parameter in model.parameters()],
            "process": [torch.is_grad_enabled(), str(torch.get_default_dtype()), torch.is_autocast_enabled("cpu")],
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        if self.training.state is not None:
            return flags | self.training.state()
        named = {**tracked, **self.training.local}
        return flags | {name: thing.state_dict() for name, thing in named.items() if hasattr(thing, "state_dict")}

    def _cross_entropy(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.training.model(x), y)

    def _compute(self, step: hf.Step) -> torch.Tensor:
        losses = []
        for x, y in self.batches(step):
            losses.append(self.mean_loss(x, y))
            step.backward(losses[-1])
        return torch.stack(losses).sum()

    def _update(self, step: hf.Step) -> None:
        self.training.optimizer.step()
        self.training.optimizer.zero_grad()

    # --- faults and the record

    def _have(self, fault: Fault) -> None:
        try:
            os.close(os.open(self._work / f"fired-{fault.index}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        self._wait_until_due()
        self._write("fault", point=fault.point, action=fault.action)
        match fault.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise":
                raise ValueError("a bug in the user's code")
            case "exit":
                sys.exit(3)

    def _wait_until_due(self) -> None:
        from calm import wait_until_calm

        wait_until_calm()
        give_up_at = time.monotonic() + SPARE_DEADLINE_S
        while self._has_spares and not is_spare_parked():
            assert time.monotonic() < give_up_at, "no spare was parked"
            time.sleep(0.01)

    def _write(self, what: str, **values: Any) -> None:
        line = {"what": what, "step": self._number, "rank": self._rank, "pid": os.getpid(), **values}
        os.write(self._events, (json.dumps(line) + "\n").encode())


def is_spare_parked() -> bool:
    """Whether a process of this node waits for its first view, as its progress page says. The pages are the agent's,
    which is our parent."""
    for link in Path(f"/proc/{os.getppid()}/fd").iterdir():
        try:
            if "holdfast-progress" not in os.readlink(link):
                continue
            page = ProgressPage.open(link)
        except OSError:
            continue
        phase, view, pid = page.get("phase"), page.get("view"), page.get("pid")
        page.close()
        if phase in (WorkerPhase.PARKED, WorkerPhase.HOLDING) and view == 0 and Path(f"/proc/{pid}").exists():
            return True
    return False


def digest(value: Any) -> str:
    """Of all numbers in it, bit by bit."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
        if isinstance(value, torch.Tensor):
            value = value.coalesce().to_dense() if value.is_sparse else value
            found.update(value.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):  # an optimizer that was loaded may list its parameters in another order
                found.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        else:
            found.update(repr(value).encode())

    add(value)
    return found.hexdigest()[:16]


__all__ = ["ALL", "DDP", "Bench", "Meter", "Net", "Samples", "Training", "Variation", "variation"]
