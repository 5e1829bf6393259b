"""The loader for streamed shards: files that are read from front to back, whose numbers of records are not known.

    data = hf.Stream("corpus/*.jsonl", global_batch_size=256, slots=16, seed=0)
    job.track(model=model, optimizer=opt, data=data)
    for step in job.steps(10_000):
        with step:
            for batch in step.batches(data):
                step.backward(loss_of(model, batch))

Each slot reads a shard of its own, then the next: core/shard_leases.py has the rule, by which a record counts once
whatever
happens; stream_step.py settles a step by it, among all ranks. The state is the book of leases, the same on every
rank: some
numbers a slot.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import torch
from torch.utils.data import default_collate

from holdfast.core import shard_leases as core
from holdfast.core.shard_leases import Lease, LeasedShard, LeaseRules, ShardProblem, StreamEnd, TakenShard
from holdfast.data.batch_source import BatchInfo, BatchSource, Weight, over_all_ranks
from holdfast.data.cursor import assigned
from holdfast.data.formats import Opener
from holdfast.data.order import Indices
from holdfast.data.randomness import preserved_generators, sample_key, set_generators
from holdfast.data.shard_catalogue import Paths, ShardCatalogue
from holdfast.data.shard_reader import ShardReaders
from holdfast.data.slots import loss_scale, slot_positions
from holdfast.data.step_plan import check_configuration
from holdfast.data.stream_step import Agree, StreamNegotiation, StreamSegment, StreamStepPlan
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

STATE_VERSION = 1
SLOTS_DEFAULT_MAX = 64
"""Each has a file or two open."""
READ_AHEAD_STEPS = 2

_NOTHING: Indices = np.empty(0, dtype=np.int64)
_DESCRIPTIONS = {
    "shards": "the number of shards",
    "digest": "the list of shards, their sizes included,",
    "seed": "the seed",
    "global_batch_size": "the global batch size",
    "slots": "the number of slots",
    "shuffle": "the setting shuffle",
    "last_batch": "the setting last_batch",
    "epochs": "the number of epochs",
}


class Stream(BatchSource):
    """A source of this rank's batches of streamed shards."""

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
        mesh: DeviceMesh | None = None,
        weights: Sequence[float] | None = None,
        agree: Agree | None = None,
    ) -> None:
        """Make a stream.

        `shards`: paths, or a pattern. `format`: text, jsonl, tar, parquet, or a function of a shard and a record's
        number that yields the records from it on; without it, the names decide. `split_bytes` splits large files of
        lines. `epochs`: None is without end. `shuffle` permutes the shards of each epoch; records stay in their order.
        `threads` read ahead; `transform` runs in the caller's thread, its randomness keyed by epoch and record.
        `mesh` is that of `hf.Loader`: ranks of one data coordinate read the same shards, each for itself.
        `agree`: the maximum over all ranks, where torch.distributed's default group is not the one to ask.
        """
        self._take_mesh(mesh, rank, world_size)
        self._catalogue = ShardCatalogue(shards, format, split_bytes, seed, shuffle)
        has_slots, self._given_maximum = slots is not None, agree
        slots = slots or min(global_batch_size, len(self._catalogue), SLOTS_DEFAULT_MAX)
        if not 1 <= slots <= global_batch_size:
            raise UsageError(f"{slots} slots for a global batch of {global_batch_size}; give 1 to that many")
        if last_batch not in ("across", "short") or (epochs is not None and epochs < 1):
            raise UsageError(f"last_batch is {last_batch!r}, epochs {epochs!r}; give across or short, and 1 or more")
        super().__init__(slots, has_slots)
        self.rules = LeaseRules(len(self._catalogue), slots, epochs or 0, last_batch == "across")
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
        self._negotiation = StreamNegotiation(self._shares, self._available, self._maximum)
        self._readers = ShardReaders(self._catalogue.open, threads)
        self._book = core.open_book(self.rules)
        self._step = 0
        self._plan: StreamStepPlan | None = None
        self._news: list[tuple[int, LeasedShard]] = []
        self._problems: list[ShardProblem] = []
        self._is_compared = False
        """Whether all ranks of the view have the same stream."""
        self._some_record: tuple[int, int, Any] | None = None
        self._samples = _NOTHING
        self.weights = self._shared_weights(weights)
        if (assignment := assigned(rank, world_size)) is not None:
            self.set_assignment(*assignment, weights)

    # --- what can be read

    @property
    def step(self) -> int:
        """Return the number of committed steps, which is also the number of the step being trained on."""
        return self._step

    @property
    def epoch(self) -> int:
        """Return the epoch of the oldest shard that is not read to its end."""
        return self._catalogue.epoch_of(core.oldest_turn(self._book))

    @property
    def samples(self) -> Indices:
        """Return the numbers of the records of the last batch: shard · 2^40 + record. Empty for a ghost."""
        return self._samples

    @property
    def quarantined(self) -> list[tuple[int, str, int]]:
        """Return what was given up: epoch, shard, and the record from which on it was not read."""
        found = [self._problem(rest, "") for rest in self._book.quarantined]
        return [(problem.epoch, problem.shard, problem.cursor) for problem in found]

    # --- batches

    def __iter__(self) -> Iterator[Any]:
        """Yield the records that are left, one batch a step; where steps do not go across epochs, those of the
        epoch."""
        if self.before_pass is not None:
            self.before_pass()
        began: int | None = None
        while (plan := self._agreed_plan()).total:
            began = plan.book.epoch if began is None else began
            if plan.book.epoch != began:
                return
            yield from self._batches(plan, [self._slots()])
            if self._plan is plan:
                raise UsageError("a step was drawn and not committed: call commit() after each optimizer step")
        self._adopt(plan)

    def step_batches(self, *, weight: Weight | None = None) -> Iterator[Any]:
        """Yield this rank's batches of the step being trained on, one for each slot that has records. Without the
        setting `slots`, yield one for the whole share. `weight` is that of hf.Loader."""
        plan = self._agreed_plan()
        if not plan.total:
            self._adopt(plan)
            raise UsageError(f"the stream is used up after {self._step:,} steps: ask for no more, or for more epochs")
        batches = self._batches(plan, self._units())
        yield from batches if weight is None else self._weighted(batches, weight)

    def commit(self) -> None:
        """Record that the step was trained on: call it after each `optimizer.step()`, on every rank."""
        if self._plan is None:
            raise UsageError("nothing was drawn since the last commit: commit once for each step")
        self.commit_drawn()

    def commit_drawn(self) -> None:
        """Commit the step being trained on, if anything of it was drawn. The session calls this after each step."""
        if (plan := self._plan) is not None:
            self._adopt(plan)
            self._step += 1
            self._read_ahead()

    def _adopt(self, plan: StreamStepPlan) -> None:
        """Commit a step plan; also one without records, at the end: what could not be read on the way there is recorded
        and reported."""
        self._plan, own = None, self._reported_slots()
        for lease, rest in plan.failures:
            if rest.slot in own:
                error = self._readers.reader_of(lease).error
                problem = self._problem(rest, error or "another rank of the data coordinate could not read it")
                self._problems.append(problem)
                _warn(problem)
        self._news += [(slot, lease) for slot, lease in plan.leases if slot in own]
        self._book = plan.book

    def set_assignment(self, rank: int, world_size: int, weights: Sequence[float] | None = None) -> None:
        """Change the slots of this rank from the next batch on, for another view."""
        super().set_assignment(rank, world_size, weights)
        self._is_compared = False
        self._report_again()

    def close(self) -> None:
        """End the threads now, not when the stream is forgotten."""
        self._readers.close()

    # --- the state, and what is reported of it

    def state_dict(self) -> dict[str, Any]:
        """Return the committed leases and the configuration: the same on every rank, plain numbers and strings."""
        leases = {"version": STATE_VERSION, "step": self._step, "book": core.to_plain(self._book)}
        return leases | self._configuration

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last committed step, at any world size."""
        if state.get("version") != STATE_VERSION or not isinstance(state.get("step"), int):
            raise UsageError("this is not a state of streamed shards of this version of Holdfast")
        check_configuration(self._configuration, state, _DESCRIPTIONS)
        try:
            self._book = core.from_plain(self.rules, state.get("book"))
        except (msgspec.ValidationError, TypeError) as error:
            raise UsageError(f"the state of the streamed shards is damaged: {error}") from error
        self._step = state["step"]
        self._report_again()

    def _report_again(self) -> None:
        """Report everything again, after a change of rank or step. Rank 0 reports the quarantine too, because the rank
        that had the shard may have died before it reported it."""
        self._plan, own = None, self._reported_slots()
        self._news = [(slot, lease) for slot in own for lease in self._book.held[slot]]
        is_first = self.rank == 0 and self.is_lowest_of_coordinate
        self._problems = [self._problem(rest, "") for rest in self._book.quarantined if is_first]

    def _reported_slots(self) -> range:
        """Return the slots that this rank reports of: its own, unless another rank has the same ones."""
        return self._slots() if self.is_lowest_of_coordinate else range(0)

    def take_news(self) -> tuple[list[Lease], list[ShardProblem]]:
        """Return what commits have granted to slots of this rank and what failed in them, since the last call."""
        (leases, self._news), (problems, self._problems) = (self._news, []), (self._problems, [])
        return [self._lease(slot, lease) for slot, lease in leases], problems

    def _lease(self, slot: int, lease: LeasedShard) -> Lease:
        epoch, shard = self._catalogue.epoch_of(lease.turn), self._catalogue.name_of(lease.turn)
        return Lease(number=lease.number, slot=slot, epoch=epoch, shard=shard, first=lease.cursor)

    def _problem(self, rest: core.ShardRemainder, why: str) -> ShardProblem:
        epoch, shard = self._catalogue.epoch_of(rest.turn), self._catalogue.name_of(rest.turn)
        return ShardProblem(slot=rest.slot, epoch=epoch, shard=shard, cursor=rest.cursor, tries=rest.tries, why=why)

    # --- settling a step

    def _agreed_plan(self) -> StreamStepPlan:
        """Return the plan of the step being trained on, as agreed by all ranks."""
        if self._plan is None:
            fingerprint = self._fingerprint()
            if not self._is_compared:  # first: where settings differ, so does the length of what follows
                self._negotiation.checked([fingerprint, -fingerprint])
                self._is_compared = True
            self._plan = self._negotiation.agree(self._book, fingerprint)
        return self._plan

    def _available(self, slot: int, held: Sequence[LeasedShard], wanted: int) -> list[TakenShard]:
        """Return what one of our slots can have; nothing for slots of other ranks."""
        found: list[TakenShard] = []
        for lease in held if slot in self._slots() else ():
            if wanted <= 0:
                break
            found.append(self._readers.reader_of(lease).available(lease.cursor, wanted))
            wanted -= found[-1].records
            if found[-1].end is StreamEnd.OPEN:
                break
        return found

    def _maximum(self, values: list[int]) -> list[int]:
        if self._given_maximum is not None:
            return self._given_maximum(values)
        return over_all_ranks(values, torch.int64, self._job_size)

    def _fingerprint(self) -> int:
        """Return a number that differs where ranks do not have the same stream at the same step."""
        parts = [*self._configuration.values(), self._step, self._book.granted, self._book.next_turn]
        digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 2

    # --- handing out

    def _batches(self, plan: StreamStepPlan, units: Sequence[range]) -> Iterator[Any]:
        """Yield the batches of units that have records; a rank without any gets a ghost: one record, with scale 0."""
        filled = [unit for unit in units if any(plan.count(slot) for slot in unit)]
        ghosts = self._ghosts(len(filled), lambda slot: bool(plan.count(slot))) or int(not filled)
        for unit in filled:
            items = [item for slot in unit for part in plan.segments[slot] for item in self._items(part)]
            scale = loss_scale(len(items), plan.total, self.world_size)
            is_last = unit is filled[-1] and not ghosts
            self._last_batch = BatchInfo(scale, len(items) / plan.total, is_last, unit.start)
            self._samples = np.array([number for number, _ in items], dtype=np.int64)
            yield self._collate([item for _, item in items])
        for ghost in range(ghosts):
            self._samples = _NOTHING
            self._last_batch = BatchInfo(0.0, 0.0, ghost == ghosts - 1, self._slots().start, is_ghost=True)
            yield self._collate([self._ghost(plan)])

    def _items(self, part: StreamSegment) -> Iterator[tuple[int, Any]]:
        turn = part.lease.turn
        for record, raw in enumerate(self._readers.reader_of(part.lease).records(part.first, part.length), part.first):
            self._some_record = (turn, record, raw)
            yield self._catalogue.sample_number(turn, record), self._transformed(turn, record, raw)

    def _transformed(self, turn: int, record: int, raw: Any) -> Any:
        if self._transform is None:
            return raw
        if not self._seed_samples:
            return self._transform(raw)
        number = self._catalogue.sample_number(turn, record)
        with preserved_generators():
            set_generators(sample_key(self.seed, self._catalogue.epoch_of(turn), number))
            return self._transform(raw)

    def _ghost(self, plan: StreamStepPlan) -> Any:
        """Return the last record we had; a rank that never had one reads one of another's."""
        if self._some_record is None:
            part = next(part for parts in plan.segments for part in parts)
            raw = next(self._catalogue.open(part.lease.turn, part.first))
            self._some_record = (part.lease.turn, part.first, raw)
        return self._transformed(*self._some_record)

    # --- small things

    def _read_ahead(self) -> None:
        wanted = [(lease, self._shares[slot]) for slot in self._slots() for lease in self._book.held[slot]]
        self._readers.read_ahead([lease for lease, _ in wanted], [READ_AHEAD_STEPS * share for _, share in wanted])


def _warn(problem: ShardProblem) -> None:
    what = "is in quarantine for this epoch" if problem.is_last else "will be tried again"
    warnings.warn(
        f"{problem.shard} could not be read from record {problem.cursor:,} on and {what}: {problem.why}", stacklevel=3
    )
