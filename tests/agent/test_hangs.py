"""Nothing moves: noticed by the job's own pace, told once, with how far everybody came and where they are."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from agent.crews import CrewUnderTest, crew, serve
from holdfast.agent.hangs import (
    BUSY_FLOOR_S,
    FLOOR_S,
    STARTING_LIMIT_S,
    Limits,
    Sighting,
    StepTimes,
    Stillness,
    process_state,
    time_spent_s,
)
from holdfast.core.diagnosis import group_stacks
from holdfast.core.ladder import Strategy
from holdfast.wire.progress import Phase


def sighting(**changes: int) -> Sighting:
    known = dict.fromkeys(Sighting._fields, 0) | {"view": 1, "phase": Phase.BODY} | changes
    return Sighting(**known)


def stalled_after(still_s: float, limit_s: float, **workers: Sighting) -> float | None:
    stillness = Stillness()
    stillness.see(workers, 0.0)
    stillness.see(workers, still_s)
    return stillness.stalled_s(Limits(limit_s, limit_s), still_s)


@pytest.mark.parametrize(
    ("durations_s", "chosen_s", "expected_s"),
    [
        ([], None, STARTING_LIMIT_S),
        ([1.0, 1.0], None, STARTING_LIMIT_S),
        ([0.01] * 3, None, FLOOR_S),
        ([1.0, 4.0, 1.0], None, 32.0),
        ([9.0] + [2.0] * 64, None, 16.0),
        ([], 3.0, 3.0),
        ([9.0] * 5, 3.0, 3.0),
    ],
)
def test_the_limit_follows_the_longest_of_the_last_steps(
    durations_s: list[float], chosen_s: float | None, expected_s: float
) -> None:
    times, now = StepTimes(), 0.0
    times.see("a", 0, now)
    for step, duration_s in enumerate(durations_s):
        now += duration_s
        times.see("a", step + 1, now)
    assert times.limits(chosen_s).idle_s == pytest.approx(expected_s)


def test_a_recovery_is_no_step_and_several_steps_between_two_looks_are_several() -> None:
    times = StepTimes()
    for step, now in ((0, 0.0), (4, 4.0), (8, 8.0)):
        times.see("a", step, now)
    times.interrupt()
    times.see("a", 8, 100.0)
    times.see("a", 9, 101.0)
    assert times.limits(None).idle_s == 8.0


def test_a_node_stalls_when_all_of_its_workers_do() -> None:
    assert stalled_after(6.0, 5.0, a=sighting(), b=sighting(collectives=3)) == 6.0
    assert stalled_after(4.0, 5.0, a=sighting()) is None
    assert stalled_after(6.0, 5.0) is None
    stillness = Stillness()
    stillness.see({"a": sighting(), "b": sighting()}, 0.0)
    stillness.see({"a": sighting(), "b": sighting(collectives=1)}, 3.0)
    assert stillness.stalled_s(Limits(5.0, 5.0), 6.0) is None
    assert stillness.stalled_s(Limits(5.0, 5.0), 8.0) == 5.0


def test_who_builds_its_model_is_given_longer_unless_it_is_stopped() -> None:
    assert stalled_after(60.0, 5.0, a=sighting(), b=sighting(phase=Phase.STARTING)) is None
    assert stalled_after(601.0, 5.0, a=sighting(), b=sighting(phase=Phase.STARTING)) == 601.0
    stillness, workers = Stillness(), {"a": sighting(), "b": sighting(phase=Phase.STARTING)}
    stillness.see(workers, 0.0, stopped={"b"})
    stillness.see(workers, 6.0, stopped={"b"})
    assert stillness.stalled_s(Limits(5.0, 5.0), 6.0) == 6.0


@pytest.mark.parametrize("phase", [Phase.PARKED, Phase.HOLDING, Phase.JOINING])
def test_who_waits_for_a_view_stands_still_like_anybody(phase: Phase) -> None:
    assert stalled_after(6.0, 5.0, a=sighting(), b=sighting(phase=phase)) == 6.0


def test_a_worker_that_is_at_something_is_given_longer() -> None:
    stillness, limits = Stillness(), Limits(3.0, BUSY_FLOOR_S)
    stillness.see({"a": sighting()}, 0.0, {"a": 100.0})
    stillness.see({"a": sighting()}, 10.0, {"a": 108.0})
    assert stillness.stalled_s(limits, 10.0) is None, "it computes"
    stillness.see({"a": sighting()}, 61.0, {"a": 158.0})
    assert stillness.stalled_s(limits, 61.0) == 61.0, "an endless loop computes too"
    stillness.see({"a": sighting(step=1)}, 62.0, {"a": 158.0})
    stillness.see({"a": sighting(step=1)}, 66.0, {"a": 158.01})
    assert stillness.stalled_s(limits, 66.0) == 4.0, "it does nothing"


def test_what_a_process_has_spent_grows_with_its_work() -> None:
    before = time_spent_s(os.getpid())
    total = 0
    while time_spent_s(os.getpid()) < before + 0.05:
        total += sum(range(1000))
    assert time_spent_s(2**22) == 0.0, "no such process"


def test_patience_grows_with_every_stall_and_a_step_ends_it() -> None:
    times = StepTimes()
    for step in range(4):
        times.see("a", step, float(step) * 0.01)
    assert times.limits(None, 4.0).idle_s == 4 * FLOOR_S
    assert times.steps_seen == 3


def test_a_pause_suspends_it_and_who_has_ended_does_not_count() -> None:
    assert stalled_after(900.0, 5.0, a=sighting(), b=sighting(paused=1)) is None
    assert stalled_after(6.0, 5.0, a=sighting(), b=sighting(phase=Phase.ENDED)) == 6.0
    assert stalled_after(6.0, 5.0, b=sighting(phase=Phase.ENDED)) is None


def test_equal_stacks_are_shown_once_and_the_odd_one_first() -> None:
    assert group_stacks([(0, "x"), (3, "x"), (1, "y"), (2, "x")]) == [((1,), "y"), ((0, 2, 3), "x")]
    assert group_stacks([]) == []


def test_a_stall_is_told_once_with_vectors_and_stacks(tmp_path: Path) -> None:
    async def test() -> None:
        async with crew(tmp_path, hang_timeout_s=0.3) as job:
            await stop(job)  # before anybody looks: on a busy machine a beginning takes as long as a stall
            watch = asyncio.create_task(job.hangs.run())
            try:
                await stall(job)
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)

    async def stop(job: CrewUnderTest) -> None:
        (tmp_path / "stack").write_text("thread MainThread:\n  in a collective\n")
        pids = await job.begin()
        for pid, collectives in zip(pids, (4, 3, 4), strict=True):
            job.do(pid, f"set step=5 phase={int(Phase.BODY)} collectives={collectives}")
        await job.until(lambda: all(w.page.get("step") == 5 for w in job.crew.seated), "all are in step 5")
        for worker in job.crew.seated:
            assert worker.place is not None
            Path(worker.files.stderr_path).write_text(f"warming up\nreading shard {worker.place.rank}\n")
        os.kill(pids[1], signal.SIGSTOP)
        await job.until(lambda: process_state(pids[1]) == "T", "it is stopped")

    async def stall(job: CrewUnderTest) -> None:
        told = await job.event("WorkersStalled", view=1)
        assert told.stalled_s >= 0.3
        assert [(v.rank, v.step, v.collectives, v.waiting) for v in told.vectors] == [
            (0, 5, 4, True),
            (1, 5, 3, False),
            (2, 5, 4, True),
        ]
        assert "in a collective" in told.vectors[0].stack
        assert "stopped by a signal" in told.vectors[1].stack
        assert told.vectors[1].log_tail == ("warming up", "reading shard 1")
        await asyncio.sleep(0.8)  # twice the limit: that it is not told again cannot be waited for otherwise
        assert len(job.of("WorkersStalled")) == 1
        await job.crew.serve(serve(2, kept=True, strategy=Strategy.RECOVER_IN_PLACE, replaced=(1,)))
        await job.event("SessionBegan", view=2)
        assert (await job.event("WorkersStalled", view=2)).vectors  # they stand still again, which is news

    asyncio.run(test())
