"""Shows the agent whether this process's device is still at work while its host stands still.

A host that reads a number from a device (`loss.item()`) spins in the vendor's library until the device has come to it:
to the kernel it computes. If the device waits there for a rank that hangs, the agent would give the process the time of
one that works, many minutes. So when the progress page has not moved for QUIET_S a thread asks the device: it records
an event behind all that was queued on the default stream, and shows on the page whether the device has passed it
(`device`). Asked is only then, and never twice at once: while a script steps on, this costs nothing.
"""

from __future__ import annotations

import threading

from holdfast.state.graph_captures import captures_of_others_ignored
from holdfast.wire.progress_page import ProgressPage, WorkerPhase
from holdfast.worker.device_wait import DeviceFence

LOOK_EVERY_S = 0.5
QUIET_S = 5.0
"""Longer than capturing a graph takes, which an event of another thread would spoil."""
IN_STEP = frozenset({WorkerPhase.BETWEEN, WorkerPhase.BODY, WorkerPhase.BARRIER, WorkerPhase.UPDATE})


class DeviceWatch:
    """The thread. It ends with the process, or when the device fails."""

    def __init__(self, page: ProgressPage, fence: DeviceFence, quiet_s: float = QUIET_S) -> None:
        self._page, self._fence, self._quiet_s = page, fence, quiet_s
        self._ended = threading.Event()
        self._moved_ns = self._quiet_looks = 0

    def start(self) -> None:
        """Begin to look."""
        threading.Thread(target=self._run, name="holdfast-device-watch", daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()

    def _run(self) -> None:
        try:
            while not self._ended.wait(min(LOOK_EVERY_S, self._quiet_s)):
                if self._is_quiet():
                    with captures_of_others_ignored():
                        self._ask()
        except Exception:  # whatever a vendor's library raises; the main thread meets the same error
            return
        finally:
            self._page.set(device=0)

    def _is_quiet(self) -> bool:
        moved_ns = self._page.get("moved_ns")
        has_moved = moved_ns != self._moved_ns or self._page.get("phase") not in IN_STEP
        self._moved_ns, self._quiet_looks = moved_ns, 0 if has_moved else self._quiet_looks + 1
        return self._quiet_looks * min(LOOK_EVERY_S, self._quiet_s) >= self._quiet_s

    def _ask(self) -> None:
        """Show that the device is at work until it has done all that it was told."""
        is_done = self._fence.record()
        while not is_done():
            self._page.set(device=1)
            if self._ended.wait(min(LOOK_EVERY_S, self._quiet_s)):
                return
        self._page.set(device=0)
