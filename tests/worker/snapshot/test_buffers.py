"""The rule of the slots, with ranks that die at the worst moment (found by bench/kill_campaign.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.image_info import STEP_BITS, ImageInfo, pack_version
from holdfast.snapshots.slot_file import SLOTS, SlotPage
from holdfast.state.tracked import Tracked
from holdfast.wire.worker_messages import AllocateBuffers, BuffersReady, SnapshotSealed, SnapshotSettings, StoredImage
from holdfast.worker.restore.from_snapshots import choose
from holdfast.worker.snapshot.taker import NO_VOTE, SnapshotTaker

BUFFER_BYTES = 2**20


class Host:
    """Buffers that are there."""

    def __init__(self, directory: Path) -> None:
        self.page = SlotPage.create(directory)
        for slot in range(SLOTS):
            with self.page.path(slot).open("ab") as image:
                image.truncate(BUFFER_BYTES)
        self.buffers_ready: BuffersReady | None = BuffersReady(directory=str(directory), size_bytes=BUFFER_BYTES)

    def tell(self, message: AllocateBuffers | SnapshotSealed) -> None:
        pass

    def sealed(self) -> set[int]:
        return {record.image.step for record in self.page.sealed().values()}


class Rank:
    """One life of a rank."""

    def __init__(
        self,
        host: Host,
        number: int,
        view: int,
        image: ImageInfo | None = None,
        agent_version: int = -1,
        restored: int = -1,
        is_intact: bool = False,
    ) -> None:
        self.host = host
        model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.snapshots = SnapshotTaker(host, Tracked(model=model, optimizer=self.optimizer), SnapshotSettings(every=1))
        self.snapshots.start_from(restored, is_intact)
        self.snapshots.enter(image or ImageInfo(-1, number, 2, 1, view), 1, agent_version)
        while not self.snapshots._buffers.are_ready():
            pass  # a thread maps them
        self.snapshots.finish_mapping()

    def vote(self, step: int) -> tuple[int, ...]:
        self.snapshots.begin(step)
        self.snapshots.join(self.optimizer)
        return self.snapshots.vote(step)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    found = [Host(tmp_path / str(number)) for number in range(2)]
    yield found
    for host in found:
        host.page.close()


def commit(ranks: list[Rank], step: int, hear: list[Rank] | None = None) -> None:
    """All ranks come to the commit of a step; those in `hear` get to know its result."""
    votes = [max(column) for column in zip(*(rank.vote(step) for rank in ranks), strict=True)]
    for rank in ranks if hear is None else hear:
        rank.snapshots.apply_vote(step, votes)


def common(hosts: list[Host]) -> set[int]:
    return hosts[0].sealed() & hosts[1].sealed()


def test_a_replaced_rank_does_not_overwrite_what_it_had_not_heard_is_complete(hosts: list[Host]) -> None:
    ranks = [Rank(host, number, view=1) for number, host in enumerate(hosts)]
    for step in (1, 2):
        commit(ranks, step)
    commit(ranks, 3, hear=ranks[:1])  # step 3 is whole; the second rank dies before it hears so
    assert [host.page.get("complete") for host in hosts] == [3, 2]
    ranks[0].snapshots.enter(ImageInfo(-1, 0, 2, 1, 2), 1)
    again = [ranks[0], Rank(hosts[1], 1, view=2)]
    commit(again, 4)
    assert 3 in common(hosts)
    again[1].snapshots.begin(5)  # writes to one of its slots
    assert 3 in common(hosts)
    again[0].snapshots.begin(5)
    assert 3 in common(hosts)


def test_what_is_copied_to_other_nodes_stays_until_what_all_have_begun_anew_with_is(hosts: list[Host]) -> None:
    ranks = [Rank(host, number, view=1) for number, host in enumerate(hosts)]
    for host in hosts:
        host.page.put(partners=1, copied=pack_version(1, 2))
    for step in (1, 2, 3):
        commit(ranks, step)
    assert [(host.sealed(), host.page.get("complete")) for host in hosts] == [({2, 3}, 2)] * 2, "3 is not copied"
    again = [Rank(host, number, 2, restored=3, is_intact=True) for number, host in enumerate(hosts)]
    for step in (3, 4, 5):
        commit(again, step)
        assert [host.sealed() for host in hosts] == [{2, 3}] * 2, "a lost node would leave nothing else"
    for host in hosts:
        host.page.put(copied=pack_version(1, 3))
    for step in (6, 7):
        commit(again, step)
    assert [(host.sealed(), host.page.get("complete")) for host in hosts] == [({3, 7}, 3)] * 2
    for host in hosts:
        host.page.put(copied=pack_version(2, 7))
    commit(again, 8)
    assert [host.page.get("complete") for host in hosts] == [7, 7]


def test_a_copy_of_an_earlier_history_is_none_of_what_came_after_it(hosts: list[Host]) -> None:
    for host in hosts:
        host.page.put(partners=1, copied=pack_version(1, 90))
    ranks = [Rank(host, number, view=2) for number, host in enumerate(hosts)]
    for step in (1, 2, 3):
        commit(ranks, step)
    assert [host.page.get("complete") for host in hosts] == [-1, -1]


def test_what_a_rank_knows_itself_is_not_forgotten_for_what_others_said_before_it_could(hosts: list[Host]) -> None:
    """Its buffers came after it had said its votes: they did not say what is in it."""
    ranks = [Rank(host, number, view=1) for number, host in enumerate(hosts)]
    for step in (1, 2, 3):
        commit(ranks, step)
    older = 1 << STEP_BITS | 2
    ranks[1].snapshots.apply_vote(4, [*NO_VOTE[:4], older])
    assert hosts[1].page.get("complete") == 3


def test_two_images_of_one_step_do_not_keep_both_slots(hosts: list[Host]) -> None:
    """A job that went back and does a step again copies it again."""
    ranks = [Rank(host, number, view=1) for number, host in enumerate(hosts)]
    for step in (1, 2, 3):
        commit(ranks, step)
    again = [Rank(host, number, view=2) for number, host in enumerate(hosts)]
    commit(again, 2)
    for step in (3, 4, 5, 6):
        commit(again, step)
    assert 6 in common(hosts)


# --- a world that shrinks and grows


class World:
    """Ranks of one node that hold the state alike, each with a share of it in its slot file, while members come and
    go."""

    def __init__(self, directory: Path, size: int) -> None:
        self.hosts = [Host(directory / str(number)) for number in range(size)]
        self.view, self.step = 1, 1
        self.ranks = [self.newcomer(host, number, size) for number, host in enumerate(self.hosts)]

    def newcomer(self, host: Host, number: int, size: int) -> Rank:
        return Rank(host, number, self.view, ImageInfo(-1, number, 1, size, self.view), self.known_to_the_agent())

    def known_to_the_agent(self) -> int:
        return max(host.page.complete_version() for host in self.hosts)

    def commit(self, hear: list[Rank] | None = None) -> None:
        """All ranks come to the commit of the next step; those in `hear` get to know its result."""
        votes = []
        for rank in self.ranks:
            votes.append(rank.vote(self.step))
            self.judge()
        for rank in self.ranks if hear is None else hear:
            rank.snapshots.apply_vote(self.step, [max(column) for column in zip(*votes, strict=True)])

    def change(self, staying: list[Rank], size: int) -> None:
        """Another view: who stays closes up in order, newcomers take the hosts that no rank uses."""
        self.view += 1
        told = self.known_to_the_agent()
        for rank in self.ranks:
            if rank not in staying:
                rank.snapshots.close()
        for number, rank in enumerate(staying):
            rank.snapshots.enter(ImageInfo(-1, number, 1, size, self.view), 1, told)
        free = [host for host in self.hosts if host not in [rank.host for rank in staying]]
        new = [self.newcomer(free.pop(0), number, size) for number in range(len(staying), size)]
        self.ranks = [*staying, *new]
        self.judge()

    def judge(self) -> None:
        """If all workers died now: a step could be restored, not older than any of them knew to be whole."""
        offers = [[StoredImage(path="", info=r.image)] for host in self.hosts for r in host.page.sealed().values()]
        choice, known = choose(offers, -1), max(host.page.get("complete") for host in self.hosts)
        assert known < 0 or (choice is not None and choice.step >= known), f"step {known} cannot be restored any more"

    def close(self) -> None:
        for rank in self.ranks:
            rank.snapshots.close()
        for host in self.hosts:
            host.page.close()


def test_what_only_a_leaving_rank_knew_to_be_complete_is_not_overwritten_by_those_who_stay(tmp_path: Path) -> None:
    world = World(tmp_path, 3)
    for world.step in (1, 2):
        world.commit()
    world.step = 3
    leaving, *staying = world.ranks
    world.commit(hear=[leaving])
    leaving.vote(4)  # overwrites step 2, as step 3 is whole: nobody else knows that
    assert leaving.host.sealed() == {3, 4} and [rank.host.sealed() for rank in staying] == [{2, 3}] * 2
    world.change(staying, size=2)
    for world.step in (4, 5, 6, 7):
        world.commit()
    assert staying[0].host.page.get("complete") == 7


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
                rank.vote(world.step)  # it goes on with the next step, as far as it comes alone
                world.judge()
            staying = some_of(world.ranks, data.draw(st.integers(0, 7), label="stay")) or world.ranks[:1]
            world.change(staying, data.draw(st.integers(len(staying), 3), label="size"))
        for _ in range(4):
            world.commit()
            world.step += 1
        assert all(rank.host.page.get("complete") == world.step - 1 for rank in world.ranks)
    finally:
        world.close()


# --- loops without commits


def test_a_step_that_was_recalled_stays_until_one_that_was_saved_is_complete(hosts: list[Host]) -> None:
    ranks = [Rank(host, number, view=1) for number, host in enumerate(hosts)]
    for rank in ranks:
        rank.snapshots.take(10)
        rank.snapshots.join(None)
    ranks[0].snapshots.take(20)  # all die before the second rank has saved it: step 10 is recalled
    ranks[0].snapshots.join(None)
    again = [Rank(host, number, view=2, restored=10) for number, host in enumerate(hosts)]
    for rank in again:
        assert not rank.snapshots.take(30)
        rank.snapshots.join(None)
        assert 10 in common(hosts)
    for rank in again:
        rank.snapshots.agree_on_last(list)
    assert [host.page.get("complete") for host in hosts] == [30, 30]
