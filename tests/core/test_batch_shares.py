"""Shares of the global batch: shifted away from stragglers at a step boundary, kept while the world keeps its size."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from core.test_stragglers import report, rounds
from holdfast.core import events as e
from holdfast.core import orders as o
from holdfast.core import records as r
from holdfast.core.shard_map import ShardMap
from holdfast.core.strategies import Strategy
from holdfast.core.views import View
from support.world import World, only

SLOTS = 16
SOURCE = e.DataSource(
    name="data",
    size=1000,
    seed="7",
    global_batch_size=64,
    slots=SLOTS,
    shuffle=True,
    last_batch="short",
    locality=(),
    fingerprint="",
)


def training(slots: int = SLOTS, session: e.SessionInfo | None = None, **settings: Any) -> World:
    chosen = {"nodes": (2, 2), "workers": 2, "restarts": 1, "straggler_action": "shift"} | settings
    world = World(session=session or e.SessionInfo(), **chosen).train("a", "b")  # type: ignore[arg-type]
    sources = (msgspec.structs.replace(SOURCE, slots=slots),) if slots else ()
    world.do(e.DataAnnounced(node_id="a", incarnation=world.life("a"), view=1, sources=sources))
    return world


def weights(world: World) -> tuple[float, ...]:
    assert world.job.view
    return world.job.view.weights


@pytest.mark.parametrize(
    ("slow_ms", "weight"),
    [(63, 0.75), (71, 0.75), (80, 0.625), (100, 0.5), (150, 0.375), (199, 0.25), (5000, 0.25)],
)
def test_a_straggler_gets_less_in_proportion_within_bounds(slow_ms: float, weight: float) -> None:
    world = training()
    rounds(world, 3, (50, 50), (50, slow_ms))
    assert weights(world) == (1.0, 1.0, 1.0, weight)


def test_it_is_a_change_by_plan_with_the_same_members_and_everybody_is_told() -> None:
    world = training()
    rounds(world, 3, (50, 50), (50, 100))
    view = world.job.view
    assert view and view.keeps_workers and view.planned and view.number == 2 and not view.replaced
    assert [(m.node_id, m.first_rank) for m in view.members] == [("a", 0), ("b", 2)]
    for node_id in "ab":
        order = world.told[world.life(node_id)]
        assert isinstance(order, o.Serve) and order.weights == (1.0, 1.0, 1.0, 0.5)
    world.prove(step=30)
    closed = only(world.history, r.IncidentClosed)
    assert (closed.kind, closed.strategy, closed.step) == ("planned", Strategy.ELASTIC_TRAINING, 30)
    assert "rank 3 on b" in closed.cause and world.job.incidents.restarts_used == 0


def test_once_for_each_finding_and_no_further_than_the_least() -> None:
    world = training()
    for expected in (0.5, 0.25, 0.25, 0.25):
        rounds(world, 6, (50, 50), (50, 100))  # it is as slow as before, whatever it has
        assert weights(world)[3] == expected
        world.prove(step=world.view_number * 100)
    assert world.view_number == 3
    assert len([x for x in world.history if isinstance(x, r.StragglerFound)]) == 3, "the last one is told, no more"


def test_two_at_once_are_one_change() -> None:
    world = World(nodes=(2, 2), session=e.SessionInfo(), workers=4, restarts=0, straggler_action="shift").train(
        "a", "b"
    )
    world.do(e.DataAnnounced(node_id="a", incarnation=world.life("a"), view=1, sources=(SOURCE,)))
    rounds(world, 3, (50, 50, 50, 50), (50, 50, 70, 100))
    assert weights(world) == (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5)
    assert world.view_number == 2


def test_one_that_has_recovered_gets_it_back_when_the_others_are_the_slow_ones() -> None:
    world = World(nodes=(2, 2), session=e.SessionInfo(), workers=1, restarts=0, straggler_action="shift").train(
        "a", "b"
    )
    world.do(e.DataAnnounced(node_id="a", incarnation=world.life("a"), view=1, sources=(SOURCE,)))
    rounds(world, 3, (50,), (100,))
    assert weights(world) == (1.0, 0.5)
    world.prove()
    rounds(world, 4, (66,), (33,))
    assert weights(world) == () and world.view_number == 3


@pytest.mark.parametrize(
    ("slots", "session", "action"),
    [
        (SLOTS, e.SessionInfo(shard_map=ShardMap(4), replicas=1), "shift"),  # ghosts would be passed instead
        (4, None, "shift"),  # nothing to give away
        (0, None, "shift"),  # data of its own
        (SLOTS, None, "report"),
    ],
)
def test_where_it_would_not_help_it_is_reported_only(slots: int, session: e.SessionInfo | None, action: str) -> None:
    world = training(slots, session, straggler_action=action)
    rounds(world, 6, (50, 50), (50, 100))
    only(world.history, r.StragglerFound)
    assert world.view_number == 1 and weights(world) == ()


def test_shares_stay_through_repairs_and_restarts() -> None:
    world = training()
    rounds(world, 3, (50, 50), (50, 100))
    world.prove()
    world.do(world.failed("a", 0))
    assert world.view_number == 3 and weights(world) == (1.0, 1.0, 1.0, 0.5)
    world.do(world.failed("a", 0), world.failed("a", 1), world.failed("b", 0), world.failed("b", 1))
    assert world.job.view and not world.job.view.keeps_workers and weights(world) == (1.0, 1.0, 1.0, 0.5)


def test_a_substitute_has_a_whole_share() -> None:
    world = training(spare_nodes=1)
    rounds(world, 3, (50, 50), (50, 100))
    world.prove()
    world.do(world.hello("c"))
    world.do(world.parked("c", 2))
    world.do(e.DrainRequested(node_id="b", why="asked to"))
    assert world.members == ["a", "c"] and weights(world) == ()


def test_shares_are_dropped_when_the_world_has_another_size() -> None:
    world = training(nodes=(1, 2))
    rounds(world, 3, (50, 50), (50, 100))
    world.prove()
    world.do(e.ResizeRequested(nodes=1, why="asked to"))
    assert world.job.view and world.job.view.world_size == 2 and weights(world) == ()


def test_a_new_master_knows_them_and_views_without_say_nothing_of_them() -> None:
    world = training()
    assert world.job.view and b"weights" not in msgspec.json.encode(world.job.view)
    rounds(world, 2, (50, 50), (50, 100))
    world.do(report(world, "a", 50, 50), report(world, "b", 50, 100))
    world.restart_master()
    assert weights(world) == (1.0, 1.0, 1.0, 0.5)
    assert msgspec.json.decode(msgspec.json.encode(world.job.view), type=View) == world.job.view
