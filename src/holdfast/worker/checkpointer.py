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
`load` takes what was saved in a world of any size, and passes over what is damaged.

The copying is snapshots.py, as in a session. Under `holdfast run` the memory is the agent's, and so is the writing:
what was copied survives the workers, and `load` finds it there even if it never came to storage. Under any other
launcher, or none, this process does both itself (own_keeper.py).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.optim import Optimizer

from holdfast import __version__
from holdfast.errors import CheckpointError, LaunchError, UsageError
from holdfast.state.tracked import Tracked
from holdfast.storage.catalogue import Catalogue, Found
from holdfast.storage.manifest import About, finite
from holdfast.storage.retention import parse_policy
from holdfast.storage.stores import open_store
from holdfast.wire.session import NeedRoom, Room, Sealed
from holdfast.wire.session import Snapshots as Settings
from holdfast.wire.slots import Record
from holdfast.worker import checkpoints, session, talk
from holdfast.worker.line import SOCKET_VARIABLE, WORKER_VARIABLE, Line
from holdfast.worker.models import shards_of
from holdfast.worker.own_keeper import OwnKeeper
from holdfast.worker.recalling import recall
from holdfast.worker.snapshots import Cut, Snapshots


class Checkpointer:
    """Saves and loads named objects: modules, optimizers, anything with state_dict and load_state_dict."""

    def __init__(self, directory: str | os.PathLike[str], *, keep: str = "last:3") -> None:
        """`keep`: which checkpoints stay, as in `--checkpoint-keep`."""
        self._url = str(directory) if "://" in str(directory) else str(Path(directory).absolute())
        self._store, self._policy = open_store(self._url), parse_policy(keep)
        self._tracked: Tracked | None = None
        self._snapshots: Snapshots | None = None
        self._line = _line_to_agent()
        self._keeper: OwnKeeper | AgentKeeper | None = None
        self._metrics: dict[str, float] = {}
        self.loaded: Found | None = None
        """What `load` has found."""

    def save(self, step: int, *, metrics: dict[str, float] | None = None, **objects: Any) -> None:
        """Save the state before `step`: as many steps are done. Raises CheckpointError if an earlier one failed."""
        if step < 0:
            raise UsageError(f"step {step} cannot be: steps count from 0")
        snapshots = self._prepare(objects)
        self._metrics = dict(metrics or {})
        if why := snapshots.take(step):
            raise CheckpointError(f"step {step} is not saved: {why}")

    def load(self, **objects: Any) -> int | None:
        """Load the newest checkpoint that every rank can load; its step, or None if there is none."""
        tracked, talking = Tracked(**objects), talk.outside()
        shards = shards_of(tracked.modules().values())
        trouble: CheckpointError | None = None
        if self._line is not None:
            (newer_than,) = talking.agree((checkpoints.newest_step(self._url),))
            local = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            try:
                if recalled := recall(self._line.held(), *local, shards, tracked, newer_than, talking):
                    return recalled.step
            except CheckpointError as error:
                trouble = error
        self.loaded = checkpoints.restore(self._url, tracked, shards, talking)
        if self.loaded is None and trouble is not None:
            raise trouble  # the objects may hold a mixture: they cannot be started with
        return self.loaded.step if self.loaded is not None else None

    def wait(self) -> None:
        """Until all that was saved is complete on storage. Raises CheckpointError if something was not."""
        if self._snapshots is not None and self._keeper is not None:
            self._snapshots.join(None)
            self._keeper.wait()

    def close(self) -> None:
        """`wait`, and give the memory back."""
        if self._snapshots is not None and self._keeper is not None:
            self._snapshots.join(None)
            self._snapshots.close()
            self._keeper.close()
        self._snapshots = self._keeper = self._tracked = None

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
            if known.keys() != objects.keys() or any(known[name] is not objects[name] for name in known):
                raise UsageError("save is given other objects than before: make another Checkpointer for them")
            return self._snapshots
        talking = talk.outside()
        self._tracked = Tracked(**objects)
        shards = shards_of(self._tracked.modules().values())
        if self._line is not None:
            self._keeper = AgentKeeper(self._line, self._url, str(self._policy))
        else:
            self._keeper = OwnKeeper(self._store, self._policy, _attempt(talking), self._about)
        self._snapshots = Snapshots(self._keeper, self._tracked, Settings(), lambda: (self._metrics, {}))
        view = int(os.environ.get("HOLDFAST_VIEW", "0"))
        seed = torch.initial_seed() & (2**63 - 1)  # unsigned, and random, where nobody has set it
        self._snapshots.enter(Cut(shards, talking.size // shards, talking.rank), view, seed, 0, 1)
        for optimizer in self._tracked.optimizers().values():
            optimizer.register_step_pre_hook(self._before_update)
        return self._snapshots

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
            versions={"holdfast": __version__, "torch": str(torch.__version__)},
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
            self._waited_for.append(message.step)
        self._line.tell(message)

    def wait(self) -> None:
        """Until all that was saved is complete on storage."""
        steps, self._waited_for = self._waited_for, []
        for step in steps:
            if why := self._line.wait_for_written(step):
                raise CheckpointError(why)

    def close(self) -> None:
        self.wait()


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


def _attempt(talking: talk.Talk) -> str:
    """A name for this run's attempts that all ranks share, and no other run has."""
    (number,) = talking.agree((int.from_bytes(os.urandom(6)) if talking.rank == 0 else 0,))
    return f"run-{number:012x}"
