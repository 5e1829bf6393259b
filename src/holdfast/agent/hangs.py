"""When nothing moves any more: noticed from the workers' progress records, told with everybody's stack.

A worker stands still when its record has not changed for longer than its limit. The limit:

    while it steps               8 times the longest of the last 64 steps seen on this node, 5 s at least; or what
                                 `--hang-timeout` says. Before 3 steps were seen: as while it starts
    while it is busy,            20 times that, a minute at least: a process that computes, reads or writes, or has
    or between two steps         children that do, is at something, though it may be an endless loop; and what a script
                                 does between steps (saving, evaluating) is not what the limit was measured on
    while it starts              10 minutes, as building a model is slow; unless it was stopped by a signal
    while it waits for a view    as while it steps; but it is not the one that hangs (`Vector.joining`)
    while any worker is paused   none: `with job.paused(...)` means that all may have to wait for it

After a stall was told the limits are four times as long, until a step is made: if whatever was slow is slow again, it
gets the time.

A stall is told when every worker of the node stands still, once, until something moves or another view comes. In a
collective everybody waits for the one that hangs, so on its own a node cannot tell who it is: it says how far each
of its workers has come, and the master, which hears all nodes, names the lowest.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog

from holdfast.agent.autopsy import find_log_tail
from holdfast.agent.reports import Reports
from holdfast.agent.workers import Worker
from holdfast.core.diagnosis import group_stacks, ranks_text
from holdfast.core.events import Vector
from holdfast.wire.progress import Phase, ProgressPage
from holdfast.wire.session import ShowStacks

STARTING_LIMIT_S = 600.0
FLOOR_S = 5.0
LONGEST_TIMES = 8.0
BUSY_FLOOR_S = 60.0
BUSY_TIMES = 20.0
BUSY_SHARE = 0.1
"""Of a processor's time, above which a process is at something. Waiting in a collective takes a hundredth."""
PATIENCE_TIMES = 4.0
PATIENCE_MAX = 256.0
STEPS_SEEN_MIN = 3
STEPS_SEEN_MAX = 64
LOOKS_MORE, LOOK_S = 4, 0.005
STACKS_WAIT_S = 1.0
STACK_CHARS_MAX = 16_000
READ_EVERY_MIN_S = 0.1
READ_EVERY_MAX_S = 1.0
READS_A_LIMIT = 16
"""How finely a limit is measured, between these bounds."""

JOINING = frozenset({Phase.PARKED, Phase.HOLDING, Phase.JOINING})
"""In which a worker waits for a view, or for the others of one. It stands still, and is not to blame for it."""
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
DISK_BYTES_A_SECOND = 10e6
CHILDREN_MAX = 256
STOPPED_STATES = frozenset("TtZX")
STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in an uninterruptible wait, as for a disk",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
}

log = structlog.get_logger("agent")


class Sighting(NamedTuple):
    """A progress record at one moment."""

    view: int
    step: int
    phase: int
    collectives: int
    begun: int
    paused: int
    moved_ns: int

    @classmethod
    def of(cls, page: ProgressPage) -> Sighting:
        """What it says now."""
        return cls(*(page.get(name) for name in cls._fields))


class Limits(NamedTuple):
    """For how long a worker that steps may stand still."""

    idle_s: float
    busy_s: float


class StepTimes:
    """How long steps take on this node."""

    def __init__(self) -> None:
        self._durations_s: deque[float] = deque(maxlen=STEPS_SEEN_MAX)
        self.steps_seen = 0
        self._began: dict[str, tuple[int, float]] = {}

    def see(self, worker: str, step: int, now: float) -> None:
        """A worker was seen at a step. The first one has no known beginning, and a repeated step is no new one."""
        before = self._began.get(worker)
        if before is None or step < before[0]:
            self._began[worker] = (step, now)
        elif step > before[0]:
            if before[0] >= 0:
                self._durations_s.append((now - before[1]) / (step - before[0]))
                self.steps_seen += 1
            self._began[worker] = (step, now)

    def interrupt(self) -> None:
        """What goes on now is a recovery, not a step."""
        self._began.clear()

    def limits(self, chosen_s: float | None, patience: float = 1.0) -> Limits:
        """How long a worker that steps may stand still."""
        if chosen_s is not None:
            return Limits(chosen_s * patience, chosen_s * patience)
        if len(self._durations_s) < STEPS_SEEN_MIN:
            return Limits(STARTING_LIMIT_S, STARTING_LIMIT_S)
        longest_s = LONGEST_TIMES * max(self._durations_s)
        return Limits(max(FLOOR_S, longest_s) * patience, max(BUSY_FLOOR_S, BUSY_TIMES * longest_s) * patience)


