"""`--wait-for-nodes`: survivors hold their state and wait for a replacement, before the job is given up."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.core import records as r
from holdfast.core.events import SessionInfo
from holdfast.core.health.reputation import Grade, Reputation
from holdfast.core.notices import notice
from holdfast.core.strategies import LADDER, Strategy
from support.world import World, only

FIXED = SessionInfo(resizable=False, why_fixed="each rank has a meter")
WAIT_S = 600.0
EXIT_ONLY = (Strategy.EXIT,)


def training(session: SessionInfo = FIXED, **settings: Any) -> World:
    settings = {"workers": 1, "restarts": 0, "wait_for_nodes_s": WAIT_S, "spare_nodes": 1} | settings
    return World(nodes=(2, 2), session=session, **settings).train("a", "b")


def lose(world: World, node_id: str) -> None:
    world.do(world.broke(node_id))
    world.wait(1.0)


def decided(world: World) -> list[Strategy]:
    return [record.strategy for record in world.history if isinstance(record, r.IncidentDecided)]


@pytest.mark.parametrize("session", [FIXED, SessionInfo()], ids=["fixed", "elastic"])
def test_survivors_hold_their_state_until_a_replacement_comes(session: SessionInfo) -> None:
    world = training(session)
    lose(world, "b")
    assert not decided(world) and world.serving
    awaited = only(world.history, r.NodesAwaited)
    assert awaited.deadline == pytest.approx(awaited.at + WAIT_S) and "600 s" in notice(world.job, awaited)
    world.wait(WAIT_S - 10.0)
    assert not decided(world)
    world.do(world.hello("c"))
    assert decided(world) == [Strategy.RECOVER] and world.members == ["a", "c"]
    world.prove()
    assert world.job.incidents.current is None and world.job.incidents.restarts_used == 0


def test_without_it_the_state_is_dumped_at_once() -> None:
    world = training(wait_for_nodes_s=0.0)
    lose(world, "b")
    assert decided(world) == [Strategy.DUMP]


def test_when_the_time_is_up_the_state_is_dumped() -> None:
    world = training()
    lose(world, "b")
    world.wait(WAIT_S)
    assert decided(world) == [Strategy.DUMP]
    world.do(world.succeeded("a"))
    assert "no replacement came within 600 s" in only(world.history, r.JobFinished).why


def test_when_the_time_is_up_and_nothing_can_be_dumped_the_end_says_so_too() -> None:
    world = training(recovery=(Strategy.RECOVER, Strategy.EXIT))
    lose(world, "b")
    world.wait(WAIT_S)
    assert decided(world) == [Strategy.EXIT]
    assert "no replacement came within 600 s" in only(world.history, r.JobFinished).why


def test_a_next_loss_has_the_whole_time_again() -> None:
    world = training()
    lose(world, "b")
    world.wait(WAIT_S - 10.0)
    world.do(world.hello("c"))
    world.settle_all()
    lose(world, "c")
    world.wait(WAIT_S - 10.0)
    assert Strategy.DUMP not in decided(world)
    world.wait(10.0)
    assert decided(world)[-1] is Strategy.DUMP


def test_another_loss_while_they_wait_has_no_further_time() -> None:
    world = World(nodes=(3, 3), session=FIXED, restarts=0, wait_for_nodes_s=WAIT_S).train("a", "b", "c")
    lose(world, "b")
    world.wait(WAIT_S / 2)
    lose(world, "c")
    world.wait(WAIT_S / 2)
    assert decided(world) == [Strategy.DUMP]


def test_a_restarted_master_goes_on_waiting_until_the_same_time() -> None:
    world = training()
    lose(world, "b")
    world.wait(WAIT_S / 2)
    world.restart_master(10.0)
    world.do(world.hello("a"))
    world.wait(WAIT_S / 2 - 20.0)
    assert not decided(world)
    world.wait(20.0)
    assert decided(world) == [Strategy.DUMP]


def test_nobody_is_waited_for_that_would_be_of_no_use() -> None:
    """A worker that keeps failing on a node that is there; or nothing is allowed that would take a replacement in."""
    world = training(session=FIXED, recovery=(Strategy.DUMP, Strategy.EXIT))
    lose(world, "b")
    assert decided(world) == [Strategy.DUMP]
    world = training(recovery=tuple(s for s in LADDER if s is not Strategy.RECOVER_IN_PLACE))
    world.do(world.failed("b"))
    assert decided(world) == [Strategy.DUMP]


def test_without_a_dump_they_wait_too() -> None:
    world = training(recovery=(Strategy.RECOVER, Strategy.EXIT))
    lose(world, "b")
    assert not decided(world)
    world.do(world.hello("c"))
    assert decided(world) == [Strategy.RECOVER]


@pytest.mark.parametrize(("grade", "waits"), [(Grade.BANNED, False), (Grade.CORDONED, True)])
def test_a_banned_machine_is_taken_at_once_and_a_cordoned_one_when_the_time_is_up(grade: Grade, waits: bool) -> None:
    world = training()
    world.do(replace(world.hello("c"), reputation=Reputation(grade, "a reason")))
    lose(world, "b")
    assert (not decided(world)) == waits
    world.wait(WAIT_S)
    assert decided(world) == [Strategy.RECOVER] and world.members == ["a", "c"]


def test_survivors_that_leave_while_they_wait_end_the_job() -> None:
    world = training()
    lose(world, "b")
    world.do(world.leaving("a"), world.gone("a"))
    world.wait(2 * WAIT_S)
    assert world.finished
