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

from holdfast.agent.assignments import assignment_in
from holdfast.core import state_coverage
from holdfast.core.faults.failures import Exited
from holdfast.core.health.findings import CheckTask
from holdfast.core.orders import Hold
from holdfast.core.shard_map import ShardMap
from holdfast.core.strategies import Strategy
from holdfast.core.views import reassign_local_ranks
from support.worker_groups import WorkerGroupUnderTest, serve, worker_group

IN_PLACE = Strategy.RECOVER_IN_PLACE


def with_worker_group(directory: Path, test: Callable[[WorkerGroupUnderTest], Awaitable[None]], **changes: Any) -> None:
    async def run() -> None:
        async with worker_group(directory, **changes) as under_test:
            await test(under_test)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("living", "before", "workers", "expected"),
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
def test_the_rule_of_local_ranks(living: list[int], before: int, workers: int, expected: dict[int, int]) -> None:
    assert reassign_local_ranks(dict.fromkeys(living, True), before, workers) == expected
    empty = [local_rank for local_rank in range(before) if local_rank not in living]
    held = tuple(holder(local_rank) for local_rank in range(before))
    counted_on = {
        h.rank: local_rank for local_rank, h in enumerate(state_coverage.carry_holders(held, empty, workers)) if h
    }
    assert counted_on == expected  # the master thinks so too


def test_an_assignment_has_the_jobs_fault_rate() -> None:
    order = serve(1, faults_per_node_day=0.25)
    assignment = assignment_in(order, 0, newcomer=False, applied_step=-1, complete_version=-1, checkpoint_dir="")
    assert assignment.faults_per_node_day == 0.25


def test_a_newcomer_leaves_before_workers_that_have_the_state() -> None:
    assert reassign_local_ranks({0: True, 1: False, 2: True}, 3, 2) == {0: 0, 2: 1}
    assert reassign_local_ranks({0: False, 1: False, 2: True}, 3, 2) == {0: 0, 2: 1}


def holder(rank: int) -> state_coverage.StateHolder:
    layout = state_coverage.ShardLayout(shard_map=ShardMap(1), replicas=0, world_size=9, first_ranks=(0,))
    return state_coverage.StateHolder(view=1, rank=rank, layout=layout)


def test_a_first_view_begins_when_all_have_joined(tmp_path: Path) -> None:
    async def test(job: WorkerGroupUnderTest) -> None:
        pids = await job.begin(first_rank=4, world_size=9, first_ranks=(0, 4, 7), group_rank=1, group_world_size=3)
        assert (await job.event("WorkersStarted")).pids == tuple(pids)
        assignment = await job.sent(pids[2], "welcome")
        assert (
            assignment["rank"],
            assignment["local_rank"],
            assignment["world_size"],
            assignment["local_world_size"],
        ) == (6, 2, 9, 3)
        assert assignment["first_ranks"] == [0, 4, 7]
        assert not assignment["newcomer"] and assignment["applied_step"] == -1
        [welcome] = job.messages_to(pids[0], "welcome")
        assert (welcome["replicas"], welcome["checkpoint_dir"]) == (1, "/checkpoints")
        assert len(job.of("ViewJoined")) == 1

    with_worker_group(tmp_path, test)


def test_what_workers_find_out_about_their_state_is_reported_once(tmp_path: Path) -> None:
    async def test(job: WorkerGroupUnderTest) -> None:
        pids = await job.begin()
        for pid in pids:
            job.do(pid, "own-state")
        revised = await job.event("SessionRevised", view=1)
        assert revised.session.per_rank and revised.session.local_replicas == 1 and not revised.session.resizable
        await job.until(
            lambda: all(worker.session and worker.session.per_rank for worker in job.worker_group.ranked),
            "all have said so",
        )
        assert len(job.of("SessionRevised")) == 1 and len(job.of("ViewJoined")) == 1

    with_worker_group(tmp_path, test)


