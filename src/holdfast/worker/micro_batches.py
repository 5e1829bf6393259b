"""A fault costs a micro-batch, not a step: `for … in step.batches(data, keep=True)`.

A step that adds up the gradients of several micro-batches communicates only in the last one. Until then what a rank has
computed is its own, and depends on nothing but the parameters, which a broken step has not changed. So when another
rank dies, a survivor need not compute it again.

**What happens.** Python cannot enter the body of a `with` in its middle, so a broken step is repeated from its top, as
ever: undone, in the next view. But when its loop comes to `step.batches`, a survivor is put to where it was after the
last micro-batch that it had finished, and is given only the batches that are left. A replacement has nothing of the
step and is given all of them. Each rank adds the same gradients in the same order as without a fault, so the bits are
the same.

                        1   2   3   …  12  13  14  15  16 | all-reduce, barrier, update
    survivor, attempt 1 x   x   x      x   view over
              attempt 2                    x   x   x   x  |
    replacement         x   x   x      x   x   x   x   x  |

**Where a fault is noticed.** A micro-batch that does not communicate cannot break. Between two of them the loop asks
whether the view is over and leaves the body if it is: then all that is finished is in the gradients, and only then is
it copied. So until the last micro-batch nothing is paid. The last one does communicate: while DDP's backward runs, the
gradients of some buckets are sums of one rank and those of others sums of all, and no more can be said of them after an
error. So they are copied right before it: one copy of the gradients a step, which is the price of keeping. To reduce
behind the last backward instead would need no copy and lose the overlap of the two. A fault in the last micro-batch, or
between it and the barrier, has the survivors compute that one again.

The last micro-batch is therefore always run again, which has a use: names that each round of the loop sets have the
values of the last round behind it, as without a fault.

**What is put back with the gradients**: buffers (BatchNorm's statistics), tracked meters, scalers and plain values,
flags, what `step.add`, `step.log` and `step.after_commit` were given in the loop, and the losses that `job.watch` has
seen. Generators need no care: each micro-batch sets them from (seed, step, slot). All samples are handed to the digests
again, without computing, so that the journal's record of them stays exact.

**What cannot be put back** is what a round leaves in the script's own variables: `total += loss.item()` would miss the
micro-batches that are not run again. That is why it must be asked for (`keep=True`). A loop that visibly carries
something from round to round is refused (loop_bodies.py), and `step.add` adds numbers up instead.

**When nothing is kept**, and the step is repeated as a whole, as without `keep`:

    the model communicates in its forward (FSDP2, HSDP, SyncBatchNorm): the replacement's forward needs the survivors
    the rounds made a collective of their own before the last one, for the same reason
    DDP was built with static_graph or find_unused_parameters: its reducer remembers which parameters were used
    parameters were changed, or an update was begun
    the rank, the number of ranks or the slots of the rank are others now
    the script raised the error itself (hf.RetryableError), or a number was suspicious (job.watch): then it is to be
    computed again
    all ranks start from a checkpoint

Each rank decides for itself: as finished micro-batches do not communicate, the others need not know.

With `reduction="canonical"` the gradients of finished slots are in a tree of sums that an exchange only reads
(parallel/canonical.py), so no copy is made. A subtree that lies inside the slots that the rank has in a world of
another size is kept there too, if the rounds have left nothing but gradients and what `step.add` was given.

DDP broadcasts rank 0's buffers in the first forward of a step. A survivor that leaves this forward out would leave the
replacement alone with the broadcast, so it is not made here: the commit of the step before has done the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from holdfast.data.batch_source import BatchSource
from holdfast.errors import ScriptError
from holdfast.state.step_backup import StepBackup
from holdfast.state.tracked import Tracked
from holdfast.state.tree import flatten
from holdfast.torch_compat import copy_all
from holdfast.worker import loop_bodies
from holdfast.worker.collectives import groups
from holdfast.worker.membership import RETRYABLE
from holdfast.worker.parallel.models import leave_buffers, why_tied
from holdfast.worker.script_checks import warn_once

if TYPE_CHECKING:
    from holdfast.worker.engine import Engine
    from holdfast.worker.step import Addend, Step, StepRecords


class Share(NamedTuple):
    """What a rank's micro-batches of a step follow from."""

    step: int
    data: int
    """id() of the loader."""
    rank: int
    world_size: int
    weights: tuple[float, ...] | None


