"""The main thread's part in a run that is repaired: steps, commits, and the way from a broken view into the next.

It is always in one of these places, and each knows what to do about a view that is over:

    in the body of a step        the error lands in `with step:`; the next view is joined, the step undone and repeated
    at the barrier of a step     the next view is joined; if anybody has passed the barrier the step is committed: go on
    between two steps            nothing communicates; the next collective finds the view over
    at the top of a step         `bring_in`: a planned view is joined, newcomers get their state, models are put right
    behind the last step         `close`: nobody leaves before all have committed it, so there is always a peer to ask

`bring_in` is where every way into a view ends: those who repeat, those who rolled forward, newcomers, the first start.
"""

from __future__ import annotations

import logging
import time
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from holdfast.core.events import SessionInfo
from holdfast.data.handing import Handing
from holdfast.data.randomness import set_generators, slot_key
from holdfast.errors import SettleError
from holdfast.state.optimizers import is_split
from holdfast.state.snapshot import Snapshot
from holdfast.state.tracked import Tracked
from holdfast.wire.progress import Phase
from holdfast.wire.session import Closed, Committed, FromWorker, Joined, Ready
from holdfast.worker import elastic, feeds
from holdfast.worker.collectives import groups, talk
from holdfast.worker.guards import Guards
from holdfast.worker.launch import Launch
from holdfast.worker.membership import bare
from holdfast.worker.memory import checkpoints, resharding, restoring
from holdfast.worker.memory.replicas import Ring
from holdfast.worker.memory.snapshots import NO_WORDS, Cut, Snapshots
from holdfast.worker.memory.starting import find_start
from holdfast.worker.parallel.models import align_buffers, is_sharded, reset_models, shards_of
from holdfast.worker.settling import Settlement, Standing
from holdfast.worker.transaction import TRIAL_STEPS, Copy, RepeatStep, Transaction
from holdfast.worker.witness import Witness, describe, mark_of

log = logging.getLogger(__name__)


