"""All workers start anew, and the state of their predecessors is in their agents' memory: they take it from there.

Every worker asks its own agent what it holds: images of its seats, and replicas that it keeps for other nodes. Then,
all together:

    1  everybody says which images it can offer; those of one node are shared out among its workers (one gather)
    2  the newest step is chosen of which all parts of one cut are on offer
    3  what a worker needs and its own node has not, is sent to it, part by part, by the worker that offers it
    4  everybody loads: its own shard, if the world is cut as before, or what it needs of all

If one of them cannot load what it got, nobody uses it: the step before it, then a checkpoint, are the next best.
Parts of one step belong together only if they were copied in the same view: a step that was gone back from is made
again, and need not come out the same.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from holdfast.errors import CheckpointError, StateError
from holdfast.state.parts import FilePart, MemoryPart, PartSource, load_parts
from holdfast.state.tracked import Tracked
from holdfast.wire.session import HeldImage
from holdfast.wire.slots import ImageLock, Seat, Status
from holdfast.worker.collectives.talk import Talk

OFFERS_MAX = 64
"""Images one worker may offer."""
WORDS = 9
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
    view: int
    is_guest: int = 0


class Key(NamedTuple):
    """Images that agree in all of this are parts of one state."""

    step: int
    shards: int
    shares: int
    view: int


class Choice(NamedTuple):
    """The step that is taken, and who serves each of its parts."""

    key: Key
    seed: int
    first_step: int
    servers: dict[int, tuple[int, int]]
    """Part → rank, size in bytes."""
    at_home: set[int]
    """The parts that are where they were made, and not only held for a node that is gone."""

    @property
    def is_intact(self) -> bool:
        return self.at_home == self.servers.keys()

    @property
    def step(self) -> int:
        return self.key.step


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
    at once. None: there is none. Raises CheckpointError if there is one that could not be loaded, on any rank: then the
    objects may hold a mixture, and must be loaded from another source."""
    mine = sorted(held, key=lambda one: one.path)
    offered = [one for index, one in enumerate(mine) if index % local_world_size == local_rank][:OFFERS_MAX]
    rows = [_offers(row) for row in talk.gather(_words(offered))]
    refused: dict[Key, str] = {}
    while (choice := choose(rows, newer_than, refused)) is not None:
        trouble = _load(choice, mine, shards, tracked, talk)
        if not talk.agree((int(bool(trouble)),))[0]:
            return choice
        refused[choice.key] = trouble or "another rank cannot load it"
        log.warning("step %d in memory cannot be used: %s", choice.step, refused[choice.key])
    if refused:
        raise CheckpointError("; ".join(f"step {key.step} in memory: {why}" for key, why in refused.items()))
    return None


def choose(rows: Sequence[Sequence[Offer]], newer_than: int, refused: Collection[Key] = ()) -> Choice | None:
    """The newest step of which every part is on offer; of two cuts of it, the later. The same on every rank."""
    found: dict[Key, Choice] = {}
    for rank, row in enumerate(rows):
        for offer in row:
            key = Key(offer.step, offer.shards, offer.shares, offer.view)
            known = found.setdefault(key, Choice(key, offer.seed, offer.first_step, {}, set()))
            known.servers.setdefault(offer.part, (rank, offer.size_bytes))
            if not offer.is_guest:
                known.at_home.add(offer.part)
    whole = [
        one
        for key, one in found.items()
        if len(one.servers) == key.shards * key.shares and key.step > newer_than and key not in refused
    ]
    return max(whole, key=lambda one: (one.step, one.key.view, one.key.shards, one.key.shares), default=None)


