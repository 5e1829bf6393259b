"""Where training begins: with the newest state that every rank can load, be it in the agents' memory or on storage.

What is in memory is tried first, down to the step of the newest checkpoint; of the same step, memory is preferred: it
is nearer, and it is what the job had last. Then that checkpoint. If it cannot be used either, what is in memory above
the checkpoint before it, and so on: what is damaged costs as few steps as there are whole states.

Storage that is away is waited for (RETRY_FOR_S), unless a whole state is in memory: then it is asked for a moment
only, and what is in memory counts as the newest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from holdfast.core.shard_map import ShardMap
from holdfast.state.tracked import Tracked
from holdfast.storage.checkpoint_catalogue import FoundCheckpoint
from holdfast.wire.worker_messages import StoredImage
from holdfast.worker.collectives.small_collectives import SmallCollectives
from holdfast.worker.restore import from_checkpoints
from holdfast.worker.restore.from_snapshots import SnapshotChoice, SnapshotRestore


class RestorePoint(NamedTuple):
    """What was found, and is loaded."""

    step: int
    seed: int
    world_size: int
    """The number of ranks that made it."""
    is_recalled: bool
    """Out of the agents' memory."""
    is_intact: bool = False
    """And no node has lost its part."""
    checkpoint: FoundCheckpoint | None = None
    """Out of storage."""


def find_start(
    url: str,
    held: Iterable[StoredImage],
    local: tuple[int, int],
    tracked: Tracked,
    shard_map: ShardMap,
    talk: SmallCollectives,
) -> RestorePoint | None:
    """Load the newest state that every rank can load, all ranks together; None if there is none. CheckpointError if
    there is something and none of it could be loaded: the objects may hold a mixture, and cannot be started with.
    `held`: the images in this node's memory. `local`: our number among its workers, and theirs."""
    memory = SnapshotRestore(held, *local, shard_map, tracked, talk)
    if memory.has_some:
        (newest,) = talk.agree((from_checkpoints.newest_step(url),))
        if (choice := memory.load(newest)) is not None:
            return _recalled(choice)
    before: int | None = None
    while (step := from_checkpoints.agreed_step(url, before, talk)) >= 0:
        if (choice := memory.load(step)) is not None:
            return _recalled(choice)
        if (found := from_checkpoints.restore(url, step, tracked, shard_map, talk)) is not None:
            return RestorePoint(step, found.about.seed, found.about.world_size, is_recalled=False, checkpoint=found)
        before = step
    if (choice := memory.load(0)) is not None:
        return _recalled(choice)
    memory.raise_refused()
    from_checkpoints.raise_unusable(url, talk)
    return None


def _recalled(choice: SnapshotChoice) -> RestorePoint:
    return RestorePoint(choice.step, choice.seed, choice.key.parts, is_recalled=True, is_intact=choice.is_intact)
