"""Checkpoints for scripts with a loop of their own: `hf.Checkpointer`.

    checkpoints = hf.Checkpointer("runs/7")                          or s3://bucket/runs/7
    start = checkpoints.load(model=model, optimizer=optimizer) or 0  the step to go on with; None if there is none
    for step in range(start, total):
        …
        if (step + 1) % 100 == 0:
            checkpoints.save(step + 1, model=model, optimizer=optimizer)
    checkpoints.close()                                              waits until the last one is complete

`save` returns at once: what a forward changes is copied there and then, parameters and optimizer state while the next
forward and backward run; an optimizer that is sooner waits for its own tensors only. Then it is written, in the
background. All ranks call it with the same step: each writes its part, and what several hold alike is written once.
`load` takes what was saved in a world of any size, and passes over what is damaged. Each rank's generators of random
numbers are in its part.

Room for two copies of the state is made once, in the background, after the first update that follows `load`: optimizers
have all of their state then, and who only loads needs none. Without a `load`, the first `save` waits for room for one.

The copying is snapshots.py, as in a session. Under `holdfast run` the memory is the agent's, and so is the writing:
what was copied survives the workers, and `load` finds it there even if it never came to storage. Under any other
launcher, or none, this process does both itself (own_keeper.py). A script that ends without `close`, or by an error,
loses nothing that it saved: its copy is brought to its end first.
"""

from __future__ import annotations

import logging
import operator
import os
import threading
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsFloat

import msgspec
import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from holdfast.errors import CheckpointError, HoldfastError, LaunchError, StateError, UsageError
from holdfast.state import legacy
from holdfast.state.generators import set_generators
from holdfast.state.optimizers import is_split
from holdfast.state.tracked import Tracked
from holdfast.state.tree import describe
from holdfast.storage.catalogue import Catalogue, Found
from holdfast.storage.manifest import STEP_MAX, About, finite, versions
from holdfast.storage.retention import parse_policy
from holdfast.storage.stores import open_store
from holdfast.wire.session import NeedRoom, Room, Sealed
from holdfast.wire.session import Snapshots as Settings
from holdfast.wire.slots import Record
from holdfast.worker import session
from holdfast.worker.collectives import talk
from holdfast.worker.line import SOCKET_VARIABLE, WORKER_VARIABLE, Line
from holdfast.worker.memory.own_keeper import OwnKeeper
from holdfast.worker.memory.snapshots import Cut, Snapshots
from holdfast.worker.memory.starting import find_start
from holdfast.worker.parallel.models import shards_of

log = logging.getLogger(__name__)


