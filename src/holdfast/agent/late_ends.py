"""Workers that do not end although others have: said soon, ended late, and never while they may be at work.

Once a worker of this node has succeeded, the others are expected to follow, but need not: rank 0 may write a checkpoint
for an hour. What tells such a worker from one that hangs at its end (a deadlock between threads, a lock that is never
given back) is what it does:

    it uses a processor or a disk, or waits for its turn, or a thread of     at work, for as long as it takes
    it sleeps, or waits for something outside of it: a file, a socket, a child
    none of this, for SAID_AFTER_S                                           said once, with its stacks
    none of this, for ENDED_AFTER_S or `--hang-timeout`                      killed; that is its failure

`--hang-timeout 0` switches this off. Workers with a session are watched by hangs.py until they have closed it. What
workers of other nodes do is not known here: of a node's only worker nothing is expected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from holdfast.agent.hangs import AwakeClock, pid_of, why_no_answer
from holdfast.agent.process_activity import queued_s, time_spent_s, waits_outside
from holdfast.agent.worker_processes import Worker
from holdfast.agent.worker_stacks import read_stacks
from holdfast.util.logs import get_logger

SAID_AFTER_S = 30.0
"""Interpreters come down within seconds, of large models too."""
ENDED_AFTER_S = 600.0
"""Long, as the processors are lost either way once the others have ended, but the result need not be."""
LOOK_EVERY_S = 1.0
WORK_SHARE = 0.02
"""The share of a processor's time above which a process works. gloo's threads use a thousandth when idle."""

log = get_logger(__name__)


class Idleness(NamedTuple):
    """Since when a worker has done nothing, and the time that it had used or waited for a processor by then."""

    since: float
    spent_s: float


class LateEnds:
    """Looks at the workers that still run after others have succeeded. `succeeded` is how many of this node have, and
    `end` kills a worker and reports why."""

    def __init__(
        self,
        ranked: Callable[[], Sequence[Worker]],
        succeeded: Callable[[], int],
        end: Callable[[Worker, str], None],
        hang_timeout_s: float | None,
    ) -> None:
        self._ranked, self._succeeded, self._end = ranked, succeeded, end
        self._limit_s = ENDED_AFTER_S if hang_timeout_s is None else hang_timeout_s
        self._idle: dict[str, Idleness] = {}
        self._said: set[str] = set()

    async def run(self) -> None:
        """Look until the task is cancelled."""
        clock = AwakeClock(asyncio.get_running_loop().time)
        while self._limit_s != 0:
            # There is no event for something that does not happen.
            await asyncio.sleep(LOOK_EVERY_S)
            await self._look(clock.tick(LOOK_EVERY_S))

    async def _look(self, now: float) -> None:
        late = [w for w in self._ranked() if w.child and not w.ended and not w.killed_why] if self._succeeded() else []
        before, self._idle = self._idle, {}
        for worker in late:
            self._idle[worker.nonce] = idle = idleness(pid_of(worker), before.get(worker.nonce), now)
            idle_s = now - idle.since
            if idle_s >= min(SAID_AFTER_S, self._limit_s) and worker.nonce not in self._said:
                self._said.add(worker.nonce)
                await self._say(worker, idle_s)
            elif idle_s >= self._limit_s:
                self._end(worker, describe(self._succeeded(), idle_s))

    async def _say(self, worker: Worker, idle_s: float) -> None:
        [stacks] = await read_stacks([worker], why_no_answer)
        text = (
            f"local rank {worker.local_rank} (process {worker.pid}) {describe(self._succeeded(), idle_s)}; if it stays"
            f" so, it is killed after {self._limit_s:.0f} s (--hang-timeout). It is at:\n{stacks.rstrip()}"
        )
        log.warning("worker-does-not-end", text)


def describe(succeeded: int, idle_s: float) -> str:
    """Return what is wrong with a worker."""
    others = f"{succeeded} other worker{'s' * (succeeded > 1)} of its node"
    return f"did not end after {others} had, and did nothing for {idle_s:.0f} s"


def idleness(pid: int, before: Idleness | None, now: float) -> Idleness:
    """Return since when a process has done nothing: from now on, if it has worked, or is at something."""
    spent_s = time_spent_s(pid) + queued_s(pid)
    if (
        before is None
        or waits_outside(pid)
        or spent_s - before.spent_s > WORK_SHARE * max(now - before.since, LOOK_EVERY_S)
    ):
        return Idleness(now, spent_s)
    return before
