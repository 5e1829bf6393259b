"""The launcher's own error file: what a scheduler or an outer launcher reads of why a job failed.

torchrun leaves the root cause in the file that TORCHELASTIC_ERROR_FILE names in its own environment: the file of the
worker that failed first, with its exit code. So does Holdfast, with the job's root cause; where the worker left no file
(it was killed) or is on another node, what the job knows of it is written in the same shape.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from holdfast.core.faults.failures import Failure, describe
from holdfast.util.logs import get_logger

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
ERROR_FILE_BYTES_MAX = 1_000_000

log = get_logger(__name__)


def write_launcher_error_file(path: str, cause: Failure | None, why: str) -> None:
    """Write the root cause, or without one the reason why the job ended, to the file. An existing one is replaced. A
    file that cannot be written is logged."""
    content = _of_worker(cause) if cause is not None else _message(why, "", time.time())
    target = Path(path)
    try:
        temporary = target.with_name(f"{target.name}.tmp")
        temporary.write_text(json.dumps(content))
        temporary.replace(target)
    except OSError as error:
        log.warning("error-file-not-written", f"{ERROR_FILE_VARIABLE} {path} cannot be written: {error.strerror}")


def _of_worker(cause: Failure) -> dict[str, Any]:
    content = _read(cause.error_file) if cause.error_file else None
    if content is None:
        content = _message(cause.message or describe(cause), cause.traceback, cause.failed_at)
    if isinstance(content.get("message"), dict):
        content["message"]["errorCode"] = cause.exit_code
    return content


def _read(path: str) -> dict[str, Any] | None:
    """Return what a worker's error file says; None if it is not on this node, or not to be read."""
    try:
        with Path(path).open("rb") as file:
            found = json.loads(file.read(ERROR_FILE_BYTES_MAX))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _message(text: str, callstack: str, at: float) -> dict[str, Any]:
    return {"message": {"message": text, "extraInfo": {"py_callstack": callstack, "timestamp": str(int(at))}}}
