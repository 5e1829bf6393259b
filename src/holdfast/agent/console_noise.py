"""What of a worker's stderr is left off the console. The log file has all of it.

    c10d's noise of closing connections   when a rank goes, the store clients of the others warn, each with some twenty
                                          C++ frames, and say nothing that the root cause does not
    tracebacks of an interrupt            after Ctrl-C every rank shows where it was: a KeyboardInterrupt, or a
                                          connection that another rank closed as it was interrupted

A traceback is held back until it is known how it ends: other errors of that moment, of a script's own way out, are
shown. What is held back is bounded, and shown when the bound is reached.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from holdfast.core.faults.failures import COLLATERAL_TEXTS

HELD_BYTES_MAX = 256 * 1024
LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+")
_RANK = rb"^(?:\[rank\d+\]:\s?)?"
_CLOSING = re.compile(
    _RANK + rb"\[[WE]\d{4} [^\]]*(?:TCPStore|socket|Utils|HeartbeatMonitor|ProcessGroup\w+)\.[ch]pp:\d+\].*"
    rb"(?:failed on SocketImpl|[Ff]ailed to (?:recv|send|check the .should dump)|Broken pipe|Connection reset|"
    rb"Connection was likely closed|server has shut down)"
)
"""A warning of c10d's store, or of what uses it, about a connection that is gone."""
_FRAMES_BEGIN = re.compile(_RANK + rb"Exception raised from .* at .*(?:c10d|distributed).*\(most recent call first\)")
_FRAME = re.compile(
    _RANK + rb"(?:Exception raised from |frame #\d+: |<omitting python frames>|C\+\+ CapturedTraceback)"
)
_BLANK = re.compile(_RANK + rb"\s*$")
_TRACEBACK = re.compile(_RANK + rb"Traceback \(most recent call last\):")
_INTERRUPT = re.compile(_RANK + rb"KeyboardInterrupt\s*$")
_COLLATERAL = tuple(text.encode() for text in COLLATERAL_TEXTS)


class NoiseFilter:
    """The filter of one worker's stderr. `is_interrupted` returns whether the job is being stopped by a signal."""

    def __init__(self, is_interrupted: Callable[[], bool]) -> None:
        self._is_interrupted = is_interrupted
        self._is_in_frames = False
        self._held = b""
        """A traceback whose end is not known yet."""

    def feed(self, data: bytes) -> bytes:
        """Return what of this output is to be shown now."""
        return b"".join(self._shown(line) for line in LINE.findall(data))

    @property
    def is_holding(self) -> bool:
        """Whether a traceback is held back."""
        return bool(self._held)

    def flush(self) -> bytes:
        """Return what was held back and is to be shown, as no more comes for now."""
        held, self._held = self._held, b""
        return b"" if any(text in held for text in _COLLATERAL) else held

    def _shown(self, line: bytes) -> bytes:
        if self._held:
            return self._hold(line)
        if self._is_in_frames and (_FRAME.match(line) or _BLANK.match(line)):
            return b""
        self._is_in_frames = bool(_CLOSING.match(line) or _FRAMES_BEGIN.match(line))
        if self._is_in_frames:
            return b""
        if self._is_interrupted() and _TRACEBACK.match(line):
            return self._hold(line)
        return line

    def _hold(self, line: bytes) -> bytes:
        if _INTERRUPT.match(line):
            self._held = b""
            return b""
        self._held += line
        if len(self._held) > HELD_BYTES_MAX:
            held, self._held = self._held, b""
            return held
        return b""
