"""Asks the user's failover extension about failures, before the core hears of them: their answers become part of the
events, so that the core needs no second look and the journal tells what was advised.

The failures of a batch are asked about one after the other, for failover.TIME_LIMIT_S altogether: that is the longest
that a batch is held up, and those that are left then go without advice. The order of the batch does not change.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from holdfast import failover
from holdfast.core.events import Event, WorkerFailed
from holdfast.core.faults.failures import Failure
from holdfast.core.records import Record, WorkerFailedRecord
from holdfast.core.strategies import FailoverStrategy
from holdfast.failover import HISTORY_MAX, DynamicFailoverExtension
from holdfast.util.logs import get_logger

log = get_logger(__name__)


class MasterAdviser:
    """The extension, if there is one, and what has failed before."""

    def __init__(self, extension: DynamicFailoverExtension | None) -> None:
        self._extension = extension
        self._history: deque[Failure] = deque(maxlen=HISTORY_MAX)

    def learn(self, records: Iterable[Record]) -> None:
        """Remember the failures among them."""
        self._history.extend(record.failure for record in records if isinstance(record, WorkerFailedRecord))

    def has_to_say(self, event: Event) -> bool:
        """Return whether the extension is to be asked: not about what a node's own extension has judged, nor about
        repeats, which agents send when a connection broke."""
        if self._extension is None or not isinstance(event, WorkerFailed):
            return False
        advised = event.failure.advice is not FailoverStrategy.NORMAL_FAILOVER
        return not advised and not any(_is_same(event.failure, earlier) for earlier in self._history)

    async def advise(self, events: Sequence[Event], restart_count: int) -> list[Event]:
        """Return the same events, each failure with the extension's advice."""
        until, advised, left = time.monotonic() + failover.TIME_LIMIT_S, [], 0
        for event in events:
            limit_s = until - time.monotonic()
            advised.append(await self._advised(event, restart_count, limit_s) if limit_s > 0 else event)
            left += limit_s <= 0 and self.has_to_say(event)
        if left:
            text = f"the failover extension timed out: it was not asked about {left} more failures"
            log.error("failover-extension-timeout", text)
        return advised

    async def _advised(self, event: Event, restart_count: int, limit_s: float) -> Event:
        if self._extension is None or not isinstance(event, WorkerFailed) or not self.has_to_say(event):
            return event
        told = tuple(self._history)
        advice = await failover.ask(self._extension, event.failure, told, restart_count=restart_count, limit_s=limit_s)
        return msgspec.structs.replace(event, failure=msgspec.structs.replace(event.failure, advice=advice))


def _is_same(one: Failure, other: Failure) -> bool:
    return (one.node_id, one.view, one.local_rank, one.pid) == (other.node_id, other.view, other.local_rank, other.pid)
