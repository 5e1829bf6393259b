"""One worker, from the wish for it to its end: its process, its files, its progress record, its line, its seat.

A worker exists from the moment it is wanted. It has a process once the fork server has made one, a line once its
script has called `hf.init()` (a script that never does has none, and is treated as any program would be), and a seat
while a view has a rank for it: spares and those on their way out have none.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.agent.birth.child import Child
from holdfast.agent.birth.launcher import Launcher
from holdfast.agent.config import AgentConfig
from holdfast.agent.line import Line, new_nonce
from holdfast.agent.logs import WorkerLogFiles, WorkerLogs
from holdfast.agent.out_of_memory import MemoryWatch
from holdfast.core.events import DataSource, SessionInfo
from holdfast.wire.progress import ProgressPage
from holdfast.wire.session import Place, ToWorker


@dataclass(eq=False)
class Worker:
    """What is known of one."""

    number: int
    """Of its log directory. That of its seat where it was free; a worker keeps it when it changes seats."""
    seat: int | None
    """Its local rank in the newest view; None for a spare, and for one that was told to go."""
    page: ProgressPage
    page_descriptor: int
    nonce: str = field(default_factory=new_nonce)
    child: Child | None = None
    files: WorkerLogFiles = field(default_factory=WorkerLogFiles)
    starting: asyncio.Task[None] | None = None
    place: Place | None = None
    """The newest one it was, or will be, told."""
    line: Line | None = None
    line_was_lost: bool = False
    repairs: bool = False
    """Whether what it said first was that it can be given another place: it has a session."""
    script_pid: int = 0
    """Of the process that enrolled: not always the one we started."""
    session: SessionInfo | None = None
    """Once it is at its first step."""
    data: tuple[DataSource, ...] = ()
    """The loaders it tracks, from then on."""
    joined: int = 0
    """The newest view it has been in."""
    is_spare: bool = False
    parked_at: float | None = None
    """Since when a spare is ready, on the loop's clock."""
    dismissed: bool = False
    """Its end is wanted, and will not be reported."""
    stacks: dict[int, asyncio.Future[str]] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        """0 while it has no process."""
        return self.child.pid if self.child else 0

    @property
    def ended(self) -> bool:
        return self.child is not None and self.child.ended

    def tell(self, message: ToWorker) -> None:
        """If it has a line."""
        if self.line is not None:
            self.line.send(message)

    def kill(self) -> None:
        """At once, with whatever it started. Its end was wanted."""
        self.dismissed = True
        if self.starting:
            self.starting.cancel()  # what the launcher has started for it, the launcher kills
        if self.child:
            self.child.kill_group(signal.SIGKILL)

    def close(self) -> None:
        """Give back what the agent holds of one that has ended."""
        if self.line is not None:
            self.line.close()
        for answer in self.stacks.values():
            answer.cancel()
        self.page.close()
        if self.page_descriptor >= 0:
            os.close(self.page_descriptor)
            self.page_descriptor = -1


class Starter:
    """Makes workers' processes."""

    def __init__(self, config: AgentConfig, launcher: Launcher, logs: WorkerLogs, memory: MemoryWatch) -> None:
        self._config, self._launcher, self._logs, self._memory = config, launcher, logs, memory
        self.socket_path = ""
        """Where workers enrol."""

    def new(self, number: int, seat: int | None) -> Worker:
        """A worker without a process. Raises OSError if there is no memory for its record."""
        page, descriptor = ProgressPage.in_memory()
        return Worker(number, seat, page, descriptor, is_spare=seat is None)

    async def start(
        self, worker: Worker, view: int, rank: int, local_rank: int, environment: Callable[[str], dict[str, str]]
    ) -> None:
        """Give it a process. `environment` is asked with the path of its error file. Raises LaunchError or OSError."""
        files = self._logs.open(view, worker.number, rank)
        try:
            variables = environment(files.error_file) | self._introduction(worker)
            worker.child = await self._launch(variables, local_rank, files)
        finally:
            files.close()
        worker.files = files
        self._memory.watch(worker.child.pid)

    def _introduction(self, worker: Worker) -> dict[str, str]:
        if not self.socket_path:
            return {}
        return {
            "HOLDFAST_SOCKET": self.socket_path,
            "HOLDFAST_WORKER": worker.nonce,
            "HOLDFAST_PROGRESS": f"/proc/{os.getpid()}/fd/{worker.page_descriptor}",
        }

    async def _launch(self, environment: dict[str, str], local_rank: int, files: WorkerLogFiles) -> Child:
        program = self._config.program
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


async def until_gone(workers: Sequence[Worker], timeout_s: float | None = None) -> bool:
    """Wait for their ends, and for starts that were called off; False if the time ran out."""
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
    """A log directory that no living worker writes to: a local rank's own, or the first beyond the local ranks."""
    taken = {worker.number for worker in workers}
    if wanted not in taken:
        return wanted
    return next(number for number in range(otherwise_from, otherwise_from + len(taken) + 1) if number not in taken)
