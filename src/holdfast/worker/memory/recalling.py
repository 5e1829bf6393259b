"""All workers start anew, and the state of their predecessors is in their agents' memory: they take it from there.

Every worker asks its own agent what it holds: images of its seats, and replicas that it keeps for other nodes. Then,
all together:

    1  everybody says which images it can offer; those of one node are shared out among its workers (one gather)
    2  the newest step is chosen of which all parts of one cut are on offer
    3  what a worker needs and its own node has not, is sent to it, part by part, by the worker that offers it: first
       the checksums of its blocks, where they are known, then the part. Who gets it compares them
    4  everybody loads: its own shard, if the world is cut as before, or what it needs of all

If one of them cannot load what it got, nobody uses it: the step before it is the next best, of memory or of storage
(starting.py).
Parts of one step belong together only if they were copied in the same view: a step that was gone back from is made
again, and need not come out the same.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from holdfast.errors import CheckpointError, StateError
from holdfast.state.parts import FilePart, MemoryPart, PartSource, load_parts
from holdfast.state.tracked import Tracked
from holdfast.storage.image import BLOCK_BYTES
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


class Recollection:
    """What is in the nodes' memory, as all ranks know it. Each of its methods is called by all ranks at once."""

    def __init__(
        self,
        held: Iterable[HeldImage],
        local_rank: int,
        local_world_size: int,
        shards: int,
        tracked: Tracked,
        talk: Talk,
    ) -> None:
        """`held`: the images that this node has. `shards`: into how many the objects that are tracked are cut."""
        self._mine = sorted(held, key=lambda one: one.path)
        self._shards, self._tracked, self._talk = shards, tracked, talk
        offered = [one for index, one in enumerate(self._mine) if index % local_world_size == local_rank]
        self._rows = [_offers(row) for row in talk.gather(_words(offered[:OFFERS_MAX]))]
        self._refused: dict[Key, str] = {}

    @property
    def has_some(self) -> bool:
        """Whether there is a whole state that nobody has refused yet."""
        return choose(self._rows, 0, self._refused) is not None

    def load(self, at_least: int) -> Choice | None:
        """Load the newest state, if there is one before this step or a later one that every rank can load. After a
        None the objects may hold a mixture, if some were refused, and must be loaded from another source."""
        while (choice := choose(self._rows, at_least, self._refused)) is not None:
            trouble = _load(choice, self._mine, self._shards, self._tracked, self._talk)
            if not self._talk.agree((int(bool(trouble)),))[0]:
                return choice
            self._refused[choice.key] = trouble or "another rank cannot load it"
            log.warning("step %d in memory cannot be used: %s", choice.step, self._refused[choice.key])
        return None

    def raise_refused(self) -> None:
        """CheckpointError if there were some that could not be loaded."""
        if self._refused:
            said = (f"step {key.step} in memory: {why}" for key, why in self._refused.items())
            raise CheckpointError("; ".join(said))


def choose(rows: Sequence[Sequence[Offer]], at_least: int, refused: Collection[Key] = ()) -> Choice | None:
    """The newest step, from `at_least` on, of which every part is on offer; of two cuts of it, the later. The same on
    every rank."""
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
        if len(one.servers) == key.shards * key.shares and key.step >= at_least and key not in refused
    ]
    return max(whole, key=lambda one: (one.step, one.key.view, one.key.shards, one.key.shares), default=None)


def _load(choice: Choice, mine: Sequence[HeldImage], shards: int, tracked: Tracked, talk: Talk) -> str:
    """What is wrong with it, for this rank; nothing if it is loaded."""
    key, trouble = choice.key, ""
    here = {one.part: one for one in mine if Key(one.step, one.shards, one.shares, one.view) == key}
    needed = _needed(choice, shards, talk.rank)
    with ExitStack() as stack:
        served: dict[int, Served] = {}
        try:
            for part, image in here.items():
                is_served = choice.servers[part][0] == talk.rank and talk.size > 1
                if part in needed or is_served:
                    _lock(image, stack)
                if is_served:
                    served[part] = _served(image)
        except (CheckpointError, OSError) as error:
            trouble = str(error)
        if talk.agree((int(bool(trouble)),))[0]:  # before anybody waits for a part that will not come
            return trouble or "another rank cannot read what it has of it"
        received = _exchange(choice, [part for part in needed if part not in here], served, talk)
        try:
            sources: dict[int, PartSource] = {
                part: MemoryPart(memoryview(memory), checksums, f"part {part} from rank {choice.servers[part][0]}")
                for part, (memory, checksums) in received.items()
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


class Served(NamedTuple):
    """A part that others may want, and the checksums of its blocks, as far as they are known."""

    memory: mmap.mmap
    checksums: list[int] | None


def _exchange(choice: Choice, missing: Sequence[int], ours: Mapping[int, Served], talk: Talk) -> dict[int, Served]:
    """The parts that we need and that are not on our node, sent by who has them."""
    rows = talk.gather([int(part in missing) for part in sorted(choice.servers)])
    sent: list[Any] = []
    received: dict[int, Served] = {}
    for index, part in enumerate(sorted(choice.servers)):
        server, size_bytes = choice.servers[part]
        receivers = [rank for rank, row in enumerate(rows) if row[index]]
        if server == talk.rank and receivers:
            sent += _send(ours[part], receivers)
        elif part in missing:
            received[part] = _receive(server, size_bytes)
    for sending, _ in sent:
        sending.wait()
    return received


def _send(part: Served, receivers: Sequence[int]) -> list[tuple[Any, torch.Tensor]]:
    """What is under way, and the tensors that must last until it is there."""
    blocks = _blocks(len(part.memory))
    words = [1, *part.checksums] if part.checksums else [0] * (1 + blocks)
    tensors = torch.tensor(words), torch.frombuffer(part.memory, dtype=torch.uint8)
    return [(dist.isend(tensor, rank, tag=_TAG), tensor) for rank in receivers for tensor in tensors]


def _receive(server: int, size_bytes: int) -> Served:
    words = torch.empty(1 + _blocks(size_bytes), dtype=torch.int64)
    dist.recv(words, server, tag=_TAG)
    memory = mmap.mmap(-1, size_bytes)
    dist.recv(torch.frombuffer(memory, dtype=torch.uint8), server, tag=_TAG)
    is_known, *checksums = words.tolist()
    return Served(memory, checksums if is_known else None)


def _blocks(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES)


def _lock(image: HeldImage, stack: ExitStack) -> None:
    """Nobody overwrites the image before the stack is left."""
    path = Path(image.path)
    lock = ImageLock(path, is_writable=False)
    stack.callback(lock.close)
    if not lock.take() or not _is_still(image, path):
        raise CheckpointError(f"{path} is being overwritten")


def _served(image: HeldImage) -> Served:
    """An image to send from: as a private mapping, since what is sent must look as if it could be written to."""
    blocks = _blocks(image.size_bytes)
    if image.checksums and len(image.checksums) != blocks:
        raise CheckpointError(f"{image.path} has {blocks} blocks, its checksums are of {len(image.checksums)}")
    descriptor = os.open(image.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(
            descriptor, image.size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    except ValueError as error:  # the file is shorter than that
        raise CheckpointError(f"{image.path} cannot be read: {error}") from None
    finally:
        os.close(descriptor)
    return Served(memory, list(image.checksums) or None)


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
