"""Supervises the job's master on this node: starts it, watches it, restarts it the moment it ends.

A master that cannot use its journal logs why and ends with a code of its own; it is retried, with growing pauses, while
the workers train on. A master that is stopped, or does not answer its own agent, is killed (helper_watch.py) and so
restarted too; one that waits for its disk is left to it. A master that finds its port taken is not needed: another
agent of this machine supervises it, and this one is ready to take over.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import Callable

from holdfast import exit_codes
from holdfast.agent.config import MasterPlan
from holdfast.agent.helper_watch import Helper, UnansweredTime, kill_unless_answered
from holdfast.errors import MasterFailedError
from holdfast.util.logs import get_logger
from holdfast.util.port_owner import foreign_listener
from holdfast.util.processes import module_command, process_state, processor_time_s

RAN_LONG_S = 2.0
PAUSE_FIRST_S = 0.1
PAUSE_MAX_S = 5.0
START_ATTEMPTS_MAX = 3
"""For a master that is killed before it listens, as by its agent when it is stopped. One that exits has said why."""
START_LIMIT_S = 600.0
"""How long a master may take to listen: it replays its journal before."""
ANSWER_LIMIT_S = 15.0
"""How long a master may leave its own agent's heartbeats unanswered. It answers in a millisecond, except while it waits
for its disk, which does not count, or computes, which counts an eighth."""
ANSWER_LIMIT_MAX_S = 600.0
"""The limit doubles with each master that was killed in vain: perhaps the network is to blame."""
LOOK_EVERY_S = 1.0
PORT_TAKEN_WAIT_S = 10.0
"""How long a job that has not begun waits for its port while another program has it."""
TERMINATE_GRACE_S = 5.0
"""How long a master may take to end once it was told to; then it is killed."""
KILLED_WAIT_S = 5.0
"""How long to wait for a process that was killed. One that waits for a dead disk cannot end, and is left behind."""

log = get_logger(__name__)


class MasterSupervisor:
    """The parent process of the master."""

    def __init__(self, plan: MasterPlan, port: int, environment: dict[str, str]) -> None:
        self._plan, self.port = plan, port
        self._job_id = plan.job_id
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._released = asyncio.Event()
        self.owned = False
        """Whether this agent supervises the master."""
        self.port_taken_by = ""
        """Which other program has the port of a job that has not begun, in words."""

    async def start(self) -> None:
        """Start the master for the first time. `owned` stays false if the port is taken: then another agent of this
        machine has the master, or an earlier incarnation of this agent left it running."""
        code = await self._launch(resume=False)
        for _ in range(START_ATTEMPTS_MAX - 1):
            if code is None or code >= 0:
                break
            log.warning("master-ended", f"the master ended before it listened ({_ended(code)}): starting it again")
            code = await self._launch(resume=False)
        if code is None:
            self.owned = True
        elif code == exit_codes.ADDRESS_TAKEN and not self._plan.required:
            text = f"port {self.port} is in use: the job's master should be running there already"
            log.info("master-runs-elsewhere", text)
        else:
            raise MasterFailedError(f"the master could not be started ({_ended(code)}); its messages are above")

    async def supervise(self, is_over: Callable[[], bool]) -> None:
        """Restart the master until it ends with success and this agent knows that the job is over, or until it is
        released. A master that ended before the agent heard of the end (a suspended machine) is started again."""
        pause_s = PAUSE_FIRST_S
        while self.owned:
            started_at = time.monotonic()
            code = await self._wait()
            if not self.owned or (code == 0 and is_over()):
                return
            ran_long = time.monotonic() - started_at >= RAN_LONG_S
            pause_s = PAUSE_FIRST_S if ran_long else min(pause_s * 2, PAUSE_MAX_S)
            log.warning("master-ended", f"the master ended ({_ended(code)}): restarting it; the workers continue")
            if not ran_long:
                await self._pause(pause_s)  # it failed at once: retrying at once would only burn a core
            while self.owned and await self._launch(resume=True) is not None:
                await self._pause(pause_s)
                pause_s = min(pause_s * 2, PAUSE_MAX_S)

    async def watch_answers(self, messages_heard: Callable[[], int | None], heartbeat_interval_s: float) -> None:
        """Kill a master that does not answer this agent's heartbeats. `messages_heard` returns how many messages have
        come from it; None while the agent does not talk to it."""
        clock, limit_s = asyncio.get_running_loop().time, ANSWER_LIMIT_S
        pid, heard_before, unanswered = 0, 0, UnansweredTime(limit_s)
        while True:
            await asyncio.sleep(LOOK_EVERY_S)  # there is no event for an answer that does not come
            heard, helper = messages_heard(), self.helper
            if helper is None or heard is None:
                pid = 0
                continue
            if heard != heard_before:
                heard_before, limit_s = heard, ANSWER_LIMIT_S
            if helper.pid != pid:
                pid, unanswered = helper.pid, UnansweredTime(limit_s + heartbeat_interval_s)
            if unanswered.look(heard, process_state(pid), processor_time_s(pid), clock(), LOOK_EVERY_S):
                text = f"the master (process {pid}) has not answered for {limit_s:.0f} s: killing it; it is restarted"
                log.warning("helper-unresponsive", text)
                limit_s = min(limit_s * 2, ANSWER_LIMIT_MAX_S)
                helper.kill()

    @property
    def helper(self) -> Helper | None:
        """The master as a process that is replaced when it hangs; None if it is not a running child of this agent."""
        process = self._process
        return None if process is None or process.returncode is not None else _helper(process)

    def release(self) -> None:
        """Stop supervising the master, and end it."""
        self.owned = False
        self._released.set()
        if self._process is not None:
            self._process.terminate()
            asyncio.get_running_loop().call_later(TERMINATE_GRACE_S, self._process.kill)

    async def released(self) -> None:
        """Wait until the master is not supervised any more."""
        await self._released.wait()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._released.wait()

    @property
    def is_foreign(self) -> bool:
        """Whether the master at the port is another job's: no other agent can have started one for this job."""
        return self._plan.has_one_node and not self.owned

    async def take_over(self, job_id: str, *, has_joined: bool) -> bool:
        """Supervise the job's master from now on, if no agent of this machine does; return whether this one has begun
        to. If this agent has not joined the job, there may be none yet: what used the port was not its master."""
        self.port_taken_by = ""
        if self.owned:
            return False
        if job_id := job_id or (self._plan.job_id if self._plan.has_one_node else ""):
            self._job_id = job_id
            resume = has_joined or self._plan.journal.exists()
            if await self._launch(resume=resume) is None:
                text = "the master was not running and no other agent supervised it: this agent has restarted it"
                log.warning("master-taken-over", text if resume else f"port {self.port} is free now: the job begins")
                self.owned = True
                return True
        if not has_joined and (taken_by := await asyncio.to_thread(foreign_listener, self.port)):
            self.port_taken_by = f"{taken_by}: give this job another --master-port or --rdzv-endpoint"
        return False

    async def stop(self, timeout_s: float) -> None:
        """Wait for the master to end by itself, and end it after the timeout. One that cannot even be killed, because
        it waits for a dead disk, is left behind."""
        if (process := self._process) is None:
            return
        timeout_s = 0.0 if self._released.is_set() else timeout_s
        steps = [(process.terminate, timeout_s), (process.kill, TERMINATE_GRACE_S), (lambda: None, KILLED_WAIT_S)]
        for then, wait_s in steps:
            try:
                async with asyncio.timeout(wait_s):
                    await self._wait()
                    return
            except TimeoutError:
                then()
        text = f"the master (process {process.pid}) was killed and does not end: its disk does not answer; leaving it"
        log.error("master-left-behind", text)

    @property
    def process_id(self) -> int:
        """The master's process id; 0 if it is not a child of this agent."""
        return self._process.pid if self._process else 0

    async def _launch(self, *, resume: bool) -> int | None:
        """Start a master and wait until it listens; return None, or its exit code if it ended or was not started."""
        try:
            ready = self._spawn(resume)
        except OSError as error:
            log.error("master-not-started", f"no process can be started for the master: {error.strerror}; retrying")
            return exit_codes.NO_PROCESS
        port = await self._when_listening(ready)
        if port is None:
            code = await self._wait()
            self._process = None
            return code
        self.port = port
        return None

    def _spawn(self, resume: bool) -> int:
        """Start the process; return the pipe on which the master will write its port once it listens."""
        ready_read, ready_write = os.pipe()
        arguments = [*self._plan.arguments, "--job-id", self._job_id, "--ready-fd", str(ready_write)]
        arguments += ["--host", self._plan.listen_host, "--port", str(self.port)] + ["--resume"] * resume
        try:
            self._process = subprocess.Popen(
                [*module_command("holdfast"), "master", *arguments],
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

    async def _when_listening(self, ready: int) -> int | None:
        """Return the master's port once it listens; None if it ends before, or is killed as it takes too long."""
        assert self._process is not None
        loop = asyncio.get_running_loop()
        port = loop.create_task(_read_port(ready))
        watch = loop.create_task(kill_unless_answered(port, _helper(self._process), START_LIMIT_S))
        try:
            return await port
        finally:
            watch.cancel()

    async def _wait(self) -> int:
        assert self._process is not None
        return await _wait_for_exit(self._process)


def _helper(process: subprocess.Popen[bytes]) -> Helper:
    return Helper("the master", process.pid, process.kill)


async def _wait_for_exit(process: subprocess.Popen[bytes]) -> int:
    """Wait by pidfd, without polling or a thread; return the exit code."""
    pidfd = os.pidfd_open(process.pid) if process.returncode is None else -1
    if pidfd < 0:
        return int(process.returncode)
    try:
        await _readable(pidfd)
    finally:
        os.close(pidfd)
    return process.wait()


async def _read_port(fd: int) -> int | None:
    """Return the port that the master writes when it listens; None if it ends first."""
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
