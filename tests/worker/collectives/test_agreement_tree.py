"""The tree through which the ranks of a large view agree: what it is, and with real ranks that are killed in it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast.errors import HoldfastError, ViewOverError
from holdfast.worker.collectives import agreement_tree, groups
from holdfast.worker.collectives.agreement_tree import AgreementTree, fan_of, levels_of
from holdfast.worker.collectives.elastic_group import state
from support.crowd import TIMEOUT, Crowd, Member, together

# What it looks like


def connections_of(rank: int, size: int) -> int:
    fan = fan_of(size, agreement_tree.FAN_MAX)
    return sum(len(level.ranks) - 1 for level in levels_of(rank, size, fan))


def test_no_rank_has_more_connections_than_two_or_three_small_groups_need() -> None:
    for size in (501, 1_000, 4_096):
        assert max(connections_of(rank, size) for rank in range(size)) <= 2 * (agreement_tree.FAN_MAX - 1)
    for size in (4_097, 20_000):
        assert max(connections_of(rank, size) for rank in range(size)) <= 3 * (agreement_tree.FAN_MAX - 1)
    assert connections_of(0, 1_000) == 62 and connections_of(1, 1_000) == 31


@pytest.mark.parametrize("fan_max", [2, 3, 64])
def test_all_members_of_a_group_know_the_same_group_and_every_leader_is_in_the_next_level(fan_max: int) -> None:
    for size in range(2, 70):
        fan = fan_of(size, fan_max)
        assert 2 <= fan <= fan_max
        everyone = [levels_of(rank, size, fan) for rank in range(size)]
        groups_of: dict[tuple[int, int], set[tuple[int, ...]]] = {}
        members: dict[tuple[int, int], set[int]] = {}
        for rank, levels in enumerate(everyone):
            assert all(level.place == 0 for level in levels[:-1]) and (levels[-1].place > 0) == (rank > 0)
            for height, level in enumerate(levels):
                assert level.ranks[level.place] == rank and len(level.ranks) <= fan
                groups_of.setdefault((height, level.number), set()).add(level.ranks)
                members.setdefault((height, level.number), set()).add(rank)
        assert all(len(known) == 1 and members[key] == set(*known) for key, known in groups_of.items())
        assert members[len(everyone[0]) - 1, 0] == set(everyone[0][-1].ranks)


# What it answers


def grow_trees(fan_max: int = 2) -> None:
    """In this process: for every view of more than two ranks."""
    agreement_tree.FLAT_RANKS_MAX, agreement_tree.FAN_MAX = 2, fan_max


def mesh_sockets() -> int:
    """The connections of this process with other ranks."""
    return len(groups.current_connections().mesh._found())


def answer(member: Member, rank: int, size: int, fan_max: int) -> Any:
    grow_trees(fan_max)
    member.start(rank, size)
    assert isinstance(state.tree, AgreementTree)
    calls: list[int] = []
    groups.on_collective(lambda: calls.append(1))
    for _ in range(20):
        assert groups.agree([rank, -rank, 7]) == [size - 1, 0, 7]
        assert groups.gather([rank, 10 * rank]) == [[other, 10 * other] for other in range(size)]
    assert len(calls) == 40
    by_tree = mesh_sockets()
    assert not groups.default_group()._inners  # nothing else has been connected
    total = torch.ones(1)
    dist.all_reduce(total)  # the script's own: connects each with each
    assert total.item() == size and groups.default_group()._inners
    return by_tree


@pytest.mark.parametrize(("size", "fan_max"), [(3, 2), (5, 2), (8, 3)])
def test_agree_and_gather_give_what_one_group_of_all_gives(size: int, fan_max: int) -> None:
    fan = fan_of(size, fan_max)
    expected = [sum(len(level.ranks) - 1 for level in levels_of(rank, size, fan)) for rank in range(size)]
    assert together(answer, size, fan_max) == expected


def stay_flat(member: Member, rank: int, size: int) -> Any:
    agreement_tree.FLAT_RANKS_MAX = size
    member.start(rank, size)
    assert groups.agree([rank]) == [size - 1]
    flat = state.tree is None, mesh_sockets()
    grow_trees()
    member.switch(rank, size, 2)
    assert groups.agree([rank]) == [size - 1]
    grown = isinstance(state.tree, AgreementTree)
    agreement_tree.FLAT_RANKS_MAX = size
    member.switch(rank, size, 3)
    return flat, grown, state.tree is None, groups.agree([rank]), bool(groups.default_group()._inners)


def test_a_view_of_few_ranks_has_no_tree_and_each_view_decides_anew() -> None:
    assert together(stay_flat, 3) == [((True, 2), True, True, [2], True)] * 3


def wait_for_the_last(member: Member, rank: int, size: int) -> bool:
    grow_trees()
    if rank == 0:
        time.sleep(0.3)
        member.say("last")
    member.start(rank, size)
    is_there = member.store.check(["last"])
    if rank == 3:
        time.sleep(0.3)
        member.say("last of the next view")
    member.switch(rank, size, 2)
    return is_there and member.store.check(["last of the next view"])


def test_a_view_has_begun_when_all_have_come_of_whatever_group() -> None:
    """A rank that returned before could end the last view's connections while others still use them."""
    assert together(wait_for_the_last, 4) == [True] * 4


