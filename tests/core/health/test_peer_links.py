"""Links between nodes: when the members are asked about them, and what follows."""

from __future__ import annotations

from typing import Any

from holdfast.core import events as e
from holdfast.core import orders as o
from holdfast.core import records as r
from holdfast.core.health.peer_links import RESTORED_AFTER_S, TIMEOUT_S, neighbours
from holdfast.core.strategies import Strategy
from support.world import World, only, tags

SESSION = e.SessionInfo(resizable=True)


def training(*node_ids: str, least: int = 1, **settings: Any) -> World:
    world = World(nodes=(least, len(node_ids)), session=SESSION, **settings)
    return world.train(*node_ids, bulk_port=7)


def stall(world: World) -> list[r.Record]:
    return world.do(*(world.stalled(node_id, 9) for node_id in world.members)).records


def answer(world: World, broken: set[frozenset[str]]) -> list[r.Record]:
    """Every member answers what it knows."""
    events = [
        world.probed(node_id, *(other for other in world.members if frozenset((node_id, other)) in broken))
        for node_id in world.members
    ]
    return world.do(*events).records


def test_members_are_asked_before_anybody_is_blamed_for_a_stall() -> None:
    world = training("a", "b", "c")
    assert tags(stall(world))[-2:] == ["incident-opened", "link-probe-began"]
    for node_id in "abc":
        order = world.order_to(node_id)
        assert isinstance(order, o.Serve) and order.report_links
        assert {peer.node_id for peer in order.neighbours} == set("abc") - {node_id}


def test_one_end_of_a_broken_link_is_left_out_and_no_worker_is_replaced() -> None:
    world = training("a", "b", "c")
    stall(world)
    records = answer(world, {frozenset("bc")})
    judged = only(records, r.PeerLinksJudged)
    assert judged.links == (("b", "c"),) and judged.left_out == ("c",)
    assert only(records, r.IncidentDecided).strategy is Strategy.ELASTIC_TRAINING
    assert world.members == ["a", "b"] and world.job.view is not None and not world.job.view.replaced
    assert "the link b – c is broken" in only(records, r.IncidentDecided).cause


def test_a_node_that_nobody_reaches_is_the_one_that_is_left_out() -> None:
    world = training("a", "b", "c", "d")
    stall(world)
    answer(world, {frozenset("ab"), frozenset("ac"), frozenset("ad")})
    assert set(world.members) == {"b", "c", "d"}


def test_one_end_that_says_so_is_enough_and_who_is_silent_is_not_waited_for_for_ever() -> None:
    world = training("a", "b", "c")
    stall(world)
    world.do(world.probed("a"), world.probed("b", "c"))
    assert world.members == ["a", "b", "c"], "c has not answered"
    world.wait(TIMEOUT_S)
    assert world.members == ["a", "b"]


def test_where_every_link_works_the_cause_is_looked_for_elsewhere() -> None:
    world = training("a", "b", "c")
    world.do(world.stalled("a", 9), world.stalled("b", 8), world.stalled("c", 9))
    records = answer(world, set())
    assert only(records, r.PeerLinksJudged).links == ()
    assert only(records, r.IncidentDecided).strategy is Strategy.RECOVER_IN_PLACE
    assert world.job.view is not None and world.job.view.replaced == (("b", 0),)


def test_no_end_is_left_out_below_the_minimum_and_nobody_is_blamed() -> None:
    world = training("a", "b", "c", least=3)
    stall(world)
    records = answer(world, {frozenset("bc")})
    judged = only(records, r.PeerLinksJudged)
    assert judged.left_out == () and "2 of at least 3 nodes would remain" in judged.why_kept
    decided = only(records, r.IncidentDecided)
    assert decided.strategy is Strategy.RETRY and "the link b – c is broken" in decided.cause
    assert world.members == ["a", "b", "c"] and world.job.view is not None and not world.job.view.replaced


def test_a_node_stands_by_until_it_reaches_the_others_again_and_longer_each_time() -> None:
    world = training("a", "b", "c")
    for times in (1, 2):
        stall(world)
        answer(world, {frozenset("bc")})
        world.prove(8 + times)
        order = world.order_to("c")
        assert isinstance(order, o.Hold) and order.report_links and len(order.neighbours) == 2
        world.now += RESTORED_AFTER_S * times / 2
        assert not world.do(world.probed("c")).records, "too early"
        world.now += RESTORED_AFTER_S * times
        assert not world.do(world.probed("c", "b")).records, "still broken"
        assert "peer-links-restored" in tags(world.do(world.probed("c")).records)
        world.wait(world.settings.settle_s + 1.0)
        assert world.members == ["a", "b", "c"]
        world.prove(9 + times)


