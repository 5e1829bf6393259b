"""The rule of the slots, with ranks that die at the worst moment (found by bench/kill_campaign.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast.state.tracked import Tracked
from holdfast.wire.session import NeedRoom, Room, Sealed
from holdfast.wire.session import Snapshots as Settings
from holdfast.wire.slots import SLOTS, Seat
from holdfast.worker.snapshots import NO_WORDS, STEP_BITS, Cut, Snapshots

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

    def __init__(self, keeper: Keeper, number: int, view: int) -> None:
        model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.snapshots = Snapshots(keeper, Tracked(model=model, optimizer=self.optimizer), Settings(every=1))
        self.snapshots.enter(Cut(2, 1, number), view, 0, 0, 1)
        while not self.snapshots._room_is_there():
            pass  # a thread is moving in

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
