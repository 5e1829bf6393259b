"""The collectives of two nodes: how long an all-gather of a little and an all-reduce of much take, and whether they are
right. Each device with its counterpart, one after the other.

How often each is repeated the two agree on by collectives of their own, as both must do the same; what takes as long
as a whole stage should is not repeated. A watchdog frees a rank that hangs, and all of it has an end, as a partner may
be gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import AllreduceOptions, ReduceOp

from holdfast.checks.accelerators.base import Accelerator
from holdfast.checks.measure import BLOCKS, SHARE_MAX, Waiting, timing_of
from holdfast.checks.stages import problem_of
from holdfast.core.health.findings import WRONG_RESULT, CheckProblem, CheckTask, Stage, Timing
from holdfast.torch_compat import PrefixStore, Store
from holdfast.worker.collectives.communicators import Communicator, GroupInfo, of_accelerator
from holdfast.worker.collectives.sockets import Mesh

GATHERED_BYTES = 64 * 2**10
"""Little: what it takes is mostly the way there and back."""
REDUCED_BYTES = 4 * 2**20
"""Much: what it takes is mostly the width of the way."""
BLOCK_S = 0.06
REPEATS_MAX = 100
ENOUGH_S = 0.5
"""One that takes this long needs no repetition: it is slow."""
STAGE_S_MAX = 2.0
"""After this no further block is begun."""
LEFT_S_MIN = 0.1
"""A time-out of nothing would be none for some."""
SIZE = 2


class TimeLeft:
    """For the whole of a task, asked for by each of its parts."""

    def __init__(self, timeout_s: float) -> None:
        self._until = time.monotonic() + timeout_s

    def __call__(self) -> timedelta:
        return timedelta(seconds=max(self._until - time.monotonic(), LEFT_S_MIN))


class Pairing:
    """One task."""

    def __init__(self, accelerator: Accelerator, store: Store, task: CheckTask, time_left: TimeLeft) -> None:
        self._accelerator, self._task, self._time_left = accelerator, task, time_left
        self._store = PrefixStore(f"{task.checkup}/{task.round}", store)
        self._mesh = Mesh()

    def measure(self) -> tuple[list[Timing], list[CheckProblem]]:
        """Measure all devices that both nodes have."""
        timings: list[Timing] = []
        try:
            for device in range(self._count_devices()):
                timings += self._measure_device(device)
        except WrongResultError as wrong:
            return timings, [CheckProblem(wrong.stage, WRONG_RESULT, str(wrong), wrong.device)]
        except Exception as error:  # of torch or a vendor's library, and it ends this pair
            with_whom = f"with {self._task.partner}: "
            problem = problem_of(self._accelerator, "all-reduce", error)
            return timings, [CheckProblem(problem.stage, problem.fault, with_whom + problem.text)]
        return timings, []

    def _count_devices(self) -> int:
        own = len(self._accelerator.devices())
        rank = self._task.rank
        self._store.set(f"devices/{rank}", str(own))
        other = f"devices/{1 - rank}"
        self._store.wait([other], self._time_left())
        return min(own, int(self._store.get(other)))

    def _measure_device(self, device: int) -> list[Timing]:
        communicator = of_accelerator(self._accelerator.name)()
        store = PrefixStore(str(device), self._store)
        about = GroupInfo(name=f"node-check-{device}", ranks=(0, 1), device_index=device)
        group = communicator.make(store, self._task.rank, SIZE, self._time_left(), self._mesh, about)
        watchdog = threading.Timer(self._time_left().total_seconds(), self._free, (communicator, group))
        watchdog.daemon = True
        watchdog.start()
        try:
            return list(CheckedCollectives(self._accelerator, group, self._task.rank, device).measure())
        finally:
            watchdog.cancel()
            self._mesh.shut(unknown=False)
            threading.Thread(target=communicator.drop, args=(group,), daemon=True).start()

    def _free(self, communicator: Communicator, group: Any) -> None:
        self._mesh.shut()
        communicator.free(group)


class WrongResultError(Exception):
    """A collective that came through, with other numbers than it should have."""

    def __init__(self, stage: Stage, text: str, device: int) -> None:
        super().__init__(text)
        self.stage, self.device = stage, device


class CheckedCollectives:
    """On one device of each."""

    def __init__(self, accelerator: Accelerator, group: Any, rank: int, device: int) -> None:
        self._accelerator, self._group, self._rank, self._device = accelerator, group, rank, device
        little = accelerator.tensor(device, GATHERED_BYTES)
        self._own = little * (rank + 1)
        self._gathered = [little.clone(), little.clone()]
        self._much = accelerator.tensor(device, REDUCED_BYTES)
        self._agreed = accelerator.tensor(device, 4)

    def measure(self) -> list[Timing]:
        """Run both stages."""
        gather = self._stage("all-gather", self._gather)
        reduce = self._stage("all-reduce", self._reduce)
        self._verify()
        return [gather, reduce]

    def _stage(self, stage: Stage, work: Callable[[], None]) -> Timing:
        first_s = self._agree(work)
        one_s = first_s if first_s > ENOUGH_S else self._agree(work)
        if one_s > ENOUGH_S:
            return timing_of(stage, [one_s], self._device)
        repeats = max(1, min(REPEATS_MAX, int(BLOCK_S / one_s)))
        times: list[float] = []
        waiting = Waiting()
        while len(times) < BLOCKS and sum(times) * repeats < STAGE_S_MAX:
            times.append(self._agree(lambda: _repeat(work, repeats)) / repeats)
        waited = min(waiting.summed_s() / (sum(times) * repeats), SHARE_MAX)
        return timing_of(stage, times, self._device, waited)

    def _agree(self, work: Callable[[], None]) -> float:
        """Return how long it takes, by the slower of the two."""
        began_at = time.perf_counter()
        work()
        self._agreed.fill_(time.perf_counter() - began_at)
        options = AllreduceOptions()
        options.reduceOp = ReduceOp.MAX  # type: ignore[assignment]  # torch's stub knows the class only
        self._group.allreduce([self._agreed], options).wait()
        self._accelerator.synchronize(self._device)
        return max(float(self._agreed[0]), 1e-6)

    def _gather(self) -> None:
        self._group.allgather([self._gathered], [self._own]).wait()
        self._accelerator.synchronize(self._device)

    def _reduce(self) -> None:
        self._much.fill_(self._rank + 1)
        self._group.allreduce([self._much], AllreduceOptions()).wait()
        self._accelerator.synchronize(self._device)

    def _verify(self) -> None:
        for rank, found in enumerate(self._gathered):
            if not bool(torch.all(found == rank + 1)):
                raise WrongResultError("all-gather", "gathered numbers are not those that were sent", self._device)
        if not bool(torch.all(self._much == 3)):  # 1 + 2
            raise WrongResultError("all-reduce", "the sum is wrong", self._device)


def _repeat(work: Callable[[], None], times: int) -> None:
    for _ in range(times):
        work()
