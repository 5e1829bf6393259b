"""This node's part in a check: a process that has torch (worker/examiner.py), the task of each round, and its result.

The order names the task that is wanted; it is done once, however often the order is repeated. The process lives for the
whole check, as partners find its store by its port; it ends when the check does, or when the node has other work.

A result always comes: if the process cannot be started, dies or does not answer in time, that is the result.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.agent.assignments import AGENT_VARIABLES
from holdfast.agent.autopsy import signal_name
from holdfast.agent.config import AgentConfig
from holdfast.agent.launch.child import Child
from holdfast.agent.launch.launcher import Launcher, process_request
from holdfast.core.health.findings import CheckProblem, CheckResult, CheckTask
from holdfast.errors import LaunchError
from holdfast.util.logs import get_logger
from holdfast.util.tasks import TaskSet

MODULE = "holdfast.worker.examiner"
ALONE_TIMEOUT_S = 50.0
PAIR_TIMEOUT_S = 30.0
"""Both are shorter than the master waits, so that it hears the reason."""
STDERR_TAIL_BYTES = 2_000
LINE_BYTES_MAX = 2**20
ENDING_S = 1.0

log = get_logger(__name__)
Report = Callable[[CheckTask, CheckResult], None]


class CheckProcess:
    """The process of an examiner and the socket to it."""

    def __init__(self, child: Child, ours: socket.socket, errors: int) -> None:
        self.child, self._ours, self._errors = child, ours, errors
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, task: CheckTask) -> CheckResult:
        """Send a task and wait for its result. Raises OSError or MsgspecError if there is none."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(sock=self._ours, limit=LINE_BYTES_MAX)
        reader, writer = self._streams
        writer.write(msgspec.json.encode(task) + b"\n")
        await writer.drain()
        line = await reader.readline()
        if not line:
            raise ConnectionResetError("it ended")
        return msgspec.json.decode(line, type=CheckResult)

    def end(self) -> None:
        """Kill the process at once, with all that it started."""
        self.child.kill_group(signal.SIGKILL)
        if self._streams is not None:
            self._streams[1].close()
        else:
            self._ours.close()
        if self._errors >= 0:
            os.close(self._errors)
            self._errors = -1

    async def describe_end(self) -> str:
        """Return how the process ended, for a person."""
        try:
            async with asyncio.timeout(ENDING_S):
                code = os.waitstatus_to_exitcode(await self.child.wait())
        except TimeoutError:
            return "its process does not answer"
        end = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with code {code}"
        size = os.fstat(self._errors).st_size
        written = os.pread(self._errors, STDERR_TAIL_BYTES, max(size - STDERR_TAIL_BYTES, 0))
        lines = written.decode(errors="replace").strip().splitlines()
        return f"its process {end}{f': {lines[-1]}' if lines else ''}"


class NodeCheck:
    """The checks of an agent's node. `report` is called with each task and its result."""

    def __init__(self, config: AgentConfig, launcher: Launcher, report: Report) -> None:
        self._config, self._launcher, self._report = config, launcher, report
        self._wanted: CheckTask | None = None
        self._process: CheckProcess | None = None
        self._working: asyncio.Task[None] | None = None
        self._tasks = TaskSet()
        self._killed: list[Child] = []

    def want(self, task: CheckTask | None) -> None:
        """Do this task and no other; None: none."""
        before, self._wanted = self._wanted, task
        if task == before:
            return
        if self._working is not None:
            if not self._working.done():  # in the middle of a task that is not wanted any more
                self._end()
            self._working.cancel()
            self._working = None
        if task is None or (before and before.checkup != task.checkup):
            self._end()
        if task is not None:
            self._working = self._tasks.start(self._work(task))

    async def close(self) -> None:
        """End the process and wait until it has ended."""
        self.want(None)
        await self._tasks.close()
        await asyncio.gather(*(child.wait() for child in self._killed))

    async def _work(self, task: CheckTask) -> None:
        try:
            result = await self._result(task)
        except (LaunchError, OSError) as error:
            result = _failed(task, f"the examination could not be started: {error}")
        log.debug("check-done", f"round {task.round} of check {task.checkup}: {len(result.problems)} problems")
        self._report(task, result)

    async def _result(self, task: CheckTask) -> CheckResult:
        if self._process is None:
            self._process = await self._start()
        process = self._process
        try:
            async with asyncio.timeout(_limit_s(task)):
                return await process.ask(task)
        except TimeoutError:
            result = _failed(task, f"it did not come back in {_limit_s(task):.0f} s")
        except (OSError, ValueError, msgspec.MsgspecError):
            result = _failed(task, await process.describe_end())
        if self._process is process:
            self._end()
        return result

    async def _start(self) -> CheckProcess:
        ours, theirs = socket.socketpair()
        errors = os.memfd_create("holdfast-examiner")
        try:
            with theirs:
                request = process_request(
                    (MODULE, self._settings()),
                    kind="module",
                    env={name: text for name, text in self._config.environment.items() if name not in AGENT_VARIABLES},
                    cwd=str(Path.cwd()),
                    local_rank=0,
                )
                child = await self._launcher.launch(request, [theirs.fileno(), errors])
        except BaseException:
            ours.close()
            os.close(errors)
            raise
        return CheckProcess(child, ours, errors)

    def _settings(self) -> str:
        directory = self._config.logs.run_dir.parent
        settings = {
            "accelerator": self._config.accelerator,
            "address": self._config.address,
            "directory": str(directory if directory != Path("/dev") else Path.cwd()),
            "workers": self._config.workers,
        }
        return msgspec.json.encode(settings).decode()

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._killed = [child for child in (*self._killed, self._process.child) if not child.ended]
            self._process = None


def _limit_s(task: CheckTask) -> float:
    return PAIR_TIMEOUT_S if task.kind == "pair" else ALONE_TIMEOUT_S


def _failed(task: CheckTask, text: str) -> CheckResult:
    """Return a failed result, without a port: the process has ended, and its store with it."""
    stage = "all-reduce" if task.kind == "pair" else "examination"
    return CheckResult(problems=(CheckProblem(stage, "check-failed", text),))  # type: ignore[arg-type]
