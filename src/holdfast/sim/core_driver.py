"""The contract of core/transact.py with simulated time.

    1. collect the events of a moment              simulated_fleet.py
    2. decide, evolve, conclude, check             core.transact.advance, as in the master
    3. journal                                     left out: a simulated master does not die
    4. let the orders out                          on demand, see below
    5. come back at `next_deadline`                the event loop of simulation.py

A master computes the orders for all agents after each record. They name a wanted state, so it makes no difference when
an agent reads its own: a simulated agent asks for it (`order_for`) when it is about to act.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core import records as r
from holdfast.core.events import Event
from holdfast.core.orders import Order, standing_order
from holdfast.core.policy import next_deadline
from holdfast.core.settings import Settings
from holdfast.core.state import JobState
from holdfast.core.transact import advance, begin


class CoreDriver:
    """One job as its master sees it."""

    def __init__(self, job_id: str, settings: Settings, now: float) -> None:
        self.job = JobState()
        self.events = self.records = 0
        """How many were taken in and made, for reports of speed."""
        self._deadline: float | None = None
        self._is_deadline_known = False
        self.began = begin(self.job, job_id, settings, now).records

    def take(self, events: Sequence[Event], now: float) -> list[r.Record]:
        """Take all events of a moment in, then conclude until nothing more follows; return the records."""
        self._is_deadline_known = False
        self.events += len(events)
        made = list(advance(self.job, events, now))
        self.records += len(made)
        return made

    def deadline(self) -> float | None:
        """Return when the core wants to be asked again without an event. It is computed once after each turn."""
        if not self._is_deadline_known:
            self._deadline, self._is_deadline_known = next_deadline(self.job), True
        return self._deadline

    def order_for(self, node_id: str) -> Order | None:
        """Return what the agent of this node is to do now; None if the job does not know it."""
        node = self.job.nodes.get(node_id)
        return standing_order(self.job, node) if node else None
