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

from holdfast.errors import HoldfastError
from holdfast.util.files import write_atomically

SOCKET_VARIABLE = "HOLDFAST_SOCKET"
WORKER_VARIABLE = "HOLDFAST_WORKER"
TELL_TIMEOUT_S = 1.0
"""The agent is of this machine; if it is stopped, the end of the worker must not wait for it."""
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
        content = json.dumps(describe(error, trace, time.time())).encode()
        write_atomically(path, content, mode=0o666, durable=False)
    except OSError:
        return


def tell_agent() -> None:
    """Tell the agent that the script has failed, where no session does. The end of the process, which says the rest,
    can take longer than the ends of the ranks that it takes down. Never raises: an agent that is gone has no use for
    it."""
    path, worker = os.environ.get(SOCKET_VARIABLE, ""), os.environ.get(WORKER_VARIABLE, "")
    if not path or not worker:
        return
    import socket

    from holdfast.wire.launch_messages import send, socket_address
    from holdfast.wire.worker_messages import ScriptFailed

    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(TELL_TIMEOUT_S)
            connection.connect(socket_address(path))
            send(connection, ScriptFailed(worker, os.getpid()))
    except (OSError, HoldfastError):
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
