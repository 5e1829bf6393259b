"""Where a step's batches come from, so that a repeated step gets the same ones and nobody's place is lost.

    hf.Loader                    this rank's slots of the step, by position: exact under any change of the world
    any other iterable           the n-th batch for the n-th step: kept until the step is committed, so that a repeat
                                 gets it again; a newcomer skips to its place. When it ends, it is begun anew
                                 (`set_epoch` of its sampler is called, as with DistributedSampler)
    a loader with state_dict     (torchdata's, for one) the same, but a newcomer loads its state instead of skipping
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from holdfast.errors import UsageError


class Feed:
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

    def batch(self, index: int) -> Any:
        """The batch of the step that is `index` steps after the first."""
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
        """A step is repeated. One that keeps its own position was put back to before it, and draws anew."""
        if self._is_tracked and self._kept is not None and self._kept[0] == index:
            self._kept, self._iterator, self._drawn = None, None, index

    def _next(self) -> Any:
        for _ in range(2):
            if self._iterator is None:
                self._begin_epoch()
            assert self._iterator is not None
            try:
                return next(self._iterator)
            except StopIteration:
                self._iterator = None
        raise UsageError(f"{type(self._source).__name__} has no batches")

    def _begin_epoch(self) -> None:
        sampler = getattr(self._source, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self._epoch)  # type: ignore[union-attr]
        self._iterator = iter(self._source)
        self._epoch += 1
