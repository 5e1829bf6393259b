"""Nothing moves: noticed by the job's own pace, told once, with how far everybody came and where they are."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.agent.hangs import (
    BUSY_FLOOR_S,
    ELSEWHERE_FLOOR_S,
    FIRST_STEPS_ASLEEP_S,
    FLOOR_S,
    QUICK_FLOOR_S,
    STARTING_LIMIT_S,
    STOPPED_S,
    AwakeClock,
    HangWatch,
    Limits,
    ProgressSample,
    StallTimer,
    StepTimes,
    StopTimer,
)
from holdfast.agent.process_activity import Activity, Reading
from holdfast.core.events import WorkersMoved, WorkersStalled, WorkersWaiting
from holdfast.core.stacks import group_stacks
from holdfast.core.strategies import Strategy
from holdfast.util.processes import process_state
from holdfast.wire.progress_page import WorkerPhase
from support.worker_groups import WorkerGroupUnderTest, serve, worker_group

LIMITS = Limits(1.0, 5.0, 10.0, 60.0)


def sighting(**changes: int) -> ProgressSample:
    known = dict.fromkeys(ProgressSample._fields, 0) | {"view": 1, "phase": WorkerPhase.BODY} | changes
    return ProgressSample(**known)


def reads(activity: Activity, switches: int = 0) -> Reading:
    return Reading(activity, switches, sleeps=activity is Activity.ASLEEP)


@pytest.mark.parametrize(("is_device_busy", "limit_s"), [(True, LIMITS.idle_s), (False, LIMITS.busy_s)])
def test_a_host_that_spins_until_its_device_is_done_is_waiting_not_busy(is_device_busy: bool, limit_s: float) -> None:
    """`loss.item()` keeps a core busy while a collective on the device waits for a rank that hangs."""
    timer, page = StallTimer(), sighting(collectives=3)
    for reading in range(400):
        now = reading * 0.2
        spins = Reading(Activity.RUNNABLE, 0, waits_for_device=is_device_busy)
        timer.record({"a": page}, now, lambda _, now=now: now, lambda _, spins=spins: spins)  # type: ignore[misc]
        assert timer.proved_s(LIMITS, now) is None, "the device may compute"
        assert (timer.stalled_s(LIMITS, now) is not None) == (now >= limit_s)
    assert timer.waiting() == ({"a"} if is_device_busy else set())


def still_for(
    duration_s: float, activity: Activity = Activity.IDLE, share: float = 0.0, **workers: ProgressSample
) -> StallTimer:
    """Workers whose pages have not changed for so long, looked at every 0.2 s."""
    timer = StallTimer()
    readings = round(duration_s / 0.2)
    for reading in range(readings + 1):
        now = reading * 0.2
        timer.record(workers, now, lambda _, now=now: share * now, lambda _: reads(activity))  # type: ignore[misc]
    return timer


def first_found(find: Callable[[StallTimer, float], float | None], activity: Activity, seen: ProgressSample) -> float:
    """How long one worker may stand still before it is found."""
    timer, now = StallTimer(), 0.0
    while find(timer, now) is None:
        now += 0.2
        assert now < 2 * STARTING_LIMIT_S, "never"
        timer.record({"a": seen}, now, lambda _: 0.0, lambda _: reads(activity))
    return now


# --- limits


@pytest.mark.parametrize(
    ("durations_s", "chosen_s", "expected"),
    [
        ([], None, Limits(FIRST_STEPS_ASLEEP_S, STARTING_LIMIT_S, STARTING_LIMIT_S, STARTING_LIMIT_S)),
        ([1.0], None, Limits(FIRST_STEPS_ASLEEP_S, STARTING_LIMIT_S, STARTING_LIMIT_S, STARTING_LIMIT_S)),
        ([0.01] * 2, None, Limits(QUICK_FLOOR_S, FLOOR_S, ELSEWHERE_FLOOR_S, BUSY_FLOOR_S)),
        ([9.0, 1.0, 4.0, 1.0], None, Limits(5.0, 72.0, 16.0, 1440.0)),
        ([1.0, 9.0] + [2.0] * 64, None, Limits(10.0, 16.0, 32.0, 320.0)),
        ([], 3.0, Limits(3.0, 3.0, 3.0, 3.0)),
        ([9.0] * 5, 3.0, Limits(3.0, 3.0, 3.0, 3.0)),
    ],
)
def test_the_limits_follow_the_last_steps_from_the_third_step_on(
    durations_s: list[float], chosen_s: float | None, expected: Limits
) -> None:
    times = StepTimes()
    for made, duration_s in enumerate(durations_s):
        times.record("a", made + 1, duration_s)
    assert times.limits(chosen_s) == pytest.approx(expected)


def test_steps_between_two_readings_count_though_the_time_of_the_last_one_only_is_known() -> None:
    times = StepTimes()
    times.record("a", 5, 0.5)
    assert times.steps_seen == 5 and times.limits(None).quick_s == 2.5
    times.record("a", 5, 0.5)
    assert times.steps_seen == 5


def test_patience_makes_all_limits_longer() -> None:
    times = StepTimes()
    times.record("a", 3, 0.01)
    assert times.limits(None, 4.0) == Limits(4 * QUICK_FLOOR_S, 4 * FLOOR_S, 4 * ELSEWHERE_FLOOR_S, 4 * BUSY_FLOOR_S)


WAITING = {"waits": 1}
OPEN = {"open": 1}
PROOFS = [
    # what it does, what its page says, after how long it is proved, and after how long it is overdue
    (Activity.IDLE, WAITING, LIMITS.quick_s, LIMITS.idle_s),
    (Activity.RUNNABLE, WAITING, LIMITS.quick_s, LIMITS.idle_s),
    (Activity.IDLE, OPEN, LIMITS.quick_s, LIMITS.idle_s),
    (Activity.RUNNABLE, OPEN, None, LIMITS.busy_s),
    (Activity.ASLEEP, {}, LIMITS.quick_s, LIMITS.busy_s),  # alone: nobody waits for it
    (Activity.ASLEEP, {"phase": WorkerPhase.JOINING}, LIMITS.quick_s, LIMITS.busy_s),
    (Activity.ASLEEP, {"phase": WorkerPhase.BETWEEN}, LIMITS.elsewhere_s, LIMITS.busy_s),
    (Activity.ASLEEP, {"reading": 1}, LIMITS.elsewhere_s, LIMITS.busy_s),
    (Activity.ASLEEP, {"phase": WorkerPhase.STARTING}, None, STARTING_LIMIT_S),
    (Activity.IDLE, {}, None, LIMITS.idle_s),
    (Activity.IDLE, {"phase": WorkerPhase.BETWEEN}, None, LIMITS.busy_s),
    (Activity.IDLE, {"reading": 1}, None, LIMITS.busy_s),
    (Activity.OUTSIDE, {}, None, LIMITS.busy_s),
    (Activity.RUNNABLE, {}, None, LIMITS.busy_s),
]


@pytest.mark.parametrize(("activity", "page", "proved_s", "overdue_s"), PROOFS)
def test_limits_are_short_only_where_it_is_proved_that_a_worker_waits_or_sleeps(
    activity: Activity, page: dict[str, int], proved_s: float | None, overdue_s: float
) -> None:
    seen, late_s = sighting(**page), 0.9  # the first readings only say since when
    assert 0 <= first_found(lambda t, now: t.stalled_s(LIMITS, now), activity, seen) - overdue_s <= late_s
    if proved_s is None:
        assert still_for(overdue_s - 1, activity, a=seen).proved_s(LIMITS, overdue_s - 1) is None
    else:
        assert 0 <= first_found(lambda t, now: t.proved_s(LIMITS, now), activity, seen) - proved_s <= late_s


def test_a_sleeper_in_a_step_has_no_longer_than_others_that_do_nothing() -> None:
    """They wait for it in a way that no page says, such as a lock."""
    timer, seen = StallTimer(), {"asleep": sighting(), "idle": sighting()}
    for reading in range(round(LIMITS.idle_s / 0.2) + 5):
        timer.record(seen, reading * 0.2, lambda _: 0.0, lambda worker: reads(Activity[worker.upper()]))
    assert timer.stalled_s(LIMITS, LIMITS.idle_s + 0.8) is not None


def test_a_worker_that_has_run_between_two_readings_may_be_at_work() -> None:
    timer, seen = StallTimer(), {"a": sighting()}
    for reading in range(310):  # it sleeps, looks whether something has come, and sleeps again
        now = reading * 0.2
        timer.record(seen, now, lambda _: 0.0, lambda _, n=reading: reads(Activity.ASLEEP, n))  # type: ignore[misc]
        assert timer.proved_s(LIMITS, now) is None
        assert (timer.stalled_s(LIMITS, now) is None) == (now < LIMITS.busy_s)


def test_a_worker_that_is_runnable_now_and_then_is_at_work() -> None:
    timer, seen = StallTimer(), {"a": sighting()}
    for reading in range(290):  # on a machine that has far too much to do
        activity = Activity.RUNNABLE if reading % 10 == 0 else Activity.IDLE
        timer.record(seen, reading * 0.2, lambda _: 0.0, lambda _, a=activity: reads(a))  # type: ignore[misc]
        assert timer.stalled_s(LIMITS, reading * 0.2) is None
        assert timer.proved_s(LIMITS, reading * 0.2) is None


def test_threads_that_wake_up_now_and_then_do_not_end_a_sleep() -> None:
    timer, seen = StallTimer(), {"a": sighting(phase=WorkerPhase.BETWEEN)}
    for reading in range(52 * 5):  # on a machine that has far too much to do they are often found runnable
        activity = Activity.RUNNABLE if reading % 3 == 0 else Activity.ASLEEP
        reading_of = Reading(activity, 7, sleeps=True)
        now = reading * 0.2
        timer.record(seen, now, lambda _: 0.0, lambda _, one=reading_of: one)  # type: ignore[misc]
        assert (timer.proved_s(LIMITS, now) is not None) == (now > LIMITS.elsewhere_s + 0.1)


def test_a_sleeper_whose_other_threads_compute_is_at_work() -> None:
    timer, seen = StallTimer(), {"a": sighting()}
    busy = Reading(Activity.RUNNABLE, 7, sleeps=True)
    for reading in range(290):
        now = reading * 0.2
        timer.record(seen, now, lambda _, spent=now / 2: spent, lambda _: busy)  # type: ignore[misc]
        assert timer.proved_s(LIMITS, now) is None and timer.stalled_s(LIMITS, now) is None


def test_a_node_stalls_when_all_of_its_workers_do() -> None:
    assert still_for(6.0, a=sighting(), b=sighting(collectives=3)).stalled_s(LIMITS, 6.0) == 6.0
    assert still_for(4.0, a=sighting()).stalled_s(LIMITS, 4.0) is None
    assert still_for(6.0).stalled_s(LIMITS, 6.0) is None
    timer = still_for(3.0, a=sighting(), b=sighting())
    timer.record({"a": sighting(), "b": sighting(collectives=1)}, 3.0)
    timer.record({"a": sighting(), "b": sighting(collectives=1)}, 3.2)
    assert timer.stalled_s(LIMITS, 6.0) is None
    assert timer.stalled_s(LIMITS, 8.4) == pytest.approx(5.4)


def test_a_busy_worker_has_longer() -> None:
    assert still_for(10.0, share=0.8, a=sighting()).stalled_s(LIMITS, 10.0) is None, "it computes"
    assert still_for(61.0, share=0.8, a=sighting()).stalled_s(LIMITS, 61.0) is not None, "an endless loop does too"
    assert still_for(10.0, share=0.01, a=sighting()).stalled_s(LIMITS, 10.0) is not None, "it does nothing"
    assert still_for(10.0, share=0.8, a=sighting(waits=1)).proved_s(LIMITS, 10.0) is None, "much state is sent"


def test_a_pause_suspends_the_limits_and_ended_workers_do_not_count() -> None:
    assert still_for(90.0, a=sighting(), b=sighting(paused=1)).stalled_s(LIMITS, 90.0) is None
    assert still_for(90.0, a=sighting(waits=1), b=sighting(paused=1)).proved_s(LIMITS, 90.0) is None
    assert still_for(6.0, a=sighting(), b=sighting(phase=WorkerPhase.ENDED)).stalled_s(LIMITS, 6.0) == 6.0
    assert still_for(6.0, b=sighting(phase=WorkerPhase.ENDED)).stalled_s(LIMITS, 6.0) is None


def test_a_stop_must_last_a_moment() -> None:
    timer = StopTimer()
    assert timer.record(["a"], 0.0) == {} == timer.record(["a"], STOPPED_S / 2)
    assert timer.record([], STOPPED_S) == {}, "it goes on"
    assert timer.record(["a", "b"], 10.0) == {}
    assert timer.record(["a"], 10.0 + STOPPED_S) == {"a": pytest.approx(STOPPED_S)}


def test_time_in_which_nobody_looked_does_not_count() -> None:
    times = iter([100.0, 100.2, 100.5, 3700.0, 3700.2])
    clock = AwakeClock(lambda: next(times))
    assert [clock.tick(0.2) for _ in range(4)] == pytest.approx([0.2, 0.5, 0.9, 1.1])


# --- what is told


class WatchUnderTest:
    """A watch over pages that the test makes up, and what it has told, each with its time."""

    def __init__(self, step_s: float) -> None:
        self.told: list[tuple[float, type]] = []
        self.overdue_at: float | None = None
        """When it was first told that nothing may take so long."""
        self.now = 0.0
        reports: Any = SimpleNamespace(view=1, report=lambda kind, **_: self.told.append((self.now, kind)))
        self.watch = HangWatch(list, reports, None)
        for made in (1, 2, 3):
            self.watch._times.record("a", made, step_s)

    def look(self, duration_s: float, activity: Activity, **page: int) -> None:
        """Look for so long at one worker that does not move."""
        until = self.now + duration_s
        while self.now < until:
            spent_s = self.now if activity is Activity.RUNNABLE else 0.0
            seen = {"a": sighting(**page)}
            if self.watch.look(seen, self.now, lambda _, s=spent_s: s, lambda _: reads(activity)) is not None:  # type: ignore[misc]
                self.told.append((self.now, WorkersStalled))
                if self.watch._is_overdue and self.overdue_at is None:
                    self.overdue_at = self.now
            self.now += 0.2

    @property
    def kinds(self) -> list[type]:
        return [kind for _, kind in self.told]


def test_a_node_whose_workers_wait_says_so_at_once_tells_all_later_and_takes_it_back_when_something_moves() -> None:
    node = WatchUnderTest(step_s=0.1)
    node.look(0.8, Activity.IDLE, waits=1)
    assert node.kinds == []
    node.look(1.0, Activity.IDLE, waits=1)
    assert node.kinds == [WorkersWaiting]
    node.look(5.0, Activity.IDLE, waits=1)
    assert node.kinds == [WorkersWaiting, WorkersStalled]
    node.look(0.4, Activity.IDLE, waits=0)
    assert node.kinds == [WorkersWaiting, WorkersStalled, WorkersMoved]


def test_a_sleeper_is_told_at_once_and_again_when_it_has_lasted_much_longer() -> None:
    node = WatchUnderTest(step_s=0.1)
    node.look(100.0, Activity.ASLEEP)
    assert node.kinds[:1] == [WorkersStalled] and node.told[0][0] < 2.0
    assert 1 < len(node.told) < 5, "each time after four times as long"
    node.look(0.4, Activity.RUNNABLE, collectives=1)
    assert node.kinds[-1] is WorkersMoved


def test_the_only_worker_of_a_node_that_sleeps_again_in_the_next_view_has_four_times_as_long() -> None:
    """Others wait for it, on other nodes: it was replaced, and what it sleeps for may need longer."""
    node = WatchUnderTest(step_s=0.1)
    for view, at_least_s, at_most_s in ((1, 0.8, 2.0), (2, 3.8, 5.0), (3, 15.8, 17.0)):
        node.watch._reports.view, began = view, node.now
        told = len(node.told)
        while len(node.told) == told:
            node.look(0.2, Activity.ASLEEP)
        assert at_least_s < node.now - began < at_most_s


@pytest.mark.parametrize("phase", [WorkerPhase.BODY, WorkerPhase.BETWEEN, WorkerPhase.JOINING])
def test_workers_that_all_sleep_have_as_long_as_one_that_computes(phase: WorkerPhase) -> None:
    node = WatchUnderTest(step_s=0.1)
    node.look(100.0, Activity.ASLEEP, phase=phase)
    assert node.overdue_at == pytest.approx(BUSY_FLOOR_S, abs=1.0)


@pytest.mark.parametrize("step_s", [0.1, 1.0, 20.0])
def test_a_worker_at_work_is_not_told_of_for_a_long_time(step_s: float) -> None:
    for activity in (Activity.RUNNABLE, Activity.OUTSIDE):
        node = WatchUnderTest(step_s)
        node.look(max(59.0, 150 * step_s), activity)
        assert node.told == []


def test_equal_stacks_are_shown_once_and_the_odd_one_first() -> None:
    assert group_stacks([(0, "x"), (3, "x"), (1, "y"), (2, "x")]) == [((1,), "y"), ((0, 2, 3), "x")]
    assert group_stacks([]) == []


# --- real processes


def run_watched(tmp_path: Path, test: Callable[[WorkerGroupUnderTest], Any], **changes: Any) -> None:
    """Run a test of a worker group whose watch runs too."""

    async def run() -> None:
        async with worker_group(tmp_path, **changes) as job:
            watch = asyncio.create_task(job.hangs.run())
            try:
                await test(job)
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)

    asyncio.run(run())


def test_a_stall_is_reported_once_with_progress_and_stacks(tmp_path: Path) -> None:
    async def test(job: WorkerGroupUnderTest) -> None:
        (tmp_path / "stack").write_text("thread MainThread:\n  in a collective\n")
        pids = await job.begin()
        for pid, page in zip(pids, ("collectives=4 waits=1", "collectives=3", "collectives=4 open=1"), strict=True):
            job.do(pid, f"set step=5 phase={int(WorkerPhase.BODY)} {page}")
        for worker in job.worker_group.ranked:
            assert worker.assignment is not None
            Path(worker.files.stderr_path).write_text(f"warming up\nreading shard {worker.assignment.rank}\n")
        await job.until(
            lambda: job.of("WorkersStalled") and job.of("WorkersStalled")[-1].worker_progress[1].step == 5, "a stall"
        )
        told = job.of("WorkersStalled")[-1]
        assert told.stalled_s >= 0.3
        assert [(v.rank, v.step, v.collectives, v.waiting) for v in told.worker_progress] == [
            (0, 5, 4, True),
            (1, 5, 3, False),
            (2, 5, 4, True),
        ]
        assert "in a collective" in told.worker_progress[0].stack
        assert told.worker_progress[1].log_tail == ("warming up", "reading shard 1")
        before = len(job.of("WorkersStalled"))
        job.do(pids[1], "set collectives=4")
        await job.event("WorkersMoved", view=1)
        await job.until(lambda: len(job.of("WorkersStalled")) > before, "they stand still again")
        await job.worker_group.serve(serve(2, keeps_workers=True, strategy=Strategy.RECOVER_IN_PLACE, replaced=(1,)))
        await job.event("ViewJoined", view=2)
        assert (await job.event("WorkersStalled", view=2)).worker_progress  # they stand still again, which is news

    run_watched(tmp_path, test, hang_timeout_s=0.3)


@pytest.mark.parametrize("phase", [WorkerPhase.BODY, WorkerPhase.JOINING, WorkerPhase.BETWEEN, WorkerPhase.ENDED])
def test_a_worker_that_is_stopped_is_killed_and_reported_as_one_that_died(tmp_path: Path, phase: WorkerPhase) -> None:
    async def test(job: WorkerGroupUnderTest) -> None:
        pids = await job.begin()
        job.do(pids[1], f"set step=0 phase={int(phase)}")
        await job.until(lambda: job.worker_group.ranked[1].page.get("phase") == phase, "it is there")
        os.kill(pids[1], signal.SIGSTOP)
        failure = (await job.event("WorkerFailed", view=1)).failure
        assert (failure.rank, failure.pid) == (1, pids[1])
        assert "stopped by a signal" in failure.message and "its agent killed it" in failure.message
        assert process_state(pids[1]) in "ZX"
        assert job.pids() == [pids[0], pids[2]] and not job.of("WorkersStalled")

    run_watched(tmp_path, test)


def test_a_spare_that_is_stopped_is_replaced(tmp_path: Path) -> None:
    async def test(job: WorkerGroupUnderTest) -> None:
        await job.begin(spares=1)
        await job.parked(1)
        (spare,) = job.worker_group._spares.workers
        os.kill(spare.pid, signal.SIGSTOP)
        await job.until(lambda: spare.ended, "it is killed")
        await job.parked(1)
        assert not job.of("WorkerFailed")

    run_watched(tmp_path, test)
