"""The user's failover extension, where agents ask it: about their own workers, before the master hears of an end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from holdfast import failover
from holdfast.core.faults import Failure
from holdfast.core.ladder import FailoverStrategy


class Adviser:
    """Asks an extension for agents, if there is one. It may steer a recovery; it never holds one up for long."""

    def __init__(self, name: str) -> None:
        """Raises UsageError if `name`, `module::Class`, cannot be loaded; an empty one is nobody."""
        extension = failover.load(name) if name else None
        self._extension = extension if isinstance(extension, failover.DynamicAgentFailoverExtension) else None
        self._history: deque[Failure] = deque(maxlen=failover.HISTORY_MAX)

    @property
    def is_asked(self) -> bool:
        """Whether there is anybody to ask; if not, a failure is reported in the same breath."""
        return self._extension is not None

    async def tell(self, failure: Failure, restart_count: int, report: Callable[[Failure], None]) -> None:
        """Report the failure, with the extension's advice."""
        advice = FailoverStrategy.NORMAL_FAILOVER
        if self._extension is not None:
            history = tuple(self._history)
            self._history.append(failure)
            advice = await failover.ask(self._extension, failure, history, restart_count=restart_count)
        report(msgspec.structs.replace(failure, advice=advice))
