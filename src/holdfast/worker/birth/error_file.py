"""The last words of a worker: why it failed, as a JSON file where its agent looks for them.

The shape is that of torch's `@record`, so that tools made for torchrun read it, with two keys of our own: the moment
as a float, because collateral failures follow within milliseconds, and the exception's type by its full name.
A file that `@record` wrote already is left alone: it was there first, closer to the cause.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from pathlib import Path
from types import TracebackType

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
MESSAGE_CHARS_MAX = 16_000
CALLSTACK_CHARS_MAX = 200_000


def write_error_file(error: BaseException, trace: TracebackType | None = None) -> None:
    """Never raises for the file's sake: a full disk must not replace the user's traceback by ours."""
    name = os.environ.get(ERROR_FILE_VARIABLE, "")
    path = Path(name)
    try:
        if not name or (path.exists() and path.stat().st_size):
            return
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(describe(error, trace, time.time())))
        temporary.replace(path)
    except OSError:
        return


def describe(error: BaseException, trace: TracebackType | None, now: float) -> dict[str, object]:
    callstack = "".join(traceback.format_exception(type(error), error, trace))
    return {
        "message": {
            "message": f"{type(error).__name__}: {text_of(error)}"[:MESSAGE_CHARS_MAX],
            "extraInfo": {
                # The end of a traceback says what happened, its beginning only how we got there.
                "py_callstack": callstack[-CALLSTACK_CHARS_MAX:],
                "timestamp": str(int(now)),
                "timestamp_s": now,
                "exception": full_name(type(error)),
            },
        }
    }


def text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a user's __str__ may do anything
        return "<its text cannot be shown>"


def full_name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
