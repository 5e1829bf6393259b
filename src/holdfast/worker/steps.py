"""One step, as the script sees it: `with step:` around everything from the batch to the update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from holdfast.data.handing import Weight
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.worker.session import Job


class Step:
    """Made by `job.steps(...)`. A step that is repeated is a new object with the same number."""

    def __init__(self, job: Job, number: int, attempt: int) -> None:
        self._job = job
        self.number = number
        self.attempt = attempt
        """0, and one more for each time it is repeated."""
        self._scale = 1.0
        self.values: dict[str, float] = {}
        self.is_committed = False
        """Whether it is through: it will not be repeated."""
        self.is_entered = False

    def __enter__(self) -> Step:
        if self.is_entered:
            raise UsageError("a step is entered once: `for step in job.steps(n): with step: …`")
        self.is_entered = True
        self._job._begin_step(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._job._end_step(self, error)

    def batches(self, data: Iterable[Any], *, weight: Weight | None = None) -> Iterator[Any]:
        """This rank's batches of the step: one for each of its slots from an hf.Loader that has `slots`, else one.

        `weight` says how much a batch counts in the mean over the global batch, where that is not one over samples:
        `weight=lambda batch: (batch["targets"] != -100).sum()`, with losses that are means over a batch's tokens.
        """
        yield from self._job._batches(self, data, weight)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of the batch handed out last, weighted so that the average over ranks is the mean over the global
        batch, whatever the split."""
        return loss * self._scale if self._scale != 1.0 else loss

    def backward(self, loss: torch.Tensor) -> None:
        """`step.scale(loss).backward()`. With a GradScaler: `scaler.scale(step.scale(loss)).backward()`."""
        self.scale(loss).backward()  # type: ignore[no-untyped-call]

    def log(self, **values: Any) -> None:
        """Numbers of this step on this rank. They count once the step is committed, and once only."""
        for name, value in values.items():
            self.values[name] = float(value.detach()) if isinstance(value, torch.Tensor) else float(value)

    def _uses(self, scale: float) -> None:
        self._scale = scale
