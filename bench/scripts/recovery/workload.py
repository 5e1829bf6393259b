"""What every contender of recovery.py trains, and its diary. The scripts beside it differ only in who guards them.

Settings come from the environment, as launchers do not agree on arguments:

    BENCH_DIARY        directory; each process appends to a file of its own there: `event rank world step pid time`
    BENCH_ROWS         samples of a batch: what a step costs
    BENCH_PAUSE_S      between steps, so that workers that share two cores leave room for their launcher
    BENCH_GATES        directory; after each BENCH_GATE_STEPS steps wait for the file there that is named after the step
    BENCH_CHECKPOINT   directory; BENCH_CHECKPOINT_EVERY steps, 0 for never
    BENCH_WATCH        Holdfast only: the numbers are watched, and parameters compared every so many steps

Run by itself, `workload.py MILLISECONDS` prints the number of rows that makes a step take that long here.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

WIDTH = 256
STEPS = 1_000_000
ROWS = int(os.environ.get("BENCH_ROWS", "32"))
PAUSE_S = float(os.environ.get("BENCH_PAUSE_S", "0.01"))
GATE_STEPS = int(os.environ.get("BENCH_GATE_STEPS", "0"))
GATE_LOOK_S = 0.01
CALIBRATION_STEPS = 60
CHECKPOINT = Path(os.environ.get("BENCH_CHECKPOINT", "."))
CHECKPOINT_EVERY = int(os.environ.get("BENCH_CHECKPOINT_EVERY", "0"))
WATCH = int(os.environ.get("BENCH_WATCH", "0"))
SHARDED = os.environ.get("BENCH_MODEL") == "fsdp2"


def build() -> nn.Module:
    """The same on all ranks."""
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)
    return nn.Sequential(*layers)


def shard(network: nn.Module) -> nn.Module:
    """As FSDP2 is used: each layer by itself, then the whole."""
    from torch.distributed.fsdp import fully_shard

    for layer in network.children():
        if list(layer.parameters()):
            fully_shard(layer)
    return fully_shard(network)


def wrap(network: nn.Module) -> nn.Module:
    return shard(network) if SHARDED else nn.parallel.DistributedDataParallel(network)


def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Of a batch that depends on the step and the rank only."""
    generator = torch.Generator().manual_seed(step * 1_009 + rank)
    sample = torch.randn(ROWS, WIDTH, generator=generator)
    return (model(sample) - sample).square().mean()


class Diary:
    """This process's own. Whole lines, appended at once, so that no kill tears one."""

    def __init__(self) -> None:
        path = Path(os.environ["BENCH_DIARY"]) / str(os.getpid())
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(self, event: str, rank: int, world: int, step: int = 0) -> None:
        os.write(self._file, f"{event} {rank} {world} {step} {os.getpid()} {time.time():.6f}\n".encode())


def breathe() -> None:
    if PAUSE_S:
        time.sleep(PAUSE_S)


def at_gate(step: int) -> bool:
    """Whether a block of steps ends with this one."""
    return GATE_STEPS > 0 and step % GATE_STEPS == 0


def wait_at_gate(step: int) -> None:
    while not os.path.exists(os.path.join(os.environ["BENCH_GATES"], str(step))):
        time.sleep(GATE_LOOK_S)


def rows_for(step_ms: float) -> int:
    """A step is a fixed part and one that grows with its rows: two points give the line."""
    few, many = 64, 512
    few_ms, many_ms = _step_ms(few), _step_ms(many)
    ms_a_row = (many_ms - few_ms) / (many - few)
    return max(1, round(few + (step_ms - few_ms) / ms_a_row))


def _step_ms(rows: int) -> float:
    network = build()
    optimizer = torch.optim.Adam(network.parameters())
    sample = torch.randn(rows, WIDTH)
    times = []
    for _ in range(CALIBRATION_STEPS):
        began_at = time.perf_counter()
        (network(sample) - sample).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append((time.perf_counter() - began_at) * 1e3)
    return min(times)  # what else the machine does only ever adds


if __name__ == "__main__":
    print(rows_for(float(sys.argv[1])))