def test_a_dead_workers_local_rank_gets_a_new_process_and_the_others_keep_theirs(tmp_path: Path) -> None:
    async def test(job: WorkerGroupUnderTest) -> None:
        pids = await job.begin()
        job.do(pids[1], "set applied_step=7 step=7")
        await job.until(lambda: job.worker_group.ranked[1].page.get("applied_step") == 7, "the step has begun")
        os.kill(pids[1], signal.SIGKILL)
        failed = await job.event("WorkerFailed", view=1)
        assert (failed.failure.rank, failed.failure.exit_code) == (1, -9)
        await asyncio.gather(*(job.sent(pid, "revoke", view=1) for pid in (pids[0], pids[2])))
        await job.worker_group.serve(serve(2, keeps_workers=True, strategy=IN_PLACE))
        for local_rank in (0, 2):
            assignment = await job.sent(pids[local_rank], "assign", view=2)
            assert (assignment["rank"], assignment["newcomer"], assignment["applied_step"]) == (local_rank, False, 7)
            assert assignment["strategy"] == "recover-in-place"
        await job.event("ViewJoined", view=2)
        after = job.pids()
        assert after[0::2] == pids[0::2] and after[1] not in pids
        assignment = await job.sent(after[1], "welcome")
        assert (assignment["view"], assignment["rank"], assignment["newcomer"], assignment["applied_step"]) == (
            2,
            1,
            True,
            7,
        )
        assert (await job.event("WorkersStarted", view=2)).pids == tuple(after)

    with_worker_group(tmp_path, test)


def test_a_spare_replaces_a_dead_worker_and_another_spare_is_started(tmp_path: Path) -> None:
    async def test(job: WorkerGroupUnderTest) -> None:
        pids = await job.begin(spares=1)
        await job.parked(1)
        [spare] = job.worker_group._spares.workers
        assert [message["type"] for message in job.messages_to(spare.pid)] == ["welcome", "prepare"]
        assert await job.event("SparesChanged", parked=1)
        os.kill(pids[2], signal.SIGKILL)
        await job.event("WorkerFailed")
        await job.worker_group.serve(serve(2, keeps_workers=True, strategy=Strategy.RECOVER, spares=1))
        assignment = await job.sent(spare.pid, "assign", view=2)
        assert (assignment["rank"], assignment["newcomer"]) == (2, True)
        assert job.pids() == [pids[0], pids[1], spare.pid]
        await job.event("ViewJoined", view=2)
        await job.parked(1)
        assert [event.parked for event in job.of("SparesChanged")] == [1, 0, 1]
        [next_spare] = job.worker_group._spares.workers
        assert next_spare.number != spare.number  # its log directory is still written to

    with_worker_group(tmp_path, test)


def test_a_strategy_other_than_recover_leaves_the_spares_alone(tmp_path: Path) -> None:
    async def test(job: WorkerGroupUnderTest) -> None:
        pids = await job.begin(spares=1)
        await job.parked(1)
        [spare] = job.worker_group._spares.workers
        os.kill(pids[0], signal.SIGKILL)
        await job.event("WorkerFailed")
        await job.worker_group.serve(serve(2, keeps_workers=True, strategy=IN_PLACE, spares=1))
        await job.event("ViewJoined", view=2)
        assert spare.pid not in job.pids() and job.worker_group._spares.workers == (spare,)

    with_worker_group(tmp_path, test)


def test_a_smaller_view_moves_the_living_up(tmp_path: Path) -> None:
    async def test(job: WorkerGroupUnderTest) -> None:
        pids = await job.begin()
        os.kill(pids[0], signal.SIGKILL)
        await job.event("WorkerFailed")
        await job.worker_group.serve(serve(2, keeps_workers=True, workers=2, strategy=Strategy.ELASTIC_TRAINING))
        await job.event("ViewJoined", view=2)
        assert job.pids() == pids[1:]
        assert [(await job.sent(pid, "assign", view=2))["rank"] for pid in pids[1:]] == [0, 1]
        await job.worker_group.serve(serve(3, keeps_workers=True, planned=True))
        newcomer = await job.until(lambda: job.worker_group.ranked[2].pid, "a third one is started")
        assert (await job.sent(newcomer, "welcome"))["newcomer"]
        for pid in pids[1:]:
            assert (await job.sent(pid, "assign", view=3))["planned"]
            job.do(pid, "join")
        job.do(newcomer, "join")
        await job.event("ViewJoined", view=3)

    with_worker_group(tmp_path, test)


