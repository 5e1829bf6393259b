"""The workers of this node and their processes: started, watched, ended.

A `Worker` exists from the moment it is wanted. It has a process once the fork server has started one, a connection once
its script has called `hf.init()` (a script that never does has none, and is treated as any program would be), and a
local rank while a view has a rank for it: spares and workers on their way out have none.

A start takes as long as it takes and nothing waits for it: its outcome is reported to the `WorkerOwner`, and so is
every end, in the moment the process is reaped. A start can be cancelled at any time, and leaves nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from holdfast.agent.config import AgentConfig
from holdfast.agent.launch.child import Child
from holdfast.agent.launch.launcher import Launcher, process_request
from holdfast.agent.out_of_memory import MemoryWatch
from holdfast.agent.worker_connection import WorkerConnection, new_nonce
from holdfast.agent.worker_logs import WorkerLogFiles, WorkerLogs
from holdfast.core.events import DataSource, SessionInfo
from holdfast.errors import LaunchError
from holdfast.util.logs import get_logger
from holdfast.util.tasks import TaskSet
from holdfast.wire.progress_page import ProgressPage
from holdfast.wire.stack_dumps import STACKS_VARIABLE
from holdfast.wire.worker_messages import Assignment, ToWorker

log = get_logger(__name__)


@dataclass(eq=False)
class Worker:
    """One worker: its process, its files, its progress page, its connection, its local rank."""

    number: int
    """The number of its log directory: its first local rank if that was free. It stays when the local rank changes."""
    local_rank: int | None
    """Its local rank in the newest view; None for a spare, and for a worker that was told to leave."""
    page: ProgressPage
    page_descriptor: int
    stacks_descriptor: int = -1
    """The file for its stacks (wire/stack_dumps.py)."""
    nonce: str = field(default_factory=new_nonce)
    child: Child | None = None
    files: WorkerLogFiles = field(default_factory=WorkerLogFiles)
    starting: asyncio.Task[None] | None = None
    device: int | None = None
    """The number of its device on the node, from its first assignment to its end; None for a spare."""
    assignment: Assignment | None = None
    """The newest assignment that was, or will be, sent to it."""
    connection: WorkerConnection | None = None
    connection_was_lost: bool = False
    repairs: bool = False
    """Whether it said when it enrolled that it can be given another assignment: it has a session."""
    script_pid: int = 0
    """The process that enrolled: not always the one that the agent started."""
    session: SessionInfo | None = None
    """Known once the worker is at its first step."""
    data: tuple[DataSource, ...] = ()
    """The loaders it tracks, from its first step on."""
    joined: int = 0
    """The newest view it has been in."""
    began_with: tuple[int, str] = (-1, "")
    """The first step that it was to run there, and the saved state from which all ranks started; empty: from none."""
    is_spare: bool = False
    parked_at: float | None = None
    """Since when a spare is ready, on the loop's clock."""
    dismissed: bool = False
    """Whether its end is wanted, and will not be reported."""
    killed_why: str = ""
    """Why this agent killed it, where that is to be reported as a failure."""
    stacks: dict[int, asyncio.Future[str]] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        """Its process id; 0 while it has no process."""
        return self.child.pid if self.child else 0

    @property
    def ended(self) -> bool:
        """Whether it had a process that has ended."""
        return self.child is not None and self.child.ended

    def builds_for_another(self, rank: int, world_size: int) -> bool:
        """Return whether it has not joined a view yet and builds its objects for another rank or world size."""
        if self.joined or self.assignment is None:
            return False
        return (self.assignment.rank, self.assignment.world_size) != (rank, world_size)

    def log_directory(self, run_dir: Path) -> str:
        """Return where its output has been since it was started, relative to the node's log directory."""
        path = self.files.error_file
        return str(Path(path).parent.relative_to(run_dir)) if path else ""

    def send(self, message: ToWorker) -> None:
        """Send a message if it has a connection."""
        if self.connection is not None:
            self.connection.send(message)

    def kill(self) -> None:
        """Kill it at once, with all that it started. Its end is not reported."""
        self.dismissed = True
        if self.starting:
            self.starting.cancel()  # what the launcher has started for it, the launcher kills
        if self.child:
            self.child.kill_group(signal.SIGKILL)

    def close(self) -> None:
        """Release what the agent holds for a worker that has ended."""
        if self.connection is not None:
            self.connection.close()
        for answer in self.stacks.values():
            answer.cancel()
        self.page.close()
        for descriptor in (self.page_descriptor, self.stacks_descriptor):
            if descriptor >= 0:
                os.close(descriptor)
        self.page_descriptor = self.stacks_descriptor = -1


