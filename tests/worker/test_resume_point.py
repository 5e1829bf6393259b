"""Which step the members of a view go on with, as a table."""

import pytest

from holdfast.core.shard_map import ShardMap
from holdfast.errors import ScriptError, StateConflictError, StateLostError
from holdfast.state.per_rank_state import StatePart
from holdfast.worker.restore.from_peers import StateTransfer, plan
from holdfast.worker.resume_point import RankStatus, ResumePoint, find_resume_point


def holder(next_step: int, applied_step: int | None = None, at_barrier: int = 0, keeps_copy: int = 0) -> RankStatus:
    return RankStatus(
        has_state=1,
        next_step=next_step,
        applied_step=next_step - 1 if applied_step is None else applied_step,
        at_barrier=at_barrier,
        seed=3,
        first_step=0,
        keeps_copy=keeps_copy,
    )


def newcomer(applied_step: int = -1) -> RankStatus:
    return RankStatus(0, 0, applied_step, 0, seed=9, first_step=0, keeps_copy=1)


@pytest.mark.parametrize(
    ("standings", "next_step", "newcomers"),
    [
        pytest.param([holder(5), holder(5)], 5, (), id="all in the middle of step 5: it is repeated"),
        pytest.param([holder(5, at_barrier=1), holder(5)], 5, (), id="nobody passed the barrier: repeated"),
        pytest.param([holder(5, at_barrier=1), holder(6)], 6, (), id="one passed it and finished: the other goes on"),
        pytest.param(
            [holder(5, applied_step=5, at_barrier=1)] * 2, 6, (), id="a dead worker of the node had passed it"
        ),
        pytest.param([holder(5, at_barrier=1), newcomer(applied_step=5)], 6, (1,), id="so a newcomer's node says"),
        pytest.param([holder(5), newcomer(), newcomer()], 5, (1, 2), id="newcomers have no say"),
    ],
)
def test_the_highest_step_that_anybody_began_is_committed(
    standings: list[RankStatus], next_step: int, newcomers: tuple[int, ...]
) -> None:
    settlement = find_resume_point(standings)
    assert (settlement.next_step, settlement.newcomers) == (next_step, newcomers)
    assert settlement.seed == 3 and not settlement.is_start


def test_a_rank_that_cannot_catch_up_is_named() -> None:
    with pytest.raises(StateConflictError, match="rank 1 is at step 5 while step 5 is committed"):
        find_resume_point([holder(6), holder(5, at_barrier=0)])
    with pytest.raises(StateConflictError, match="rank 0 is at step 4"):
        find_resume_point([holder(4, at_barrier=1), holder(6)])


def test_a_run_begins_where_its_checkpoint_ends_on_all_ranks() -> None:
    fresh = newcomer()
    assert find_resume_point([fresh, fresh]).is_start
    assert find_resume_point([fresh._replace(next_step=7)] * 3).next_step == 7
    with pytest.raises(StateConflictError, match=r"rank 0: 0, rank 1: 7.*--checkpoint-dir"):
        find_resume_point([fresh, fresh._replace(next_step=7)])


def settlement(holders: tuple[int, ...], newcomers: tuple[int, ...]) -> ResumePoint:
    return ResumePoint(5, newcomers, holders, 0, 0, False, False)


def test_a_newcomer_gets_its_state_from_its_own_node_and_the_work_is_shared() -> None:
    found = plan(settlement((0, 1, 3, 4), (2, 5)), first_ranks=(0, 3), world_size=6, shard_map=ShardMap(1), copies=0)
    assert found == [StateTransfer(0, 2, False), StateTransfer(3, 5, False)]
    found = plan(settlement((0, 1), (2, 3)), first_ranks=(0, 2), world_size=4, shard_map=ShardMap(1), copies=0)
    assert found == [StateTransfer(0, 2, False), StateTransfer(1, 3, False)]


