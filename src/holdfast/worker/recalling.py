"""All workers start anew, and the state of their predecessors is in their agents' memory: they take it from there.

Every worker asks its own agent what it holds: images of its seats, and replicas that it keeps for other nodes. Then,
all together:

    1  everybody says which images it can offer; those of one node are shared out among its workers (one gather)
    2  the newest step is chosen of which all parts of one cut are on offer
    3  what a worker needs and its own node has not, is sent to it, part by part, by the worker that offers it
    4  everybody loads: its own shard, if the world is cut as before, or what it needs of all

If one of them cannot load what it got, nobody uses it: a checkpoint is the next best source.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from holdfast.errors import CheckpointError, StateError
from holdfast.state.parts import MemoryPart, PartSource, load_parts
from holdfast.state.tracked import Tracked
from holdfast.wire.session import HeldImage
from holdfast.wire.slots import ImageLock
from holdfast.worker.talk import Talk

OFFERS_MAX = 64
"""Images one worker may offer."""
WORDS = 7
_TAG = 9_201

log = logging.getLogger(__name__)


class Offer(NamedTuple):
    """An image that one worker can read."""

    step: int
    part: int
    shards: int
    shares: int
    size_bytes: int
    seed: int
    first_step: int


class Choice(NamedTuple):
    """The step that is taken, and who serves each of its parts."""

    step: int
    shards: int
    shares: int
    seed: int
    first_step: int
    servers: dict[int, tuple[int, int]]
    """Part → rank, size in bytes."""


def recall(
    held: Sequence[HeldImage],
    local_rank: int,
    local_world_size: int,
    shards: int,
    tracked: Tracked,
    newer_than: int,
    talk: Talk,
) -> Choice | None:
    """Load the newest state that is whole in the nodes' memory, if it is of a later step than `newer_than`. All ranks
    at once. None: there is none, or it could not be loaded; then the objects may hold a mixture."""
    mine = sorted(held, key=lambda one: one.path)
    offered = [one for index, one in enumerate(mine) if index % local_world_size == local_rank][:OFFERS_MAX]
    choice = choose([_offers(row) for row in talk.gather(_words(offered))], newer_than)
    if choice is None:
        return None
    trouble = ""
    with ExitStack() as stack:
        try:
            sources = _gather_parts(choice, mine, shards, talk, stack)
            same_cut = choice.shards == shards and choice.shards * choice.shares == talk.size
            shard = talk.rank % shards if same_cut else None
            load_parts(sources, choice.shards, choice.shares, tracked, shard=shard)
        except (CheckpointError, StateError) as error:
            trouble = str(error)
    if talk.agree((int(bool(trouble)),))[0]:
        log.warning("step %d in memory cannot be used: %s", choice.step, trouble or "another rank cannot load it")
        return None
    return choice


def choose(rows: Sequence[Sequence[Offer]], newer_than: int) -> Choice | None:
    """The newest step of which every part is on offer; of two cuts of it, the finer. The same on every rank."""
    found: dict[tuple[int, int, int], Choice] = {}
    for rank, row in enumerate(rows):
        for offer in row:
            key = (offer.step, offer.shards, offer.shares)
            blank = Choice(offer.step, offer.shards, offer.shares, offer.seed, offer.first_step, {})
            found.setdefault(key, blank).servers.setdefault(offer.part, (rank, offer.size_bytes))
    whole = [one for one in found.values() if len(one.servers) == one.shards * one.shares and one.step > newer_than]
    return max(whole, key=lambda one: (one.step, one.shards, one.shares), default=None)


def _needed(choice: Choice, shards: int, rank: int) -> list[int]:
    """The parts of our shard, if the state is cut as ours; else all of them."""
    if choice.shards != shards:
        return sorted(choice.servers)
    return [part for part in sorted(choice.servers) if part % shards == rank % shards]


def _gather_parts(
    choice: Choice, mine: Sequence[HeldImage], shards: int, talk: Talk, stack: ExitStack
) -> dict[int, PartSource]:
    """All parts that we need, those of other nodes sent by who has them."""
    cut = (choice.step, choice.shards, choice.shares)
    here = {one.part: one for one in mine if (one.step, one.shards, one.shares) == cut}
    needed = _needed(choice, shards, talk.rank)
    missing = {part for part in needed if part not in here}
    rows = talk.gather([int(part in missing) for part in sorted(choice.servers)])
    kept: list[Any] = []
    sources: dict[int, PartSource] = {}
    for index, part in enumerate(sorted(choice.servers)):
        server, size_bytes = choice.servers[part]
        receivers = [rank for rank, row in enumerate(rows) if row[index]]
        if server == talk.rank and receivers:
            tensor = torch.frombuffer(_mapped(here[part], stack), dtype=torch.uint8)
            kept += [(dist.isend(tensor, rank, tag=_TAG), tensor) for rank in receivers]
        elif part in missing:
            memory = mmap.mmap(-1, size_bytes)
            dist.recv(torch.frombuffer(memory, dtype=torch.uint8), server, tag=_TAG)
            sources[part] = MemoryPart(memoryview(memory), None, f"part {part} from rank {server}")
    for sending, _ in kept:
        sending.wait()
    for part in needed:
        if part in here:
            image = here[part]
            memory = _mapped(image, stack)
            sources[part] = MemoryPart(memoryview(memory), image.checksums or None, image.path)
    return sources


def _mapped(image: HeldImage, stack: ExitStack) -> mmap.mmap:
    """An image, as a private mapping; nobody overwrites it before the stack is left."""
    lock = ImageLock(Path(image.path), is_writable=False)
    stack.callback(lock.close)
    if not lock.take():
        raise CheckpointError(f"{image.path} is being overwritten")
    descriptor = os.open(image.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(
            descriptor, image.size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    finally:
        os.close(descriptor)


def _words(offered: Sequence[HeldImage]) -> list[int]:
    """Of each, steps counted from one, so that zero is nothing."""
    said = [
        word
        for one in offered
        for word in (one.step + 1, one.part, one.shards, one.shares, one.size_bytes, one.seed, one.first_step)
    ]
    return said + [0] * (WORDS * OFFERS_MAX - len(said))


def _offers(row: Sequence[int]) -> list[Offer]:
    return [Offer(row[at] - 1, *row[at + 1 : at + WORDS]) for at in range(0, len(row), WORDS) if row[at]]
