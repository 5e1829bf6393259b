"""Which step the members of a view go on with, as a table."""

import pytest

from holdfast.errors import SettleError
from holdfast.worker.memory.restoring import Transfer, plan
from holdfast.worker.settling import Settlement, Standing, settle


def holder(next_step: int, begun: int | None = None, at_barrier: int = 0, keeps_copy: int = 0) -> Standing:
    return Standing(
        has_state=1,
        next_step=next_step,
        begun=next_step - 1 if begun is None else begun,
        at_barrier=at_barrier,
        seed=3,
        first_step=0,
        keeps_copy=keeps_copy,
    )


def newcomer(begun: int = -1) -> Standing:
    return Standing(0, 0, begun, 0, seed=9, first_step=0, keeps_copy=1)


@pytest.mark.parametrize(
    ("standings", "next_step", "newcomers"),
    [
        pytest.param([holder(5), holder(5)], 5, (), id="all in the middle of step 5: it is repeated"),
        pytest.param([holder(5, at_barrier=1), holder(5)], 5, (), id="nobody passed the barrier: repeated"),
        pytest.param([holder(5, at_barrier=1), holder(6)], 6, (), id="one passed it and finished: the other goes on"),
        pytest.param([holder(5, begun=5, at_barrier=1)] * 2, 6, (), id="a dead worker of the node had passed it"),
        pytest.param([holder(5, at_barrier=1), newcomer(begun=5)], 6, (1,), id="so a newcomer's node says"),
        pytest.param([holder(5), newcomer(), newcomer()], 5, (1, 2), id="newcomers have no say"),
    ],
)
def test_the_highest_step_that_anybody_began_is_committed(
    standings: list[Standing], next_step: int, newcomers: tuple[int, ...]
) -> None:
    settlement = settle(standings)
    assert (settlement.next_step, settlement.newcomers) == (next_step, newcomers)
    assert settlement.seed == 3 and not settlement.is_start


def test_a_rank_that_cannot_catch_up_is_named() -> None:
    with pytest.raises(SettleError, match="rank 1 is at step 5 while step 5 is committed"):
        settle([holder(6), holder(5, at_barrier=0)])
    with pytest.raises(SettleError, match="rank 0 is at step 4"):
        settle([holder(4, at_barrier=1), holder(6)])


def test_a_run_begins_where_its_checkpoint_ends_on_all_ranks() -> None:
    fresh = newcomer()
    assert settle([fresh, fresh]).is_start
    assert settle([fresh._replace(next_step=7)] * 3).next_step == 7
    with pytest.raises(SettleError, match=r"rank 0: 0, rank 1: 7.*--checkpoint-dir"):
        settle([fresh, fresh._replace(next_step=7)])


def settlement(holders: tuple[int, ...], newcomers: tuple[int, ...]) -> Settlement:
    return Settlement(5, newcomers, holders, 0, 0, False, False)


def test_a_newcomer_gets_its_state_from_its_own_node_and_the_work_is_shared() -> None:
    found = plan(settlement((0, 1, 3, 4), (2, 5)), first_ranks=(0, 3), world_size=6, shards=1, copies=0)
    assert found == [Transfer(0, 2, False), Transfer(3, 5, False)]
    found = plan(settlement((0, 1), (2, 3)), first_ranks=(0, 2), world_size=4, shards=1, copies=0)
    assert found == [Transfer(0, 2, False), Transfer(1, 3, False)]


def test_a_shard_comes_from_its_twin_else_from_its_replica() -> None:
    found = plan(settlement((0, 1, 2), (3,)), first_ranks=(0,), world_size=4, shards=2, copies=0)
    assert found == [Transfer(1, 3, False)]
    found = plan(settlement((0, 2), (1,)), first_ranks=(0,), world_size=3, shards=3, copies=1)
    assert found == [Transfer(2, 1, True)]
    found = plan(settlement((0, 1, 2), (3,)), first_ranks=(0, 2), world_size=4, shards=4, copies=1)
    assert found == [Transfer(1, 3, True)], "the partner is on the other node"


def test_a_shard_that_nobody_has_is_named() -> None:
    with pytest.raises(SettleError, match="nobody has the shard of rank 1"):
        plan(settlement((0,), (1, 2)), first_ranks=(0,), world_size=3, shards=3, copies=1)
