"""Processes of a benchmark: started under a mark, read through /proc, ended one by one by their pids.

Launchers put their workers into sessions of their own, and some outlive their parents, so neither a process group nor
the tree of parents finds them all. But a child inherits its parent's environment: whatever carries a run's mark in
/proc/<pid>/environ was started by that run, and nothing else was.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

RUN_VARIABLE, NODE_VARIABLE = "BENCH_RUN", "BENCH_NODE"
END_TIMEOUT_S = 10.0
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Run:
    """Everything that was started under one mark. Leaving the block ends it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.mark = secrets.token_hex(8)
        self.snapshots = Path("/dev/shm") / f"holdfast-bench-{self.mark}"
        """Where Holdfast's agents keep snapshots: those that are killed leave them to their next life."""
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self, command: Sequence[str], environment: Mapping[str, str], node: str = "0") -> subprocess.Popen[bytes]:
        """Output goes to a file of the run, so that a slow terminal slows nobody down."""
        marked = {**environment, RUN_VARIABLE: self.mark, NODE_VARIABLE: node}
        marked["HOLDFAST_SNAPSHOT_DIR"] = str(self.snapshots)
        with (self.directory / f"output-{node}").open("ab") as output:
            process = subprocess.Popen(
                command, env=marked, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        self._started.append(process)
        return process

    @property
    def over(self) -> bool:
        """Whether everything that was started here has ended by itself."""
        return all(process.poll() is not None for process in self._started)

    def output(self, chars_max: int = 2_000) -> str:
        """The end of what was printed, for a message."""
        texts = [path.read_text(errors="replace") for path in sorted(self.directory.glob("output-*"))]
        return "\n".join(text[-chars_max:] for text in texts)

    def kill_node(self, node: str) -> None:
        """All of a node's processes at once, the launcher first, as when a machine loses power."""
        launchers = {process.pid for process in self._started}
        pids = marked_pids({RUN_VARIABLE: self.mark, NODE_VARIABLE: node})
        kill(sorted(pids, key=lambda pid: pid not in launchers))

    def end(self) -> None:
        """Kill and reap until nothing that carries the mark is left, and give the memory back."""
        give_up_at = time.monotonic() + END_TIMEOUT_S
        while pids := marked_pids({RUN_VARIABLE: self.mark}):
            kill(pids)
            for process in self._started:
                process.poll()
            if time.monotonic() > give_up_at:
                raise RuntimeError(f"processes {pids} do not end")
            time.sleep(0.02)
        for process in self._started:
            process.wait()
        shutil.rmtree(self.snapshots, ignore_errors=True)


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def marked_pids(mark: Mapping[str, str]) -> list[int]:
    """Living processes whose environment has all of these."""
    wanted = {f"{name}={value}".encode() for name, value in mark.items()}
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if wanted <= environment_of(pid) and not is_zombie(pid)]


def environment_of(pid: int) -> set[bytes]:
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return set()


def is_zombie(pid: int) -> bool:
    try:
        return _stat(pid)[0] == "Z"
    except OSError:
        return True


def cpu_s(pid: int) -> float:
    """Processor time used so far, in user mode and in the kernel."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def started_at(pid: int) -> float:
    """When it was started, on the wall clock, to the kernel's hundredth of a second."""
    booted_at = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return booted_at + int(_stat(pid)[19]) / CLOCK_TICKS


def resident_bytes(pid: int) -> int:
    """Memory the process has in use (VmRSS)."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat after the name, which may itself contain blanks."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