class Engine:
    """One worker's progress through the steps."""

    def __init__(self, launched: Launch, tracked: Tracked, seed: int | None) -> None:
        self._line, self._page, self.membership = launched.line, launched.page, launched.membership
        self._launched, self._tracked, self._seed = launched, tracked, seed
        self.next_step = 0
        self._first_step = 0
        self._begun = -1
        self._has_state = False
        self._at_barrier = False
        self._settlement: Settlement | None = None
        """What the members of the view have agreed on and not yet carried out."""
        self._change_at = 0
        """The view to change to after this step, by plan; 0 if none."""
        self._proved_view = 0
        self._shards, self._shard = 1, 0
        self._builds_alone = launched.is_newcomer
        """Whether the others train already, so that we meet them at our first step."""
        self._is_filled = True
        """Whether our objects hold the state, if we have it; otherwise it lies in `_carried`."""
        self._carried: list[tuple[int, int, Snapshot]] = []
        """Copies from before the objects were built anew: number of shards, shard, copy."""
        self._ring: Ring | None = None
        self._keeps_copy = True
        self._transaction: Transaction | None = None
        self._snapshots: Snapshots | None = None
        self._recalled = (-1, False)
        """The step that all have started from, if it was in the agents' memory."""
        self._witness = Witness(self._page)
        self.logged: dict[str, float] = {}
        """What the script said of its last committed step."""
        self.guards = Guards(self)
        self._step_began_ns = 0
        groups.on_collective(self._on_collective)

    @property
    def transaction(self) -> Transaction:
        assert self._transaction is not None, "the steps have not begun"
        return self._transaction

    @property
    def is_stepping(self) -> bool:
        """Whether a step is under way."""
        return self._transaction is not None and self._transaction.is_open

    @property
    def seed(self) -> int:
        """Of the steps' generators."""
        assert self._seed is not None, "the steps have not begun"
        return self._seed

    # --- into the views

    def restore(self) -> None:
        """Everything is tracked: go on from what the agents have in memory, or from the last checkpoint, whichever is
        newer, if there is one and nobody trains already."""
        self._shards = shards_of(self._tracked.modules().values())
        self._shard = dist.get_rank() % self._shards
        if not self._builds_alone and self._launched.checkpoint_dir:
            self._restore()

    def _restore(self) -> bool:
        """All ranks together. Whether there was something."""
        place = self.membership.place if self.membership else None
        local = (place.local_rank, place.local_world_size) if place is not None else (0, 1)
        held = self._line.held() if self._line is not None and place is not None else ()
        url, talking = self._launched.checkpoint_dir, talk.in_session()
        found = find_start(url, held, local, self._tracked, self._shards, talking)
        if found is None:
            return False
        self.next_step, self._seed, self._first_step = found.step, found.seed, found.step
        if found.is_recalled:
            self._recalled = (found.step, found.is_intact)
            if self._snapshots is not None:
                self._snapshots.start_from(*self._recalled)
        return True

    def _start_anew(self, settlement: Settlement) -> Settlement:
        """Nobody has the state, though we came as newcomers to those who should: they have died too, before their end
        was known to who made this view. It begins as one in which all start anew does."""
        place = self.membership.place if self.membership else None
        is_found = bool(self._launched.checkpoint_dir) and self._restore()
        (begun,) = groups.agree((place.begun if place is not None else -1,))
        if not is_found and begun >= 0:
            raise SettleError(
                f"step {begun} was begun, and nobody who had the state is left; it is not in memory, nor on storage"
            )
        seed = self.seed if is_found else settlement.seed
        return settlement._replace(next_step=self.next_step, first_step=self.next_step, seed=seed)

    def begin(self) -> None:
        """At the first step: everything is built and tracked. A spare waits here for its call."""
        self._choose_undo()
        if self.membership is None or self._line is None:
            self._has_state = True
            self._keeps_copy = False
            self._seed = self._seed if self._seed is not None else torch.initial_seed()
            return
        if self._launched.snapshots.every >= 0 and self._can_be_kept():
            self._snapshots = Snapshots(self._line, self._tracked, self._launched.snapshots, self._describe)
            self._snapshots.start_from(*self._recalled)
        self._page.move(phase=Phase.PARKED)
        self._witness.attach(feeds.witnessed(self._tracked).values())
        self._line.tell(Ready(self._session_info(), describe(feeds.witnessed(self._tracked))))
        join = self.membership.join_next if self._builds_alone else self.membership.join_present
        self._settlement = join(self._standing())

    def _can_be_kept(self) -> bool:
        """Whether images of the state could be loaded again."""
        split = [name for name, optimizer in self._tracked.optimizers().items() if is_split(optimizer)]
        if split:
            log.warning("%s has other state on each rank: no snapshots and no checkpoints; use FSDP2", ", ".join(split))
        return not split

    def start_over(self, tracked: Tracked) -> None:
        """All objects will be built anew, for another place in the world. What we know stays; the state is in copies,
        of the step before the next and of the one after, as it may turn out to be committed."""
        assert self.membership is not None
        if self._ring is not None:
            self._carried += [
                (self._shards, shard, copy)
                for step in (self.next_step, self.next_step + 1)
                for shard, copy in self._ring.copies_at(step, self._shard).items()
            ]
        if self._snapshots is not None:
            self._snapshots.close()
            self._snapshots = None  # it knows the old model, which must go before the new one comes
        self._tracked, self._ring, self._transaction, self._settlement = tracked, None, None, None
        self._builds_alone, self._is_filled = True, False
        self._change_at = 0
        self.membership.built_for = None
        self.membership.start_over()

    def bring_in(self) -> None:
        """At the top of a step: if the view is new, its members make sure that all of them have the settled state."""
        if self._settlement is None and self.membership is not None and self._change_at > self.membership.view:
            self._join(None)
        while self._settlement is not None:
            try:
                self._carry_out(self._settlement)
            except Exception as error:
                if not self._can_hold(error):
                    raise
                broken = bare(error)
            else:
                self._settlement = None
                return
            self._join(broken)

    def _carry_out(self, settlement: Settlement) -> None:
        membership = self.membership
        assert membership is not None and membership.place is not None and self._line is not None
        place = membership.place
        if place.dump and self._has_state:
            self._adopt(settlement)
            self._dump(place.dump)
        elastic.let_go()
        reset_models(self._tracked.modules().values())  # first: a broken pass leaves parameters in other hands
        for loader in feeds.loaders(self._tracked):
            weights = loader.bearable(place.world_size, place.weights) if isinstance(loader, Handing) else None
            loader.set_place(place.rank, place.world_size, *([weights] if weights else []))
        if settlement.is_start and groups.agree((int(self._builds_alone),))[0]:
            settlement = self._start_anew(settlement)
        if resharding.is_needed(settlement, self._shards):
            resharding.carry_out(self._offers(settlement.next_step), settlement.next_step, self._tracked)
        else:
            transfers = restoring.plan(settlement, place.first_ranks, place.world_size, self._shards, self._copies)
            restoring.carry_out(transfers, settlement, place, self._tracked, self._ring)
        self._adopt(settlement)
        if self._ring is not None:
            self._ring.place(place.first_ranks, place.rank, place.world_size)
            self._ring.exchange(self.next_step)
            groups.agree((self.next_step,))
            self._ring.promote()
        if self._snapshots is not None:
            cut = Cut(self._shards, place.world_size // self._shards, place.rank)
            told_whole = -1 if settlement.is_start else place.whole  # who starts anew has gone back, or knows better
            self._snapshots.enter(cut, place.view, self.seed, self._first_step, place.group_world_size, told_whole)
            self._snapshots.faults_per_node_day = place.faults_per_node_day
        self._is_filled = True
        self.transaction.updated_before = not self._tracked.is_accumulating
        self._page.move(view=place.view, step=self.next_step, phase=Phase.BETWEEN)
        self._line.tell(Joined(place.view, self.next_step))

    def _adopt(self, settlement: Settlement) -> None:
        self._has_state = True
        self.next_step, self._begun = settlement.next_step, max(self._begun, settlement.next_step - 1)
        self._seed, self._first_step = settlement.seed, settlement.first_step
        self._witness.settle(settlement.next_step)
        self._keeps_copy = settlement.keeps_copy
        self._at_barrier = self._builds_alone = False

    def _join(self, error: BaseException | None) -> Settlement:
        assert self.membership is not None
        self._settlement = self.membership.join_next(self._standing(), error)
        self._change_at = 0
        return self._settlement

    def _standing(self) -> Standing:
        return Standing(
            has_state=int(self._has_state),
            next_step=self.next_step,
            begun=self._begun,
            at_barrier=int(self._at_barrier),
            seed=self._seed if self._seed is not None else torch.initial_seed() & (2**63 - 1),
            first_step=self._first_step,
            keeps_copy=int(self._keeps_copy),
            shards=self._shards if self._is_filled else 0,
            shard=self._shard,
        )

    def _offers(self, step: int) -> dict[tuple[int, int], Snapshot]:
        """The whole copies of the state before a step that are here: number of shards, shard → copy."""
        found = {(shards, shard): copy for shards, shard, copy in self._carried if copy.is_whole and copy.step == step}
        kept = self._ring.copies_at(step, self._shard) if self._ring is not None else {}
        return found | {(self._shards, shard): copy for shard, copy in kept.items()}

    def _can_hold(self, error: BaseException) -> bool:
        return self.membership is not None and self.membership.can_hold(error)

    # --- a step

    def begin_step(self) -> None:
        number = self.next_step
        self._step_began_ns = time.monotonic_ns()
        self._page.move(step=number, phase=Phase.BODY, collectives=0)
        self._begin_witness()
        if self._snapshots is not None:
            self._snapshots.begin(number)
        self.transaction.keeps_copy = self._keeps_copy
        self.guards.begin()
        self.transaction.begin()
        set_generators(slot_key(self.seed, number, dist.get_rank()))

    def before_update(self, optimizer: Any) -> None:
        """An optimizer is about to change its parameters."""
        if self._snapshots is not None:
            self._snapshots.join(optimizer)
        self.transaction.before_update()

    def end_step(self, error: BaseException | None) -> bool:
        """Whether the step is to be repeated. Raises what is not ours to deal with."""
        try:
            if error is None:
                self.transaction.finish()
                self._finished()
                return False
        except RepeatStep:
            self._repeat()
            return True
        if isinstance(error, RepeatStep):
            self._repeat()
            return True
        if self.transaction.is_past_repair or not self._can_hold(error):
            self._page.move(phase=Phase.ENDED)
            return False
        self._join(bare(error))
        self._repeat()
        return True

    def _begin_witness(self) -> None:
        self._witness.forget()
        if self._line is not None:
            for skipped in self._witness.news_of_skips(feeds.witnessed(self._tracked)):
                self._line.tell(skipped)

    def _repeat(self) -> None:
        self._at_barrier = False
        self._witness.settle(self.next_step)
        if self._snapshots is not None:
            self._snapshots.join(None)
        self.transaction.undo()

    def _finished(self) -> None:
        self.next_step += 1
        self._tracked.is_accumulating = not self.transaction.has_updated
        self._page.move(phase=Phase.BETWEEN)
        if self._snapshots is not None:
            self._snapshots.poll()
        for loader in feeds.loaders(self._tracked):
            loader.commit_drawn()
        if self.membership is None or self._line is None:
            return
        for news in feeds.shard_news(self._tracked, self.membership.view, self.next_step - 1):
            self._line.tell(news)
        if self._settlement is None and self._proved_view != self.membership.view:
            self._proved_view = self.membership.view
            self._line.tell(Committed(self.membership.view, self.next_step - 1))

    def distrust(self, after: int) -> None:
        """This rank's state may have been wrong since this step, and so may its copies in the agent's memory."""
        if self._snapshots is not None:
            self._snapshots.distrust(after)

    def barrier(self) -> None:
        """Until the step is committed. Raises RepeatStep if it will not be."""
        if self.membership is None:
            self.guards.before_commit(self._shards)
            self._passed()
            return
        self._at_barrier = True
        self._page.move(phase=Phase.BARRIER)
        self._witness.write(self.membership.view, dist.get_rank(), dist.get_world_size(), self.next_step)
        try:
            self.guards.before_commit(self._shards)
            align_buffers(self._tracked.modules().values())
            if self._ring is not None:
                for loader in feeds.loaders(self._tracked):
                    loader.commit_drawn()  # the copies are of the state after this step; a repeated one goes back
                self._ring.exchange(self.next_step + 1)
            self._agree()
        except Exception as error:
            if not self._can_hold(error):
                raise
            broken = bare(error)
        else:
            self._passed()
            return
        settlement = self._join(broken)
        if settlement.next_step != self.next_step + 1:
            raise RepeatStep
        self._passed()

    def _agree(self) -> None:
        assert self._line is not None
        tail, dear = int(self.transaction.saw_tail), int(self.transaction.is_copy_dear)
        mark = mark_of(feeds.witnessed(self._tracked).values())
        kept = self._snapshots.words(self.next_step) if self._snapshots is not None else NO_WORDS
        step, unlike, told, any_tail, any_dear, data, unlike_data, *kept_by_all = groups.agree(
            (self.next_step, -self.next_step, self._line.told_view, tail, dear, mark, -mark, *kept)
        )
        if step != -unlike:
            raise SettleError(f"the ranks are at steps {-unlike} to {step}: they do not run the same program")
        if data != -unlike_data:
            raise SettleError("the ranks' loaders are at different steps, or skip different ones: do it on every rank")
        self._change_at = told
        if self._snapshots is not None:
            self._snapshots.agreed(self.next_step, kept_by_all)
        trial = self.next_step + 1 < self._first_step + TRIAL_STEPS
        self._keeps_copy = bool(any_tail) or not any_dear or trial or self._ring is not None

    def _passed(self) -> None:
        """From here on the step will not be undone. All have copies of the state as it is cut now."""
        self._carried.clear()
        self._begun = self.next_step
        self._page.move(begun=self.next_step)
        self._witness.settle(self.next_step + 1)
        self._at_barrier = False
        if self._ring is not None:
            self._ring.promote()

    # --- the end

    def close(self) -> None:
        """Behind the last step."""
        while self.membership is not None and self._line is not None:
            broken: BaseException | None = None
            try:
                _, told = groups.agree((self.next_step, self._line.told_view))
                if told <= self.membership.view:
                    break  # else somebody waits in a view that was planned: it is met once more, and ends with us
            except Exception as error:
                if not self._can_hold(error):
                    raise
                broken = bare(error)
            self._join(broken)
            self.bring_in()
        self.leave()

    def leave(self) -> None:
        """No more steps: what the script does from now on is not repaired."""
        if self._snapshots is not None:
            self._snapshots.take_last(self.next_step)
            self._snapshots.close()
        self._page.move(phase=Phase.ENDED)
        if self._line is not None and self.membership is not None:
            self._line.tell(Closed(self.membership.view, self.next_step))

    def _dump(self, directory: str) -> NoReturn:
        """The job cannot go on: leave what it has come to behind."""
        place = self.membership.place if self.membership else None
        assert place is not None
        shards, held = self._shards, {self._shard: self._tracked.state()}
        if self._ring is not None:
            offers = self._offers(self.next_step)
            shards = resharding.choose(offers, self.next_step).shards
            held = {shard: copy.flat() for (cut, shard), copy in offers.items() if cut == shards}
        checkpoints.write(directory, self.next_step, held, shards, place, self.seed)
        self._page.move(phase=Phase.ENDED)
        raise SystemExit(0)

    # --- small things

    def tell(self, message: FromWorker) -> None:
        """The agent, if there is one."""
        if self._line is not None:
            self._line.tell(message)

    def _on_collective(self) -> None:
        if self._page.get("collectives") == 0 and self.is_stepping:
            self._page.set(own_ns=time.monotonic_ns() - self._step_began_ns)
        self._page.move(collectives=self._page.get("collectives") + 1)
        if self._transaction is not None:
            self._transaction.notice_collective()

    @property
    def _copies(self) -> int:
        """Replicas of each shard in other ranks' memory."""
        has_twins = dist.get_world_size() >= 2 * self._shards
        return 0 if self._shards == 1 or has_twins else min(self._launched.replicas, dist.get_world_size() - 1)

    def _session_info(self) -> SessionInfo:
        is_resizable = self._ring is not None and elastic.is_inside()
        if not is_sharded(self._tracked.modules().values()):
            is_resizable = self._shards == 1
        return SessionInfo(shards=self._shards, replicas=self._copies, resizable=is_resizable)

    def _describe(self) -> tuple[dict[str, float], dict[str, str]]:
        """For a checkpoint's manifest: what was logged last, and where in the data we are."""
        generators = "a function of seed, step and rank or slot"
        return self.logged, {**feeds.positions(self._tracked), "generators": generators}

    def _choose_undo(self) -> None:
        if self.membership is not None and is_sharded(self._tracked.modules().values()):
            self.membership.built_for = (dist.get_rank(), dist.get_world_size())
            if self._copies or (self._shards == 1 and elastic.is_inside()):  # alone, it keeps its own to be cut again
                self._ring = Ring(self._tracked, self._copies)
        undo = self._ring or Copy(self._tracked)
        self._transaction = Transaction(self._tracked, self._page, undo, self.barrier)
