"""Why did this worker end? From an exit code and what the worker left behind to a `Failure`.

The evidence, best first:

1. the error file: an exception that reached the top, written by the worker itself (torch's @record, or ours);
2. the end of stderr: the last Python traceback, or the report of a crash in native code;
3. the end alone, and the last lines of the log.

A traceback in stderr explains only an end that an exception can bring about. A worker that logged an exception, went
on and was killed an hour later did not die of it: for a signal that is not a crash's, stderr is shown, not interpreted.
"""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from holdfast.agent.worker_logs import WorkerLogFiles, read_tail, tail_lines
from holdfast.core.faults.failures import (
    LOG_LINE_CHARS_MAX,
    LOG_TAIL_LINES_MAX,
    TRACEBACK_CHARS_MAX,
    End,
    Exited,
    Failure,
    OutOfMemory,
    Signalled,
)
from holdfast.core.faults.fault_table import BUILT_IN, typed
from holdfast.core.faults.fault_types import FaultTable

ERROR_FILE_BYTES_MAX = 1_000_000
STDERR_TAIL_BYTES_MAX = 256 * 1024
LOG_TAIL_BYTES_MAX = 64 * 1024
MESSAGE_CHARS_MAX = 500
EXCEPTION_CHARS_MAX = 200

CRASH_SIGNALS = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS}
)
# Since torch 2.3, init_process_group installs an excepthook that puts this before every line.
RANK_PREFIX = re.compile(r"^\[rank\d+\]:(?: |$)")
TRACEBACK_HEADER = re.compile(r"^(?:Traceback|  \+ Exception Group Traceback) \(most recent call last\):")
CHAIN_LINKS = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
TYPE_LINE = re.compile(r"^(?P<type>[A-Za-z_][\w.<>]*)(?::|$)")
# The main script's syntax error has no header: it was never called.
SYNTAX_ERROR = re.compile(r"^(?:SyntaxError|IndentationError|TabError)(?::|$)")
TERMINATE = re.compile(r"^terminate called (?:after throwing an instance of '(?P<type>[^']+)'|without)")
# What torch's watchdogs of collectives say before they end the process: of a collective, or of themselves.
WATCHDOG = re.compile(
    r"watchdog thread terminated with exception|Watchdog caught collective operation (timeout|error)"
    r"|due to ProcessGroup\w+ watchdog hang|watchdog got stuck",
    re.IGNORECASE,
)
WATCHDOG_EXCEPTION = "DistBackendError"
"""The exception that torch raises for the same error, where it raises one."""
WATCHDOG_LINES_MAX = 40
"""How many lines from the end are searched for a watchdog that ended the process without an exception."""
WHAT_LINES_MAX = 3
FATAL_ERROR = "Fatal Python error: "
# Where a message of several lines turns into a second traceback (a data loader's, C++'s).
MESSAGE_END = re.compile(r"\(most recent call (?:last|first)\):|^Exception raised from ")


# What another writer puts right after a traceback: the interpreter, another thread, torch's own log.
OTHER_WRITER = re.compile(
    r"^(?:Exception ignored in|Exception in thread |Traceback \(|(?:\[rank\d+\]:)?\[?[IWEF]\d{3,4} )"
)


class ExitEvidence(NamedTuple):
    """An exception, as far as it is known."""

    exception: str
    message: str
    traceback: str
    failed_at: float | None = None


NOTHING = ExitEvidence("", "", "")
UNFINISHED = ExitEvidence(
    "",
    "ended in the middle of its steps: leave their loop by break or return, and the script by its end or sys.exit()",
    "",
)


