"""Which rank gives its shard to which, in a view where all objects were built again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.state.arena import Arena
from holdfast.state.tracked import Tracked
from holdfast.wire.worker_messages import Assignment
from holdfast.worker.collectives import groups
from holdfast.worker.restore import from_twins
from holdfast.worker.restore.from_twins import ShardKey, plan

FIRST, SECOND = ShardKey(2, 0, 11), ShardKey(2, 1, 22)
ALONE = Assignment(
    view=1,
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    group_rank=0,
    group_world_size=1,
    role_rank=0,
    role_world_size=1,
    store_host="",
    store_port=0,
    first_ranks=(0,),
    strategy="",
    planned=False,
    newcomer=False,
    applied_step=-1,
    complete_version=-1,
)


def test_who_has_its_own_shard_asks_nobody() -> None:
    assert plan([{FIRST}, {SECOND}], [FIRST, SECOND], (0,)) == []
    assert plan([set(), {SECOND}], [None, SECOND], (0,)) == [], "its objects hold it"


def test_the_nearest_rank_that_has_it_gives_it() -> None:
    offered = [{FIRST}, {SECOND}, set(), {FIRST}, {SECOND}, set()]
    wanted = [FIRST, SECOND, SECOND, FIRST, SECOND, FIRST]
    found = plan(offered, wanted, (0, 3))
    assert [(transfer.source, transfer.newcomer) for transfer in found or []] == [(1, 2), (3, 5)]


def test_a_shard_that_nobody_has_or_that_holds_something_else_now_is_no_plan() -> None:
    assert plan([{FIRST}, {FIRST}], [FIRST, SECOND], (0,)) is None
    assert plan([{FIRST}, {SECOND}], [FIRST, SECOND._replace(holdings=23)], (0,)) is None
    assert plan([{ShardKey(4, 0, 11)}, {SECOND}], [FIRST, SECOND], (0,)) is None


@given(st.lists(st.sets(st.integers(0, 3)), min_size=1, max_size=8), st.data())
@settings(deadline=None)
def test_there_is_a_plan_exactly_if_each_wanted_shard_is_offered(held: list[set[int]], data: st.DataObject) -> None:
    offered = [{ShardKey(4, shard, shard) for shard in shards} for shards in held]
    numbers = [data.draw(st.none() | st.integers(0, 3)) for _ in held]
    wanted = [None if number is None else ShardKey(4, number, number) for number in numbers]
    found = plan(offered, wanted, (0, len(held) // 2) if len(held) > 1 else (0,))
    there = set().union(*offered)
    assert (found is not None) == all(key is None or key in there for key in wanted)
    for transfer in found or []:
        key = wanted[transfer.newcomer]
        assert key in offered[transfer.source] and key not in offered[transfer.newcomer]
    given_to = Counter(transfer.newcomer for transfer in found or [])
    assert set(given_to.values()) <= {1}
    if found is not None:
        needy = {rank for rank, key in enumerate(wanted) if key is not None and key not in offered[rank]}
        assert given_to.keys() == needy


@pytest.fixture
def alone() -> Iterator[None]:
    groups.start(0, 1, None, view=1, timeout=timedelta(seconds=10))
    yield
    groups.close()


@pytest.mark.usefixtures("alone")
def test_a_rank_fills_its_objects_from_its_own_copy_and_leaves_the_copy_alone() -> None:
    saved, live = nn.Linear(3, 5), nn.Linear(3, 5)
    copy, before = Arena(), saved.weight.detach().clone()
    copy.take(Tracked(model=saved).state(), 5)
    assert from_twins.carry_out({FIRST: copy}, [FIRST], 5, ALONE, Tracked(model=live))
    with torch.no_grad():
        live.weight.add_(1)
    assert from_twins.carry_out({FIRST: copy}, [FIRST], 5, ALONE, Tracked(model=live))
    assert torch.equal(live.weight, before)


@pytest.mark.usefixtures("alone")
def test_nothing_is_changed_where_the_cut_is_another() -> None:
    live = nn.Linear(3, 5)
    before = live.weight.detach().clone()
    assert not from_twins.carry_out({}, [FIRST], 5, ALONE, Tracked(model=live))
    assert torch.equal(live.weight, before)
