"""Hang detection: notices from the workers' progress pages that nothing moves, and reports it with all stacks.

**A worker that is stopped** (SIGSTOP) does nothing until it is continued: after 0.4 s its agent ends it, whatever
it was at, and it is treated as one that died. That needs no report of another worker.

**A worker stands still** when its page has not changed for longer than its limit. Limits are short where the page and
the kernel prove that it waits or sleeps, and long where it may be at work:

    waits for other ranks         5 times the median of the last steps, 1 s at least (quick); as long for a report
                                  that names no sleeper: 8 times the longest of the last 64 steps, 5 s at least (idle)
    asleep in a step or a join    quick: it has not run since, nothing of it runs (process_activity.py)
    asleep between two steps,     16 times that median, 10 s at least: what a script does there is not what steps were
    or while it fetches a batch   measured on, and clients of storage sleep before they try again
    its device is at work         idle: the host spins, or waits, until the device has done what it was told, and the
                                  device may wait for other ranks (worker/device_watch.py)
    asleep, as all others are     as busy: no rank waits for it, and the script may mean it
    idle in a step or a join      idle: it has not run since, and waits for a lock, or the kernel does not say for what
    busy, or waits for something  20 times idle, a minute at least: a process that computes, reads or writes, or has
    outside of it (a socket, a    children that do, or wakes up now and then to look, is working, though it may be an
    file), or between two steps   endless loop
    before its third step         10 minutes; a minute if it is asleep in a step
    while it starts               10 minutes, as building a model is slow
    while any worker is paused    none: `with job.paused(...)` means that all may have to wait for it

`--hang-timeout` sets them all, except while a worker starts. Only time in which this agent itself was awake counts, so
that a machine that was suspended, or is far too busy, is not taken for a hang.

After a stall was reported the limits are four times as long, until a step is made: if whatever was slow is slow again,
it gets the time.

What is reported, once, until something moves (which is reported too) or another view comes:

    all workers of the node wait for other ranks, for longer than quick      WorkersWaiting, without stacks
    some are asleep, and all others wait: a stall if other ranks wait        WorkersStalled
    for them; where all sleep, the script may mean it
    all stand still, by the limits of those that are not proved to           WorkersStalled; again when it has lasted
                                                                             four times as long

In a collective all ranks wait for the one that hangs, so a node alone cannot tell which it is: the master, which hears
all nodes, finds it (core/assess.py).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from holdfast.agent.autopsy import find_log_tail
from holdfast.agent.process_activity import Activity, Reading, describe_state, read_activity, time_spent_s
from holdfast.agent.reports import Reports
from holdfast.agent.worker_processes import Worker
from holdfast.agent.worker_stacks import read_stacks
from holdfast.core.events import WorkerProgress, WorkersMoved, WorkersStalled, WorkersWaiting
from holdfast.core.stacks import group_stacks, ranks_text
from holdfast.util.logs import get_logger
from holdfast.util.processes import is_stopped
from holdfast.wire.progress_page import ProgressPage, WorkerPhase

STARTING_LIMIT_S = 600.0
FIRST_STEPS_ASLEEP_S = 60.0
QUICK_FLOOR_S, QUICK_TIMES = 1.0, 5.0
FLOOR_S, LONGEST_TIMES = 5.0, 8.0
ELSEWHERE_FLOOR_S, ELSEWHERE_TIMES = 10.0, 16.0
BUSY_FLOOR_S, BUSY_TIMES = 60.0, 20.0
BUSY_SHARE = 0.1
"""The share of a processor's time above which a process is busy. Waiting in a collective takes a hundredth."""
STOPPED_S = 0.4
PATIENCE_TIMES = 4.0
PATIENCE_MAX = 256.0
STEPS_SEEN_MIN = 2
STEPS_SEEN_MAX = 64
STACK_CHARS_MAX = 16_000
READ_EVERY_S = 0.2
LATE_TIMES = 2.0
"""How much later than it meant to a reading may be, as a multiple of the pause; what is beyond that does not count."""

UNKNOWN = -1.0
JOINING = frozenset({WorkerPhase.PARKED, WorkerPhase.HOLDING, WorkerPhase.JOINING})
"""Phases between two views."""