def examine(
    exit_code: int,
    *,
    node_id: str,
    view: int,
    rank: int,
    local_rank: int,
    pid: int,
    ended_at: float,
    files: WorkerLogFiles,
    memory_evidence: Callable[[int], str] = lambda pid: "",
    step: int = -1,
    is_unfinished: bool = False,
    killed_why: str = "",
    table: FaultTable = BUILT_IN,
) -> Failure | None:
    """Return the failure of a worker, None for success. `exit_code` is negative for a signal, as subprocess counts;
    `memory_evidence` is asked only where SIGKILL was the end, because an answer uses up a counted kill
    (`MemoryWatch.evidence`). `is_unfinished`: the worker was in its loop of steps and has not reported that it leaves
    it; then code 0 (of os._exit) is no success. `killed_why`: why the agent itself has killed it."""
    if exit_code == 0 and not is_unfinished:
        return None
    end = find_end(exit_code, pid, memory_evidence)
    finding = read_error_file(files.error_file, ended_at) or read_stderr(end, files) or NOTHING
    if exit_code == 0:
        finding = UNFINISHED
    log_file, log_tail = find_log_tail(files)
    failure = Failure(
        node_id=node_id,
        view=view,
        rank=rank,
        local_rank=local_rank,
        pid=pid,
        end=end,
        failed_at=ended_at if finding.failed_at is None else finding.failed_at,
        exception=clean(finding.exception)[:EXCEPTION_CHARS_MAX],
        message=one_line(killed_why or finding.message, shell_note(exit_code, pid, memory_evidence)),
        traceback=shorten(clean(finding.traceback).strip("\n"), TRACEBACK_CHARS_MAX),
        log_tail=log_tail,
        error_file=files.error_file if Path(files.error_file).is_file() else "",
        log_file=log_file,
        step=step,
    )
    return typed(failure, table)


def find_end(exit_code: int, pid: int, memory_evidence: Callable[[int], str]) -> End:
    """Return how the process ended; a SIGKILL for lack of memory is distinguished from any other."""
    if exit_code >= 0:
        return Exited(exit_code)
    if exit_code == -signal.SIGKILL and (evidence := memory_evidence(pid)):
        return OutOfMemory(evidence)
    return Signalled(-exit_code, signal_name(-exit_code))


def signal_name(number: int) -> str:
    """Return the name of a signal, as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def shell_note(exit_code: int, pid: int, memory_evidence: Callable[[int], str]) -> str:
    """Return what a shell means by an exit code above 128 (`--no-python run.sh`)."""
    number = exit_code - 128
    if number not in set(signal.Signals):
        return ""
    note = f"exit code {exit_code} is 128 + {number}: a shell's code for a command killed by {signal_name(number)}"
    evidence = memory_evidence(pid) if number == signal.SIGKILL else ""
    return f"{note}; {evidence}" if evidence else note


def read_error_file(path: str, ended_at: float) -> ExitEvidence | None:
    """Return what the worker wrote about its exception; None if there is no such file or it is not valid."""
    try:
        with Path(path).open("rb") as file:
            content = json.loads(file.read(ERROR_FILE_BYTES_MAX).decode("utf-8", "replace"))
    except (OSError, ValueError, RecursionError):
        return None  # absent, cut short when the process was killed, or not ours
    message = content.get("message") if isinstance(content, dict) else None
    if isinstance(message, str):
        return ExitEvidence("", message, "")
    if not isinstance(message, dict) or not isinstance(message.get("message"), str):
        return None
    extra = message.get("extraInfo")
    return from_record(message["message"], extra if isinstance(extra, dict) else {}, ended_at)


def from_record(message: str, extra: dict[str, object], ended_at: float) -> ExitEvidence:
    """Return the evidence in the format that @record writes: the message starts with the exception's type."""
    found = TYPE_LINE.match(message.partition("\n")[0])
    exception, callstack = extra.get("exception"), extra.get("py_callstack")
    return ExitEvidence(
        exception if isinstance(exception, str) and exception else found["type"] if found else "",
        message,
        callstack if isinstance(callstack, str) else "",
        find_time(extra, ended_at),
    )


