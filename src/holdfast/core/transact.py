"""The contract between the core and its driver (the master, a test, a simulator).

    1. collect events; the clock is the driver's
    2. `transact(job, events, now)` decides, evolves, and concludes until nothing more follows
    3. append the durable records to the journal; if that fails, stop: memory is ahead of disk
    4. only then let the orders and everything else out
    5. come back at `next_deadline(job)`, with no events, or earlier with some

`begin` opens a term: the first one creates the job, later ones take it over as the journal left it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from holdfast.core import records as r
from holdfast.core.decide import decide
from holdfast.core.events import Event
from holdfast.core.evolve import evolve
from holdfast.core.invariants import check_next
from holdfast.core.orders import Addressed, check_orders, orders
from holdfast.core.policy import conclude
from holdfast.core.settings import Settings
from holdfast.core.state import JobState

CONCLUSIONS_MAX, CONCLUSIONS_OF_A_NODE_MAX = 10_000, 10
"""More than this in one transaction, with as many more for each node, means that the policy goes round in circles: a
bug. All nodes may be lost in one."""


class Turn(msgspec.Struct, frozen=True):
    """What came of a batch of events."""

    records: list[r.Record]
    orders: list[Addressed]


def transact(job: JobState, events: Iterable[Event], now: float) -> Turn:
    """Apply all events before anything is concluded, as a complete picture decides better."""
    return _with_orders(job, advance(job, events, now))


def advance(job: JobState, events: Iterable[Event], now: float) -> Iterator[r.Record]:
    """Take events in as `transact` does, without making orders: yield each record when it has been applied."""
    for event in events:
        for record in decide(job, event, now):
            yield _applied(job, record)
    for _ in range(CONCLUSIONS_MAX + CONCLUSIONS_OF_A_NODE_MAX * len(job.nodes)):
        conclusion = conclude(job, now)
        if conclusion is None:
            return
        yield _applied(job, conclusion)
    raise AssertionError("the policy does not terminate")


def begin(job: JobState, job_id: str, settings: Settings, now: float) -> Turn:
    """Open the next term of a job, creating the job in its first."""
    return _with_orders(job, _begun(job, job_id, settings, now))


def _begun(job: JobState, job_id: str, settings: Settings, now: float) -> Iterator[r.Record]:
    if job.term == 0:
        yield _applied(job, r.JobCreated(at=now, job_id=job_id, settings=settings))
        deadline = now + settings.join_timeout_s
        why = "not enough nodes have joined yet"
        yield _applied(job, r.GatheringBegan(at=now, deadline=deadline, why=why))
    yield _applied(job, r.TermBegan(at=now, term=job.term + 1))


def replay(records: Iterable[r.Record]) -> JobState:
    """Return the job that a journal describes."""
    job = JobState()
    for record in records:
        evolve(job, record)
    return job


def _applied(job: JobState, record: r.Record) -> r.Record:
    check_next(job, record)
    evolve(job, record)
    return record


def _with_orders(job: JobState, applied: Iterable[r.Record]) -> Turn:
    """Collect the records with the orders that follow from each, in the state it led to."""
    done = Turn([], [])
    for record in applied:
        done.records.append(record)
        following = orders(job, record)
        check_orders(following)
        done.orders.extend(following)
    return done