class WorkerOwner(Protocol):
    """The object that wants the workers and hears what becomes of them."""

    def started(self, worker: Worker) -> None:
        """Called when a worker has a process."""

    def not_started(self, worker: Worker, reason: str) -> None:
        """Called when a worker has no process and will have none."""

    def ended(self, worker: Worker, child: Child) -> None:
        """Called when a worker's process was reaped."""


class WorkerProcesses:
    """Every worker that has a process or will have one. `tasks` run the starts."""

    def __init__(
        self, config: AgentConfig, launcher: Launcher, logs: WorkerLogs, memory: MemoryWatch, owner: WorkerOwner
    ) -> None:
        self._config, self._launcher, self._logs, self._memory = config, launcher, logs, memory
        self._owner = owner
        self._workers: dict[str, Worker] = {}
        self.tasks = TaskSet()
        self.socket_path = ""
        """Where workers that are started from now on connect to the agent; empty: nowhere."""

    def __iter__(self) -> Iterator[Worker]:
        return iter(tuple(self._workers.values()))

    def __len__(self) -> int:
        return len(self._workers)

    def find(self, nonce: str) -> Worker | None:
        """Return the worker that has this nonce, if there is one."""
        return self._workers.get(nonce)

    def add(self, local_rank: int | None) -> Worker:
        """Add a worker without a process. Raises OSError if there is no memory for its progress page."""
        beyond = self._config.workers
        number = free_number(self, beyond if local_rank is None else local_rank, beyond)
        page, descriptor = ProgressPage.in_memory()
        try:
            stacks = os.memfd_create("holdfast-stacks", os.MFD_CLOEXEC)
        except OSError:
            page.close()
            os.close(descriptor)
            raise
        worker = Worker(number, local_rank, page, descriptor, stacks, is_spare=local_rank is None)
        self._workers[worker.nonce] = worker
        return worker

    def start(self, worker: Worker, view: int, rank: int, environment: Callable[[str], dict[str, str]]) -> None:
        """Start its process. `environment` is called with the path of its error file."""
        worker.starting = self.tasks.start(self._start(worker, view, rank, environment))
        worker.starting.add_done_callback(lambda _: None if worker.child else self.forget(worker))

    async def _start(self, worker: Worker, view: int, rank: int, environment: Callable[[str], dict[str, str]]) -> None:
        local_rank = worker.number if worker.local_rank is None else worker.local_rank
        program = self._config.program.for_local_rank(local_rank)
        runs_python = program.kind != "exec" and not program.clean and self._launcher.is_fit
        try:
            files = self._logs.open(view, worker.number, rank)
            try:
                request = process_request(
                    program.argv if runs_python else program.command(),
                    kind=program.kind if runs_python and program.kind != "exec" else None,
                    env=environment(files.error_file) | self._agent_variables(worker),
                    cwd=str(Path.cwd()),
                    local_rank=0 if program.virtual_local_rank else worker.device or 0,
                    numa_binding="" if worker.is_spare else program.numa_binding,
                )
                stdout = sys.stdout.fileno() if files.stdout_fd is None else files.stdout_fd
                stderr = sys.stderr.fileno() if files.stderr_fd is None else files.stderr_fd
                child = await self._launcher.launch(request, [stdout, stderr])
            finally:
                files.close()
        except (LaunchError, OSError) as error:
            self.forget(worker)
            if not worker.dismissed:
                self._owner.not_started(worker, str(error))
            return
        worker.child, worker.files = child, files
        self._memory.watch(child.pid)
        if worker.dismissed:
            worker.kill()
        child.on_end(lambda child: self._ended(worker, child))
        self._owner.started(worker)

    def _agent_variables(self, worker: Worker) -> dict[str, str]:
        """Return the variables by which a worker finds its agent and is known to it."""
        stacks = {STACKS_VARIABLE: f"/proc/{os.getpid()}/fd/{worker.stacks_descriptor}"}
        if not self.socket_path:
            return stacks
        return stacks | {
            "HOLDFAST_SOCKET": self.socket_path,
            "HOLDFAST_WORKER": worker.nonce,
            "HOLDFAST_PROGRESS": f"/proc/{os.getpid()}/fd/{worker.page_descriptor}",
        }

    def _ended(self, worker: Worker, child: Child) -> None:
        self._workers.pop(worker.nonce, None)
        self._logs.copy_terminals()  # its last words are looked at now
        self._owner.ended(worker, child)
        self._memory.forget(child.pid)
        worker.close()

    def poll(self) -> None:
        """Reap the workers that have ended and that the event loop has not come to yet."""
        for worker in self:
            if worker.child:
                worker.child.poll()

    def forget(self, worker: Worker) -> None:
        """Remove a worker that never had a process."""
        self._workers.pop(worker.nonce, None)
        worker.close()

    async def stop(self, workers: Sequence[Worker], grace_s: float, with_signal: int = signal.SIGTERM) -> None:
        """End workers: by the signal, and by SIGKILL those that are still running after the grace period."""
        for worker in workers:
            worker.local_rank, worker.dismissed = None, True
            if worker.starting and not worker.child:
                worker.starting.cancel()
            if worker.child:
                worker.child.signal(with_signal)
                worker.child.signal(signal.SIGCONT)  # a stopped process would not see the signal
        if not await wait_for_ends(workers, grace_s) and grace_s > 0:
            left = sum(not worker.ended for worker in workers)
            log.warning(
                "workers-killed", f"{left} workers did not end in {grace_s:.1f} s after the signal: killing them"
            )
        for worker in workers:
            worker.kill()
        await wait_for_ends(workers)

    async def wait_for_release(self, released: Sequence[Worker]) -> None:
        """Wait for workers that were told to leave; those without a connection could not be told, and are stopped."""
        timeout_s = self._config.shutdown_timeout_s
        told = [worker for worker in released if worker.connection is not None]
        await self.stop([worker for worker in released if worker.connection is None], self._config.restart_grace_s)
        if not await wait_for_ends(told, timeout_s):
            text = f"workers did not leave at a step boundary in {timeout_s:.0f} s: killing them"
            log.warning("workers-did-not-leave", text)
            await self.stop(told, 0.0, signal.SIGKILL)

    async def close(self) -> None:
        """Kill all workers and wait for their ends."""
        await self.stop(list(self), 0.0, signal.SIGKILL)
        await self.tasks.close()


async def wait_for_ends(workers: Sequence[Worker], timeout_s: float | None = None) -> bool:
    """Wait for the ends of workers, and for starts that were cancelled; return False if the time ran out."""
    children = [worker.child.wait() for worker in workers if worker.child is not None]
    starts = [worker.starting for worker in workers if worker.starting is not None and worker.child is None]
    if not children and not starts:
        return True
    waits = [asyncio.ensure_future(wait) for wait in children]
    try:
        _, pending = await asyncio.wait([*waits, *starts], timeout=timeout_s)
    finally:
        for wait in waits:
            wait.cancel()
    return not pending


def free_number(workers: Iterable[Worker], wanted: int, otherwise_from: int) -> int:
    """Return the number of a log directory that no living worker writes to: the wanted one, or the first that is free
    beyond the local ranks."""
    taken = {worker.number for worker in workers}
    if wanted not in taken:
        return wanted
    return next(number for number in range(otherwise_from, otherwise_from + len(taken) + 1) if number not in taken)
