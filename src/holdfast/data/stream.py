"""The loader for streamed shards: files that are read from front to back, whose numbers of records nobody knows.

    data = hf.Stream("corpus/*.jsonl", global_batch_size=256, slots=16, seed=0)
    job.track(model=model, optimizer=opt, data=data)
    for step in job.steps(10_000):
        with step:
            for batch in step.batches(data):
                step.backward(loss_of(model, batch))

Each slot reads a shard of its own, then the next: core/leases.py has the rule, by which a record counts once whatever
happens; drafts.py settles a step by it, among all ranks. The state is the book of leases, the same on every rank: some
numbers a slot.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch.utils.data import default_collate

from holdfast.core import leases as core
from holdfast.core.leases import End, Held, Lease, Rules, Taken, Trouble
from holdfast.data.catalogue import Catalogue, Paths
from holdfast.data.cursor import own_place
from holdfast.data.drafts import Agree, Draft, Segment, Settler
from holdfast.data.formats import Opener
from holdfast.data.handing import Handed, Handing, Weight, over_all_ranks
from holdfast.data.order import Indices
from holdfast.data.plan import check_configuration
from holdfast.data.randomness import kept_generators, sample_key, set_generators
from holdfast.data.reading import Shelf
from holdfast.data.slots import loss_scale, slot_positions
from holdfast.errors import UsageError

STATE_VERSION = 1
SLOTS_DEFAULT_MAX = 64
"""Each has a file or two open."""
READ_AHEAD_STEPS = 2

_NOTHING: Indices = np.empty(0, dtype=np.int64)
_WORDS = {
    "shards": "the number of shards",
    "digest": "the list of shards, their sizes included,",
    "seed": "the seed",
    "global_batch_size": "the global batch size",
    "slots": "the number of slots",
    "shuffle": "the setting shuffle",
    "last_batch": "the setting last_batch",
    "epochs": "the number of epochs",
}


class Stream(Handing):
    """This rank's batches of streamed shards."""

    def __init__(
        self,
        shards: Paths,
        *,
        global_batch_size: int,
        format: str | Opener | None = None,
        seed: int = 0,
        slots: int | None = None,
        epochs: int | None = None,
        shuffle: bool = True,
        last_batch: Literal["across", "short"] = "across",
        split_bytes: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        seed_samples: bool = True,
        threads: int = 2,
        rank: int | None = None,
        world_size: int | None = None,
        weights: Sequence[float] | None = None,
        agree: Agree | None = None,
    ) -> None:
        """`shards`: paths, or a pattern. `format`: text, jsonl, tar, parquet, or a function of a shard and a record's
        number that yields the records from it on; without, as the names say. `split_bytes` cuts large files of lines.
        `epochs`: None is without end. `shuffle` permutes the shards of each epoch; records stay in their order.
        `threads` read ahead; `transform` runs in the caller's thread, its randomness keyed by epoch and record.
        `agree`: the maximum over all ranks, where torch.distributed's default group is not the one to ask.
        """
        self._catalogue = Catalogue(shards, format, split_bytes, seed, shuffle)
        is_cut, self._asked_of_all = slots is not None, agree
        slots = slots or min(global_batch_size, len(self._catalogue), SLOTS_DEFAULT_MAX)
        if not 1 <= slots <= global_batch_size:
            raise UsageError(f"{slots} slots for a global batch of {global_batch_size}; give 1 to that many")
        if last_batch not in ("across", "short") or (epochs is not None and epochs < 1):
            raise UsageError(f"last_batch is {last_batch!r}, epochs {epochs!r}; give across or short, and 1 or more")
        super().__init__(slots, is_cut)
        self.rules = Rules(len(self._catalogue), slots, epochs or 0, last_batch == "across")
        self.global_batch_size, self.seed = global_batch_size, seed
        self._transform, self._collate, self._seed_samples = transform, collate_fn or default_collate, seed_samples
        self._configuration = {
            "shards": len(self._catalogue),
            "digest": self._catalogue.digest,
            "seed": seed,
            "global_batch_size": global_batch_size,
            "slots": slots,
            "shuffle": shuffle,
            "last_batch": last_batch,
            "epochs": self.rules.epochs,
        }
        positions = range(global_batch_size)
        self._shares = [len(slot_positions(positions, range(slot, slot + 1), slots)) for slot in range(slots)]
        self._settler = Settler(self._shares, self._take, self._ask_all)
        self._shelf = Shelf(self._catalogue.open, threads)
        self._book = core.open_book(self.rules)
        self._step = 0
        self._draft: Draft | None = None
        self._news: list[tuple[int, Held]] = []
        self._troubles: list[Trouble] = []
        self._is_compared = False
        """Whether all ranks of the view have the same stream."""
        self._some_record: tuple[int, int, Any] | None = None
        self._samples = _NOTHING
        self.set_place(*own_place(rank, world_size), weights)

    # --- what can be read

    @property
    def step(self) -> int:
        """The number of committed steps; also the number of the step being trained on."""
        return self._step

    @property
    def epoch(self) -> int:
        """The epoch of the oldest shard that is not read to its end."""
        return self._catalogue.epoch_of(core.oldest_turn(self._book))

    @property
    def samples(self) -> Indices:
        """The numbers of the records of the batch handed out last: shard · 2^40 + record. Empty for a ghost."""
        return self._samples

    @property
    def quarantined(self) -> list[tuple[int, str, int]]:
        """What was given up: epoch, shard, and the record from which on it was not read."""
        found = [self._trouble(rest, "") for rest in self._book.quarantined]
        return [(trouble.epoch, trouble.shard, trouble.cursor) for trouble in found]

    # --- batches

    def __iter__(self) -> Iterator[Any]:
        """The records that are left, one batch a step; where steps do not go across epochs, those of the epoch."""
        began: int | None = None
        while (draft := self._settled()).total:
            began = draft.book.epoch if began is None else began
            if draft.book.epoch != began:
                return
            yield from self._batches(draft, [self._slots()])
            if self._draft is draft:
                raise UsageError("a step was drawn and not committed: call commit() after each optimizer step")
        self._adopt(draft)

    def step_batches(self, *, weight: Weight | None = None) -> Iterator[Any]:
        """This rank's batches of the step being trained on, one for each slot that has records.

        Without the setting `slots`, one for the whole share. `weight`: as hf.Loader's.
        """
        draft = self._settled()
        if not draft.total:
            self._adopt(draft)
            raise UsageError(f"the stream is used up after {self._step:,} steps: ask for no more, or for more epochs")
        batches = self._batches(draft, self._units())
        yield from batches if weight is None else self._weighted(batches, weight)

    def commit(self) -> None:
        """Say that the step was trained on: call it after each `optimizer.step()`, on every rank."""
        if self._draft is None:
            raise UsageError("nothing was drawn since the last commit: commit once for each step")
        self.commit_drawn()

    def commit_drawn(self) -> None:
        """Commit the step being trained on, if anything of it was drawn: what the session does after each step."""
        if (draft := self._draft) is not None:
            self._adopt(draft)
            self._step += 1
            self._read_ahead()

    def _adopt(self, draft: Draft) -> None:
        """Also of one without records, at the end: what could not be read on the way there is kept and told."""
        self._draft, own = None, self._slots()
        for lease, rest in draft.failures:
            if rest.slot in own:
                trouble = self._trouble(rest, self._shelf.reading(lease).error)
                self._troubles.append(trouble)
                _warn(trouble)
        self._news += [(slot, lease) for slot, lease in draft.leases if slot in own]
        self._book = draft.book

    def set_place(self, rank: int, world_size: int, weights: Sequence[float] | None = None) -> None:
        """Another view: from the next batch on, this rank has other slots."""
        super().set_place(rank, world_size, weights)
        self._is_compared = False
        self._begin_anew()

    def close(self) -> None:
        """End the threads now, not when the stream is forgotten."""
        self._shelf.close()

    # --- the state, and what is told of it

    def state_dict(self) -> dict[str, Any]:
        """The committed leases and the configuration: the same on every rank, plain numbers and words."""
        leases = {"version": STATE_VERSION, "step": self._step, "book": core.to_plain(self._book)}
        return leases | self._configuration

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last committed step, at whatever world size."""
        if state.get("version") != STATE_VERSION or not isinstance(state.get("step"), int):
            raise UsageError("this is not a state of streamed shards of this version of Holdfast")
        check_configuration(self._configuration, state, _WORDS)
        try:
            self._book = core.from_plain(self.rules, state.get("book"))
        except (msgspec.ValidationError, TypeError) as error:
            raise UsageError(f"the state of the streamed shards is damaged: {error}") from error
        self._step = state["step"]
        self._begin_anew()

    def _begin_anew(self) -> None:
        """In another place or at another step: all that is held here is told again, and rank 0 tells what is in
        quarantine, as whoever had it before may have died without telling."""
        self._draft = None
        self._news = [(slot, lease) for slot in self._slots() for lease in self._book.held[slot]]
        self._troubles = [self._trouble(rest, "") for rest in self._book.quarantined if self.rank == 0]

    def take_news(self) -> tuple[list[Lease], list[Trouble]]:
        """What commits have granted to slots of this rank and what failed in them, since last asked."""
        (leases, self._news), (troubles, self._troubles) = (self._news, []), (self._troubles, [])
        return [self._lease(slot, lease) for slot, lease in leases], troubles

    def _lease(self, slot: int, lease: Held) -> Lease:
        epoch, shard = self._catalogue.epoch_of(lease.turn), self._catalogue.name_of(lease.turn)
        return Lease(number=lease.number, slot=slot, epoch=epoch, shard=shard, first=lease.cursor)

    def _trouble(self, rest: core.Remainder, why: str) -> Trouble:
        epoch, shard = self._catalogue.epoch_of(rest.turn), self._catalogue.name_of(rest.turn)
        return Trouble(slot=rest.slot, epoch=epoch, shard=shard, cursor=rest.cursor, tries=rest.tries, why=why)

    # --- settling a step

    def _settled(self) -> Draft:
        """What the step being trained on has, on all ranks."""
        if self._draft is None:
            mark = self._mark()
            if not self._is_compared:  # first: where settings differ, so does the length of what follows
                self._settler.checked([mark, -mark])
                self._is_compared = True
            self._draft = self._settler.settle(self._book, mark)
        return self._draft

    def _take(self, slot: int, held: Sequence[Held], wanted: int) -> list[Taken]:
        """What one of our slots can have; nothing for those of others."""
        taken: list[Taken] = []
        for lease in held if slot in self._slots() else ():
            if wanted <= 0:
                break
            taken.append(self._shelf.reading(lease).taken(lease.cursor, wanted))
            wanted -= taken[-1].records
            if taken[-1].end is End.OPEN:
                break
        return taken

    def _ask_all(self, values: list[int]) -> list[int]:
        if self._asked_of_all is not None:
            return self._asked_of_all(values)
        return over_all_ranks(values, torch.int64, self.world_size)

    def _mark(self) -> int:
        """A number that differs where ranks do not have the same stream at the same place."""
        parts = [*self._configuration.values(), self._step, self._book.granted, self._book.next_turn]
        digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 2

    # --- handing out

    def _batches(self, draft: Draft, units: Sequence[range]) -> Iterator[Any]:
        """Units without records are passed over, but a rank with no other gets a ghost: one record, with scale 0."""
        filled = [unit for unit in units if any(draft.count(slot) for slot in unit)]
        ghosts = self._ghosts(len(filled), lambda slot: bool(draft.count(slot))) or int(not filled)
        for unit in filled:
            items = [item for slot in unit for part in draft.segments[slot] for item in self._items(part)]
            scale = loss_scale(len(items), draft.total, self.world_size)
            is_last = unit is filled[-1] and not ghosts
            self._handed = Handed(scale, len(items) / draft.total, is_last, unit.start)
            self._samples = np.array([number for number, _ in items], dtype=np.int64)
            yield self._collate([item for _, item in items])
        for ghost in range(ghosts):
            self._samples = _NOTHING
            self._handed = Handed(0.0, 0.0, ghost == ghosts - 1, self._slots().start, is_ghost=True)
            yield self._collate([self._ghost(draft)])

    def _items(self, part: Segment) -> Iterator[tuple[int, Any]]:
        turn = part.lease.turn
        for record, raw in enumerate(self._shelf.reading(part.lease).records(part.first, part.length), part.first):
            self._some_record = (turn, record, raw)
            yield self._catalogue.sample_number(turn, record), self._transformed(turn, record, raw)

    def _transformed(self, turn: int, record: int, raw: Any) -> Any:
        if self._transform is None:
            return raw
        if not self._seed_samples:
            return self._transform(raw)
        number = self._catalogue.sample_number(turn, record)
        with kept_generators():
            set_generators(sample_key(self.seed, self._catalogue.epoch_of(turn), number))
            return self._transform(raw)

    def _ghost(self, draft: Draft) -> Any:
        """The last record we had; a rank that never had one reads one of another's."""
        if self._some_record is None:
            part = next(part for parts in draft.segments for part in parts)
            raw = next(self._catalogue.open(part.lease.turn, part.first))
            self._some_record = (part.lease.turn, part.first, raw)
        return self._transformed(*self._some_record)

    # --- small things

    def _read_ahead(self) -> None:
        wanted = [(lease, self._shares[slot]) for slot in self._slots() for lease in self._book.held[slot]]
        self._shelf.look_ahead([lease for lease, _ in wanted], [READ_AHEAD_STEPS * share for _, share in wanted])


def _warn(trouble: Trouble) -> None:
    what = "is in quarantine for this epoch" if trouble.is_last else "will be tried again"
    warnings.warn(
        f"{trouble.shard} could not be read from record {trouble.cursor:,} on and {what}: {trouble.why}", stacklevel=3
    )
