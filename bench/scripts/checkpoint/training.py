"""What all contenders of checkpoint.py train, and how a turn of theirs is measured. Needs torch, nothing else.

A script waits for questions (files, as some launchers keep standard input for themselves) and answers with numbers.
Peak memory is looked at from outside.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

LOOK_S = 0.005
SIZE_BYTES = int(float(os.environ.get("BENCH_SIZE_MB", "64")) * 1e6)
ROWS = int(os.environ.get("BENCH_ROWS", "64"))
TURNS = Path(os.environ["BENCH_TURNS"])
STORAGE = Path(os.environ["BENCH_STORAGE"])


class Training:
    """Parameters are a third of the state, Adam's moments the rest."""

    def __init__(self) -> None:
        width = 2048 if SIZE_BYTES > 200e6 else 512
        layers = max(1, round(SIZE_BYTES / 12 / width / (width + 1)))
        torch.manual_seed(0)
        self.model = nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())])
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5)
        self.x, self.y = torch.randn(ROWS, width), torch.randn(ROWS, width)
        self.before_update: Callable[[], None] = lambda: None
        self.step()
        self.tensors = [*self.model.parameters()]
        self.tensors += [value for state in self.optimizer.state.values() for value in state.values()]
        self.size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)
        self._copies: list[torch.Tensor] = []

    def step(self) -> None:
        nn.functional.mse_loss(self.model(self.x), self.y).backward()
        self.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def warm_up(self) -> None:
        """Have memory for copies."""
        if not self._copies:
            self._copies = [torch.empty_like(tensor).copy_(tensor) for tensor in self.tensors]

    def memcpy_s(self, threads: int) -> float:
        """Of the state, tensor by tensor, into memory that is in use already."""
        self.warm_up()
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        began_at = time.perf_counter()
        with torch.no_grad():
            for copy, tensor in zip(self._copies, self.tensors, strict=True):
                copy.copy_(tensor)
        took_s = time.perf_counter() - began_at
        torch.set_num_threads(before)
        return took_s


class Clock:
    """Wall time and the thread's own processor time."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0

    def __enter__(self) -> Clock:
        self._wall, self._cpu = time.perf_counter(), time.thread_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s += time.perf_counter() - self._wall
        self.cpu_s += time.thread_time() - self._cpu


def busy_s() -> float:
    """Processor time that the whole machine has spent."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def stall_turn(
    training: Training,
    step: Callable[[], None],
    save: Callable[[], None],
    wait: Callable[[], None],
    waited: Clock,
    steps: int,
) -> dict[str, float]:
    """Plain steps, a save, as many steps again. `waited`: what the update had to wait, by the contender's own hook."""
    training.warm_up()
    with Clock() as copying:
        memcpy_s = training.memcpy_s(1)
    plain = [_timed(step) for _ in range(steps)]
    busy, own, began_at = busy_s(), time.process_time(), time.perf_counter()
    waited.wall_s = waited.cpu_s = 0.0
    with Clock() as call:
        save()
    after = [_timed(step) for _ in range(steps)]
    took_s = time.perf_counter() - began_at
    others = max(0.0, busy_s() - busy - (time.process_time() - own)) / took_s
    wait()
    return {
        "memcpy_s": memcpy_s,
        "memcpy_cpu_s": copying.cpu_s,
        "plain_s": median(plain),
        "call_s": call.wall_s,
        "wait_s": waited.wall_s,
        "stall_s": call.wall_s + waited.wall_s,
        "stall_cpu_s": call.cpu_s + waited.cpu_s,
        "extra_s": call.wall_s + sum(after) - steps * median(plain),
        "others": others,
    }


def _timed(step: Callable[[], None]) -> float:
    began_at = time.perf_counter()
    step()
    return time.perf_counter() - began_at


def timed(action: Callable[[], object]) -> float:
    return _timed(lambda: action() and None)


def drop_from_cache(directory: Path) -> None:
    """What is read next comes from the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def serve(name: str, answer: Callable[[str, dict[str, Any]], dict[str, Any]]) -> None:
    """Until asked to stop."""
    number = 0
    (TURNS / f"{name}.ready").write_text(str(os.getpid()))
    while True:
        asked = TURNS / f"{name}.{number}.ask"
        while not asked.exists():
            time.sleep(LOOK_S)
        question = json.loads(asked.read_text())
        if question["what"] == "stop":
            return
        torch.set_num_threads(question.get("threads", 1))
        try:
            found = answer(question["what"], question)
        except Exception as error:  # the others go on, and it is said in the table
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"[:300]}
        unfinished = TURNS / f"{name}.{number}.part"
        unfinished.write_text(json.dumps(found))
        unfinished.rename(TURNS / f"{name}.{number}.answer")
        number += 1
