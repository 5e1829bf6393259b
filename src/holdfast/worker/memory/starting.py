"""Where training begins: with what the agents have in memory, or with the last checkpoint, whichever is newer."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.errors import CheckpointError
from holdfast.state.tracked import Tracked
from holdfast.wire.session import Place
from holdfast.worker.collectives import talk
from holdfast.worker.line import Line
from holdfast.worker.memory import checkpoints, recalling


class Start(NamedTuple):
    """What was found, and is loaded."""

    step: int
    seed: int
    is_recalled: bool
    """Out of the agents' memory."""
    is_intact: bool = False
    """And no node has lost its part."""


def find_start(url: str, line: Line | None, place: Place | None, tracked: Tracked, shards: int) -> Start | None:
    """All ranks together; None if there is nothing. Raises CheckpointError if what is in memory could not be loaded and
    there is nothing else: the objects may hold a mixture, and cannot be started with."""
    trouble: CheckpointError | None = None
    if line is not None and place is not None:
        try:
            recalled = _recall(url, line, place, tracked, shards)
        except CheckpointError as error:
            trouble = error
        else:
            if recalled is not None:
                return Start(recalled.step, recalled.seed, True, recalled.is_intact)
    found = checkpoints.restore(url, tracked, shards, talk.in_session())
    if found is not None:
        return Start(found.step, found.about.seed, False)
    if trouble is not None:
        raise trouble
    return None


def _recall(url: str, line: Line, place: Place, tracked: Tracked, shards: int) -> recalling.Choice | None:
    talking = talk.in_session()
    (newer_than,) = talking.agree((checkpoints.newest_step(url),))
    local = place.local_rank, place.local_world_size
    return recalling.recall(line.held(), *local, shards, tracked, newer_than, talking)
