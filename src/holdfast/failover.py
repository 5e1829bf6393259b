"""The user's part in a failover: `--dynamic-failover-extension module::Class`.

    class Mine(holdfast.DynamicFailoverExtension):
        def get_user_failover_strategy(self, failure_info):
            if "NCCL WARN" in failure_info.traceback:
                return holdfast.FailoverStrategy.NODE_FAILOVER
            return holdfast.FailoverStrategy.NORMAL_FAILOVER

A `DynamicFailoverExtension` is asked by the job's master about every failure of a worker, before anything is decided
about it; a `DynamicAgentFailoverExtension` by each node's agent, about the failures of its own workers.

The rule: an extension may steer a recovery and never hold it up or break it. It runs in a thread of its own, one call
at a time and in the order of the failures, and has TIME_LIMIT_S to answer. Whatever else it does (raises, answers with
something that is no strategy, does not come back) is logged, and means NORMAL_FAILOVER. One that did not come back is
not asked again until it has.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.core.faults.failures import Failure, describe
from holdfast.core.strategies import FailoverStrategy
from holdfast.errors import UsageError, UserCodeError
from holdfast.util.logs import get_logger
from holdfast.util.user_code import UserCode, reason

__all__ = [
    "DynamicAgentFailoverExtension",
    "DynamicFailoverExtension",
    "Extension",
    "FailoverStrategy",
    "FailureInfo",
    "ask",
    "load",
]

TIME_LIMIT_S = 3.0
"""The whole job waits for the answer: long enough to ask a monitoring system, short beside a restart from storage."""
HISTORY_MAX = 64
"""Earlier failures that an extension is told, the newest ones."""

log = get_logger(__name__)
_T = TypeVar("_T")


class FailureInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The argument of an extension: a failure and what is known around it."""

    failure: Failure
    """Which worker failed and how: its typed end, exception, message, the tail of its log, and where its files are."""
    restart_count: int = 0
    """Restarts of the job's workers so far."""
    history: tuple[Failure, ...] = ()
    """Earlier failures that are known where the extension runs (master: the job's; agent: its node's), the oldest
    first."""

    @property
    def rank(self) -> int:
        return self.failure.rank

    @property
    def local_rank(self) -> int:
        return self.failure.local_rank

    @property
    def node_id(self) -> str:
        return self.failure.node_id

    @property
    def view(self) -> int:
        """The assignment of ranks in which it happened; each restart and each change of membership makes a new one."""
        return self.failure.view

    @property
    def exit_code(self) -> int:
        """Negative for a signal."""
        return self.failure.exit_code

    @property
    def traceback(self) -> str:
        """Empty if the process left none."""
        return self.failure.traceback

    @property
    def node_history(self) -> tuple[Failure, ...]:
        """Earlier failures of the same node."""
        return tuple(earlier for earlier in self.history if earlier.node_id == self.node_id)


class DynamicFailoverExtension:
    """Base class of an extension that the job's master asks, about every worker of the job."""

    def get_user_failover_strategy(self, failure_info: FailureInfo) -> FailoverStrategy:
        """Return what to do about this failure."""
        return FailoverStrategy.NORMAL_FAILOVER


class DynamicAgentFailoverExtension:
    """Base class of an extension that each node's agent asks, about the workers of that node."""

    def get_user_failover_strategy(self, failure_info: FailureInfo) -> FailoverStrategy:
        """Return what to do about this failure."""
        return FailoverStrategy.NORMAL_FAILOVER


Extension = DynamicFailoverExtension | DynamicAgentFailoverExtension
BASES = (DynamicFailoverExtension, DynamicAgentFailoverExtension)


# --- loading