class Standstill(NamedTuple):
    """A worker whose record does not change."""

    seen: Sighting
    since: float
    spent_then_s: float
    spent_now_s: float
    is_stopped: bool = False
    """By a signal."""

    def limit_s(self, limits: Limits, now: float) -> float:
        """How long it may go on."""
        if self.seen.phase == Phase.STARTING and not self.is_stopped:
            return max(limits.idle_s, STARTING_LIMIT_S)
        is_busy = self.spent_now_s - self.spent_then_s > BUSY_SHARE * (now - self.since)
        is_elsewhere = self.seen.phase == Phase.BETWEEN and not self.is_stopped
        return limits.busy_s if is_busy or is_elsewhere else limits.idle_s


class Stillness:
    """Since when each worker has stood still."""

    def __init__(self) -> None:
        self._last: dict[str, Standstill] = {}

    def see(
        self,
        sightings: Mapping[str, Sighting],
        now: float,
        spent_s: Mapping[str, float] | None = None,
        stopped: Collection[str] = (),
    ) -> None:
        """Take note of all workers, how much each has worked so far and who is stopped; who is gone is forgotten."""
        spent_s = spent_s or {}
        before = self._last
        self._last = {
            worker: before[worker]._replace(spent_now_s=spent_s.get(worker, 0.0), is_stopped=worker in stopped)
            if worker in before and before[worker].seen == sighting
            else Standstill(sighting, now, spent_s.get(worker, 0.0), spent_s.get(worker, 0.0), worker in stopped)
            for worker, sighting in sightings.items()
        }

    def reset(self) -> None:
        """Everybody moves."""
        self._last.clear()

    def stalled_s(self, limits: Limits, now: float) -> float | None:
        """For how long nobody has moved, if all are beyond their limits."""
        active = [standstill for standstill in self._last.values() if standstill.seen.phase != Phase.ENDED]
        if not active or any(standstill.seen.paused for standstill in active):
            return None
        if any(now - standstill.since < standstill.limit_s(limits, now) for standstill in active):
            return None
        return min(now - standstill.since for standstill in active)


