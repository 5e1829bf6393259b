"""This node's part in a check: a process that has torch (worker/examiner.py), the task of each round, and its result.

The order names the task that is wanted; it is done once, whoever repeats the order. The process lives for the whole
check, as partners find its store by its port; it ends when the check does, or when there is something better to do.

A result always comes: if the process cannot be made, dies or does not come back in time, that is the result.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from holdfast.agent.birth.child import Child
from holdfast.agent.birth.launcher import Launcher
from holdfast.agent.config import AgentConfig
from holdfast.agent.environment import INTRODUCTION
from holdfast.core.health.findings import CheckResult, CheckTask, Problem
from holdfast.errors import LaunchError

MODULE = "holdfast.worker.examiner"
ALONE_TIMEOUT_S = 50.0
PAIR_TIMEOUT_S = 30.0
"""Less than the master waits: it should hear why."""
LAST_WORDS_BYTES = 2_000
LINE_BYTES_MAX = 2**20
ENDING_S = 1.0

log = structlog.get_logger("agent")
Report = Callable[[CheckTask, CheckResult], None]


class Process:
    """An examiner."""

    def __init__(self, child: Child, ours: socket.socket, errors: int) -> None:
        self.child, self._ours, self._errors = child, ours, errors
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, task: CheckTask) -> CheckResult:
        """Raises OSError or MsgspecError if there is no answer to be had."""
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
        """At once, with whatever it started."""
        self.child.kill_group(signal.SIGKILL)
        if self._streams is not None:
            self._streams[1].close()
        else:
            self._ours.close()
        if self._errors >= 0:
            os.close(self._errors)
            self._errors = -1

    async def last_words(self) -> str:
        """How it ended, for a person."""
        try:
            async with asyncio.timeout(ENDING_S):
                code = os.waitstatus_to_exitcode(await self.child.wait())
        except TimeoutError:
            return "its process does not answer"
        end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        size = os.fstat(self._errors).st_size
        written = os.pread(self._errors, LAST_WORDS_BYTES, max(size - LAST_WORDS_BYTES, 0))
        lines = written.decode(errors="replace").strip().splitlines()
        return f"its process {end}{f': {lines[-1]}' if lines else ''}"


class Examination:
    """One for the life of an agent."""

    def __init__(self, config: AgentConfig, launcher: Launcher, report: Report) -> None:
        self._config, self._launcher, self._report = config, launcher, report
        self._wanted: CheckTask | None = None
        self._process: Process | None = None
        self._working: asyncio.Task[None] | None = None
        self._killed: list[Child] = []

    def want(self, task: CheckTask | None) -> None:
        """Do this and nothing else."""
        before, self._wanted = self._wanted, task
        if task == before:
            return
        if self._working is not None:
            if not self._working.done():  # in the middle of something that nobody wants any more
                self._end()
            self._working.cancel()
            self._working = None
        if task is None or (before and before.checkup != task.checkup):
            self._end()
        if task is not None:
            self._working = asyncio.create_task(self._work(task))

    async def close(self) -> None:
        """Nothing is left on return."""
        working = self._working
        self.want(None)
        if working is not None:
            await asyncio.gather(working, return_exceptions=True)
        await asyncio.gather(*(child.wait() for child in self._killed))

    async def _work(self, task: CheckTask) -> None:
        try:
            result = await self._result(task)
        except (LaunchError, OSError) as error:
            result = _failed(task, f"the examination could not be started: {error}")
        log.debug(f"round {task.round} of check {task.checkup}: {len(result.problems)} problems")
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
            result = _failed(task, await process.last_words())
        if self._process is process:
            self._end()
        return result

    async def _start(self) -> Process:
        ours, theirs = socket.socketpair()
        errors = os.memfd_create("holdfast-examiner")
        try:
            with theirs:
                child = await self._launcher.start_python(
                    (MODULE, self._assignment()),
                    kind="module",
                    env={name: text for name, text in self._config.environment.items() if name not in INTRODUCTION},
                    cwd=str(Path.cwd()),
                    stdout=theirs.fileno(),
                    stderr=errors,
                    local_rank=0,
                )
        except BaseException:
            ours.close()
            os.close(errors)
            raise
        return Process(child, ours, errors)

    def _assignment(self) -> str:
        directory = self._config.logs.run_dir.parent
        told = {
            "accelerator": self._config.accelerator,
            "address": self._config.address,
            "directory": str(directory if directory != Path("/dev") else Path.cwd()),
            "workers": self._config.workers,
        }
        return msgspec.json.encode(told).decode()

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._killed = [child for child in (*self._killed, self._process.child) if not child.ended]
            self._process = None


def _limit_s(task: CheckTask) -> float:
    return PAIR_TIMEOUT_S if task.kind == "pair" else ALONE_TIMEOUT_S


def _failed(task: CheckTask, text: str) -> CheckResult:
    """Without a port: the process is gone, and its store with it."""
    stage = "all-reduce" if task.kind == "pair" else "examination"
    return CheckResult(problems=(Problem(stage, "check-failed", text),))  # type: ignore[arg-type]