@dataclass
class FinishedMicroBatches:
    """What the finished micro-batches of a step have left behind, beside their gradients."""

    share: Share
    count: int
    slots: frozenset[int]
    backup: StepBackup
    records: StepRecords
    losses: list[torch.Tensor] = field(default_factory=list)
    added: list[Addend] = field(default_factory=list)
    """What `step.add` was given; with a tree, in the last micro-batch too."""
    can_be_divided: bool = False
    """Whether some of them can be kept without the others: they have left gradients and addends only."""


class MicroBatches:
    """The micro-batches of the step under way. Made for one set of tracked objects."""

    def __init__(self, engine: Engine, tracked: Tracked) -> None:
        self._engine, self._tracked = engine, tracked
        self._gradients = GradientCopy()
        self._finished: FinishedMicroBatches | None = None
        self._view = -1
        """The view in which the attempt under way has begun."""
        self._checked: set[tuple[str, int]] = set()
        """Loops of the script that carry nothing, by file and line."""

    def begin_step(self) -> None:
        """Begin an attempt of a step."""
        self._view = self._view_now

    def loop(self, step: Step, data: Any, *, has_tree: bool = False) -> MicroBatchLoop:
        """Begin a loop. Micro-batches are kept if the script wants it, of one loop a step. `has_tree`: the canonical
        reduction has the gradients."""
        frame, modules = step._keeping_loop, list(self._tracked.modules().values())
        if frame is None or step._has_kept or self._engine.membership is None or not self._can_keep(modules):
            return MicroBatchLoop(self, step, data)
        self._refuse_carried(step, frame)
        step._has_kept = True
        if not has_tree:
            leave_buffers(modules)
        found = self._fitting(step, data, has_tree)
        return MicroBatchLoop(self, step, data, is_keeping=True, has_tree=has_tree, found=found)

    def end_attempt(self, error: BaseException | None) -> None:
        """Decide, for a step that is to be repeated, whether finished micro-batches are kept: not if the script wanted
        it, or the numbers were suspicious."""
        is_own = isinstance(error, RETRYABLE) and not groups.is_communication_error(error)
        if is_own or self._view == self._view_now:
            self.forget()

    def forget(self) -> None:
        """Keep nothing: the step is committed, or repeated as a whole."""
        self._finished = None

    @property
    def _view_now(self) -> int:
        return self._engine.membership.view if self._engine.membership is not None else 0

    def _can_keep(self, modules: list[torch.nn.Module]) -> bool:
        if why := why_tied(modules):
            warn_once("keep", f"keep=True has no effect: {why}, so a broken step is repeated as a whole")
        return not why

    def _refuse_carried(self, step: Step, frame: FrameType) -> None:
        if (place := (frame.f_code.co_filename, frame.f_lineno)) in self._checked:
            return
        kept = {id(thing) for thing in (step, self._tracked, *self._tracked.objects().values())}
        if why := loop_bodies.carried(frame, lambda thing: id(thing) in kept or isinstance(thing, ModuleType | type)):
            raise ScriptError(
                f"the loop over step.batches(…, keep=True) at {place[0]}:{place[1]} cannot leave out rounds that were"
                f" finished before a fault: {why}. Add numbers up with step.add(name=value), track what changes, or"
                " leave out keep=True"
            )
        self._checked.add(place)

    def _fitting(self, step: Step, data: Any, has_tree: bool) -> FinishedMicroBatches | None:
        """Return what is kept for these micro-batches, if there is anything."""
        found, share = self._finished, share_of(step, data)
        if found is None or found.share[:2] != share[:2] or self._engine.is_fresh_start:
            return None
        return found if found.share == share or (has_tree and found.can_be_divided) else None

    # --- for the loop

    @property
    def finished(self) -> FinishedMicroBatches | None:
        """What is kept now."""
        return self._finished

    @property
    def has_losses(self) -> bool:
        """Whether a loss is watched."""
        return bool(self._engine.guards.losses())

    @property
    def is_over(self) -> bool:
        """Whether this attempt cannot be committed any more."""
        return self._engine.membership is not None and groups.is_revoked()

    @property
    def is_bound(self) -> bool:
        """Whether the attempt cannot be left here: its step is committed."""
        return not self._engine.is_stepping or self._engine.transaction.is_committed

    @property
    def has_changed_state(self) -> bool:
        """Whether anything was changed that micro-batches depend on."""
        transaction = self._engine.transaction
        return transaction.has_updated or transaction.has_changed_parameters

    def backup(self) -> StepBackup:
        """Return a copy of what rounds change, beside gradients. The loaders go on by themselves."""
        saved = self._tracked.volatile()
        return replace(saved, others=[one for one in saved.others if not isinstance(one[0], BatchSource)])

    def keep(self, finished: FinishedMicroBatches, *, with_gradients: bool) -> None:
        """Keep what is finished by now."""
        finished.losses = self._engine.guards.losses()
        self._finished = None
        if with_gradients:
            self._gradients.take(self._tracked.parameters())
        self._finished = finished

    def put_back(self, finished: FinishedMicroBatches, step: Step, *, with_gradients: bool) -> None:
        """Make everything what it was behind the finished micro-batches."""
        self._tracked.restore_volatile(finished.backup)
        if with_gradients:
            self._gradients.put_back()
        self._engine.guards.put_back(finished.losses)
        step._restore(finished.records)

    def collectives(self) -> int:
        """Return how many collectives the attempt has begun."""
        return self._engine.collectives_begun