log = get_logger(__name__)


class ProgressSample(NamedTuple):
    """A progress page at one moment."""

    view: int
    step: int
    phase: int
    collectives: int
    applied_step: int
    paused: int
    moved_ns: int
    waits: int = 0
    open: int = 0
    reading: int = 0

    @classmethod
    def of(cls, page: ProgressPage) -> ProgressSample:
        """Read a page."""
        return cls(*(page.get(name) for name in cls._fields))


class Limits(NamedTuple):
    """How long a worker may stand still; see the table above."""

    quick_s: float
    idle_s: float
    elsewhere_s: float
    busy_s: float


class StepTimes:
    """The durations of steps on this node, as the workers have measured them."""

    def __init__(self) -> None:
        self._durations_s: deque[float] = deque(maxlen=STEPS_SEEN_MAX)
        self._settled_s: deque[float] = deque(maxlen=STEPS_SEEN_MAX)
        """Without the first step of each process, which takes longer than any other."""
        self._made: dict[str, int] = {}
        self.steps_seen = 0

    def record(self, worker: str, made: int, last_s: float) -> None:
        """Record how many steps a worker has made, and how long the last one took."""
        new = made - self._made.get(worker, 0)
        if new > 0:
            self._made[worker] = made
            self._durations_s.append(last_s)
            self.steps_seen += new
            if made > 1:
                self._settled_s.append(last_s)

    def limits(self, chosen_s: float | None, patience: float = 1.0) -> Limits:
        """Return how long a worker may stand still."""
        if chosen_s is not None:
            return Limits(*(chosen_s * patience,) * 4)
        if self.steps_seen < STEPS_SEEN_MIN:
            return Limits(FIRST_STEPS_ASLEEP_S, STARTING_LIMIT_S, STARTING_LIMIT_S, STARTING_LIMIT_S)
        longest_s, usual_s = max(self._durations_s), median(self._settled_s or self._durations_s)
        idle_s = LONGEST_TIMES * longest_s
        return Limits(
            max(QUICK_FLOOR_S, QUICK_TIMES * usual_s) * patience,
            max(FLOOR_S, idle_s) * patience,
            max(ELSEWHERE_FLOOR_S, ELSEWHERE_TIMES * usual_s) * patience,
            max(BUSY_FLOOR_S, BUSY_TIMES * idle_s) * patience,
        )


class Stillness(NamedTuple):
    """A worker whose page does not change."""

    seen: ProgressSample
    since: float
    spent_then_s: float
    spent_now_s: float
    reading: Reading
    quiet_since: float | None = None
    """Since when no reading has found that it has run, or waits for something outside."""
    asleep_since: float | None = None
    """Since when every reading has found it in the same sleep."""

    @property
    def is_waiting(self) -> bool:
        """Return whether it waits for other ranks or for a view. Where only operations are open, it may be computing
        meanwhile."""
        return self.seen.waits > 0 or (self.seen.open > 0 and self.reading.activity is not Activity.RUNNABLE)

    @property
    def is_asleep(self) -> bool:
        """Return whether it sleeps and does not wait."""
        return self.asleep_since is not None and not self.is_waiting

    @property
    def is_elsewhere(self) -> bool:
        """Return whether it is at something other than a step or a join."""
        return self.seen.phase == WorkerPhase.BETWEEN or self.seen.reading > 0

    def waits_idly(self, now: float) -> bool:
        """Return whether it says that it waits, or has operations open and has not computed since. A thread of it may
        be runnable at this moment. One whose device is at work may wait for others on the device."""
        if self.reading.waits_for_device:
            return True
        return self.seen.waits > 0 or (self.seen.open > 0 and not self.is_computing(now))

    def is_computing(self, now: float) -> bool:
        """Return whether it has used a processor, or a disk, more than those do that wait."""
        return self.spent_now_s - self.spent_then_s > BUSY_SHARE * (now - self.since)

    def is_proved(self, limits: Limits, now: float) -> bool:
        """Return whether it has waited, or slept, for so long that it would be enough if all others wait."""
        if self.seen.phase == WorkerPhase.STARTING or self.is_computing(now):
            return False
        if self.reading.waits_for_device and not self.seen.waits:
            return False  # the device may compute
        if self.is_waiting:
            return now - self.since >= limits.quick_s
        limit_s = limits.elsewhere_s if self.is_elsewhere else limits.quick_s
        return self.asleep_since is not None and now - self.asleep_since >= limit_s

    def is_overdue(self, limits: Limits, now: float) -> bool:
        """Return whether it has stood still for too long though nothing is proved."""
        if self.seen.phase == WorkerPhase.STARTING:
            return now - self.since >= max(limits.idle_s, STARTING_LIMIT_S)
        if now - self.since >= limits.busy_s:
            return True
        if self.reading.waits_for_device:
            return now - self.since >= limits.idle_s
        if self.is_computing(now):
            return False
        if self.is_waiting:
            return now - self.since >= limits.idle_s
        if self.is_elsewhere:
            return False
        return self.quiet_since is not None and now - self.quiet_since >= limits.idle_s