def _load(choice: Choice, mine: Sequence[HeldImage], shards: int, tracked: Tracked, talk: Talk) -> str:
    """What is wrong with it, for this rank; nothing if it is loaded."""
    key, trouble = choice.key, ""
    here = {one.part: one for one in mine if Key(one.step, one.shards, one.shares, one.view) == key}
    needed = _needed(choice, shards, talk.rank)
    with ExitStack() as stack:
        mapped: dict[int, mmap.mmap] = {}
        try:
            for part, image in here.items():
                is_served = choice.servers[part][0] == talk.rank and talk.size > 1
                if part in needed or is_served:
                    _lock(image, stack)
                if is_served:
                    mapped[part] = _mapped(image)
        except (CheckpointError, OSError) as error:
            trouble = str(error)
        if talk.agree((int(bool(trouble)),))[0]:  # before anybody waits for a part that will not come
            return trouble or "another rank cannot read what it has of it"
        received = _exchange(choice, [part for part in needed if part not in here], mapped, talk)
        try:
            sources: dict[int, PartSource] = {
                part: MemoryPart(memoryview(memory), None, f"part {part} from rank {choice.servers[part][0]}")
                for part, memory in received.items()
            }
            for part in (part for part in needed if part in here):
                path, checksums = Path(here[part].path), here[part].checksums or None
                sources[part] = stack.enter_context(FilePart(path, checksums, here[part].size_bytes))
            shard = talk.rank % shards if key.shards == shards else None
            load_parts(sources, key.shards, key.shares, tracked, shard=shard)
        except (CheckpointError, StateError) as error:
            trouble = str(error)
    return trouble


def _needed(choice: Choice, shards: int, rank: int) -> list[int]:
    """The parts of our shard, if the state is cut as ours; else all of them."""
    if choice.key.shards != shards:
        return sorted(choice.servers)
    return [part for part in sorted(choice.servers) if part % shards == rank % shards]


def _exchange(
    choice: Choice, missing: Sequence[int], mapped: Mapping[int, mmap.mmap], talk: Talk
) -> dict[int, mmap.mmap]:
    """The parts that we need and that are not on our node, sent by who has them."""
    rows = talk.gather([int(part in missing) for part in sorted(choice.servers)])
    kept: list[Any] = []
    received: dict[int, mmap.mmap] = {}
    for index, part in enumerate(sorted(choice.servers)):
        server, size_bytes = choice.servers[part]
        receivers = [rank for rank, row in enumerate(rows) if row[index]]
        if server == talk.rank and receivers:
            tensor = torch.frombuffer(mapped[part], dtype=torch.uint8)
            kept += [(dist.isend(tensor, rank, tag=_TAG), tensor) for rank in receivers]
        elif part in missing:
            received[part] = mmap.mmap(-1, size_bytes)
            dist.recv(torch.frombuffer(received[part], dtype=torch.uint8), server, tag=_TAG)
    for sending, _ in kept:
        sending.wait()
    return received


def _lock(image: HeldImage, stack: ExitStack) -> None:
    """Nobody overwrites the image before the stack is left."""
    path = Path(image.path)
    lock = ImageLock(path, is_writable=False)
    stack.callback(lock.close)
    if not lock.take() or not _is_still(image, path):
        raise CheckpointError(f"{path} is being overwritten")


def _mapped(image: HeldImage) -> mmap.mmap:
    """An image to send from: as a private mapping, since what is sent must look as if it could be written to."""
    descriptor = os.open(image.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(
            descriptor, image.size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    finally:
        os.close(descriptor)


def _is_still(image: HeldImage, path: Path) -> bool:
    """Whether a slot of a seat holds what the agent said. A worker of an agent that was killed may have lived on for a
    moment, and written to it."""
    if not (path.parent / "control").exists():
        return True  # a replica: its agent's own
    seat = Seat.open(path.parent)
    try:
        record = seat.record(int(path.name.removeprefix("image-")))
    finally:
        seat.close()
    return (record.status, record.step, record.view, record.part) == (
        Status.SEALED,
        image.step,
        image.view,
        image.part,
    )


def _words(offered: Sequence[HeldImage]) -> list[int]:
    """Of each, steps counted from one, so that zero is nothing."""
    said = [
        word
        for one in offered
        for word in (
            one.step + 1,
            one.part,
            one.shards,
            one.shares,
            one.size_bytes,
            one.seed,
            one.first_step,
            one.view,
            int(one.is_guest),
        )
    ]
    return said + [0] * (WORDS * OFFERS_MAX - len(said))


def _offers(row: Sequence[int]) -> list[Offer]:
    return [Offer(row[at] - 1, *row[at + 1 : at + WORDS]) for at in range(0, len(row), WORDS) if row[at]]
