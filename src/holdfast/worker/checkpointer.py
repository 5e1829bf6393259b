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

Memory for two copies of the state is allocated once, in the background, after the first update that follows `load`:
optimizers have all of their state then, and a script that only loads needs none. Without a `load`, the first `save`
waits until there is memory for one.

The copying is taker.py, as in a session. Under `holdfast run` the agent owns the memory and uploads from it: what was
copied survives the workers, and `load` finds it there even if it never came to storage. Under any other launcher, or
none, this process does both itself (in_process_host.py). A script that ends without `close`, or by an error, loses
nothing that it saved: its copy is finished first.
"""

from __future__ import annotations

import operator
import os
import threading
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsFloat

import msgspec
import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from holdfast.core.image_info import ImageInfo
from holdfast.core.shard_map import ShardMap
from holdfast.errors import CheckpointError, HoldfastError, LaunchError, StateError, UsageError
from holdfast.state import epoch_files
from holdfast.state.generators import set_generators
from holdfast.state.optimizers import is_split
from holdfast.state.tracked import Tracked
from holdfast.state.tree import describe
from holdfast.storage.checkpoint_catalogue import CheckpointCatalogue, FoundCheckpoint
from holdfast.storage.manifest import STEP_MAX
from holdfast.storage.retention import parse_policy
from holdfast.storage.stores import open_store
from holdfast.util.files import expand_home
from holdfast.util.logs import get_logger
from holdfast.wire.worker_messages import AllocateBuffers, BuffersReady, SnapshotSealed, SnapshotSettings
from holdfast.worker import job
from holdfast.worker.agent_connection import AgentConnection
from holdfast.worker.collectives import small_collectives
from holdfast.worker.launch.error_file import SOCKET_VARIABLE, WORKER_VARIABLE
from holdfast.worker.parallel.holdings import holdings_of, map_of_holdings, names_of, own_part
from holdfast.worker.replica_check import first_pair
from holdfast.worker.restore.restore_source import find_start
from holdfast.worker.snapshot.in_process_host import InProcessSnapshotHost
from holdfast.worker.snapshot.taker import SnapshotTaker

log = get_logger(__name__)


class Checkpointer:
    """Saves and loads named objects: modules, optimizers, anything with state_dict and load_state_dict."""

    def __init__(self, directory: str | os.PathLike[str], *, keep: str = "last:3", generators: bool = True) -> None:
        """`keep`: which checkpoints stay, as in `--checkpoint-keep`. `generators`: whether each rank's generators of
        random numbers are saved and set too: Python's, NumPy's, torch's, and that of the device in use."""
        self._saves_generators = generators
        self._url = str(directory) if "://" in str(directory) else str(expand_home(os.fspath(directory)).absolute())
        self._store, self._policy = open_store(self._url), parse_policy(keep)
        self._tracked: Tracked | None = None
        self._snapshots: SnapshotTaker | None = None
        self._agent = _connect_to_agent()
        self._host: InProcessSnapshotHost | AgentSnapshotHost | None = None
        self._metrics: dict[str, float] = {}
        self._hooks: list[RemovableHandle] = []
        self._updated: set[int] = set()
        """Optimizers that have all of their state."""
        self._has_saved, self._last = False, -1
        """Whether something was saved since the last `close`, and the step that was saved last."""
        self._saving = threading.Lock()
        """Held by a thread that saves: one saves after the other."""
        self._restored = (-1, False)
        """The step that `load` has found in memory, on every rank."""
        self.loaded: FoundCheckpoint | None = None
        """What `load` has found on storage; None if it was in memory."""

    def save(self, step: int, *, metrics: Mapping[str, SupportsFloat] | None = None, **objects: Any) -> None:
        """Save the state before `step`: as many steps are done. An upload that fails is logged as a warning, and raised
        by `wait` and `close`; the training goes on. The same step once more, as behind a loop, is left out."""
        step, measured = _check_step(step), _check_metrics(metrics or {})
        with self._saving:
            snapshots = self._prepare(objects)
            if step == self._last:  # by the number alone: all ranks must come to the same answer
                log.warning(
                    "step-saved-twice",
                    f"step {step} was saved already, and stays as it was: give each state its own step",
                )
                return
            self._begin_saving()
            self._metrics = measured
            snapshots.finish()
            if self._agent is not None:  # its memory survives us: one complete step of it stays
                snapshots.agree_on_last(small_collectives.outside().agree)
            if why := snapshots.take(step):
                raise CheckpointError(f"step {step} is not saved: {why}")
            self._last = step

    def load(self, **objects: Any) -> int | None:
        """Load the newest checkpoint that every rank can load; return its step, or None if there is none."""
        tracked, collectives = self._track(objects), small_collectives.outside()
        self._prepare_on_update(tracked)
        step = self._load(tracked, collectives)
        if step is not None and tracked.saved_generators is not None:
            set_generators(tracked.saved_generators)
        return step

    def _load(self, tracked: Tracked, collectives: small_collectives.SmallCollectives) -> int | None:
        shard_map = _shard_map_of(tracked, collectives)
        local = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if self._agent is not None and (assignment := self._agent.welcome().assignment) is not None:
            local = assignment.local_rank, assignment.local_world_size  # LOCAL_RANK can be 0 on all
        images = self._agent.list_images() if self._agent is not None else ()
        start = find_start(self._url, images, local, tracked, shard_map, collectives)
        if start is None:
            return None
        self.loaded = start.checkpoint
        if start.is_recalled:
            self._restored = (start.step, start.is_intact)
        return start.step

    def load_legacy(
        self, model: Module, optimizer: Optimizer | None = None, directory: str | os.PathLike[str] = ""
    ) -> int | None:
        """Load the newest `checkpoint_epoch_N.pt` that can be read, as scripts write them with torch.save (see
        state/epoch_files.py), from our own directory or another one; return its epoch, or None if there is none. To be
        called on all ranks, before the model is sharded."""
        old = epoch_files.latest(Path(directory or self._url))
        epoch = old.load(model, optimizer) if old is not None else -1
        highest, lowest = small_collectives.outside().agree((epoch, -epoch))
        if highest != -lowest:
            found = f"of epochs {-lowest} to {highest}"
            raise CheckpointError(f"the ranks find different old files, {found}: put them where all can read them")
        return epoch if old is not None else None

    def wait(self) -> None:
        """Wait until all that was saved is complete on storage. Raises CheckpointError if something is not."""
        if self._snapshots is not None and self._host is not None:
            self._snapshots.finish()
            self._host.wait()
            self._raise_lost(self._snapshots)

    def close(self) -> None:
        """Do what `wait` does, and give the memory back."""
        _unclosed.discard(self)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        snapshots, host = self._snapshots, self._host
        self._snapshots = self._host = self._tracked = None
        self._has_saved, self._last = False, -1
        if snapshots is not None and host is not None:
            snapshots.finish()
            snapshots.finish_mapping()
            snapshots.close()
            host.close()
            self._raise_lost(snapshots)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def catalogue(self) -> CheckpointCatalogue:
        """The checkpoints on storage."""
        return CheckpointCatalogue(self._store)

    def _prepare(self, objects: dict[str, Any]) -> SnapshotTaker:
        if self._snapshots is not None and self._tracked is not None:
            known = self._tracked.objects()
            if known.keys() == objects.keys() and all(known[name] is objects[name] for name in known):
                return self._snapshots
            if self._has_saved:
                raise UsageError("save is given other objects than before: make another Checkpointer for them")
            self.close()  # memory was allocated for what was loaded; it is something else that is saved
        collectives = small_collectives.outside()
        self._tracked = self._track(objects)
        shard_map = _shard_map_of(self._tracked, collectives)
        if self._agent is not None:
            self._host = AgentSnapshotHost(self._agent, self._url, str(self._policy))
        else:
            self._host = InProcessSnapshotHost(self._url, str(self._policy))
        self._snapshots = SnapshotTaker(self._host, self._tracked, SnapshotSettings(), self._describe)
        self._snapshots.start_from(*self._restored)
        self._restored = (-1, False)
        view = int(os.environ.get("HOLDFAST_VIEW", "0"))
        seed = torch.initial_seed() & (2**63 - 1)
        part = own_part(shard_map, collectives.rank, collectives.size)
        self._snapshots.enter(ImageInfo(-1, *part, view, seed=seed), 1)
        for optimizer in self._tracked.optimizers().values():
            self._hooks.append(optimizer.register_step_pre_hook(self._before_update))
        return self._snapshots

    def _track(self, objects: dict[str, Any]) -> Tracked:
        tracked = Tracked(**objects)
        tracked.generators_of = small_collectives.outside().rank if self._saves_generators else None
        return tracked

    def _describe(self) -> tuple[dict[str, float], dict[str, str]]:
        """Return the metrics and notes of the manifest."""
        return self._metrics, {"generators": "each rank's in its part" if self._saves_generators else "not kept"}

    def _raise_lost(self, snapshots: SnapshotTaker) -> None:
        if lost := ", ".join(map(str, snapshots.lost)):
            snapshots.lost.clear()
            raise CheckpointError(f"step {lost} is not saved: the parameters changed while they were copied")

    def _begin_saving(self) -> None:
        """Check and name what all ranks are about to save, at the first save."""
        if not self._has_saved and self._tracked is not None:
            collectives = small_collectives.outside()
            _check_alike(self._tracked, collectives)
            if isinstance(self._host, InProcessSnapshotHost):
                self._host.name_attempts(_attempt_name(collectives))
        self._has_saved = True
        _unclosed.add(self)

    def _prepare_on_update(self, tracked: Tracked) -> None:
        """Prepare buffers once all optimizers have made an update: what is loaded and then trained will be saved."""
        if self._snapshots is not None or self._hooks:
            return
        optimizers = tracked.optimizers().values()

        def updated(optimizer: Optimizer, *_: Any) -> None:
            self._updated.add(id(optimizer))
            if not self._has_saved and len(self._updated) == len(optimizers):
                self._prepare(tracked.objects()).prepare_buffers()

        self._hooks += [optimizer.register_step_post_hook(updated) for optimizer in optimizers]

    def _leave(self) -> None:
        """Finish and write the current copy: the process ends without a call of `close`."""
        try:
            if self._snapshots is not None and self._host is not None:
                self._snapshots.finish()
                self._host.leave()
        except (HoldfastError, OSError) as error:
            log.warning("checkpoint-incomplete", f"not all that was saved is complete: {error}")

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        if self._snapshots is not None:
            self._snapshots.join(optimizer)


