"""How long this process was ready to run while others had the processors. Without torch.

The kernel counts for each thread how long it stood in the queue. What a process waits for because its own control group
has used up its share is in that number too, and is counted by the group: it is the node's own slowness, and is left out
here. Where the kernel does not tell, nobody waited.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

THREADS = Path("/proc/self/task")
OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")
NANOSECONDS = 1e9
BUSY_SHARE = 0.1
"""Of the time: a thread that runs less does not do the work."""


class Waiting:
    """From its making on."""

    def __init__(self) -> None:
        self._accounts = throttling_accounts()
        self.again()

    def again(self) -> None:
        """From now on."""
        self._throttled = {account: throttled_s(account) for account in self._accounts}
        self._before = accounts_of_threads()
        self._since = time.perf_counter()

    def longest_s(self) -> float:
        """Of the thread that waited longest, of those that do the work: what a piece of it that several of them share
        was held up, at least. That is who asks, and whoever runs as much as the busiest, if that is much at all:
        threads that do next to nothing may wait as long as they like."""
        since, asking = self._by_thread(), str(threading.get_native_id())
        most_s = max((ran_s for ran_s, _ in since.values()), default=0.0)
        much_s = max(most_s / 2, BUSY_SHARE * (time.perf_counter() - self._since))
        found = [waited_s for thread, (ran_s, waited_s) in since.items() if ran_s >= much_s or thread == asking]
        return self._of_others(max(found, default=0.0))

    def summed_s(self) -> float:
        """Of all threads: what work that goes from thread to thread was held up, at most."""
        return self._of_others(sum(waited_s for _, waited_s in self._by_thread().values()))

    def _by_thread(self) -> dict[str, tuple[float, float]]:
        """How long each ran, and waited."""
        found = {}
        for thread, (ran_s, waited_s) in accounts_of_threads().items():
            ran_before_s, waited_before_s = self._before.get(thread, (0.0, 0.0))
            found[thread] = ran_s - ran_before_s, waited_s - waited_before_s
        return found

    def _of_others(self, waited_s: float) -> float:
        own_s = max((throttled_s(account) - before for account, before in self._throttled.items()), default=0.0)
        return min(max(waited_s - own_s, 0.0), time.perf_counter() - self._since)


def accounts_of_threads() -> dict[str, tuple[float, float]]:
    """By thread: how long it has run, and how long it has stood in the queue, since it began."""
    found = {}
    for thread in THREADS.glob("*"):
        try:
            ran, waited, *_ = (thread / "schedstat").read_text().split()
        except (OSError, ValueError):  # it ended, or the kernel does not count
            continue
        found[thread.name] = int(ran) / NANOSECONDS, int(waited) / NANOSECONDS
    return found


def throttling_accounts() -> list[Path]:
    """Of the control groups that limit this process: its own, and those that it is in."""
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = GROUPS / controllers
        group = root / path.lstrip("/")
        found += [g / "cpu.stat" for g in (group, *group.parents) if g.is_relative_to(root)]
    return [account for account in dict.fromkeys(found) if account.exists()]


def throttled_s(account: Path) -> float:
    """How long the group's members were held back."""
    try:
        counted = dict(line.split()[:2] for line in account.read_text().splitlines())
    except (OSError, ValueError):  # a group may go
        return 0.0
    return int(counted.get("throttled_time", 0)) / NANOSECONDS + int(counted.get("throttled_usec", 0)) / 1e6
