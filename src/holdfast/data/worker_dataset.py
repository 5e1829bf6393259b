"""What the loader's workers do: a request in, a collated batch out, and what it was made of.

**Randomness.** With `seed_samples` the generators are set by (seed, epoch, sample) before each sample is read and
transformed, and by (seed, positions) before a batch is collated, so that everything random is the same, whichever
worker reads it, and whenever.

**Datasets that read many at once** (`__getitems__`: Hugging Face's, torch's Subset) are asked for all of a batch
together, many times faster for columns on disk. Random numbers drawn on the way could not be told apart by sample, so
it is looked at whether any were; then these samples are read again one by one, and all later ones too.

**Errors.** What a dataset raises in a worker is the answer to that request, raised when its batch is wanted: the batch
of a view that is over may never be asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import Dataset, default_collate, get_worker_info

from holdfast.data.randomness import batch_key, generator_states, preserved_generators, sample_key, set_generators
from holdfast.data.sample_digest import batch_digest
from holdfast.torch_compat import ExceptionWrapper

Collate = Callable[[list[Any]], Any]
Transform = Callable[[Any], Any]
Key = tuple[int, int]
"""The identity of a batch: its first position and the one after its last. The same batch in every view."""


class FetchRequest(NamedTuple):
    """A batch to fetch: its samples by epoch, since the random part of a sample differs from epoch to epoch."""

    key: Key
    samples: list[tuple[int, list[int]]]


class FetchResult(NamedTuple):
    """A batch, or why there is none, with its digest (sample_digest.py). It is flat, as pinning makes lists of inner
    tuples."""

    first: int
    end: int
    samples: int
    total: int
    batch: Any

    @property
    def key(self) -> Key:
        return self.first, self.end


def read_many(dataset: Any, samples: list[int]) -> list[Any]:
    """Read samples all at once where the dataset offers it, else one after the other."""
    if getattr(dataset, "__getitems__", None):
        return list(dataset.__getitems__(samples))
    return [dataset[sample] for sample in samples]


class SampleFetcher(Dataset[Any]):
    """The dataset as the DataLoader's workers see it."""

    def __init__(
        self, dataset: Any, seed: int, collate: Collate | None, transform: Transform | None, seed_samples: bool
    ) -> None:
        self.dataset, self.seed, self.seed_samples = dataset, seed, seed_samples
        self.collate = collate or default_collate
        self.transform = transform
        self._reads_many = bool(getattr(dataset, "__getitems__", None))

    def __getitem__(self, request: FetchRequest) -> FetchResult:
        worker = get_worker_info()
        if worker is None:  # in the program's own process, whose generators are not ours
            with preserved_generators(self.seed_samples):
                return self._answer(request)
        try:
            return self._answer(request)
        except Exception:  # whatever it is, the loop must see it
            where = f"in DataLoader worker process {worker.id}"
            error = ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]
            return FetchResult(*request.key, 0, 0, error)

    def _answer(self, request: FetchRequest) -> FetchResult:
        items = [item for epoch, samples in request.samples for item in self._items(epoch, samples)]
        if self.seed_samples and self.collate is not default_collate:
            set_generators(batch_key(self.seed, *request.key))
        return FetchResult(*request.key, *batch_digest(request.samples), self.collate(items))

    def _items(self, epoch: int, samples: list[int]) -> list[Any]:
        if not self.seed_samples:
            items = read_many(self.dataset, samples)
            return [self.transform(item) for item in items] if self.transform else items
        at_once = self._read_at_once(samples) if self._reads_many else None
        if at_once is None:
            return [self._seeded(epoch, sample) for sample in samples]
        if self.transform is None:
            return at_once
        return [self._transformed(epoch, sample, item) for sample, item in zip(samples, at_once, strict=True)]

    def _read_at_once(self, samples: list[int]) -> list[Any] | None:
        """Return the samples; None if random numbers were drawn."""
        before = generator_states()
        items = read_many(self.dataset, samples)
        self._reads_many = generator_states() == before
        return items if self._reads_many else None

    def _transformed(self, epoch: int, sample: int, item: Any) -> Any:
        assert self.transform is not None
        set_generators(sample_key(self.seed, epoch, sample))
        return self.transform(item)

    def _seeded(self, epoch: int, sample: int) -> Any:
        set_generators(sample_key(self.seed, epoch, sample))
        item = self.dataset[sample]
        return self.transform(item) if self.transform else item