def find_time(extra: dict[str, object], ended_at: float) -> float:
    """Return when the exception was raised: never after the end.

    torch writes whole seconds, rounded down. Taken as it is, such a time would come before that of the failure which
    caused it; the end of that second is the earliest moment by which it had surely happened.
    """
    exact, coarse = as_seconds(extra.get("timestamp_s")), as_seconds(extra.get("timestamp"))
    if exact is not None:
        return min(exact, ended_at)
    return ended_at if coarse is None else min(math.floor(coarse) + 1.0, ended_at)


def as_seconds(value: object) -> float | None:
    try:
        seconds = float(value) if isinstance(value, str | int | float) else math.nan
    except (ValueError, OverflowError):
        return None
    return seconds if math.isfinite(seconds) and seconds > 0 else None


def read_stderr(end: End, files: WorkerLogFiles) -> ExitEvidence | None:
    """Return the exception or the crash at the end of stderr, if it can have caused this end."""
    lines = read_tail(files.stderr_path, STDERR_TAIL_BYTES_MAX, files.stderr_start_bytes).split("\n")
    match end:
        case Exited(code):
            watchdog = find_watchdog(lines) if code == 128 + signal.SIGABRT else None
            crash = find_crash(lines) if code > 128 else None
            return watchdog or crash or find_traceback(lines)
        case Signalled(signal.SIGINT):
            return find_traceback(lines)
        case Signalled(signal.SIGABRT):
            return find_watchdog(lines) or find_crash(lines)
        case Signalled(number) if number in CRASH_SIGNALS:
            return find_crash(lines)
        case _:
            return None


def find_watchdog(lines: list[str]) -> ExitEvidence | None:
    """Return the message of a watchdog of collectives that ended the process: that is no crash, but what a healthy rank
    suffers when another one fails. If C++ reports an exception, only that counts: a watchdog may have written
    before."""
    thrown = last_index(lines, lambda line: TERMINATE.match(line) is not None)
    first = thrown if thrown is not None else max(0, len(lines) - WATCHDOG_LINES_MAX)
    last = thrown + 1 + WHAT_LINES_MAX if thrown is not None else len(lines)
    written = [index for index in range(first, min(last, len(lines))) if WATCHDOG.search(lines[index])]
    if not written:
        return None
    text = RANK_PREFIX.sub("", lines[written[-1]]).strip().removeprefix("what():").strip()
    return ExitEvidence(WATCHDOG_EXCEPTION, text, "\n".join(lines[min(first, written[0]) :]))


def find_crash(lines: list[str]) -> ExitEvidence | None:
    """Return what C++'s terminate or faulthandler wrote, whichever came first; the rest of stderr belongs to it."""
    fatal = last_index(lines, lambda line: line.startswith(FATAL_ERROR))
    thrown = last_index(lines, lambda line: TERMINATE.match(line) is not None)
    if thrown is not None and (found := TERMINATE.match(lines[thrown])):
        what = "".join(lines[thrown + 1 : thrown + 2]).strip().removeprefix("what():").strip()
        name = (found["type"] or "").rpartition("::")[2]
        return ExitEvidence(name, f"{found['type']}: {what}" if name else lines[thrown], "\n".join(lines[thrown:]))
    if fatal is not None:
        return ExitEvidence("", lines[fatal], "\n".join(lines[fatal:]))
    return None


def find_traceback(lines: list[str]) -> ExitEvidence | None:
    """Return the last traceback that ended something, with the chain before it."""
    bare = [RANK_PREFIX.sub("", line) for line in lines]
    headers = [index for index, line in enumerate(bare) if is_header(bare, index, line)]
    if not headers:
        return find_syntax_error(bare)
    type_index = find_type_line(bare, headers[-1])
    if type_index is None:
        return None
    stop = find_stop(lines, bare, headers[-1], type_index)
    message_stop = find_message_stop(bare, type_index, stop)
    message = "\n".join(line.removeprefix("  | ") for line in bare[type_index:message_stop])
    found = TYPE_LINE.match(message.partition("\n")[0])
    start = chain_start(bare, headers)
    return ExitEvidence(found["type"] if found else "", message, "\n".join(bare[start:stop]))