class Checkpointer:
    """Saves and loads named objects: modules, optimizers, anything with state_dict and load_state_dict."""

    def __init__(
        self, directory: str | os.PathLike[str], *, keep: str = "last:3", generators: bool = True
    ) -> None:
        """`keep`: which checkpoints stay, as in `--checkpoint-keep`. `generators`: whether each rank's generators of
        random numbers are saved and set too: Python's, NumPy's, torch's, and that of the device in use."""
        self._keeps_generators = generators
        self._url = str(directory) if "://" in str(directory) else str(Path(directory).expanduser().absolute())
        self._store, self._policy = open_store(self._url), parse_policy(keep)
        self._tracked: Tracked | None = None
        self._snapshots: Snapshots | None = None
        self._line = _line_to_agent()
        self._keeper: OwnKeeper | AgentKeeper | None = None
        self._metrics: dict[str, float] = {}
        self._hooks: list[RemovableHandle] = []
        self._updated: set[int] = set()
        """Optimizers that have all of their state."""
        self._has_saved, self._last = False, -1
        """Whether something was saved since the last `close`, and the step that was saved last."""
        self._turn = threading.Lock()
        """Of threads that save: one after the other."""
        self._recalled = (-1, False)
        """The step that `load` has found in memory, on every rank."""
        self.loaded: Found | None = None
        """What `load` has found on storage; None if it was in memory."""

    def save(self, step: int, *, metrics: Mapping[str, SupportsFloat] | None = None, **objects: Any) -> None:
        """Save the state before `step`: as many steps are done. What goes wrong on its way to storage is a warning, and
        an error of `wait` and `close`; the training goes on. The same step once more, as behind a loop, is left out."""
        step, measured = _whole_number(step), _numbers(metrics or {})
        with self._turn:
            snapshots = self._prepare(objects)
            if step == self._last:  # by the number alone: all ranks must come to the same answer
                log.warning("step %d was saved already, and stays as it was then: give each state its own step", step)
                return
            self._begin_saving()
            self._metrics = measured
            snapshots.finish()
            if self._line is not None:  # what is in the agent's memory outlives us: one whole step of it stays
                snapshots.settle_last(talk.outside().agree)
            if why := snapshots.take(step):
                raise CheckpointError(f"step {step} is not saved: {why}")
            self._last = step

    def load(self, **objects: Any) -> int | None:
        """Load the newest checkpoint that every rank can load; its step, or None if there is none."""
        tracked, talking = self._track(objects), talk.outside()
        self._foresee(tracked)
        step = self._load(tracked, talking)
        if step is not None and tracked.saved_generators is not None:
            set_generators(tracked.saved_generators)
        return step

    def _load(self, tracked: Tracked, talking: talk.Talk) -> int | None:
        shards = shards_of(tracked.modules().values())
        local = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        held = self._line.held() if self._line is not None else ()
        start = find_start(self._url, held, local, tracked, shards, talking)
        if start is None:
            return None
        self.loaded = start.checkpoint
        if start.is_recalled:
            self._recalled = (start.step, start.is_intact)
        return start.step

    def load_legacy(
        self, model: Module, optimizer: Optimizer | None = None, directory: str | os.PathLike[str] = ""
    ) -> int | None:
        """Load the newest `checkpoint_epoch_N.pt` that can be read, as scripts write them with torch.save (see
        state/legacy.py), from our own directory or another one; its epoch, or None if there is none. On all ranks,
        before the model is sharded."""
        old = legacy.latest(Path(directory or self._url))
        epoch = old.load(model, optimizer) if old is not None else -1
        highest, lowest = talk.outside().agree((epoch, -epoch))
        if highest != -lowest:
            found = f"of epochs {-lowest} to {highest}"
            raise CheckpointError(f"the ranks find different old files, {found}: put them where all can read them")
        return epoch if old is not None else None

    def wait(self) -> None:
        """Until all that was saved is complete on storage. Raises CheckpointError if something was not."""
        if self._snapshots is not None and self._keeper is not None:
            self._snapshots.finish()
            self._keeper.wait()
            self._raise_lost(self._snapshots)

    def close(self) -> None:
        """`wait`, and give the memory back."""
        _unclosed.discard(self)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        snapshots, keeper = self._snapshots, self._keeper
        self._snapshots = self._keeper = self._tracked = None
        self._has_saved, self._last = False, -1
        if snapshots is not None and keeper is not None:
            snapshots.finish()
            snapshots.finish_moving()
            snapshots.close()
            keeper.close()
            self._raise_lost(snapshots)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def catalogue(self) -> Catalogue:
        """What there is on storage."""
        return Catalogue(self._store)

    def _prepare(self, objects: dict[str, Any]) -> Snapshots:
        if self._snapshots is not None and self._tracked is not None:
            known = self._tracked.objects()
            if known.keys() == objects.keys() and all(known[name] is objects[name] for name in known):
                return self._snapshots
            if self._has_saved:
                raise UsageError("save is given other objects than before: make another Checkpointer for them")
            self.close()  # room was made for what was loaded; it is something else that is saved
        talking = talk.outside()
        self._tracked = self._track(objects)
        shards = shards_of(self._tracked.modules().values())
        if self._line is not None:
            self._keeper = AgentKeeper(self._line, self._url, str(self._policy))
        else:
            self._keeper = OwnKeeper(self._store, self._policy, self._about)
        self._snapshots = Snapshots(self._keeper, self._tracked, Settings(), self._describe)
        self._snapshots.start_from(*self._recalled)
        self._recalled = (-1, False)
        view = int(os.environ.get("HOLDFAST_VIEW", "0"))
        cut = Cut(shards, talking.size // shards, talking.rank)
        self._snapshots.enter(cut, view, torch.initial_seed() & (2**63 - 1), 0, 1)
        for optimizer in self._tracked.optimizers().values():
            self._hooks.append(optimizer.register_step_pre_hook(self._before_update))
        return self._snapshots

    def _track(self, objects: dict[str, Any]) -> Tracked:
        tracked = Tracked(**objects)
        tracked.generators_of = talk.outside().rank if self._keeps_generators else None
        return tracked

    def _describe(self) -> tuple[dict[str, float], dict[str, str]]:
        """For the manifest."""
        return self._metrics, {"generators": "each rank's in its part" if self._keeps_generators else "not kept"}

    def _raise_lost(self, snapshots: Snapshots) -> None:
        if lost := ", ".join(map(str, snapshots.lost)):
            snapshots.lost.clear()
            raise CheckpointError(f"step {lost} is not saved: the parameters changed while they were copied")

    def _begin_saving(self) -> None:
        """All ranks at the first save."""
        if not self._has_saved and self._tracked is not None:
            talking = talk.outside()
            _check_alike(self._tracked, talking)
            if isinstance(self._keeper, OwnKeeper):
                self._keeper.nonce = _attempt(talking)
        self._has_saved = True
        _unclosed.add(self)

    def _foresee(self, tracked: Tracked) -> None:
        """What is loaded and then trained will be saved."""
        if self._snapshots is not None or self._hooks:
            return
        optimizers = tracked.optimizers().values()

        def updated(optimizer: Optimizer, *_: Any) -> None:
            self._updated.add(id(optimizer))
            if not self._has_saved and len(self._updated) == len(optimizers):
                self._prepare(tracked.objects()).foresee()

        self._hooks += [optimizer.register_step_post_hook(updated) for optimizer in optimizers]

    def _leave(self) -> None:
        """The process ends, and nobody has called `close`: the copy under way is finished, and written."""
        try:
            if self._snapshots is not None and self._keeper is not None:
                self._snapshots.finish()
                self._keeper.leave()
        except (HoldfastError, OSError) as error:
            log.warning("not all that was saved is complete: %s", error)

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        if self._snapshots is not None:
            self._snapshots.join(optimizer)

    def _about(self, record: Record, message: Sealed) -> About:
        return About(
            step=record.step,
            world_size=record.parts,
            shards=record.shards,
            shares=record.shares,
            seed=record.seed,
            created_unix_s=time.time(),
            job_id=os.environ.get("TORCHELASTIC_RUN_ID", ""),
            versions=versions(),
            metrics=finite(message.metrics),
            notes=dict(message.notes),
        )


class AgentKeeper:
    """The agent, at the other end of a line (snapshots.Keeper)."""

    def __init__(self, line: Line, url: str, keep: str) -> None:
        self._line, self._url, self._keep = line, url, keep
        self._waited_for: list[int] = []

    @property
    def room(self) -> Room | None:
        return self._line.room

    def tell(self, message: NeedRoom | Sealed) -> None:
        if isinstance(message, Sealed):
            message = msgspec.structs.replace(message, url=self._url, keep=self._keep)
            self._waited_for.append(message.created_ns)
        self._line.tell(message)

    def wait(self) -> None:
        """Until all that was saved is complete on storage."""
        images, self._waited_for = self._waited_for, []
        if troubles := [why for image in images if (why := self._line.wait_for_written(image))]:
            raise CheckpointError("; ".join(troubles))

    def close(self) -> None:
        self.wait()

    def leave(self) -> None:
        """Nothing is left to do: it has heard of what is whole, and outlives us."""


_unclosed: set[Checkpointer] = set()
"""Those that have saved, and must not be lost with the process."""


def _finish_unclosed() -> None:
    for one in list(_unclosed):
        one._leave()


# Not atexit: by then no thread pool takes work any longer, and publishing needs some.
threading._register_atexit(_finish_unclosed)  # type: ignore[attr-defined]
os.register_at_fork(after_in_child=_unclosed.clear)


def _line_to_agent() -> Line | None:
    """Under `holdfast run`, in a script without a session: its line is its own."""
    path = os.environ.get(SOCKET_VARIABLE)
    if not path or session.is_begun():
        return None
    try:
        line = Line(path, os.environ[WORKER_VARIABLE], lambda why, view: None, repairs=False)
        return line if line.welcome().snapshots.every >= 0 else None
    except LaunchError:
        return None  # another one of this process has it


def _whole_number(step: int) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        raise UsageError(f"step {step!r:.80} cannot be: it is no whole number") from None
    if not 0 <= number <= STEP_MAX:
        raise UsageError(f"step {number} cannot be: steps count from 0 to {STEP_MAX}")
    return number


def _numbers(metrics: Mapping[str, SupportsFloat]) -> dict[str, float]:
    """As the manifest has them, from tensors and NumPy's too."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise UsageError(f"the metric {name} is {value!r:.80}, which is no number: leave it out") from None
    return numbers


def _check_alike(tracked: Tracked, talking: talk.Talk) -> None:
    """Raise StateError unless those ranks that have a shard in common have the same tensors in it: what they would
    write could never be loaded."""
    if talking.size == 1:
        return
    for name, optimizer in tracked.optimizers().items():
        if is_split(optimizer):
            raise StateError(f"{name} has other state on each rank, of which only the first rank's is kept: use FSDP2")
    shards = shards_of(tracked.modules().values())
    try:
        looks = repr([(spec.path, spec.dtype, spec.shape) for spec in describe(tracked.state())])
    except StateError:
        looks = ""  # of something that cannot be kept: the copy will say so
    rows = talking.gather((zlib.crc32(looks.encode("utf-8", "surrogatepass")),))
    for rank, row in enumerate(rows):
        if row != rows[rank % shards]:
            ranks = f"rank {rank} has other tensors than rank {rank % shards}, or of other shapes"
            raise StateError(f"{ranks}: what is saved must look the same on all ranks")


def _attempt(talking: talk.Talk) -> str:
    """A name for this run's attempts that all ranks share, and no other run has."""
    (number,) = talking.agree((int.from_bytes(os.urandom(6)) if talking.rank == 0 else 0,))
    return f"run-{number:012x}"