class AgentSnapshotHost:
    """The agent, at the other end of a connection (buffers.SnapshotHost)."""

    def __init__(self, connection: AgentConnection, url: str, keep: str) -> None:
        self._connection, self._url, self._keep = connection, url, keep
        self._uploads: list[int] = []

    @property
    def buffers_ready(self) -> BuffersReady | None:
        """Where the buffers are, once the agent has sent that."""
        return self._connection.buffers_ready

    def tell(self, message: AllocateBuffers | SnapshotSealed) -> None:
        """Send the agent a message; add to an image where it is to be saved."""
        if isinstance(message, SnapshotSealed):
            message = msgspec.structs.replace(message, url=self._url, keep=self._keep)
            self._uploads.append(message.created_ns)
        self._connection.tell(message)

    def wait(self) -> None:
        """Wait until all that was saved is complete on storage. Raises CheckpointError, once, if something is not."""
        images, self._uploads = self._uploads, []
        if problems := [why for image in images if (why := self._connection.wait_for_written(image))]:
            raise CheckpointError("; ".join(problems))

    def close(self) -> None:
        """Wait as `wait` does."""
        self.wait()

    def leave(self) -> None:
        """Do nothing: the agent knows of what is complete, and survives this process."""


_unclosed: set[Checkpointer] = set()
"""Checkpointers that have saved, and must not be lost with the process."""


