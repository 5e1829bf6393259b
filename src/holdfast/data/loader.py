"""The exact loader: batches of each step, by slot or for the whole rank, fetched ahead by torch's workers.

    data = hf.Loader(dataset, global_batch_size=256, seed=0, num_workers=4)
    for epoch in range(data.epoch, epochs):
        for x, y in data:                                   # the rest of the epoch, one batch a step
            (cross_entropy(model(x), y) * data.loss_scale).backward()
            optimizer.step()
            optimizer.zero_grad()
            data.commit()

or slot by slot, with the gradients of a step's slots added up:

    for x, y in data.step_batches():                        # this rank's slots of the step
        with contextlib.nullcontext() if data.is_last_of_step else model.no_sync():
            (cross_entropy(model(x), y) * data.loss_scale).backward()

`loss_scale` and `is_last_of_step` are those of the batch handed out last. A rank whose slots have no samples in a step
gets one ghost (see sampler.py), with scale 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.data.batch_source import BatchInfo, BatchSource, Weight
from holdfast.data.cursor import Cursor, assigned, size_of
from holdfast.data.order import Locality
from holdfast.data.pipeline import Pipeline, Units
from holdfast.data.step_plan import LastBatch, make_plan
from holdfast.data.worker_dataset import Collate, SampleFetcher, Transform
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

OURS = ("batch_size", "batch_sampler", "sampler", "shuffle", "drop_last", "generator")


class LoaderWatcher(Protocol):
    """A receiver of the digests of the batches that a loader gives out (sample_digest.py)."""

    def begin(self, step: int) -> None:
        """Begin a step: its batches follow, from the first."""

    def add(self, count: int, total: int) -> None:
        """Add a batch by its digest."""


class Loader(BatchSource, Cursor):
    """A loader of this rank's batches of a map-style dataset."""

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        seed: int = 0,
        slots: int | None = None,
        shuffle: bool = True,
        last_batch: LastBatch = "short",
        locality: Locality | None = None,
        fingerprint: str = "",
        num_workers: int = 0,
        collate_fn: Collate | None = None,
        transform: Transform | None = None,
        seed_samples: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
        weights: Sequence[float] | None = None,
        **options: Any,
    ) -> None:
        """Make a loader. `slots` divides the global batch, for the whole run; without it, ranks' shares are not divided
        further. `transform` maps a sample, in the workers. `seed_samples` sets the generators by (seed, epoch, sample)
        before each sample is read and transformed; that costs some 15 µs a sample, which can be saved where nothing is
        random. `mesh` has the dimensions of a DeviceMesh along which the batch is divided, as in `mesh["dp"]`: ranks
        that differ in others only are given the same batches. `options` go to torch's DataLoader."""
        if wrong := [name for name in OURS if name in options]:
            raise UsageError(f"{', '.join(wrong)}: the plan decides; give global_batch_size, shuffle, last_batch, seed")
        self._take_mesh(mesh, rank, world_size)
        assignment = assigned(rank, world_size)
        plan = make_plan(
            size_of(dataset),
            global_batch_size=global_batch_size,
            seed=seed,
            slots=slots,
            shuffle=shuffle,
            last_batch=last_batch,
            locality=locality,
            fingerprint=fingerprint,
        )
        Cursor.__init__(self, plan, assignment, weights)
        BatchSource.__init__(self, plan.slots, has_slots=slots is not None)
        feed = SampleFetcher(dataset, seed, collate_fn, transform, seed_samples)
        self._pipeline = Pipeline(plan, self.skips, feed, num_workers, options)
        self.watcher: LoaderWatcher | None = None
        """The receiver of the digests of the batches of `step_batches`."""

    @property
    def has_slots(self) -> bool:
        """Return whether `step_batches` gives a batch for each slot."""
        return self._has_slots

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of the epoch, one batch a step: all slots of this rank together."""
        if self.before_pass is not None:
            self.before_pass()
        for step in chain.from_iterable(self.skips.remaining(self._begin_pass())):
            if step in self.skips:
                continue  # since it began
            self._drawn = max(self._drawn, step + 1)
            yield from self._batches(step, (self._slots(),))

    def step_batches(self, step: int | None = None, *, weight: Weight | None = None) -> Iterator[Any]:
        """Yield this rank's batches of a step (the one being trained on), one for each slot that has samples. Without
        the setting `slots`, yield one for the whole share. `weight` says how much a batch counts, where the mean is
        over something else than samples: its number of tokens that are not padding, for example."""
        batches = self._audited(self._step if step is None else step)
        yield from batches if weight is None else self._weighted(batches, weight)

    def _audited(self, step: int) -> Iterator[Any]:
        self._drawn = max(self._drawn, step + 1)
        if self.watcher is not None:
            self.watcher.begin(step)
        for batch in self._batches(step, self._units()):
            if self.watcher is not None and not self.is_ghost:
                self.watcher.add(*self._pipeline.last_digest)
            yield batch

    def close(self) -> None:
        """End the workers now, not when the loader is forgotten."""
        self._pipeline.close()

    def _batches(self, step: int, units: Units) -> Iterator[Any]:
        """Yield the batches of units that have samples; a rank without any gets a ghost: one sample, with scale 0."""
        parts, total = self._pipeline.parts(step, units), len(self.plan.span(step))
        ghosts = self._ghosts(len(parts), lambda slot: bool(self.plan.slot_share(step, range(slot, slot + 1))))
        for index, (unit, key) in enumerate(parts):
            batch = self._pipeline.fetch(step, index, units, key)
            own = self.plan.slot_share(step, unit)
            is_last = index == len(parts) - 1 and not ghosts
            self._last_batch = BatchInfo(self.scale_of(step, own), len(own) / total, is_last, unit.start, not own)
            yield batch
        for ghost in range(ghosts):  # its own last batch, which is here
            batch = self._pipeline.fetch(step, len(parts) - 1, units, parts[-1].key)
            self._last_batch = BatchInfo(0.0, 0.0, ghost == ghosts - 1, parts[-1].unit.start, is_ghost=True)
            yield batch
