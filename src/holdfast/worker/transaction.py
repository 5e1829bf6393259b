"""The step transaction: everything a step changes happens, or nothing of it does.

A step has one moment from which it will never be undone: its barrier, a tiny all-reduce. Where it stands depends on
whether the script communicates after its first optimizer update of the step:

    before the update    nothing communicates after it, so a rank that has passed the barrier can finish alone. No copy
                         of the state is needed: a step that breaks before the barrier has changed no parameter.
    after the body       something does (an average for the log, a second optimizer, an optimizer that communicates, the
                         ring of replicas). A copy of the state from before the update is kept; a step that breaks
                         before the barrier is rolled back to it.

Which of the two a script needs is observed: the first steps of a run keep a copy, and a collective that is seen after
an update, in any later step, on any rank, turns the copy on for the rest of the run. Where the copy costs next to
nothing it is kept anyway: then a step can be repeated whatever broke, and wherever.

What a repeated step finds is what the first attempt found:

    parameters, optimizers     unchanged, or put back from the copy
    buffers, schedulers, …     saved at the start of the step (`Tracked.volatile`), put back
    other changed parameters   (of an averaged model, or clipped in the body) copied at the start, if they were ever
                               seen to change before the update; refused if that is seen for the first time now
    gradients                  None again; zero, where they were kept; an accumulation in flight is put back
    generators                 set at the start from (seed, step, rank): a function, not a state

The start of a step is the moment before it is handed to the script's loop (`remember`): code between there and the
`with` is repeated with it. Code after the `with` is dealt with in outside_steps.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from holdfast.errors import StateError
from holdfast.state.dtensors import local_of
from holdfast.state.param_groups import capture_groups, restore_groups
from holdfast.state.step_backup import SavedGradients, StepBackup
from holdfast.state.tracked import Tracked
from holdfast.torch_compat import version_of
from holdfast.wire.progress_page import ProgressPage, WorkerPhase
from holdfast.worker.carried_gradients import CarriedGradients
from holdfast.worker.outside_steps import OutsideChanges
from holdfast.worker.param_checksums import checksum
from holdfast.worker.silent_updates import SilentUpdates

DEAR_SHARE = 0.005
"""Of a step's time, above which a copy of the state is not made without need."""
TRIAL_STEPS = 2
"""Steps at the start of a run that keep a copy, to see whether the script communicates after its update."""


class Undo(Protocol):
    """The state from before an update."""

    @property
    def cost_s(self) -> float: ...

    def before_update(self) -> None: ...

    def restore(self, with_others: bool = True) -> None: ...

    def release(self) -> None: ...


