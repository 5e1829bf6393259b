"""The watchdog of torch's `torch.distributed.elastic.timer`: a worker sets a timer, and is killed if it has not
released it in time (`TORCHELASTIC_ENABLE_FILE_TIMER=1`, `TORCHELASTIC_TIMER_FILE`).

Workers write to a named pipe, one JSON object a line: process id, scope, time of expiration (negative: release),
signal. The end of the worker is a failure as any other, with what is left of `--max-restarts`; torchrun's launcher
kills itself by the same signal. Only processes of this agent's workers can be killed: a line may name any process id.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from holdfast.errors import UsageError
from holdfast.util.logs import get_logger

ENABLE_VARIABLE = "TORCHELASTIC_ENABLE_FILE_TIMER"
FILE_VARIABLE = "TORCHELASTIC_TIMER_FILE"
READ_BYTES = 65_536
LINE_BYTES_MAX = 4_096
"""What a pipe takes in one write; torch's client sends no more."""
TIMERS_MAX = 65_536

log = get_logger(__name__)

Expired = Callable[[int, int, str], None]
"""Called with the process id, the signal and what has expired."""


class TimerRequest(msgspec.Struct, frozen=True):
    """A line of the pipe, as torch's client writes it."""

    pid: int
    scope_id: str
    expiration_time: float
    signal: int


def timer_file(environ: Mapping[str, str]) -> str:
    """Return the path of the pipe, or an empty text if no timer is wanted."""
    if environ.get(ENABLE_VARIABLE) != "1":
        return ""
    return environ.get(FILE_VARIABLE) or str(Path(tempfile.gettempdir()) / f"watchdog_timer_{uuid.uuid4()}")


class FileTimer:
    """The timers of a node's workers."""

    def __init__(self, path: str, expired: Expired) -> None:
        self._path, self._expired = Path(path), expired
        self._timers: dict[tuple[int, str], TimerRequest] = {}
        self._partial = b""
        self._wake: asyncio.TimerHandle | None = None
        try:
            if self._path.is_fifo():
                self._path.unlink()  # of an agent that was killed
            os.mkfifo(self._path, 0o600)
        except OSError as error:
            raise UsageError(f"{FILE_VARIABLE} {path} cannot be made a named pipe: {error.strerror}") from error
        # For writing too: else each writer that closes would be an end of file.
        self._pipe = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pipe, self._read)

    def close(self) -> None:
        """Remove the pipe and all timers."""
        self._loop.remove_reader(self._pipe)
        os.close(self._pipe)
        self._path.unlink(missing_ok=True)
        if self._wake:
            self._wake.cancel()

    def _read(self) -> None:
        try:
            data = self._partial + os.read(self._pipe, READ_BYTES)
        except BlockingIOError:
            return
        *lines, self._partial = data.split(b"\n")
        self._partial = self._partial[-LINE_BYTES_MAX:]
        for line in lines:
            try:
                self._take(msgspec.json.decode(line, type=TimerRequest))
            except msgspec.MsgspecError as error:
                log.warning("timer-request-wrong", f"ignoring a line of {self._path}: {error}")
        self._schedule()

    def _take(self, request: TimerRequest) -> None:
        key = request.pid, request.scope_id
        if request.expiration_time < 0:
            self._timers.pop(key, None)
        elif len(self._timers) < TIMERS_MAX or key in self._timers:
            self._timers[key] = request

    def _schedule(self) -> None:
        if self._wake:
            self._wake.cancel()
            self._wake = None
        if self._timers:
            first = min(request.expiration_time for request in self._timers.values())
            self._wake = self._loop.call_later(max(0.0, first - time.time()), self._expire)

    def _expire(self) -> None:
        now = time.time()
        over = [request for request in self._timers.values() if request.expiration_time <= now]
        for request in sorted(over, key=lambda request: request.expiration_time):
            del self._timers[request.pid, request.scope_id]
            if request.signal > 0:  # else it is torch's way to ask for a message only
                late_s = now - request.expiration_time
                why = f"its timer {request.scope_id[:200]!r} expired {late_s:.1f} s ago and was not released"
                self._expired(request.pid, request.signal, why)
        self._schedule()
