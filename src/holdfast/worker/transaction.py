"""The step transaction: everything a step changes happens, or nothing of it does.

A step has one moment from which it will never be undone: its barrier, a tiny all-reduce. Where it stands depends on
whether the script communicates after its first optimizer update of the step:

    before the update    nothing communicates after it, so whoever has passed the barrier can finish alone. No copy of
                         the state is needed: a step that breaks before the barrier has changed no parameter.
    after the body       something does (an average for the log, a second optimizer, an optimizer that communicates, the
                         ring of replicas). A copy of the state from before the update is kept; a step that breaks
                         before the barrier is rolled back to it.

Which of the two a script needs is observed: the first steps of a run keep a copy, and a collective that is seen after
an update, in any later step, on any rank, turns the copy on for the rest of the run. Where the copy costs next to
nothing it is kept anyway: then a step can be repeated whatever broke, and wherever.

What a repeated step finds is what the first attempt found:

    parameters, optimizers     unchanged, or put back from the copy
    buffers, schedulers, …     saved at the start of the step (`Tracked.volatile`), put back
    modules of no optimizer    (an averaged model, a model updated by hand) copied at the start, if they were ever seen
                               to change before the barrier
    gradients                  None again; zero, where they were kept; an accumulation in flight is put back
    generators                 set at the start from (seed, step, rank): a function, not a state
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from holdfast.state.optimizers import group_values, set_group_values
from holdfast.state.sharded import local_of
from holdfast.state.snapshot import Snapshot
from holdfast.state.tracked import Tracked
from holdfast.state.volatile import SavedGradients, Volatile
from holdfast.wire.progress import Phase, ProgressPage

DEAR_SHARE = 0.005
"""Of a step's time, above which a copy of the state is not made without need."""
TRIAL_STEPS = 2
"""Steps at the start of a run that keep a copy, to see whether the script communicates after its update."""


class RepeatStep(BaseException):
    """Leaves the body of a step that is to be repeated. Not an Exception: user code must not swallow it."""


class Undo(Protocol):
    """The state from before an update."""

    cost_s: float

    def before_update(self) -> None: ...

    def restore(self, with_others: bool = True) -> None: ...


class Copy:
    """The state from before an update, copied at each of them."""

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._snapshot: Snapshot | None = None
        self.cost_s = 0.0
        """What the last copy took."""

    def before_update(self) -> None:
        began_at = time.monotonic()
        flat = self._tracked.state()
        if self._snapshot is None:
            self._snapshot = Snapshot(flat)
        self._snapshot.take(flat, 0)
        self.cost_s = time.monotonic() - began_at

    def restore(self, with_others: bool = True) -> None:
        assert self._snapshot is not None, "no update was begun"
        self._snapshot.restore_into(self._tracked, with_others)


class Transaction:
    """The step under way. `barrier` returns when the step is committed, or raises RepeatStep."""

    def __init__(self, tracked: Tracked, page: ProgressPage, undo: Undo, barrier: Callable[[], None]) -> None:
        self._tracked, self._page, self._undo, self._barrier = tracked, page, undo, barrier
        self._saved: tuple[Volatile, SavedGradients] | None = None
        self._updated_before = True
        self.keeps_copy = True
        """Whether the barrier comes after the body."""
        self.is_open = False
        self.is_committed = False
        self._is_committing = False
        self.has_updated = False
        self.saw_tail = False
        """Whether a collective followed an update, in this step or one before."""
        self._free: list[tuple[torch.Tensor, int, torch.Tensor | None]] = []
        """Tensors of modules that no optimizer owns: their version at the start, and a copy if they change early."""
        self._changes_early = False
        self._observed = 0
        self._began_at = 0.0

    @property
    def is_copy_dear(self) -> bool:
        """Whether the copy takes a noticeable part of the step."""
        return self._undo.cost_s > DEAR_SHARE * (time.monotonic() - self._began_at)

    @property
    def updated_before(self) -> bool:
        """Whether the last committed step made an update; else gradients are being accumulated over steps."""
        return self._updated_before

    @updated_before.setter
    def updated_before(self, is_so: bool) -> None:
        self._updated_before = is_so

    def begin(self) -> None:
        """Remember what the body may change before it is committed."""
        self._began_at = time.monotonic()
        self._saved = (self._tracked.volatile(), self._tracked.gradients(self._updated_before))
        is_copied = self._changes_early or self._observed < TRIAL_STEPS
        self._free = [
            (tensor, tensor._version, local_of(tensor).clone() if is_copied else None)
            for tensor in self._tracked.free_parameters()
        ]
        self.is_committed = self.has_updated = False
        self.is_open = True

    def _observe(self) -> None:
        """Right before the first update, or the barrier."""
        self._observed += 1
        self._changes_early |= any(tensor._version != version for tensor, version, _ in self._free)

    def before_update(self, *_: Any) -> None:
        """The optimizers' pre-hook."""
        if not self.is_open or self.has_updated:
            return
        self._observe()
        if self.keeps_copy:
            self._undo.before_update()
        else:
            self._commit()
        self._page.move(phase=Phase.UPDATE)
        self.has_updated = True

    def notice_collective(self) -> None:
        """Called at the start of each of the script's collectives."""
        if self.is_open and self.has_updated and not self._is_committing:
            self.saw_tail = True

    def finish(self) -> None:
        """The body is through."""
        if not self.has_updated:
            self._observe()
        if not self.is_committed:
            self._commit()
        self.is_open = False
        self._updated_before = self.has_updated

    def drop_update(self) -> None:
        """The step is to be committed without its update: models and optimizers stay what they were. It counts all the
        same, so schedulers go on, with the learning rates they set, and loaders do."""
        assert self._saved is not None
        optimizers = self._tracked.optimizers().values()
        if self.has_updated:
            settings = [group_values(optimizer) for optimizer in optimizers]
            self._undo.restore(with_others=False)
            for optimizer, values in zip(optimizers, settings, strict=True):
                set_group_values(optimizer, values)
        self._tracked.restore_buffers(self._saved[0])
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)

    def undo(self) -> None:
        """The step is to be repeated: all that it changed is put back."""
        self.is_open = False
        if self.has_updated:
            assert not self.is_committed, "a committed step is not undone"
            self._undo.restore()
        assert self._saved is not None
        volatile, gradients = self._saved
        self._tracked.restore_volatile(volatile)
        self._tracked.restore_gradients(gradients)
        with torch.no_grad():
            for tensor, _, copy in self._free:
                if copy is not None:
                    local_of(tensor).copy_(copy)

    @property
    def is_past_repair(self) -> bool:
        """The step is committed and broke all the same, in what follows the update: it can be neither finished nor
        undone here."""
        return self.is_open and self.is_committed

    def _commit(self) -> None:
        self._is_committing = True
        try:
            self._barrier()
        finally:
            self._is_committing = False
        self.is_committed = True
