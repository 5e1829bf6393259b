"""Gloo, behind a guard: who waits for a collective waits for it or for the end of the view, whichever comes first.

Why: shutting a mesh's sockets makes gloo raise, but not always. A message that was half sent or half received when its
connection broke is forgotten (`Pair::signalException` of gloo's TCP transport tells the operations that are queued,
not the ones under way), and its waiter hangs until the collective's time-out. With a peer killed at a random moment of
a transfer this is common.

So the work that callers get is a promise of ours. Gloo's own completion keeps it, or `fail` breaks it, from the thread
that revokes the view. What gloo still holds then is left behind: the operation keeps its tensors alive, its
connections are shut, so that nothing is written into them any more, and they are not looked at again.

A `ProcessGroupGloo` joins its threads when it is destroyed, so one with a forgotten operation must never be. Therefore
it is only destroyed by `release`, on a thread that can wait, and only if all its operations have ended; else it stays
for good.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch

from holdfast.errors import ViewOverError
from holdfast.torch_compat import Work
from holdfast.worker.collectives.waits import waits

RELEASE_WAIT_S = 1.0
"""Gloo's operations end within milliseconds of their sockets, if they end at all."""
RELEASE_LOOK_S = 0.01
LOOK_EVERY = timedelta(milliseconds=20)
"""How often a waiter looks whether its view is over. Mostly gloo itself wakes it."""

Outcome = BaseException | list[torch.Tensor]


class Settled(Protocol):
    """What is told how an operation ended."""

    def settle(self, outcome: Outcome) -> None: ...


class Promise:
    """The outcome of one operation, kept or broken once."""

    def __init__(self, forget: Callable[[Promise], None]) -> None:
        self._forget = forget
        self._lock = threading.Lock()
        self._is_settled = False
        self._outcome: torch.futures.Future[list[Outcome]] = torch.futures.Future()
        waits.open()
        # An error must be raised by a callback: only then those who wait in C++ get it too.
        self.future = self._outcome.then(_unwrap)

    def settle(self, outcome: Outcome) -> None:
        with self._lock:
            if self._is_settled:
                return
            self._is_settled = True
        waits.settle()
        self._forget(self)
        self._outcome.set_result([outcome])

    def follow(self, future: torch.futures.Future[Any]) -> None:
        """Gloo's own completion."""
        try:
            value = future.value()
        except Exception as error:  # whatever gloo raised, for those who wait
            self.settle(error.with_traceback(None))
        else:
            self.settle(value if isinstance(value, list) else [value] if isinstance(value, torch.Tensor) else [])


def _unwrap(outcome: torch.futures.Future[list[Outcome]]) -> list[torch.Tensor]:
    (value,) = outcome.value()
    if isinstance(value, BaseException):
        raise value
    return value


class GuardedWork(Work):
    """What callers wait for.

    Those who call `wait` are woken by gloo itself, and look every few milliseconds whether the view is over: that costs
    nothing while all is well. Those who want a future (DistributedDataParallel) get a promise.
    """

    def __init__(self, guard: Guarded, work: Work) -> None:
        super().__init__()
        self._guard, self._work = guard, work
        self._promise: Promise | None = None

    def wait(self, *_: object, **__: object) -> bool:
        with waits:
            return self._wait()

    def _wait(self) -> bool:
        while self._promise is None:
            self._guard.check()
            try:
                self._work.wait(LOOK_EVERY)
            except RuntimeError:  # gloo's own error, or that the time is up
                if not self._work.is_completed():
                    continue
                self._work.wait()  # it has ended: at once, with its own error if it has one
            return True
        self._promise.future.wait()
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        if self._promise is None:
            self._promise = self._guard.promise(self._work)
        return self._promise.future

    def result(self) -> list[torch.Tensor]:
        return self.get_future().value()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_completed() and self.exception() is None

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


class GuardedTransfer(GuardedWork):
    """A send or a receive. A wait for these that runs out of time would end the connection, so a thread waits."""

    def __init__(self, guard: Guarded, work: Work) -> None:
        super().__init__(guard, work)
        self._promise = guard.promise(work)


class Guarded:
    """The methods of a `ProcessGroupGloo`; those that return work return guarded work."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._open: set[Promise] = set()
        self._works: deque[Work] = deque()
        self._over: str | None = None
        self._waiting_threads = 0
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(inner))

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if not callable(method):
            return method

        def call(*arguments: Any, **named: Any) -> Any:
            result = method(*arguments, **named)
            return self._guard(result) if isinstance(result, Work) else result

        return call

    def check(self) -> None:
        """Raise ViewOverError once the view is over."""
        if self._over is not None:
            raise ViewOverError(self._over)

    def fail(self, why: str) -> None:
        """Break every promise that is open, and all later ones."""
        with self._lock:
            self._over = why
            broken = list(self._open)
        for promise in broken:
            promise.settle(ViewOverError(why))

    def release(self) -> None:
        """Release gloo's object when it is not used any more, after a moment for what gloo still does."""
        deadline = time.monotonic() + RELEASE_WAIT_S
        while self._is_at_work() and time.monotonic() < deadline:
            time.sleep(RELEASE_LOOK_S)  # on a thread of its own, with no caller waiting for it
        inner, self._inner = self._inner, None
        if not self._is_at_work():
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(inner))

    def promise(self, work: Work) -> Promise:
        """Return a future of the work's outcome that `fail` can break."""
        promise = Promise(self._open.discard)
        with self._lock:
            over = self._over
            self._open.add(promise)
        if not self._follow_future(work, promise):
            self.wait_on_thread(work, promise)
        if over is not None:
            promise.settle(ViewOverError(over))
        return promise

    def begin(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Work:
        """Begin a collective and return gloo's own work, for a caller with a guard of its own."""
        work: Work = getattr(self._inner, name)(*arguments, **named)
        if has_future(work):
            self._note(work)
        return work

    def wait_on_thread(self, work: Work, waiter: Settled) -> None:
        """Have a thread wait for the work, and tell how it ended."""
        with self._lock:
            self._waiting_threads += 1
        threading.Thread(target=self._wait_for, args=(work, waiter), name="holdfast-transfer", daemon=True).start()

    def _guard(self, work: Work) -> Work:
        if not has_future(work):
            return GuardedTransfer(self, work)
        self._note(work)
        return GuardedWork(self, work)

    def _note(self, work: Work) -> None:
        with self._lock:
            while self._works and self._works[0].is_completed():
                self._works.popleft()
            self._works.append(work)

    def _is_at_work(self) -> bool:
        with self._lock:
            return self._waiting_threads > 0 or any(not work.is_completed() for work in self._works)

    def _follow_future(self, work: Work, promise: Promise) -> bool:
        """Let the work's own future settle the promise. Return False for sends and receives, which have none: a thread
        waits for them."""
        if not has_future(work):
            return False
        work.get_future().add_done_callback(promise.follow)
        return True

    def _wait_for(self, work: Work, promise: Settled) -> None:
        try:
            work.wait()
        except Exception as error:  # as in Promise.follow
            promise.settle(error.with_traceback(None))
        else:
            promise.settle([])
        with self._lock:
            self._waiting_threads -= 1


def has_future(work: Work) -> bool:
    try:
        work.get_future()
    except RuntimeError:
        return False
    return True
