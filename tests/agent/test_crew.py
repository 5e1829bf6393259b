"""A view that keeps its workers: who stays, who is replaced and by whom, and what each of them is told."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.crews import CrewUnderTest, crew, serve
from holdfast.agent.places import place_in, reseat
from holdfast.core import copies
from holdfast.core.health.findings import CheckTask
from holdfast.core.ladder import Strategy
from holdfast.core.orders import Hold

IN_PLACE = Strategy.RECOVER_IN_PLACE


def with_crew(directory: Path, test: Callable[[CrewUnderTest], Awaitable[None]], **changes: Any) -> None:
    async def run() -> None:
        async with crew(directory, **changes) as under_test:
            await test(under_test)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("living", "before", "seats", "expected"),
    [
        ([0, 1, 2], 3, 3, {0: 0, 1: 1, 2: 2}),
        ([0, 2], 3, 3, {0: 0, 2: 2}),
        ([2], 3, 5, {2: 2}),
        ([0, 2], 3, 2, {0: 0, 2: 1}),
        ([2, 3], 4, 3, {2: 0, 3: 1}),
        ([0, 1, 2], 3, 2, {0: 0, 1: 1}),
        ([], 0, 2, {}),
        ([0], 1, 0, {}),
    ],
)
def test_the_rule_of_seats(living: list[int], before: int, seats: int, expected: dict[int, int]) -> None:
    assert reseat(dict.fromkeys(living, True), before, seats) == expected
    empty = [local_rank for local_rank in range(before) if local_rank not in living]
    held = tuple(holder(local_rank) for local_rank in range(before))
    counted_on = {h.rank: seat for seat, h in enumerate(copies.reseat(held, empty, seats)) if h}
    assert counted_on == expected  # the master thinks so too


def test_a_worker_is_told_how_often_its_job_has_faults() -> None:
    order = serve(1, faults_per_node_day=0.25)
    place = place_in(order, 0, newcomer=False, begun=-1, whole=-1, checkpoint_dir="")
    assert place.faults_per_node_day == 0.25


def test_a_newcomer_makes_room_for_those_who_hold_the_state() -> None:
    assert reseat({0: True, 1: False, 2: True}, 3, 2) == {0: 0, 2: 1}
    assert reseat({0: False, 1: False, 2: True}, 3, 2) == {0: 0, 2: 1}


def holder(rank: int) -> copies.Holder:
    layout = copies.Layout(shards=1, replicas=0, world_size=9, first_ranks=(0,))
    return copies.Holder(view=1, rank=rank, layout=layout, fresh=False)


def test_a_first_view_begins_when_all_have_joined(tmp_path: Path) -> None:
    async def test(job: CrewUnderTest) -> None:
        pids = await job.begin(first_rank=4, world_size=9, first_ranks=(0, 4, 7), group_rank=1, group_world_size=3)
        assert (await job.event("WorkersStarted")).pids == tuple(pids)
        place = await job.told(pids[2], "welcome")
        assert (place["rank"], place["local_rank"], place["world_size"], place["local_world_size"]) == (6, 2, 9, 3)
        assert place["first_ranks"] == [0, 4, 7]
        assert not place["newcomer"] and place["begun"] == -1
        [welcome] = job.heard(pids[0], "welcome")
        assert (welcome["replicas"], welcome["checkpoint_dir"]) == (1, "/checkpoints")
        assert len(job.of("SessionBegan")) == 1

    with_crew(tmp_path, test)


def test_a_dead_seat_is_filled_by_a_new_process_and_the_others_keep_theirs(tmp_path: Path) -> None:
    async def test(job: CrewUnderTest) -> None:
        pids = await job.begin()
        job.do(pids[1], "set begun=7 step=7")
        await job.until(lambda: job.crew.seated[1].page.get("begun") == 7, "the step has begun")
        os.kill(pids[1], signal.SIGKILL)
        failed = await job.event("WorkerFailed", view=1)
        assert (failed.failure.rank, failed.failure.exit_code) == (1, -9)
        await asyncio.gather(*(job.told(pid, "revoke", view=1) for pid in (pids[0], pids[2])))
        await job.crew.serve(serve(2, kept=True, strategy=IN_PLACE))
        for seat in (0, 2):
            place = await job.told(pids[seat], "assign", view=2)
            assert (place["rank"], place["newcomer"], place["begun"]) == (seat, False, 7)
            assert place["strategy"] == "recover-in-place"
        await job.event("SessionBegan", view=2)
        after = job.pids()
        assert after[0::2] == pids[0::2] and after[1] not in pids
        place = await job.told(after[1], "welcome")
        assert (place["view"], place["rank"], place["newcomer"], place["begun"]) == (2, 1, True, 7)
        assert (await job.event("WorkersStarted", view=2)).pids == tuple(after)

    with_crew(tmp_path, test)


def test_a_spare_takes_the_dead_seat_and_another_takes_its_place(tmp_path: Path) -> None:
    async def test(job: CrewUnderTest) -> None:
        pids = await job.begin(spares=1)
        await job.parked(1)
        [spare] = job.crew._spares.workers
        assert [message["type"] for message in job.heard(spare.pid)] == ["welcome", "prepare"]
        assert await job.event("SparesChanged", parked=1)
        os.kill(pids[2], signal.SIGKILL)
        await job.event("WorkerFailed")
        await job.crew.serve(serve(2, kept=True, strategy=Strategy.RECOVER, spares=1))
        place = await job.told(spare.pid, "assign", view=2)
        assert (place["rank"], place["newcomer"]) == (2, True)
        assert job.pids() == [pids[0], pids[1], spare.pid]
        await job.event("SessionBegan", view=2)
        await job.parked(1)
        assert [event.parked for event in job.of("SparesChanged")] == [1, 0, 1]
        [next_spare] = job.crew._spares.workers
        assert next_spare.number != spare.number  # its log directory is still written to

    with_crew(tmp_path, test)


def test_a_strategy_other_than_recover_leaves_the_spares_alone(tmp_path: Path) -> None:
    async def test(job: CrewUnderTest) -> None:
        pids = await job.begin(spares=1)
        await job.parked(1)
        [spare] = job.crew._spares.workers
        os.kill(pids[0], signal.SIGKILL)
        await job.event("WorkerFailed")
        await job.crew.serve(serve(2, kept=True, strategy=IN_PLACE, spares=1))
        await job.event("SessionBegan", view=2)
        assert spare.pid not in job.pids() and job.crew._spares.workers == (spare,)

    with_crew(tmp_path, test)


def test_a_smaller_view_moves_the_living_up(tmp_path: Path) -> None:
    async def test(job: CrewUnderTest) -> None:
        pids = await job.begin()
        os.kill(pids[0], signal.SIGKILL)
        await job.event("WorkerFailed")
        await job.crew.serve(serve(2, kept=True, workers=2, strategy=Strategy.ELASTIC_TRAINING))
        await job.event("SessionBegan", view=2)
        assert job.pids() == pids[1:]
        assert [(await job.told(pid, "assign", view=2))["rank"] for pid in pids[1:]] == [0, 1]
        await job.crew.serve(serve(3, kept=True, planned=True))
        newcomer = await job.until(lambda: job.crew.seated[2].pid, "a third one is started")
        assert (await job.told(newcomer, "welcome"))["newcomer"]
        for pid in pids[1:]:
            assert (await job.told(pid, "assign", view=3))["planned"]
            job.do(pid, "join")
        job.do(newcomer, "join")
        await job.event("SessionBegan", view=3)

    with_crew(tmp_path, test)


def test_a_hanging_worker_is_replaced_quietly(tmp_path: Path) -> None:
    async def test(job: CrewUnderTest) -> None:
        pids = await job.begin()
        job.do(pids[1], "set begun=4")
        await job.until(lambda: job.crew.seated[1].page.get("begun") == 4, "the step has begun")
        os.kill(pids[1], signal.SIGSTOP)
        await job.crew.serve(serve(2, kept=True, strategy=IN_PLACE, replaced=(1,)))
        await job.event("SessionBegan", view=2)
        assert not job.of("WorkerFailed")
        assert job.pids()[1] not in pids and job.pids()[0::2] == pids[0::2]
        assert (await job.told(pids[0], "assign", view=2))["begun"] == 4

    with_crew(tmp_path, test)


def test_a_planned_surplus_leaves_by_itself_an_unplanned_one_is_ended(tmp_path: Path) -> None:
    async def test(job: CrewUnderTest) -> None:
        pids = await job.begin()
        await job.crew.serve(serve(2, kept=True, planned=True, workers=2))
        assert await job.told(pids[2], "release", view=2)
        await job.left.wait()
        await job.crew.serve(serve(3, kept=True, workers=1, strategy=Strategy.ELASTIC_TRAINING))
        await job.event("SessionBegan", view=3)
        assert job.pids() == pids[:1]
        assert not job.of("WorkerFailed") and not job.of("WorkerSucceeded")

    with_crew(tmp_path, test)


def test_a_start_from_scratch_ends_all_of_them_and_forgets_what_was_begun(tmp_path: Path) -> None:
    async def test(job: CrewUnderTest) -> None:
        pids = await job.begin(spares=1)
        await job.parked(1)
        job.do(pids[0], "set begun=5")
        job.do(pids[0], "exit 3")
        await job.event("WorkerFailed")
        await job.crew.serve(serve(2))
        await job.event("SessionBegan", view=2)
        after = job.pids()
        assert not set(after) & set(pids)
        place = await job.told(after[0], "welcome")
        assert (place["newcomer"], place["begun"]) == (False, -1)
        assert job.crew.parked == 0

    with_crew(tmp_path, test)


# --- the ugly


def test_a_worker_that_dies_before_it_joins_is_a_failure_of_the_new_view(tmp_path: Path) -> None:
    async def test(job: CrewUnderTest) -> None:
        pids = await job.begin()
        (tmp_path / "slow").touch()
        os.kill(pids[1], signal.SIGKILL)
        await job.event("WorkerFailed", view=1)
        await job.crew.serve(serve(2, kept=True, strategy=IN_PLACE))
        await job.told(pids[0], "assign", view=2)
        os.kill(pids[0], signal.SIGKILL)
        assert (await job.event("WorkerFailed", view=2)).failure.rank == 0
        await job.told(pids[2], "revoke", view=2)
        building = job.crew.seated[0 if job.crew.seated[0].seat == 1 else 1]
        await job.crew.serve(serve(3, kept=True, strategy=IN_PLACE))
        (tmp_path / "slow").unlink()
        assert job.crew.seated[1] is building  # it went on building, and belongs to the next view
        await job.until(lambda: all(worker.line for worker in job.crew.seated), "all have enrolled")
        for pid in job.pids():
            job.do(pid, "join")
        await job.event("SessionBegan", view=3)
        assert not [event for event in job.of("SessionBegan") if event.view == 2]

    with_crew(tmp_path, test)


def test_a_view_that_comes_before_the_last_one_was_joined_is_joined_instead(tmp_path: Path) -> None:
    async def test(job: CrewUnderTest) -> None:
        pids = await job.begin()
        os.kill(pids[2], signal.SIGKILL)
        await job.event("WorkerFailed")
        for view in (2, 3, 4):  # at once, while the fork server still makes the first newcomer
            await job.crew.serve(serve(view, kept=True, strategy=IN_PLACE, store_port=view))
        await job.event("SessionBegan", view=4)
        assert job.pids()[:2] == pids[:2]
        newcomer = job.pids()[2]
        place = (job.heard(newcomer, "welcome") + job.heard(newcomer, "assign"))[-1]["place"]
        assert (place["view"], place["store_port"], place["newcomer"]) == (4, 4, True)
        assert len(list((tmp_path / "logs").rglob("2/stdout.log"))) == 2  # one for each that was ever started

    with_crew(tmp_path, test)


def test_a_shard_that_was_begun_under_another_rank_is_built_anew(tmp_path: Path) -> None:
    async def test(job: CrewUnderTest) -> None:
        await job.begin()
        (tmp_path / "slow").touch()
        os.kill(job.pids()[2], signal.SIGKILL)
        await job.event("WorkerFailed")
        await job.crew.serve(serve(2, kept=True, strategy=IN_PLACE))
        first = await job.until(lambda: job.crew.seated[2].pid, "the newcomer is started")
        await job.crew.serve(serve(3, kept=True, strategy=IN_PLACE))
        assert job.crew.seated[2].pid == first
        await job.crew.serve(serve(4, kept=True, strategy=IN_PLACE, first_rank=3, world_size=6))
        assert job.crew.seated[2].pid != first
        assert not [event for event in job.of("WorkerFailed") if event.view > 1]

    environment = {"FAKE_SHARDS": "3"}
    with_crew(tmp_path, with_environment(test, environment))


def with_environment(
    test: Callable[[CrewUnderTest], Awaitable[None]], variables: dict[str, str]
) -> Callable[[CrewUnderTest], Awaitable[None]]:
    async def run(job: CrewUnderTest) -> None:
        job.crew._config.environment.update(variables)
        await test(job)

    return run


def test_a_spare_that_dies_when_it_is_needed_is_a_failure_like_any_other(tmp_path: Path) -> None:
    async def test(job: CrewUnderTest) -> None:
        pids = await job.begin(spares=1)
        await job.parked(1)
        [spare] = job.crew._spares.workers
        os.kill(spare.pid, signal.SIGSTOP)
        os.kill(pids[1], signal.SIGKILL)
        await job.event("WorkerFailed", view=1)
        await job.crew.serve(serve(2, kept=True, strategy=Strategy.RECOVER, spares=1))
        os.kill(spare.pid, signal.SIGKILL)
        failed = await job.event("WorkerFailed", view=2)
        assert (failed.failure.rank, failed.failure.pid) == (1, spare.pid)
        assert job.crew.parked == 0  # none is made while an incident is open
        await job.crew.serve(serve(3, kept=True, strategy=Strategy.RECOVER, spares=1))
        await job.event("SessionBegan", view=3)
        await job.parked(1)
        assert job.pids()[0::2] == pids[0::2]

    with_crew(tmp_path, test)


def test_a_parked_spare_that_dies_is_replaced(tmp_path: Path) -> None:
    async def test(job: CrewUnderTest) -> None:
        await job.begin(spares=2)
        await job.parked(2)
        first = job.crew._spares.workers[0]
        os.kill(first.pid, signal.SIGKILL)
        await job.event("SparesChanged", parked=1)
        await job.until(lambda: job.crew.parked == 2 and first not in job.crew._spares.workers, "two again")
        assert not job.of("WorkerFailed")

    with_crew(tmp_path, test)


def test_spares_that_always_die_are_given_up(tmp_path: Path) -> None:
    async def test(job: CrewUnderTest) -> None:
        await job.begin()
        for path in (tmp_path / "broken",):
            path.touch()
        job.crew._config.environment["FAKE_DIR"] = str(tmp_path / "nowhere")
        await job.crew.serve(serve(1, spares=1))
        await job.until(lambda: job.crew._spares._early_ends == 3, "three have died")
        await asyncio.sleep(0.2)
        assert not job.crew._spares.workers and not job.of("WorkerFailed")

    with_crew(tmp_path, test)


def test_a_worker_whose_line_is_lost_is_replaced_in_the_next_view(tmp_path: Path) -> None:
    async def test(job: CrewUnderTest) -> None:
        pids = await job.begin()
        job.do(pids[0], "hang-up")
        await job.until(lambda: job.crew.seated[0].line is None, "the line is lost")
        assert not job.of("WorkerFailed")
        await job.crew.serve(serve(2, kept=True, strategy=Strategy.RETRY))
        await job.event("SessionBegan", view=2)
        assert job.pids()[1:] == pids[1:] and job.pids()[0] != pids[0]
        assert not job.of("WorkerFailed")

    with_crew(tmp_path, test)


def test_scripts_that_never_enrol_are_programs_like_any_other(tmp_path: Path) -> None:
    async def test(job: CrewUnderTest) -> None:
        (tmp_path / "mute").touch()
        await job.crew.serve(serve(1, spares=1))
        await job.event("WorkersStarted", view=1)
        pids = job.pids()
        assert not job.crew.in_session
        os.kill(pids[1], signal.SIGKILL)
        await job.event("WorkerFailed", view=1)
        await job.crew.serve(serve(2, spares=1))
        await job.event("WorkersStarted", view=2)
        assert not set(job.pids()) & set(pids)
        await job.crew.hold(Hold(job_id="job", why="enough"))
        assert job.crew.is_empty and job.crew.view == 0

    with_crew(tmp_path, test)


# --- what they say


def test_a_commit_is_told_once_a_view_and_a_stumble_only_while_its_view_counts(tmp_path: Path) -> None:
    async def test(job: CrewUnderTest) -> None:
        pids = await job.begin()
        for pid in pids:
            job.do(pid, "commit 1")
            job.do(pid, "stumble 1")  # comes after the commit, on the same line
        await job.until(lambda: len(job.of("StepInterrupted")) == 3, "all have stumbled")
        assert {event.stumble.rank for event in job.of("StepInterrupted")} == {0, 1, 2}
        assert job.of("StepInterrupted")[0].stumble.message == "cut At: pair.cc(553)", "a line of the history"
        await job.crew.serve(serve(2, kept=True, strategy=Strategy.RETRY))
        await job.event("SessionBegan", view=2)
        job.do(pids[0], "stumble 1")  # crossed the order on its way
        job.do(pids[0], "commit 2")
        await job.event("StepCommitted", view=2)
        await job.crew.serve(serve(3, kept=True, planned=True))
        job.do(pids[2], "stumble 2")  # still there, and right to say so
        assert (await job.event("StepInterrupted", view=3)).stumble.local_rank == 2
        assert [(event.view, event.step) for event in job.of("StepCommitted")] == [(1, 1), (2, 2)]
        assert len(job.of("StepInterrupted")) == 4

    with_crew(tmp_path, test)


def test_those_who_end_well_are_successes_and_nobody_is_revoked(tmp_path: Path) -> None:
    async def test(job: CrewUnderTest) -> None:
        pids = await job.begin()
        for pid in pids:
            job.do(pid, "exit 0")
        await job.until(lambda: len(job.of("WorkerSucceeded")) == 3, "three successes")
        assert {event.local_rank for event in job.of("WorkerSucceeded")} == {0, 1, 2}
        assert job.crew.is_done and not job.crew.running
        assert not any(job.heard(pid, "revoke") for pid in pids)

    with_crew(tmp_path, test)


# --- leaving


def test_a_node_that_is_not_in_the_next_view_releases_its_workers(tmp_path: Path) -> None:
    async def test(job: CrewUnderTest) -> None:
        pids = await job.begin(spares=1)
        await job.parked(1)
        known = job.crew._session()
        await job.crew.hold(Hold(job_id="job", why="drained", release=2, spares=2, world_size=3, session=known))
        for pid in pids:
            await job.told(pid, "release", view=2)
        await job.left.wait()
        assert not job.crew.in_session and job.crew.view == 0
        assert not job.of("WorkerFailed") and not job.of("WorkerSucceeded")
        await job.parked(2)
        spares = {worker.pid for worker in job.crew._spares.workers}
        await job.crew.serve(serve(5, kept=True, workers=2, strategy=Strategy.RECOVER))
        await job.event("SessionBegan", view=5)
        assert set(job.pids()) == spares

    with_crew(tmp_path, test)


def test_one_that_does_not_leave_in_time_is_killed(tmp_path: Path) -> None:
    async def test(job: CrewUnderTest) -> None:
        pids = await job.begin()
        os.kill(pids[1], signal.SIGSTOP)
        await job.crew.hold(Hold(job_id="job", why="drained", release=2))
        await job.left.wait()
        assert job.crew.is_empty and not job.of("WorkerFailed")

    with_crew(tmp_path, test, shutdown_timeout_s=0.5)


def test_spares_are_gone_before_the_node_is_checked_and_come_back_after_it(tmp_path: Path) -> None:
    async def test(job: CrewUnderTest) -> None:
        await job.begin()
        standing_by = Hold(job_id="job", why="standing by", spares=2, world_size=3, session=job.crew._session())
        await job.crew.hold(standing_by)
        await job.parked(2)
        task = CheckTask(checkup="1.1", round=0, kind="alone")
        await job.crew.hold(msgspec.structs.replace(standing_by, spares=0, check=task))
        assert job.crew.is_empty, "the check begins when this returns"
        await job.crew.hold(standing_by)
        await job.until(lambda: job.crew.parked == 2, "two again")

    with_crew(tmp_path, test)


def test_nobody_is_made_while_everybody_is_ended(tmp_path: Path) -> None:
    async def test(job: CrewUnderTest) -> None:
        await job.begin()
        known = job.crew._session()
        await job.crew.hold(Hold(job_id="job", why="standing by", spares=2, world_size=3, session=known))
        await job.parked(2)
        await job.crew.stop(10.0)
        assert job.crew.is_empty and job.crew.parked == 0
        assert [event.parked for event in job.of("SparesChanged")] == [1, 2, 0]

    with_crew(tmp_path, test)


def test_a_worker_dies_while_another_is_being_replaced(tmp_path: Path) -> None:
    async def test(job: CrewUnderTest) -> None:
        pids = await job.begin()
        os.kill(pids[1], signal.SIGSTOP)
        serving = asyncio.ensure_future(job.crew.serve(serve(2, kept=True, strategy=IN_PLACE, replaced=(1,))))
        os.kill(pids[2], signal.SIGKILL)
        await serving
        await job.event("WorkerFailed")
        if job.of("WorkerFailed")[0].view == 2:  # seen only after the view began: the master answers with another
            await job.crew.serve(serve(3, kept=True, strategy=IN_PLACE))
        await job.event("SessionBegan", view=job.crew.view)
        assert job.pids()[0] == pids[0] and not set(job.pids()[1:]) & set(pids)

    with_crew(tmp_path, test)