class MicroBatchLoop:
    """One loop over the micro-batches of a step. Each is announced by `begins` before it is handed out."""

    def __init__(
        self,
        owner: MicroBatches,
        step: Step,
        data: Any,
        *,
        is_keeping: bool = False,
        has_tree: bool = False,
        found: FinishedMicroBatches | None = None,
    ) -> None:
        self._owner, self._step, self._data = owner, step, data
        self.is_keeping, self._has_tree, self.found = is_keeping, has_tree, found
        """What is kept of an attempt before."""
        self._share = share_of(step, data) if is_keeping else None
        self._is_divided = found is not None and found.share != self._share
        """Whether that was of other slots."""
        self._passed = found.count if found is not None and not self._is_divided else 0
        """How many micro-batches are not run again."""
        self._number = 0
        self._slots: list[int] = []
        self._collectives: int | None = None
        self._start = owner.backup() if is_keeping and has_tree else None
        self._start_records = step._records()

    def begins(self, *, is_covered: bool = False) -> bool:
        """Return whether the next batch is to be handed out: it is not finished. `is_covered`: the tree has its
        gradient. Leaves the step if its view is over."""
        number, slot, is_last = self._number, self._data.slot, self._data.is_last_of_step
        self._number += 1
        self._step._slot = slot
        if number < self._passed:
            assert is_covered or not self._has_tree, "a gradient of a finished micro-batch is not there"
            self._slots.append(slot)
            return False
        if self.found is not None and self._is_divided and is_covered and not is_last:
            self._slots.append(slot)
            self._step._added += [one for one in self.found.added if one.slot == slot]
            return False
        if number and not self._owner.is_bound:
            self._stand_between(number, is_last)
        self._slots.append(slot)
        if self._collectives is None:
            self._collectives = self._owner.collectives()
        return True

    def _stand_between(self, number: int, is_last: bool) -> None:
        """Put back what is finished, or keep it, or leave the step."""
        if self.found is not None and number == self._passed:
            self._owner.put_back(self.found, self._step, with_gradients=not self._has_tree)
        elif self.is_keeping and (is_last or self._owner.is_over):
            self._keep(number)
        elif self._has_tree:
            self._owner.forget()  # the tree has gone on
        if self._owner.is_over:
            groups.check()

    def _keep(self, number: int) -> None:
        """Keep what is finished, if it was this rank's alone to compute."""
        self._owner.forget()
        if self._owner.has_changed_state or self._collectives not in (None, self._owner.collectives()):
            return
        assert self._share is not None
        backup, records = self._owner.backup(), self._step._records()
        finished = FinishedMicroBatches(self._share, number, frozenset(self._slots), backup, records)
        finished.added = records.added
        finished.can_be_divided = self._has_left_nothing(backup)
        self._owner.keep(finished, with_gradients=not self._has_tree)

    def ends(self) -> None:
        """Record that the last micro-batch is finished, too: the tree has its gradient, and alone gives it away."""
        if self._data.world_size == 1:
            self._owner.forget()
        finished = self._owner.finished
        if finished is not None and finished.share == self._share:
            finished.slots |= set(self._slots)
            finished.added = self._step._records().added
            finished.can_be_divided &= self._has_left_nothing(self._owner.backup())

    def _has_left_nothing(self, backup: StepBackup) -> bool:
        """Return whether rounds have left nothing but gradients and what they have added up."""
        if self._start is None or self._step._records()[:2] != self._start_records[:2] or self._owner.has_losses:
            return False
        return is_same(self._start, backup)