def is_header(bare: list[str], index: int, line: str) -> bool:
    """Return whether a traceback starts here; not one that the interpreter ignored, as it does while it shuts down."""
    if not TRACEBACK_HEADER.match(line):
        return False
    return not (index and bare[index - 1].startswith("Exception ignored in"))


def find_type_line(bare: list[str], header: int) -> int | None:
    """Return the first line after the frames: not indented, or in an exception group not indented after its margin."""
    for index in range(header + 1, len(bare)):
        line = bare[index].removeprefix("  | ")
        if line.strip() and not line.startswith(" "):
            return index
    return None


def find_stop(lines: list[str], bare: list[str], header: int, type_index: int) -> int:
    """Return where the traceback ends: at an empty line, where torch's prefix ends, or where another writer starts."""
    has_prefix = lines[header] != bare[header]
    for index in range(type_index + 1, len(bare)):
        is_foreign = (has_prefix and lines[index] == bare[index]) or OTHER_WRITER.match(bare[index])
        if is_foreign or not bare[index].strip():
            return index
    return len(bare)


def find_message_stop(bare: list[str], type_index: int, stop: int) -> int:
    for index in range(type_index + 1, stop):
        if MESSAGE_END.search(bare[index]) or bare[index].startswith("  +-"):
            return index
    return stop


def chain_start(bare: list[str], headers: list[int]) -> int:
    """Return where the chain of exceptions starts that leads to the last one."""
    start = headers[-1]
    for header in reversed(headers[:-1]):
        between = [line for line in bare[header:start] if line.strip()]
        if between[-1] not in CHAIN_LINKS:
            break
        start = header
    return start


def find_syntax_error(bare: list[str]) -> ExitEvidence | None:
    end = last_index(bare, lambda line: SYNTAX_ERROR.match(line) is not None)
    start = last_index(bare[:end], lambda line: line.startswith('  File "'))
    if end is None or start is None:
        return None
    return ExitEvidence(bare[end].partition(":")[0], bare[end], "\n".join(bare[start : end + 1]))


def last_index(lines: list[str], is_wanted: Callable[[str], bool]) -> int | None:
    return next((index for index in reversed(range(len(lines))) if is_wanted(lines[index])), None)


def find_log_tail(files: WorkerLogFiles) -> tuple[str, tuple[str, ...]]:
    """Return the last lines of stderr, or of stdout if the script wrote there; and the path of that file."""
    streams = ((files.stderr_path, files.stderr_start_bytes), (files.stdout_path, files.stdout_start_bytes))
    for path, start_bytes in streams:
        lines = tail_lines(path, LOG_TAIL_LINES_MAX, LOG_TAIL_BYTES_MAX, start_bytes)
        if lines:
            return path, tuple(shorten(line, LOG_LINE_CHARS_MAX, " … ") for line in lines)
    return files.stderr_path, ()


def one_line(*texts: str) -> str:
    """Return the texts on one line, each shortened."""
    flat = (" ".join(clean(text).split()) for text in texts)
    return "; ".join(shorten(text, MESSAGE_CHARS_MAX, " … ") for text in flat if text)


def shorten(text: str, chars_max: int, mark: str = "\n… cut here …\n") -> str:
    """Return the head and the tail of a text that is too long."""
    if len(text) <= chars_max:
        return text
    head = (chars_max - len(mark)) // 2
    return text[:head] + mark + text[len(text) - (chars_max - len(mark) - head) :]


def clean(text: str) -> str:
    """Return the text without what cannot be encoded: JSON may hold half of a surrogate pair."""
    return text.encode("utf-8", "replace").decode()
