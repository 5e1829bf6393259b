"""A processor for tests: the CPU, with faults that the environment of a node asks for.

LAB_WRONG=1            the product has one wrong number
LAB_COUNTERS=FILE      a source of counters, as nvidia-smi prints them
LAB_SLOW=SECONDS       each multiplication takes longer
LAB_DIES_ONCE=FILE     its process is killed in the first pair, and the file is made
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.checks.accelerators.base import Benchmark, DeviceProblem
from holdfast.checks.accelerators.cpu import Cpu
from holdfast.checks.accelerators.cuda import parse_counters
from holdfast.checks.accelerators.generic import MatmulBenchmark

if TYPE_CHECKING:
    import torch


class Faulty(MatmulBenchmark):
    def run(self) -> None:
        super().run()
        time.sleep(float(os.environ.get("LAB_SLOW", "0")))

    def verify(self) -> str:
        if os.environ.get("LAB_WRONG"):
            self.product[3, 4] += 1.0
        return super().verify()


class Lab(Cpu):
    name = "lab"
    communicator = "holdfast.worker.collectives.communicators:Gloo"
    matmul_size = 256
    copy_bytes = 16 * 2**20

    def prepare_matmul(self, index: int) -> Benchmark:
        return Faulty(self, index, self.matmul_size)

    def tensor(self, index: int, size_bytes: int) -> Any:
        path = os.environ.get("LAB_DIES_ONCE")
        if path and not Path(path).exists():
            Path(path).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().tensor(index, size_bytes)

    def ailments(self) -> list[DeviceProblem]:
        source = os.environ.get("LAB_COUNTERS")
        return parse_counters(Path(source).read_text()) if source else []

    def torch_device(self, index: int) -> torch.device:
        import torch

        return torch.device("cpu")
