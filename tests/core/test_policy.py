"""The policy: views, budgets, incidents, and how a job ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.core import events as e
from holdfast.core import orders as o
from holdfast.core import records as r
from holdfast.core.faults.failures import Signalled
from holdfast.core.policy import conclude, next_deadline
from support.world import World, only, tags

# --- gathering


def test_a_view_is_formed_at_once_when_the_maximum_is_there() -> None:
    world = World(nodes=(1, 2))
    world.do(world.hello("a"))
    assert world.gathering
    world.do(world.hello("b"))
    assert world.serving and world.members == ["a", "b"]


def test_a_view_is_formed_once_the_minimum_has_settled() -> None:
    world = World(nodes=(2, 4))
    world.do(world.hello("a"))
    world.wait(30.0)
    world.do(world.hello("b"))
    world.wait(0.25)
    world.do(world.hello("c"))
    world.wait(0.2)
    assert world.gathering, "a further node does not cut the settling time"
    world.wait(0.1)
    assert world.members == ["a", "b", "c"], "a further node does not extend it either"


def test_all_ranks_are_told_where_to_meet() -> None:
    world = World(workers=2).gather("a", "b")
    serve = {n: world.order_to(n) for n in "ab"}
    assert serve["b"] == o.Serve(
        view=1,
        job_id="job",
        group_rank=1,
        group_world_size=2,
        first_rank=2,
        world_size=4,
        role_first_rank=2,
        role_world_size=4,
        store_host="10.0.0.a",
        store_port=29_001,
        store_here=False,
        restart_count=0,
        restarts_max=3,
        workers=2,
        node_sizes=((2, 2),),
        keeps_workers=False,
        planned=False,
        strategy=None,
        replaced=(),
        spares=0,
        session=None,
        run=f"{int(world.job.created_at * 1e6):x}",
    )
    assert isinstance(serve["a"], o.Serve) and serve["a"].store_here


def test_the_store_is_on_the_lowest_rank_that_has_one() -> None:
    world = World()
    world.do(world.hello("a", store_port=0), world.hello("b"))
    assert world.job.view and world.job.view.store_node_id == "b"


def test_a_view_waits_for_a_store() -> None:
    world = World()
    world.do(world.hello("a", store_port=0), world.hello("b", store_port=0))
    world.wait(5.0)
    assert world.gathering
    world.do(world.offered("b"))
    assert world.serving


def test_gathering_is_given_up_in_time() -> None:
    world = World(nodes=(2, 2), join_timeout_s=60.0)
    world.do(world.hello("a"))
    world.wait(59.0)
    assert world.gathering
    world.wait(1.0)
    assert world.finished and world.finished.outcome is r.Outcome.FAILED and world.finished.exit_code == 3
    assert "waited 60 s for 2 nodes, 1 joined" in world.finished.why and "--nnodes" in world.finished.why
    assert isinstance(world.order_to("a"), o.Exit)


def test_gathering_is_given_up_though_nobody_ever_came() -> None:
    world = World(join_timeout_s=60.0)
    world.wait(60.0)
    assert world.finished and world.finished.exit_code == 3


def test_a_minimum_that_came_in_time_may_settle_past_the_time_out() -> None:
    world = World(nodes=(2, 4), join_timeout_s=60.0)
    world.do(world.hello("a"))
    world.wait(59.9)
    world.do(world.hello("b"))
    world.wait(1.0)
    assert world.serving


def test_gathering_is_given_up_when_no_store_is_ever_offered() -> None:
    world = World(join_timeout_s=60.0)
    world.do(world.hello("a", store_port=0), world.hello("b", store_port=0))
    world.wait(60.0)
    assert world.finished and world.finished.exit_code == 3 and "store" in world.finished.why


def test_a_view_is_not_formed_while_a_verdict_is_out() -> None:
    world = World(nodes=(1, 2))
    world.do(world.hello("a"), world.broke("a"))
    world.do(world.hello("b"), world.hello("c"))
    assert world.wait(0.29) == []
    world.wait(0.02)
    assert world.members == ["b", "c"]


def test_the_time_out_does_not_cut_short_a_verdict() -> None:
    world = World(nodes=(2, 2), join_timeout_s=60.0)
    world.do(world.hello("a"))
    world.wait(59.9)
    world.do(world.hello("b"), world.broke("b"))
    world.wait(0.2)
    assert world.do().records == []
    world.do(world.hello("b"))
    assert world.serving


# --- blame: what counts against the restarts


def lose(world: World, node_id: str) -> list[r.Record]:
    world.do(world.broke(node_id))
    return world.wait(0.3)


BLAME: dict[str, tuple[Callable[[World], object], int]] = {
    "a worker that failed by itself": (lambda w: w.do(w.failed("b")), 1),
    "two workers at once, as one": (lambda w: w.do(w.failed("a"), w.failed("b")), 1),
    "a failure with its collateral": (lambda w: w.do(w.failed("a", collateral=True), w.failed("b")), 1),
    "collateral whose cause nobody can name": (lambda w: (w.do(w.failed("a", collateral=True)), w.wait(0.5)), 1),
    "a failure and a lost node": (lambda w: (w.do(w.broke("c"), w.failed("b")), w.wait(0.3)), 1),
    "a lost node": (lambda w: lose(w, "b"), 0),
    "a silent node": (lambda w: w.do(w.silent("b")), 0),
    "a lost node's collateral": (lambda w: (w.do(w.failed("a", collateral=True)), lose(w, "b")), 0),
    "a lost node's late collateral": (lambda w: (lose(w, "b"), w.do(w.failed("a", view=1, collateral=True))), 0),
    "a node that leaves": (lambda w: w.do(w.leaving("b")), 0),
    "a leaving node's collateral": (lambda w: w.do(w.failed("a", collateral=True), w.leaving("b")), 0),
    "a node that joins": (lambda w: w.do(w.hello("d")), 0),
    "the next life of a node": (lambda w: w.do(w.hello("b", life="b.2", dead_incarnations=["b.1"])), 0),
}


@pytest.mark.parametrize("what", BLAME)
def test_what_counts_as_a_restart(what: str) -> None:
    happens, counted = BLAME[what]
    world = World(nodes=(1, 4)).run("a", "b", "c")
    happens(world)
    assert (world.job.incidents.restarts_used, world.view_number) == (counted, 2)
    decided = only(world.history, r.IncidentDecided)
    assert decided.counted == bool(counted) and decided.why
    assert world.job.view and world.job.view.restart_count == counted


def test_collateral_alone_waits_for_its_cause_but_no_longer_than_the_window() -> None:
    world = World().run("a", "b")
    assert tags(world.do(world.failed("a", collateral=True)).records) == ["worker-failed", "incident-opened"]
    assert world.wait(0.49) == []
    assert tags(world.wait(0.02)) == ["incident-decided", "view-formed"]


def test_the_window_begins_with_the_first_collateral_error() -> None:
    world = World().run("a", "b")
    world.do(world.failed("a", collateral=True))
    world.wait(0.4)
    world.do(world.failed("b", collateral=True))
    world.wait(0.15)
    assert world.view_number == 2


def test_the_window_ends_when_the_cause_is_known() -> None:
    world = World().run("a", "b")
    world.do(world.failed("a", collateral=True))
    world.wait(0.1)
    world.do(world.failed("b"))
    assert world.view_number == 2
    assert only(world.start_all(), r.IncidentClosed).cause == "rank 1 on b exited with code 1"


def test_a_node_killed_with_its_neighbours_errors_heard_first_is_the_cause() -> None:
    world = World(nodes=(1, 2)).run("a", "b")
    world.do(world.failed("a", collateral=True))
    world.wait(0.1)
    world.do(world.broke("b"))
    assert world.wait(0.29) == [], "the window is over later, the verdict not yet"
    world.wait(0.02)
    closed = only(world.start_all(), r.IncidentClosed)
    assert (closed.kind, closed.cause) == (
        "node",
        "node b was lost: its connection closed and was not restored within 0.3 s",
    )
    assert (closed.collateral, closed.restarts_used) == (1, 0)


def test_the_last_restart_is_used_and_not_one_more() -> None:
    world = World(restarts=2).run("a", "b")
    for used in (1, 2):
        world.do(world.failed("a"))
        assert world.job.incidents.restarts_used == used
        world.start_all()
    world.do(world.failed("b", end=Signalled(11, "SIGSEGV")))
    assert world.finished and world.finished.outcome is r.Outcome.FAILED and world.finished.exit_code == 1
    assert world.finished.cause and world.finished.cause.rank == 1
    assert world.finished.why == "rank 1 on b killed by SIGSEGV; all restarts are used up (--max-restarts 2)"
    assert world.job.incidents.restarts_used == 2
    assert all(isinstance(world.order_to(n), o.Exit) for n in "ab")


def test_without_restarts_the_first_failure_ends_the_job_but_a_lost_node_does_not() -> None:
    world = World(nodes=(1, 2), restarts=0).run("a", "b")
    lose(world, "b")
    assert world.serving
    world.start_all()
    world.do(world.failed("a"))
    assert world.finished and "no restart is allowed (--max-restarts 0)" in world.finished.why


def test_the_cause_of_the_end_is_the_root_cause() -> None:
    world = World(restarts=0).run("a", "b")
    world.do(world.failed("a", collateral=True, failed_at=1.0), world.failed("b", failed_at=2.0))
    assert world.finished and world.finished.cause and world.finished.cause.node_id == "b"


def test_too_few_nodes_are_waited_for() -> None:
    world = World(nodes=(2, 2)).run("a", "b")
    lose(world, "b")
    assert world.gathering and only(world.history, r.IncidentDecided).strategy is r.Strategy.WAIT
    assert world.order_to("a") == o.Hold(job_id="job", why="1 of at least 2 nodes left")
    world.wait(300.0)
    world.next_life("b")
    world.do(world.hello("b"))
    assert world.members == ["a", "b"]
    assert only(world.start_all(), r.IncidentClosed).strategy is r.Strategy.WAIT


def test_waiting_for_nodes_ends_after_the_join_time_out_counted_anew() -> None:
    world = World(nodes=(2, 2), join_timeout_s=60.0).run("a", "b")
    world.wait(1_000.0)
    lose(world, "b")
    world.wait(59.0)
    assert world.gathering
    world.wait(1.0)
    assert world.finished and world.finished.exit_code == 3


# --- incidents


def test_an_incident_is_one_story_from_the_failure_to_all_workers_running() -> None:
    world = World().run("a", "b")
    happened = world.now
    world.wait(0.1)
    records = world.do(world.failed("a", failed_at=happened)).records
    assert tags(records) == ["worker-failed", "incident-opened", "incident-decided", "view-formed"]
    detected = world.now
    world.wait(2.0)
    assert tags(world.do(world.started("a")).records) == ["workers-started"]
    closed = only(world.do(world.started("b")).records, r.IncidentClosed)
    assert (closed.happened_at, closed.detected_at, closed.decided_at, closed.rebuilt_at, closed.at) == (
        happened,
        detected,
        detected,
        detected,
        world.now,
    )
    assert (closed.view_before, closed.view_after, closed.restarts_used) == (1, 2, 1)
    assert world.job.incidents.current is None and world.job.incidents.closed == [closed]


def test_a_fault_during_a_recovery_is_the_same_incident() -> None:
    world = World(nodes=(1, 3)).run("a", "b", "c")
    world.do(world.failed("a"))
    world.do(world.offered("a"), world.started("a"), world.started("b"))
    lose(world, "c")
    assert (world.view_number, world.members) == (3, ["a", "b"])
    world.do(world.failed("b"))
    assert (world.view_number, world.job.incidents.restarts_used) == (4, 2)
    closed = only(world.start_all(), r.IncidentClosed)
    assert (closed.number, closed.view_before, closed.view_after) == (1, 1, 4)
    assert closed.cause == "rank 0 on a exited with code 1", "the first failure stays the cause"


def test_a_lost_node_stays_the_cause_when_another_one_leaves_during_the_recovery() -> None:
    world = World(nodes=(1, 3)).run("a", "b", "c")
    lose(world, "c")
    world.do(world.offered("a"))
    formed = only(world.do(world.leaving("b")).records, r.ViewFormed)
    assert formed.why == "node b is leaving: told to stop"
    closed = only(world.start_all(), r.IncidentClosed)
    assert closed.kind == "node" and closed.cause.startswith("node c was lost")


def test_a_failure_during_a_planned_change_makes_it_an_accident() -> None:
    world = World(nodes=(1, 2)).run("a")
    world.do(world.hello("b"))
    world.do(world.failed("b"))
    closed = only(world.start_all(), r.IncidentClosed)
    assert (closed.kind, closed.cause) == ("worker", "rank 1 on b exited with code 1")


def test_a_fault_after_a_recovery_is_another_incident() -> None:
    world = World().run("a", "b")
    world.do(world.failed("a"))
    world.start_all()
    world.do(world.failed("a"))
    world.start_all()
    assert [i.number for i in world.job.incidents.closed] == [1, 2]


def test_two_nodes_lost_at_once_are_one_incident_and_one_view() -> None:
    world = World(nodes=(1, 4)).run("a", "b", "c", "d")
    world.do(world.broke("b"))
    world.wait(0.2)
    world.do(world.broke("c"))
    world.wait(0.3)
    assert (world.view_number, world.members) == (2, ["a", "d"])
    assert world.job.incidents.opened == 1


def test_a_worker_that_cannot_be_rebuilt_for_want_of_a_store_is_waited_for_within_bounds() -> None:
    world = World(nodes=(1, 1), join_timeout_s=60.0).gather("a")
    world.do(world.failed("a"))
    assert world.view_number == 1, "its store serves the view that is over"
    world.wait(1.0)
    world.do(world.offered("a"))
    assert world.view_number == 2
    world.do(world.failed("a"))
    world.wait(60.0)
    assert world.finished and world.finished.exit_code == 3 and "store" in world.finished.why


def test_failures_while_waiting_for_a_store_are_not_counted_again() -> None:
    world = World(nodes=(1, 1), workers=2).gather("a")
    world.do(world.failed("a", 0))
    world.do(world.failed("a", 1))
    world.do(world.offered("a"))
    assert (world.view_number, world.job.incidents.restarts_used) == (2, 1)


def without_an_offer(world: World) -> World:
    """Let both nodes run, and nobody have a store for the next view."""
    world.do(world.hello("a"), world.hello("b", store_port=0))
    world.wait(world.settings.settle_s)
    world.do(world.started("a"), world.started("b"))
    return world


def a_leaving_node_that_is_done() -> tuple[World, e.Event]:
    world = without_an_offer(World(nodes=(1, 2)))
    world.do(world.leaving("b"))
    world.do(world.succeeded("b"))
    return world, world.failed("a")


def a_stall_that_passes() -> tuple[World, e.Event]:
    world = without_an_offer(World(session=e.SessionInfo()))
    world.do(world.stalled("a", 5), world.stalled("b", 5))
    world.do(world.moved("a"))
    return world, world.failed("b")


def a_leaving_node_while_another_is_in_doubt() -> tuple[World, e.Event]:
    world = without_an_offer(World(nodes=(1, 2), session=e.SessionInfo(resizable=False)))
    world.do(world.settled("a"), world.settled("b"), world.committed("a"))
    world.do(world.leaving("b"))
    world.do(world.broke("a"))
    return world, world.hello("a", store_port=0)


PASSING = [a_leaving_node_that_is_done, a_stall_that_passes, a_leaving_node_while_another_is_in_doubt]


@pytest.mark.parametrize("story", PASSING)
def test_what_passes_before_there_is_a_store_is_not_decided(story: Callable[[], tuple[World, e.Event]]) -> None:
    world, lasting = story()
    assert world.job.incidents.current is None and world.job.incidents.restarts_used == 0, "nothing was done about it"
    world.do(lasting)
    assert world.view_number == 1
    world.do(world.offered("a"))
    decided = only(world.history, r.IncidentDecided)
    assert (decided.view, world.view_number, world.job.incidents.restarts_used) == (1, 2, decided.counted)


def asked_to_leave(world: World) -> None:
    world.do(world.leaving("b"))


def left(world: World) -> None:
    world.do(world.gone("b"))


def fell_silent(world: World) -> None:
    world.do(world.silent("b"))


def came_back(world: World) -> None:
    dead = world.life("b")
    world.next_life("b")
    world.do(world.hello("b", store_port=0, dead_incarnations=[dead]))


@pytest.mark.parametrize("change", [asked_to_leave, left, fell_silent, came_back])
def test_a_store_is_waited_for_from_the_moment_it_is_needed(change: Callable[[World], None]) -> None:
    world = without_an_offer(World(nodes=(1, 2), join_timeout_s=60.0))
    world.do(world.offered("a"))
    world.do(world.failed("a"))
    world.do(world.started("a"))
    assert world.view_number == 2 and world.job.incidents.current, "the recovery is not over"
    world.wait(100.0)
    change(world)
    world.wait(59.0)
    assert world.serving and world.view_number == 2
    world.wait(1.0)
    assert world.finished and "no node offered a port for the workers' store within 60 s" in world.finished.why


# --- membership


def test_a_newcomer_is_taken_in_at_once_when_it_fills_the_job() -> None:
    world = World(nodes=(1, 2)).run("a")
    records = world.do(world.hello("b")).records
    assert world.members == ["a", "b"]
    assert only(records, r.IncidentOpened).kind == "planned"
    assert only(records, r.IncidentDecided).cause == "node b joined"


def test_newcomers_are_gathered_for_the_settling_time() -> None:
    world = World(nodes=(1, 4)).run("a")
    world.do(world.hello("b"))
    world.wait(0.4)
    world.do(world.hello("c"))
    assert world.view_number == 1
    world.wait(0.1)
    assert (world.view_number, world.members) == (2, ["a", "b", "c"])


def test_a_newcomer_waits_for_the_end_of_a_recovery() -> None:
    world = World(nodes=(1, 3)).run("a", "b")
    world.do(world.failed("a"))
    world.do(world.hello("c"))
    assert world.wait(10.0) == []
    assert tags(world.start_all())[-4:] == [
        "incident-closed",
        "incident-opened",
        "incident-decided",
        "view-formed",
    ]
    assert world.members == ["a", "b", "c"]


def test_a_newcomer_waits_for_verdicts_and_nothing_is_begun_in_vain() -> None:
    world = World(nodes=(1, 3)).run("a", "b")
    world.do(world.broke("b"))
    world.do(world.hello("c"))
    world.wait(0.2)
    assert world.job.incidents.current is None
    world.do(world.broke("c"))
    world.do(world.hello("b"))
    world.wait(1.0)
    assert (world.view_number, world.job.incidents.opened) == (1, 0)


def test_a_node_beyond_the_maximum_stands_by() -> None:
    world = World(nodes=(2, 2)).run("a", "b")
    world.do(world.hello("c"))
    assert world.view_number == 1 and next_deadline(world.job) is None
    assert world.order_to("c") == o.Hold(job_id="job", why="standing by: the job runs on 2 nodes")


def test_a_standby_replaces_a_lost_member_in_its_place() -> None:
    world = World(nodes=(3, 3)).run("a", "b", "c")
    world.do(world.hello("d"), world.hello("e"))
    lose(world, "b")
    assert (world.view_number, world.members) == (2, ["a", "d", "c"])
    assert only(world.history, r.IncidentDecided).strategy is r.Strategy.RESTART


def test_a_node_that_comes_back_finds_its_rank() -> None:
    world = World(nodes=(3, 3)).run("a", "b", "c")
    lose(world, "a")
    world.next_life("a")
    world.do(world.hello("a"))
    assert world.members == ["a", "b", "c"]


def test_a_node_whose_workers_have_all_succeeded_may_go_without_a_restart() -> None:
    world = World(nodes=(1, 2)).run("a", "b")
    world.do(world.succeeded("a"))
    world.do(world.broke("a"))
    world.wait(0.3)
    assert world.serving and world.view_number == 1 and world.job.incidents.current is None
    world.do(world.succeeded("b"))
    assert world.finished and world.finished.outcome is r.Outcome.SUCCEEDED


def test_no_growth_once_a_worker_has_finished() -> None:
    world = World(nodes=(1, 3), workers=2).run("a", "b")
    world.do(world.succeeded("a", 0))
    world.do(world.hello("c"))
    assert world.wait(60.0) == []
    assert world.view_number == 1
    world.do(world.succeeded("a", 1), world.succeeded("b", 0), world.succeeded("b", 1))
    assert world.finished and isinstance(world.order_to("c"), o.Exit)


def test_a_newcomer_that_goes_before_it_was_taken_in_is_not_missed() -> None:
    world = World(nodes=(1, 4)).run("a")
    world.do(world.hello("b"))
    world.do(world.leaving("b"), world.gone("b"))
    assert world.wait(10.0) == [] and world.view_number == 1


def test_a_newcomer_waits_for_a_store() -> None:
    world = World(nodes=(1, 2)).gather("a")
    world.do(world.started("a"))
    world.do(world.hello("b", store_port=0))
    world.wait(700.0)
    assert (world.view_number, world.serving) == (1, True), "a healthy job is not ended for want of growth"
    world.do(world.offered("b"))
    assert world.view_number == 2


def test_nodes_of_different_sizes_and_roles_keep_their_own() -> None:
    world = World(nodes=(3, 3))
    world.do(
        world.hello("a", workers=4, role="trainer"),
        world.hello("b", workers=1, role="reader"),
        world.hello("c", workers=2, role="trainer", requested_rank=0),
    )
    assert world.members == ["c", "a", "b"] and world.job.view and world.job.view.world_size == 7
    serve = world.order_to("a")
    assert isinstance(serve, o.Serve)
    assert (serve.first_rank, serve.role_first_rank, serve.role_world_size) == (2, 2, 6)


# --- leaving


def test_one_node_of_two_is_told_to_go() -> None:
    world = World(nodes=(1, 2)).run("a", "b")
    records = world.do(world.leaving("a")).records
    assert tags(records) == ["node-draining", "incident-opened", "incident-decided", "view-formed"]
    assert world.members == ["b"] and world.job.incidents.restarts_used == 0
    assert isinstance(world.order_to("a"), o.Hold)
    assert only(world.start_all(), r.IncidentClosed).kind == "planned"
    assert tags(world.do(world.gone("a")).records) == ["node-left"]
    assert world.serving


def test_the_errors_that_a_leaving_node_causes_do_not_make_it_an_accident() -> None:
    world = World(nodes=(1, 2)).run("a", "b")
    world.do(world.failed("a", collateral=True), world.leaving("b"))
    closed = only(world.start_all(), r.IncidentClosed)
    assert (closed.kind, closed.cause, closed.collateral) == ("planned", "node b is leaving: told to stop", 1)


def test_the_only_node_is_told_to_go() -> None:
    world = World(nodes=(1, 1)).run("a")
    world.do(world.leaving("a"))
    assert world.gathering and isinstance(world.order_to("a"), o.Hold)
    world.do(world.gone("a"))
    assert world.finished and world.finished.outcome is r.Outcome.STOPPED and world.finished.exit_code == 143


def test_a_node_that_was_told_to_go_and_vanished_has_left() -> None:
    world = World(nodes=(1, 1)).run("a")
    world.do(world.leaving("a", signal=2))
    lose(world, "a")
    assert world.finished and world.finished.outcome is r.Outcome.STOPPED and world.finished.exit_code == 130


def test_all_nodes_are_told_to_go_one_after_the_other() -> None:
    world = World(nodes=(1, 2)).run("a", "b")
    for node_id in "ab":
        world.do(world.leaving(node_id))
    for node_id in "ab":
        world.do(world.gone(node_id))
    assert world.finished and (world.finished.outcome, world.finished.exit_code) == (r.Outcome.STOPPED, 143)


def test_the_exit_code_is_that_of_the_last_to_go() -> None:
    world = World(nodes=(1, 2)).run("a", "b")
    world.do(world.leaving("a", signal=15), world.gone("a"))
    world.wait(60.0)
    world.do(world.leaving("b", signal=2), world.gone("b"))
    assert world.finished and world.finished.exit_code == 130


def test_a_lost_node_is_waited_for_though_another_one_once_left_by_request() -> None:
    world = World(nodes=(1, 2)).run("a", "b")
    world.do(world.leaving("a"), world.gone("a"))
    world.start_all()
    world.wait(3_600.0)
    lose(world, "b")
    assert world.gathering
    world.next_life("b")
    world.do(world.hello("b"))
    world.wait(0.5)
    assert world.members == ["b"]


def test_a_goodbye_without_a_signal_stops_the_job_without_a_signals_code() -> None:
    world = World(nodes=(1, 1)).run("a")
    world.do(world.gone("a"))
    assert world.finished and (world.finished.outcome, world.finished.exit_code) == (r.Outcome.STOPPED, 1)


def test_a_draining_node_holds_nobody_up() -> None:
    world = World(nodes=(1, 2)).run("a", "b")
    world.do(world.leaving("a"))
    world.start_all()
    world.do(world.broke("a"))
    world.do(world.failed("b"))
    assert world.view_number == 3, "the verdict about a node on its way out is not waited for"


# --- the end


def test_the_job_succeeds_when_all_workers_have() -> None:
    world = World(workers=2).run("a", "b")
    for node_id in "ab":
        world.do(world.succeeded(node_id, 0))
        assert not world.finished
    world.do(world.succeeded("a", 1))
    world.do(world.succeeded("b", 1))
    assert world.finished and (world.finished.outcome, world.finished.exit_code) == (r.Outcome.SUCCEEDED, 0)
    assert all(isinstance(world.order_to(n), o.Exit) for n in "ab")


def test_success_is_not_spoilt_by_what_happens_in_the_same_breath() -> None:
    world = World().run("a", "b")
    world.do(world.succeeded("a"))
    world.do(world.succeeded("b"), world.leaving("a"))
    assert world.finished and world.finished.exit_code == 0


def test_workers_that_had_finished_run_again_when_another_one_fails() -> None:
    world = World().run("a", "b")
    world.do(world.succeeded("a"))
    world.do(world.failed("b"))
    assert world.view_number == 2 and not world.job.progress.succeeded


def test_a_finished_job_hears_nothing_and_never_wakes() -> None:
    world = World(restarts=0).run("a", "b")
    world.do(world.failed("a"))
    before = world.finished
    world.do(world.succeeded("a"), world.started("b"), world.leaving("b"), world.broke("a"), world.silent("a"))
    assert world.finished == before
    assert next_deadline(world.job) is None and conclude(world.job, world.now + 1e6) is None


# --- a restart of the master, in every phase


def gathering() -> World:
    world = World()
    world.do(world.hello("a"))
    return world


def settling() -> World:
    world = World(nodes=(1, 2))
    world.do(world.hello("a"))
    world.wait(0.2)
    return world


def starting() -> World:
    return World().gather("a", "b")


def running() -> World:
    return World().run("a", "b")


def collecting() -> World:
    world = World().run("a", "b")
    world.do(world.failed("a", collateral=True))
    return world


def without_a_store() -> World:
    world = World(nodes=(1, 1)).gather("a")
    world.do(world.failed("a"))
    return world


def rebuilt() -> World:
    world = World().run("a", "b")
    world.do(world.failed("a"))
    return world


def half_started() -> World:
    world = rebuilt()
    world.do(world.started("a"))
    return world


def waiting() -> World:
    world = World().run("a", "b")
    lose(world, "b")
    return world


def draining() -> World:
    world = World(nodes=(1, 2)).run("a", "b")
    world.do(world.leaving("b"))
    return world


def growing() -> World:
    world = World(nodes=(1, 3)).run("a")
    world.do(world.hello("b"))
    return world


def ending() -> World:
    world = World().run("a", "b")
    world.do(world.succeeded("a"))
    return world


PHASES = [
    gathering,
    settling,
    starting,
    running,
    collecting,
    without_a_store,
    rebuilt,
    half_started,
    waiting,
    draining,
    growing,
    ending,
]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("down_s", [0.0, 1.0, 3_600.0])
def test_a_master_killed_in_any_phase_goes_on_from_its_journal(phase: Callable[[], World], down_s: float) -> None:
    world = phase()
    view, used, term = world.view_number, world.job.incidents.restarts_used, world.job.term
    undecided = phase in (collecting, without_a_store)
    world.restart_master(down_s)
    assert world.job.term == term + 1
    world.reconnect_all()
    if phase is draining:
        world.do(world.gone("b"))
    world.wait(world.settings.settle_s)
    if world.gathering:
        assert phase in (gathering, waiting)
        world.next_life("b")
        world.do(world.hello("b"))
    assert world.serving
    assert world.view_number - view <= 1 and world.job.incidents.restarts_used == used + undecided
    if phase is not ending:
        world.start_all()
    for node_id in world.members:
        world.do(world.succeeded(node_id))
    assert world.finished and world.finished.exit_code == 0


def test_a_running_job_is_not_disturbed_by_a_restart_of_its_master() -> None:
    world = World().run("a", "b")
    told = dict(world.told)
    world.told.clear()
    world.restart_master(down_s=2.0)
    assert tags(world.reconnect_all()) == ["link-restored", "store-offered"] * 2
    assert world.told == told, "each is told to do what it does"


def test_a_node_that_died_with_the_master_is_noticed_by_the_next_one() -> None:
    world = World(nodes=(1, 2)).run("a", "b")
    world.restart_master()
    world.do(world.hello("a"))
    world.do(world.failed("a", collateral=True))
    assert world.wait(4.9) == [], "the verdict about b is out"
    world.wait(0.2)
    assert world.members == ["a"] and world.job.incidents.restarts_used == 0


def test_nodes_are_given_time_to_come_though_gathering_ran_out_without_a_master() -> None:
    world = World(nodes=(1, 1), join_timeout_s=60.0)
    world.restart_master(down_s=120.0)
    world.wait(1.0)
    world.do(world.hello("a"))
    assert world.serving


def test_what_the_journal_does_not_have_did_not_happen() -> None:
    world = World(workers=2).run("a", "b")
    failed = world.failed("a")
    world.lose_batch(failed)
    world.reconnect_all()
    assert (world.view_number, world.job.incidents.restarts_used, world.job.incidents.current) == (1, 0, None)
    world.do(failed)
    assert (world.view_number, world.job.incidents.restarts_used) == (2, 1)
