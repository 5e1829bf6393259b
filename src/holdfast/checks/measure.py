"""How long a piece of work takes. Without torch.

A stage's work is repeated in blocks of a fifth of a second: a little less than two of the periods in which the kernel
hands out a limited share of a processor, so that a node that may run for a quarter of the time is seen to be almost
four times as slow, whenever a block begins; and short enough for several of them, of which the best is not disturbed
by any other process.

The time in which the work waited because other processes had the processors is not part of its time, and is reported
beside it. The kernel counts for each thread how long it stood in the run queue. That includes the time in which the
process's own control group had used up its share, which the group counts too: it is the node's own slowness, and is
subtracted. Where the kernel does not count, the wait is zero.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.core.health.findings import PAIRED, Stage, Timing

BLOCK_S = 0.18
BLOCKS = 4
SHARE_MAX = 0.95
"""The largest share of the time that may count as waiting: some work was done, too."""
STAGE_S_MAX = 4.0
"""A stage that is this slow is not measured more exactly."""


def measure(stage: Stage, work: Callable[[], None], device: int = 0, *, block_s: float = BLOCK_S) -> Timing:
    """Run the work once to warm up, then in blocks."""
    work()
    give_up_at = time.perf_counter() + STAGE_S_MAX
    waiting = Waiting()
    times: list[float] = []
    shares: list[float] = []
    while len(times) < BLOCKS and (not times or time.perf_counter() < give_up_at):
        time_s, share = _block(work, block_s, waiting)
        times.append(time_s)
        shares.append(share)
    return timing_of(stage, times, device, min(shares))


def _block(work: Callable[[], None], block_s: float, waiting: Waiting) -> tuple[float, float]:
    """Return the time of one repetition, and the share of the block that was spent waiting for other processes."""
    began_at, done = time.perf_counter(), 0
    waiting.restart()
    while time.perf_counter() - began_at < block_s or not done:
        work()
        done += 1
    waited_s = waiting.longest_s()
    spent_s = time.perf_counter() - began_at
    share = min(waited_s / spent_s, SHARE_MAX)
    return spent_s * (1 - share) / done, share


def timing_of(stage: Stage, times: Sequence[float], device: int = 0, waited: float = 0.0) -> Timing:
    """Return the result of blocks, each with the time of one repetition. Alone the best one counts, in pairs the
    median: a link that loses a packet now and then is as good as any in between."""
    ordered = sorted(times)
    middle = ordered[len(ordered) // 2]
    distances = sorted(abs(value - middle) for value in ordered)
    spread = distances[len(distances) // 2] / middle if middle > 0 else 0.0
    return Timing(stage, middle if stage in PAIRED else ordered[0], spread, device, waited)


# --- waiting for a processor

THREADS = Path("/proc/self/task")
OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")
NANOSECONDS = 1e9
BUSY_SHARE = 0.1
"""The share of the time below which a thread does not count as working."""


class Waiting:
    """The time that threads of this process spent waiting for a processor since it was created."""

    def __init__(self) -> None:
        self._accounts = throttling_accounts()
        self.restart()

    def restart(self) -> None:
        """Start again from now."""
        self._throttled = {account: throttled_s(account) for account in self._accounts}
        self._before = accounts_of_threads()
        self._since = time.perf_counter()

    def longest_s(self) -> float:
        """Return the wait of the thread that waited longest among those that do the work: at least so long was a task
        held up that several threads share. Those threads are the caller, and every thread that runs as much as the
        busiest, if that is much at all: idle threads may wait as long as they like."""
        since, asking = self._by_thread(), str(threading.get_native_id())
        most_s = max((ran_s for ran_s, _ in since.values()), default=0.0)
        much_s = max(most_s / 2, BUSY_SHARE * (time.perf_counter() - self._since))
        found = [waited_s for thread, (ran_s, waited_s) in since.items() if ran_s >= much_s or thread == asking]
        return self._of_others(max(found, default=0.0))

    def summed_s(self) -> float:
        """Return the wait of all threads together: at most so long was work held up that passes from thread to
        thread."""
        return self._of_others(sum(waited_s for _, waited_s in self._by_thread().values()))

    def _by_thread(self) -> dict[str, tuple[float, float]]:
        """Return how long each thread ran and waited."""
        found = {}
        for thread, (ran_s, waited_s) in accounts_of_threads().items():
            ran_before_s, waited_before_s = self._before.get(thread, (0.0, 0.0))
            found[thread] = ran_s - ran_before_s, waited_s - waited_before_s
        return found

    def _of_others(self, waited_s: float) -> float:
        own_s = max((throttled_s(account) - before for account, before in self._throttled.items()), default=0.0)
        return min(max(waited_s - own_s, 0.0), time.perf_counter() - self._since)


def accounts_of_threads() -> dict[str, tuple[float, float]]:
    """Return for each thread how long it has run, and how long it has waited in the run queue, since it began."""
    found = {}
    for thread in THREADS.glob("*"):
        try:
            ran, waited, *_ = (thread / "schedstat").read_text().split()
        except (OSError, ValueError):  # it ended, or the kernel does not count
            continue
        found[thread.name] = int(ran) / NANOSECONDS, int(waited) / NANOSECONDS
    return found


def throttling_accounts() -> list[Path]:
    """Return the accounts of the control groups that limit this process: its own, and their parents."""
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
    """Return how long the group's members were throttled."""
    try:
        counted = dict(line.split()[:2] for line in account.read_text().splitlines())
    except (OSError, ValueError):  # a group may go
        return 0.0
    return int(counted.get("throttled_time", 0)) / NANOSECONDS + int(counted.get("throttled_usec", 0)) / 1e6
