"""How ranks come to know which shard each of them has."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from holdfast.core.mesh_shape import mesh_shape
from holdfast.core.shard_map import ALL_OF_IT, ShardMap, shard_map_of
from holdfast.errors import ScriptError
from holdfast.state.tracked import Tracked
from holdfast.worker.collectives import groups
from holdfast.worker.parallel.holdings import DeclaredMesh, holdings_of
from holdfast.worker.resume_point import ResumePoint
from holdfast.worker.state_sharding import StateSharding
from support.simulated_ranks import assignment

STAGES = shard_map_of([0, 0, 1, 1])
FIRST, SECOND = holdings_of({"model": nn.Linear(2, 3)}), holdings_of({"model": nn.Linear(3, 2)})


def resume(holdings: tuple[int, ...], newcomers: tuple[int, ...] = (), *, is_start: bool = False) -> ResumePoint:
    holders = tuple(rank for rank in range(len(holdings)) if rank not in newcomers)
    return ResumePoint(5, newcomers, holders, 0, 0, True, is_start, holdings=holdings)


@pytest.fixture
def at_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    def be(rank: int, size: int) -> None:
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: size)

    return be


def test_those_that_start_together_see_it(at_rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    at_rank(2, 4)
    monkeypatch.setattr(groups, "gather", lambda values: [[FIRST, 0], [FIRST, 0], list(values), list(values)])
    sharding = StateSharding()
    sharding.measure(Tracked(model=nn.Linear(3, 2)), is_alone=False, expected=None)
    assert (sharding.shard_map, sharding.shard) == (STAGES, 1)


def test_what_each_rank_has_for_itself_is_no_part_of_a_shard() -> None:
    tracked = Tracked(model=nn.Linear(2, 3))
    tracked.add("own", nn.Linear(7, 7), is_local=True)
    sharding = StateSharding()
    sharding.measure(tracked, is_alone=True, expected=None)
    assert sharding.holdings == FIRST and sharding.shard_map == ALL_OF_IT


def test_a_newcomer_is_told(at_rank: Any) -> None:
    at_rank(3, 4)
    sharding = StateSharding()
    sharding.measure(Tracked(model=nn.Linear(3, 2)), is_alone=True, expected=STAGES)
    assert sharding.shard == 1
    told = assignment(2, 3, 4, shard_map=STAGES)
    sharding.adopt(resume((FIRST, FIRST, SECOND, SECOND), (3,)), told, is_filled=False)
    assert sharding.shard_map == STAGES


def test_a_newcomer_that_built_something_else_is_refused_and_the_others_go_on(at_rank: Any) -> None:
    found = resume((FIRST, FIRST, SECOND, FIRST), (3,))
    newcomer, veteran = StateSharding(), StateSharding()
    with pytest.raises(ScriptError, match="which replaces rank 3, has built other tensors than rank 2 has"):
        newcomer.adopt(found, assignment(2, 3, 4, shard_map=STAGES), is_filled=False)
    veteran.shard_map = STAGES
    veteran.adopt(found, assignment(2, 0, 4), is_filled=True)
    assert veteran.shard_map == STAGES


def test_ranks_of_a_world_of_another_size_see_it_again() -> None:
    sharding = StateSharding()
    sharding.shard_map = STAGES
    sharding.adopt(resume((FIRST, SECOND)), assignment(2, 0, 2), is_filled=True)
    assert sharding.shard_map == ShardMap(2)


def test_a_declaration_holds_where_nothing_is_seen() -> None:
    sharding = StateSharding()
    sharding.declared = DeclaredMesh(mesh_shape({"dp": 2, "ep": 2}), ["dp"])
    sharding.adopt(resume((FIRST,) * 4, is_start=True), assignment(1, 0, 4), is_filled=False)
    assert sharding.shard_map == ShardMap(2)
    assert sharding.is_cut([])


def test_who_has_no_replica_elsewhere_is_lonely(at_rank: Any) -> None:
    at_rank(0, 4)
    sharding = StateSharding()
    assert sharding.lonely_ranks == frozenset()
    sharding.adopt(resume((FIRST, FIRST, SECOND, SECOND), is_start=True), assignment(1, 0, 4), is_filled=False)
    assert sharding.lonely_ranks == frozenset()  # on one node, two processes are enough
    placed = assignment(2, 0, 4, first_ranks=(0, 2))
    sharding.adopt(resume((FIRST, FIRST, SECOND, SECOND)), placed, is_filled=True)
    assert sharding.lonely_ranks == {0, 1, 2, 3}


def test_the_survivors_of_a_dump_keep_the_shard_of_their_rank(at_rank: Any) -> None:
    """They are ranks of a smaller world then, and write what they had."""
    sharding = StateSharding()
    at_rank(3, 4)
    sharding.adopt(resume((FIRST, FIRST, SECOND, SECOND), is_start=True), assignment(1, 3, 4), is_filled=False)
    at_rank(1, 2)
    assert (sharding.rank, sharding.shard) == (3, 1)
