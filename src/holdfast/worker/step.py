"""One step, as the script sees it: `with step:` around everything from the batch to the update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from holdfast.data.batch_source import Weight
from holdfast.errors import ScriptError

if TYPE_CHECKING:
    from holdfast.worker.job import Job


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

    def batches(self, data: Iterable[Any], *, weight: Weight | None = None) -> Iterator[Any]:
        """This rank's batches of the step: one for each of its slots from an hf.Loader that has `slots`, else one.

        `weight` says how much a batch counts in the mean over the global batch, where that is not one over samples:
        `weight=lambda batch: (batch["targets"] != -100).sum()`, with losses that are means over a batch's tokens.
        """
        yield from self._job._batches(self, data, weight)

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
        numbers = {
            name: float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
            for name, value in values.items()
        }
        if not self.is_entered or self._is_inside:
            self.values |= numbers
        elif self._is_committed:
            self._job._log_late(self, numbers)  # of an aborted attempt, nothing counts

    def _draws_first(self, data: Any) -> bool:
        is_first = id(data) not in self._drawn
        self._drawn.add(id(data))
        return is_first

    def _uses(self, scale: float) -> None:
        self._scale = scale
