"""From events to facts: who may have an id, and what is not heard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from holdfast.core import events as e
from holdfast.core import orders as o
from holdfast.core import records as r
from holdfast.core import transact as core_transact
from holdfast.core.decide import decide
from holdfast.core.policy import next_deadline
from holdfast.core.settings import RECONNECT_S
from holdfast.core.state import Left, Linked, Lost, Unlinked
from support.world import World, durable, only, tags

# --- who may have an id: the table at the head of decide.py, row by row


def knock(world: World, node_id: str = "b", **hello: Any) -> list[r.Record]:
    """The next life of a node says hello."""
    life = world.next_life(node_id)
    return world.do(world.hello(node_id, life=life, **hello)).records


def refusal(records: list[r.Record]) -> r.NodeRefused:
    refused: r.NodeRefused = only(records, r.NodeRefused)
    assert not any(isinstance(record, r.NodeJoined) for record in records), "refused and taken in"
    return refused


def taken_in(records: list[r.Record]) -> bool:
    return any(isinstance(record, r.NodeJoined) for record in records)


def test_an_unknown_id_is_taken_in() -> None:
    world = World()
    assert tags(world.do(world.hello("a")).records) == ["node-joined", "store-offered"]
    assert isinstance(world.order_to("a"), o.Hold)


def test_a_node_told_to_go_before_it_joined_is_never_part_of_a_view() -> None:
    """It says so with its first words: between two messages a view could be formed with it."""
    world = World(nodes=(1, 2)).run("a")
    hello = msgspec.structs.replace(world.hello("b"), leaving=15)
    assert tags(world.do(hello).records) == ["node-joined", "node-draining"]
    assert isinstance(world.order_to("b"), o.Hold)
    assert world.wait(60) == []


def test_the_same_life_has_its_connection_restored_and_is_told_again_what_to_do() -> None:
    world = World().run("a", "b")
    told = world.order_to("b")
    world.do(world.broke("b"))
    world.told.clear()
    assert tags(world.do(world.hello("b")).records) == ["link-restored", "store-offered"]
    assert world.order_to("b") == told
    assert world.wait(60) == []


def test_a_life_that_was_declared_lost_must_rejoin() -> None:
    world = World(nodes=(1, 2)).run("a", "b")
    world.do(world.silent("b"))
    refused = refusal(world.do(world.hello("b")).records)
    assert refused.rejoin and refused.retry_after_s == 0.0
    assert "no heartbeat for 5.0 s" in refused.why
    assert taken_in(knock(world, dead_incarnations=["b.1"]))


def test_a_life_that_left_must_rejoin_too() -> None:
    world = World(nodes=(1, 2)).run("a", "b")
    world.do(world.leaving("b"), world.gone("b"))
    assert refusal(world.do(world.hello("b")).records).rejoin


def test_an_id_whose_life_left_is_free_at_once() -> None:
    world = World(nodes=(1, 2)).run("a", "b")
    world.do(world.leaving("b"), world.gone("b"))
    assert taken_in(knock(world))


def test_an_id_whose_life_is_certainly_dead_is_free_at_once() -> None:
    world = World(nodes=(1, 2)).run("a", "b")
    world.do(world.broke("b"))
    world.wait(0.3)
    assert world.job.nodes["b"].standing == Lost(
        at=world.now, certain=True, since=world.now - 0.3, why="its connection closed and was not restored within 0.3 s"
    )
    assert taken_in(knock(world))


def test_an_id_that_is_alive_and_connected_is_refused_for_good() -> None:
    world = World().run("a", "b")
    refused = refusal(knock(world, pid=2000))
    assert refused.retry_after_s is None and not refused.rejoin
    assert "process 1000 on host-b" in refused.why and "--node-id" in refused.why
    assert (refused.holder, refused.holder_pid, refused.holder_machine_id) == ("b.1", 1000, "machine-b")
    assert isinstance(world.told["b.2"], o.Refuse), "the newcomer is told, not the one who was there"
    assert isinstance(world.told["b.1"], o.Serve)


def test_an_id_that_is_alive_and_connected_is_free_if_the_newcomer_saw_it_dead() -> None:
    world = World().run("a", "b")
    records = knock(world, dead_incarnations=["b.0", "b.1"])
    assert tags(records)[:2] == ["node-lost", "node-joined"]
    assert only(records, r.NodeLost).certain


def test_an_id_that_is_alive_and_connected_is_free_after_a_reboot_of_its_machine() -> None:
    world = World().run("a", "b")
    assert taken_in(knock(world, boot_id="boot-2"))


def test_another_boot_of_another_machine_proves_nothing() -> None:
    world = World().run("a", "b")
    assert refusal(knock(world, boot_id="boot-2", machine_id="machine-c")).retry_after_s is None


def test_an_id_whose_connection_just_broke_is_refused_until_the_verdict() -> None:
    world = World(nodes=(1, 2)).run("a", "b")
    world.do(world.broke("b"))
    world.wait(0.1)
    assert refusal(knock(world)).retry_after_s == pytest.approx(0.2)
    world.wait(0.2)
    assert taken_in(knock(world))


def test_a_late_driver_never_asks_a_newcomer_to_wait_a_negative_time() -> None:
    world = World(nodes=(1, 2)).run("a", "b")
    world.do(world.broke("b"))
    world.now += 7.0
    assert refusal(knock(world)).retry_after_s == 0.0


def test_a_broken_connection_is_forgiven_to_a_newcomer_who_saw_the_old_life_dead() -> None:
    world = World(nodes=(1, 2)).run("a", "b")
    world.do(world.broke("b"))
    assert taken_in(knock(world, dead_incarnations=["b.1"]))


def test_an_id_that_fell_silent_is_refused_until_the_guard_window_is_over() -> None:
    world = World(nodes=(1, 2)).run("a", "b")
    world.do(world.silent("b"))
    world.wait(10.0)
    assert refusal(knock(world)).retry_after_s == pytest.approx(20.0)
    world.wait(19.9)
    assert refusal(knock(world)).retry_after_s == pytest.approx(0.1)
    world.wait(0.2)
    assert taken_in(knock(world))


EARLY_ENDS: dict[str, dict[str, Any]] = {
    "the process was seen dead": {"dead_incarnations": ["b.1"]},
    "the machine was rebooted": {"boot_id": "boot-2"},
}


@pytest.mark.parametrize("proof", EARLY_ENDS)
def test_the_guard_window_ends_early_when(proof: str) -> None:
    world = World(nodes=(1, 2)).run("a", "b")
    world.do(world.silent("b"))
    assert taken_in(knock(world, **EARLY_ENDS[proof]))


def test_a_life_that_did_not_come_back_to_a_restarted_master_is_guarded_too() -> None:
    world = World(nodes=(1, 2)).run("a", "b")
    world.restart_master()
    world.do(world.hello("a"))
    lost = only(world.wait(5.0), r.NodeLost)
    assert not lost.certain and "restarted master" in lost.why
    assert refusal(knock(world)).retry_after_s == pytest.approx(30.0)


def test_a_draining_life_that_is_seen_dead_has_left() -> None:
    world = World(nodes=(1, 2)).run("a", "b")
    world.do(world.leaving("b"))
    assert taken_in(knock(world, dead_incarnations=["b.1"]))
    other = World(nodes=(1, 2)).run("a", "b")
    other.do(other.leaving("b"), other.broke("b"))
    other.wait(0.3)
    assert other.job.nodes["b"].standing == Left(at=other.now, signal=15)


# --- who is refused for what it was told


def spec(**changes: Any) -> e.JobSpec:
    told = e.JobSpec(run_id="job", nodes_min=2, nodes_max=2, restarts_max=3)
    return msgspec.structs.replace(told, **changes)


MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "another job": ({"spec": spec(run_id="other")}, "--rdzv-id"),
    "another size": ({"spec": spec(nodes_max=3)}, "--nnodes 2:3"),
    "another number of restarts": ({"spec": spec(restarts_max=0)}, "--max-restarts 0"),
    "no workers": ({"workers": 0}, "--nproc-per-node"),
    "a newer master": ({"term": 9}, "term 9"),
}


@pytest.mark.parametrize("mistake", MISMATCHES)
def test_a_mistaken_agent_is_told_what_to_change(mistake: str) -> None:
    hello, remedy = MISMATCHES[mistake]
    world = World()
    records = world.do(world.hello("a", **hello)).records
    assert tags(records) == ["node-refused"]
    assert remedy in refusal(records).why and refusal(records).retry_after_s is None


def test_an_agent_that_was_told_the_same_is_taken_in() -> None:
    world = World()
    assert taken_in(world.do(world.hello("a", spec=spec())).records)


def test_another_job_that_was_given_the_port_of_a_job_of_one_node_is_refused() -> None:
    """It would stand by, unheard, and end with success when the other job does, without having run."""
    world = World(nodes=(1, 1))
    world.do(world.hello("a"))
    why = refusal(knock(world, "b")).why
    assert "in use by job" in why and "process 1000 on host-a" in why and "--master-port" in why
    assert taken_in(knock(world, "b", spec=spec(run_id="job", nodes_min=1, nodes_max=1)))


def test_an_agent_that_takes_the_place_of_a_dead_one_in_a_job_of_one_node_is_taken_in() -> None:
    world = World(nodes=(1, 1))
    world.do(world.hello("a"))
    world.do(e.LinkBroke(node_id="a", incarnation=world.life("a")))
    assert taken_in(knock(world, "b"))


def test_a_job_of_one_node_with_a_spare_node_takes_it_in() -> None:
    world = World(nodes=(1, 1), spare_nodes=1)
    world.do(world.hello("a"))
    assert taken_in(knock(world, "b"))


def test_a_node_that_was_cut_off_and_comes_back_after_the_end_is_told_how_it_ended() -> None:
    world = World(nodes=(1, 2), restarts=0).run("a", "b")
    world.do(world.broke("b"))
    world.wait(1.0)
    world.start_all()
    world.do(world.succeeded("a"))
    assert world.finished
    world.told.clear()
    world.do(world.hello("b"))
    order = world.order_to("b")
    assert isinstance(order, o.Exit) and (order.exit_code, order.outcome) == (0, r.Outcome.SUCCEEDED)
    world.next_life("b")  # an agent that was started since
    assert "has already succeeded" in refusal(world.do(world.hello("b")).records).why
    assert isinstance(world.order_to("b"), o.Refuse)


def test_nobody_joins_a_job_that_is_over_but_its_nodes_are_told_to_exit() -> None:
    world = World(restarts=0).run("a", "b")
    world.do(world.failed("a"))
    assert "has already failed" in refusal(world.do(world.hello("c")).records).why
    world.told.clear()
    world.restart_master()
    world.do(world.hello("b"))
    order = world.order_to("b")
    assert isinstance(order, o.Exit) and order.exit_code == 1


# --- what is not heard


def everything_from(world: World, node_id: str, life: str, view: int) -> list[e.Event]:
    return [
        world.started(node_id, view=view, life=life),
        world.succeeded(node_id, view=view, life=life),
        world.failed(node_id, view=view, life=life),
        world.offered(node_id, life=life),
        world.leaving(node_id, life=life),
        world.broke(node_id, life=life),
        world.silent(node_id, life=life),
        world.gone(node_id, life=life),
        *session_news(world, node_id, life, view),
        world.parked(node_id, 1, life=life),
    ]


def session_news(world: World, node_id: str, life: str, view: int) -> list[e.Event]:
    return [
        world.settled(node_id, view=view, life=life),
        world.stumbled(node_id, view=view, life=life),
        world.stalled(node_id, 3, view=view, life=life),
        world.waiting(node_id, view=view, life=life),
        world.moved(node_id, view=view, life=life),
        world.committed(node_id, view=view, life=life),
    ]


def assert_unheard(world: World, events: list[e.Event]) -> None:
    before = durable(world.job)
    for event in events:
        assert decide(world.job, event, world.now) == [], event
        assert world.do(event).records == []
    assert durable(world.job) == before


def test_a_former_life_changes_nothing() -> None:
    world = World().run("a", "b")
    knock(world, dead_incarnations=["b.1"])
    assert world.view_number == 2
    assert_unheard(world, everything_from(world, "b", "b.1", 1) + everything_from(world, "b", "b.1", 2))


def test_a_lost_life_changes_nothing_even_before_the_job_went_on_without_it() -> None:
    world = World(nodes=(1, 3)).run("a", "b", "c")
    world.do(world.broke("c"))  # its verdict is out, so nothing is decided yet
    world.do(world.silent("b"))
    assert world.view_number == 1 and world.serving
    assert_unheard(world, everything_from(world, "b", "b.1", 1))


def test_a_stranger_changes_nothing() -> None:
    world = World().run("a", "b")
    assert_unheard(world, everything_from(world, "z", "z.1", 1))


def test_what_workers_of_an_older_view_do_changes_nothing_once_the_incident_is_closed() -> None:
    world = World().run("a", "b")
    world.do(world.failed("a"))
    world.start_all()
    assert world.job.incidents.current is None
    assert_unheard(world, [f(node, view=1) for node in "ab" for f in (world.started, world.succeeded, world.failed)])
    assert_unheard(world, session_news(world, "a", "a.1", 1))


def test_a_view_that_does_not_exist_yet_is_not_heard_of() -> None:
    world = World().run("a", "b")
    assert_unheard(world, [world.started("a", view=2), world.succeeded("a", view=2), world.failed("a", view=2)])
    assert_unheard(world, session_news(world, "a", "a.1", 2))


def test_a_standby_has_nothing_to_say_about_the_view() -> None:
    world = World().run("a", "b")
    world.do(world.hello("c"))
    assert_unheard(world, [world.started("c"), world.succeeded("c"), world.failed("c")])
    assert_unheard(world, session_news(world, "c", "c.1", 1))


TWICE: dict[str, Callable[[World], e.Event]] = {
    "started": lambda w: w.started("a"),
    "succeeded": lambda w: w.succeeded("a"),
    "collateral failure": lambda w: w.failed("a", collateral=True),
    "link broke": lambda w: w.broke("a"),
    "silent": lambda w: w.silent("a"),
    "leaving": lambda w: w.leaving("a"),
    "gone": lambda w: w.gone("a"),
    "settled": lambda w: w.settled("a"),
    "stumbled": lambda w: w.stumbled("a"),
    "stalled": lambda w: w.stalled("a", 3),
    "waiting": lambda w: w.waiting("a"),
    "committed": lambda w: w.committed("a"),
    "parked": lambda w: w.parked("a", 1),
    "drain": lambda w: e.DrainRequested(node_id="a", why="asked to"),
    "resize": lambda w: e.ResizeRequested(nodes=3, why="asked to"),
}


@pytest.mark.parametrize("what", TWICE)
def test_a_repeated_event_changes_nothing(what: str) -> None:
    world = World(nodes=(1, 2)).gather("a", "b")
    event = TWICE[what](world)
    assert world.do(event).records
    assert world.do(event).records == []


def test_a_failure_heard_again_in_the_next_view_is_neither_counted_nor_kept_twice() -> None:
    world = World().run("a", "b")
    failed = world.failed("a")
    world.do(failed)
    assert world.do(failed).records == []
    assert (world.job.incidents.restarts_used, world.view_number) == (1, 2)


def test_a_worker_ends_once() -> None:
    world = World(nodes=(1, 2), workers=2).run("a", "b")
    world.do(world.succeeded("a"))
    assert world.do(world.failed("a")).records == []
    world.do(world.failed("a", 1, collateral=True))
    assert world.do(world.succeeded("a", 1)).records == []


def test_workers_of_a_node_on_its_way_out_are_expected_to_end() -> None:
    world = World(nodes=(1, 2)).run("a", "b")
    world.do(world.leaving("b"))
    assert world.do(world.failed("b", view=1)).records == []


# --- evidence


def test_what_an_old_views_workers_did_is_evidence_for_the_open_incident() -> None:
    world = World(workers=2).run("a", "b")
    world.do(world.failed("a"))
    late = world.do(world.failed("b", 1, view=1, collateral=True)).records
    assert tags(late) == ["worker-failed"] and only(late, r.WorkerFailedRecord).late
    closed = only(world.start_all(), r.IncidentClosed)
    assert closed.collateral == 1 and closed.cause == "rank 0 on a exited with code 1"


@pytest.mark.parametrize("at_once", [1, 70, 100])
def test_of_more_failures_than_are_kept_none_is_counted_twice(at_once: int) -> None:
    """Agents report a failure until the master has it, in the next view too."""
    world = World(nodes=(1, 1), workers=100).run("a")
    reports = [world.failed("a", i, collateral=True, view=1) for i in range(99)]
    reports.append(world.failed("a", 99, view=1))
    world.do(*reports[-at_once:])
    for _ in range(2):
        world.do(*reports)
    assert only(world.start_all(), r.IncidentClosed).collateral == 99
    assert len([record for record in world.history if isinstance(record, r.WorkerFailedRecord)]) == 100


def test_the_cause_may_come_after_the_decision() -> None:
    world = World(workers=2).run("a", "b")
    world.do(world.failed("a", collateral=True))
    world.wait(0.5)
    world.do(world.failed("b", 1, view=1))
    assert only(world.start_all(), r.IncidentClosed).cause == "rank 3 on b exited with code 1"


# --- connections and stores


def test_a_broken_connection_has_its_grace_and_no_more() -> None:
    world = World().run("a", "b")
    world.do(world.broke("b"))
    link = world.job.nodes["b"].link
    assert link == Unlinked(since=world.now, deadline=world.now + 0.3, certain=True)
    world.wait(0.2)
    world.do(world.hello("b"))
    assert world.job.nodes["b"].link == Linked()


def test_a_silent_node_is_lost_at_once_and_perhaps_alive() -> None:
    world = World(nodes=(1, 2)).run("a", "b")
    lost = only(world.do(world.silent("b")).records, r.NodeLost)
    assert not lost.certain


def test_a_store_serves_one_view_only() -> None:
    world = World(nodes=(1, 1)).gather("a")
    assert world.job.view is not None
    port = world.job.view.store_port
    assert world.job.nodes["a"].store_port == 0
    assert world.do(world.offered("a", port)).records == [], "an offer repeated after it was taken up"
    assert tags(world.do(world.hello("a", store_port=port)).records) == ["link-restored"]
    world.do(world.offered("a", port + 1))
    world.do(world.failed("a"))
    assert (world.view_number, world.job.view.store_port) == (2, port + 1)


def test_the_next_life_of_a_node_may_offer_the_same_port() -> None:
    world = World(nodes=(1, 1)).run("a")
    assert world.job.view is not None
    knock(world, "a", dead_incarnations=["a.1"], store_port=world.job.view.store_port)
    assert world.view_number == 2


def test_links_that_break_together_have_longer_to_come_back() -> None:
    """A master that was slow, or a switch: each agent connects again after others."""
    nodes = [f"n{number:03}" for number in range(216)]
    world = World(nodes=(100, 216)).gather(*nodes)
    world.do(*(world.broke(node_id) for node_id in nodes[:116]))
    allowed_s = world.settings.reconnect_grace_s + 100 * RECONNECT_S
    assert next_deadline(world.job) == pytest.approx(world.now + allowed_s)
    world.wait(allowed_s - 0.01)
    assert not any(isinstance(record, r.NodeLost) for record in world.history)
    world.do(*(world.hello(node_id) for node_id in nodes[:115]))
    world.wait(0.01)
    lost = [record.node_id for record in world.history if isinstance(record, r.NodeLost)]
    assert lost == [nodes[115]], "the others are back, and it had its time"


def test_links_that_come_back_one_after_another_are_waited_for() -> None:
    """At the pace that is allowed for, the last of them is as welcome as the first."""
    nodes = [f"n{number:03}" for number in range(216)]
    world = World(nodes=(100, 216)).gather(*nodes)
    world.careful = False
    world.do(*(world.broke(node_id) for node_id in nodes))
    for node_id in nodes:
        world.wait(RECONNECT_S)
        world.do(world.hello(node_id))
    assert not [record for record in world.history if isinstance(record, r.NodeLost)]


def test_one_that_stays_away_is_lost_soon_after_the_last_has_come_back() -> None:
    nodes = [f"n{number:03}" for number in range(216)]
    world = World(nodes=(100, 216)).gather(*nodes)
    world.do(*(world.broke(node_id) for node_id in nodes))
    world.wait(0.2)
    world.do(*(world.hello(node_id) for node_id in nodes[1:]))
    world.wait(world.settings.reconnect_grace_s - 0.01)
    assert not [record for record in world.history if isinstance(record, r.NodeLost)]
    world.wait(0.02)
    assert only(world.history, r.NodeLost).node_id == nodes[0]
    world.do(world.broke(nodes[1]))
    world.wait(world.settings.reconnect_grace_s)
    assert nodes[1] not in world.job.sets.alive, "what was before does not count"


def test_all_nodes_may_be_lost_at_once_at_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each loss is a conclusion of its own: at a hundred thousand nodes that was taken for a policy without an end."""
    monkeypatch.setattr(core_transact, "CONCLUSIONS_MAX", 20)
    nodes = [f"n{number:02}" for number in range(60)]
    world = World(nodes=(1, 60), restarts=3).run(*nodes)
    world.restart_master()
    world.wait(60.0)
    assert len([record for record in world.history if isinstance(record, r.NodeLost)]) == 60


def test_a_few_links_have_the_grace_alone() -> None:
    nodes = [f"n{number:02}" for number in range(20)]
    world = World(nodes=(4, 20)).gather(*nodes)
    world.do(*(world.broke(node_id) for node_id in nodes[:16]))
    world.wait(world.settings.reconnect_grace_s)
    lost = [record for record in world.history if isinstance(record, r.NodeLost)]
    assert len(lost) == 16