def test_a_hanging_worker_is_replaced_quietly(tmp_path: Path) -> None:
    async def test(job: WorkerGroupUnderTest) -> None:
        pids = await job.begin()
        job.do(pids[1], "set applied_step=4")
        await job.until(lambda: job.worker_group.ranked[1].page.get("applied_step") == 4, "the step has begun")
        os.kill(pids[1], signal.SIGSTOP)
        await job.worker_group.serve(serve(2, keeps_workers=True, strategy=IN_PLACE, replaced=(1,)))
        await job.event("ViewJoined", view=2)
        assert not job.of("WorkerFailed")
        assert job.pids()[1] not in pids and job.pids()[0::2] == pids[0::2]
        assert (await job.sent(pids[0], "assign", view=2))["applied_step"] == 4

    with_worker_group(tmp_path, test)


def test_a_planned_surplus_leaves_by_itself_an_unplanned_one_is_ended(tmp_path: Path) -> None:
    async def test(job: WorkerGroupUnderTest) -> None:
        pids = await job.begin()
        await job.worker_group.serve(serve(2, keeps_workers=True, planned=True, workers=2))
        assert await job.sent(pids[2], "release", view=2)
        await job.left.wait()
        await job.worker_group.serve(serve(3, keeps_workers=True, workers=1, strategy=Strategy.ELASTIC_TRAINING))
        await job.event("ViewJoined", view=3)
        assert job.pids() == pids[:1]
        assert not job.of("WorkerFailed") and not job.of("WorkerSucceeded")

    with_worker_group(tmp_path, test)


def test_a_start_from_scratch_ends_all_of_them_and_forgets_what_was_begun(tmp_path: Path) -> None:
    async def test(job: WorkerGroupUnderTest) -> None:
        pids = await job.begin(spares=1)
        await job.parked(1)
        job.do(pids[0], "set applied_step=5")
        job.do(pids[0], "exit 3")
        await job.event("WorkerFailed")
        await job.worker_group.serve(serve(2))
        await job.event("ViewJoined", view=2)
        after = job.pids()
        assert not set(after) & set(pids)
        assignment = await job.sent(after[0], "welcome")
        assert (assignment["newcomer"], assignment["applied_step"]) == (False, -1)
        assert job.worker_group.parked == 0

    with_worker_group(tmp_path, test)


# --- the ugly


def test_a_worker_that_dies_before_it_joins_is_a_failure_of_the_new_view(tmp_path: Path) -> None:
    async def test(job: WorkerGroupUnderTest) -> None:
        pids = await job.begin()
        (tmp_path / "slow").touch()
        os.kill(pids[1], signal.SIGKILL)
        await job.event("WorkerFailed", view=1)
        await job.worker_group.serve(serve(2, keeps_workers=True, strategy=IN_PLACE))
        await job.sent(pids[0], "assign", view=2)
        os.kill(pids[0], signal.SIGKILL)
        assert (await job.event("WorkerFailed", view=2)).failure.rank == 0
        await job.sent(pids[2], "revoke", view=2)
        building = job.worker_group.ranked[0 if job.worker_group.ranked[0].local_rank == 1 else 1]
        await job.worker_group.serve(serve(3, keeps_workers=True, strategy=IN_PLACE))
        (tmp_path / "slow").unlink()
        assert job.worker_group.ranked[1] is building  # it went on building, and belongs to the next view
        await job.until(lambda: all(worker.connection for worker in job.worker_group.ranked), "all have enrolled")
        for pid in job.pids():
            job.do(pid, "join")
        await job.event("ViewJoined", view=3)
        assert not [event for event in job.of("ViewJoined") if event.view == 2]

    with_worker_group(tmp_path, test)


