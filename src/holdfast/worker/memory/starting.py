"""Where training begins: with the newest state that every rank can load, be it in the agents' memory or on storage.

What is in memory is tried first, down to the step of the newest checkpoint; of the same step, memory is preferred: it
is nearer, and it is what the job had last. Then that checkpoint. If it cannot be used either, what is in memory above
the checkpoint before it, and so on: what is damaged costs as few steps as there are whole states.

Storage that is away is waited for (stores.PATIENCE_S), unless a whole state is in memory: then it is asked for a moment
only, and what is in memory counts as the newest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from holdfast.state.tracked import Tracked
from holdfast.storage.catalogue import Found
from holdfast.wire.session import HeldImage
from holdfast.worker.collectives.talk import Talk
from holdfast.worker.memory import checkpoints
from holdfast.worker.memory.recalling import Choice, Recollection


class Start(NamedTuple):
    """What was found, and is loaded."""

    step: int
    seed: int
    is_recalled: bool
    """Out of the agents' memory."""
    is_intact: bool = False
    """And no node has lost its part."""
    checkpoint: Found | None = None
    """Out of storage."""


def find_start(
    url: str, held: Iterable[HeldImage], local: tuple[int, int], tracked: Tracked, shards: int, talk: Talk
) -> Start | None:
    """All ranks together; None if there is nothing. CheckpointError if there is something and none of it could be
    loaded: the objects may hold a mixture, and cannot be started with. `held`: what this node has in memory. `local`:
    our number among its workers, and theirs."""
    memory = Recollection(held, *local, shards, tracked, talk)
    if memory.has_some:
        (newest,) = talk.agree((checkpoints.newest_step(url),))
        if (choice := memory.load(newest)) is not None:
            return _recalled(choice)
    before: int | None = None
    while (step := checkpoints.agreed_step(url, before, talk)) >= 0:
        if (choice := memory.load(step)) is not None:
            return _recalled(choice)
        if (found := checkpoints.restore(url, step, tracked, shards, talk)) is not None:
            return Start(step, found.about.seed, is_recalled=False, checkpoint=found)
        before = step
    if (choice := memory.load(0)) is not None:
        return _recalled(choice)
    memory.raise_refused()
    checkpoints.raise_unusable(url, talk)
    return None


def _recalled(choice: Choice) -> Start:
    return Start(choice.step, choice.seed, is_recalled=True, is_intact=choice.is_intact)
