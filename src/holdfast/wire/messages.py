"""What agents, watchers, operators and the master say to one another, beyond the core's own events and orders.

Reports are delivered at least once: an agent keeps each until it is acknowledged, which the master does only
after its journal has what followed from it. Events are idempotent, so a repeat changes nothing.
Commands carry the master's term: an agent obeys no term lower than the highest it has seen, and a master that
hears of a higher one than its own knows that it is out of date.
An operator's question is answered once the journal has what followed from it; asked twice, it changes nothing more.
"""

from __future__ import annotations

import msgspec

from holdfast.core.events import DrainAsked, Event, ResizeAsked
from holdfast.core.orders import Order


class Report(msgspec.Struct, frozen=True, tag="report"):
    """Agent to master: an event, numbered within the agent's life. `term` is the highest it has seen."""

    number: int
    term: int
    event: Event


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Agent to master: I live. `term` is the highest it has seen."""

    term: int


class Farewell(msgspec.Struct, frozen=True, tag="farewell"):
    """Agent to master: I have heard that the job is over."""


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """Watcher to master: send me the journal from here, and go on."""

    after_seq: int


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Operator to master, on a connection like a watcher's: do this."""

    request: DrainAsked | ResizeAsked
    job_id: str = ""
    """The job that is meant; empty: whichever this master has. An address that was written down may by now be another
    job's."""


class Acknowledge(msgspec.Struct, frozen=True, tag="acknowledge"):
    """Master to agent: reports up to this number are dealt with; or an echo of a heartbeat."""

    number: int


class Command(msgspec.Struct, frozen=True, tag="command"):
    """Master to agent."""

    term: int
    order: Order


class Page(msgspec.Struct, frozen=True, tag="page"):
    """Master to watcher: records as they stand in the journal, JSON each, ending at `last_seq`."""

    last_seq: int
    records: tuple[str, ...]


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """Master to operator: what became of the request, in a sentence."""

    accepted: bool
    text: str
    seq: int = 0
    """The journal's last record when it was given."""


ToMaster = Report | Heartbeat | Farewell | Watch | Ask
FromMaster = Acknowledge | Command | Page | Answer
