"""The engine's table: who goes on, who repeats and who gets the state of others, at each point where a view can end.

Simulated ranks in threads (tests/support/simulated_ranks.py); no processes, no sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.errors import RetryableError, ScriptError, StateConflictError, ViewOverError
from holdfast.wire.progress_page import ProgressPage, WorkerPhase
from holdfast.wire.worker_messages import (
    StepCommittedMessage,
    StepInterruptedMessage,
    TrainingClosedMessage,
    ViewJoinedMessage,
    WorkerReleased,
)
from holdfast.worker.commit_vote import CommitVote
from support.simulated_ranks import Killed, World

VARIABLES: tuple[str, ...] = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
)
VARIABLES += ("ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HOLDFAST_VIEW")
TOTAL = 4


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that joins a view sets torchrun's variables: put back here."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")


def after(steps: int) -> int:
    """The value of a state after so many committed steps."""
    return steps * (steps + 1) // 2


def die(world: World, *left: str, applied: int = -1) -> Callable[[], None]:
    """Return a fault: this rank dies, and a view is made of others."""

    def kill() -> None:
        world.form(*left, applied=applied)
        raise Killed

    return kill


def lose_view(world: World, *names: str) -> Callable[[], None]:
    """Return a fault: a connection is lost here, and a view is made of the same ranks."""

    def lose() -> None:
        world.form(*names)
        raise ViewOverError("connection reset by peer")

    return lose


class Run:
    """One simulated run."""

    def __init__(self, *names: str, keeps_copy: bool | None = None, total: int = TOTAL) -> None:
        self.world, self.names, self._keeps_copy, self._total = World(), names, keeps_copy, total
        self.world.form(*names)
        self._faults: dict[str, Any] = {}

    def fault(self, name: str, point: str, step: int, action: Callable[[], object]) -> None:
        self._faults.setdefault(name, {})[point, step] = action

    def newcomer(self, name: str) -> None:
        """Start a worker that builds alone, for a view that has a rank for it."""
        self.world.start(name, total=self._total, is_newcomer=True, **self._faults)

    def finish(self) -> World:
        """Run it to its end."""
        self.world.start(*self.names, total=self._total, keeps_copy=self._keeps_copy, **self._faults)
        self.world.join()
        return self.world


def kinds(world: World, name: str) -> list[str]:
    return [type(message).__name__ for message in world.twins[name].agent.messages]


def check_trained(world: World, *names: str, total: int = TOTAL) -> None:
    """All of these ranks have made all steps, each exactly once, and have closed the training."""
    for name in names:
        twin = world.twins[name]
        assert twin.error is None, (name, twin.error)
        assert twin.state.value == after(total) and twin.engine.next_step == total, name
        assert isinstance(twin.agent.messages[-1], TrainingClosedMessage)


def test_an_undisturbed_run_commits_each_step_once() -> None:
    world = Run("a", "b").finish()
    check_trained(world, "a", "b")
    for name in "ab":
        assert world.twins[name].trace == ["0", "1", "2", "3"]
        assert kinds(world, name) == [
            "WorkerReady",
            "ViewJoinedMessage",
            "StepCommittedMessage",
            "TrainingClosedMessage",
        ], "one committed step proves a view"
        assert world.twins[name].page.get("applied_step") == TOTAL - 1


@pytest.mark.parametrize("keeps_copy", [False, True])
@pytest.mark.parametrize("point", ["body", "vote"])
def test_an_error_before_the_barrier_repeats_the_step_on_all_ranks(point: str, keeps_copy: bool) -> None:
    trial = Run("a", "b", keeps_copy=keeps_copy)
    trial.fault("b", point, 2, lose_view(trial.world, "a", "b"))
    world = trial.finish()
    check_trained(world, "a", "b")
    for name in "ab":
        assert world.twins[name].trace == ["0", "1", "2!", "2", "3"]
        joined = [
            message.view for message in world.twins[name].agent.messages if isinstance(message, ViewJoinedMessage)
        ]
        proved = [
            (message.view, message.step)
            for message in world.twins[name].agent.messages
            if isinstance(message, StepCommittedMessage)
        ]
        assert joined == [1, 2] and proved == [(1, 0), (2, 2)]


def test_an_update_is_rolled_back_when_the_step_breaks_after_it_and_before_its_barrier() -> None:
    trial = Run("a", "b", keeps_copy=True)
    trial.fault("b", "tail", 2, lose_view(trial.world, "a", "b"))
    world = trial.finish()
    check_trained(world, "a", "b")
    assert world.twins["a"].trace == world.twins["b"].trace == ["0", "1", "2!", "2", "3"]


def test_a_rank_at_the_barrier_rolls_forward_if_another_has_passed_it() -> None:
    """b has the answer of the barrier; a lost its connection while it waited for it."""
    trial = Run("a", "b", keeps_copy=False)
    world = trial.world
    passed = []

    def lose_answer() -> None:
        world.wait_for(lambda: world.twins["b"].page.get("applied_step") == 2)
        world.form("a", "b")
        raise ViewOverError("connection reset by peer")

    trial.fault("a", "voted", 2, lose_answer)
    trial.fault("b", "update", 2, lambda: passed.append(world.twins["b"].page.get("applied_step")))
    trial.finish()
    check_trained(world, "a", "b")
    assert passed == [2], "no update before the barrier"
    assert world.twins["a"].trace == ["0", "1", "2", "3"], "what is committed is not repeated"
    assert world.twins["b"].trace[-1] == "3"


def test_a_rank_at_the_barrier_rolls_forward_if_a_dead_one_had_passed_it() -> None:
    """The agent of b read in its progress page how far it was."""
    trial = Run("a", "b", keeps_copy=False)
    world = trial.world

    def lose_answer() -> None:
        world.wait_for(lambda: world.twins["b"].error is not None)
        raise ViewOverError("connection reset by peer")

    trial.fault("a", "voted", 2, lose_answer)
    trial.fault("b", "update", 2, die(world, "a", applied=2))
    trial.finish()
    check_trained(world, "a")
    assert world.twins["a"].trace == ["0", "1", "2", "3"]


def test_a_step_is_repeated_if_the_dead_rank_had_not_passed_its_barrier() -> None:
    trial = Run("a", "b", keeps_copy=False)
    trial.fault("b", "vote", 2, die(trial.world, "a"))
    world = trial.finish()
    check_trained(world, "a")
    assert world.twins["a"].trace == ["0", "1", "2!", "2", "3"]


def test_a_step_that_breaks_after_it_was_committed_is_not_held() -> None:
    """It can be neither finished nor undone here: the worker fails, and is replaced."""
    trial = Run("a", "b", keeps_copy=False)
    world = trial.world

    def fail() -> None:
        world.form("a", applied=2)
        raise RetryableError("after the update")

    trial.fault("b", "tail", 2, fail)
    trial.finish()
    assert isinstance(world.twins["b"].error, RetryableError)
    assert world.twins["b"].trace[-1] == "2"


def test_a_newcomer_gets_the_state_of_the_others_before_the_next_step() -> None:
    trial = Run("a", "b")
    world = trial.world

    def replaced() -> None:
        world.form("a", "c")
        trial.newcomer("c")
        raise Killed

    trial.fault("b", "body", 2, replaced)
    trial.finish()
    check_trained(world, "a", "c")
    assert world.twins["a"].trace == ["0", "1", "2!", "2", "3"]
    assert world.twins["c"].trace == ["2", "3"]
    assert "StepInterruptedMessage" not in kinds(world, "a"), "a newer view was known: the error is no news"


def test_a_recovery_is_no_step_and_the_collectives_of_an_aborted_attempt_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    move, counts = ProgressPage.move, list[int]()

    def watched(self: ProgressPage, **fields: int) -> None:
        if fields.get("phase") == WorkerPhase.HOLDING:
            self.set(collectives=9)
        move(self, **fields)
        if fields.get("phase") == WorkerPhase.HOLDING:
            counts.append(self.get("collectives"))

    monkeypatch.setattr(ProgressPage, "move", watched)
    trial = Run("a", "b")
    trial.fault("b", "body", 2, lose_view(trial.world, "a", "b"))
    page = trial.finish().twins["b"].page
    assert counts == [0, 0]
    assert page.get("made") == TOTAL - 1 and page.get("last_ns") > 0, "the aborted attempt is not timed"


def test_an_error_is_reported_if_no_newer_view_is_known() -> None:
    trial = Run("a", "b")
    world = trial.world

    def lose() -> None:
        world.end_view()
        raise RetryableError("disk full")

    def recover() -> None:
        world.wait_for(lambda: "StepInterruptedMessage" in kinds(world, "b"))
        world.form("a", "b")

    trial.fault("b", "body", 1, lose)
    trial.fault("a", "body", 1, recover)
    trial.finish()
    check_trained(world, "a", "b")
    (message,) = (one for one in world.twins["b"].agent.messages if isinstance(one, StepInterruptedMessage))
    assert (message.view, message.step, message.exception, message.collateral) == (1, 1, "RetryableError", False)


def test_a_second_fault_while_a_newcomer_gets_its_state_starts_the_same_again() -> None:
    trial = Run("a", "b")
    world = trial.world

    def replace_with(name: str) -> Callable[[], None]:
        def replaced() -> None:
            world.form("a", name)
            trial.newcomer(name)
            raise Killed

        return replaced

    trial.fault("b", "body", 2, replace_with("c"))
    trial.fault("c", "fill", 0, replace_with("d"))  # a newcomer has no step of its own as yet
    trial.finish()
    check_trained(world, "a", "d")
    assert isinstance(world.twins["c"].error, Killed) and not world.twins["c"].trace
    assert world.twins["a"].trace == ["0", "1", "2!", "2", "3"], "repeated once, whatever happened in between"
    assert world.twins["d"].trace == ["2", "3"]


def test_a_view_that_is_over_while_its_members_restore_is_left_for_the_next() -> None:
    trial = Run("a", "b", "c")
    world = trial.world
    trial.fault("c", "body", 1, die(world, "a", "b"))
    trial.fault("b", "fill", 1, lose_view(world, "a", "b"))
    trial.finish()
    check_trained(world, "a", "b")
    for name in "ab":
        views = [one.view for one in world.twins[name].agent.messages if isinstance(one, ViewJoinedMessage)]
        assert views == [1, 3], "the one in between was never complete"
        assert world.twins[name].trace == ["0", "1!", "1", "2", "3"]


def test_all_find_the_state_together_if_those_who_had_it_died_before_they_gave_it() -> None:
    """c and d came as newcomers to a, which died: they start from the checkpoint, as the members of a first view do."""
    trial = Run("a", "b")
    world = trial.world

    def both_die() -> None:
        world.form("c", "d", applied=1)
        for name in "cd":
            trial.newcomer(name)
        raise Killed

    trial.fault("a", "body", 2, lambda: (_ for _ in ()).throw(Killed()))
    trial.fault("b", "body", 2, both_die)
    world.checkpoint = (1, after(1))
    trial.finish()
    check_trained(world, "c", "d")
    assert world.twins["c"].trace == world.twins["d"].trace == ["1", "2", "3"]


def test_no_state_anywhere_after_steps_were_made_is_an_error() -> None:
    trial = Run("a")
    world = trial.world

    def die_last() -> None:
        world.form("c", applied=1)
        trial.newcomer("c")
        raise Killed

    trial.fault("a", "body", 2, die_last)
    trial.finish()
    assert isinstance(world.twins["c"].error, StateConflictError)
    assert "step 1 was begun" in str(world.twins["c"].error)


@pytest.mark.parametrize("point", ["body", "vote"])
def test_the_last_holder_saves_the_last_committed_step_before_it_waits_for_newcomers(point: str) -> None:
    trial = Run("a", "b", keeps_copy=True)
    world = trial.world

    def replaced() -> None:
        world.form("a", "c", is_last_holder=True)
        trial.newcomer("c")
        raise Killed

    trial.fault("b", point, 2, replaced)
    trial.finish()
    check_trained(world, "a", "c")
    assert world.twins["a"].state.saved_alone == [(2, after(2))], "without what the broken step has done"


def test_the_last_holder_finishes_a_step_that_a_dead_rank_had_begun_to_apply_before_it_saves() -> None:
    trial = Run("a", "b", keeps_copy=False)
    world = trial.world

    def replaced() -> None:
        world.form("a", "c", applied=2, is_last_holder=True)
        trial.newcomer("c")
        raise Killed

    def lose_answer() -> None:
        world.wait_for(lambda: world.twins["b"].error is not None)
        raise ViewOverError("connection reset by peer")

    trial.fault("a", "voted", 2, lose_answer)
    trial.fault("b", "update", 2, replaced)
    trial.finish()
    check_trained(world, "a", "c")
    assert world.twins["a"].trace == ["0", "1", "2", "3"]
    assert world.twins["a"].state.saved_alone == [(3, after(3))]
    assert world.twins["c"].trace == ["3"]


def test_a_planned_view_is_joined_by_all_after_the_same_step() -> None:
    trial = Run("a", "b")
    world = trial.world

    def grow() -> None:
        world.form("a", "b", "c", planned=True)
        trial.newcomer("c")

    trial.fault("b", "body", 1, grow)
    trial.finish()
    check_trained(world, "a", "b", "c")
    assert world.twins["a"].trace == world.twins["b"].trace == ["0", "1", "2", "3"], "nothing is repeated"
    assert world.twins["c"].trace == ["2", "3"]


def test_a_rank_that_the_next_view_has_no_place_for_leaves() -> None:
    trial = Run("a", "b")
    world = trial.world
    trial.fault("a", "body", 1, lambda: world.form("a", planned=True) and None)
    trial.finish()
    check_trained(world, "a")
    assert isinstance(world.twins["b"].error, SystemExit)
    assert isinstance(world.twins["b"].agent.messages[-1], WorkerReleased)


def test_no_rank_leaves_the_last_step_before_all_have_committed_it() -> None:
    """b dies behind its last update; its replacement finds a there, which has all the state there is."""
    trial = Run("a", "b", keeps_copy=False)
    world = trial.world

    def replaced() -> None:
        world.wait_for(lambda: "TrainingClosedMessage" not in kinds(world, "a"))
        world.form("a", "c", applied=3)
        trial.newcomer("c")
        raise Killed

    trial.fault("b", "tail", 3, replaced)
    trial.finish()
    check_trained(world, "a", "c")
    assert world.twins["c"].trace == [], "it came after the last step, and made none"


def test_ranks_that_run_different_steps_are_told_so() -> None:
    trial = Run("a", "b")
    world = trial.world

    def skip() -> None:
        world.twins["b"].engine.next_step += 1

    trial.fault("b", "body", 1, skip)
    trial.finish()
    assert isinstance(world.twins["a"].error, StateConflictError) and "steps 1 to 2" in str(world.twins["a"].error)


def test_a_vote_of_all_ranks_is_the_maximum_of_each_number() -> None:
    class Two:
        def agree(self, values: tuple[int, ...]) -> list[int]:
            other = (*CommitVote(5, -5, 9, 1, 0, 3, -3, 7, -7, 5, -5, 0, -1), 4, -2)
            return [max(pair) for pair in zip(values, other, strict=True)]

    vote = CommitVote(5, -5, 8, 0, 1, 3, -3, 7, -7, 5, -5, 0, -1)
    answer, snapshots = vote.agree((1, -1), Two())  # type: ignore[arg-type]
    assert answer == CommitVote(5, -5, 9, 1, 1, 3, -3, 7, -7, 5, -5, 0, -1) and snapshots == [4, -1]
    with pytest.raises(StateConflictError, match="steps 4 to 5"):
        CommitVote(4, -4, 8, 0, 1, 3, -3, 7, -7, 5, -5, 0, -1).agree((1, -1), Two())  # type: ignore[arg-type]
    with pytest.raises(ScriptError, match="loaders"):
        CommitVote(5, -5, 8, 0, 1, 2, -2, 7, -7, 5, -5, 0, -1).agree((1, -1), Two())  # type: ignore[arg-type]
    with pytest.raises(ScriptError, match=r"plain values named in job\.track differ between ranks: compute each from"):
        CommitVote(5, -5, 8, 0, 1, 3, -3, 6, -6, 5, -5, 0, -1).agree((1, -1), Two())  # type: ignore[arg-type]
    with pytest.raises(ScriptError, match="do not make the same update in step 5"):
        CommitVote(5, -5, 8, 0, 1, 3, -3, 7, -7, 6, -6, 0, -1).agree((1, -1), Two())  # type: ignore[arg-type]
