"""The workers of one view on this node: started together, watched one by one, stopped together.

Each worker has its own watcher, which wakes when the process ends (pidfd) and turns its end into one typed
report. A worker that ends while the crew is being stopped was meant to, and is not reported.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from holdfast.agent.autopsy import examine
from holdfast.agent.config import AgentConfig
from holdfast.agent.environment import worker_environment
from holdfast.agent.launcher import Child, Launcher
from holdfast.agent.logs import WorkerLogFiles, WorkerLogs
from holdfast.agent.memory import MemoryWatch
from holdfast.core.events import Event, WorkerFailed, WorkersStarted, WorkerSucceeded
from holdfast.core.faults import Failure, NotStarted
from holdfast.core.orders import Serve
from holdfast.errors import LaunchError

log = structlog.get_logger("agent")


@dataclass
class Worker:
    """One running worker."""

    local_rank: int
    rank: int
    child: Child
    files: WorkerLogFiles


class Crew:
    """This node's workers in a view."""

    def __init__(
        self,
        config: AgentConfig,
        incarnation: str,
        order: Serve,
        launcher: Launcher,
        logs: WorkerLogs,
        memory: MemoryWatch,
        report: Callable[[Event], None],
    ) -> None:
        self._config, self._incarnation, self._order = config, incarnation, order
        self._launcher, self._logs, self._memory, self._report = launcher, logs, memory, report
        self._workers: list[Worker] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._stopping = False
        self.succeeded = 0

    @property
    def view(self) -> int:
        """The view it serves."""
        return self._order.view

    @property
    def running(self) -> bool:
        """Whether any of its workers is."""
        return any(not worker.child.ended for worker in self._workers)

    async def start(self) -> None:
        """Start all workers. One that cannot be started is reported like one that failed."""
        results = await asyncio.gather(*(self._start(i) for i in range(self._config.workers)))
        if all(results):
            pids = tuple(w.child.pid for w in sorted(self._workers, key=lambda w: w.local_rank))
            self._report(
                WorkersStarted(
                    node_id=self._config.node_id, incarnation=self._incarnation, view=self.view, pids=pids
                )
            )

    async def _start(self, local_rank: int) -> bool:
        rank = self._order.first_rank + local_rank
        try:
            files = self._logs.open(self.view, local_rank, rank)
            try:
                child = await self._launch(local_rank, files)
            finally:
                files.close()
        except (LaunchError, OSError) as error:
            self._report_failure(self._not_started(local_rank, rank, str(error)))
            return False
        self._memory.watch(child.pid)
        worker = Worker(local_rank, rank, child, files)
        self._workers.append(worker)
        self._watchers.append(asyncio.create_task(self._watch(worker)))
        return True

    async def _launch(self, local_rank: int, files: WorkerLogFiles) -> Child:
        program = self._config.program
        environment = worker_environment(self._config, self._order, local_rank, files.error_file)
        stdout = sys.stdout.fileno() if files.stdout_fd is None else files.stdout_fd
        stderr = sys.stderr.fileno() if files.stderr_fd is None else files.stderr_fd
        if program.kind != "exec" and not program.clean:
            return await self._launcher.start_python(
                program.argv,
                kind=program.kind,
                env=environment,
                cwd=str(Path.cwd()),
                stdout=stdout,
                stderr=stderr,
                local_rank=local_rank,
                numa_binding=program.numa_binding,
            )
        return await self._launcher.start_exec(
            program.command(),
            env=environment,
            cwd=str(Path.cwd()),
            stdout=stdout,
            stderr=stderr,
            local_rank=local_rank,
            numa_binding=program.numa_binding,
        )

    def _not_started(self, local_rank: int, rank: int, reason: str) -> Failure:
        return Failure(
            node_id=self._config.node_id,
            view=self.view,
            rank=rank,
            local_rank=local_rank,
            pid=0,
            end=NotStarted(reason),
            failed_at=time.time(),
        )

    async def _watch(self, worker: Worker) -> None:
        status = await worker.child.wait()
        ended_at = time.time()
        if not self._stopping:
            self._report_end(worker, status, ended_at)
        self._memory.forget(worker.child.pid)

    def _report_end(self, worker: Worker, status: int, ended_at: float) -> None:
        failure = examine(
            os.waitstatus_to_exitcode(status),
            node_id=self._config.node_id,
            view=self.view,
            rank=worker.rank,
            local_rank=worker.local_rank,
            pid=worker.child.pid,
            ended_at=ended_at,
            files=worker.files,
            memory_evidence=self._memory.evidence,
        )
        if failure is not None:
            self._report_failure(failure)
            return
        self.succeeded += 1
        self._report(
            WorkerSucceeded(
                node_id=self._config.node_id,
                incarnation=self._incarnation,
                view=self.view,
                local_rank=worker.local_rank,
            )
        )

    def _report_failure(self, failure: Failure) -> None:
        self._report(
            WorkerFailed(
                node_id=self._config.node_id, incarnation=self._incarnation, view=self.view, failure=failure
            )
        )

    async def stop(self, grace_s: float, with_signal: int = signal.SIGTERM) -> None:
        """End all workers: by the signal, and by SIGKILL those that are still there after the grace period."""
        self._stopping = True
        for worker in self._workers:
            worker.child.signal(with_signal)
            worker.child.signal(signal.SIGCONT)  # a stopped process would not see the signal
        if self._watchers:
            _, pending = await asyncio.wait(self._watchers, timeout=grace_s)
            if pending:
                log.warning(f"{len(pending)} workers did not end in {grace_s:.1f} s after the signal: killing them")
        self.kill()
        if self._watchers:
            await asyncio.wait(self._watchers)
        self._workers.clear()
        self._watchers.clear()

    def kill(self) -> None:
        """At once, with whatever they started."""
        self._stopping = True
        for worker in self._workers:
            worker.child.kill_group(signal.SIGKILL)