def share_of(step: Step, data: Any) -> Share:
    """Return what this rank's micro-batches of a step follow from."""
    return Share(step.number, id(data), data.rank, data.world_size, data.weights)


def is_same(one: StepBackup, other: StepBackup) -> bool:
    """Return whether buffers, tracked objects and flags are the same in both."""
    mine, theirs = ([(id(slot[0]), slot[1], copy) for slot, _, copy in backup.buffers] for backup in (one, other))
    states = [flatten([state for _, state in backup.others]) for backup in (one, other)]
    return (
        [place[:2] for place in mine] == [place[:2] for place in theirs]
        and all(torch.equal(a[2], b[2]) for a, b in zip(mine, theirs, strict=True))
        and states[0].skeleton == states[1].skeleton
        and all(torch.equal(a, b) for a, b in zip(states[0].tensors, states[1].tensors, strict=True))
        and not one.extras
        and one.flags[1] == other.flags[1]
    )


class GradientCopy:
    """A copy of all gradients, in memory that is used again."""

    def __init__(self) -> None:
        self._items: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def take(self, parameters: Iterable[torch.Tensor]) -> None:
        """Copy the gradients as they are."""
        before = {id(parameter): copy for parameter, copy in self._items}
        self._items, pairs = [], list[tuple[torch.Tensor, torch.Tensor]]()
        for parameter in parameters:
            gradient, copy = parameter.grad, before.get(id(parameter))
            if gradient is None:
                copy = None
            elif copy is None or not _fits(copy, gradient):
                copy = gradient.detach().clone()
            else:
                pairs.append((copy, gradient.detach()))
            self._items.append((parameter, copy))
        if pairs:
            with torch.no_grad():
                copy_all([copy for copy, _ in pairs], [gradient for _, gradient in pairs])

    def put_back(self) -> None:
        """Make the gradients what they were. Those that are there stay the tensors they are."""
        with torch.no_grad():
            for parameter, copy in self._items:
                if copy is None:
                    parameter.grad = None
                elif parameter.grad is not None and _fits(parameter.grad, copy):
                    parameter.grad.copy_(copy)
                else:
                    parameter.grad = copy.clone()


def _fits(into: torch.Tensor, source: torch.Tensor) -> bool:
    """Return whether one tensor can hold what the other does, in the same places."""
    return into.layout is source.layout is torch.strided and (into.dtype, into.shape, into.stride(), into.device) == (
        source.dtype,
        source.shape,
        source.stride(),
        source.device,
    )
