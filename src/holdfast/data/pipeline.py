"""Batches fetched ahead by torch's DataLoader workers, step after step, across the ends of epochs and of views.

The index queue of the workers is fed by an endless list of requests: for each step, in order, one for each *part* (what
a contiguous run of slots has of the step, which becomes one batch). The list can be begun anew, from any step and with
other slots, at any time; the workers notice nothing. What was asked for before then still comes, and

    is wanted by the new list too     kept until its turn, and not asked for again
    is not                            let go

A batch is named by its positions, so that it is the same one in every view and every attempt. Where ranks' shares are
not cut into slots, a part is a rank's share: it is kept if the share stays the same.

What was handed out last is kept too (keeping.py), since a step may be repeated.

The DataLoader is given a generator of its own: making its iterator otherwise draws from the global one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader

from holdfast.data.fetching import Answer, Feed, Key, Request
from holdfast.data.keeping import Kept
from holdfast.data.plan import Plan, blocks
from holdfast.data.skips import Skips

BLOCK_SAMPLES = 16_384
"""How many samples' numbers are computed at a time."""
CHANGES_KEPT_MAX = 4
"""Each change of the list may leave as many answers waiting as are in flight. Of more, the last ones are let go."""

Units = tuple[range, ...]
"""Contiguous runs of slots, each of which becomes one batch of a step."""


class Part(NamedTuple):
    """What a unit has of a step. A ghost has the first position of all instead, for a rank that has nothing else."""

    unit: range
    key: Key


class Pipeline:
    """Batches in the order of steps and parts."""

    def __init__(self, plan: Plan, skips: Skips, feed: Feed, num_workers: int, options: dict[str, Any]) -> None:
        self.plan, self._skips = plan, skips
        self.handed: tuple[int, int] = (0, 0)
        """The witness of the batch taken last."""
        self._units: Units = ()
        self._skips_seen = 0
        self._step = 0
        self._upcoming: Iterator[Request] = iter(())
        self._next_request: Request | None = None
        self._in_flight: set[Key] = set()
        self._early: dict[Key, Answer] = {}
        """Answers that came before their turn."""
        self._kept: dict[Key, Kept] = {}
        """Handed out, of the step that was asked for last."""
        self._answers: Iterator[Answer] | None = None
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
        self._early_max = CHANGES_KEPT_MAX * num_workers * (self._loader.prefetch_factor or 0)

    def parts(self, step: int, units: Units) -> list[Part]:
        """The batches of a step: of the units that have samples, or one ghost."""
        shares = [(unit, self.plan.slot_share(step, unit)) for unit in units]
        filled = [Part(unit, (share.start, share.stop)) for unit, share in shares if share]
        first = self.plan.span(step).start
        return filled or [Part(units[0], (first, first + 1))]

    def take(self, step: int, index: int, units: Units, key: Key) -> Any:
        """The batch of a part of a step: the one with this key. The cheapest is the one after the last."""
        if step != self._step:
            self._step, self._kept = step, {}
        elif index == 0:  # repeated: perhaps because a worker died
            self._end_if_broken()
        if (again := self._again(key)) is not None:
            return again
        self._expect(step, index, units, key)
        answer = self._early.pop(key, None) or self._wait_for(key)
        if isinstance(answer.batch, ExceptionWrapper):
            answer.batch.reraise()  # type: ignore[no-untyped-call]
        self._kept[key] = Kept(answer)
        self.handed = (answer.samples, answer.total)
        return answer.batch

    def next_request(self) -> Request:
        """Leaves out what is on its way, or here."""
        request = self._peek()
        self._next_request = None
        self._in_flight.add(request.key)
        return request

    def close(self) -> None:
        """End the workers."""
        self._answers = None
        self._in_flight.clear()
        shutdown = getattr(self._loader._iterator, "_shutdown_workers", None)
        self._loader._iterator = None
        if shutdown:
            shutdown()

    def _end_if_broken(self) -> None:
        """torch would wait for the answers of a dead worker for seconds."""
        if not all(worker.is_alive() for worker in getattr(self._loader._iterator, "_workers", ())):
            self.close()

    # --- what was handed out before

    def _again(self, key: Key) -> Any:
        kept = self._kept.get(key)
        if kept is None:
            return None
        if (batch := kept.batch()) is None:
            del self._kept[key]
            return None
        self.handed = (kept.answer.samples, kept.answer.total)
        return batch

    # --- asking ahead

    def _expect(self, step: int, index: int, units: Units, key: Key) -> None:
        """Have the list of requests be the one that this batch belongs to."""
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

    def _peek(self) -> Request:
        while self._next_request is None:
            request = next(self._upcoming)
            if request.key not in self._in_flight and request.key not in self._early and request.key not in self._kept:
                self._next_request = request
        return self._next_request

    def _requests(self, step: int, index: int, units: Units) -> Iterator[Request]:
        """All that will be needed from this part of a step on, if nothing changes."""
        while True:
            # Epoch by epoch: each has a key of its own, and a small dataset would have very many in a block.
            epoch_end = self.plan.first_step(self.plan.epoch_of(step) + 1)
            for taken in self._skips.taken(range(step, epoch_end)):
                for block in blocks(taken, BLOCK_SAMPLES // self.plan.global_batch_size):
                    yield from self._block(block, units, index)
                    index = 0
            step = epoch_end

    def _block(self, steps: range, units: Units, index: int) -> Iterator[Request]:
        keys = [part.key for step in steps for part in self.parts(step, units)][index:]
        spans = [range(*key) for key in keys]
        for key, span, samples in zip(keys, spans, self.plan.samples_of(spans), strict=True):
            yield Request(key, self._by_epoch(span, samples.tolist()))

    def _by_epoch(self, span: range, samples: list[int]) -> list[tuple[int, list[int]]]:
        parts, begin = [], 0
        for epoch, first, end in self.plan.order.segments(span):
            parts.append((epoch, samples[begin : begin + end - first]))
            begin += end - first
        return parts

    # --- what comes

    def _wait_for(self, key: Key) -> Answer:
        while (answer := self._receive()).key != key:
            if self._is_wanted(answer.key):
                self._early[answer.key] = answer
                if len(self._early) > self._early_max:
                    del self._early[max(self._early)]  # asked for again, when its turn comes
        return answer

    def _receive(self) -> Answer:
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
    """What the DataLoader iterates: once."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def __iter__(self) -> Iterator[Request]:
        while True:
            yield self._pipeline.next_request()


def _as_it_is(batch: Any) -> Any:
    return batch