def test_a_view_that_comes_before_the_last_one_was_joined_is_joined_instead(tmp_path: Path) -> None:
    async def test(job: WorkerGroupUnderTest) -> None:
        pids = await job.begin()
        os.kill(pids[2], signal.SIGKILL)
        await job.event("WorkerFailed")
        for view in (2, 3, 4):  # at once, while the fork server still makes the first newcomer
            await job.worker_group.serve(serve(view, keeps_workers=True, strategy=IN_PLACE, store_port=view))
        await job.event("ViewJoined", view=4)
        assert job.pids()[:2] == pids[:2]
        newcomer = job.pids()[2]
        assignment = (job.messages_to(newcomer, "welcome") + job.messages_to(newcomer, "assign"))[-1]["assignment"]
        assert (assignment["view"], assignment["store_port"], assignment["newcomer"]) == (4, 4, True)
        assert len(list((tmp_path / "logs").rglob("2/stdout.log"))) == 2  # one for each that was ever started

    with_worker_group(tmp_path, test)


def test_a_worker_that_builds_for_another_rank_is_replaced(tmp_path: Path) -> None:
    async def test(job: WorkerGroupUnderTest) -> None:
        await job.begin()
        (tmp_path / "slow").touch()
        os.kill(job.pids()[2], signal.SIGKILL)
        await job.event("WorkerFailed")
        await job.worker_group.serve(serve(2, keeps_workers=True, strategy=IN_PLACE))
        first = await job.until(lambda: job.worker_group.ranked[2].pid, "the newcomer is started")
        await job.worker_group.serve(serve(3, keeps_workers=True, strategy=IN_PLACE))
        assert job.worker_group.ranked[2].pid == first
        await job.worker_group.serve(serve(4, keeps_workers=True, strategy=IN_PLACE, first_rank=3, world_size=6))
        assert job.worker_group.ranked[2].pid != first
        assert not [event for event in job.of("WorkerFailed") if event.view > 1]

    environment = {"FAKE_SHARDS": "3"}
    with_worker_group(tmp_path, with_environment(test, environment))


def with_environment(
    test: Callable[[WorkerGroupUnderTest], Awaitable[None]], variables: dict[str, str]
) -> Callable[[WorkerGroupUnderTest], Awaitable[None]]:
    async def run(job: WorkerGroupUnderTest) -> None:
        job.worker_group._config.environment.update(variables)
        await test(job)

    return run


def test_a_spare_that_dies_when_it_is_needed_is_a_failure_like_any_other(tmp_path: Path) -> None:
    async def test(job: WorkerGroupUnderTest) -> None:
        pids = await job.begin(spares=1)
        await job.parked(1)
        [spare] = job.worker_group._spares.workers
        os.kill(spare.pid, signal.SIGSTOP)
        os.kill(pids[1], signal.SIGKILL)
        await job.event("WorkerFailed", view=1)
        await job.worker_group.serve(serve(2, keeps_workers=True, strategy=Strategy.RECOVER, spares=1))
        os.kill(spare.pid, signal.SIGKILL)
        failed = await job.event("WorkerFailed", view=2)
        assert (failed.failure.rank, failed.failure.pid) == (1, spare.pid)
        assert job.worker_group.parked == 0  # none is made while an incident is open
        await job.worker_group.serve(serve(3, keeps_workers=True, strategy=Strategy.RECOVER, spares=1))
        await job.event("ViewJoined", view=3)
        await job.parked(1)
        assert job.pids()[0::2] == pids[0::2]

    with_worker_group(tmp_path, test)


def test_a_parked_spare_that_dies_is_replaced(tmp_path: Path) -> None:
    async def test(job: WorkerGroupUnderTest) -> None:
        await job.begin(spares=2)
        await job.parked(2)
        first = job.worker_group._spares.workers[0]
        os.kill(first.pid, signal.SIGKILL)
        await job.event("SparesChanged", parked=1)
        await job.until(
            lambda: job.worker_group.parked == 2 and first not in job.worker_group._spares.workers, "two again"
        )
        assert not job.of("WorkerFailed")

    with_worker_group(tmp_path, test)


