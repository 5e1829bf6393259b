"""Whom the master names to keep a node's snapshots, from view to view; and that a restarted master names the same."""

from __future__ import annotations

import msgspec

from holdfast.core.events import SessionInfo
from holdfast.core.faults.failures import Exited
from holdfast.core.faults.fault_table import typed
from holdfast.core.orders import Serve
from support.world import World, durable


def joined(world: World, *nodes: str) -> None:
    """The letter is the failure domain."""
    hellos = [world.hello(n, domain=n[0], bulk_port=40_000 + i, workers=2) for i, n in enumerate(nodes, 1)]
    world.do(*hellos)
    world.wait(1.0)


def told(world: World, node_id: str) -> Serve:
    order = world.told[world.life(node_id)]
    assert isinstance(order, Serve)
    return order


def partners(world: World) -> dict[str, str]:
    return {n: "+".join(p.node_id for p in told(world, n).partners) for n in world.members}


def test_each_node_is_told_its_partners_and_whose_replicas_it_holds() -> None:
    world = World(nodes=(2, 4), workers=2)
    joined(world, "a1", "b1", "c1")
    assert partners(world) == {"a1": "b1", "b1": "c1", "c1": "a1"}
    order = told(world, "a1")
    assert [(p.address, p.bulk_port, p.workers) for p in order.partners] == [("10.0.0.b1", 40_002, 2)]
    assert [p.node_id for p in order.replica_owners] == ["c1"] and order.parity == ()


def test_a_partner_that_is_lost_is_replaced_by_the_next() -> None:
    world = World(nodes=(2, 3), workers=2, session=SessionInfo(), spare_nodes=1, recovery=World().settings.recovery)
    joined(world, "a1", "b1", "c1")
    world.prove()
    world.do(world.broke("b1"))
    world.wait(5.0)
    assert partners(world) == {"a1": "c1", "c1": "a1"}
    assert durable(world.replayed()) == durable(world.job)
    world.restart_master()
    world.do(world.hello("a1", domain="a", bulk_port=40_001), world.hello("c1", domain="c", bulk_port=40_003))
    assert partners(world) == {"a1": "c1", "c1": "a1"}, "as before, from the journal alone"


def test_a_node_with_a_fault_of_its_own_that_must_stay_keeps_copies_last() -> None:
    world = World(nodes=(3, 3), workers=2, restarts=1)
    joined(world, "a1", "b1", "c1")
    assert partners(world)["a1"] == "b1"
    event = world.failed("b1", end=Exited(201))
    world.do(msgspec.structs.replace(event, failure=typed(event.failure)))
    assert world.view_number == 2
    assert partners(world) == {"a1": "c1", "b1": "c1", "c1": "a1"}
    assert durable(world.replayed()) == durable(world.job)


def test_as_many_as_were_asked_for_and_none_for_who_has_no_port() -> None:
    world = World(nodes=(4, 4), replicas=2)
    joined(world, "a1", "b1", "c1")
    world.do(world.hello("d1"))
    world.wait(1.0)
    assert partners(world) == {"a1": "b1+c1", "b1": "c1+a1", "c1": "a1+b1", "d1": ""}


def test_with_parity_each_is_told_its_group_instead() -> None:
    world = World(nodes=(6, 6), replica_parity=3)
    joined(world, "a1", "a2", "b1", "b2", "c1", "c2")
    groups = {n: " ".join(p.node_id for p in told(world, n).parity) for n in world.members}
    assert groups["a1"] == groups["b1"] == groups["c1"] == "a1 b1 c1" and groups["a2"] == "a2 b2 c2"
    assert not any(partners(world).values())
    assert durable(world.replayed()) == durable(world.job)
