"""One collective as its caller sees it, and one run of it by one gloo object; see repeatable_gloo.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch

from holdfast.torch_compat import Work
from holdfast.worker.collectives.guarded import Guarded, Outcome, Promise, has_future
from holdfast.worker.collectives.kept_inputs import Operation
from holdfast.worker.collectives.waits import waits


class RepeatingGroup(Protocol):
    """What works ask of their group."""

    def wait_for(self, operation: Operation) -> None: ...

    def promise(self, work: RepeatableWork) -> Promise: ...

    def has_ended(self, operation: Operation) -> bool: ...


class Attempt:
    """One run of an operation, by one gloo object."""

    def __init__(self, guarded: Guarded, work: Work | None, number: int, error: Exception | None = None) -> None:
        """Without work: gloo did not begin it."""
        self.work, self.number, self.error = work, number, error
        self._ended: threading.Event | None = None
        self._future: torch.futures.Future[Any] | None = None
        """What says how it ended: gloo completes it before its work says that it is completed."""
        self._on_end: Callable[[], None] = lambda: None
        if work is None:
            self._ended = threading.Event()
            self._ended.set()
        elif not has_future(work):
            self._ended = threading.Event()
            guarded.wait_on_thread(work, self)
        else:
            self._future = work.get_future()

    def settle(self, outcome: Outcome) -> None:
        """Record how it ended; from the thread that waits for it."""
        assert self._ended is not None
        if isinstance(outcome, Exception):
            self.error = outcome
        self._ended.set()
        self._on_end()

    def has_ended(self, wait: timedelta = timedelta()) -> bool:
        """Return whether it has ended, after this time at most. Then `error` is set, or it has succeeded."""
        if self._ended is not None:
            return self._ended.wait(wait.total_seconds())
        assert self.work is not None
        if wait:
            try:
                self.work.wait(wait)
                return True
            except RuntimeError:  # gloo's own error, or that the time is up
                pass
        assert self._future is not None
        if not self._future.done():
            return False
        try:
            self._future.value()
        except Exception as error:  # whatever gloo raised
            self.error = self.error or error.with_traceback(None)
        return True

    @property
    def has_succeeded(self) -> bool:
        return self.has_ended() and self.error is None

    def tell(self, on_end: Callable[[], None]) -> None:
        """Call this once it has ended, on some thread."""
        if self._ended is None:
            assert self._future is not None
            self._future.add_done_callback(lambda _: on_end())
            return
        self._on_end = on_end
        if self._ended.is_set():
            on_end()

    def value(self) -> list[torch.Tensor]:
        """Return what its future holds."""
        if self._ended is not None:
            return []
        assert self._future is not None
        value = self._future.value()
        return value if isinstance(value, list) else [value] if isinstance(value, torch.Tensor) else []


class RepeatableWork(Work):
    """What callers wait for: one attempt after the other."""

    def __init__(self, group: RepeatingGroup, operation: Operation) -> None:
        super().__init__()
        self._group, self.operation = group, operation
        self._promise: Promise | None = None
        self.done: Attempt | None = None
        """The attempt that has succeeded."""

    def wait(self, *_: object, **__: object) -> bool:
        with waits:
            if self._promise is not None:
                self._promise.future.wait()
            else:
                self._group.wait_for(self.operation)
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        if self._promise is None:
            self._promise = self._group.promise(self)
        return self._promise.future

    def result(self) -> list[torch.Tensor]:
        return self.get_future().value()

    def is_completed(self) -> bool:
        if self._promise is not None:
            return bool(self._promise.future.done())
        return self._group.has_ended(self.operation)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        try:
            self.get_future().value()
        except Exception as error:  # whatever the operation ended with
            return error
        return None

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()


def runs_of(operation: Operation) -> list[Attempt]:
    """Return what gloo may be doing for an operation."""
    return [run for run in (operation.attempt, operation.served) if run is not None]
