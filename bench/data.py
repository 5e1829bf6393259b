"""What exact data costs: to resume, to compute indices, to load; against torch's own sampler and loader.

    resume       from a saved state to the first batch in hand: ours at any size; DistributedSampler with the usual
                 skipping of batches, at sizes it can bear; and through a DataLoader that reads what it skips
    index        microseconds a batch of 256 to know the samples, over a whole pass
    throughput   samples a second through workers: hf.Loader and hf.Sampler against DataLoader + DistributedSampler

Contenders alternate. Printed are the median of the rounds (throughput: the best, since others' work on the machine only
ever slows), ratios and the load average. Memory is what Python and NumPy allocate (and, for torch's permutation, which
torch allocates, 8 bytes an index).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import machine
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import holdfast as hf

BATCH = 256


class Sized(Dataset):
    """A dataset of any size whose samples cost as much as hashing so many bytes."""

    def __init__(self, size: int, work_bytes: int = 0) -> None:
        self.size, self.work_bytes = size, work_bytes

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, sample: int) -> torch.Tensor:
        if self.work_bytes:
            hashlib.sha256(bytes(self.work_bytes)).digest()
        return torch.full((16,), sample)


def timed(action: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def peak_bytes(action: Callable[[], Any]) -> int:
    tracemalloc.start()
    action()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def our_sampler(size: int) -> hf.Sampler:
    return hf.Sampler(size, global_batch_size=BATCH, seed=0, rank=0, world_size=1)


def torch_sampler(size: int) -> DistributedSampler:
    return DistributedSampler(Sized(size), num_replicas=1, rank=0, seed=0)


def batches(sampler: DistributedSampler) -> Iterator[list[int]]:
    numbers = iter(sampler)
    while batch := list(itertools.islice(numbers, BATCH)):
        yield batch


def resume_ours(size: int, position: int) -> None:
    sampler = our_sampler(size)
    sampler.load_state_dict(sampler.state_dict() | {"position": position // BATCH * BATCH})
    next(iter(sampler))


def resume_torch(size: int, position: int) -> None:
    next(itertools.islice(batches(torch_sampler(size)), position // BATCH, None))


def resume_reading(size: int, position: int) -> None:
    loader = DataLoader(Sized(size), batch_size=BATCH, sampler=torch_sampler(size))
    next(itertools.islice(iter(loader), position // BATCH, None))


def bench_resume(rounds: int) -> None:
    print("\nresume: size, position, seconds, bytes allocated in Python")
    for size, position in [(10**6, 5 * 10**5), (10**7, 5 * 10**6), (10**12, 10**9), (10**15, 10**14)]:
        ours = statistics.median(timed(lambda s=size, p=position: resume_ours(s, p)) for _ in range(max(rounds, 5)))
        memory = peak_bytes(lambda s=size, p=position: resume_ours(s, p))
        print(f"  holdfast               {size:8.0e} {position:8.0e}  {ours:10.5f} s  {memory / 1e6:10.2f} MB")
        if size <= 10**7:
            report_skipping(size, position, ours, rounds)


def report_skipping(size: int, position: int, ours: float, rounds: int) -> None:
    theirs = statistics.median(timed(lambda: resume_torch(size, position)) for _ in range(rounds))
    memory = peak_bytes(lambda: next(batches(torch_sampler(size)))) + 8 * size
    print(f"  DistributedSampler     {size:8.0e} {position:8.0e}  {theirs:10.5f} s  {memory / 1e6:10.2f} MB"
          f"  {theirs / ours:8.0f} x")  # fmt: skip
    if size <= 10**6:
        reading = timed(lambda: resume_reading(size, position))
        print(
            f"  skipping in the loader {size:8.0e} {position:8.0e}  {reading:10.5f} s  {'':13}  {reading / ours:8.0f} x"
        )


def drain(batches_of_a_pass: Iterator[Any]) -> int:
    return sum(1 for _ in batches_of_a_pass)


def bench_index(rounds: int) -> None:
    print(f"\nindex: microseconds a batch of {BATCH}, over a whole pass")
    for size in (10**5, 10**6):
        ours, theirs = [], []
        for _ in range(rounds):
            ours.append(timed(lambda s=size: drain(iter(our_sampler(s)))))
            theirs.append(timed(lambda s=size: drain(batches(torch_sampler(s)))))
        per_batch = [statistics.median(times) / (size / BATCH) * 1e6 for times in (ours, theirs)]
        print(f"  {size:8.0e}  holdfast {per_batch[0]:8.1f}   DistributedSampler {per_batch[1]:8.1f}"
              f"   ratio {per_batch[0] / per_batch[1]:.2f}")  # fmt: skip


def contenders(size: int, work_bytes: int, workers: int) -> dict[str, Callable[[], Any]]:
    dataset = Sized(size, work_bytes)
    settings: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    shape: dict[str, Any] = {"global_batch_size": 64, "seed": 0, "rank": 0, "world_size": 1}
    sampler = hf.Sampler(dataset, **shape)
    ordinary = DistributedSampler(dataset, num_replicas=1, rank=0)
    loaders = {
        "DataLoader + DistributedSampler": DataLoader(dataset, batch_size=64, sampler=ordinary, **settings),
        "DataLoader + hf.Sampler": DataLoader(dataset, batch_sampler=sampler, **settings),
        "hf.Loader, seed_samples=False": hf.Loader(dataset, num_workers=workers, seed_samples=False, **shape),
        "hf.Loader": hf.Loader(dataset, num_workers=workers, **shape),
    }

    def one_pass(loader: Any) -> None:
        cursor = sampler if isinstance(loader, DataLoader) and loader.batch_sampler is sampler else loader
        for _ in loader:
            if hasattr(cursor, "commit"):
                cursor.commit()

    return {name: lambda loader=loader: one_pass(loader) for name, loader in loaders.items()}


def bench_throughput(rounds: int, workers: int) -> None:
    for size, work_bytes in ((6_400, 400_000), (25_600, 0)):
        print(
            f"\nthroughput: {workers} workers, {work_bytes:,} bytes hashed for a sample, samples a second, best round"
        )
        passes = contenders(size, work_bytes, workers)
        times: dict[str, list[float]] = {name: [] for name in passes}
        for round_number, (name, action) in itertools.product(range(rounds + 1), passes.items()):
            elapsed = timed(action)
            if round_number:  # the first starts the workers
                times[name].append(elapsed)
        base = min(times["DataLoader + DistributedSampler"])
        for name, measured in times.items():
            best = min(measured)
            print(f"  {name:34}{size / best:10.0f}   {base / best:6.3f} of torch's")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(machine.heading(machine.describe()))
    print(f"load average before: {machine.load()}")
    bench_resume(args.rounds)
    bench_index(args.rounds)
    bench_throughput(args.rounds, args.workers)
    print(f"\nload average after: {machine.load()}")


if __name__ == "__main__":
    main()
