"""What the master is told of workers that failed: how each ended, or why its step failed, as a typed failure.

A worker's end is examined (autopsy.py) before it is reported. Where the user has a failover extension, that is asked
first, for as long as it may take; the report then names the view in which the worker failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast.agent.autopsy import examine, one_line, read_error_file
from holdfast.agent.config import AgentConfig
from holdfast.agent.reports import Reports
from holdfast.agent.worker_processes import Worker
from holdfast.core import events
from holdfast.core.events import StepError
from holdfast.core.faults.failures import Failure, NotStarted
from holdfast.core.faults.fault_table import typed
from holdfast.failover import AgentAdviser
from holdfast.util.tasks import TaskSet
from holdfast.wire.progress_page import WorkerPhase
from holdfast.wire.worker_messages import StepInterruptedMessage


class FailureReports:
    """The reports of a node's failures. `memory_evidence` returns why the kernel ended a process, if it was for lack of
    memory; `restart_count` is asked for the failover extension; `reported` is called with each failure."""

    def __init__(
        self,
        config: AgentConfig,
        reports: Reports,
        memory_evidence: Callable[[int], str],
        tasks: TaskSet,
        restart_count: Callable[[], int],
        reported: Callable[[Failure], None],
    ) -> None:
        self._config, self._reports, self._tasks = config, reports, tasks
        self._memory_evidence, self._restart_count, self._reported = memory_evidence, restart_count, reported
        self._adviser = AgentAdviser(config.failover)

    def report_failing(self, worker: Worker, local_rank: int) -> None:
        """Report that a worker's script has failed, and by what as far as its error file says so already."""
        found = read_error_file(worker.files.error_file, time.time())
        exception, message = (found.exception, found.message) if found else ("", "")
        self._reports.report(events.WorkerFailing, local_rank=local_rank, exception=exception, message=message)

    def report_end(self, worker: Worker, view: int, local_rank: int, code: int, ended_at: float) -> bool:
        """Report how a worker of the view has ended. Return whether it succeeded."""
        assert worker.assignment is not None
        failure = examine(
            code,
            node_id=self._config.node_id,
            view=view,
            rank=worker.assignment.rank,
            local_rank=local_rank,
            pid=worker.pid,
            ended_at=ended_at,
            files=worker.files,
            memory_evidence=(lambda pid: "") if worker.killed_why else self._memory_evidence,
            killed_why=worker.killed_why,
            step=worker.page.get("step") if worker.joined else -1,
            is_unfinished=worker.joined > 0 and WorkerPhase.PARKED < worker.page.get("phase") < WorkerPhase.ENDED,
            table=self._config.fault_table,
        )
        if failure is None:
            self._reports.report(events.WorkerSucceeded, local_rank=local_rank)
        else:
            self._report(failure)
        return failure is None

    def report_not_started(self, view: int, rank: int, local_rank: int, reason: str) -> None:
        """Report a worker that has no process."""
        failure = Failure(
            node_id=self._config.node_id,
            view=view,
            rank=rank,
            local_rank=local_rank,
            pid=0,
            end=NotStarted(reason),
            failed_at=time.time(),
        )
        self._report(typed(failure, self._config.fault_table))

    def report_interrupted(self, worker: Worker, local_rank: int, message: StepInterruptedMessage) -> None:
        """Report that a worker's step failed, while its process lives."""
        assert worker.assignment is not None
        step_error = StepError(
            rank=worker.assignment.rank,
            local_rank=local_rank,
            step=message.step,
            at=message.at,
            exception=message.exception,
            message=one_line(message.message),
            traceback=message.traceback,
            collateral=message.collateral,
        )
        self._reports.report(events.StepInterrupted, step_error=step_error)

    def _report(self, failure: Failure) -> None:
        if self._adviser.is_asked:
            self._tasks.start(self._adviser.advise(failure, self._restart_count(), self._send))
        else:
            self._send(failure)

    def _send(self, failure: Failure) -> None:
        """Report a failure under the view in which it happened, however long the user's extension took."""
        self._reported(failure)
        self._reports.report(events.WorkerFailed, view=failure.view, failure=failure)
