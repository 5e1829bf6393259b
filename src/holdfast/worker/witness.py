"""What the batches of a step were made of, written into the progress record where the agent finds it.

The samples of each batch that `step.batches` hands out are added up by digests (data/ledger.py): the sum depends
neither on their order nor on who had them. Right before the barrier the sums of the step go into the record, an entry
for each loader; the barrier then decides about all ranks' entries alike:

    committed    the barrier was passed, here or by anybody: the entry counts
    void         the step is repeated: so is its entry
    open         this worker died at the barrier. Nobody passes a barrier that not all have reached, so the entry is
                 there, and counts if any other rank's does

Batches that a step asks for a second time replace those of the first: they are the same step's.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.core.events import DataSource
from holdfast.wire.progress import Entry, Mark, ProgressPage
from holdfast.wire.session import Skipped

TOTAL_MODULUS = 2**128
TEXT_CHARS_MAX = 1_000


class Watcher:
    """Adds up what one loader hands out."""

    def __init__(self, handed: dict[int, tuple[int, int, int]], source: int) -> None:
        self._handed, self._source = handed, source

    def begin(self, step: int) -> None:
        """The batches of a loader's step are about to be handed out."""
        self._handed[self._source] = (step, 0, 0)

    def add(self, count: int, total: int) -> None:
        """One batch."""
        step, before, sum_before = self._handed[self._source]
        self._handed[self._source] = (step, before + count, (sum_before + total) % TOTAL_MODULUS)


class Witness:
    """One worker's. Loaders are named by their place among the tracked ones."""

    def __init__(self, page: ProgressPage) -> None:
        self._page = page
        self._handed: dict[int, tuple[int, int, int]] = {}
        """By loader, in the step under way: its step, samples, sum of digests."""
        self._open: list[tuple[int, int]] = []
        """Entries of which is not known what becomes: (number, step of the job)."""
        self._told: set[tuple[int, int, int]] = set()

    def attach(self, loaders: Iterable[Any]) -> None:
        """These are tracked."""
        for source, loader in enumerate(loaders):
            loader.watcher = Watcher(self._handed, source)

    def write(self, view: int, rank: int, world_size: int, job_step: int) -> None:
        """The step has come to its barrier."""
        for source, (step, count, total) in sorted(self._handed.items()):
            entry = Entry(view, rank, world_size, source, job_step, step, count, total.to_bytes(16, "big"))
            self._open.append((self._page.witness(entry), job_step))
        self._handed.clear()

    def settle(self, next_step: int) -> None:
        """All steps of the job before this one are committed, and no other."""
        for number, job_step in self._open:
            self._page.mark(number, Mark.COMMITTED if job_step < next_step else Mark.VOID)
        self._open.clear()

    def forget(self) -> None:
        """The step is begun anew."""
        self._handed.clear()

    def news_of_skips(self, loaders: Mapping[str, Any]) -> list[Skipped]:
        """What loaders will pass over and nobody was told of."""
        news = []
        for source, (name, loader) in enumerate(loaders.items()):
            for skip in loader.skips:
                key = (source, skip.steps.start, skip.steps.stop)
                if key not in self._told:
                    self._told.add(key)
                    news.append(Skipped(source, name, skip.steps.start, skip.steps.stop, skip.why[:TEXT_CHARS_MAX]))
        return news


def describe(loaders: Mapping[str, Any]) -> tuple[DataSource, ...]:
    """What the order of each loader's samples follows from."""
    return tuple(_source(name, loader.plan.configuration()) for name, loader in loaders.items())


def _source(name: str, plan: Mapping[str, Any]) -> DataSource:
    return DataSource(
        name=name,
        size=plan["size"],
        seed=str(plan["seed"]),
        global_batch_size=plan["global_batch_size"],
        slots=plan["slots"],
        shuffle=plan["shuffle"],
        last_batch=plan["last_batch"],
        locality=tuple(plan["locality"]),
        fingerprint=plan["fingerprint"][:TEXT_CHARS_MAX],
    )


def mark_of(loaders: Iterable[Any]) -> int:
    """Equal on two ranks whose loaders stand at the same step and pass over the same."""
    text = ";".join(f"{loader.step}:{loader.skips}" for loader in loaders)
    return zlib.crc32(text.encode())
