"""From a saved state to the first batch in hand: how long it takes, how much memory, and how both grow.

Each measurement is made in a process of its own, forked from this one, so that nothing is left from the one before;
memory is how far its resident size rose. The dataset costs nothing to read, which favours those who read to skip.
"""

from __future__ import annotations

import importlib.util
import itertools
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, DistributedSampler

import holdfast as hf

BATCH = 256


class Numbers(Dataset):
    """A dataset of any size whose samples cost nothing."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, sample: int) -> int:
        return sample

    def __getitems__(self, samples: list[int]) -> list[int]:
        return samples


class Cost(NamedTuple):
    seconds: float
    rise_bytes: int


Resume = Callable[[], Any]
Prepare = Callable[[int, int], Resume]
"""Makes the state of a size and a position, and what is to be measured."""


def ours(size: int, position: int) -> Resume:
    def resume() -> None:
        sampler = hf.Sampler(size, global_batch_size=BATCH, seed=0, rank=0, world_size=1)
        sampler.load_state_dict(state)
        next(iter(sampler))

    fresh = hf.Sampler(size, global_batch_size=BATCH, seed=0, rank=0, world_size=1)
    state = fresh.state_dict() | {"position": position // BATCH * BATCH}
    return resume


def our_loader(size: int, position: int) -> Resume:
    def resume() -> None:
        next(iter(make(state)))

    def make(loaded: dict[str, Any] | None) -> hf.Loader:
        loader = hf.Loader(
            Numbers(size), global_batch_size=BATCH, seed=0, rank=0, world_size=1, seed_samples=False, collate_fn=len
        )
        if loaded:
            loader.load_state_dict(loaded)
        return loader

    state = make(None).state_dict() | {"position": position // BATCH * BATCH}
    return resume


def skipping_indices(size: int, position: int) -> Resume:
    """The epoch's order is made again, and its beginning passed over."""

    def resume() -> None:
        sampler = DistributedSampler(Numbers(size), num_replicas=1, rank=0, seed=0)
        next(itertools.islice(batches(sampler), position // BATCH, None))

    return resume


def batches(sampler: DistributedSampler) -> Iterator[list[int]]:
    numbers = iter(sampler)
    while batch := list(itertools.islice(numbers, BATCH)):
        yield batch


def skipping_batches(size: int, position: int) -> Resume:
    """The loop that most scripts have: read, and throw away."""

    def resume() -> None:
        sampler = DistributedSampler(Numbers(size), num_replicas=1, rank=0, seed=0)
        loader = DataLoader(Numbers(size), batch_size=BATCH, sampler=sampler)
        next(itertools.islice(iter(loader), position // BATCH, None))

    return resume


def stateful(size: int, position: int, *, distributed: bool) -> Resume:
    """torchdata's StatefulDataLoader, with its own shuffling or its own DistributedSampler."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    def make() -> Any:
        dataset = Numbers(size)
        if not distributed:
            return StatefulDataLoader(dataset, batch_size=BATCH, shuffle=True, collate_fn=len)
        sampler = StatefulDistributedSampler(dataset, num_replicas=1, rank=0)
        return StatefulDataLoader(dataset, batch_size=BATCH, sampler=sampler, collate_fn=len)

    def resume() -> None:
        loader = make()
        loader.load_state_dict(state)
        next(iter(loader))

    loader = make()
    for _ in itertools.islice(loader, position // BATCH):
        pass
    state = loader.state_dict()
    return resume


def has_torchdata() -> bool:
    return importlib.util.find_spec("torchdata") is not None


def cost(prepare: Prepare, size: int, position: int) -> Cost:
    """Measured in a child of this process."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=_measure, args=(sending, prepare, size, position))
    child.start()
    sending.close()
    seconds, rise_bytes = receiving.recv()
    child.join()
    return Cost(seconds, rise_bytes)


def _measure(sending: Any, prepare: Prepare, size: int, position: int) -> None:
    warnings.simplefilter("ignore")  # torchdata calls what torch has deprecated
    resume = prepare(size, position)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = _resident_bytes("VmHWM")
    begin = time.perf_counter()
    resume()
    seconds = time.perf_counter() - begin
    sending.send((seconds, _resident_bytes("VmHWM") - before))


def _resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))
