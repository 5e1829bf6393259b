"""Batches fetched ahead by torch's DataLoader workers, step after step, across the ends of epochs and of views.

The index queue of the workers is fed by an endless list of requests: for each step, in order, one for each *part* (what
a contiguous run of slots has of the step, which becomes one batch). The list can be replaced at any time, from any step
and with other slots; the workers notice nothing. What was requested before then still arrives, and

    is in the new list too     is stored until its turn, and not requested again
    is not                     is dropped

A batch is named by its positions, so that it is the same one in every view and every attempt. Where ranks'
shares are not divided into slots, a part is a rank's share: it is reused if the share stays the same.

The batches that were handed out last are kept too (`ReplayableBatch`), since a step may be repeated.

The DataLoader is given a generator of its own: making its iterator otherwise draws from the global one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from holdfast.data.cursor import Skips
from holdfast.data.step_plan import StepPlan, blocks
from holdfast.data.worker_dataset import FetchRequest, FetchResult, Key, SampleFetcher
from holdfast.torch_compat import (
    ExceptionWrapper,
    end_loader_workers,
    has_dead_workers,
    tree_flatten,
    tree_unflatten,
    version_of,
)

BLOCK_SAMPLES = 16_384
"""How many samples' numbers are computed at a time."""
CHANGES_CACHED_MAX = 4
"""Each change of the list may leave as many answers waiting as are in flight. Of more, the last ones are dropped."""

Units = tuple[range, ...]
"""Contiguous runs of slots, each of which becomes one batch of a step."""


class PipelinePart(NamedTuple):
    """The samples of one unit in a step. A ghost has the first position of all instead, for a rank that has nothing
    else."""

    unit: range
    key: Key


