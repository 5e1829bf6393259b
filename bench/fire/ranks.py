"""Processes that train as a session's workers do, as far as snapshots are concerned, and agree through pipes.

The order is the engine's: a copy begins with the step, the forward runs beside it, the update waits for its tensors,
and before it all ranks exchange the words of the snapshots (worker/memory/snapshots.py). A rank that finds another one
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
from holdfast.wire.session import NeedRoom, Room, Sealed
from holdfast.wire.session import Snapshots as Settings
from holdfast.worker.memory.snapshots import Cut, Snapshots

LATE_SHARE, LATE_S = 0.1, 0.01
WORDS = struct.Struct("=2q")
ALL_HAVE_IT = -1
"""The first of the words that travel with a commit, if every rank has the last image whole."""


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
    recalled: int = -1
    """The step that all ranks have restored from memory, if they have."""
    is_intact: bool = False
    """And each had its own part of it."""

    @property
    def shards(self) -> int:
        return self.size if self.is_sharded else 1

    def cut(self, rank: int) -> Cut:
        return Cut(self.shards, self.size // self.shards, rank)

    def state(self, rank: int) -> State:
        return State(self.scale, rank % self.shards)


class Keeper:
    """See snapshots.Keeper: room that is there, and a pipe to the agent if there is one."""

    def __init__(self, seat: int, room: Room, to_agent: int | None) -> None:
        self.room: Room | None = room
        self._seat, self._to_agent = seat, to_agent

    def tell(self, message: NeedRoom | Sealed) -> None:
        if isinstance(message, NeedRoom):
            assert self.room is not None and message.size_bytes <= self.room.size_bytes, "less room than asked for"
        elif self._to_agent is not None:
            with suppress(BrokenPipeError):  # the agent was killed first
                os.write(self._to_agent, MESSAGE.pack(self._seat, message.step, message.wanted))


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
    """What ranks say to whoever outlives them: the step they are at, and the last that they know to be whole."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)

    def write(self, rank: int, step: int, whole: int) -> None:
        WORDS.pack_into(self._page, rank * WORDS.size, step, whole)

    def read(self, rank: int) -> tuple[int, int]:
        step, whole = WORDS.unpack_from(self._page, rank * WORDS.size)
        return step, whole

    def whole(self, size: int) -> int:
        """What any of them knows of."""
        return max(self.read(rank)[1] for rank in range(size))


def train(
    world: World,
    rank: int,
    keeper: Keeper,
    agree: Callable[[Sequence[int]], list[int]],
    board: Board,
) -> None:
    """For ever."""
    torch.set_num_threads(1)
    state, step = world.state(rank), world.step
    state.become(step, world.maker)
    settings = Settings(every=1, checkpoint_every_steps=world.checkpoint_every)
    snapshots = Snapshots(keeper, state.tracked, settings)
    snapshots.start_from(world.recalled, world.is_intact)
    snapshots.enter(world.cut(rank), world.view, 1, 0, 1)
    whole = -1
    board.write(rank, step, whole)
    dawdle = Dawdle(world.view * 100 + rank)
    while True:
        snapshots.begin(step)
        state.forward(step + 1, world.view)
        dawdle()
        snapshots.join(state.optimizer)
        dawdle()
        words = agree(snapshots.words(step))
        dawdle()
        snapshots.agreed(step, words)
        dawdle()
        if words[0] == ALL_HAVE_IT:
            whole = snapshots._last
        step += 1
        board.write(rank, step, whole)
        state.update(step, world.view)
        snapshots.poll()
