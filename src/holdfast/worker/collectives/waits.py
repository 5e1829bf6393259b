"""Whether this process waits for other ranks, said where its agent can read it: then it is not the one that hangs.

Two kinds of waits are known:

    the main thread's     inside `work.wait()`, a connect, a barrier, or the wait for a view: `begin` and `end`
    open promises         operations that others have to complete, and that a thread waits for in C++, where nothing
                          can be said (DistributedDataParallel's backward): `open` and `settle`. Meanwhile the process
                          may compute

A rank that hangs has no open operation for long: a rank that waits for it has taken part in all operations before
the one that it has not begun.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class WaitCounter:
    """The waits of this process. `show` is called with the number of each kind whenever it changes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._main = 0
        self._open = 0
        self.show: Callable[[int, int], None] | None = None

    def begin(self) -> None:
        """Count a wait of the main thread; waits of other threads hold no rank up."""
        if threading.get_ident() == threading.main_thread().ident:
            self._add(1, 0)

    def end(self) -> None:
        """End what `begin` began."""
        if threading.get_ident() == threading.main_thread().ident:
            self._add(-1, 0)

    def open(self) -> None:
        """Count an operation that others have to complete."""
        self._add(0, 1)

    def settle(self) -> None:
        """Forget an operation that has ended."""
        self._add(0, -1)

    def _add(self, main: int, opened: int) -> None:
        with self._lock:
            self._main += main
            self._open += opened
            if self.show is not None:
                self.show(self._main, self._open)

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()


waits = WaitCounter()
"""Those of this process."""