class StepTransaction:
    """The step under way. The engine commits it, when `begin_update` or `end_body` says so."""

    def __init__(self, tracked: Tracked, page: ProgressPage, undo: Undo) -> None:
        self._tracked, self._page, self._undo = tracked, page, undo
        self._saved: tuple[StepBackup, SavedGradients] | None = None
        self._outside = OutsideChanges(tracked)
        self._carried = CarriedGradients(tracked)
        self._silent = SilentUpdates(tracked)
        self._updating: set[int] = set()
        """id() of the optimizers that have updated in this step."""
        self.is_aborted = False
        """Whether the last attempt was undone."""
        self._updated_before = True
        self.keeps_copy = True
        """Whether the barrier comes after the body."""
        self.is_open = False
        self.is_committed = False
        self._is_committing = False
        self.has_updated = False
        self.leaves_gradients = True
        """Whether the step makes no update, as far as it has come: what it adds to the gradients is then state."""
        self.saw_tail = False
        """Whether a collective followed an update, in this step or one before."""
        self._start: list[tuple[torch.Tensor, int, torch.Tensor | None]] = []
        """The parameters: their version at the start, and a copy of those that change early."""
        self._bits: dict[int, int] = {}  # checksums at the start of a trial step: `.data` leaves versions as they were
        self._early: set[int] = set()
        """id() of the parameters that were seen to change before an update."""
        self._not_copied: list[torch.Tensor] = []
        """Parameters that changed early in this step, and of which there is no copy."""
        self._observed = 0
        self._began_at = 0.0

    @property
    def is_copy_dear(self) -> bool:
        """Return whether the copy takes a noticeable part of the step."""
        return self._undo.cost_s > DEAR_SHARE * (time.monotonic() - self._began_at)

    @property
    def updated_before(self) -> bool:
        """Return whether the last committed step made an update; else gradients are being accumulated over steps."""
        return self._updated_before

    @updated_before.setter
    def updated_before(self, is_so: bool) -> None:
        self._updated_before = is_so

    def undo_with(self, undo: Undo) -> None:
        """Undo updates in another way from the next step on."""
        assert not self.is_open, "a step is under way"
        self._undo = undo

    @property
    def has_changed_parameters(self) -> bool:
        """Return whether parameters are not, or may not be, what they were at the start of the step."""
        return bool(self._early) or any(version_of(tensor) != version for tensor, version, _ in self._start)

    def remember(self) -> None:
        """Save what may change before the step is committed; called before the step is handed to the script."""
        self._saved = (self._tracked.volatile(), self._tracked.gradients(self._updated_before))
        copied = set(self._early)
        self._bits = {}
        self._silent.begin(self._observed < TRIAL_STEPS)
        if self._observed < TRIAL_STEPS:
            self._bits = {id(tensor): checksum([tensor]) for tensor in self._tracked.parameters()}
            copied |= {id(tensor) for tensor in self._tracked.free_parameters()}
        self._start = [
            (tensor, version_of(tensor), local_of(tensor).clone() if id(tensor) in copied else None)
            for tensor in self._tracked.parameters()
        ]
        self._not_copied = []
        self._carried.begin()
        self.is_aborted = False

    def begin(self) -> None:
        """Begin the body."""
        self._began_at = time.monotonic()
        self.is_committed = self.has_updated = False
        self._updating.clear()
        self.is_open = self.leaves_gradients = True
        if not self.keeps_copy:
            self._undo.release()

    def _observe(self) -> None:
        """Find parameters that were changed early, right before the first update, or the barrier."""
        self._observed += 1
        self._note_early()

    def _note_early(self) -> None:
        changed = [(tensor, copy) for tensor, version, copy in self._start if version_of(tensor) != version]
        start = self._start if self._bits else []
        hidden = [
            (one, copy) for one, v, copy in start if version_of(one) == v and self._bits[id(one)] != checksum([one])
        ]
        # Of what was written through `.data`, some may have been taken back by now (SAM): all are copied from then on.
        self._early |= {id(tensor) for tensor, _ in changed} | (set(self._bits) if hidden else set())
        self._not_copied = [tensor for tensor, copy in changed + hidden if copy is None]

    def begin_update(self, optimizer: Any = None, *, computes: bool = False) -> bool:
        """Prepare for an optimizer's update, before it changes a parameter. Return whether the step must be committed
        first, as no copy of the state is kept; `updating` follows. `computes`: the update makes its gradients itself,
        so that those which are there now are not what it applies."""
        if self.is_open and optimizer is not None:
            if not computes:
                self._carried.check(optimizer)
            self._updating.add(id(optimizer))
        if optimizer is None:
            self._silent.drop()
        if not self.is_open or self.has_updated:
            return False
        self.leaves_gradients = False
        self._observe()
        if self.keeps_copy:
            self._undo.before_update()
        return not self.keeps_copy

    def updating(self) -> None:
        """Record that an update has begun."""
        if self.is_open and not self.has_updated:
            self._page.move(phase=WorkerPhase.UPDATE)
            self.has_updated = True

    def notice_collective(self) -> None:
        """Record that a collective of the script begins."""
        if self.is_open and self.has_updated and not self._is_committing:
            self.saw_tail = True

    def end_body(self) -> bool:
        """End the body of the step. Return whether the step must be committed now; `close` follows."""
        self._silent.check(self._updating)
        if not self.has_updated:
            self._observe()
        return not self.is_committed

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Commit the step in this block: it passes the barrier of the step, or raises."""
        self._is_committing = True
        try:
            yield
        finally:
            self._is_committing = False
        self.is_committed = True

    def close(self) -> None:
        """End a step that is committed and complete."""
        self.is_open = False
        self._silent.committed(self.has_updated, self._updated_before)
        self._updated_before = self.has_updated
        self._carried.committed(self._updating)
        self._outside.committed()

    def drop_update(self) -> None:
        """Take back the update of a step that is committed without it: models and optimizers stay what they were. The
        step counts all the same, so schedulers go on, with the learning rates they set, and loaders do."""
        assert self._saved is not None
        optimizers = self._tracked.optimizers().values()
        if self.has_updated:
            groups = [capture_groups(optimizer) for optimizer in optimizers]
            self._undo.restore(with_others=False)
            for optimizer, saved in zip(optimizers, groups, strict=True):
                restore_groups(optimizer, saved)
        self._tracked.restore_buffers(self._saved[0])
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)

    def undo(self) -> None:
        """Put back all that a step has changed: it is to be repeated."""
        self.is_open = False
        if self.has_updated:
            assert not self.is_committed, "a committed step is not undone"
            self._undo.restore()
        else:
            self._note_early()
        if self._not_copied:
            name = self._tracked.parameter_names().get(id(self._not_copied[0]), "a parameter of no optimizer")
            raise StateError(
                f"{name} was changed in the body of the step before the optimizer's update, for the first time, and the"
                " step broke: it cannot be undone. Change it after the update"
            )
        self._restore_saved()
        with torch.no_grad():
            for tensor, _, copy in self._start:
                if copy is not None:
                    local_of(tensor).copy_(copy)
        self.is_aborted = True
        self._outside.undone()

    def leave_outside(self) -> None:
        """Deal with the script's code after the `with`, which has run. What it changed after an aborted attempt is put
        back."""
        if self.is_aborted:
            self._outside.put_back()
            self._restore_saved()
        else:
            self._outside.observe()

    def _restore_saved(self) -> None:
        assert self._saved is not None
        volatile, gradients = self._saved
        self._tracked.restore_volatile(volatile)
        self._tracked.restore_gradients(gradients)

    @property
    def is_past_repair(self) -> bool:
        """Whether the step is committed and broke all the same, in what follows the update: it can be neither finished
        nor undone here."""
        return self.is_open and self.is_committed
