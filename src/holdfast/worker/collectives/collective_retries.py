"""Running a collective again below the step, after a connection of its group broke while every process lived.

The rule: **a retry happens for a whole group or not at all, and what it repeats is decided once.** Two ranks in
different collectives end in gloo's `std::terminate`, and a sum that was made of the wrong numbers looks like any other.
So nothing is repeated before all members of the group have said, over a connection that is not one of the group's (the
view's store), how far each of them is; and what they then do is one pure function (`decide`) of what all have said.

What makes it necessary to agree: a collective ends on each rank for itself. A connection that breaks at the end of an
all-reduce leaves ranks that have the sum, and may have gone on to other collectives, beside ranks that have not. The
operations of a group are therefore numbered on each rank, from 0 in each view, as they are begun (SPMD programs begin
the same ones in the same order, or are wrong without a broken connection too). A rank reports (`RetryReport`)

    begun       how many it has begun
    first       the number of the first that has not succeeded here
    oldest      the number from which on it can take part in each once more: see kept_inputs.py
    in_a_row    how many retries came to nothing: none since the last operation that succeeded
    sent, received    the transfers with each other member
    refusal     why there can be no retry, if it knows a reason

and `decide` says: from the lowest `first` of all, if that is not below any rank's `oldest`. Ranks that have succeeded
*serve* the repeated operation: they run it on copies of what they gave to it, and their callers notice nothing. The
others put their inputs back and run it on the caller's own tensors. gloo adds in an order that depends on ranks and
sizes alone, so the bits are those of an undisturbed run.

The order of a retry, on a thread of the group (repeatable_gloo.py), all within one view:

    1  An operation failed here, or a socket of the group broke and the store says that a member wants a retry. One that
       only sees a broken socket does nothing: at the end of a job, or of a view, peers close theirs first.
    2  Wait NEWS_S for the end of the view, as a death may have broken the socket. Then say in the store that a retry is
       wanted, and shut all sockets of the group, which the other members notice at once, whatever they are doing; from
       now on callers that begin an operation wait.
    3  Wait until what gloo has under way has ended, or sleeps for good (gloo_rest.py), so that it writes into no tensor
       any more. If that is not known within SETTLE_S, refuse.
    4  Report; wait for the reports of all; decide.
    5  Connect again under a key that holds the number of the retry; operations count from 0 there, with new tags.
    6  Repeat, in the old order; then let callers go on.

Without a retry, that is if a report or the connections are not there in time, if `decide` refuses, or if the retry
breaks as often as `--collective-retries` allows, those who wait get the error that gloo raised, and the step is broken
and repeated as without any of this (the rung `retry`). It is enough that one rank gets there: its error ends the view.

**The end of the view wins.** Each wait here also ends when the view does, at once. If a member was killed its agent
sees that within milliseconds, the view is revoked, and the retry that waits for the dead member's report is over. What
would be lost is the error that a survivor raised before, and nothing waits for that error if a process has ended. Where
no agent can tell (its node is gone), the survivors raise AGREE_S later than without this.

What is not retried: sends and receives (a message may have been delivered or not), so a retry is refused if one is
under way, or if what was sent is not what was received; a collective that hangs or runs out of time, as no connection
is broken; large in-place collectives beyond the bound of kept_inputs.py; collectives of accelerators' libraries. NCCL
cannot: an error leaves a communicator that can only be aborted, with kernels in the stream that have read and written
an unknown part. A communicator that can has the methods of `RepeatableGloo`, nothing else asks for gloo.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence

import msgspec

from holdfast.core.environment_variables import RETRIES_VARIABLE

AGREE_S = 2.0
"""How long the reports of all members may take. Side threads write them, so no rank has to compute to an end first; but
a process that is stopped writes none, and a step that is repeated costs less than a long wait."""
SETTLE_S = 0.5
"""How long gloo may take to come to rest when its sockets are shut: milliseconds, unless the machine is overloaded."""


class RetryReport(msgspec.Struct, frozen=True):
    """How far one member of a group is."""

    begun: int
    first: int
    oldest: int
    in_a_row: int = 0
    sent: dict[str, int] = {}
    """How many transfers to each member, by its rank in the group, have begun."""
    received: dict[str, int] = {}
    """How many from each have come."""
    refusal: str = ""


class RetryDecision(msgspec.Struct, frozen=True):
    """What all members do: repeat each operation from this number on, or nothing, for this reason."""

    first: int
    refusal: str = ""


def decide(reports: Sequence[RetryReport], limit: int) -> RetryDecision:
    """Return what follows from the reports of all members, by rank: the same on each of them."""
    first = min(report.first for report in reports)
    for rank, report in enumerate(reports):
        if report.refusal:
            return RetryDecision(first, f"rank {rank} of the group: {report.refusal}")
        if report.in_a_row >= limit:
            return RetryDecision(first, f"it broke again after {report.in_a_row} retries (--collective-retries)")
        if report.oldest > first:
            return RetryDecision(first, f"rank {rank} of the group does not have the inputs of collective {first} now")
        for other, count in sorted(report.sent.items()):
            came = reports[int(other)].received.get(str(rank), 0)
            if came != count:
                return RetryDecision(first, f"rank {rank} has sent {count} times to rank {other}, which got {came}")
    return RetryDecision(first)


def retries_allowed(environment: Mapping[str, str] = os.environ) -> int:
    """Return how often one collective may be run again here; 0 where no agent has said so."""
    text = environment.get(RETRIES_VARIABLE, "")
    return int(text) if text.isdecimal() else 0


class RetryCounter:
    """How many collectives this process has run again. `show` is called with the number whenever it changes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0
        self.show: Callable[[int], None] | None = None

    def add(self, count: int) -> None:
        """Count collectives that were run again and succeed, or will be told to have broken once more."""
        with self._lock:
            self.count += count
            if self.show is not None:
                self.show(self.count)


retries = RetryCounter()
"""Those of this process."""