class StallTimer:
    """Measures since when each worker has stood still."""

    def __init__(self) -> None:
        self._last: dict[str, Stillness] = {}
        self._looked_at = 0.0

    def record(
        self,
        sightings: Mapping[str, ProgressSample],
        now: float,
        spent_s: Callable[[str], float] = lambda worker: 0.0,
        reading: Callable[[str], Reading] = lambda worker: Reading(Activity.IDLE, 0),
    ) -> None:
        """Record the pages of all workers; others are forgotten. Of those whose page has not changed it is asked how
        much they have worked so far, and what they do."""
        before, self._last, self._looked_at = self._last, {}, now
        for worker, seen in sightings.items():
            last = before.get(worker)
            if last is None or last.seen != seen:
                self._last[worker] = Stillness(seen, now, UNKNOWN, UNKNOWN, Reading(Activity.RUNNABLE, 0))
                continue
            spent_now_s, reads = spent_s(worker), reading(worker)
            spent_then_s = last.spent_then_s if last.spent_then_s != UNKNOWN else spent_now_s
            quiet_since = asleep_since = None
            if reads.activity in (Activity.IDLE, Activity.ASLEEP):
                has_run = last.quiet_since is None or reads.switches != last.reading.switches
                quiet_since = now if has_run else last.quiet_since
            if reads.sleeps:
                asleep_since = last.asleep_since if reads.is_same_sleep(last.reading) else now
            self._last[worker] = Stillness(
                seen, last.since, spent_then_s, spent_now_s, reads, quiet_since, asleep_since
            )

    def reset(self) -> None:
        """Start to measure again for all workers."""
        self._last.clear()

    def asleep(self) -> set[str]:
        """Return the workers that sleep."""
        return {worker for worker, still in self._last.items() if still.is_asleep}

    def waiting(self) -> set[str]:
        """Return the workers that wait for other ranks, and have not computed meanwhile."""
        return {worker for worker, still in self._last.items() if still.waits_idly(self._looked_at)}

    def stalled_s(self, limits: Limits, now: float) -> float | None:
        """Return how long nothing has moved, if all workers are beyond their limits."""
        active = self._active()
        if not active or not all(still.is_overdue(limits, now) for still in active):
            return None
        still_s = min(now - still.since for still in active)
        is_meant = all(still.is_asleep for still in active) and still_s < limits.busy_s
        return None if is_meant else still_s

    def proved_s(self, limits: Limits, now: float) -> float | None:
        """Return how long nothing has moved, if all workers are proved to wait or to sleep."""
        active = self._active()
        if not active or not all(still.is_proved(limits, now) for still in active):
            return None
        return min(now - still.since for still in active)

    def _active(self) -> list[Stillness]:
        """Return the workers that count; none while one is paused."""
        active = [still for still in self._last.values() if still.seen.phase != WorkerPhase.ENDED]
        return [] if any(still.seen.paused for still in active) else active