def load(name: str) -> Extension:
    """Return an object of the class that `module::Class` names. Raises UsageError if there is none."""
    module_name, separator, class_name = name.partition("::")
    words = [*module_name.split("."), class_name]
    if not separator or not all(word.isidentifier() for word in words):
        raise UsageError(f"--dynamic-failover-extension {name}: give module::Class, as in my_package.failover::Mine")
    found = _find(name, module_name, class_name)
    if not isinstance(found, type) or not issubclass(found, BASES):
        raise UsageError(
            f"--dynamic-failover-extension {name}: {class_name} is not a class derived from"
            " holdfast.DynamicFailoverExtension or holdfast.DynamicAgentFailoverExtension"
        )
    make: Callable[[], Extension] = found
    return _guarded(f"--dynamic-failover-extension {name}: making a {class_name} failed", make)


def _find(name: str, module_name: str, class_name: str) -> object:
    with _working_directory_first():
        module = _guarded(
            f"--dynamic-failover-extension {name}: the module cannot be imported, from the working directory or"
            " elsewhere on sys.path",
            lambda: importlib.import_module(module_name),
        )
    if not hasattr(module, class_name):
        raise UsageError(f"--dynamic-failover-extension {name}: {module_name} has no {class_name}")
    return getattr(module, class_name)


@contextlib.contextmanager
def _working_directory_first() -> Iterator[None]:
    """Search the working directory first; afterwards last, for what the extension imports later."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
        if here not in sys.path:
            sys.path.append(here)


def _guarded(what: str, work: Callable[[], _T]) -> _T:
    try:
        return work()
    except (Exception, SystemExit) as error:  # it is the user's code, which may raise anything
        raise UsageError(f"{what} ({reason(error)})") from error


# --- asking

_user_code = UserCode("failover extension")


async def ask(
    extension: Extension,
    failure: Failure,
    history: Sequence[Failure] = (),
    *,
    restart_count: int = 0,
    limit_s: float | None = None,
) -> FailoverStrategy:
    """Return the extension's answer to a failure. Takes `limit_s` at most, TIME_LIMIT_S if not given; never raises."""
    info = FailureInfo(failure=failure, restart_count=restart_count, history=tuple(history)[-HISTORY_MAX:])
    try:
        found = await _user_code.ask(
            lambda: extension.get_user_failover_strategy(info), TIME_LIMIT_S if limit_s is None else limit_s
        )
    except UserCodeError as error:
        return _normal(extension, failure, str(error))
    return _judged(extension, failure, found)


def _judged(extension: Extension, failure: Failure, found: object) -> FailoverStrategy:
    if not isinstance(found, FailoverStrategy):
        return _normal(extension, failure, f"it answered with a {type(found).__name__}, not a FailoverStrategy")
    if found is not FailoverStrategy.NORMAL_FAILOVER:
        log.info("failover-advice", f"{_name(extension)} asks for {found.name}: {describe(failure)}")
    return found


def _normal(extension: Extension, failure: Failure, why: str) -> FailoverStrategy:
    text = f"{_name(extension)} failed, using NORMAL_FAILOVER: {why} ({describe(failure)})"
    log.error("failover-extension-failed", text)
    return FailoverStrategy.NORMAL_FAILOVER


def _name(extension: Extension) -> str:
    return f"the failover extension {type(extension).__name__}"


class AgentAdviser:
    """Asks an extension for agents, if there is one, before an agent reports a failure. Raises UsageError if `name`,
    `module::Class`, cannot be loaded; an empty name means that there is none."""

    def __init__(self, name: str) -> None:
        extension = load(name) if name else None
        self._extension = extension if isinstance(extension, DynamicAgentFailoverExtension) else None
        self._history: deque[Failure] = deque(maxlen=HISTORY_MAX)

    @property
    def is_asked(self) -> bool:
        """Whether there is an extension for agents; if not, a failure is reported at once."""
        return self._extension is not None

    async def advise(self, failure: Failure, restart_count: int, report: Callable[[Failure], None]) -> None:
        """Report the failure, with the extension's advice."""
        advice = FailoverStrategy.NORMAL_FAILOVER
        if self._extension is not None:
            history = tuple(self._history)
            self._history.append(failure)
            advice = await ask(self._extension, failure, history, restart_count=restart_count)
        report(msgspec.structs.replace(failure, advice=advice))
