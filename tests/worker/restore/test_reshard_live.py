"""When the members of a view cut their state again, and from which copies."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from torch import nn

from holdfast.core.shard_map import ShardMap
from holdfast.errors import StateConflictError
from holdfast.state.arena import Arena
from holdfast.state.tracked import Tracked
from holdfast.worker.collectives import groups
from holdfast.worker.restore import reshard_live
from holdfast.worker.resume_point import RankStatus, find_resume_point


def holder(shards: int, shard: int) -> RankStatus:
    return RankStatus(1, 5, 4, 0, seed=0, first_step=0, keeps_copy=1, shards=shards, shard=shard)


NEWCOMER = RankStatus(0, 0, -1, 0, seed=0, first_step=0, keeps_copy=1, shards=3, shard=2)


@pytest.mark.parametrize(
    ("statuses", "shards", "is_needed"),
    [
        pytest.param([holder(1, 0)] * 3, 1, False, id="every rank has all of it, whatever the world"),
        pytest.param([holder(3, 0), holder(3, 1), NEWCOMER], 3, False, id="a replica will do for the newcomer"),
        pytest.param([holder(2, 0), holder(2, 1), holder(2, 0), holder(2, 1)], 2, False, id="twins"),
        pytest.param([holder(0, 0), holder(0, 1)], 2, True, id="all were built again"),
        pytest.param([holder(3, 0), holder(0, 1), holder(3, 2)], 3, True, id="one was, and its objects are empty"),
        pytest.param([holder(3, 1), holder(3, 2), NEWCOMER], 3, True, id="as many shards, but other ones"),
        pytest.param([NEWCOMER] * 3, 3, False, id="a start"),
    ],
)
def test_objects_that_do_not_hold_their_shard_are_filled_anew(
    statuses: list[RankStatus], shards: int, is_needed: bool
) -> None:
    assert reshard_live.is_needed(find_resume_point(statuses), ShardMap(shards)) is is_needed


@pytest.fixture
def alone() -> Iterator[None]:
    groups.start(0, 1, None, view=1, timeout=timedelta(seconds=10))
    yield
    groups.close()


def copy_of(model: nn.Module) -> Arena:
    snapshot = Arena()
    snapshot.take(Tracked(model=model).state(), 5)
    return snapshot


@pytest.mark.usefixtures("alone")
def test_a_cut_of_which_a_shard_is_missing_is_not_used() -> None:
    copy = copy_of(nn.Linear(2, 2))
    assert reshard_live.choose({(3, 0): copy, (3, 2): copy, (2, 0): copy, (2, 1): copy}, 5).shards == 2
    with pytest.raises(StateConflictError, match="shard 1 of 3 of the state before step 5"):
        reshard_live.choose({(3, 0): copy, (3, 2): copy}, 5)
    with pytest.raises(StateConflictError, match="no rank has a copy"):
        reshard_live.choose({}, 5)


@pytest.mark.usefixtures("alone")
def test_one_that_has_everything_fills_its_own_objects() -> None:
    saved, live = nn.Linear(3, 5), nn.Linear(3, 5)
    reshard_live.carry_out({(1, 0): copy_of(saved)}, 5, Tracked(model=live), ShardMap())
    assert torch.equal(live.weight, saved.weight) and torch.equal(live.bias, saved.bias)
