"""What agents, watchers, operators and the master say to one another, beyond the core's own events and orders.

Reports are delivered at least once: an agent keeps each until it is acknowledged, which the master does only
after its journal has what followed from it. Events are idempotent, so a repeat changes nothing.
Commands carry the master's term: an agent obeys no term lower than the highest it has seen, and a master that
hears of a higher one than its own knows that it is out of date.
An operator's question is answered once the journal has what followed from it; asked twice, it changes nothing more.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.core.events import DrainRequested, Event, ResizeRequested
from holdfast.core.orders import Order
from holdfast.core.settings import HEARTBEAT_INTERVAL_MAX_S


class EventReport(msgspec.Struct, frozen=True, tag="event-report"):
    """Agent to master: an event, numbered within the agent's incarnation. `term` is the highest it has seen."""

    number: int
    term: int
    event: Event
    sent_at: float = 0.0
    """By the agent's clock, so that the master can translate the event's own times."""


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Agent to master: I live. `term` is the highest it has seen."""

    term: int


class Farewell(msgspec.Struct, frozen=True, tag="farewell"):
    """Agent to master: I have heard that the job is over."""


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """Watcher to master: send me the journal from here, and go on."""

    after_seq: int


class OperatorRequest(msgspec.Struct, frozen=True, tag="operator-request"):
    """Operator to master, on a connection like a watcher's: do this."""

    request: DrainRequested | ResizeRequested
    job_id: str = ""
    """The job that is meant; empty: whichever this master has. An address that was written down may by now be another
    job's."""


class AskStacks(msgspec.Struct, frozen=True, tag="ask-stacks"):
    """Operator to master: show me the stacks of all ranks."""

    job_id: str = ""
    """As in OperatorRequest."""


class StackGroupMessage(msgspec.Struct, frozen=True):
    """Ranks of a node that have the same stacks."""

    ranks: tuple[int, ...]
    stack: str


class ReadStacks(msgspec.Struct, frozen=True, tag="read-stacks"):
    """Master to agent: read the stacks of your workers."""

    request: int


class NodeStacks(msgspec.Struct, frozen=True, tag="node-stacks"):
    """Agent to master, and on to the operator: the stacks of a node's workers."""

    request: int
    node_id: str
    groups: tuple[StackGroupMessage, ...]
    note: str = ""
    """Why there are none, or what else is to be known."""


class Acknowledge(msgspec.Struct, frozen=True, tag="acknowledge"):
    """Master to agent: reports up to this number are dealt with; or an echo of a heartbeat."""

    number: int


class Command(msgspec.Struct, frozen=True, omit_defaults=True, tag="command"):
    """Master to agent."""

    term: int
    order: Order
    heartbeat_interval_s: Annotated[float, Meta(ge=0.0, le=HEARTBEAT_INTERVAL_MAX_S)] = 0.0
    """How often it is to send a heartbeat, where there are many agents; 0: as it was started."""


class Page(msgspec.Struct, frozen=True, tag="page"):
    """Master to watcher: records as they stand in the journal, JSON each, ending at `last_seq`."""

    last_seq: int
    records: tuple[str, ...]


class OperatorAnswer(msgspec.Struct, frozen=True, tag="operator-answer"):
    """Master to operator: what became of the request, in a sentence."""

    accepted: bool
    text: str
    seq: int = 0
    """The journal's last record when it was given."""


ToMaster = EventReport | Heartbeat | Farewell | Watch | OperatorRequest | AskStacks | NodeStacks
FromMaster = Acknowledge | Command | Page | OperatorAnswer | ReadStacks | NodeStacks
