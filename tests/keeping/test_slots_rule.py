"""The rule of the slots, with ranks that die at the worst moment (found by bench/kill_campaign.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.state.tracked import Tracked
from holdfast.wire.session import NeedRoom, Room, Sealed
from holdfast.wire.session import Snapshots as Settings
from holdfast.wire.slots import SLOTS, STEP_BITS, Seat, word
from holdfast.worker.memory.recalling import Offer, choose
from holdfast.worker.memory.snapshots import NO_WORDS, Cut, Snapshots

ROOM_BYTES = 2**20


class Keeper:
    """Room that is there."""

    def __init__(self, directory: Path) -> None:
        self.seat = Seat.create(directory)
        for slot in range(SLOTS):
            with self.seat.path(slot).open("ab") as image:
                image.truncate(ROOM_BYTES)
        self.room: Room | None = Room(directory=str(directory), size_bytes=ROOM_BYTES)

    def tell(self, message: NeedRoom | Sealed) -> None:
        pass

    def sealed(self) -> set[int]:
        return {record.step for record in self.seat.sealed().values()}


class Rank:
    """One life of a rank."""

    def __init__(
        self,
        keeper: Keeper,
        number: int,
        view: int,
        cut: Cut | None = None,
        told_whole: int = -1,
        known_whole: int = -1,
        is_intact: bool = False,
    ) -> None:
        self.keeper = keeper
        model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.snapshots = Snapshots(keeper, Tracked(model=model, optimizer=self.optimizer), Settings(every=1))
        self.snapshots.start_from(known_whole, is_intact)
        self.snapshots.enter(cut or Cut(2, 1, number), view, 0, 0, 1, told_whole)
        while not self.snapshots._room.is_there():
            pass  # a thread is moving in
        self.snapshots.finish_moving()

    def words(self, step: int) -> tuple[int, ...]:
        self.snapshots.begin(step)
        self.snapshots.join(self.optimizer)
        return self.snapshots.words(step)


@pytest.fixture
def keepers(tmp_path: Path) -> Iterator[list[Keeper]]:
    found = [Keeper(tmp_path / str(number)) for number in range(2)]
    yield found
    for keeper in found:
        keeper.seat.close()


def commit(ranks: list[Rank], step: int, hear: list[Rank] | None = None) -> None:
    """All ranks come to the commit of a step; those in `hear` get to know its result."""
    words = [max(column) for column in zip(*(rank.words(step) for rank in ranks), strict=True)]
    for rank in ranks if hear is None else hear:
        rank.snapshots.agreed(step, words)


def common(keepers: list[Keeper]) -> set[int]:
    return keepers[0].sealed() & keepers[1].sealed()


def test_a_replaced_rank_does_not_overwrite_what_it_had_not_heard_is_whole(keepers: list[Keeper]) -> None:
    ranks = [Rank(keeper, number, view=1) for number, keeper in enumerate(keepers)]
    for step in (1, 2):
        commit(ranks, step)
    commit(ranks, 3, hear=ranks[:1])  # step 3 is whole; the second rank dies before it hears so
    assert [keeper.seat.get("whole") for keeper in keepers] == [3, 2]
    ranks[0].snapshots.enter(Cut(2, 1, 0), 2, 0, 0, 1)
    again = [ranks[0], Rank(keepers[1], 1, view=2)]
    commit(again, 4)
    assert 3 in common(keepers)
    again[1].snapshots.begin(5)  # writes to one of its slots
    assert 3 in common(keepers)
    again[0].snapshots.begin(5)
    assert 3 in common(keepers)


def test_what_is_copied_to_other_nodes_stays_until_what_all_have_begun_anew_with_is(keepers: list[Keeper]) -> None:
    ranks = [Rank(keeper, number, view=1) for number, keeper in enumerate(keepers)]
    for keeper in keepers:
        keeper.seat.put(partners=1, safe=word(1, 2))
    for step in (1, 2, 3):
        commit(ranks, step)
    assert [(keeper.sealed(), keeper.seat.get("whole")) for keeper in keepers] == [({2, 3}, 2)] * 2, "3 is not copied"
    again = [Rank(keeper, number, 2, known_whole=3, is_intact=True) for number, keeper in enumerate(keepers)]
    for step in (3, 4, 5):
        commit(again, step)
        assert [keeper.sealed() for keeper in keepers] == [{2, 3}] * 2, "a lost node would leave nothing else"
    for keeper in keepers:
        keeper.seat.put(safe=word(1, 3))
    for step in (6, 7):
        commit(again, step)
    assert [(keeper.sealed(), keeper.seat.get("whole")) for keeper in keepers] == [({3, 7}, 3)] * 2
    for keeper in keepers:
        keeper.seat.put(safe=word(2, 7))
    commit(again, 8)
    assert [keeper.seat.get("whole") for keeper in keepers] == [7, 7]


def test_a_copy_of_an_earlier_history_is_none_of_what_came_after_it(keepers: list[Keeper]) -> None:
    for keeper in keepers:
        keeper.seat.put(partners=1, safe=word(1, 90))
    ranks = [Rank(keeper, number, view=2) for number, keeper in enumerate(keepers)]
    for step in (1, 2, 3):
        commit(ranks, step)
    assert [keeper.seat.get("whole") for keeper in keepers] == [-1, -1]


def test_what_a_rank_knows_itself_is_not_forgotten_for_what_others_said_before_it_could(keepers: list[Keeper]) -> None:
    """Its room came after it had said its words: they did not say what is in it."""
    ranks = [Rank(keeper, number, view=1) for number, keeper in enumerate(keepers)]
    for step in (1, 2, 3):
        commit(ranks, step)
    older = 1 << STEP_BITS | 2
    ranks[1].snapshots.agreed(4, [*NO_WORDS[:4], older])
    assert keepers[1].seat.get("whole") == 3


def test_two_images_of_one_step_do_not_keep_both_slots(keepers: list[Keeper]) -> None:
    """A job that went back and does a step again copies it again."""
    ranks = [Rank(keeper, number, view=1) for number, keeper in enumerate(keepers)]
    for step in (1, 2, 3):
        commit(ranks, step)
    again = [Rank(keeper, number, view=2) for number, keeper in enumerate(keepers)]
    commit(again, 2)
    for step in (3, 4, 5, 6):
        commit(again, step)
    assert 6 in common(keepers)


# --- a world that shrinks and grows


class World:
    """Ranks of one node that hold the state alike, each with a share of it in its room, while members come and go."""

    def __init__(self, directory: Path, size: int) -> None:
        self.rooms = [Keeper(directory / str(number)) for number in range(size)]
        self.view, self.step = 1, 1
        self.ranks = [self.newcomer(room, number, size) for number, room in enumerate(self.rooms)]

    def newcomer(self, room: Keeper, number: int, size: int) -> Rank:
        return Rank(room, number, self.view, Cut(1, size, number), self.known_to_the_agent())

    def known_to_the_agent(self) -> int:
        return max(room.seat.whole_word() for room in self.rooms)

    def commit(self, hear: list[Rank] | None = None) -> None:
        """All ranks come to the commit of the next step; those in `hear` get to know its result."""
        words = []
        for rank in self.ranks:
            words.append(rank.words(self.step))
            self.judge()
        for rank in self.ranks if hear is None else hear:
            rank.snapshots.agreed(self.step, [max(column) for column in zip(*words, strict=True)])

    def change(self, staying: list[Rank], size: int) -> None:
        """Another view: who stays closes up in order, newcomers take the rooms that nobody lives in."""
        self.view += 1
        told = self.known_to_the_agent()
        for rank in self.ranks:
            if rank not in staying:
                rank.snapshots.close()
        for number, rank in enumerate(staying):
            rank.snapshots.enter(Cut(1, size, number), self.view, 0, 0, 1, told)
        free = [room for room in self.rooms if room not in [rank.keeper for rank in staying]]
        new = [self.newcomer(free.pop(0), number, size) for number in range(len(staying), size)]
        self.ranks = [*staying, *new]
        self.judge()

    def judge(self) -> None:
        """If all workers died now: a step could be restored, not older than any of them knew to be whole."""
        offers = [
            [Offer(r.step, r.part, r.shards, r.shares, r.size_bytes, r.seed, r.first_step, r.view)]
            for room in self.rooms
            for r in room.seat.sealed().values()
        ]
        choice, known = choose(offers, -1), max(room.seat.get("whole") for room in self.rooms)
        assert known < 0 or (choice is not None and choice.step >= known), f"step {known} cannot be restored any more"

    def close(self) -> None:
        for rank in self.ranks:
            rank.snapshots.close()
        for room in self.rooms:
            room.seat.close()


def test_what_only_a_leaving_rank_knew_to_be_whole_is_not_overwritten_by_those_who_stay(tmp_path: Path) -> None:
    world = World(tmp_path, 3)
    for world.step in (1, 2):
        world.commit()
    world.step = 3
    leaving, *staying = world.ranks
    world.commit(hear=[leaving])
    leaving.words(4)  # overwrites step 2, as step 3 is whole: nobody else knows that
    assert leaving.keeper.sealed() == {3, 4} and [rank.keeper.sealed() for rank in staying] == [{2, 3}] * 2
    world.change(staying, size=2)
    for world.step in (4, 5, 6, 7):
        world.commit()
    assert staying[0].keeper.seat.get("whole") == 7


def some_of(ranks: list[Rank], bits: int) -> list[Rank]:
    return [rank for number, rank in enumerate(ranks) if bits >> number & 1]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whoever_leaves_stays_or_comes_a_step_can_be_restored(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    world = World(tmp_path_factory.mktemp("world"), 3)
    try:
        for _ in range(data.draw(st.integers(1, 4), label="views")):
            for _ in range(data.draw(st.integers(0, 4), label="whole commits")):
                world.commit()
                world.step += 1
            hear = some_of(world.ranks, data.draw(st.integers(0, 7), label="hear of the last one"))
            world.commit(hear)
            world.step += bool(hear)
            for rank in hear:
                rank.words(world.step)  # it goes on with the next step, as far as it comes alone
                world.judge()
            staying = some_of(world.ranks, data.draw(st.integers(0, 7), label="stay")) or world.ranks[:1]
            world.change(staying, data.draw(st.integers(len(staying), 3), label="size"))
        for _ in range(4):
            world.commit()
            world.step += 1
        assert all(rank.keeper.seat.get("whole") == world.step - 1 for rank in world.ranks)
    finally:
        world.close()


# --- loops without commits


def test_a_step_that_was_recalled_stays_until_one_that_was_saved_is_whole(keepers: list[Keeper]) -> None:
    ranks = [Rank(keeper, number, view=1) for number, keeper in enumerate(keepers)]
    for rank in ranks:
        rank.snapshots.take(10)
        rank.snapshots.join(None)
    ranks[0].snapshots.take(20)  # all die before the second rank has saved it: step 10 is recalled
    ranks[0].snapshots.join(None)
    again = [Rank(keeper, number, view=2, known_whole=10) for number, keeper in enumerate(keepers)]
    for rank in again:
        assert not rank.snapshots.take(30)
        rank.snapshots.join(None)
        assert 10 in common(keepers)
    for rank in again:
        rank.snapshots.settle_last(list)
    assert [keeper.seat.get("whole") for keeper in keepers] == [30, 30]
