"""The contract of core/transact.py with simulated time.

    1. collect the events of a moment              simulated_fleet.py
    2. decide, evolve, conclude                    core.transact, as in the master
    3. journal                                     left out: a simulated master does not die
    4. let the orders out                          on demand, see below
    5. come back at `next_deadline`                the event loop of simulation.py

A master computes the orders for all agents after each record. They name a wanted state, so it makes no difference when
an agent reads its own: a simulated agent asks for it (`order_for`) when it is about to act.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core import records as r
from holdfast.core.decide import decide
from holdfast.core.events import Event
from holdfast.core.evolve import evolve
from holdfast.core.orders import Order, standing_order
from holdfast.core.policy import conclude, next_deadline
from holdfast.core.settings import Settings
from holdfast.core.state import JobState
from holdfast.core.transact import CONCLUSIONS_MAX, begin


class CoreDriver:
    """One job as its master sees it."""

    def __init__(self, job_id: str, settings: Settings, now: float) -> None:
        self.job = JobState()
        self.events = self.records = 0
        """How many were taken in and made, for reports of speed."""
        self._deadline: float | None = None
        self._is_deadline_known = False
        self.began = begin(self.job, job_id, settings, now).records

    def take(self, events: Iterable[Event], now: float) -> list[r.Record]:
        """Take all events of a moment in, then conclude until nothing more follows; return the records."""
        job, made = self.job, []
        self._is_deadline_known = False
        for event in events:
            self.events += 1
            for decided in decide(job, event, now):
                evolve(job, decided)
                made.append(decided)
        for _ in range(CONCLUSIONS_MAX):
            concluded = conclude(job, now)
            if concluded is None:
                self.records += len(made)
                return made
            evolve(job, concluded)
            made.append(concluded)
        raise AssertionError("the policy does not terminate")

    def deadline(self) -> float | None:
        """Return when the core wants to be asked again without an event. It is computed once after each turn."""
        if not self._is_deadline_known:
            self._deadline, self._is_deadline_known = next_deadline(self.job), True
        return self._deadline

    def order_for(self, node_id: str) -> Order | None:
        """Return what the agent of this node is to do now; None if the job does not know it."""
        node = self.job.nodes.get(node_id)
        return standing_order(self.job, node) if node else None
