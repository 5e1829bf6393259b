"""An event costs what it changes, not what there is: counted in lines of code run, the same on any machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from holdfast.core import events as e
from holdfast.core import orders as o
from holdfast.core.durability import ImageReport
from holdfast.core.policy import next_deadline
from holdfast.core.shard_map import ShardMap
from holdfast.core.transact import transact
from support.world import World

FEW, MANY = 40, 320
"""Nodes that train; and a tenth as many stand by."""
MORE = 1.1
"""How much more an event may cost with eight times the nodes: what is sorted has a logarithm."""
MORE_OF_A_VIEW = 1.2 * MANY / FEW


def lines_run(what: Callable[[], object]) -> int:
    """Return how many lines, also of loops within one line, were run."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        what()
    finally:
        sys.settrace(before)
    return count


def training(nodes: int, session: e.SessionInfo | None, **settings: Any) -> World:
    """A job whose first step is committed, or whose workers run, with spare nodes beside."""
    given = {"restarts": 9, "workers": 2, "spare_nodes": nodes // 10, "session": session} | settings
    world = World(nodes=(nodes - nodes // 10, nodes), **given)
    world.careful = False
    world.do(*(world.hello(f"n{number}", bulk_port=7) for number in range(nodes + nodes // 10)))
    world.start_all()
    if session:
        world.prove()
        told = {n: world.order_to(n) for n in world.job.nodes}
        wanted = {n: order.spares for n, order in told.items() if isinstance(order, o.Hold)}
        world.do(*(world.parked(n, spares) for n, spares in wanted.items() if spares))
    return world


def cost(world: World, *events: e.Event) -> int:
    """Return what it costs to take events in, to conclude, and to say when to look again."""
    return lines_run(lambda: (transact(world.job, events, world.now), next_deadline(world.job)))


def spare_of(world: World) -> str:
    return next(node_id for node_id in world.job.nodes if node_id not in world.job.members)


def images(world: World, node_id: str) -> e.Event:
    """Two images for each worker."""
    member, shards = world.job.members[node_id], world.session.shards if world.session else 1
    held = tuple(
        ImageReport(step, member.first_rank + i, shards, world.job.view.world_size // shards, 1)  # type: ignore[union-attr]
        for i in range(member.workers)
        for step in (6, 7)
    )
    return e.ImagesReported(node_id=node_id, incarnation=world.life(node_id), images=held)


def step_times(world: World, node_id: str) -> e.Event:
    times = (e.StepTime(0, 0.1, 5), e.StepTime(1, 0.1, 5))
    return e.StepTimesReported(node_id=node_id, incarnation=world.life(node_id), view=1, step_times=times)


EVENTS: dict[str, Callable[[World], list[e.Event]]] = {
    "nothing": lambda world: [],
    "a spare's link breaks": lambda world: [world.broke(spare_of(world))],
    "a member's link breaks and comes back": lambda world: [world.broke("n3"), world.hello("n3", bulk_port=7)],
    "a spare is lost": lambda world: [world.silent(spare_of(world))],
    "a spare comes": lambda world: [world.hello("late")],
    "a store is offered": lambda world: [
        e.StoreOffered(node_id="n3", incarnation=world.life("n3"), port=world.port()),
    ],
    "a spare parks fewer": lambda world: [world.parked(spare_of(world), 1)],
    "a node's images": lambda world: [images(world, "n3")],
    "a node's step times": lambda world: [step_times(world, "n3")],
    "a node does not move": lambda world: [world.stalled("n3", 7, 7)],
    "a report of an old view": lambda world: [world.stumbled("n3", view=0)],
}
SESSIONS = {
    "no session": lambda nodes: None,
    "the whole state": lambda nodes: e.SessionInfo(),
    "shards": lambda nodes: e.SessionInfo(shard_map=ShardMap(2 * nodes), replicas=1),
}


@pytest.mark.parametrize("session", list(SESSIONS))
@pytest.mark.parametrize("event", list(EVENTS))
def test_an_event_costs_the_same_however_many_nodes_there_are(event: str, session: str) -> None:
    few, many = (training(nodes, SESSIONS[session](nodes)) for nodes in (FEW, MANY))
    for world in (few, many):
        world.now += 1.0
    assert cost(many, *EVENTS[event](many)) <= MORE * cost(few, *EVENTS[event](few))


@pytest.mark.parametrize("session", list(SESSIONS))
def test_a_node_that_joins_costs_the_same_however_many_there_are(session: str) -> None:
    found = []
    for nodes in (FEW, MANY):
        world = World(nodes=(nodes, nodes + 9), workers=2, session=SESSIONS[session](nodes))
        world.do(*(world.hello(f"n{number}") for number in range(nodes - 2)))
        found.append([cost(world, world.hello("late")), cost(world, world.hello("last")), cost(world)])
    assert all(many <= MORE * few for few, many in zip(*found, strict=True))


@pytest.mark.parametrize("session", [name for name in SESSIONS if name != "no session"])
def test_a_node_that_comes_into_a_view_costs_the_same_however_many_there_are(session: str) -> None:
    """The first to come finds out how the state is sharded; the last completes the view."""
    found = []
    for nodes in (FEW, MANY):
        world = training(nodes, SESSIONS[session](nodes))
        world.now += 1.0
        world.do(world.failed("n5"))
        assert world.view_number == 2
        world.do(world.settled("n0"), world.settled("n1"))
        found.append([cost(world, world.settled(f"n{number}")) for number in range(2, 8)])
    assert all(many <= MORE * few for few, many in zip(*found, strict=True))


@pytest.mark.parametrize("session", list(SESSIONS))
def test_a_view_costs_as_much_as_there_are_nodes(session: str) -> None:
    found = []
    for nodes in (FEW, MANY):
        world = training(nodes, SESSIONS[session](nodes))
        world.now += 1.0
        found.append(cost(world, world.failed("n5")))
        assert world.view_number == 2, "no view was formed"
    assert found[1] <= MORE_OF_A_VIEW * found[0]