def test_what_is_known_of_links_survives_a_restart_of_the_master() -> None:
    world = training("a", "b", "c")
    stall(world)
    answer(world, {frozenset("bc")})
    world.prove(9)
    world.restart_master()
    world.reconnect_all()
    order = world.order_to("c")
    assert isinstance(order, o.Hold) and order.report_links and world.members == ["a", "b"]


def test_broken_connections_are_retried_once_before_anybody_is_asked() -> None:
    world = training("a", "b", "c")
    records = world.do(*(world.stumbled(node_id) for node_id in world.members)).records
    assert "link-probe-began" not in tags(records)
    world.settle_all()
    records = world.do(*(world.stumbled(node_id) for node_id in world.members)).records
    assert tags(records)[-1] == "link-probe-began"


def test_a_failure_of_a_workers_own_needs_no_other_cause() -> None:
    world = training("a", "b", "c")
    assert "link-probe-began" not in tags(world.do(world.failed("b"), world.stumbled("a")).records)


def test_answers_of_an_earlier_view_and_of_nobody_do_not_count() -> None:
    world = training("a", "b", "c")
    assert not world.do(world.probed("a", "b")).records, "nobody asked"
    stall(world)
    assert not world.do(world.probed("a", "b", view=0)).records
    world.do(world.probed("a", "nobody"), world.probed("b"), world.probed("c"))
    assert only(world.history, r.PeerLinksJudged).links == ()


def test_a_slow_link_is_named_once_and_swapped_if_that_is_the_policy() -> None:
    for action in ("report", "swap"):
        world = World(nodes=(2, 2), session=SESSION, straggler_action=action, spare_nodes=1)
        world.train("a", "b", bulk_port=7)
        world.do(world.hello("c", bulk_port=7))
        slowed = e.PeerLinkSlowed(
            node_id="a", incarnation=world.life("a"), view=1, peer="b", taken_s=0.4, usual_s=0.001
        )
        records = world.do(slowed).records
        assert tags(records)[0] == "peer-link-slowed"
        assert ("node-draining" in tags(records)) == (action == "swap")
        assert not any(isinstance(record, r.PeerLinkSlowedRecord) for record in world.do(slowed).records)


def test_in_a_large_job_each_node_probes_a_few_and_each_is_probed_by_as_many() -> None:
    names = [f"n{number:03}" for number in range(100)]
    world = training(*names)
    probed = [m.node_id for node in world.job.nodes.values() for m in neighbours(world.job, node)]
    assert len(probed) == 800 and all(probed.count(name) == 8 for name in names)


def joining(world: World, stalled_s: float = 5.0) -> list[r.Record]:
    """All wait for one another on their way into a view."""
    return world.do(*(world.stalled(n, 9, joining=True, stalled_s=stalled_s) for n in world.members)).records


def test_a_link_that_breaks_while_a_view_is_joined_is_looked_for_at_once() -> None:
    world = training("a", "b", "c")
    world.do(world.failed("b"))
    world.start_all()
    number = world.job.view.number if world.job.view else 0
    assert "link-probe-began" in tags(joining(world))
    assert world.job.view is not None and world.job.view.number == number, "the others may only be slow"
    answer(world, {frozenset("bc")})
    assert world.members == ["a", "b"]


def test_a_view_whose_links_all_work_may_be_joined_slowly() -> None:
    world = training("a", "b", "c")
    world.do(world.failed("b"))
    world.start_all()
    joining(world)
    records = answer(world, set())
    assert only(records, r.PeerLinksJudged).links == () and "incident-decided" not in tags(records)
    records = joining(world, stalled_s=world.settings.joining_stall_s)
    assert only(records, r.IncidentDecided).strategy is Strategy.RETRY


def test_a_node_that_does_not_answer_is_not_waited_for_while_a_view_is_joined() -> None:
    world = training("a", "b", "c")
    world.do(world.failed("b"))
    world.start_all()
    joining(world)
    world.do(world.probed("b", "c"))
    world.wait(TIMEOUT_S)
    assert world.members == ["a", "b"]


def test_what_was_found_while_a_view_was_joined_does_not_count_for_a_later_stall() -> None:
    world = training("a", "b", "c")
    world.do(world.failed("b"))
    world.start_all()
    joining(world)
    answer(world, set())
    world.do(*(world.moved(node_id) for node_id in "abc"))
    world.settle_all()
    world.prove(9)
    world.wait(3600.0)
    assert "link-probe-began" in tags(stall(world))
    answer(world, {frozenset("bc")})
    assert world.members == ["a", "b"]
