"""A mixture of datasets by weights, as one map-style dataset: its sample k is the k-th draw of the run.

    mixture = Mixture([web, books], weights=[0.8, 0.2], seed=0, draws=10**9)
    data = hf.Loader(mixture, global_batch_size=256, shuffle=False)

**Draws.** Draws come in blocks of BLOCK_DRAWS. In each block every source has its exact number of draws (the weights'
share, rounded by largest remainders), at places permuted by a key of the block's own. So source and sample of any draw
follow from its number, in constant time, and after any whole number of blocks the shares are exact. The n-th draw of
a source is the n-th position of that source's own shuffled order: each source is used up, every sample once, before it
begins its next epoch. `shuffle=False`, since the mixture is in order already.

**Changing weights.** `changes=[(draw, weights), …]` gives other weights from a draw on, rounded up to a whole block.
All draws before it stay as they were, and a source goes on in its own order where it was. To change weights in a run
that is under way, resume with a change at a draw not yet committed. What is already committed cannot be changed by one
at a later draw, so the state of the data remains valid.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset

from holdfast.data.order import Indices, Order, Permutation, round_keys
from holdfast.data.slots import slot_counts
from holdfast.data.worker_dataset import read_many
from holdfast.errors import UsageError

BLOCK_DRAWS = 1024
"""Weights are honoured to within one draw in so many."""
BLOCKS_CACHED_MAX = 16
"""A worker reads draws nearly in order: a few blocks serve it."""


class MixturePhase(NamedTuple):
    """A range of draws with the same weights."""

    first_block: int
    counts: tuple[int, ...]
    """Draws of each source in a block."""
    drawn_before: tuple[int, ...]
    """Draws of each source before the first block."""


class Mixture(Dataset[Any]):
    """A dataset that draws from several map-style datasets by weight."""

    def __init__(
        self,
        datasets: Sequence[Any],
        *,
        weights: Sequence[float],
        draws: int,
        seed: int = 0,
        changes: Sequence[tuple[int, Sequence[float]]] = (),
    ) -> None:
        """Make a mixture. `draws` is its length: at least as many as the run will take."""
        self.datasets, self.draws, self.seed = list(datasets), draws, seed
        if draws < 1:
            raise UsageError(f"a mixture of {draws} draws is not possible; give at least 1")
        self.orders = [
            Order(len(dataset), seed=round_keys(seed, source, "source")[0]) for source, dataset in enumerate(datasets)
        ]
        self.phases = [MixturePhase(0, self._counts(weights), (0,) * len(self.datasets))]
        for draw, changed in changes:
            self._add_phase(draw, changed)
        self._blocks: OrderedDict[int, tuple[Indices, Indices]] = OrderedDict()

    def __len__(self) -> int:
        return self.draws

    def __getitem__(self, draw: int) -> Any:
        source, sample = self.place(draw)
        return self.datasets[source][sample]

    def __getitems__(self, draws: Sequence[int]) -> list[Any]:
        """Read draws source by source, so that sources that read many at once do so."""
        places = [self.place(draw) for draw in draws]
        items: dict[int, Any] = {}
        for source, dataset in enumerate(self.datasets):
            own = [index for index, (of, _) in enumerate(places) if of == source]
            items |= zip(own, read_many(dataset, [places[index][1] for index in own]), strict=True)
        return [items[index] for index in range(len(places))]

    def place(self, draw: int) -> tuple[int, int]:
        """Return the source of a draw and the sample in it."""
        if not 0 <= draw < self.draws:
            raise IndexError(f"draw {draw} of {self.draws}")
        number, within = divmod(draw, BLOCK_DRAWS)
        if number not in self._blocks:
            self._blocks[number] = self._block(number)
            if len(self._blocks) > BLOCKS_CACHED_MAX:
                self._blocks.popitem(last=False)
        sources, samples = self._blocks[number]
        return int(sources[within]), int(samples[within])

    def _block(self, number: int) -> tuple[Indices, Indices]:
        """Return sources and samples of a block's draws."""
        phase = self.phases[bisect_right(self.phases, number, key=lambda phase: phase.first_block) - 1]
        places = Permutation(BLOCK_DRAWS, round_keys(self.seed, number, "mixture")).apply(np.arange(BLOCK_DRAWS))
        ends = np.cumsum(phase.counts)
        sources = np.searchsorted(ends, places, side="right").astype(np.int64)
        samples = np.empty(BLOCK_DRAWS, dtype=np.int64)
        for source, (count, before) in enumerate(zip(phase.counts, phase.drawn_before, strict=True)):
            first = before + (number - phase.first_block) * count
            # The places of a source within the block are consecutive numbers: its draws, in an order of their own.
            own = np.flatnonzero(sources == source)
            ranked = places[own] - (int(ends[source]) - count)
            samples[own] = self.orders[source].samples_at(range(first, first + count))[ranked]
        return sources, samples

    def _counts(self, weights: Sequence[float]) -> tuple[int, ...]:
        if len(weights) != len(self.datasets):
            raise UsageError(f"{len(weights)} weights for {len(self.datasets)} datasets; give one for each")
        return slot_counts(len(self.datasets), BLOCK_DRAWS, tuple(weights))

    def _add_phase(self, draw: int, weights: Sequence[float]) -> None:
        last, first_block = self.phases[-1], -(-draw // BLOCK_DRAWS)
        if first_block <= last.first_block:
            raise UsageError(f"weights change at draw {draw:,}, which is not a block after the change before it")
        blocks = first_block - last.first_block
        before = tuple(drawn + blocks * count for drawn, count in zip(last.drawn_before, last.counts, strict=True))
        self.phases.append(MixturePhase(first_block, self._counts(weights), before))
