"""Processes that write and remove checkpoints, killed at named points (storage/failpoints.py) and at random moments.

Every attempt has two writers, each with a part; another process may prune. Some run to their end, some die. Another
attempt at the same step goes on with what the dead left, under the same name, or begins under another. After each:

    every checkpoint that can be seen is complete, and all its parts are of one attempt
    the newest is that of the attempt, if one of its writers reported it, or else that or the one before
    nothing that should stay is gone
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from fire.failure import BROKEN, BrokenError, start
from holdfast.storage import failpoints
from holdfast.storage.checkpoint_catalogue import CheckpointCatalogue, FoundCheckpoint
from holdfast.storage.checkpoint_writer import CheckpointWriter
from holdfast.storage.image import TensorRegion, plan
from holdfast.storage.manifest import CheckpointInfo
from holdfast.storage.retention import LastN
from holdfast.storage.stores import open_store

PARTS = 2
KEPT = 2
SIZES = (20_000, 20_000, 20_000, 9 * 2**20)
"""Mostly small, so that all points are near each other; some of more than one block."""
POINTS_MAX = 14
"""So many points a writer passes at most."""
MOMENTS_S = 0.03
DOOMED_SHARE = 0.6
PUBLISH_TRIES, PUBLISH_PAUSE_S = 400, 0.005
WROTE, GAVE_UP = 0, 3
"""How writers end by themselves: the checkpoint is there, or the other part never came."""
LIMIT_S = 60.0


def image(step: int, attempt: int, number: int, size_bytes: int) -> memoryview:
    """A part that is a function of what it is a part of."""
    count = size_bytes // 4
    piece = TensorRegion(
        name=f"weight{number}",
        path=(f"weight{number}",),
        index=0,
        dtype="float32",
        shape=(count,),
        offsets=(0,),
        full_shape=(count,),
    )
    layout = plan([piece], 4096, {})
    buffer = memoryview(bytearray(layout.size_bytes))
    layout.frame(buffer)
    layout.put_skeleton(buffer, b"\x92\x01\xc0")
    entry = layout.entries[0]
    buffer[entry.start : entry.end] = random.Random(f"{step} {attempt} {number}").randbytes(entry.size_bytes)
    return buffer


class Siege:
    """Of one directory."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._catalogue = CheckpointCatalogue(open_store(str(directory)))
        self._chance = random.Random(seed)
        self._step, self._attempt, self._size_bytes = 1, 1, SIZES[0]
        self._newest = 0
        self.counts: Counter[str] = Counter()

    def again(self) -> None:
        """One, with its deaths. Raises BrokenError."""
        self.counts["attempts"] += 1
        tasks: list[Callable[[], None]] = [lambda n=number: self._write(n) for number in range(PARTS)]
        if self._chance.random() < 0.3:
            tasks.append(self._prune)
        doomed = {index for index in range(len(tasks)) if self._chance.random() < DOOMED_SHARE}
        pids = [start(self._with_fate(task, index in doomed)) for index, task in enumerate(tasks)]
        codes = self._wait(pids, doomed)
        is_said = WROTE in codes[:PARTS]
        self._judge(is_said)
        self._move_on()

    # --- in a process of its own

    def _write(self, number: int) -> None:
        about = CheckpointInfo(step=self._step, world_size=PARTS, shards=PARTS, created_unix_s=1.5, job_id="campaign")
        with CheckpointWriter(self._catalogue.store, about, f"attempt-{self._attempt}") as writing:
            writing.write_part(number, image(self._step, self._attempt, number, self._size_bytes))
            for _ in range(PUBLISH_TRIES):
                if writing.publish() is not None:
                    os._exit(WROTE)
                time.sleep(PUBLISH_PAUSE_S)
        os._exit(GAVE_UP)

    def _prune(self) -> None:
        self._catalogue.prune(LastN(KEPT), on_damage=lambda why: os._exit(BROKEN))
        os._exit(WROTE)

    def _with_fate(self, task: Callable[[], None], is_doomed: bool) -> Callable[[], None]:
        """Half of the doomed die at a point, the others whenever it comes."""
        if not is_doomed or self._chance.random() < 0.5:
            return task
        left = self._chance.randint(1, POINTS_MAX)

        def on_point(point: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        def doomed_task() -> None:
            failpoints.on_point = on_point
            task()

        return doomed_task

    # --- judged from outside

    def _wait(self, pids: list[int], doomed: set[int]) -> list[int]:
        """How each ended; -9 for those that were killed. Who waits for a dead one's part is killed too."""
        kill_at = {index: time.monotonic() + self._chance.uniform(0.0, MOMENTS_S) for index in doomed}
        give_up_at = time.monotonic() + LIMIT_S
        codes: dict[int, int] = {}
        while len(codes) < len(pids):
            now = time.monotonic()
            if now > give_up_at:
                raise BrokenError(f"attempt {self._attempt} at step {self._step} neither ends nor dies")
            has_died = any(code < 0 for code in codes.values())
            for index, pid in enumerate(pids):
                if index in codes:
                    continue
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[index] = os.waitstatus_to_exitcode(status)
                elif now > kill_at.get(index, give_up_at) or (has_died and index < PARTS):
                    kill_at.setdefault(index, now + self._chance.uniform(0.0, MOMENTS_S))
                    if now > kill_at[index]:
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.0005)
        if BROKEN in codes.values():
            raise BrokenError(f"a writer of attempt {self._attempt} at step {self._step} has met a bug")
        self.counts["kills"] += sum(code < 0 for code in codes.values())
        return [codes[index] for index in range(len(pids))]

    def _judge(self, is_said: bool) -> None:
        listing = self._catalogue.list()
        if listing.damaged:
            raise BrokenError(f"step {self._step}, attempt {self._attempt}: {listing.damaged[0].why}")
        steps = [found.step for found in listing.found]
        self.counts["left unfinished"] += any(left.step == self._step for left in listing.unfinished)
        self.counts["published"] += self._step in steps
        if is_said and self._step not in steps:
            raise BrokenError(f"step {self._step} was published and is not there: {steps}")
        newest = max(steps, default=0)
        if newest not in (self._newest, self._step) or newest < self._newest:
            raise BrokenError(f"the newest was {self._newest}, is {newest}, while {self._step} was written")
        if self._newest and len([step for step in steps if step != self._step]) < 1 and self._newest != self._step:
            raise BrokenError(f"the one before step {self._step} is gone")
        for found in listing.found:
            self._catalogue.verify(found)
        if listing.found:
            self._compare(listing.found[0])
        self._newest = newest

    def _compare(self, found: FoundCheckpoint) -> None:
        attempt = int(found.manifest.nonce.removeprefix("attempt-"))
        for part in found.manifest.parts:
            read = self._catalogue.store.read(found.name(part))
            expected = [image(found.step, attempt, part.number, size) for size in set(SIZES)]
            if read not in expected:
                raise BrokenError(f"part {part.number} of step {found.step} is not what attempt {attempt} wrote")

    def _move_on(self) -> None:
        """To the next step; or again at this one, going on with what is there, or beside it."""
        fate = self._chance.random()
        if self._newest == self._step or fate < 0.3:
            self._step += 1
        if self._newest + 1 < self._step and fate >= 0.3:
            self.counts["gone on with"] += fate < 0.6
        if not (self._newest < self._step and 0.3 <= fate < 0.6):
            self._attempt += 1
            self._size_bytes = self._chance.choice(SIZES)