def test_spares_that_always_die_are_given_up(tmp_path: Path) -> None:
    async def test(job: WorkerGroupUnderTest) -> None:
        await job.begin()
        for path in (tmp_path / "broken",):
            path.touch()
        job.worker_group._config.environment["FAKE_DIR"] = str(tmp_path / "nowhere")
        await job.worker_group.serve(serve(1, spares=1))
        await job.until(lambda: job.worker_group._spares._early_ends == 3, "three have died")
        await asyncio.sleep(0.2)
        assert not job.worker_group._spares.workers and not job.of("WorkerFailed")

    with_worker_group(tmp_path, test)


def test_a_worker_whose_connection_is_lost_is_replaced_in_the_next_view(tmp_path: Path) -> None:
    async def test(job: WorkerGroupUnderTest) -> None:
        pids = await job.begin()
        job.do(pids[0], "hang-up")
        await job.until(lambda: job.worker_group.ranked[0].connection is None, "the line is lost")
        assert not job.of("WorkerFailed")
        await job.worker_group.serve(serve(2, keeps_workers=True, strategy=Strategy.RETRY))
        await job.event("ViewJoined", view=2)
        assert job.pids()[1:] == pids[1:] and job.pids()[0] != pids[0]
        assert not job.of("WorkerFailed")

    with_worker_group(tmp_path, test)


def test_scripts_that_never_enrol_are_programs_like_any_other(tmp_path: Path) -> None:
    async def test(job: WorkerGroupUnderTest) -> None:
        (tmp_path / "mute").touch()
        await job.worker_group.serve(serve(1, spares=1))
        await job.event("WorkersStarted", view=1)
        pids = job.pids()
        assert not job.worker_group.in_session
        os.kill(pids[1], signal.SIGKILL)
        await job.event("WorkerFailed", view=1)
        await job.worker_group.serve(serve(2, spares=1))
        await job.event("WorkersStarted", view=2)
        assert not set(job.pids()) & set(pids)
        await job.worker_group.hold(Hold(job_id="job", why="enough"))
        assert job.worker_group.is_empty and job.worker_group.view == 0

    with_worker_group(tmp_path, test)


# --- what they say


def test_a_commit_is_reported_once_a_view_and_a_step_error_only_while_its_view_counts(tmp_path: Path) -> None:
    async def test(job: WorkerGroupUnderTest) -> None:
        pids = await job.begin()
        for pid in pids:
            job.do(pid, "commit 1")
            job.do(pid, "step-error 1")  # comes after the commit, on the same connection
        await job.until(lambda: len(job.of("StepInterrupted")) == 3, "all steps have failed")
        assert {event.step_error.rank for event in job.of("StepInterrupted")} == {0, 1, 2}
        assert job.of("StepInterrupted")[0].step_error.message == "cut At: pair.cc(553)", "a line of the history"
        await job.worker_group.serve(serve(2, keeps_workers=True, strategy=Strategy.RETRY))
        await job.event("ViewJoined", view=2)
        job.do(pids[0], "step-error 1")  # crossed the order on its way
        job.do(pids[0], "commit 2")
        await job.event("StepCommitted", view=2)
        await job.worker_group.serve(serve(3, keeps_workers=True, planned=True))
        job.do(pids[2], "step-error 2")  # still there, and right to say so
        assert (await job.event("StepInterrupted", view=3)).step_error.local_rank == 2
        assert [(event.view, event.step) for event in job.of("StepCommitted")] == [(1, 1), (2, 2)]
        assert len(job.of("StepInterrupted")) == 4

    with_worker_group(tmp_path, test)


def test_workers_that_exit_with_0_are_successes_and_revoke_no_view(tmp_path: Path) -> None:
    async def test(job: WorkerGroupUnderTest) -> None:
        pids = await job.begin()
        for pid in pids:
            job.do(pid, "exit 0")
        await job.until(lambda: len(job.of("WorkerSucceeded")) == 3, "three successes")
        assert {event.local_rank for event in job.of("WorkerSucceeded")} == {0, 1, 2}
        assert job.worker_group.is_done and not job.worker_group.running
        assert not any(job.messages_to(pid, "revoke") for pid in pids)

    with_worker_group(tmp_path, test)


# --- leaving


