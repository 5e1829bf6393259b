"""Keeps the job's master running on this node: started, watched, started again the moment it ends.

A master that cannot use its journal says so and ends with a code of its own; it is tried again, with growing
pauses, while the workers train on. One that finds its port taken is not needed: another agent of this machine
keeps it, and this one stands by to take over.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable

import structlog

from holdfast.agent.config import MasterPlan
from holdfast.errors import HoldfastError

EXIT_JOURNAL = 5
EXIT_ADDRESS_TAKEN = 6
EXIT_NO_PROCESS = 71
"""Ours, for a process that the system could not make."""
LIVED_LONG_S = 2.0
PAUSE_FIRST_S = 0.1
PAUSE_MAX_S = 5.0

log = structlog.get_logger("agent")


class MasterFailedError(HoldfastError):
    """The master could not be started; it has said why on its own log."""


class MasterKeeper:
    """The master's parent."""

    def __init__(self, plan: MasterPlan, port: int, environment: dict[str, str]) -> None:
        self._plan, self.port = plan, port
        self._job_id = plan.job_id
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._released = asyncio.Event()
        self.owned = False
        """Whether the master is ours to keep."""

    async def start(self) -> None:
        """Start it for the first time. Returns with `owned` false if the port is taken: then another agent of this
        machine has the master, or an earlier life of this one left it running."""
        code = await self._launch(resume=False)
        if code is None:
            self.owned = True
        elif code == EXIT_ADDRESS_TAKEN and not self._plan.required:
            log.info(f"port {self.port} is taken: the job's master should be running there already")
        else:
            raise MasterFailedError(f"the master could not be started ({_ended(code)}); what it said is above")

    async def keep(self, is_over: Callable[[], bool]) -> None:
        """Until the master ends in peace and this agent knows that the job is over, or until it is released. A master
        that ended before the agent could hear of the end (a suspended machine) is asked again."""
        pause_s = PAUSE_FIRST_S
        while self.owned:
            started_at = time.monotonic()
            code = await self._wait()
            if not self.owned or (code == 0 and is_over()):
                return
            lived_long = time.monotonic() - started_at >= LIVED_LONG_S
            pause_s = PAUSE_FIRST_S if lived_long else min(pause_s * 2, PAUSE_MAX_S)
            log.warning(f"the master ended ({_ended(code)}): starting it again; the workers go on")
            if not lived_long:
                await self._pause(pause_s)  # it failed at once: trying again at once would only burn a core
            while self.owned and await self._launch(resume=True) is not None:
                await self._pause(pause_s)
                pause_s = min(pause_s * 2, PAUSE_MAX_S)

    def release(self) -> None:
        """Keep it no longer, and end it."""
        self.owned = False
        self._released.set()
        if self._process is not None:
            self._process.terminate()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._released.wait()

    async def take_over(self, job_id: str) -> bool:
        """Keep the job's master from now on, if nobody else of this machine does. Whether it is ours now."""
        self._job_id = job_id
        if not self.owned and await self._launch(resume=True) is None:
            log.warning("nobody kept the master any more: this agent does now")
            self.owned = True
        return self.owned

    async def stop(self, timeout_s: float) -> None:
        """Let it end by itself for a while, then end it."""
        if self._process is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait()
        except TimeoutError:
            self._process.terminate()
            await self._wait()

    @property
    def process_id(self) -> int:
        """Of the master, 0 if it is not ours."""
        return self._process.pid if self._process else 0

    async def _launch(self, *, resume: bool) -> int | None:
        """Start a master and wait until it listens. Its exit code if it ended, or could not be started, instead."""
        try:
            ready = self._spawn(resume)
        except OSError as error:
            log.error(f"a process for the master cannot be started: {error.strerror}; trying again")
            return EXIT_NO_PROCESS
        port = await _read_port(ready)
        if port is None:
            code = await self._wait()
            self._process = None
            return code
        self.port = port
        return None

    def _spawn(self, resume: bool) -> int:
        """The pipe on which the master will say that it listens."""
        ready_read, ready_write = os.pipe()
        arguments = [*self._plan.arguments, "--job-id", self._job_id, "--ready-fd", str(ready_write)]
        arguments += ["--host", self._plan.listen_host, "--port", str(self.port)] + ["--resume"] * resume
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "holdfast", "master", *arguments],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                pass_fds=(ready_write,),
                start_new_session=True,  # the terminal's Ctrl-C is for the agent, which tells the master
            )
        except OSError:
            os.close(ready_read)
            raise
        finally:
            os.close(ready_write)
        return ready_read

    async def _wait(self) -> int:
        assert self._process is not None
        return await _wait_for_exit(self._process)


async def _wait_for_exit(process: subprocess.Popen[bytes]) -> int:
    """By pidfd: no polling, no thread."""
    pidfd = os.pidfd_open(process.pid) if process.returncode is None else -1
    if pidfd < 0:
        return int(process.returncode)
    try:
        await _readable(pidfd)
    finally:
        os.close(pidfd)
    return process.wait()


async def _read_port(fd: int) -> int | None:
    """The port the master writes when it listens, however long its journal is; None if it ends first."""
    try:
        await _readable(fd)
        text = os.read(fd, 64).decode()
    finally:
        os.close(fd)
    return int(text) if text.strip().isdigit() else None


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def now_ready() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(fd, now_ready)
    try:
        await ready
    finally:
        loop.remove_reader(fd)


def _ended(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