def test_a_shard_comes_from_its_twin_else_from_its_replica() -> None:
    found = plan(settlement((0, 1, 2), (3,)), first_ranks=(0,), world_size=4, shard_map=ShardMap(2), copies=0)
    assert found == [StateTransfer(1, 3, False)]
    found = plan(settlement((0, 2), (1,)), first_ranks=(0,), world_size=3, shard_map=ShardMap(3), copies=1)
    assert found == [StateTransfer(2, 1, True, StatePart.ALL)]
    found = plan(settlement((0, 1, 2), (3,)), first_ranks=(0, 2), world_size=4, shard_map=ShardMap(4), copies=1)
    assert found == [StateTransfer(1, 3, True, StatePart.ALL)], "the partner is on the other node"


def test_a_shard_that_nobody_has_is_named() -> None:
    with pytest.raises(StateConflictError, match="no rank has the shard of rank 1"):
        plan(settlement((0,), (1, 2)), first_ranks=(0,), world_size=3, shard_map=ShardMap(3), copies=1)


def test_what_a_newcomer_has_for_itself_comes_from_its_ring_partner_and_from_nobody_else() -> None:
    found = plan(
        settlement((0, 2), (1,)), first_ranks=(0,), world_size=3, shard_map=ShardMap(1), copies=0, local_copies=1
    )
    assert found == [StateTransfer(0, 1, False), StateTransfer(2, 1, True, StatePart.LOCAL)]
    found = plan(
        settlement((0, 1, 2), (3,)), first_ranks=(0,), world_size=4, shard_map=ShardMap(2), copies=0, local_copies=1
    )
    assert found == [StateTransfer(1, 3, False), StateTransfer(0, 3, True, StatePart.LOCAL)]
    for holders, newcomers, copies in (((0,), (1, 2), 1), ((0, 2), (1,), 0)):
        with pytest.raises(StateLostError, match="no rank has what rank 1 had for itself"):
            plan(settlement(holders, newcomers), (0,), 3, shard_map=ShardMap(1), copies=0, local_copies=copies)


def owner(rank: int, world_size: int, **choices: int) -> RankStatus:
    return holder(5)._replace(owner_rank=rank, owner_world=world_size, **choices)


def test_nobody_goes_on_with_what_another_rank_had_for_itself() -> None:
    assert find_resume_point([owner(0, 2), owner(1, 2)]).next_step == 5
    assert find_resume_point([owner(0, 2), newcomer()]).newcomers == (1,)
    for standings in ([owner(0, 3), owner(1, 3)], [owner(1, 2), owner(0, 2)], [owner(0, 3), newcomer()]):
        with pytest.raises(StateLostError, match="another number of ranks cannot go on with it"):
            find_resume_point(standings)


@pytest.mark.parametrize(
    ("since", "known"),
    [
        pytest.param((-1, -1), -1, id="nobody found a difference"),
        pytest.param((5, -1), 5, id="one that is behind has not seen it yet"),
        pytest.param((3, 3), 3, id="known for long"),
        pytest.param((6, -1), -1, id="found at the commit of a step that is repeated: not found yet"),
    ],
)
def test_from_which_step_on_gradients_differ(since: tuple[int, int], known: int) -> None:
    standings = [holder(5)._replace(local_since=one) for one in since]
    assert find_resume_point([*standings, newcomer()]).local_since == known


def test_ranks_that_would_make_other_numbers_of_steps_do_not_go_on() -> None:
    standings = [holder(5)._replace(total=24), newcomer()._replace(total=13)]
    with pytest.raises(ScriptError, match=r"makes 24 steps on rank 0 and 13 on rank 1: give job\.steps"):
        find_resume_point(standings)
    assert find_resume_point([one._replace(total=24) for one in standings]).next_step == 5


def test_a_replacement_learns_that_steps_accumulate() -> None:
    assert find_resume_point([holder(5)._replace(accumulates=1), newcomer()]).accumulates
    assert not find_resume_point([holder(5), newcomer()]).accumulates
