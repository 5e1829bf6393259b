"""Users' code in Holdfast's processes: it may steer them, and can neither delay nor break them.

It is called in a thread of its own, one call at a time and in the order of the calls, with a time limit. What it raises
becomes a UserCodeError. Code that did not return in time is not called again until it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from traceback import format_exception_only

from holdfast.errors import UserCodeError

REASON_CHARS_MAX = 500


class UserCode:
    """One kind of user's code, and its calls."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._one_at_a_time = threading.Lock()
        self.stuck: list[threading.Thread] = []
        """The threads of calls that did not return in time."""

    async def ask(self, work: Callable[[], object], limit_s: float) -> object:
        """Call it and return its answer. Raises UserCodeError and nothing else, also when the time is over."""
        self.stuck[:] = [thread for thread in self.stuck if thread.is_alive()]
        if self.stuck:
            raise UserCodeError("an earlier call of it has not returned yet")
        call = _Call(work, self._one_at_a_time, self._name)
        try:
            call.thread.start()
        except RuntimeError as error:
            raise UserCodeError(f"no thread could be started for it: {error}") from error
        try:
            async with asyncio.timeout(limit_s):
                found = await call.answer
        except TimeoutError:
            self.stuck.append(call.thread)
            raise UserCodeError(f"it timed out after {limit_s:.1f} s") from None
        finally:
            call.abandoned = True
        if isinstance(found, BaseException):
            raise UserCodeError(f"it raised {reason(found)}")
        return found


class _Call:
    """One call in a thread; `answer` gets its result, or the exception that it raised."""

    def __init__(self, work: Callable[[], object], one_at_a_time: threading.Lock, name: str) -> None:
        self._work, self._one_at_a_time = work, one_at_a_time
        self._loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[object] = self._loop.create_future()
        self.abandoned = False
        # A daemon: a call that never returns does not keep the process from ending.
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        with self._one_at_a_time:
            if self.abandoned:
                return
            try:
                found = self._work()
            except BaseException as error:  # it is the user's code, which may raise anything
                found = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits any more
            self._loop.call_soon_threadsafe(self._set_answer, found)

    def _set_answer(self, found: object) -> None:
        if not self.answer.done():
            self.answer.set_result(found)


def reason(error: BaseException) -> str:
    """Return an exception in one line, also one that cannot be printed."""
    text = " ".join(format_exception_only(error)[-1].split())
    return text if len(text) <= REASON_CHARS_MAX else f"{text[:REASON_CHARS_MAX]}..."
