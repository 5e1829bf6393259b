"""The main thread's way through a run that is repaired: steps, commits, and the path from a broken view to the next.

It is always at one of these points, and each knows what to do about a view that is over:

    in the body of a step        the error lands in `with step:`; the next view is joined, the step undone and repeated
    at the barrier of a step     the next view is joined; if any rank has passed the barrier, the step is committed
    between two steps            nothing communicates; the next collective finds the view over
    at the top of a step         `enter_view`: a planned view is joined, newcomers get their state, models are put right
    behind the last step         `close`: no rank leaves before all have committed it, so there is always a peer to ask

`enter_view` is where every way into a view ends: of ranks that repeat, of those that roll forward, of newcomers, and of
the first start.

The engine decides. It communicates through `EngineCollectives`, talks to the agent through `EngineAgent`, and has the
tracked objects changed through `EngineState` (engine_interfaces.py). Tests give it simulated ones
(tests/worker/test_engine.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from holdfast.core.events import SessionInfo
from holdfast.core.shard_map import ShardMap
from holdfast.data.data_coordinates import DataCoordinates
from holdfast.data.randomness import between_key, set_generators, slot_key
from holdfast.errors import FinishAlone, HoldfastError, RepeatStep, StateConflictError
from holdfast.state.tracked import Tracked
from holdfast.wire.progress_page import ProgressPage, WorkerPhase
from holdfast.wire.worker_messages import (
    Assignment,
    FromWorker,
    SessionRevisedMessage,
    StepCommittedMessage,
    TrainingClosedMessage,
    ViewJoinedMessage,
    WorkerReady,
)
from holdfast.worker.collectives import groups
from holdfast.worker.commit_vote import CommitVote, other_updates
from holdfast.worker.engine_interfaces import EngineAgent, EngineCollectives, EngineState
from holdfast.worker.membership import Membership, without_frames
from holdfast.worker.numeric_guards import NumericGuards
from holdfast.worker.parking import Parking
from holdfast.worker.replica_check import Due
from holdfast.worker.resume_point import RankStatus, ResumePoint
from holdfast.worker.sample_recorder import SampleRecorder, mark_of
from holdfast.worker.script_checks import refuse_collective_of, warn_of_collective
from holdfast.worker.shown_loss import LOSS, loss_mark, loss_of
from holdfast.worker.transaction import TRIAL_STEPS, StepTransaction

GENERATORS = "a function of seed, step, pipeline stage, and rank, data coordinate or slot"


class Engine:
    """One worker's progress through the steps. Without an agent and a membership nothing is repaired."""

    def __init__(
        self,
        state: EngineState,
        page: ProgressPage,
        seed: int | None,
        *,
        agent: EngineAgent | None = None,
        membership: Membership | None = None,
        collectives: EngineCollectives = groups,
        spare: Parking | None = None,
        is_newcomer: bool = False,
        expected_shards: Callable[[], ShardMap | None] = lambda: None,
    ) -> None:
        """`expected_shards`: what a newcomer is told of the shards of those that train already."""
        self._expected_shards = expected_shards
        self._state, self._page, self._agent, self.membership = state, page, agent, membership
        self.collectives, self._spare, self._seed = collectives, spare, seed
        self.next_step = 0
        self._first_step = 0
        self._applied_step = -1
        """The newest step whose update this rank has begun to apply."""
        self._has_state = False
        self._at_barrier = False
        self._resume: ResumePoint | None = None
        """What the members of the view have agreed on and not yet carried out."""
        self._planned_view = 0
        """The view to change to after this step, by plan; 0 if none."""
        self._committed_view = 0
        """The newest view of which the agent knows that a step was committed in it."""
        self._builds_alone = is_newcomer
        """Whether the others train already, so that we meet them at our first step."""
        self._reported: SessionInfo | None = None
        """What the agent knows of our state."""
        self._keeps_copy = True
        self._samples = SampleRecorder(page)
        self._resumed_from = ""
        """The saved state with which this process began; empty: none."""
        self.logged: dict[str, float] = {}
        """What the script logged in its last committed step."""
        self.coordinates: DataCoordinates | None = None
        """Which ranks are given the same batches; None: none are."""
        self.stage = 0
        """The stage of a pipeline that this rank has: ranks of one data coordinate draw the same random numbers in the
        same stage, and others in others."""
        self.guards = NumericGuards(self)
        self._step_began_ns = 0
        self._is_paced = False
        """Whether nothing but the last step lies between its beginning and that of the next."""
        self._accumulates = False
        """Whether there were steps without an update: gradients are then compared too, in those alone."""
        self.total = 0
        """How many steps the script makes."""
        self.is_outside = False
        """Whether code of the loop that is not inside a step runs."""
        self.drawing = ""
        """The kind of the source that a batch is drawn from, by each rank for itself; empty: none is."""
        self.is_fresh_start = False
        """Whether all ranks began the run together, from scratch or from a checkpoint, in the view in force."""
        collectives.on_collective(self._on_collective)

    @property
    def transaction(self) -> StepTransaction:
        """The step under way."""
        assert self._state.transaction is not None, "the steps have not begun"
        return self._state.transaction

    @property
    def is_stepping(self) -> bool:
        """Return whether a step is under way."""
        return self._state.transaction is not None and self._state.transaction.is_open

    @property
    def seed(self) -> int:
        """The seed of the steps' generators."""
        assert self._seed is not None, "the steps have not begun"
        return self._seed

    @property
    def collectives_begun(self) -> int:
        """How many collectives this attempt of the step has begun."""
        return self._page.get("collectives")

    @property
    def upcoming_step(self) -> int:
        """The next step, as far as it is known: before `enter_view` too, where a process has joined the others."""
        return self._resume.next_step if self._resume is not None else self.next_step

    # --- into the views

    def restore(self) -> None:
        """Go on from the newest state in the agents' memory or on storage, unless other ranks train already; everything
        is tracked."""
        self._state.measure(is_alone=self._builds_alone, expected=self._expected_shards())
        if not self._builds_alone:
            self._restore()

    def _restore(self) -> bool:
        """Restore, all ranks together. Return whether there was a state."""
        found = self._state.restore(self.membership.assignment if self.membership else None)
        if found is None:
            return False
        self.next_step, self._seed, self._first_step = found.step, found.seed, found.step
        self._resumed_from = found.checkpoint.url if found.checkpoint is not None else "the nodes' memory"
        return True

    def _start_again(self, resume: ResumePoint) -> ResumePoint:
        """Begin as a view does in which all ranks start: we came as newcomers to ranks that had the state, and those
        died before their end was known to the master that made this view."""
        assignment = self.membership.assignment if self.membership else None
        is_found = self._restore()
        (applied,) = self.collectives.agree((assignment.applied_step if assignment is not None else -1,))
        if not is_found and applied >= 0:
            raise StateConflictError(
                f"step {applied} was begun, and no rank that had the state is left; it is not in memory, nor on storage"
            )
        seed = self.seed if is_found else resume.seed
        return resume._replace(
            next_step=self.next_step, first_step=self.next_step, seed=seed, local_since=self._state.local_since
        )

    def begin(self) -> None:
        """Meet the others at the first step: everything is built and tracked. A spare waits here for its rank."""
        state, membership = self._state, self.membership
        state.begin(has_session=membership is not None)
        if membership is not None:
            membership.built_for = state.built_for or membership.built_for
            membership.runs_on_device = state.runs_on_device
            membership.settle_device = state.settle_device
        if membership is None or self._agent is None:
            self._has_state = True
            self._keeps_copy = False
            self._seed = self._seed if self._seed is not None else torch.initial_seed()
            return
        state.begin_session(self._describe)
        self._samples.attach(state.audited().values())
        self._reported, data = state.session_info(), state.data_sources()
        if self._spare is not None:
            self._spare.wait()
        self._page.move(phase=WorkerPhase.PARKED)
        answers = self.collectives.end_answers(state.tensors() if self.collectives.has_unanswered() else ())
        membership.answers = membership.answers or answers
        self._agent.tell(WorkerReady(self._reported, data, answers))
        join = membership.join_next if self._builds_alone else membership.join_present
        self._resume = join(self._status())

    def start_over(self, tracked: Tracked) -> None:
        """Forget all objects: they are built again, for another rank or world size. The state stays in copies."""
        assert self.membership is not None
        self._state.rebuild(tracked, self.next_step)
        self._resume, self._builds_alone = None, True
        self._planned_view = 0
        self.membership.built_for = None
        self.membership.start_over()

    def enter_view(self) -> None:
        """Make sure that all members of a new view have the agreed state; at the top of each step."""
        member = self.membership
        if self._resume is None and member and (self._planned_view > member.view or member.is_assignment_pending):
            self._join(None)
        while self._resume is not None:
            try:
                self._carry_out(self._resume)
            except Exception as error:
                if not self._can_hold(error):
                    raise
                broken = without_frames(error)
            else:
                self._resume = None
                return
            self._join(broken)

    def _carry_out(self, resume: ResumePoint) -> None:
        """Do what the members of the view have agreed on."""
        membership, state = self.membership, self._state
        assert membership is not None and membership.assignment is not None and self._agent is not None
        assignment = membership.assignment
        if assignment.dump and self._has_state:
            self._adopt(resume)
            state.dump(assignment.dump, self.next_step, self.seed, assignment)
            self._page.move(phase=WorkerPhase.ENDED)
            raise SystemExit(0)
        state.prepare(resume, assignment)
        if resume.has_device_groups:
            self.collectives.reconnect(timedelta(seconds=membership.timeout_s))
        if resume.is_start and self.collectives.agree((int(self._builds_alone),))[0]:
            resume = self._start_again(resume)
        state.fill(resume, assignment)
        self._adopt(resume)
        state.protect(resume, assignment, self.seed)
        state.wait_for_device(membership.timeout_s)
        state.complete_join()
        self._page.move(view=assignment.view, step=self.next_step, phase=WorkerPhase.BETWEEN)
        self.report_changes()
        source = self._resumed_from if resume.is_start else ""
        self._agent.tell(ViewJoinedMessage(assignment.view, self.next_step, source))

    def _adopt(self, resume: ResumePoint) -> None:
        """Be where the members of the view have agreed to go on."""
        self._has_state = True
        self.is_fresh_start = resume.is_start
        if resume.is_start:
            self._state.expect_replica_check()
        else:
            self._state.record_join(resume.next_step)
        self.next_step, self._applied_step = resume.next_step, max(self._applied_step, resume.next_step - 1)
        self._seed, self._first_step = resume.seed, resume.first_step
        self._samples.settle(resume.next_step)
        self._keeps_copy = resume.keeps_copy
        self._accumulates |= resume.accumulates
        self._at_barrier = self._builds_alone = False

    def leave_pace(self) -> None:
        """Do not count the time of this step: it is not only a step's."""
        self._is_paced = False

    def _join(self, error: BaseException | None) -> ResumePoint:
        assert self.membership is not None
        self.leave_pace()
        self._resume = self.membership.join_next(self._status(), error, self._before_join)
        self._planned_view = 0
        return self._resume

    def _before_join(self, assignment: Assignment) -> None:
        """Save the state of the last committed step in the agent's memory before newcomers are waited for, if no other
        rank has it. Which step that is, is known: all ranks that may have begun to apply one were of this node."""
        if not assignment.is_last_holder or not self._has_state or not self._state.can_be_saved_alone:
            return
        assert self.membership is not None
        self.membership.settle_device()  # what is undone or copied now must not be written to any more
        if self._at_barrier and assignment.applied_step >= self.next_step:
            raise FinishAlone
        if self.is_stepping:
            self._state.undo(self.next_step)  # and once more, when the script has left the body of the step
        self._state.save_alone(assignment, self.next_step)

    def _status(self) -> RankStatus:
        """Return what this rank says of itself to the members of the next view."""
        return self._state.add_to(
            RankStatus(
                has_state=int(self._has_state),
                next_step=self.next_step,
                applied_step=self._applied_step,
                at_barrier=int(self._at_barrier),
                seed=self._seed if self._seed is not None else torch.initial_seed() & (2**63 - 1),
                first_step=self._first_step,
                keeps_copy=int(self._keeps_copy),
                total=self.total,
                accumulates=int(self._accumulates),
            )
        )

    def _can_hold(self, error: BaseException) -> bool:
        return self.membership is not None and self.membership.can_hold(error)

    # --- a step

    def remember(self) -> None:
        """Save what may change, before a step is handed to the script: its attempts begin with the state as it is."""
        self._state.begin_attempts(self.next_step)
        self.transaction.remember()
        # What the script draws before its `with` is repeated with the step, and drawn by a newcomer too.
        set_generators(between_key(self.seed, self.next_step, self._own_slot, self.stage))

    def leave_outside(self) -> bool:
        """Check what code outside of `with step:` has changed, when the script comes back for the next step. Return
        whether the last attempt was aborted: then nothing that this code changed stays."""
        if not self.transaction.is_aborted:
            self._state.check_outside()
        self.transaction.leave_outside()
        return self.transaction.is_aborted

    def begin_step(self) -> None:
        """Begin an attempt of the next step."""
        number = self.next_step
        began_ns = time.monotonic_ns()
        if self._is_paced:
            self._page.set(last_ns=began_ns - self._step_began_ns, made=self._page.get("made") + 1)
        self._step_began_ns, self._is_paced = began_ns, True
        self._page.move(step=number, phase=WorkerPhase.BODY, collectives=0)
        self._samples.forget()
        if self._agent is not None:
            for skipped in self._samples.new_skips(self._state.audited()):
                self._agent.tell(skipped)
        self.transaction.keeps_copy = self._keeps_copy
        self.guards.begin()
        self.transaction.begin()
        self.set_generators(number)

    def set_generators(self, step: int, slot: int | None = None) -> None:
        """Set the generators for a slot of a step, or for what is drawn outside of slots: on each rank other numbers,
        on ranks that are given the same batches the same."""
        set_generators(slot_key(self.seed, step, self._own_slot if slot is None else slot, self.stage))

    @property
    def _own_slot(self) -> int:
        """The number of what this rank draws outside of slots: its rank, or the coordinate of its batches."""
        rank, size = self.collectives.rank(), self.collectives.world_size()
        return rank if self.coordinates is None else self.coordinates.of(rank, size)

    def before_update(self, optimizer: Any, *, computes: bool = False) -> None:
        """Commit the step, or copy the state, before an optimizer changes its first parameter. `computes`: it is given
        a closure, by which it makes its gradients itself."""
        self._state.before_update(optimizer)
        is_first = self.is_stepping and not self.transaction.has_updated
        if self.transaction.begin_update(optimizer if self.membership is not None else None, computes=computes):
            self._commit()
        elif is_first and self.membership is not None:
            self._state.align_buffers()
        self.transaction.updating()

    def end_step(self, error: BaseException | None) -> bool:
        """Commit the step, or join the next view. Return whether the step is to be repeated. Raises what cannot be
        repaired."""
        try:
            if error is None:
                if self.transaction.end_body():
                    self._commit()
                self.transaction.close()
                self._finish_step()
                return False
        except RepeatStep:
            self._repeat()
            return True
        if isinstance(error, RepeatStep):
            self._repeat()
            return True
        if self.transaction.is_past_repair or not self._can_hold(error):
            self._page.move(phase=WorkerPhase.ENDED)
            return False
        self._join(without_frames(error))
        self._repeat()
        return True

    def _repeat(self) -> None:
        self._at_barrier = False
        self._samples.settle(self.next_step)
        self._state.undo(self.next_step)

    def _finish_step(self) -> None:
        self.next_step += 1
        self._page.move(phase=WorkerPhase.BETWEEN)
        self._state.finish_step()
        if self.membership is None or self._agent is None:
            return
        for report in self._state.stream_reports(self.membership.view, self.next_step - 1):
            self._agent.tell(report)
        is_joined = self._resume is None and not self.membership.is_assignment_pending
        if is_joined and self._committed_view != self.membership.view:
            self._committed_view = self.membership.view
            self._agent.tell(StepCommittedMessage(self.membership.view, self.next_step - 1))

    def distrust_snapshots(self, after: int) -> None:
        """Do not restore this rank's state of steps after this one: it may have been wrong since."""
        self._state.distrust_snapshots(after)

    def _commit(self) -> None:
        """Wait until the step is committed. Raises RepeatStep if it will not be."""
        with self.transaction.committing():
            self._pass_barrier()

    def _pass_barrier(self) -> None:
        if self.membership is None:
            self.guards.before_commit(self._state.shard_map)
            self._complete_commit()
            return
        self._at_barrier = True
        self._page.move(phase=WorkerPhase.BARRIER)
        rank, world_size = self.collectives.rank(), self.collectives.world_size()
        self._samples.write(self.membership.view, rank, world_size, self.next_step)
        try:
            self._vote()
        except Exception as error:
            if not self._can_hold(error):
                raise
            broken = without_frames(error)
        else:
            self._complete_commit()
            return
        try:
            resume = self._join(broken)
        except FinishAlone:
            # A rank that died had begun to apply it; the next view is joined before the next step.
            self._complete_commit()
            return
        if resume.next_step != self.next_step + 1:
            raise RepeatStep
        if not self.transaction.is_open:
            raise StateConflictError(
                f"step {self.next_step} is committed, but was undone here: no rank was known to apply it"
            )
        self._complete_commit()

    def _vote(self) -> None:
        """Make the exchanges of a commit, the last of which is the barrier."""
        state, membership, transaction = self._state, self.membership, self.transaction
        assert self._agent is not None and membership is not None and membership.assignment is not None
        # First: what follows reads from the device, and would wait forever for one that hangs.
        state.wait_for_device(membership.timeout_s)
        self.guards.before_commit(state.shard_map)
        if self._accumulates:  # else ranks that do not agree on it would wait in different exchanges
            leaves = int(transaction.leaves_gradients)
            most, negative_least = self.collectives.agree((leaves, -leaves))
            if most != -negative_least:
                raise other_updates(self.next_step)
        if state.prepare_commit(self.next_step, membership.assignment):
            self.report_changes()
        state.send_replicas(self.next_step + 1)
        state.wait_for_device(membership.timeout_s)
        data_mark, values_mark = mark_of(state.audited().values()), state.values_mark
        update_mark = state.update_mark
        vote = CommitVote(
            step=self.next_step,
            negative_step=-self.next_step,
            newest_view=self._agent.newest_view,
            saw_tail=int(transaction.saw_tail),
            is_copy_dear=int(transaction.is_copy_dear),
            data_mark=data_mark,
            negative_data_mark=-data_mark,
            values_mark=values_mark,
            negative_values_mark=-values_mark,
            update_mark=update_mark,
            negative_update_mark=-update_mark,
            wants_replica_check=int(state.replica_check_due),
            loss=loss_mark(self.collectives.rank(), self.logged),
        )
        answer, snapshot_votes = vote.agree(state.snapshot_vote(self.next_step), self.collectives)
        state.check_replicas(answer.wants_replica_check)
        self._planned_view = answer.newest_view
        if LOSS not in self.logged and (loss := loss_of(answer.loss)) is not None:
            self._page.set_loss(loss)
        state.snapshot_agreed(self.next_step, snapshot_votes)
        is_trial = self.next_step + 1 < self._first_step + TRIAL_STEPS
        is_trial |= answer.wants_replica_check == Due.FIRST_STEPS  # what is compared is the state after the update
        # What a rank has for itself may change until the end of the step: only then can it be copied to another.
        self._keeps_copy = bool(answer.saw_tail) or not answer.is_copy_dear or is_trial or state.copies_at_end

    def _complete_commit(self) -> None:
        """Record that the step will not be undone from here on."""
        self._applied_step = self.next_step
        self._accumulates |= self.transaction.leaves_gradients
        self._page.move(applied_step=self.next_step)
        self._samples.settle(self.next_step + 1)
        self._at_barrier = False
        self._state.complete_commit()

    # --- the end

    def close(self) -> None:
        """Wait behind the last step until all ranks have committed it."""
        while self.membership is not None and self._agent is not None:
            broken: BaseException | None = None
            try:
                self._state.wait_for_device(self.membership.timeout_s)
                self._state.check_at_end()
                _, newest_view = self.collectives.agree((self.next_step, self._agent.newest_view))
                if newest_view <= self.membership.view:
                    break  # else a rank waits in a view that was planned: it is met once more, and ends with us
            except Exception as error:
                if not self._can_hold(error):
                    raise
                broken = without_frames(error)
            self._join(broken)
            self.enter_view()
        self.leave()

    def leave(self) -> None:
        """End the training: what the script does from now on is not repaired."""
        self._state.end(self.next_step)
        self._page.move(phase=WorkerPhase.ENDED)
        if self._agent is not None and self.membership is not None:
            self._agent.tell(TrainingClosedMessage(self.membership.view, self.next_step))

    # --- small things

    def tell(self, message: FromWorker) -> None:
        """Send a message to the agent, if there is one."""
        if self._agent is not None:
            self._agent.tell(message)

    def check_outside(self) -> None:
        """Raise where ranks cannot meet between two steps: replacements wait for the state, and run no such code."""
        if self.is_outside and self._resume is not None and not self.transaction.is_aborted:
            raise HoldfastError(
                "a worker was replaced in the last step, so that not all ranks come to this collective between two"
                " steps: move it into `with step:`, where it is repeated"
            )

    def _on_collective(self) -> None:
        if self.drawing and self.membership is not None and self.collectives.world_size() > 1:
            refuse_collective_of(self.drawing)
        if self.is_outside and self.membership is not None:
            warn_of_collective()
            self.check_outside()
        if self._page.get("collectives") == 0 and self.is_stepping:
            self._page.set(own_ns=time.monotonic_ns() - self._step_began_ns)
        self._page.move(collectives=self._page.get("collectives") + 1)
        if self._state.transaction is not None:
            self._state.transaction.notice_collective()

    def report_changes(self) -> None:
        """Tell the agent what kind of state we have, if that has changed."""
        if self._reported is None or self._agent is None:
            return
        if (info := self._state.session_info()) != self._reported:
            self._reported = info
            self._agent.tell(SessionRevisedMessage(info))

    def _describe(self) -> tuple[dict[str, float], dict[str, str]]:
        """Return, for a checkpoint's manifest, what was logged last, and the positions of the loaders."""
        return self.logged, {**self._state.positions(), "generators": GENERATORS}
