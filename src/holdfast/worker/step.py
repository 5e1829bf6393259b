"""One step, as the script sees it: `with step:` around everything from the batch to the update."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from holdfast.data.batch_source import Weight
from holdfast.errors import ScriptError

if TYPE_CHECKING:
    from holdfast.worker.job import Job


class Addend(NamedTuple):
    """A number that `step.add` was given."""

    slot: int
    name: str
    number: float


class StepRecords(NamedTuple):
    """What a step was told by its script."""

    values: dict[str, float]
    callbacks: list[Callable[[], object]]
    added: list[Addend]


class Step:
    """Made by `job.steps(...)`. A step that is repeated is a new object with the same number."""

    def __init__(self, job: Job, number: int, attempt: int) -> None:
        self._job = job
        self.number = number
        self.attempt = attempt
        """0, and one more for each time it is repeated."""
        self._scale = 1.0
        self.values: dict[str, float] = {}
        self.is_entered = False
        self.is_asked = False
        """Whether the script has looked at `is_committed`."""
        self._is_committed = False
        self._is_inside = False
        self._callbacks: list[Callable[[], object]] = []
        self._drawn: set[int] = set()
        """id() of the sources that batches were drawn from."""
        self._added: list[Addend] = []
        self._slot = -1
        """The slot of the batch handed out last; -1 before the first."""
        self._keeping_loop: FrameType | None = None
        """Where the loop is over micro-batches that are to be kept."""
        self._has_kept = False
        """Whether there was such a loop."""

    def __enter__(self) -> Step:
        if self.is_entered:
            raise ScriptError("a step is entered once: `for step in job.steps(n): with step: …`")
        self.is_entered = self._is_inside = True
        self._job._begin_step(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._is_inside = False
        return self._job._end_step(self, error)

    @property
    def is_committed(self) -> bool:
        """Whether the step is committed and will not be repeated. For code after the `with`, which runs once per
        attempt."""
        self.is_asked = True
        return self._is_committed

    def after_commit(self, function: Callable[[], object]) -> None:
        """Call the function once, as soon as this step is committed: for what the outside sees, such as a line in a log
        or an upload. Several are called in order. An attempt that is aborted takes its functions with it."""
        if not self._is_inside:
            raise ScriptError("step.after_commit is called inside `with step:`; behind it, ask `if step.is_committed:`")
        self._callbacks.append(function)

    def _committed(self) -> None:
        self._is_committed = True
        callbacks, self._callbacks = self._callbacks, []
        for function in callbacks:
            function()

    def batches(self, data: Iterable[Any], *, weight: Weight | None = None, keep: bool = False) -> Iterator[Any]:
        """This rank's batches of the step: one for each of its slots from an hf.Loader that has `slots`, else one.

        `weight` says how much a batch counts in the mean over the global batch, where that is not one over samples:
        `weight=lambda batch: (batch["targets"] != -100).sum()`, with losses that are means over a batch's tokens.

        With `keep=True` a fault costs the ranks that survive it no batch that they have finished: the step is repeated
        without those. The body of the loop must leave nothing behind but gradients, tracked state and what this step
        was told: add numbers up with `step.add`. See docs/recovery.md.
        """
        self._keeping_loop = sys._getframe(1) if keep else None
        try:
            yield from self._job._batches(self, data, weight)
        finally:
            self._keeping_loop = None  # it would keep the script's variables

    @property
    def loss_scale(self) -> float:
        """The factor of the loss of the batch handed out last, which `step.backward` applies: for a loss function that
        is not followed by it, such as that of a pipeline's schedule."""
        return self._scale

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of the batch handed out last, weighted so that the average over ranks is the mean over the
        global batch, whatever the split."""
        self._job._record_loss(loss)
        return loss * self._scale if self._scale != 1.0 else loss

    def backward(self, loss: torch.Tensor) -> None:
        """Run `step.scale(loss).backward()`. With a GradScaler: `scaler.scale(step.scale(loss)).backward()`."""
        self.scale(loss).backward()  # type: ignore[no-untyped-call]

    def log(self, **values: Any) -> None:
        """Record numbers of this step on this rank. They count once the step is committed, and once only."""
        numbers = {name: _number_of(value) for name, value in values.items()}
        if not self.is_entered or self._is_inside:
            self.values |= numbers
        elif self._is_committed:
            self._job._log_late(self, numbers)  # of an aborted attempt, nothing counts

    def add(self, **values: Any) -> None:
        """Add numbers up over the batches of this step on this rank; `sums` has them. They are logged as well."""
        self._added += [Addend(self._slot, name, _number_of(value)) for name, value in values.items()]

    @property
    def sums(self) -> dict[str, float]:
        """What `add` was given in this step, by name. The sum is exact, so that its order does not matter."""
        names = dict.fromkeys(one.name for one in self._added)
        return {name: _sum([one.number for one in self._added if one.name == name]) for name in names}

    def _records(self) -> StepRecords:
        return StepRecords(dict(self.values), list(self._callbacks), list(self._added))

    def _restore(self, records: StepRecords) -> None:
        self.values, self._callbacks = dict(records.values), list(records.callbacks)
        self._added = list(records.added)

    def _draws_first(self, data: Any) -> bool:
        is_first = id(data) not in self._drawn
        self._drawn.add(id(data))
        return is_first

    def _uses(self, scale: float) -> None:
        self._scale = scale


def _sum(numbers: list[float]) -> float:
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)


def _number_of(value: Any) -> float:
    return float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
