"""Batches that a script draws from a torch DataLoader by hand, over several steps: refused.

    batches = iter(loader)
    for step in job.steps(n):
        with step:
            x, y = next(batches)        # refused: a repeated step would get another, a replacement the first ones

`step.batches(loader)` keeps the batch until its step is committed, and brings a replacement to its position. A loop
that makes its own iterator and ends within one step, or between two steps, as an evaluation does, is left alone; so is
whatever is drawn without gradients.

torch has no hook for it, so the `__next__` that all its iterators share is wrapped, once, at `hf.init()`. Draws by
other threads are not looked at.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from holdfast.data.worker_dataset import SampleFetcher as LoaderFeed
from holdfast.errors import ScriptError
from holdfast.torch_compat import batches_drawn, dataset_of

PLACE = "_holdfast_step"
"""The attribute of an iterator that has the step in which its pass began."""


class _Watch:
    """What there is once a process."""

    def __init__(self) -> None:
        self.is_installed = False
        self.step: Callable[[Any], int | None] = lambda _: None
        self.own = 0
        """Above 0 while a step's batch is drawn for `step.batches`."""


_watch = _Watch()


def watch(step: Callable[[Any], int | None]) -> None:
    """Have draws by hand refused. `step` returns the number of the step under way, or of the next one; None where
    draws from this iterator do not matter."""
    _watch.step = step
    if not _watch.is_installed:
        _watch.is_installed = True
        draw = _BaseDataLoaderIter.__next__

        @functools.wraps(draw)
        def checked(self: Any) -> Any:
            check(self)
            return draw(self)

        _BaseDataLoaderIter.__next__ = checked  # type: ignore[method-assign]


def draw_for_step(iterator: Iterator[Any]) -> Any:
    """Return the next batch, which is the step's own: it is kept, and drawn again by a replacement."""
    _watch.own += 1
    try:
        return next(iterator)
    finally:
        _watch.own -= 1


def check(iterator: Any) -> None:
    """Raise ScriptError if this pass over the data began in another step."""
    if _watch.own or not torch.is_grad_enabled() or isinstance(dataset_of(iterator), LoaderFeed):
        return
    if threading.current_thread() is not threading.main_thread() or (step := _watch.step(iterator)) is None:
        return
    began = getattr(iterator, PLACE, step) if batches_drawn(iterator) else step
    setattr(iterator, PLACE, began)
    if began != step:
        raise ScriptError(
            "a DataLoader's batches are drawn by hand over several steps, so that a repeated step would get another:"
            " write `for x, y in step.batches(loader):` in the step, or declare with job.ignore(loader) that they are"
            " not part of the state"
        )
