"""A small DDP session in which nothing hangs, and much is slow: what a detector of hangs must leave alone.

    slow.py SECONDS

Now and then a rank evaluates for long between two steps, waits in a step for data that comes late through a pipe,
prefetches by a thread that sleeps before it tries again, writes and syncs much, reads what is not in the page cache,
or computes for long in a step; the others wait for it meanwhile. WORK/slow: a line for each.
"""

import os
import queue
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf

seconds = float(sys.argv[1])
work = Path(os.environ["WORK"])
log = os.open(work / "slow", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def compute(duration_s: float) -> None:
    until = time.monotonic() + duration_s
    while time.monotonic() < until:
        torch.randn(64, 64) @ torch.randn(64, 64)


def late_pipe(duration_s: float) -> None:
    subprocess.run(["sh", "-c", f"sleep {duration_s}; echo done"], stdout=subprocess.PIPE, check=True)


def late_storage(duration_s: float) -> None:
    """A thread that fetches, is told to come back later, and sleeps; the main thread waits for it, and looks."""
    fetched: queue.Queue[int] = queue.Queue()
    threading.Thread(target=lambda: (time.sleep(duration_s), fetched.put(1)), daemon=True).start()
    while True:
        try:
            fetched.get(timeout=0.5)
        except queue.Empty:
            continue
        return


def short_sleeps(duration_s: float) -> None:
    """A client that tries again, a little later each time."""
    until, pause_s = time.monotonic() + duration_s, 0.05
    while time.monotonic() < until:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.5)


def synced_write(duration_s: float) -> None:
    until = time.monotonic() + duration_s
    path = work / f"bulk-{os.getpid()}"
    while time.monotonic() < until:
        with path.open("wb") as file:
            file.write(os.urandom(1 << 20) * 16)
            file.flush()
            os.fsync(file.fileno())
    path.unlink()


def uncached_read(duration_s: float) -> None:
    until = time.monotonic() + duration_s
    path = work / f"bulk-{os.getpid()}"
    path.write_bytes(os.urandom(1 << 20) * 16)
    while time.monotonic() < until:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        while os.read(descriptor, 1 << 20):
            pass
        os.close(descriptor)
    path.unlink()


KINDS = (compute, late_pipe, late_storage, short_sleeps, synced_write, uncached_read)

job = hf.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters())
job.track(model=model, optimizer=optimizer)
began_at = time.monotonic()


def be_slow(number: int, where: str) -> None:
    chance = random.Random(f"{where} {number}")
    if chance.random() > 0.02 or chance.randrange(dist.get_world_size()) != job.rank:
        return
    kind, duration_s = chance.choice(KINDS), chance.choice([2.0, 4.0, 8.0, 15.0])
    os.write(
        log, f"{time.monotonic():.1f} step {number} rank {job.rank} {where} {kind.__name__} {duration_s}\n".encode()
    )
    kind(duration_s)


for step in job.steps(10**9):
    with step:
        be_slow(step.number, "in")
        time.sleep(0.02)
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        is_over = torch.tensor([float(time.monotonic() - began_at > seconds)])
        dist.all_reduce(is_over)
        optimizer.step()
        optimizer.zero_grad()
    if is_over.item():
        break
    be_slow(step.number, "between")
