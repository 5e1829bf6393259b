"""Background work of an asyncio process: a bug in it ends the process.

A watcher that dies of a bug and is only logged leaves a process that looks healthy and no longer watches. So an
exception that escapes a background task is treated as any bug is: its traceback is logged and the process ends, to be
replaced by whatever supervises it. Expected errors are handled inside the task.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.exit_codes import INTERNAL_ERROR
from holdfast.util.logs import get_logger

log = get_logger(__name__)


def end_process(error: BaseException) -> None:
    """End this process at once, with the exit code of an internal error.

    No clean-up runs: it might hang in what the bug has left undone, and every file of Holdfast survives a process that
    is killed."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    logging.shutdown()
    os._exit(INTERNAL_ERROR)


def end_process_on_bugs(loop: asyncio.AbstractEventLoop) -> None:
    """Have a bug in a callback of the loop, or in a task that the loop made for a connection, end the process too.
    Without this, asyncio logs it and goes on."""
    loop.set_exception_handler(_handle)


def _handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    if error is None or isinstance(error, OSError | HoldfastError | asyncio.CancelledError):
        loop.default_exception_handler(context)  # a connection that broke, a task that was not awaited
        return
    _log_bug(error, str(context.get("message", "")))
    end_process(error)


def _log_bug(error: BaseException, where: str) -> None:
    text = f"this process ends because of a bug in Holdfast: {type(error).__name__}: {error}"
    log.error("internal-error", text, error=error, where=where)


class TaskSet:
    """A set of background tasks. `on_bug` is called with an exception that escapes one, after it was logged; without,
    the process ends."""

    def __init__(self, on_bug: Callable[[BaseException], None] | None = None) -> None:
        self._on_bug = on_bug
        self._tasks: set[asyncio.Task[Any]] = set()

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(tuple(self._tasks))

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None], name: str | None = None) -> asyncio.Task[None]:
        """Run `work` in the background until it ends, is cancelled, or the set is closed."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def cancel(self) -> None:
        """Cancel all tasks without waiting for them."""
        for task in self:
            task.cancel()

    async def close(self) -> None:
        """Cancel all tasks, also those that they start while they end, and wait until none is left."""
        while tasks := tuple(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await asyncio.sleep(0)  # the done callbacks of this round have run after it

    async def drain(self) -> None:
        """Wait until all tasks have ended by themselves."""
        while tasks := tuple(self._tasks):
            await asyncio.wait(tasks)
            await asyncio.sleep(0)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        _log_bug(error, task.get_name())
        (self._on_bug or end_process)(error)
