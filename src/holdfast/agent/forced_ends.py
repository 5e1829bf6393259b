"""Ends workers that do not end, or do not go on, by themselves.

Each is killed with all processes of its session. Its end is then reported as that of any worker that was killed, with
the reason that was noted here.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable

from holdfast.agent.worker_processes import Worker
from holdfast.core.assess import ENDING_TIMEOUT_S
from holdfast.util.logs import get_logger

log = get_logger(__name__)


def kill_overdue(worker: Worker) -> None:
    """Kill a worker whose script has failed and whose process is still there."""
    if worker.child:
        text = f"process {worker.pid} failed {ENDING_TIMEOUT_S:.0f} s ago and has not ended: killing it"
        log.warning("failed-worker-killed", text)
        worker.child.kill_group(signal.SIGKILL)


def kill_stopped(worker: Worker, stopped_s: float) -> None:
    """Kill a worker that a signal has stopped: it does nothing until it is continued, and all others wait."""
    if worker.child is None or worker.ended or worker.killed_why:
        return
    worker.killed_why = f"it was stopped by a signal (SIGSTOP?) for {stopped_s:.1f} s, so its agent killed it"
    log.warning("stopped-worker-killed", f"killing process {worker.pid}: {worker.killed_why}")
    worker.child.kill_group(signal.SIGKILL)


def kill_late(worker: Worker, why: str) -> None:
    """Kill a worker that hangs after others have ended."""
    worker.killed_why = f"it {why}, so its agent killed it"
    log.warning("late-worker-killed", f"killing process {worker.pid}: {worker.killed_why}")
    if worker.child is not None:
        worker.child.kill_group(signal.SIGKILL)


def signal_expired(workers: Iterable[Worker], pid: int, number: int, why: str) -> None:
    """Send a signal to a worker whose timer has expired, or to a process of its session that set the timer."""
    worker = next((w for w in workers if w.child and not w.ended and _is_in_session(pid, w.pid)), None)
    if worker is None or worker.killed_why:
        return
    if pid == worker.pid:
        worker.killed_why = why
    log.warning("timer-expired", f"killing process {pid} of local rank {worker.local_rank}: {why}")
    os.kill(pid, number)


def _is_in_session(pid: int, leader: int) -> bool:
    """Return whether a process is in a worker's session; each worker leads one of its own."""
    try:
        return os.getsid(pid) == leader
    except OSError:  # it has ended, or there never was one
        return False
