"""A make-believe accelerator for tests: the CPU's memory, and one thread that does what it was told late, in order.

It is an entry point named `cpu`, which goes before Holdfast's own: every tensor of the process is then this device's.
Sums of floating-point tensors are queued, as NCCL's are: `wait()` only says that what is queued next comes after them.
Gathers are done at once, behind what is queued: the host computes with what they bring. Holdfast's own exchanges are of
whole numbers and are done at once too.

    LATE_S=SECONDS          before each collective
    LATE_FREE=raise|block   the abort of whoever finds, and removes, the file LATE_MARK raises, or never returns
    LATE_CONNECT=die        who finds it when it connects a subgroup is killed, while the others connect too

An aborted collective leaves this rank's own numbers instead of the sum, or with LATE_ABORTED=nan none, and what is
queued behind it runs on.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from holdfast.checks.accelerators.cpu import Cpu
from holdfast.worker.collectives.communicators import Gloo

stream = ThreadPoolExecutor(1, thread_name_prefix="late-device")


class Event:
    """All that was queued before it."""

    def __init__(self) -> None:
        self._done: Future[None] = stream.submit(lambda: None)

    def query(self) -> bool:
        return self._done.done()


class Late(Cpu):
    runs_behind_host = True
    communicator = "holdfast_late:LateGloo"

    def record(self, index: int) -> Event:
        return Event()


class LateGloo(Gloo):
    def make(self, *arguments: Any) -> Any:
        is_subgroup = not arguments[-1].name.startswith("default/")
        if "LATE_CONNECT" in os.environ and is_subgroup and self._is_chosen():
            os.kill(os.getpid(), signal.SIGKILL)
        return LateGroup(super().make(*arguments))

    def free(self, inner: Any) -> None:
        if "LATE_FREE" in os.environ and self._is_chosen():
            if os.environ["LATE_FREE"] == "raise":
                raise RuntimeError("ProcessGroup abort timed out")
            threading.Event().wait()
        super().free(inner.inner)

    def _is_chosen(self) -> bool:
        """Whether this is the first to come to the mark."""
        try:
            Path(os.environ["LATE_MARK"]).unlink()
        except (KeyError, FileNotFoundError):
            return False
        return True

    def drop(self, inner: Any) -> None:
        super().drop(inner.inner)


class LateGroup:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def allreduce(self, tensors: list[torch.Tensor], *options: Any) -> Work:
        if not tensors[0].is_floating_point():
            return self.inner.allreduce(tensors, *options)
        return self._queue(tensors, lambda into: self.inner.allreduce(into, *options))

    def _reduce_scatter_base(self, output: torch.Tensor, value: torch.Tensor, *options: Any) -> Work:
        return self._queue([output], lambda into: self.inner._reduce_scatter_base(into[0], value, *options))

    def _allgather_base(self, output: torch.Tensor, value: torch.Tensor, *options: Any) -> Work:
        if value.is_floating_point():
            synchronize()
        return self.inner._allgather_base(output, value, *options)

    def _queue(self, tensors: list[torch.Tensor], start: Callable[[list[torch.Tensor]], Work]) -> Work:
        """An aborted one leaves in `tensors` what is there."""

        def kernel() -> None:
            time.sleep(float(os.environ.get("LATE_S", "0")))
            sums = [tensor.clone() for tensor in tensors]
            try:
                start(sums).wait()
            except Exception as error:
                print(f"device: a collective was aborted ({error}), what is behind it runs on", flush=True)
                if os.environ.get("LATE_ABORTED") == "nan":
                    for tensor in tensors:
                        tensor.fill_(float("nan"))
                return
            for tensor, total in zip(tensors, sums, strict=True):
                tensor.copy_(total)

        stream.submit(kernel)
        return Queued(tensors)


class Queued(Work):
    """Work of which the host knows only that it was queued."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, *_: object) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future

    def is_completed(self) -> bool:
        return True


class LateMomentum(torch.optim.Optimizer):
    """SGD with momentum whose arithmetic is queued on the device."""

    def __init__(self, parameters: Any, lr: float = 0.05, momentum: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["velocity"] = torch.zeros_like(parameter)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                data, velocity = local(parameter.data), local(self.state[parameter]["velocity"])
                stream.submit(self._kernel, data, velocity, local(parameter.grad), group["lr"], group["momentum"])

    @staticmethod
    def _kernel(
        parameter: torch.Tensor, velocity: torch.Tensor, gradient: torch.Tensor, lr: float, momentum: float
    ) -> None:
        velocity.mul_(momentum).add_(gradient)
        parameter.sub_(velocity, alpha=lr)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's own part of it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def synchronize() -> None:
    """What a script's `.item()` does."""
    stream.submit(lambda: None).result()