def transfer(member: Member, rank: int, size: int) -> Any:
    """All send to all before anybody receives, large and small, and with tags."""
    grow_trees()
    member.start(rank, size)
    before = mesh_sockets()
    others = [other for other in range(size) if other != rank]
    works = []
    for other in others:
        works.append(dist.isend(torch.full((300_000,), float(rank)), other, tag=1))
        works.append(dist.isend(torch.tensor([rank * 10 + other]), other, tag=2))
    for other in others:
        large, small = torch.zeros(300_000), torch.zeros(1, dtype=torch.int64)
        groups.recv(large, other, 1)
        dist.recv(small, other, tag=2)
        assert large.eq(other).all() and small.item() == other * 10 + rank
    for work in works:
        assert work is not None and work.wait()
        assert work.is_completed()
    assert mesh_sockets() == before + size - 1  # one for each other rank, beside those of the tree
    with pytest.raises(HoldfastError, match="cannot communicate with rank"):
        groups.default_group().send([torch.ones(1)], rank, 0)
    return groups.agree([rank])


def test_ranks_of_a_tree_send_to_each_other_without_connecting_all() -> None:
    assert together(transfer, 4) == [[3]] * 4


def transfer_in_a_ring(member: Member, rank: int, size: int) -> Any:
    """Each begins with its right neighbour, whose connection waits for that one's, and so on around."""
    grow_trees()
    member.start(rank, size)
    right, left = (rank + 1) % size, (rank - 1) % size
    works = [dist.isend(torch.tensor([rank]), right)]
    time.sleep(0.3)
    works.append(dist.isend(torch.tensor([rank]), left))
    received = torch.zeros(2, dtype=torch.int64)
    dist.recv(received[:1], left)
    dist.recv(received[1:], right)
    assert all(work is not None and work.wait() for work in works)
    return received.tolist()


def test_ranks_connect_with_each_other_in_whatever_order_each_begins_to() -> None:
    assert together(transfer_in_a_ring, 3) == [[2, 1], [0, 2], [1, 0]]


# Who dies in it

PHASES: dict[str, tuple[int, str, int, bool]] = {
    "leaf before": (3, "_exchange", 0, False),
    "leader between levels up": (2, "_gather", 1, False),
    "root with the answer": (0, "_broadcast", 1, False),
    "leader between levels down": (2, "_broadcast", 0, False),
    "root between levels down": (0, "_broadcast", 0, False),
    "leaf after": (1, "_broadcast", 0, True),
}
"""Of a tree of four ranks in groups of two: who dies, where, in the group of which level, whether after it."""
PASSED: dict[str, set[int]] = {
    "leaf before": set(),
    "leader between levels up": set(),
    "root with the answer": set(),
    "leader between levels down": {0, 1},
    "root between levels down": {2, 3},
    "leaf after": {0, 2, 3},
}
"""Who has the answer all the same."""


def die_in(member: Member, method: str, height: int, is_after: bool) -> None:
    genuine: Callable[..., Any] = getattr(AgreementTree, method)

    def dying(self: AgreementTree, *arguments: Any) -> Any:
        is_place = method == "_exchange" or arguments[0] == height
        if is_place and is_after:
            genuine(self, *arguments)
        if is_place:
            member.say("dying")
            time.sleep(60)
        return genuine(self, *arguments)

    setattr(AgreementTree, method, dying)


