"""What the batches of a step were made of, written into the progress record where the agent finds it.

The samples of each batch that `step.batches` hands out are added up by digests (data/sample_digest.py): the sum depends
neither on their order nor on who had them. Right before the barrier the sums of the step go into the record, an entry
for each loader; the barrier then decides about all ranks' entries alike:

    committed    the barrier was passed, on any rank: the entry counts
    void         the step is repeated: so is its entry
    open         this worker died at the barrier. No rank passes a barrier that not all have reached, so the entry is
                 there, and counts if any other rank's does

Where several ranks are given the same batches, those of one of them count, and the others' are checked against them
(data/data_coordinates.py).

Batches that a step asks for a second time replace those of the first: they are the same step's.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.core.events import DataSource
from holdfast.core.sample_audit import TOTAL_MODULUS
from holdfast.wire.progress_page import ProgressMark, ProgressPage, SampleEntry
from holdfast.wire.worker_messages import DataSkippedMessage

TEXT_CHARS_MAX = 1_000


class SampleWatcher:
    """Adds up what one loader hands out."""

    def __init__(self, handed: dict[int, tuple[int, int, int]], source: int, loader: Any) -> None:
        self._handed, self._source, self._loader = handed, source, loader

    def begin(self, step: int) -> None:
        """Begin with the batches of a loader's step."""
        self._handed[self._source] = (step, 0, 0)

    def add(self, count: int, total: int) -> None:
        """Add one batch."""
        count, total = self._loader.audited(count, total)
        step, before, sum_before = self._handed[self._source]
        self._handed[self._source] = (step, before + count, (sum_before + total) % TOTAL_MODULUS)


class SampleRecorder:
    """One worker's. Loaders are named by their place among the tracked ones."""

    def __init__(self, page: ProgressPage) -> None:
        self._page = page
        self._handed: dict[int, tuple[int, int, int]] = {}
        """By loader, in the step under way: its step, samples, sum of digests."""
        self._open: list[tuple[int, int]] = []
        """Entries of steps that are neither committed nor void yet: (number, step of the job)."""
        self._reported: set[tuple[int, int, int]] = set()

    def attach(self, loaders: Iterable[Any]) -> None:
        """Watch these tracked loaders."""
        for source, loader in enumerate(loaders):
            loader.watcher = SampleWatcher(self._handed, source, loader)

    def write(self, view: int, rank: int, world_size: int, job_step: int) -> None:
        """Write the entries of a step that has come to its barrier."""
        for source, (step, count, total) in sorted(self._handed.items()):
            entry = SampleEntry(view, rank, world_size, source, job_step, step, count, total.to_bytes(16, "big"))
            self._open.append((self._page.add_entry(entry), job_step))
        self._handed.clear()

    def settle(self, next_step: int) -> None:
        """Mark the open entries: all steps of the job before this one are committed, and no other."""
        for number, job_step in self._open:
            self._page.mark(number, ProgressMark.COMMITTED if job_step < next_step else ProgressMark.VOID)
        self._open.clear()

    def forget(self) -> None:
        """Forget what was handed out: the step begins again."""
        self._handed.clear()

    def new_skips(self, loaders: Mapping[str, Any]) -> list[DataSkippedMessage]:
        """Return the skips of loaders that were not reported yet."""
        news = []
        for source, (name, loader) in enumerate(loaders.items()):
            for skip in loader.skips:
                key = (source, skip.steps.start, skip.steps.stop)
                if key not in self._reported:
                    self._reported.add(key)
                    news.append(
                        DataSkippedMessage(source, name, skip.steps.start, skip.steps.stop, skip.why[:TEXT_CHARS_MAX])
                    )
        return news


def describe(loaders: Mapping[str, Any]) -> tuple[DataSource, ...]:
    """Return what the order of each loader's samples follows from."""
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
    """Return a number that is equal on two ranks whose loaders stand at the same step and skip the same."""
    text = ";".join(f"{loader.step}:{loader.skips}" for loader in loaders)
    return zlib.crc32(text.encode())
