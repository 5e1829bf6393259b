"""Processes that train as a session's workers do, as far as snapshots are concerned, and agree through pipes.

The order is the engine's: a copy begins with the step, the forward runs beside it, the update waits for its tensors,
and before it all ranks exchange their votes about snapshots (worker/snapshot/taker.py). A rank that finds another one
dead waits for its own end, as there is nobody to repair it here.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import torch

from fire.agents import MESSAGE
from fire.state import State
from holdfast.core.image_info import ImageInfo
from holdfast.wire.worker_messages import AllocateBuffers, BuffersReady, SnapshotSealed, SnapshotSettings
from holdfast.worker.snapshot.taker import SnapshotTaker

LATE_SHARE, LATE_S = 0.1, 0.01
RECORD = struct.Struct("=2q")
ALL_HAVE_IT = -1
"""The first number of the vote at a commit, if the last image of every rank is complete."""


@dataclass(frozen=True)
class World:
    """One life of a job."""

    size: int
    is_sharded: bool
    view: int
    step: int
    """To begin with, in a state that this earlier life made:"""
    maker: int
    scale: int
    checkpoint_every: int
    restored: int = -1
    """The step that all ranks have restored from memory, if they have."""
    is_intact: bool = False
    """And each had its own part of it."""

    @property
    def shards(self) -> int:
        return self.size if self.is_sharded else 1

    def image(self, rank: int) -> ImageInfo:
        """Return what all images of a rank have in common."""
        return ImageInfo(-1, rank, self.shards, self.size // self.shards, self.view, seed=1)

    def state(self, rank: int) -> State:
        return State(self.scale, rank % self.shards)


class Host:
    """Buffers that are there, and a pipe to the agent if there is one (buffers.SnapshotHost)."""

    def __init__(self, local_rank: int, buffers_ready: BuffersReady, to_agent: int | None) -> None:
        self.buffers_ready: BuffersReady | None = buffers_ready
        self._local_rank, self._to_agent = local_rank, to_agent

    def tell(self, message: AllocateBuffers | SnapshotSealed) -> None:
        if isinstance(message, AllocateBuffers):
            ready = self.buffers_ready
            assert ready is not None and message.size_bytes <= ready.size_bytes, "too little memory"
        elif self._to_agent is not None:
            with suppress(BrokenPipeError):  # the agent was killed first
                os.write(self._to_agent, MESSAGE.pack(self._local_rank, message.step, message.wanted))


class Table:
    """Pipes from every rank to every other one."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ends = {(i, j): os.pipe() for i in range(size) for j in range(size) if i != j}

    def sit_down(self, rank: int) -> Callable[[Sequence[int]], list[int]]:
        """By a rank: keep its own ends only, so that another's death is seen. Gives the element-wise maximum."""
        readers, writers = [], []
        for (giver, taker), (reader, writer) in self._ends.items():
            (readers.append if taker == rank else os.close)(reader)
            (writers.append if giver == rank else os.close)(writer)

        def agree(values: Sequence[int]) -> list[int]:
            packing = struct.Struct(f"={len(values)}q")
            try:
                for writer in writers:
                    os.write(writer, packing.pack(*values))
            except BrokenPipeError:
                wait_for_the_end()
            rows = [os.read(reader, packing.size) for reader in readers]
            if not all(rows):
                wait_for_the_end()
            return [max(column) for column in zip(values, *map(packing.unpack, rows), strict=True)]

        return agree

    def leave(self) -> None:
        """By the parent, once all are seated."""
        for ends in self._ends.values():
            for end in ends:
                os.close(end)


def wait_for_the_end() -> NoReturn:
    while True:
        signal.pause()


class Dawdle:
    """Now and then a rank is late, so that the moments in which others are ahead of it are long enough to be hit."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def __call__(self) -> None:
        if self._chance.random() < LATE_SHARE:
            time.sleep(self._chance.uniform(0.0, LATE_S))


class Board:
    """What ranks say to whoever outlives them: the step they are at, and the last that they know to be complete."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)

    def write(self, rank: int, step: int, complete: int) -> None:
        RECORD.pack_into(self._page, rank * RECORD.size, step, complete)

    def read(self, rank: int) -> tuple[int, int]:
        step, complete = RECORD.unpack_from(self._page, rank * RECORD.size)
        return step, complete

    def complete(self, size: int) -> int:
        """What any of them knows of."""
        return max(self.read(rank)[1] for rank in range(size))


def train(
    world: World,
    rank: int,
    host: Host,
    agree: Callable[[Sequence[int]], list[int]],
    board: Board,
) -> None:
    """For ever."""
    torch.set_num_threads(1)
    state, step = world.state(rank), world.step
    state.become(step, world.maker)
    settings = SnapshotSettings(every=1, checkpoint_every_steps=world.checkpoint_every)
    snapshots = SnapshotTaker(host, state.tracked, settings)
    snapshots.start_from(world.restored, world.is_intact)
    snapshots.enter(world.image(rank), 1)
    complete = -1
    board.write(rank, step, complete)
    dawdle = Dawdle(world.view * 100 + rank)
    while True:
        snapshots.begin(step)
        state.forward(step + 1, world.view)
        dawdle()
        snapshots.join(state.optimizer)
        dawdle()
        votes = agree(snapshots.vote(step))
        dawdle()
        snapshots.apply_vote(step, votes)
        dawdle()
        if votes[0] == ALL_HAVE_IT:
            complete = snapshots._last
        step += 1
        board.write(rank, step, complete)
        state.update(step, world.view)
        snapshots.poll()
