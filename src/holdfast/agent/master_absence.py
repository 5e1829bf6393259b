"""A master that is away: what waits for its decision, how long that is waited for, and what this node's status says.

Workers that train go on without a master, for as long as it takes. When one fails, a step is interrupted or nothing
moves any more, a decision is needed. A master on another machine is waited for from then on, for `--master-timeout`;
after that the agent ends its node's part of the job, with the last checkpoint named.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from holdfast.agent.worker_processes import Worker
from holdfast.core.events import Event, StepInterrupted, WorkerFailed, WorkersStalled
from holdfast.core.faults.failures import describe, describe_error
from holdfast.util.logs import get_logger
from holdfast.util.node_status import NodeStatus, remove_status, status_path, write_status

WRITE_WAIT_S = 2.0

log = get_logger(__name__)


class LocalFacts(NamedTuple):
    """What the agent knows at one moment."""

    job_id: str
    master: str
    trouble: str
    view: int
    workers: Sequence[Worker]
    checkpoint: str


def undecided(unanswered: Sequence[Event]) -> str:
    """Return what waits for the master's decision, of the events that it has not acknowledged; empty if workers train
    on without it."""
    for event in unanswered:
        match event:
            case WorkerFailed(failure=failure):
                return describe(failure)
            case WorkersStalled():
                return "no worker of this node makes progress"
            case StepInterrupted(step_error=error):
                return f"step {error.step} was interrupted: {describe_error(error.exception, error.message)}"
            case _:
                pass
    return ""


class MasterAbsence:
    """How long the master has been away, what waits for it, and the node's status file."""

    def __init__(self, state_dir: str, node_id: str, decision_wait_s: float, facts: Callable[[], LocalFacts]) -> None:
        self._state_dir, self._node_id, self._wait_s, self._facts = state_dir, node_id, decision_wait_s, facts
        self._away_since = self._undecided_since = 0.0  # by the time of day, for the status only
        self._waits_from: float | None = None
        self._written: NodeStatus | None = None
        self._writing: asyncio.Task[None] | None = None
        self.needs_decision = ""
        """What waits for the master's decision while it is away."""

    def look(self, away_s: float, unanswered: Sequence[Event]) -> bool:
        """Record for how long the master has been away (0: it is not), and the events that it has not acknowledged;
        return whether a decision has been waited for long enough."""
        now, awake = time.time(), time.monotonic()
        self._away_since = (self._away_since or now - away_s) if away_s else 0.0
        self.needs_decision = undecided(unanswered) if away_s else ""
        if not self.needs_decision:
            self._undecided_since, self._waits_from = 0.0, None
        elif self._waits_from is None:
            self._undecided_since, self._waits_from = now, awake
        self._write("")
        return self._waits_from is not None and awake - self._waits_from > self._wait_s

    async def end(self, why: str) -> None:
        """Record how the node ended without its master; the file stays."""
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=WRITE_WAIT_S)
        self._write(why)
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=WRITE_WAIT_S)

    def close(self) -> None:
        """Remove the file, unless it says how the node ended."""
        if self._written is not None and not self._written.ended:
            remove_status(status_path(self._state_dir, self._written.job_id, self._node_id))

    def _write(self, ended: str) -> None:
        """Write the status if it has changed, in a thread: its disk may not answer."""
        facts = self._facts()
        if not self._state_dir or not facts.job_id or (self._writing is not None and not self._writing.done()):
            return
        status = self._status(facts, ended)
        if self._written is not None and msgspec.structs.replace(self._written, written_at=0.0) == status:
            return
        self._written = msgspec.structs.replace(status, written_at=time.time())
        self._writing = asyncio.create_task(self._write_file(self._written))

    async def _write_file(self, status: NodeStatus) -> None:
        path = status_path(self._state_dir, status.job_id, self._node_id)
        try:
            await asyncio.to_thread(write_status, path, status)
        except OSError as error:
            log.debug("node-status-not-written", f"cannot write {path}: {error.strerror}")

    def _status(self, facts: LocalFacts, ended: str) -> NodeStatus:
        assigned = [worker.assignment for worker in facts.workers if worker.assignment and not worker.ended]
        return NodeStatus(
            job_id=facts.job_id,
            node_id=self._node_id,
            agent_pid=os.getpid(),
            master=facts.master,
            master_away_since=self._away_since,
            trouble=facts.trouble if self._away_since else "",
            view=facts.view,
            ranks=tuple(assignment.rank for assignment in assigned),
            world_size=max((assignment.world_size for assignment in assigned), default=0),
            workers_running=len(assigned),
            needs_decision=self.needs_decision,
            gives_up_at=self._undecided_since + self._wait_s if self._undecided_since else 0.0,
            checkpoint=facts.checkpoint,
            ended=ended,
        )
