"""Lives of a job, each ended by `kill -9`; after each, what its memory and its storage hold is judged.

What must be so after every kill:

    some step can be restored on every rank, by the code that a session uses, bit for bit as that step's state is
    all ranks' parts of it come from the same life
    it is not older than the last step that any rank knew to be complete
    every checkpoint that can be seen is complete, none that was announced is missing

A life begins with what the last one left: the newer of the two. Now and then a node's memory is lost as well: then its
part comes from the copy on the next node (`replicates`), or the job begins with storage (`persists`). The number of
ranks changes too.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from fire import agents
from fire.failure import BrokenError, start
from fire.homes import Homes
from fire.ranks import Board, Host, Table, World, train
from fire.state import State
from holdfast.core.shard_map import ShardMap
from holdfast.errors import CheckpointError
from holdfast.snapshots.slot_file import SLOTS, SlotStatus
from holdfast.state.partition import PartPlan
from holdfast.storage.checkpoint_catalogue import CheckpointCatalogue, FoundCheckpoint
from holdfast.storage.stores import open_store
from holdfast.wire.worker_messages import BuffersReady, StoredImage
from holdfast.worker.collectives.small_collectives import SmallCollectives
from holdfast.worker.restore import from_checkpoints
from holdfast.worker.restore.from_snapshots import SnapshotRestore

START_LIMIT_S = 120.0
STEPS_MAX, LONG_STEPS_MAX = 6, 40
"""A life is killed within so many steps; some may live longer, so that what takes long comes to its end."""
MOMENTS_S = 0.008
"""And so long after one of them began, at most."""
NODE_LOSS_SHARE = 0.4
SURVIVAL_SHARE = 0.4
"""The share of lives after which the job goes on with what a survivor has, instead of restarting."""


@dataclass(frozen=True)
class Left:
    """What a life has left for the next."""

    step: int = 0
    maker: int = 0
    """The life that made the state."""
    is_recalled: bool = False
    """Whether all ranks take it from memory. Else they have it from storage, or from one that survived."""
    is_intact: bool = False
    """And each has its own part of it."""


@dataclass(frozen=True)
class Kind:
    """What the campaign is about."""

    is_sharded: bool = False
    long_share: float = 0.0
    """Of lives that may be long."""
    persists: bool = False
    replicates: bool = False
    """Each rank on a node of its own, with an agent that copies its images to the next."""
    parity: int = 0
    """Instead of copies, in groups of so many."""
    ranks: int = 3


KINDS = {
    "memory": Kind(),
    "sharded": Kind(is_sharded=True),
    "persist": Kind(persists=True, long_share=0.15),
    "replicate": Kind(is_sharded=True, replicates=True, long_share=0.6),
    "both": Kind(is_sharded=True, replicates=True, persists=True, long_share=0.6),
    "parity": Kind(is_sharded=True, replicates=True, parity=2, ranks=4, long_share=0.6),
}


class Campaign:
    """In memory of its own, below `directory`; checkpoints, if it is about them, below `storage`."""

    def __init__(self, directory: Path, storage: Path, kind: Kind, scale: int, seed: int) -> None:
        self._root, self._storage, self._kind, self._scale = directory, storage, kind, scale
        self._chance = random.Random(seed)
        self._left, self._size, self._life = Left(), kind.ranks if kind.replicates else 2, 0
        self._is_young = True
        """Nothing can be asked of memory that has not seen a complete step yet."""
        self._lost: int | None = None
        """Whose node was lost in the last life's end."""
        self._is_copied = False
        """Whether each complete image is on two nodes."""
        self.counts: Counter[str] = Counter()
        torch.set_num_threads(1)
        self._homes = Homes(directory, kind.ranks, are_apart=kind.replicates)
        self._buffers = {rank: self._allocate(rank) for rank in range(kind.ranks)}

    def again(self) -> None:
        """One life and its end. Raises BrokenError."""
        self._life += 1
        world = World(
            size=self._size,
            is_sharded=self._kind.is_sharded,
            view=self._life,
            step=self._left.step,
            maker=self._left.maker,
            scale=self._scale,
            checkpoint_every=4 if self._kind.persists else 0,
            restored=self._left.step if self._left.is_recalled else -1,
            is_intact=self._left.is_intact,
        )
        board, published = self._run(world)
        complete = board.complete(world.size)
        self._look_around()
        in_memory = self._restore(world)
        stored = self._examine_storage(world, published)
        self._judge(world, complete, in_memory)
        self._left = _newest(in_memory, stored)
        if self._chance.random() < SURVIVAL_SHARE and self._lost is None:
            self._left = self._survive(world, board)
        else:
            self._homes.discard_after(self._left.step)
        self._change()

    # --- a life

    def _run(self, world: World) -> tuple[Board, list[int]]:
        board, table = Board(), Table(world.size)
        processes = agents.Agents(self._works(world))
        processes.begin(are_partners=self._kind.replicates)
        pids = []
        for rank in range(world.size):
            ready, number, pipe = self._buffers[rank], self._homes.number(rank), processes.pipe_to(rank)
            host = Host(number, ready, pipe)
            pids.append(start(lambda r=rank, h=host: train(world, r, h, table.sit_down(r), board)))
        table.leave()
        try:
            self._wait(world, board)
        except BrokenError:
            for pid in pids:
                os.kill(pid, signal.SIGUSR1)  # their stacks are evidence too
            time.sleep(1.0)
            raise
        finally:
            self._kill(pids, processes, board.complete(world.size))
        return board, processes.published()

    def _works(self, world: World) -> list[Callable[[int, int], None]]:
        """Of the agents."""
        root, url = self._root, str(self._storage) if self._kind.persists else ""
        if self._kind.replicates:
            return [
                partial(agents.replicate, root, world.view, rank, world.size, self._kind.parity, url)
                for rank in range(world.size)
            ]
        return [partial(agents.persist, root, self._homes.node(0), url)] if url else []

    def _wait(self, world: World, board: Board) -> None:
        """Until a random moment."""
        is_long = self._chance.random() < self._kind.long_share
        goal = world.step + self._chance.randrange(LONG_STEPS_MAX if is_long else STEPS_MAX)
        give_up_at = time.monotonic() + START_LIMIT_S
        while min(board.read(rank)[0] for rank in range(world.size)) < goal:
            if time.monotonic() > give_up_at:
                raise BrokenError(f"life {self._life}: no step within {START_LIMIT_S:.0f} s")
            time.sleep(0.0002)
        time.sleep(self._chance.uniform(0.0, MOMENTS_S))

    def _kill(self, ranks: list[int], processes: agents.Agents, complete: int) -> None:
        """All, perhaps with what a node had in memory. From parity that is made again by agents that have survived."""
        self._lost = self._choose_lost(complete)
        if self._kind.parity and self._lost is not None:
            lost_agent = processes.pids[self._lost]
            self._kill_all([*ranks, lost_agent])
            self._homes.lose(self._lost)
            processes.rebuild(self._lost)
            self._kill_all([pid for pid in processes.pids if pid != lost_agent])
        else:
            self._kill_all([*ranks, *processes.pids])
            if self._lost is not None:
                self._homes.lose(self._lost)
        if self._lost is not None:
            self._buffers[self._lost] = self._allocate(self._lost)

    def _kill_all(self, pids: list[int]) -> None:
        """At once, or one and then, a moment later, the others: another process notices, or none does."""
        victims = self._chance.sample(pids, len(pids))
        pause_s = self._chance.choice((0.0, 0.0005, 0.003))
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
            self.counts["kills"] += 1
            time.sleep(self._chance.uniform(0.0, pause_s) if pause_s else 0.0)
        for pid in victims:
            _, status = os.waitpid(pid, 0)
            if os.WIFEXITED(status):
                raise BrokenError(f"life {self._life}: process {pid} ended by itself ({os.WEXITSTATUS(status)}): a bug")

    # --- what is left of it

    def _look_around(self) -> None:
        """Into which moments the kill fell."""
        pages = [self._homes.page(rank) for rank in range(self._size)]
        records = [page.record(slot) for page in pages for slot in range(SLOTS)]
        newest = [max(page.record(slot).image.step for slot in range(SLOTS)) for page in pages]
        self.counts["lives"] += 1
        self.counts["in the middle of a copy"] += any(r.status is SlotStatus.WRITING for r in records)
        self.counts["ranks at different steps"] += len(set(newest)) > 1

    def _restore(self, world: World) -> Left | None:
        """The newest state that all ranks can restore from memory, restored on each shard."""
        images = self._homes.images()
        found = [self._restore_on(images, world, rank) for rank in range(world.shards)]
        if any(one is None for one in found):
            return None
        lives = {(one.step, one.maker) for one in found if one is not None}
        if len(lives) > 1:
            raise BrokenError(f"life {self._life}: shards are of different states: {sorted(lives)}")
        return found[0]

    def _restore_on(self, images: list[StoredImage], world: World, rank: int) -> Left | None:
        state = world.state(rank)
        everywhere = SmallCollectives(rank, world.size, list, lambda values: [list(values)] * world.size)
        memory = SnapshotRestore(images, 0, 1, ShardMap(world.shards), state.tracked, everywhere)
        if (choice := memory.load(0)) is None:
            memory.raise_refused()
            return None
        checked = self._checked(state, choice.step, "memory")
        return replace(checked, is_recalled=True, is_intact=choice.is_intact)

    def _checked(self, state: State, step: int, where: str) -> Left:
        if wrong := state.wrong(step):
            raise BrokenError(f"life {self._life}: step {step} in {where}: {wrong}")
        return Left(step, state.count.life)

    def _judge(self, world: World, complete: int, found: Left | None) -> None:
        if found is not None and found.step < complete:
            raise BrokenError(
                f"life {self._life}: step {complete} was complete on all ranks, step {found.step} is restored"
            )
        if found is None and not self._is_young:
            raise BrokenError(f"life {self._life}: nothing in memory can be restored: {self._records()}")
        if found is not None:
            self._is_young = False
            self.counts["went back behind what it began with"] += found.step < world.restored

    def _examine_storage(self, world: World, published: list[int]) -> Left | None:
        if not self._kind.persists:
            return None
        catalogue = CheckpointCatalogue(open_store(str(self._storage)))
        listing = catalogue.list()
        mine = f"v{world.view}"
        self.counts["in the middle of a checkpoint"] += any(mine in str(left) for left in listing.unfinished)
        self.counts["checkpoints"] += len(published)
        if listing.damaged:
            raise BrokenError(f"life {self._life}: {listing.damaged[0].why}")
        steps = [found.step for found in listing.found]
        missing = sorted(published)[-1:] if published and max(published) > max(steps, default=-1) else []
        if missing:
            raise BrokenError(f"life {self._life}: step {missing[0]} was announced and is not there: {steps}")
        if not listing.found:
            return None
        try:
            return self._load(world, listing.found[0])
        except CheckpointError as error:
            raise BrokenError(f"life {self._life}: {error}") from error

    def _load(self, world: World, found: FoundCheckpoint) -> Left:
        lives = set()
        for rank in range(world.shards):
            state = world.state(rank)
            from_checkpoints.load(found, state.tracked, ShardMap(world.shards), rank)
            lives.add(self._checked(state, found.step, "storage").maker)
        if len(lives) > 1:
            raise BrokenError(f"life {self._life}: parts of step {found.step} in storage are of lives {sorted(lives)}")
        return Left(found.step, lives.pop())

    # --- between lives

    def _survive(self, world: World, board: Board) -> Left:
        """As if one rank had survived, and the others were replaced: its state is that of the next life. What the
        slots hold is not known to any process."""
        self.counts["one survived"] += 1
        step = max(board.read(rank)[0] for rank in range(world.size))
        return Left(step, world.view if step > world.step else world.maker)

    def _change(self) -> None:
        """Another number of ranks, now and then, if the job restarts; and a node's memory lost, if there is storage
        to fall back on. (If a rank leaves for good while others go on, what it alone had heard goes with it: until
        their first copy is complete, the death of all of them would leave nothing.)"""
        if not self._kind.is_sharded and self._left.is_recalled and self._chance.random() < 0.2:
            self._size = self._chance.randint(2, self._kind.ranks)
            self.counts["other sizes"] += 1
        if self._kind.persists and self._chance.random() < 0.05:
            self._lose(self._chance.randrange(self._size))

    def _lose(self, rank: int) -> None:
        self._homes.lose(rank)
        self._buffers[rank] = self._allocate(rank)
        self._is_young, self._is_copied = True, False
        self.counts["memories lost"] += 1
        world = World(self._size, self._kind.is_sharded, self._life, 0, 0, self._scale, 0)
        self._left = _newest(self._restore(world), self._examine_storage(world, []))
        self._homes.discard_after(self._left.step)

    def _choose_lost(self, complete: int) -> int | None:
        """All that one node had in memory goes with it, once others have it too: until the next step is complete after
        that, there is one copy of some of it."""
        self._is_copied |= complete >= 0
        if not (self._kind.replicates and self._is_copied and self._chance.random() < NODE_LOSS_SHARE):
            return None
        self._is_copied = False
        self.counts["nodes lost"] += 1
        return self._chance.randrange(self._size)

    def _allocate(self, rank: int) -> BuffersReady:
        return self._homes.allocate(rank, self._buffer_bytes())

    def _buffer_bytes(self) -> int:
        """For the largest share there may be."""
        shares = 1 if self._kind.is_sharded else 2
        about = {"part": "0", "shards": "9", "shares": "9"}
        flat = State(self._scale).tracked.state()
        return max(PartPlan(flat, shares, share, about).layout.size_bytes for share in range(shares)) + 2**16

    def _records(self) -> str:
        found = []
        for rank in range(self._size):
            page = self._homes.page(rank)
            records = [page.record(slot) for slot in range(SLOTS)]
            slots = ", ".join(f"{r.status.name} {r.image.step} of life {r.image.view}" for r in records)
            found.append(f"rank {rank} (complete {page.get('complete')}): {slots}")
        return "; ".join(found)


def _newest(in_memory: Left | None, stored: Left | None) -> Left:
    """Return what a job restarts from: memory, unless storage is newer."""
    if in_memory is not None and (stored is None or in_memory.step >= stored.step):
        return in_memory
    return stored or Left()
