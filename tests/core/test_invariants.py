"""The invariants that hold in production: each is broken here, and crashes before it does harm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from holdfast.core import choose_strategy
from holdfast.core import records as r
from holdfast.core.events import SessionInfo
from holdfast.core.evolve import evolve
from holdfast.core.invariants import check_placement
from holdfast.core.orders import Addressed, Hold, check_orders
from holdfast.core.replica_placement import ReplicaPlacement
from holdfast.core.strategies import Strategy
from support.world import World, only


def training(**settings: int) -> World:
    return World(nodes=(2, 2), session=SessionInfo(), spare_nodes=1, **settings).train("a", "b")


def an_older_view(world: World) -> None:
    assert world.job.view
    evolve(world.job, r.ViewFormed(at=world.now, view=world.job.view, why="again"))


def a_second_decision(world: World) -> None:
    world.do(world.failed("b"))
    evolve(world.job, [record for record in world.history if isinstance(record, r.IncidentDecided)][-1])


def an_earlier_time(world: World) -> None:
    world.now -= 1.0
    world.do(world.hello("c"))


def a_worker_that_ends_twice(world: World) -> None:
    world.do(world.succeeded("a"))
    failure = world.failed("a").failure
    evolve(world.job, r.WorkerFailedRecord(at=world.now, failure=failure, late=False))


def a_wait_without_a_reason(world: World) -> None:
    check_orders([Addressed("a", "a.1", Hold(job_id="job", why=""))])


def replicas_that_nobody_has(world: World) -> None:
    check_placement(ReplicaPlacement(partners={"a": ("b",)}, owners={"b": ()}))


BROKEN: dict[str, Callable[[World], None]] = {
    "view numbers only grow": an_older_view,
    "decided twice about one view": a_second_decision,
    "time went back": an_earlier_time,
    "has both succeeded and failed": a_worker_that_ends_twice,
    "waits for no reason": a_wait_without_a_reason,
    "owners without a replica": replicas_that_nobody_has,
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_invariant_crashes(text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        BROKEN[text](training())


def test_no_job_is_given_up_while_a_node_stands_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rungs are forgotten: a mistake in the ladder crashes the master, and is found."""
    forgotten = (Strategy.RECOVER, Strategy.ELASTIC_TRAINING)
    rungs = tuple(rung for rung in choose_strategy.RUNGS if rung[0] not in forgotten)
    world = training()
    world.do(world.hello("c"))
    monkeypatch.setattr(choose_strategy, "RUNGS", rungs)
    world.do(world.broke("b"))
    with pytest.raises(AssertionError, match="dump although a node stands by for each that is lost"):
        world.wait(1.0)


def test_replayed_journals_may_have_been_written_by_clocks_that_were_set() -> None:
    world = training()
    joined = only([x for x in world.history if isinstance(x, r.NodeJoined) and x.node_id == "a"], r.NodeJoined)
    evolve(world.job, replace(joined, at=world.now - 3_600.0, node_id="z", incarnation="z.1"))
    assert world.job.recorded_at == world.now
