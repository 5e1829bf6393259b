"""A process that is ours to reap, watched through its pidfd: no polling, no SIGCHLD.

A pid stays a process's own until it is reaped, and so does the number of its process group. So at the end of a child
the order is: look (without reaping), kill what is left of its group, reap. Done the other way round, the number could
already belong to another process.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

# After these the agent has ended the worker, even if it exits with code 0: what it started is killed too.
STOPPING_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGKILL})


class Child:
    """One child process, created right after its start was reported: nothing else reaps it, so its pid is still its
    own."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._on_end: list[Callable[[Child], None]] = []
        self._was_stopped = False
        self._loop = asyncio.get_running_loop()
        self._status: asyncio.Future[int] = self._loop.create_future()
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self.poll)

    def __repr__(self) -> str:
        return f"Child(pid={self.pid}, ended={self.ended})"

    @property
    def ended(self) -> bool:
        """Whether it has been reaped."""
        return self._status.done()

    @property
    def status(self) -> int:
        """The wait status of a child that has ended."""
        return self._status.result()

    async def wait(self) -> int:
        """Wait for its end and return the wait status, for `os.waitstatus_to_exitcode`. The child has been reaped by
        then, and what it left behind has been killed if it failed or was stopped."""
        return await asyncio.shield(self._status)

    def on_end(self, call: Callable[[Child], None]) -> None:
        """Have `call` called when it is reaped, before any task that waits for it continues; at once if it was."""
        if self.ended:
            call(self)
        else:
            self._on_end.append(call)

    def signal(self, number: int) -> None:
        """Send a signal to the process alone. Nothing happens once it has ended."""
        if not self.ended:
            self._was_stopped |= number in STOPPING_SIGNALS
            signal.pidfd_send_signal(self._pidfd, number)

    def kill_group(self, number: int) -> None:
        """Send a signal to the process and all it started, except in sessions of their own. Nothing happens once it has
        ended."""
        if not self.ended:
            self._was_stopped |= number in STOPPING_SIGNALS
            send_to_group(self.pid, number)

    def poll(self) -> bool:
        """Reap the child if it has ended; return whether it has. Called by the loop; may be called at any time."""
        if self.ended:
            return True
        end = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end is None:
            return False
        status = to_wait_status(end)
        if status != 0 or self._was_stopped:
            send_to_group(self.pid, signal.SIGKILL)
        os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._status.set_result(status)
        for call in self._on_end:
            call(self)
        return True


def send_to_group(group: int, number: int) -> None:
    """Send a signal to a process group, if there is one."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return  # it never made a group, or all of its processes have ended


def to_wait_status(end: os.waitid_result) -> int:
    """Return the number that waitpid(2) would have given."""
    if end.si_code == os.CLD_EXITED:
        return end.si_status << 8
    core_dumped = 0x80 if end.si_code == os.CLD_DUMPED else 0
    return end.si_status | core_dumped
