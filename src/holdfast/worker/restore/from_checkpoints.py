"""Checkpoints of the whole job, as its workers write and read them together (their life on storage: storage/).

Written by the survivors of a job that cannot go on: each shard by the lowest rank that has it, a dead rank's by one
that keeps its replica. When all are through, rank 0 publishes. (Everything else that becomes a checkpoint is written by
the agents, from snapshots.)

Read at the start of a job (restore_source.py): one that is damaged for one rank is passed over by all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from holdfast import __version__
from holdfast.core.shard_map import ShardMap
from holdfast.errors import CheckpointError, StateConflictError, StateError, StorageError
from holdfast.state.partition import FilePart, PartSource, RangePart, load_parts, write_image
from holdfast.state.tracked import Tracked
from holdfast.state.tree import FlatTree
from holdfast.storage.checkpoint_catalogue import CheckpointCatalogue, FoundCheckpoint
from holdfast.storage.checkpoint_writer import CheckpointWriter
from holdfast.storage.manifest import CheckpointInfo
from holdfast.storage.stores import Store, open_store
from holdfast.util.logs import get_logger
from holdfast.wire.worker_messages import Assignment
from holdfast.worker.collectives import groups
from holdfast.worker.collectives.small_collectives import SmallCollectives

ASKING_PATIENCE_S = 5.0
"""For a store that is away, when its newest step is only to be compared with what is in memory already."""
SHARDS_A_RANK_MAX = 16
"""How many shards one rank may offer to write: its own, and the replicas it keeps."""

log = get_logger(__name__)


def write(
    url: str, step: int, held: Mapping[int, FlatTree], shards: int, assignment: Assignment, seed: int, world_size: int
) -> None:
    """Write our part of a checkpoint of the state before `step`, from the shards we hold; rank 0 publishes it.
    `world_size`: of those that made the step, some of which may be gone."""
    about = CheckpointInfo(
        step=step,
        world_size=world_size,
        shards=shards,
        view=assignment.view,
        seed=seed,
        run=assignment.run,
        created_unix_s=time.time(),
        versions={"holdfast": __version__, "torch": str(torch.__version__)},
    )
    with CheckpointWriter(open_store(url), about, f"dump-{assignment.run or 'run'}-v{assignment.view}") as writing:
        for shard in _ours(held, assignment.rank):
            with memoryview(write_image(held[shard], 1, 0)) as image:
                writing.write_part(shard, image)
        groups.agree((step,))
        if assignment.rank == 0 and writing.publish() is None:
            raise CheckpointError(f"{url} lacks parts of step {step}: give all nodes a --checkpoint-dir they share")
        groups.agree((step,))


def _ours(held: Mapping[int, FlatTree], rank: int) -> list[int]:
    """Return the shards that no lower rank has."""
    offered = sorted(held)[:SHARDS_A_RANK_MAX]
    rows = groups.gather([*offered, *([-1] * (SHARDS_A_RANK_MAX - len(offered)))])
    return [shard for shard in offered if not any(shard in row for row in rows[:rank])]


# --- reading


def newest_step(url: str) -> int:
    """Return the step of the newest checkpoint that can be opened; -1 if there is none, or if storage cannot be asked:
    what is in memory is good without it, so storage that is away is not waited for."""
    try:
        return _newest(open_store(url, ASKING_PATIENCE_S))
    except StorageError as error:
        log.warning("storage-unreachable", f"storage cannot be asked for checkpoints: {error}")
        return -1


def agreed_step(url: str, before: int | None, talk: SmallCollectives) -> int:
    """Return the step of the newest checkpoint that every rank sees, below `before`; -1 if there is none. StorageError
    if storage cannot be reached: it says nothing about what lies there."""
    step = _newest(open_store(url), before)
    highest, lowest = talk.agree((step, -step))
    if -lowest < 0 <= highest:
        raise StateConflictError(
            f"some ranks see a checkpoint of step {highest}, others none: give all nodes the same --checkpoint-dir, on"
            " storage they share"
        )
    return -lowest


def restore(
    url: str, step: int, tracked: Tracked, shard_map: ShardMap, talk: SmallCollectives
) -> FoundCheckpoint | None:
    """Load the checkpoint of this step, whatever world wrote it; None if one of the ranks cannot, so that none uses
    it. All ranks together. StorageError if storage cannot be reached."""
    found, problem = _try_to_load(url, step, tracked, shard_map, talk.rank)
    is_bad, is_away = talk.agree((int(problem is not None), int(_is_away(problem))))
    if is_away:
        raise StorageError(f"the checkpoint of step {step} cannot be read: {problem or 'another rank says so'}")
    if not is_bad:
        return found
    why = problem or "another rank cannot load it"
    log.warning("checkpoint-skipped", f"checkpoint of step {step} skipped: {why}")
    return None


def raise_unusable(url: str, talk: SmallCollectives) -> None:
    """Raise CheckpointError if there are checkpoints, and none could be used: a run that starts from scratch would hide
    that."""
    if talk.agree((int(bool(CheckpointCatalogue(open_store(url)).publisher.steps())),))[0]:
        raise CheckpointError(f"{url} has no checkpoint that every rank can load: see the warnings above")


def _newest(store: Store, before: int | None = None) -> int:
    """Return the step of the newest checkpoint that can be opened; what is wrong with newer ones is logged."""
    catalogue = CheckpointCatalogue(store)
    for step in catalogue.publisher.steps():
        if before is not None and step >= before:
            continue
        try:
            return catalogue.open(step).step
        except StorageError:
            raise
        except CheckpointError as error:
            log.warning("checkpoint-skipped", f"checkpoint skipped: {error}")
    return -1


def _is_away(problem: Exception | None) -> bool:
    return isinstance(problem, StorageError) or (problem is not None and isinstance(problem.__context__, StorageError))


def _try_to_load(
    url: str, step: int, tracked: Tracked, shard_map: ShardMap, rank: int
) -> tuple[FoundCheckpoint | None, CheckpointError | StateError | None]:
    try:
        catalogue = CheckpointCatalogue(open_store(url))
        found = catalogue.open(step)
        with catalogue.reading(found):
            load(found, tracked, shard_map, rank)
    except (CheckpointError, StateError) as error:
        return None, error
    return found, None


def load(found: FoundCheckpoint, tracked: Tracked, shard_map: ShardMap, rank: int) -> None:
    """Return the state of one rank, verified; resharded if the world is cut otherwise."""
    about = found.about
    sources = _Sources(found)
    try:
        shard = shard_map.shard_of(rank) if about.shards == shard_map.shards else None
        load_parts(sources, about.shards, about.shares, tracked, shard=shard)
    finally:
        sources.close()


class _Sources(dict[int, PartSource]):
    """The parts of a checkpoint, each opened when it is first needed."""

    def __init__(self, found: FoundCheckpoint) -> None:
        super().__init__()
        self._found = found

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and 0 <= number < len(self._found.manifest.parts)

    def __missing__(self, number: int) -> PartSource:
        found, part = self._found, self._found.manifest.parts[number]
        checksums = [part.checksum(block) for block in range(part.blocks)]
        store, name = found.store, found.name(part)
        if store.local is not None:
            self[number] = FilePart(store.local / name, checksums, root=store.local)
        else:
            self[number] = RangePart(
                lambda start, size: store.read(name, start, size), part.size_bytes, checksums, f"{store.url}/{name}"
            )
        return self[number]

    def close(self) -> None:
        for source in self.values():
            if isinstance(source, FilePart):
                source.close()
