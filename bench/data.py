"""What exact data costs: to resume, to compute indices, to load; beside torch's own samplers and loader, and torchdata.

    resume       from a saved state to the first batch in hand (resuming.py): ours at any size; those that skip, and
                 torchdata's StatefulDataLoader, at sizes they can bear
    index        microseconds a batch of 256 to know the samples, over a whole pass
    throughput   samples a second through workers: hf.Loader and hf.Sampler against DataLoader + DistributedSampler. A
                 block of batches of each in turn, after some that are not counted, so that what was fetched ahead in
                 others' time does not count. Also the processor time of a sample, the loop's process and the workers
                 together: other work on the machine disturbs it less

Contenders take turns in every round, in an order that changes; a ratio is one of neighbours in a round. Printed are
medians, extremes and the load average.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import machine
import resuming
import torch
from samples import markdown, spread
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import holdfast as hf

BATCH = 256
THROUGHPUT_BATCH = 64
WARM_BATCHES = 16
BASE = "DataLoader, DistributedSampler"
OURS = "hf.Sampler"
Result = TypeVar("Result")


class Sized(Dataset):
    """Samples of 16 numbers that cost as much as hashing so many bytes."""

    def __init__(self, size: int, work_bytes: int) -> None:
        self.size, self.work = size, bytes(work_bytes)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, sample: int) -> torch.Tensor:
        if self.work:
            hashlib.sha256(self.work).digest()
        return torch.full((16,), sample)


# --- resume


def bench_resume(rounds: int, size_max: int) -> list[dict[str, Any]]:
    everywhere: dict[str, resuming.Prepare] = {OURS: resuming.ours, "hf.Loader": resuming.our_loader}
    bearable: dict[str, resuming.Prepare] = {
        "DistributedSampler, indices skipped": resuming.skipping_indices,
        "DataLoader, batches skipped": resuming.skipping_batches,
    }
    if resuming.has_torchdata():
        bearable |= {
            "StatefulDataLoader, shuffle=True": partial(resuming.stateful, distributed=False),
            "StatefulDataLoader, StatefulDistributedSampler": partial(resuming.stateful, distributed=True),
        }
    else:
        print("torchdata is not installed: left out")
    found = []
    for size, position in [(10**5, 5 * 10**4), (10**6, 5 * 10**5), (10**7, 5 * 10**6), (10**12, 10**9)]:
        contenders = everywhere | (bearable if size <= size_max else {})
        costs: dict[str, list[resuming.Cost]] = {name: [] for name in contenders}
        for _, (name, prepare) in itertools.product(range(rounds), contenders.items()):
            costs[name].append(resuming.cost(prepare, size, position))
        for name, measured in costs.items():
            seconds = [cost.seconds for cost in measured]
            rise_bytes = median(cost.rise_bytes for cost in measured)
            ratio = median(seconds) / median(cost.seconds for cost in costs[OURS])
            found.append({"size": size, "name": name, "seconds": seconds, "bytes": rise_bytes, "ratio": ratio})
    rows = [
        (f"{r['size']:.0e}", r["name"], spread([1e3 * s for s in r["seconds"]], "ms", 2), f"{r['bytes'] / 1e6:.1f} MB",
         f"{r['ratio']:,.0f}") for r in found
    ]  # fmt: skip
    show("resume", ("samples", "", "median [min–max]", "memory", f"× {OURS}"), rows)
    return found


# --- index


def pass_over(make: Callable[[int], Iterator[Any]], size: int) -> float:
    started = time.perf_counter()
    for _ in make(size):
        pass
    return time.perf_counter() - started


def bench_index(rounds: int, size_max: int) -> list[dict[str, Any]]:
    def ours(size: int) -> Iterator[Any]:
        return iter(hf.Sampler(size, global_batch_size=BATCH, seed=0, rank=0, world_size=1))

    def theirs(size: int) -> Iterator[Any]:
        return resuming.batches(DistributedSampler(resuming.Numbers(size), num_replicas=1, rank=0, seed=0))

    found = []
    for size in (size for size in (10**5, 10**6, 4_200_000) if size <= size_max):
        makers = {OURS: ours, "DistributedSampler": theirs}
        times = in_turn({name: partial(pass_over, make, size) for name, make in makers.items()}, rounds)
        for name, measured in times.items():
            found.append({"size": size, "name": name, "us": [1e6 * s / (size / BATCH) for s in measured]})
            found[-1]["ratio"] = ratio_of(measured, times["DistributedSampler"])
    rows = [(f"{r['size']:,}", r["name"], spread(r["us"], "µs", 1), f"{r['ratio']:.2f}") for r in found]
    show(f"index, a batch of {BATCH}", ("samples", "", "median [min–max]", "× DistributedSampler"), rows)
    return found


# --- throughput


class Contender(NamedTuple):
    loader: Any
    cursor: Any
    """Which is told what was used, if anything is."""

    def batches(self) -> Iterator[Any]:
        for batch in self.loader:
            yield batch
            if self.cursor is not None:
                self.cursor.commit()

    def cpu_s(self) -> float:
        """Of this process and the contender's workers."""
        torch_s = self.loader if isinstance(self.loader, DataLoader) else self.loader._pipeline._loader
        workers = [worker.pid for worker in getattr(torch_s._iterator, "_workers", ())]
        tasks = [path for pid in workers for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        return time.process_time() + sum(int(path.read_text().split()[0]) for path in tasks) / 1e9

    def block(self, batches: int) -> tuple[float, float]:
        """Seconds, and seconds of processors."""
        iterator = self.batches()
        for _ in range(WARM_BATCHES):
            next(iterator)
        started, cpu_started = time.perf_counter(), self.cpu_s()
        for _ in range(batches):
            next(iterator)
        return time.perf_counter() - started, self.cpu_s() - cpu_started


def contenders(size: int, work_bytes: int, workers: int) -> dict[str, Contender]:
    dataset = Sized(size, work_bytes)
    settings: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    shape: dict[str, Any] = {"global_batch_size": THROUGHPUT_BATCH, "seed": 0, "rank": 0, "world_size": 1}
    sampler = hf.Sampler(dataset, **shape)
    base = DistributedSampler(dataset, num_replicas=1, rank=0)
    unseeded = hf.Loader(dataset, num_workers=workers, seed_samples=False, **shape)
    seeded = hf.Loader(dataset, num_workers=workers, **shape)
    return {
        BASE: Contender(DataLoader(dataset, batch_size=THROUGHPUT_BATCH, sampler=base, **settings), None),
        "DataLoader, hf.Sampler": Contender(DataLoader(dataset, batch_sampler=sampler, **settings), sampler),
        "hf.Loader, seed_samples=False": Contender(unseeded, unseeded),
        "hf.Loader": Contender(seeded, seeded),
    }


def bench_throughput(rounds: int, workers: int, batches: int) -> list[dict[str, Any]]:
    found = []
    for work_bytes, count in ((2_000_000, batches // 4), (400_000, batches), (0, 4 * batches)):
        size = 2 * THROUGHPUT_BATCH * (rounds + 2) * (count + WARM_BATCHES)  # nobody's epoch ends
        actions = {name: partial(c.block, count) for name, c in contenders(size, work_bytes, workers).items()}
        results = in_turn(actions, rounds)
        for name, measured in results.items():
            pairs = list(zip(measured, results[BASE], strict=True))
            found.append({
                "work": work_bytes,
                "name": name,
                "speed": [count * THROUGHPUT_BATCH / seconds for seconds, _ in measured],
                "ratios": [base[0] / mine[0] for mine, base in pairs],
                "cpu_us": [1e6 * cpu_s / count / THROUGHPUT_BATCH for _, cpu_s in measured],
                "cpu_ratios": [mine[1] / base[1] for mine, base in pairs],
            })  # fmt: skip
    rows = [
        (f"{r['work'] / 1e6:.1f} MB", r["name"], spread(r["speed"], "/s", 0), spread(r["ratios"], ""),
         f"{median(r['cpu_us']):.1f} µs", spread(r["cpu_ratios"], "")) for r in found
    ]  # fmt: skip
    header = ("hashed a sample", "", "samples", "× torch's", "processor time a sample", "× torch's")
    show(f"throughput, {workers} workers, batches of {THROUGHPUT_BATCH}", header, rows)
    return found


# --- all of them


def in_turn(actions: dict[str, Callable[[], Result]], rounds: int) -> dict[str, list[Result]]:
    """What each returns, by round. The first round, which starts workers and fills caches, is not counted."""
    results: dict[str, list[Result]] = {name: [] for name in actions}
    order = random.Random(0)
    for round_number in range(rounds + 1):
        for name in order.sample(list(actions), len(actions)):
            result = actions[name]()
            if round_number:
                results[name].append(result)
    return results


def ratio_of(mine: list[float], base: list[float]) -> float:
    return median(a / b for a, b in zip(mine, base, strict=True))


def show(title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    print(f"\n{title} (load average {machine.load()})\n")
    print("\n".join(markdown(header, rows)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batches", type=int, default=40, help="in a block of 0.4 MB a sample; others in proportion")
    parser.add_argument("--size-max", type=int, default=10**7, help="of a dataset, for those that write an order down")
    parser.add_argument("--only", choices=("resume", "index", "throughput"))
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(machine.heading(machine.describe()))
    print(f"load average at the start: {machine.load()}")
    parts: dict[str, Callable[[], Any]] = {
        "resume": lambda: bench_resume(min(arguments.rounds, 5), arguments.size_max),
        "index": lambda: bench_index(arguments.rounds, arguments.size_max),
        "throughput": lambda: bench_throughput(arguments.rounds, arguments.workers, arguments.batches),
    }
    found = {name: part() for name, part in parts.items() if arguments.only in (None, name)}
    print(f"\nload average at the end: {machine.load()}")
    if arguments.output:
        arguments.output.write_text(json.dumps({"machine": machine.describe(), **found}))


if __name__ == "__main__":
    main()
