"""How an agent's run ends."""

from __future__ import annotations

import asyncio
import signal

import msgspec

from holdfast import exit_codes
from holdfast.agent.console import signal_words
from holdfast.agent.master_supervisor import MasterSupervisor
from holdfast.core.faults.failures import Failure
from holdfast.core.orders import Exit
from holdfast.core.records import Outcome
from holdfast.errors import AuthenticationError, LaunchError


class Result(msgspec.Struct, frozen=True):
    """How the job, or this node's part in it, ended."""

    exit_code: int
    why: str
    outcome: Outcome | None = None
    cause: Failure | None = None
    job_id: str = ""
    """Empty if the job had no view here."""
    saved: str = ""
    """The checkpoint of the state that the job was stopped with; empty: there is none."""
    last_line: str = ""
    """The end in one line; empty: `why` says it all."""
    failures: tuple[Failure, ...] = ()
    """What failed on this node in the newest view, the cause perhaps among it."""
    ranks: tuple[int, ...] = ()
    """Those of this node in the newest view it has served."""


def ended_by(received: signal.Signals) -> Result:
    """Return the result of a run that a signal ended."""
    return Result(exit_codes.SIGNAL_BASE + int(received), f"ended by {signal_words(received)}", Outcome.STOPPED)


def reason_of(order: Exit, checkpoint: str) -> str:
    """Return why the job ended, and the checkpoint from which the next start continues."""
    if order.outcome is not Outcome.FAILED or not checkpoint:
        return order.why
    return f"{order.why}; the last checkpoint is {checkpoint}"


def link_failed(link: asyncio.Task[None], supervisor: MasterSupervisor | None) -> Result:
    """Return the result of a run whose connection to the master failed for good; raise what is a bug."""
    error = link.exception()
    if isinstance(error, AuthenticationError) and supervisor and supervisor.is_foreign:
        remedy = "give this job another --master-port or --rdzv-endpoint, or --standalone"
        return Result(exit_codes.REFUSED, f"port {supervisor.port} is in use by a job with another token: {remedy}")
    if isinstance(error, AuthenticationError):
        return Result(exit_codes.REFUSED, str(error))
    if isinstance(error, LaunchError):
        return Result(exit_codes.WORKER_FAILED, str(error))
    assert error is not None, "the link ended without a reason"
    raise error
