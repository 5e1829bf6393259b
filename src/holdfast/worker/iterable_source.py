"""Where a step's batches come from, so that a repeated step gets the same ones and no position is lost.

hf.Loader                    this rank's slots of the step, by position: exact under any change of the world
any other iterable           the n-th batch for the n-th step: kept until the step is committed, so that a repeat
                             gets it again; a newcomer skips to its position. When it ends, it is begun again, with
                             the number of the epoch for a sampler with `set_epoch`, as DistributedSampler; also one
                             inside a batch sampler
a loader with state_dict     (torchdata's, for one) the same, but a newcomer loads its state instead of skipping. The
                             epoch is no part of that state: it follows from the step and the loader's length
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from holdfast.errors import UsageError
from holdfast.worker.hand_drawn_batches import draw_for_step


class IterableSource:
    """The batches of one plain iterable, by step."""

    def __init__(
        self, source: Iterable[Any], drawn: int = 0, *, is_tracked: bool = False, prepare: Callable[[int], None]
    ) -> None:
        """`prepare` is called before each draw, with its number: drawing may take random numbers."""
        self._source, self._is_tracked, self._prepare = source, is_tracked, prepare
        self._iterator: Iterator[Any] | None = None
        self._epoch = 0
        self._drawn = drawn
        self._kept: tuple[int, Any] | None = None

    @property
    def origins(self) -> tuple[Any, Any]:
        """What the batches are drawn from: the iterable, and its iterator."""
        return self._source, self._iterator

    def batch(self, index: int) -> Any:
        """Return the batch of the step that is `index` steps after the first."""
        if self._kept is not None and self._kept[0] == index:
            return self._kept[1]
        if index < self._drawn:
            raise UsageError(f"batch {index} of {type(self._source).__name__} was handed out before and is gone")
        while self._drawn <= index:
            self._prepare(self._drawn)
            self._kept = (self._drawn, self._next())
            self._drawn += 1
        assert self._kept is not None
        return self._kept[1]

    def undo(self, index: int) -> None:
        """Prepare for a repeated step. A source that keeps its own position was put back to before it, and draws
        again."""
        if self._is_tracked and self._kept is not None and self._kept[0] == index:
            self._kept, self._iterator, self._drawn = None, None, index

    def _next(self) -> Any:
        for _ in range(2):
            if self._iterator is None:
                self._begin_epoch()
            assert self._iterator is not None
            try:
                return draw_for_step(self._iterator)
            except StopIteration:
                self._iterator = None
        raise UsageError(f"{type(self._source).__name__} has no batches")

    def _begin_epoch(self) -> None:
        if (epoch := self._epoch_now()) is not None:
            for sampler in samplers_of(self._source):
                sampler.set_epoch(epoch)
        self._iterator = iter(self._source)
        self._epoch += 1

    def _epoch_now(self) -> int | None:
        """Return the number of the epoch that begins, or that goes on in the middle; None if it is not known."""
        if not self._is_tracked:
            return self._epoch
        try:
            return self._drawn // len(self._source)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError, ZeroDivisionError):
            return None


def samplers_of(source: Any) -> list[Any]:
    """Return the samplers of a source that take the number of the epoch, each once."""
    batch_sampler = getattr(source, "batch_sampler", None)
    candidates = (getattr(source, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    return list({id(one): one for one in candidates if callable(getattr(one, "set_epoch", None))}.values())
