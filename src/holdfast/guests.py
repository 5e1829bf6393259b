"""Users' code in our processes: it may steer and never hold us up or break us.

A guest is asked in a thread of its own, one call at a time and in the order of the questions, and has a time limit.
What it raises becomes a GuestError, whatever it is. One that did not come back is not asked again until it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from traceback import format_exception_only

REASON_CHARS_MAX = 500


class GuestError(Exception):
    """It gave no answer: the text says why, and completes a sentence about it."""


class Guest:
    """One kind of user's code."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._one_at_a_time = threading.Lock()
        self.stuck: list[threading.Thread] = []
        """Calls that did not come back in time."""

    async def ask(self, work: Callable[[], object], limit_s: float) -> object:
        """What it answers, within the limit. Raises GuestError and nothing else."""
        self.stuck[:] = [thread for thread in self.stuck if thread.is_alive()]
        if self.stuck:
            raise GuestError("it has not come back from an earlier call, and is not asked before")
        call = _Call(work, self._one_at_a_time, self._name)
        try:
            call.thread.start()
        except RuntimeError as error:
            raise GuestError(f"no thread could be started for it: {error}") from error
        try:
            async with asyncio.timeout(limit_s):
                found = await call.answer
        except TimeoutError:
            self.stuck.append(call.thread)
            raise GuestError(f"it did not answer in {limit_s:.1f} s") from None
        finally:
            call.abandoned = True
        if isinstance(found, BaseException):
            raise GuestError(f"it raised {reason(found)}")
        return found


class _Call:
    """One question, asked in a thread; `answer` gets what came of it, an exception included."""

    def __init__(self, work: Callable[[], object], one_at_a_time: threading.Lock, name: str) -> None:
        self._work, self._one_at_a_time = work, one_at_a_time
        self._loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[object] = self._loop.create_future()
        self.abandoned = False
        # A daemon: one that never comes back does not keep the process from ending.
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        with self._one_at_a_time:
            if self.abandoned:
                return
            try:
                found = self._work()
            except BaseException as error:  # it is the user's code, which may raise anything
                found = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._settle, found)

    def _settle(self, found: object) -> None:
        if not self.answer.done():
            self.answer.set_result(found)


def reason(error: BaseException) -> str:
    """In one line; also of an exception that cannot even say what it is."""
    text = " ".join(format_exception_only(error)[-1].split())
    return text if len(text) <= REASON_CHARS_MAX else f"{text[:REASON_CHARS_MAX]}..."