def _finish_unclosed() -> None:
    for one in list(_unclosed):
        one._leave()


# Not atexit: by then no thread pool takes work any longer, and publishing needs some.
threading._register_atexit(_finish_unclosed)  # type: ignore[attr-defined]
os.register_at_fork(after_in_child=_unclosed.clear)


def _connect_to_agent() -> AgentConnection | None:
    """Return a connection of our own, under `holdfast run` in a script without a session."""
    path = os.environ.get(SOCKET_VARIABLE)
    if not path or job.is_begun():
        return None
    try:
        connection = AgentConnection(path, os.environ[WORKER_VARIABLE], lambda why, view: None, repairs=False)
        return connection if connection.welcome().snapshots.every >= 0 else None
    except LaunchError:
        return None  # another one of this process has it


def _check_step(step: int) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        raise UsageError(f"step {step!r:.80} cannot be saved: it is not an integer") from None
    if not 0 <= number <= STEP_MAX:
        raise UsageError(f"step {number} cannot be saved: steps count from 0 to {STEP_MAX}")
    return number


def _check_metrics(metrics: Mapping[str, SupportsFloat]) -> dict[str, float]:
    """Return the metrics as the manifest has them, from tensors and NumPy's numbers too."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise UsageError(f"the metric {name} is {value!r:.80}, which is no number: leave it out") from None
    return numbers


def _check_alike(tracked: Tracked, collectives: small_collectives.SmallCollectives) -> None:
    """Raise StateError unless ranks that have a shard in common have the same tensors in it: what they would write
    could never be loaded."""
    if collectives.size == 1:
        return
    for name, optimizer in tracked.optimizers().items():
        if is_split(optimizer):
            raise StateError(f"{name} has other state on each rank, of which only the first rank's is saved: use FSDP2")
    shard_map = _shard_map_of(tracked, collectives)
    try:
        looks = repr([(spec.path, spec.dtype, spec.shape) for spec in describe(tracked.state())])
    except StateError:
        looks = ""  # something cannot be copied: the copy will report it
    rows = collectives.gather((zlib.crc32(looks.encode("utf-8", "surrogatepass")),))
    if pair := first_pair([row[0] for row in rows], shard_map):
        ranks = f"rank {pair[1]} has other tensors than rank {pair[0]}, or of other shapes"
        raise StateError(f"{ranks}: what is saved must look the same on ranks that have the same part of the model")


def _shard_map_of(tracked: Tracked, collectives: small_collectives.SmallCollectives) -> ShardMap:
    """Return which shard of the state each rank has; all ranks together."""
    modules = tracked.modules()
    holdings, names = zip(*collectives.gather((holdings_of(modules), names_of(modules))), strict=True)
    tracked.is_part = len(set(names)) > 1
    return map_of_holdings(holdings, None)


def _attempt_name(collectives: small_collectives.SmallCollectives) -> str:
    """Return a name for this run's attempts that all ranks share, and no other run has."""
    (number,) = collectives.agree((int.from_bytes(os.urandom(6)) if collectives.rank == 0 else 0,))
    return f"run-{number:012x}"