class StopTimer:
    """Measures for how long processes have been stopped."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def record(self, stopped: Sequence[str], now: float) -> dict[str, float]:
        """Record which workers are stopped; return those that have been for too long, and for how long."""
        self._since = {worker: self._since.get(worker, now) for worker in stopped}
        return {worker: now - since for worker, since in self._since.items() if now - since >= STOPPED_S}


class AwakeClock:
    """Counts the time in which this process was there to look."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._last = clock, clock()
        self.now = 0.0

    def tick(self, pause_s: float) -> float:
        """Return the time, after a pause that was meant to take so long."""
        then, self._last = self._last, self._clock()
        self.now += min(self._last - then, LATE_TIMES * pause_s)
        return self.now


class HangWatch:
    """Reads the progress pages of the workers that have a local rank, and reports a stall. `everybody` are all workers,
    spares too, and `end_stopped` is called with one that is stopped, and for how long it has been."""

    def __init__(
        self,
        ranked: Callable[[], Sequence[Worker]],
        reports: Reports,
        hang_timeout_s: float | None,
        everybody: Callable[[], Sequence[Worker]] = lambda: (),
        end_stopped: Callable[[Worker, float], None] = lambda worker, stopped_s: None,
    ) -> None:
        self._ranked, self._reports, self._chosen_s = ranked, reports, hang_timeout_s
        self._everybody, self._end_stopped = everybody, end_stopped
        self._times, self._still, self._stopped = StepTimes(), StallTimer(), StopTimer()
        self._view = 0
        self._reported: dict[str, ProgressSample] = {}
        self._reported_s = 0.0
        self._is_overdue = False
        """Whether the stall that was reported last is one by itself; see WorkersStalled."""
        self._waited: dict[str, ProgressSample] = {}
        self._patience = 1.0
        self._is_patient = False
        """Whether that is so because of what was reported last."""
        self._steps_seen = 0

    async def run(self) -> None:
        """Read and report until the task is cancelled."""
        clock = AwakeClock(asyncio.get_running_loop().time)
        while self._chosen_s != 0:
            # The pages are plain memory: there is no event for something that does not happen.
            await asyncio.sleep(READ_EVERY_S)
            now = clock.tick(READ_EVERY_S)
            self._look_for_stopped(now)
            workers = {w.nonce: w for w in self._ranked() if not w.ended}
            if all(worker.connection is None for worker in workers.values()):
                continue  # not one of them has a session
            stalled_s = self._check(workers, now)
            if stalled_s is not None:
                await self._report(list(workers.values()), stalled_s)

    def _look_for_stopped(self, now: float) -> None:
        workers = {worker.nonce: worker for worker in self._everybody()}
        stopped = [nonce for nonce, worker in workers.items() if is_stopped(pid_of(worker))]
        for nonce, stopped_s in self._stopped.record(stopped, now).items():
            self._end_stopped(workers[nonce], stopped_s)

    def _check(self, workers: Mapping[str, Worker], now: float) -> float | None:
        """Take the pages in, and report what needs no stacks. Return how long nothing has moved if that is to be
        reported with them."""
        for nonce, worker in workers.items():
            self._times.record(nonce, worker.page.get("made"), worker.page.get("last_ns") / 1e9)
        sightings = {nonce: ProgressSample.of(worker.page) for nonce, worker in workers.items()}
        return self.look(
            sightings,
            now,
            lambda nonce: time_spent_s(pid_of(workers[nonce])),
            lambda nonce: read_activity(pid_of(workers[nonce]))._replace(
                waits_for_device=bool(workers[nonce].page.get("device"))
            ),
        )

    def look(
        self,
        sightings: Mapping[str, ProgressSample],
        now: float,
        spent_s: Callable[[str], float],
        reading: Callable[[str], Reading],
    ) -> float | None:
        """Decide on the pages of all workers; see `_check`."""
        if self._reports.view != self._view:
            self._view = self._reports.view
            self._still.reset()
            if self._reported and not self._is_patient:  # they slept, others waited, and they were replaced
                self._be_patient()
            self._forget()
        self._still.record(sightings, now, spent_s, reading)
        if self._times.steps_seen > self._steps_seen:
            self._steps_seen, self._patience = self._times.steps_seen, 1.0
        self._report_movement(sightings)
        limits = self._times.limits(self._chosen_s, self._patience)
        proved_s, stalled_s = self._still.proved_s(limits, now), self._still.stalled_s(limits, now)
        if proved_s is not None and not self._still.asleep():
            self._report_waiting(sightings, proved_s)
            proved_s = None
        found_s = stalled_s if proved_s is None else proved_s
        is_news = stalled_s is not None and not self._is_overdue  # reported before, but only as a proof
        if found_s is None or (found_s < PATIENCE_TIMES * self._reported_s and not is_news):
            return None
        self._reported, self._reported_s, self._is_overdue = dict(sightings), found_s, stalled_s is not None
        if self._is_overdue or self._still.waiting():  # else all of them sleep, which changes nothing by itself
            self._be_patient()
        return found_s

    def _be_patient(self) -> None:
        """Make the limits longer until a step is made: whatever was slow may be slow again."""
        self._patience, self._is_patient = min(self._patience * PATIENCE_TIMES, PATIENCE_MAX), True

    def _report_movement(self, sightings: Mapping[str, ProgressSample]) -> None:
        if (self._reported and sightings != self._reported) or (self._waited and sightings != self._waited):
            self._forget()
            self._reports.report(WorkersMoved)

    def _forget(self) -> None:
        """Forget what was reported."""
        self._reported, self._waited, self._reported_s = {}, {}, 0.0
        self._is_overdue = self._is_patient = False

    def _report_waiting(self, sightings: Mapping[str, ProgressSample], waiting_s: float) -> None:
        if not self._waited and not self._reported:
            self._waited = dict(sightings)
            self._reports.report(WorkersWaiting, waiting_s=waiting_s)

    async def _report(self, workers: Sequence[Worker], stalled_s: float) -> None:
        view, is_overdue = self._reports.view, self._is_overdue
        asleep, waiting = self._still.asleep(), self._still.waiting()  # before they are asked and have to answer
        seen = [ProgressSample.of(worker.page) for worker in workers]
        stacks = await read_stacks(workers, why_no_answer)
        if self._reports.view != view or seen != [ProgressSample.of(worker.page) for worker in workers]:
            return  # a new order has come, or something has moved: whatever hung, it hangs no more
        worker_progress = [
            progress_of(worker, stack, is_asleep=worker.nonce in asleep, is_waiting=worker.nonce in waiting)
            for worker, stack in zip(workers, stacks, strict=True)
            if worker.assignment and not worker.ended
        ]
        text = f"no worker of this node has made progress for {stalled_s:.1f} s:\n{describe_stacks(worker_progress)}"
        log.info("workers-stalled", text)  # what follows from it is an incident, and `holdfast explain` shows it
        self._reports.report(
            WorkersStalled, stalled_s=stalled_s, worker_progress=tuple(worker_progress), is_overdue=is_overdue
        )