def test_a_node_that_is_not_in_the_next_view_releases_its_workers(tmp_path: Path) -> None:
    async def test(job: WorkerGroupUnderTest) -> None:
        pids = await job.begin(spares=1)
        await job.parked(1)
        known = job.worker_group._session()
        await job.worker_group.hold(Hold(job_id="job", why="drained", release=2, spares=2, world_size=3, session=known))
        for pid in pids:
            await job.sent(pid, "release", view=2)
        await job.left.wait()
        assert not job.worker_group.in_session and job.worker_group.view == 0
        assert not job.of("WorkerFailed") and not job.of("WorkerSucceeded")
        await job.parked(2)
        spares = {worker.pid for worker in job.worker_group._spares.workers}
        await job.worker_group.serve(serve(5, keeps_workers=True, workers=2, strategy=Strategy.RECOVER))
        await job.event("ViewJoined", view=5)
        assert set(job.pids()) == spares

    with_worker_group(tmp_path, test)


def test_one_that_does_not_leave_in_time_is_killed(tmp_path: Path) -> None:
    async def test(job: WorkerGroupUnderTest) -> None:
        pids = await job.begin()
        os.kill(pids[1], signal.SIGSTOP)
        await job.worker_group.hold(Hold(job_id="job", why="drained", release=2))
        await job.left.wait()
        assert job.worker_group.is_empty and not job.of("WorkerFailed")

    with_worker_group(tmp_path, test, shutdown_timeout_s=0.5)


def test_spares_are_gone_before_the_node_is_checked_and_come_back_after_it(tmp_path: Path) -> None:
    async def test(job: WorkerGroupUnderTest) -> None:
        await job.begin()
        standing_by = Hold(job_id="job", why="standing by", spares=2, world_size=3, session=job.worker_group._session())
        await job.worker_group.hold(standing_by)
        await job.parked(2)
        task = CheckTask(checkup="1.1", round=0, kind="alone")
        await job.worker_group.hold(msgspec.structs.replace(standing_by, spares=0, check=task))
        assert job.worker_group.is_empty, "the check begins when this returns"
        await job.worker_group.hold(standing_by)
        await job.until(lambda: job.worker_group.parked == 2, "two again")

    with_worker_group(tmp_path, test)


def test_no_spare_is_started_while_all_workers_are_ended(tmp_path: Path) -> None:
    async def test(job: WorkerGroupUnderTest) -> None:
        await job.begin()
        known = job.worker_group._session()
        await job.worker_group.hold(Hold(job_id="job", why="standing by", spares=2, world_size=3, session=known))
        await job.parked(2)
        await job.worker_group.stop(10.0)
        assert job.worker_group.is_empty and job.worker_group.parked == 0
        assert [event.parked for event in job.of("SparesChanged")] == [1, 2, 0]

    with_worker_group(tmp_path, test)


def test_a_worker_dies_while_another_is_being_replaced(tmp_path: Path) -> None:
    async def test(job: WorkerGroupUnderTest) -> None:
        pids = await job.begin()
        os.kill(pids[1], signal.SIGSTOP)
        serving = asyncio.ensure_future(
            job.worker_group.serve(serve(2, keeps_workers=True, strategy=IN_PLACE, replaced=(1,)))
        )
        os.kill(pids[2], signal.SIGKILL)
        await serving
        await job.event("WorkerFailed")
        if job.of("WorkerFailed")[0].view == 2:  # seen only after the view began: the master answers with another
            await job.worker_group.serve(serve(3, keeps_workers=True, strategy=IN_PLACE))
        await job.event("ViewJoined", view=job.worker_group.view)
        assert job.pids()[0] == pids[0] and not set(job.pids()[1:]) & set(pids)

    with_worker_group(tmp_path, test)


def test_one_that_ends_with_code_0_in_its_steps_has_failed(tmp_path: Path) -> None:
    async def test(job: WorkerGroupUnderTest) -> None:
        pids = await job.begin()
        job.do(pids[1], "vanish")
        failure = (await job.event("WorkerFailed", view=1)).failure
        assert (failure.end, failure.local_rank) == (Exited(0), 1) and "in the middle of its steps" in failure.message
        assert not job.of("WorkerSucceeded")

    with_worker_group(tmp_path, test)
