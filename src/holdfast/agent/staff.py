"""All workers' processes on this node, whoever they are: started, watched, ended.

A start takes as long as it takes, and nobody waits for it: what comes of it is told to the `Employer`, and so is every
end, in the moment the process is reaped. A start can be called off at any time, and leaves nothing.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Protocol

import structlog

from holdfast.agent.birth.child import Child
from holdfast.agent.birth.launcher import Launcher
from holdfast.agent.config import AgentConfig
from holdfast.agent.logs import WorkerLogs
from holdfast.agent.out_of_memory import MemoryWatch
from holdfast.agent.workers import Starter, Worker, free_number, until_gone
from holdfast.errors import LaunchError

log = structlog.get_logger("agent")


class Employer(Protocol):
    """Who wants the workers."""

    def started(self, worker: Worker) -> None: ...

    def not_started(self, worker: Worker, reason: str) -> None: ...

    def ended(self, worker: Worker, child: Child) -> None: ...


class Staff:
    """Every worker that has a process or will have one."""

    def __init__(
        self, config: AgentConfig, launcher: Launcher, logs: WorkerLogs, memory: MemoryWatch, employer: Employer
    ) -> None:
        self._config, self._memory, self._employer = config, memory, employer
        self._starter = Starter(config, launcher, logs, memory)
        self._workers: dict[str, Worker] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Worker]:
        return iter(tuple(self._workers.values()))

    def __len__(self) -> int:
        return len(self._workers)

    def find(self, nonce: str) -> Worker | None:
        return self._workers.get(nonce)

    def listen_at(self, socket_path: str) -> None:
        """Where workers that are started from now on find their line."""
        self._starter.socket_path = socket_path

    def new(self, seat: int | None) -> Worker:
        """One without a process yet. Raises OSError if there is no memory for its record."""
        beyond = self._config.workers
        worker = self._starter.new(free_number(self, beyond if seat is None else seat, beyond), seat)
        self._workers[worker.nonce] = worker
        return worker

    def start(self, worker: Worker, view: int, rank: int, environment: Callable[[str], dict[str, str]]) -> None:
        """Give it a process. `environment` is asked with the path of its error file."""
        worker.starting = self.beside(self._start(worker, view, rank, environment))
        worker.starting.add_done_callback(lambda _: None if worker.child else self.forget(worker))

    async def _start(self, worker: Worker, view: int, rank: int, environment: Callable[[str], dict[str, str]]) -> None:
        local_rank = worker.number if worker.seat is None else worker.seat
        try:
            await self._starter.start(worker, view, rank, local_rank, environment)
        except (LaunchError, OSError) as error:
            self.forget(worker)
            if not worker.dismissed:
                self._employer.not_started(worker, str(error))
            return
        assert worker.child is not None
        if worker.dismissed:
            worker.kill()
        worker.child.on_end(lambda child: self._ended(worker, child))
        self._employer.started(worker)

    def _ended(self, worker: Worker, child: Child) -> None:
        self._workers.pop(worker.nonce, None)
        self._employer.ended(worker, child)
        self._memory.forget(child.pid)
        worker.close()

    def notice_ends(self) -> None:
        """Those that the loop has not come round to."""
        for worker in self:
            if worker.child:
                worker.child.poll()

    def forget(self, worker: Worker) -> None:
        """One that came to nothing."""
        self._workers.pop(worker.nonce, None)
        worker.close()

    async def stop(self, workers: Sequence[Worker], grace_s: float, with_signal: int = signal.SIGTERM) -> None:
        """End them: by the signal, and by SIGKILL those that are still there after the grace period."""
        for worker in workers:
            worker.seat, worker.dismissed = None, True
            if worker.starting and not worker.child:
                worker.starting.cancel()
            if worker.child:
                worker.child.signal(with_signal)
                worker.child.signal(signal.SIGCONT)  # a stopped process would not see the signal
        if not await until_gone(workers, grace_s) and grace_s > 0:
            left = sum(not worker.ended for worker in workers)
            log.warning(f"{left} workers did not end in {grace_s:.1f} s after the signal: killing them")
        for worker in workers:
            worker.kill()
        await until_gone(workers)

    async def see_off(self, going: Sequence[Worker]) -> None:
        """Wait for those that were told to leave; those that cannot be told anything are stopped."""
        timeout_s = self._config.shutdown_timeout_s
        told = [worker for worker in going if worker.line is not None]
        await self.stop([worker for worker in going if worker.line is None], self._config.restart_grace_s)
        if not await until_gone(told, timeout_s):
            log.warning(f"workers did not leave in {timeout_s:.0f} s: killing them")
            await self.stop(told, 0.0, signal.SIGKILL)

    async def close(self) -> None:
        """Ends everybody."""
        await self.stop(list(self), 0.0, signal.SIGKILL)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def beside(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Let it go on; it ends with the staff at the latest."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error(f"{type(error).__name__}: {error}", exc_info=error)
