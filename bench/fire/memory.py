"""Lives of a job, each ended by `kill -9`; after each, what its memory and its storage hold is judged.

What must be so after every kill:

    some step can be restored on every rank, by the code that a session uses, bit for bit as that step's state is
    all ranks' parts of it come from the same life
    it is not older than the last step that any rank knew to be whole
    every checkpoint that can be seen is whole, none that was announced is missing

A life begins with what the last one left: the newer of the two. Now and then a node's memory is lost as well, and the
job begins with storage; the number of ranks changes too.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fire import agents
from fire.failure import BrokenError, start
from fire.ranks import Board, Table, World, train
from fire.state import State
from holdfast.agent.vault import Vault
from holdfast.errors import CheckpointError
from holdfast.state.parts import PartPlan
from holdfast.storage.catalogue import Catalogue
from holdfast.storage.stores import open_store
from holdfast.wire.session import Room
from holdfast.wire.slots import SLOTS, Seat, Status
from holdfast.worker import checkpoints
from holdfast.worker.recalling import recall
from holdfast.worker.talk import Talk

SEATS = 3
START_LIMIT_S = 120.0
STEPS_MAX, LONG_SHARE, LONG_STEPS_MAX = 6, 0.15, 40
"""A life is killed within so many steps; some may live longer, so that what takes long comes to its end."""
MOMENTS_S = 0.008
"""And so long after one of them began, at most."""
SURVIVAL_SHARE = 0.4
"""Of lives after which the job goes on with what a survivor has, instead of beginning anew."""


@dataclass(frozen=True)
class Left:
    """What a life has left for the next."""

    step: int = 0
    maker: int = 0
    """The life that made the state."""
    is_recalled: bool = False
    """Whether all ranks take it from memory. Else they have it from storage, or from one that survived."""


class Campaign:
    """In memory of its own, below `directory`; checkpoints, if `persists`, below `storage`."""

    def __init__(self, directory: Path, storage: Path, is_sharded: bool, persists: bool, scale: int, seed: int) -> None:
        self._root, self._storage = directory, storage
        self._is_sharded, self._persists, self._scale = is_sharded, persists, scale
        self._chance = random.Random(seed)
        self._left, self._size, self._life = Left(), 2, 0
        self._is_young = True
        """Nothing can be asked of memory that has not seen a whole step yet."""
        self.counts: Counter[str] = Counter()
        torch.set_num_threads(1)
        self._rooms = {seat: self._grant(seat) for seat in range(SEATS)}

    def again(self) -> None:
        """One life and its end. Raises BrokenError."""
        self._life += 1
        world = World(
            size=self._size,
            is_sharded=self._is_sharded,
            view=self._life,
            step=self._left.step,
            maker=self._left.maker,
            scale=self._scale,
            checkpoint_every=4 if self._persists else 0,
            recalled=self._left.step if self._left.is_recalled else -1,
        )
        board, said = self._run(world)
        whole = max(board.read(rank)[1] for rank in range(world.size))
        self._look_around()
        in_memory = self._recall(world)
        stored = self._examine_storage(world, said)
        self._judge(world, whole, in_memory)
        self._left = _newest(in_memory, stored)
        if self._chance.random() < SURVIVAL_SHARE:
            self._left = self._survive(world, board)
        else:
            self._begin_from(self._left.step)
        self._change()

    # --- a life

    def _run(self, world: World) -> tuple[Board, list[int]]:
        board, table = Board(), Table(world.size)
        agent, ears, mouth = self._start_agent()
        pids = []
        for rank in range(world.size):
            room = self._rooms[rank]
            pids.append(start(lambda r=rank, m=room: train(world, r, m, table.sit_down(r), ears, board)))
        table.leave()
        if ears is not None:
            os.close(ears)
        try:
            self._wait(world, board)
        except BrokenError:
            for pid in pids:
                os.kill(pid, signal.SIGUSR1)  # their stacks are evidence too
            time.sleep(1.0)
            raise
        finally:
            self._kill(pids, agent)
        said = agents.heard(mouth) if mouth is not None else []
        if mouth is not None:
            os.close(mouth)
        return board, [step for step in said if step >= 0]

    def _start_agent(self) -> tuple[list[int], int | None, int | None]:
        """Its process, where to tell it something, and where it does."""
        if not self._persists:
            return [], None, None
        ears, to_agent = os.pipe()
        mouth, from_agent = os.pipe()

        def work() -> None:
            os.close(to_agent)
            os.close(mouth)
            agents.persist(self._root, str(self._storage), ears, from_agent)

        pid = start(work)
        os.close(ears)
        os.close(from_agent)
        os.read(mouth, 8)  # it is there
        return [pid], to_agent, mouth

    def _wait(self, world: World, board: Board) -> None:
        """Until a random moment."""
        is_long = self._persists and self._chance.random() < LONG_SHARE
        goal = world.step + self._chance.randrange(LONG_STEPS_MAX if is_long else STEPS_MAX)
        give_up_at = time.monotonic() + START_LIMIT_S
        while min(board.read(rank)[0] for rank in range(world.size)) < goal:
            if time.monotonic() > give_up_at:
                raise BrokenError(f"life {self._life}: no step within {START_LIMIT_S:.0f} s")
            time.sleep(0.0002)
        time.sleep(self._chance.uniform(0.0, MOMENTS_S))

    def _kill(self, ranks: list[int], agent: list[int]) -> None:
        """All at once, or one and then, a moment later, the others: somebody notices, or nobody does."""
        victims = self._chance.sample([*ranks, *agent], len(ranks) + len(agent))
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
        records = [self._seat(seat).record(slot) for seat in range(self._size) for slot in range(SLOTS)]
        newest = [max((r.step for r in records[at : at + SLOTS]), default=-1) for at in range(0, len(records), SLOTS)]
        self.counts["lives"] += 1
        self.counts["in the middle of a copy"] += any(r.status is Status.WRITING for r in records)
        self.counts["ranks at different steps"] += len(set(newest)) > 1

    def _recall(self, world: World) -> Left | None:
        """The newest state that all ranks can restore from memory, restored on each shard."""
        with self._vault() as vault:
            found = [self._recall_on(vault, world, rank) for rank in range(world.shards)]
        if any(one is None for one in found):
            return None
        lives = {(one.step, one.maker) for one in found if one is not None}
        if len(lives) > 1:
            raise BrokenError(f"life {self._life}: shards are of different states: {sorted(lives)}")
        return found[0]

    def _recall_on(self, vault: Vault, world: World, rank: int) -> Left | None:
        state = world.state(rank)
        everywhere = Talk(rank, world.size, list, lambda values: [list(values)] * world.size)
        choice = recall(vault.held(), 0, 1, world.shards, state.tracked, -1, everywhere)
        return None if choice is None else replace(self._checked(state, choice.step, "memory"), is_recalled=True)

    def _checked(self, state: State, step: int, where: str) -> Left:
        if wrong := state.wrong(step):
            raise BrokenError(f"life {self._life}: step {step} in {where}: {wrong}")
        return Left(step, state.count.life)

    def _judge(self, world: World, whole: int, found: Left | None) -> None:
        if found is not None and found.step < whole:
            raise BrokenError(f"life {self._life}: step {whole} was whole on all ranks, step {found.step} is restored")
        if found is None and not self._is_young:
            raise BrokenError(f"life {self._life}: nothing in memory can be restored: {self._records()}")
        if found is not None:
            self._is_young = False
            self.counts["went back behind what it began with"] += found.step < world.recalled

    def _examine_storage(self, world: World, said: list[int]) -> Left | None:
        if not self._persists:
            return None
        catalogue = Catalogue(open_store(str(self._storage)))
        listing = catalogue.list()
        mine = f"v{world.view}"
        self.counts["in the middle of a checkpoint"] += any(mine in str(left) for left in listing.unfinished)
        self.counts["checkpoints"] += len(said)
        if listing.damaged:
            raise BrokenError(f"life {self._life}: {listing.damaged[0].why}")
        steps = [found.step for found in listing.found]
        missing = sorted(said)[-1:] if said and max(said) > max(steps, default=-1) else []
        if missing:
            raise BrokenError(f"life {self._life}: step {missing[0]} was announced and is not there: {steps}")
        if not listing.found:
            return None
        try:
            return self._load(world, listing.found[0])
        except CheckpointError as error:
            raise BrokenError(f"life {self._life}: {error}") from error

    def _load(self, world: World, found: checkpoints.Found) -> Left:
        lives = set()
        for rank in range(world.shards):
            state = world.state(rank)
            checkpoints.load(found, state.tracked, rank, world.shards)
            lives.add(self._checked(state, found.step, "storage").maker)
        if len(lives) > 1:
            raise BrokenError(f"life {self._life}: parts of step {found.step} in storage are of lives {sorted(lives)}")
        return Left(found.step, lives.pop())

    # --- between lives

    def _survive(self, world: World, board: Board) -> Left:
        """As if one rank had survived, and the others were replaced: its state is that of the next life. What the
        slots hold nobody has looked at."""
        self.counts["one survived"] += 1
        step = max(board.read(rank)[0] for rank in range(world.size))
        return Left(step, world.view if step > world.step else world.maker)

    def _change(self) -> None:
        """Another number of ranks, now and then, if the job begins anew; and a node's memory lost, if there is storage
        to fall back on. (If a rank leaves for good while others go on, what it alone had heard goes with it: until
        their first copy is whole, the death of all of them would leave nothing.)"""
        if not self._is_sharded and self._left.is_recalled and self._chance.random() < 0.2:
            self._size = self._chance.randint(2, SEATS)
            self.counts["other sizes"] += 1
        if self._persists and self._chance.random() < 0.05:
            self._lose(self._chance.randrange(self._size))

    def _lose(self, seat: int) -> None:
        shutil.rmtree(self._seat_directory(seat))
        self._rooms[seat] = self._grant(seat)
        self._is_young = True
        self.counts["memories lost"] += 1
        world = World(self._size, self._is_sharded, self._life, 0, 0, self._scale, 0)
        stored = self._examine_storage(world, [])
        in_memory = self._recall(world)
        self._left = _newest(in_memory, stored)
        self._begin_from(self._left.step)

    def _begin_from(self, step: int) -> None:
        """As an agent does when all its workers begin anew."""
        with self._vault() as vault:
            vault.forget_after(step)

    @contextmanager
    def _vault(self) -> Iterator[Vault]:
        vault = Vault(self._root, agents.NODE)
        vault.open(agents.JOB)
        try:
            yield vault
        finally:
            vault.close()

    def _grant(self, seat: int) -> Room:
        with self._vault() as vault:
            return asyncio.run(vault.grant(seat, self._room_bytes()))

    def _room_bytes(self) -> int:
        """For the largest share there may be."""
        shares = 1 if self._is_sharded else 2
        about = {"part": "0", "shards": "9", "shares": "9"}
        flat = State(self._scale).tracked.state()
        return max(PartPlan(flat, shares, share, about).layout.size_bytes for share in range(shares)) + 2**16

    def _seat_directory(self, seat: int) -> Path:
        return self._root / agents.JOB / agents.NODE / f"seat-{seat}"

    def _seat(self, seat: int) -> Seat:
        return Seat.open(self._seat_directory(seat))

    def _records(self) -> str:
        seats = {seat: self._seat(seat) for seat in range(self._size)}
        return "; ".join(
            f"rank {seat} (whole {page.get('whole')}): "
            + ", ".join(f"{r.status.name} {r.step} of life {r.view}" for r in map(page.record, range(SLOTS)))
            for seat, page in seats.items()
        )


def _newest(in_memory: Left | None, stored: Left | None) -> Left:
    """What a job begins anew with: memory, if it is newer than storage."""
    if in_memory is not None and (stored is None or in_memory.step > stored.step):
        return in_memory
    return stored or Left()
