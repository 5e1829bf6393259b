"""Batches fetched ahead by torch's DataLoader workers, step after step, across the ends of epochs.

The index queue of the workers is fed by an endless list of requests: for each step, in order, one request for each
*unit* (a contiguous run of slots that becomes one batch). As long as the caller takes what comes next, nothing is
ever thrown away and no worker restarts. A caller who wants another step or other units (a repeated step, a new view)
has the list start again from there; the worker processes stay.

The DataLoader is given a generator of its own: making its iterator otherwise draws from the global one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from holdfast.data.ledger import witness
from holdfast.data.plan import Plan, blocks
from holdfast.data.randomness import kept_generators, sample_key, set_generators
from holdfast.data.skips import Skips

BLOCK_SAMPLES = 16_384
"""How many samples' numbers are computed at a time."""

Units = tuple[range, ...]
Collate = Callable[[list[Any]], Any]
Transform = Callable[[Any], Any]


class Request(NamedTuple):
    """A batch to fetch: its samples by epoch, since the random part of a sample differs from epoch to epoch."""

    step: int
    unit: int
    samples: list[tuple[int, list[int]]]


class Feed(Dataset[Any]):
    """The dataset as the workers see it: a request in, a collated batch out, and what it was made of."""

    def __init__(
        self, dataset: Any, seed: int, collate: Collate | None, transform: Transform | None, seed_samples: bool
    ) -> None:
        self.dataset, self.seed, self.seed_samples = dataset, seed, seed_samples
        self.collate = collate or default_collate
        self.transform = transform

    def __getitem__(self, request: Request) -> tuple[int, int, tuple[int, int], Any]:
        items = [item for epoch, samples in request.samples for item in self._items(epoch, samples)]
        return request.step, request.unit, witness(request.samples), self.collate(items)

    def _items(self, epoch: int, samples: list[int]) -> list[Any]:
        if self.seed_samples:
            with kept_generators():
                return [self._seeded(epoch, sample) for sample in samples]
        if hasattr(self.dataset, "__getitems__"):
            items = list(self.dataset.__getitems__(samples))
        else:
            items = [self.dataset[sample] for sample in samples]
        return [self.transform(item) for item in items] if self.transform else items

    def _seeded(self, epoch: int, sample: int) -> Any:
        set_generators(sample_key(self.seed, epoch, sample))
        item = self.dataset[sample]
        return self.transform(item) if self.transform else item


class Pipeline:
    """Batches in the order of steps and units."""

    def __init__(self, plan: Plan, skips: Skips, feed: Feed, num_workers: int, options: dict[str, Any]) -> None:
        self.plan, self._skips = plan, skips
        self.handed: tuple[int, int] = (0, 0)
        """The witness of the batch taken last."""
        self._next: tuple[int, int] = (0, 0)
        self._units: Units = ()
        self._skips_seen = 0
        self._batches: Iterator[tuple[int, int, tuple[int, int], Any]] | None = None
        if num_workers > 0:
            options = {"persistent_workers": True} | options
        self._loader: DataLoader[Any] = DataLoader(
            feed,
            batch_size=None,
            sampler=_Requests(self),
            num_workers=num_workers,
            collate_fn=_as_it_is,
            generator=torch.Generator(),
            **options,
        )

    def take(self, step: int, unit: int, units: Units) -> Any:
        """The batch of a unit of a step. The cheapest is the one after the last."""
        is_next = (step, unit) == self._next and units == self._units and self._skips_seen == self._skips.changes
        if self._batches is None or not is_next:
            self._next, self._units, self._skips_seen = (step, unit), units, self._skips.changes
            self._batches = iter(self._loader)
        found_step, found_unit, self.handed, batch = next(self._batches)
        assert (found_step, found_unit) == (step, unit), "the workers' answers are out of order"
        self._next = (step, unit + 1) if unit + 1 < len(units) else (self._skips.following(step + 1), 0)
        return batch

    def requests(self) -> Iterator[Request]:
        """All that will be needed from now on, if nothing changes."""
        (step, first_unit), units = self._next, self._units
        while True:
            # Epoch by epoch: each has a key of its own, and a small dataset would have very many in a block.
            epoch_end = self.plan.first_step(self.plan.epoch_of(step) + 1)
            for taken in self._skips.taken(range(step, epoch_end)):
                for block in blocks(taken, BLOCK_SAMPLES // self.plan.global_batch_size):
                    yield from self._block(block, units, first_unit)
                    first_unit = 0
            step = epoch_end

    def close(self) -> None:
        """End the workers."""
        self._batches = None
        shutdown = getattr(self._loader._iterator, "_shutdown_workers", None)
        self._loader._iterator = None
        if shutdown:
            shutdown()

    def _block(self, steps: range, units: Units, first_unit: int) -> Iterator[Request]:
        wanted = [(step, unit) for step in steps for unit in range(len(units))][first_unit:]
        spans = [self._positions(step, units[unit]) for step, unit in wanted]
        for (step, unit), span, samples in zip(wanted, spans, self.plan.samples_of(spans), strict=True):
            yield Request(step, unit, self._by_epoch(span, samples.tolist()))

    def _positions(self, step: int, unit: range) -> range:
        """A unit without samples becomes a ghost: a batch of one, for a rank that has nothing else in this step."""
        return self.plan.slot_share(step, unit) or self.plan.span(step)[:1]

    def _by_epoch(self, span: range, samples: list[int]) -> list[tuple[int, list[int]]]:
        parts, begin = [], 0
        for epoch, first, end in self.plan.order.segments(span):
            parts.append((epoch, samples[begin : begin + end - first]))
            begin += end - first
        return parts


class _Requests:
    """What the DataLoader iterates: anew each time it is started."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def __iter__(self) -> Iterator[Request]:
        return self._pipeline.requests()


def _as_it_is(batch: Any) -> Any:
    return batch
