"""What can go wrong with a worker, as typed values, and which of several failures is the cause.

When one rank dies, its peers' collectives break and they die too, each with a traceback of its own.
Those are *collateral*: folded under the first real failure. What its own fault blames on the node is none, nor is an
error of the device itself, whatever raised it: a watchdog of collectives is often the first to see a device die. The
rule, in order:

1. a failure that is not collateral comes before one that is;
2. of equals, the one that happened first (`failed_at`, the moment of the exception where it is known, not the
   moment the process was gone: a dying interpreter can take longer than its victims).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from holdfast.core.faults.device_errors import is_device_error
from holdfast.core.faults.fault_types import Blame, Fault
from holdfast.core.strategies import FailoverStrategy, Verdict
from holdfast.errors import ViewOverError

TRACEBACK_CHARS_MAX = 16_000
LOG_TAIL_LINES_MAX = 20
LOG_LINE_CHARS_MAX = 500
SIGNATURE_CHARS_MAX = 300
"""The length of a failure's text that is compared, to recognise it when it happens again."""


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """The process ended by itself with a code other than zero."""

    code: int


class Signalled(msgspec.Struct, frozen=True, tag="signalled"):
    """A signal ended the process."""

    signal: int
    name: str


class OutOfMemory(msgspec.Struct, frozen=True, tag="out-of-memory"):
    """The kernel killed the process because memory ran out."""

    evidence: str


class NotStarted(msgspec.Struct, frozen=True, tag="not-started"):
    """The process could not be started at all."""

    reason: str


End = Exited | Signalled | OutOfMemory | NotStarted


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's failure: how it ended, and what is known of why."""

    node_id: str
    view: int
    rank: int
    local_rank: int
    pid: int
    end: End
    failed_at: float
    exception: str = ""
    """The exception's type name, e.g. `ValueError`; empty if none was found."""
    message: str = ""
    traceback: str = ""
    log_tail: tuple[str, ...] = ()
    error_file: str = ""
    log_file: str = ""
    advice: FailoverStrategy = FailoverStrategy.NORMAL_FAILOVER
    """Of the user's failover extension."""
    fault: Fault | None = None
    """What kind of fault it is, by the tables of the node it happened on."""
    step: int = -1
    """The step that the worker was in; -1 before its first, or if its script does not speak to Holdfast."""
    verdict: Verdict = Verdict.NORMAL
    """Of the user's error monitor, on the node."""

    @property
    def blame(self) -> Blame | None:
        """Return whose fault it is; None if it was not classified."""
        return self.fault.blame if self.fault else None

    @property
    def exit_code(self) -> int:
        """Return the exit code as torchrun counts it: negative for a signal."""
        match self.end:
            case Exited(code):
                return code
            case Signalled(signal, _):
                return -signal
            case OutOfMemory():
                return -9
            case NotStarted():
                return 127


# By type first. These are raised when a peer or the store went away; torch raises nothing else for it by type.
COLLATERAL_TYPES = frozenset(
    {
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
        "ConnectionResetError",
        "BrokenPipeError",
        ViewOverError.__name__,
    }
)
# By text last: gloo raises a bare RuntimeError, NCCL's text differs by version.
COLLATERAL_TEXTS = (
    ViewOverError.__name__,  # where torch has made a RuntimeError of it
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "remote process exited",
    "NCCL communicator was aborted",
    "Socket Timeout",
    "Timed out waiting",
    "FORCE STOP",  # Ascend: the device was stopped by this process, so that its collectives end
)


def is_collateral(failure: Failure) -> bool:
    """Return whether a healthy rank suffers this failure because another one failed."""
    return failure.blame is not Blame.NODE and is_collateral_error(failure.exception, failure.message)


def is_collateral_error(exception: str, message: str) -> bool:
    """Return whether a healthy rank raises this exception because another one failed."""
    if is_device_error(exception, message):
        return False
    if exception.rpartition(".")[2] in COLLATERAL_TYPES:
        return True
    return bool(exception) and any(text in message for text in COLLATERAL_TEXTS)


def is_from_outside(failure: Failure) -> bool:
    """Return whether another process ended this one: if it happens twice, that says nothing about the worker."""
    return isinstance(failure.end, Signalled) and failure.end.name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")


def root_cause(failures: Iterable[Failure]) -> Failure | None:
    """Return the failure to show first, or None if there is none."""
    return min(failures, key=lambda f: (is_collateral(f), f.failed_at, f.rank), default=None)


def describe_end(end: End) -> str:
    """Return how a process ended, in a few words."""
    match end:
        case Exited(code):
            return f"exited with code {code}"
        case Signalled(_, name):
            return f"killed by {name}"
        case OutOfMemory(evidence):
            return f"killed because memory ran out ({evidence})"
        case NotStarted(reason):
            return f"could not be started: {reason}"


def describe_error(exception: str, message: str) -> str:
    """Return an exception as the last line of its traceback shows it."""
    return f"{exception}: {message}" if message else exception


def describe(failure: Failure) -> str:
    """Return one line: which worker failed, how, and why as far as it is known."""
    who = f"rank {failure.rank} on {failure.node_id}"
    text = f"{who} {describe_end(failure.end)}"
    if failure.message:
        return f"{text}: {failure.message}"
    chosen = isinstance(failure.end, Exited) and failure.fault and failure.fault.evidence  # a code that says something
    return f"{text}: {failure.fault.meaning}" if failure.fault and chosen else text