class Pipeline:
    """A prefetcher of batches in the order of steps and units."""

    def __init__(
        self, plan: StepPlan, skips: Skips, feed: SampleFetcher, num_workers: int, options: dict[str, Any]
    ) -> None:
        self.plan, self._skips = plan, skips
        self.last_digest: tuple[int, int] = (0, 0)
        """The digest of the batch that was fetched last."""
        self._units: Units = ()
        self._skips_seen = 0
        self._step = 0
        self._upcoming: Iterator[FetchRequest] = iter(())
        self._next_request: FetchRequest | None = None
        self._in_flight: set[Key] = set()
        self._early: dict[Key, FetchResult] = {}
        """Answers that came before their turn."""
        self._handed_out: dict[Key, ReplayableBatch] = {}
        """Batches that were handed out, of the step that was asked for last."""
        self._answers: Iterator[FetchResult] | None = None
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
        self._early_max = CHANGES_CACHED_MAX * num_workers * (self._loader.prefetch_factor or 0)

    def parts(self, step: int, units: Units) -> list[PipelinePart]:
        """Return the batches of a step: those of the units that have samples, or one ghost."""
        shares = [(unit, self.plan.slot_share(step, unit)) for unit in units]
        filled = [PipelinePart(unit, (share.start, share.stop)) for unit, share in shares if share]
        first = self.plan.span(step).start
        return filled or [PipelinePart(units[0], (first, first + 1))]

    def fetch(self, step: int, index: int, units: Units, key: Key) -> Any:
        """Return the batch of a part of a step: the one with this key. The cheapest is the one after the last."""
        if step != self._step:
            self._step, self._handed_out = step, {}
        elif index == 0:  # repeated: perhaps because a worker died
            self._end_if_broken()
        if (replayed := self._replayed(key)) is not None:
            return replayed
        self._expect(step, index, units, key)
        answer = self._early.pop(key, None) or self._wait_for(key)
        if isinstance(answer.batch, ExceptionWrapper):
            answer.batch.reraise()  # type: ignore[no-untyped-call]
        self._handed_out[key] = ReplayableBatch(answer)
        self.last_digest = (answer.samples, answer.total)
        return answer.batch

    def next_request(self) -> FetchRequest:
        """Return the next request, skipping what is in flight or already here."""
        request = self._peek()
        self._next_request = None
        self._in_flight.add(request.key)
        return request

    def close(self) -> None:
        """End the workers."""
        self._answers = None
        self._in_flight.clear()
        end_loader_workers(self._loader)

    def _end_if_broken(self) -> None:
        """End the DataLoader if a worker died: torch would wait for its answers for seconds."""
        if has_dead_workers(self._loader):
            self.close()

    # --- what was handed out before

    def _replayed(self, key: Key) -> Any:
        cached = self._handed_out.get(key)
        if cached is None:
            return None
        if (batch := cached.batch()) is None:
            del self._handed_out[key]
            return None
        self.last_digest = (cached.answer.samples, cached.answer.total)
        return batch

    # --- asking ahead

    def _expect(self, step: int, index: int, units: Units, key: Key) -> None:
        """Replace the list of requests unless this batch belongs to it."""
        is_same_list = units == self._units and self._skips.changes == self._skips_seen
        is_coming = key in self._early or key in self._in_flight or (is_same_list and self._peek().key == key)
        if is_same_list and is_coming:
            return
        self._units, self._skips_seen = units, self._skips.changes
        self._upcoming, self._next_request = self._requests(step, index, units), None
        self._early = {early: answer for early, answer in self._early.items() if self._is_wanted(early)}

    def _is_wanted(self, key: Key) -> bool:
        step = self.plan.step_with(key[0])
        return step >= self._step and step not in self._skips and key in {p.key for p in self.parts(step, self._units)}

    def _peek(self) -> FetchRequest:
        while self._next_request is None:
            request = next(self._upcoming)
            if not any(request.key in known for known in (self._in_flight, self._early, self._handed_out)):
                self._next_request = request
        return self._next_request

    def _requests(self, step: int, index: int, units: Units) -> Iterator[FetchRequest]:
        """Yield all that will be needed from this part of a step on, if nothing changes."""
        while True:
            # Epoch by epoch: each has a key of its own, and a small dataset would have very many in a block.
            epoch_end = self.plan.first_step(self.plan.epoch_of(step) + 1)
            for remaining in self._skips.remaining(range(step, epoch_end)):
                for block in blocks(remaining, BLOCK_SAMPLES // self.plan.global_batch_size):
                    yield from self._block(block, units, index)
                    index = 0
            step = epoch_end

    def _block(self, steps: range, units: Units, index: int) -> Iterator[FetchRequest]:
        keys = [part.key for step in steps for part in self.parts(step, units)][index:]
        spans = [range(*key) for key in keys]
        for key, span, samples in zip(keys, spans, self.plan.samples_of(spans), strict=True):
            yield FetchRequest(key, self._by_epoch(span, samples.tolist()))

    def _by_epoch(self, span: range, samples: list[int]) -> list[tuple[int, list[int]]]:
        parts, begin = [], 0
        for epoch, first, end in self.plan.order.segments(span):
            parts.append((epoch, samples[begin : begin + end - first]))
            begin += end - first
        return parts

    # --- what comes

    def _wait_for(self, key: Key) -> FetchResult:
        while (answer := self._receive()).key != key:
            if self._is_wanted(answer.key):
                self._early[answer.key] = answer
                if len(self._early) > self._early_max:
                    del self._early[max(self._early)]  # asked for again, when its turn comes
        return answer

    def _receive(self) -> FetchResult:
        try:
            if self._answers is None:
                self._answers = iter(self._loader)
            answer = next(self._answers)
        except BaseException:  # a worker died, or we were interrupted: what is in flight is not known any more
            self.close()
            raise
        self._in_flight.discard(answer.key)
        return answer


class _Requests:
    """The iterable that torch's DataLoader iterates once."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def __iter__(self) -> Iterator[FetchRequest]:
        while True:
            yield self._pipeline.next_request()


def _as_it_is(batch: Any) -> Any:
    return batch


# --- batches for repeated steps

UNCHANGING = (str, bytes, int, float, complex, bool, type(None))


class ReplayableBatch:
    """A batch that was handed out, in case its step is repeated.

    A repeated step must have the very same batch. The loop may have changed it in place; torch counts such changes for
    each tensor, so a batch with a changed tensor is fetched again. So is one with values whose changes are not counted
    (arrays, the user's own objects). Lists and dictionaries are created again each time. torch does not count writes
    through `.data`, or through the array that `.numpy()` returns.
    """

    def __init__(self, answer: FetchResult) -> None:
        self.answer = answer
        self._leaves, self._structure = tree_flatten(answer.batch)
        self._change_counts = _change_counts(self._leaves)

    def batch(self) -> Any:
        """Return the batch as it was handed out; None if it is not known to be the same."""
        if self._change_counts is None or _change_counts(self._leaves) != self._change_counts:
            return None
        return tree_unflatten(self._leaves, self._structure)


def _change_counts(leaves: list[Any]) -> list[tuple[Any, ...]] | None:
    """Return values that differ after a change; None where a change could not be seen."""
    counts: list[tuple[Any, ...]] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if leaf.is_inference():
                return None
            counts.append((version_of(leaf), leaf.data_ptr(), leaf.requires_grad, leaf.grad is None))
        elif not isinstance(leaf, UNCHANGING):
            return None
    return counts