def survive(member: Member, rank: int, size: int, phase: str) -> Any:
    grow_trees()
    victim, method, height, is_after = PHASES[phase]
    member.start(rank, size)
    assert groups.agree([rank]) == [size - 1]
    line = member.connect()

    def side() -> None:
        line.wait(["revoked"], TIMEOUT)
        groups.revoke("somebody died", view=1)

    threading.Thread(target=side, daemon=True).start()
    if rank == victim:
        die_in(member, method, height, is_after)
    outcome: Any = None
    try:
        outcome = groups.agree([rank, 100 - rank])
    except Exception as error:
        assert groups.is_communication_error(error), repr(error)
    member.say(f"out/{rank}") if outcome else None
    member.hear("revoked")
    while not groups.is_revoked():
        time.sleep(0.001)
    with pytest.raises(ViewOverError):
        groups.agree([0])
    new_rank = rank if rank < victim else rank - 1
    member.switch(new_rank, size - 1, 2)
    assert isinstance(state.tree, AgreementTree)
    assert groups.gather([rank]) == [[other] for other in range(size) if other != victim]
    return outcome


@pytest.mark.parametrize("phase", PHASES)
def test_a_death_in_any_phase_frees_every_level_and_who_has_an_answer_has_the_right_one(phase: str) -> None:
    with Crowd() as crowd:
        for rank in range(4):
            crowd.add(survive, rank, 4, phase)
        crowd.hear("dying")
        crowd.kill(PHASES[phase][0])
        if PASSED[phase]:  # before they hear of the end of the view
            crowd.hear(*[f"out/{rank}" for rank in PASSED[phase]])
        crowd.say("revoked")
        results = crowd.results()
    assert results[PHASES[phase][0]] is None
    answered = {rank for rank, result in enumerate(results) if result is not None}
    assert all(results[rank] == [3, 100] for rank in answered)
    assert answered == PASSED[phase]


def race(member: Member, rank: int, size: int, views: int) -> int:
    """In each view a side thread revokes at a moment of its own, of the building of the tree or of its use."""
    grow_trees()
    member.start(rank, size, 0)
    for view in range(1, views, 2):
        side = threading.Timer(0.002 * (view % 11), groups.revoke, ("race", view))
        side.start()
        try:
            member.switch(rank, size, view)
            for _ in range(100):
                groups.gather([rank])
        except Exception as error:
            assert groups.is_communication_error(error), repr(error)
        member.switch(rank, size, view + 1)
        assert groups.agree([rank]) == [size - 1]
        side.join()
    return groups.current_connections().view


def test_revokes_that_race_with_the_building_of_trees_end_only_their_own_view() -> None:
    assert together(race, 4, 24) == [24] * 4


def break_pair(member: Member, rank: int, size: int) -> str:
    grow_trees()
    member.start(rank, size)
    if rank == 0:
        threading.Timer(0.1, groups.revoke, ("it will not send", 1)).start()
        with pytest.raises(ViewOverError, match="will not send"):
            groups.recv(torch.zeros(1), 2)
        with pytest.raises(ViewOverError):
            groups.recv(torch.zeros(1), 2)
    groups.revoke("next", view=1)
    member.switch(rank, size, 2)
    return str(groups.agree([rank]))


def test_a_rank_that_waits_for_a_pair_to_connect_is_freed_by_the_end_of_the_view() -> None:
    assert together(break_pair, 3) == ["[2]"] * 3


def come_late(member: Member, rank: int, size: int) -> Any:
    """Rank 3 does not come."""
    grow_trees()
    member.start(rank, size)
    groups.default_group().set_timeout(TIMEOUT / 30)
    if rank == 3:
        member.hear("gave up/0", "gave up/1", "gave up/2")
        return None
    deadlines: list[float] = []
    genuine = agreement_tree.time_until
    agreement_tree.time_until = lambda deadline: (deadlines.append(deadline), genuine(deadline))[1]
    with pytest.raises(Exception, match=r"(?i)timed out|closed|reset") as caught:
        groups.agree([rank])
    assert groups.is_communication_error(caught.value), repr(caught.value)
    member.say(f"gave up/{rank}")
    return len(deadlines), len(set(deadlines))


def test_a_rank_waits_for_one_that_does_not_come_until_one_deadline_for_all_levels() -> None:
    """Rank 1 waits for the answer after it has said its own; 0 and 2 for what others say."""
    assert together(come_late, 4) == [(2, 1), (2, 1), (1, 1), None]