class HangWatch:
    """Reads the records of the workers that have a seat. `view` changes with every order."""

    def __init__(
        self,
        seated: Callable[[], Sequence[Worker]],
        reports: Reports,
        hang_timeout_s: float | None,
    ) -> None:
        self._seated, self._reports, self._chosen_s = seated, reports, hang_timeout_s
        self._times, self._still = StepTimes(), Stillness()
        self._view = 0
        self._told: dict[str, Sighting] = {}
        self._patience = 1.0
        self._steps_seen = 0
        self._request = 0

    async def run(self) -> None:
        """For ever."""
        clock = asyncio.get_running_loop().time
        while self._chosen_s != 0:
            limit_s = self._times.limits(self._chosen_s).idle_s
            # The records are plain memory: there is no event for something that does not happen.
            await asyncio.sleep(min(max(limit_s / READS_A_LIMIT, READ_EVERY_MIN_S), READ_EVERY_MAX_S))
            workers = {w.nonce: w for w in self._seated() if w.line is not None and not w.ended}
            sightings = {nonce: Sighting.of(worker.page) for nonce, worker in workers.items()}
            spent_s = {nonce: time_spent_s(worker.script_pid) for nonce, worker in workers.items()}
            stopped = {n for n, worker in workers.items() if process_state(worker.script_pid) in STOPPED_STATES}
            stalled_s = self._look(sightings, spent_s, stopped, clock())
            if stalled_s is not None:
                await self._tell(list(workers.values()), stalled_s)

    def _look(
        self, sightings: Mapping[str, Sighting], spent_s: Mapping[str, float], stopped: Collection[str], now: float
    ) -> float | None:
        if self._reports.view != self._view:
            self._view = self._reports.view
            self._still.reset()
            self._times.interrupt()
            self._told = {}
        self._still.see(sightings, now, spent_s, stopped)
        for worker, seen in sightings.items():
            if seen.paused or seen.phase == Phase.STARTING or seen.phase in JOINING:
                self._times.interrupt()
            else:
                self._times.see(worker, seen.step, now)
        if self._times.steps_seen > self._steps_seen:
            self._steps_seen, self._patience = self._times.steps_seen, 1.0
        stalled_s = self._still.stalled_s(self._times.limits(self._chosen_s, self._patience), now)
        if stalled_s is None or sightings == self._told:
            return None
        self._told = dict(sightings)
        self._patience = min(self._patience * PATIENCE_TIMES, PATIENCE_MAX)
        return stalled_s

    async def _tell(self, workers: Sequence[Worker], stalled_s: float) -> None:
        view = self._reports.view
        states = await self._states(workers)  # before they are asked and have to answer
        stacks = await self._stacks(workers, states)
        if self._reports.view != view:
            return  # an order has come meanwhile: whatever hung, it hangs no more
        vectors = [
            vector(worker, state, stack)
            for worker, state, stack in zip(workers, states, stacks, strict=True)
            if worker.place and not worker.ended
        ]
        log.warning(f"nothing has moved on this node for {stalled_s:.1f} s:\n{describe_stacks(vectors)}")
        self._reports.stalled(stalled_s, vectors)

    async def _states(self, workers: Sequence[Worker]) -> list[str]:
        """The state of each process. One that waits wakes up for a moment now and then: it is looked at several times,
        and asleep once means that it waits."""
        states = [process_state(worker.script_pid) for worker in workers]
        for _ in range(LOOKS_MORE):
            await asyncio.sleep(LOOK_S)
            again = [process_state(worker.script_pid) for worker in workers]
            states = [was if was != "R" else now for was, now in zip(states, again, strict=True)]
        return states

    async def _stacks(self, workers: Sequence[Worker], states: Sequence[str]) -> list[str]:
        self._request += 1
        answers: list[asyncio.Future[str]] = []
        for worker in workers:
            answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            worker.stacks[self._request] = answer
            answers.append(answer)
            worker.tell(ShowStacks(self._request))
        able = [answer for answer, state in zip(answers, states, strict=True) if state not in STOPPED_STATES]
        if able:
            await asyncio.wait(able, timeout=STACKS_WAIT_S)
        for worker in workers:
            worker.stacks.pop(self._request, None)
        return [
            answer.result() if answer.done() and not answer.cancelled() else why_no_answer(worker.script_pid)
            for worker, answer in zip(workers, answers, strict=True)
        ]


def vector(worker: Worker, state: str, stack: str) -> Vector:
    """How far a worker has come."""
    assert worker.place is not None
    seen = Sighting.of(worker.page)
    log_file, log_tail = find_log_tail(worker.files)
    return Vector(
        rank=worker.place.rank,
        local_rank=worker.place.local_rank,
        step=seen.step,
        phase=seen.phase,
        collectives=seen.collectives,
        joining=seen.phase in JOINING and state not in STOPPED_STATES,
        waiting=state == "S" and seen.collectives > 0,
        stack=stack[:STACK_CHARS_MAX],
        log_file=log_file,
        log_tail=log_tail,
    )


def time_spent_s(pid: int, generations: int = 2) -> float:
    """What a process and its children have used of processors, and of disks at 10 MB a second; 0 where it cannot be
    known. A data loader's workers are its children."""
    own_s = own_time_spent_s(pid)
    if generations == 0:
        return own_s
    try:
        tasks = [task.joinpath("children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return own_s
    children = [int(child) for task in tasks for child in task.split()][:CHILDREN_MAX]
    return own_s + sum(time_spent_s(child, generations - 1) for child in children)


def own_time_spent_s(pid: int) -> float:
    """Of the process alone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        counters = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    except (OSError, ValueError):
        return 0.0
    moved_bytes = int(counters.get("read_bytes", 0)) + int(counters.get("write_bytes", 0))
    return (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND + moved_bytes / DISK_BYTES_A_SECOND


def process_state(pid: int) -> str:
    """The letter of /proc/PID/stat, of the main thread; X if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def why_no_answer(pid: int) -> str:
    """For a worker whose side thread does not say where it is."""
    state = process_state(pid)
    try:
        channel = Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
    except OSError:
        channel = ""
    where = f", in the kernel's {channel}" if channel else ""
    return f"(no answer from process {pid}: it is {STATES.get(state, state)}{where})"


def describe_stacks(vectors: Sequence[Vector]) -> str:
    """For the log."""
    groups = group_stacks((vector.rank, vector.stack) for vector in vectors)
    return "\n".join(f"{ranks_text(ranks)}:\n{stack.rstrip()}" for ranks, stack in groups)
