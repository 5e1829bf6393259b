"""Collectives of the device in holdfast_soft.py, as NCCL's are: `wait()` makes the current stream wait, not the host.
One that breaks is noted where `error_of` finds it, and its kernel stays on the device until an abort; that ends it with
whatever is there by then, and what is queued behind it runs on.

    SOFT_LATE_S=SECONDS     before each collective

Transfers that are told together are noted in WORK/transfers, a line with their bytes for each time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import soft_device
import torch
from torch._C._distributed_c10d import Work

from holdfast.worker.collectives.communicators import Gloo

FREED_WITHIN_S = 60.0
LATE_S = float(os.environ.get("SOFT_LATE_S", "0"))
Start = Callable[[], Work]
"""Begins a collective of gloo's."""


class SoftGroups(Gloo):
    """Makes and frees them."""

    def make(self, *arguments: Any) -> Any:
        return SoftGroup(super().make(*arguments), arguments[-1].device_index)

    def free(self, inner: Any) -> None:
        inner.is_freed.set()
        super().free(inner.inner)

    def error_of(self, inner: Any) -> str:
        return str(inner.error)

    def drop(self, inner: Any) -> None:
        inner.is_freed.set()
        inner.stream.synchronize()
        super().drop(inner.inner)


class SoftGroup:
    """One, with a stream of its own."""

    supports_coalescing = True

    def __init__(self, inner: Any, device_index: int) -> None:
        self.inner = inner
        self.stream = torch.Stream(torch.device("soft", device_index))
        self.error, self.is_freed = "", threading.Event()
        self._together: list[tuple[list[torch.Tensor], Start]] | None = None
        """What was told since `_start_coalescing`."""

    def _start_coalescing(self) -> None:
        self._together = []

    def _end_coalescing(self) -> Work | None:
        told, self._together = self._together, None
        if not told:
            return None
        tensors = [one for results, _ in told for one in results]
        with (Path(os.environ["WORK"]) / "transfers").open("a") as notes:
            notes.write(f"{sum(one.nbytes for one in tensors)}\n")
        return self._queue(tensors, [start for _, start in told])

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if not callable(found):
            return found

        def call(*arguments: Any) -> Any:
            tensors = list(tensors_in(arguments))
            if not tensors:
                return found(*arguments)
            host = [on_host(argument) for argument in arguments]
            results, start = list(tensors_in(arguments[:1])), lambda: found(*host)
            if self._together is not None:
                self._together.append((results, start))
                return None
            return self._queue(results, [start])

        return call

    def _queue(self, results: list[torch.Tensor], starts: list[Start]) -> Work:
        def kernel() -> None:
            time.sleep(LATE_S)
            try:
                for work in [start() for start in starts]:
                    work.wait()
            except Exception as error:
                self.error = f"a collective broke: {error}"
                self.is_freed.wait(FREED_WITHIN_S)
                print(f"soft device: a collective was aborted ({error}), what is behind it runs on", flush=True)

        self.stream.wait_stream(torch.accelerator.current_stream(self.stream.device))
        with self.stream:
            soft_device.add(kernel)
            future: torch.futures.Future[Any] = torch.futures.Future(devices=[results[0].device])
            future.set_result(results)  # notes where the stream is
        return Queued(self.stream.record_event(), future)


class Queued(Work):
    """Work of which the host knows only that it was queued."""

    def __init__(self, done: torch.Event, future: Any) -> None:
        super().__init__()
        self._done, self._future = done, future

    def wait(self, *_: object) -> bool:
        torch.accelerator.current_stream(self._done.device).wait_event(self._done)
        return True

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        return self._future

    def is_completed(self) -> bool:
        return self._done.query()

    def is_success(self) -> bool:
        return True


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)


def on_host(value: Any) -> Any:
    """The same memory, as the CPU's."""
    if isinstance(value, torch.Tensor):
        return soft_device.on_host(value) if value.device.type == "soft" else value
    return type(value)(map(on_host, value)) if isinstance(value, list | tuple) else value