def pid_of(worker: Worker) -> int:
    """Return the process of a worker's script, or of the worker before that is known."""
    return worker.script_pid or worker.pid


def progress_of(worker: Worker, stack: str, *, is_asleep: bool, is_waiting: bool) -> WorkerProgress:
    """Return how far a worker has come."""
    assert worker.assignment is not None
    seen = ProgressSample.of(worker.page)
    log_file, log_tail = find_log_tail(worker.files)
    return WorkerProgress(
        rank=worker.assignment.rank,
        local_rank=worker.assignment.local_rank,
        step=seen.step,
        phase=seen.phase,
        collectives=seen.collectives,
        waiting=is_waiting,
        joining=seen.phase in JOINING,
        asleep=is_asleep,
        view=seen.view,
        stack=stack[:STACK_CHARS_MAX],
        log_file=log_file,
        log_tail=log_tail,
    )


def why_no_answer(pid: int) -> str:
    """Return a text in place of the stack of a worker that does not answer."""
    return f"(no answer from process {pid}: it is {describe_state(pid)})"


def describe_stacks(worker_progress: Sequence[WorkerProgress]) -> str:
    """Return the stacks for the log, equal ones together."""
    groups = group_stacks((progress.rank, progress.stack) for progress in worker_progress)
    return "\n".join(f"{ranks_text(ranks)}:\n{stack.rstrip()}" for ranks, stack in groups)
