"""The traceback that a worker shows as it dies of an exception: shown once, by its console output or by the report.

A worker writes its error file before it shows the exception (worker/launch/error_file.py), so the console knows the
traceback when its first line comes, and holds it back until it is known what becomes of the job:

    the job ends of it           the report at the end shows it, below what the other ranks have to say: nothing more
    anything else                shown, at the latest when the local rank has its next worker

Only lines that are the error file's are held back: what a script shows by itself, or in another form, is not. Log files
have everything.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

from holdfast.core.faults.failures import Failure

COMPLETE_HELD_S = 10.0
"""How long a traceback is held back while nothing is decided: the worker may take that long to end."""
PARTIAL_HELD_S = 0.2
"""How long the rest of a traceback is waited for."""
ERROR_FILE_BYTES_MAX = 1_000_000
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+")
_RANK = re.compile(r"^\[rank\d+\]:(?: |$)")
_FIRST_LINE = re.compile(r'Traceback \(most recent call last\):|  \+ Exception Group Traceback|  File "')


class ReportAtEnd:
    """What the report at the end of a job shows, once that is decided: the root cause of its failure, or nothing."""

    def __init__(self) -> None:
        self.is_decided = False
        self._error_file, self._traceback = "", ""

    def decide(self, cause: Failure | None) -> None:
        """The first decision counts."""
        if not self.is_decided and cause is not None:
            self._error_file, self._traceback = cause.error_file, cause.traceback
        self.is_decided = True

    def shows(self, error_file: Path, traceback: str) -> bool:
        """Return whether the report shows this traceback of the worker with this error file, all of it."""
        return self._error_file == str(error_file) and self._traceback == traceback


class HeldTraceback:
    """The filter of one worker's stderr. `report` is decided in another thread."""

    def __init__(self, error_file: Path, report: ReportAtEnd) -> None:
        self._error_file, self._report = error_file, report
        self._expected: list[str] = []
        """The lines of the worker's own traceback; empty: none is being held back."""
        self._matched = 0
        self._held = b""
        self._held_since = 0.0

    @property
    def is_holding(self) -> bool:
        """Whether something is held back."""
        return bool(self._held)

    def feed(self, data: bytes) -> bytes:
        """Return what of this output is to be shown now."""
        return b"".join(self._shown(line) for line in _LINE.findall(data))

    def due(self, is_last: bool) -> bytes:
        """Return what was held back and is to be shown now. `is_last`: the worker writes no more."""
        if not self._held:
            return b""
        is_complete = self._matched == len(self._expected)
        if is_complete and self._report.is_decided:
            is_reported = self._report.shows(self._error_file, "\n".join(self._expected))
            held = self._release()
            return b"" if is_reported else held
        held_s = time.monotonic() - self._held_since
        is_due = is_last or held_s >= (COMPLETE_HELD_S if is_complete else PARTIAL_HELD_S)
        return self._release() if is_due else b""

    def _shown(self, line: bytes) -> bytes:
        text = _RANK.sub("", line.decode("utf-8", "replace")).rstrip()
        if self._matched < len(self._expected):
            if text == self._expected[self._matched].rstrip():
                return self._hold(line)
            return self._release() + self._shown(line)
        if not self._held and _FIRST_LINE.match(text):
            self._expected, self._matched = written_traceback(self._error_file), 0
            if self._expected and text == self._expected[0].rstrip():
                return self._hold(line)
            self._expected = []
        return line

    def _hold(self, line: bytes) -> bytes:
        self._held += line
        self._matched += 1
        self._held_since = time.monotonic()
        return b""

    def _release(self) -> bytes:
        held, self._held = self._held, b""
        self._expected, self._matched = [], 0
        return held


def written_traceback(error_file: Path) -> list[str]:
    """Return the lines of the traceback in an error file, in the format of torch's @record; none if it has none."""
    try:
        with error_file.open("rb") as file:
            content = json.loads(file.read(ERROR_FILE_BYTES_MAX))
        text = content["message"]["extraInfo"]["py_callstack"]
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return []  # absent, as long as the worker's script has not failed; or another's
    return text.strip("\n").split("\n") if isinstance(text, str) and text.strip() else []
