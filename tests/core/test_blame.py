"""Whose fault it is: bugs stop the job, nodes to blame leave it within limits, everybody's faults are nobody's."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.core import orders as o
from holdfast.core import records as r
from holdfast.core.blame import doubtful_nodes
from holdfast.core.events import Hello, SessionInfo, WorkerFailed
from holdfast.core.faults.failures import Exited
from holdfast.core.faults.fault_table import typed
from holdfast.core.health.reputation import Grade, Reputation
from holdfast.core.strategies import FailoverStrategy, Strategy, Verdict
from support.world import World, only

DRIVER, INFOROM = 201, 14
BANNED = Reputation(Grade.BANNED, "it keeps failing")
PROBATION = Reputation(Grade.PROBATION, "it is back since an hour")


def fails(world: World, node_id: str, code: int = 1, local_rank: int = 0, **more: Any) -> WorkerFailed:
    """A worker fails as its agent would report it: typed."""
    event = world.failed(node_id, local_rank, end=Exited(code))
    return msgspec.structs.replace(event, failure=typed(msgspec.structs.replace(event.failure, **more)))


def raises(world: World, node_id: str, step: int, message: str = "bad sample 17") -> WorkerFailed:
    more: dict[str, Any] = {
        "exception": "ValueError",
        "message": message,
        "step": step,
        "failed_at": world.now,
        "pid": int(world.now),
    }
    return fails(world, node_id, **more)


def training(*node_ids: str, nodes: tuple[int, int] = (1, 2), **settings: Any) -> World:
    return World(nodes=nodes, session=SessionInfo(), restarts=3, **settings).train(*node_ids)


def why_now(world: World) -> str:
    assert world.job.incidents.current is not None
    return world.job.incidents.current.why


def decided(world: World) -> list[Strategy]:
    return [record.strategy for record in world.history if isinstance(record, r.IncidentDecided)]


def cordoned(world: World) -> list[tuple[str, bool]]:
    return [(c.node_id, c.lasting) for c in world.history if isinstance(c, r.NodeCordoned)]


# --- the script's


def test_the_same_exception_at_the_same_step_twice_stops_the_job_with_restarts_left() -> None:
    world = training("a", "b")
    world.do(raises(world, "b", 7))
    assert decided(world) == [Strategy.RECOVER_IN_PLACE]
    world.now += 1
    world.settle_all()
    world.do(raises(world, "b", 7, "bad sample 18"))  # numbers may differ
    assert decided(world)[1:] == [Strategy.DUMP]
    assert "step 7 twice is a bug" in why_now(world)
    assert world.job.incidents.restarts_used == 0


def test_without_a_dump_it_ends_with_the_cause() -> None:
    world = training("a", "b", recovery=(Strategy.RECOVER_IN_PLACE, Strategy.ELASTIC_TRAINING, Strategy.EXIT))
    world.do(raises(world, "b", 7))
    world.now += 1
    world.settle_all()
    world.do(raises(world, "a", 7))  # another rank: the sample moved, the bug did not
    assert world.finished and world.finished.exit_code == 1 and "is a bug" in world.finished.why
    assert world.finished.cause and world.finished.cause.exception == "ValueError"


@pytest.mark.parametrize(("step", "message"), [(8, "bad sample 17"), (7, "something else")])
def test_another_step_or_another_error_is_no_bug_yet(step: int, message: str) -> None:
    world = training("a", "b")
    world.do(raises(world, "b", 7))
    world.now += 1
    world.prove()
    world.do(raises(world, "b", step, message))
    assert decided(world)[1:] == [Strategy.RECOVER_IN_PLACE]


def test_two_ranks_that_raise_it_in_one_attempt_are_one_occurrence() -> None:
    world = training("a", "b")
    late = raises(world, "a", 7)
    world.now += 0.2
    world.do(raises(world, "b", 7))
    late = msgspec.structs.replace(late, view=2, failure=msgspec.structs.replace(late.failure, view=2))
    world.do(late)  # its process took longer to end, and is reported under the view that came meanwhile
    assert not world.finished and Strategy.DUMP not in decided(world)


def test_what_a_fault_forbids_is_not_tried() -> None:
    world = training("a", "b")
    world.do(fails(world, "b", exception="SyntaxError", message="invalid syntax"))
    assert decided(world) == [Strategy.DUMP]
    world = World(nodes=(1, 2), restarts=3).run("a", "b")
    world.do(fails(world, "b", exception="SyntaxError", message="invalid syntax"))
    assert world.finished and "a restart would not help (script-broken)" in world.finished.why


@pytest.mark.parametrize("is_session", [True, False])
def test_a_script_that_a_session_refuses_ends_the_job_at_once(is_session: bool) -> None:
    text = "nothing is tracked: name the model and the optimizer in job.track(…)"
    world = training("a", "b") if is_session else World(nodes=(1, 2), restarts=3).run("a", "b")
    world.do(fails(world, "b", exception="holdfast.errors.ScriptError", message=text))
    assert decided(world) == [Strategy.EXIT]
    assert world.finished and world.finished.exit_code == 1 and text in world.finished.why
    other = training("a", "b")
    other.do(fails(other, "b", exception="click.exceptions.ScriptError", message=text))
    assert decided(other) == [Strategy.RECOVER_IN_PLACE]


@pytest.mark.parametrize(("restarts", "strategy"), [(1, Strategy.RESTART), (0, Strategy.EXIT)])
def test_replicas_that_differ_without_a_majority_start_anew_whichever_is_heard_first(
    restarts: int, strategy: Strategy
) -> None:
    text = "before step 12 the parameters of ranks 0-1 differ, and none of them has a majority"
    for late in (False, True):
        world = World(nodes=(2, 2), session=SessionInfo(), restarts=restarts).train("a", "b")
        both = [fails(world, node_id, exception="CorruptionError", message=text) for node_id in ("a", "b")]
        world.do(*(both[:1] if late else both))
        assert decided(world) == [strategy]


# --- a node's


def test_a_node_to_blame_leaves_and_costs_no_restart() -> None:
    world = World(nodes=(1, 2), restarts=1).run("a", "b")
    world.do(fails(world, "b", DRIVER))
    assert cordoned(world) == [("b", False)]
    assert world.members == ["a"] and world.job.incidents.restarts_used == 0
    order = world.order_to("b")
    assert isinstance(order, o.Hold) and order.leaving


def test_online_a_spare_node_takes_the_place_of_one_to_blame_not_a_process_on_it() -> None:
    world = training("a", "b", nodes=(1, 2), spare_nodes=1)
    world.do(world.hello("c"), world.parked("b", 1))
    world.do(fails(world, "b", INFOROM))
    assert cordoned(world) == [("b", True)]
    assert decided(world) == [Strategy.RECOVER] and world.members == ["a", "c"]


def test_never_below_the_minimum() -> None:
    world = training("a", "b", nodes=(2, 2))
    world.do(fails(world, "b", INFOROM))
    assert not cordoned(world) and decided(world) == [Strategy.RECOVER_IN_PLACE]
    assert "b is not evicted though at fault" in why_now(world)


def test_not_more_than_the_limit_within_a_day() -> None:
    world = World(nodes=(1, 4), restarts=5, cordon_limit=1).run("a", "b", "c", "d")
    world.do(fails(world, "b", DRIVER))
    world.start_all()
    world.now += 100
    world.do(fails(world, "c", INFOROM))
    assert cordoned(world) == [("b", False)]
    assert "--cordon-limit" in [x for x in world.history if isinstance(x, r.IncidentDecided)][-1].why
    world.start_all()
    world.now += 86_400
    world.do(fails(world, "d", INFOROM))
    assert cordoned(world) == [("b", False), ("d", True)]


@pytest.mark.parametrize(
    ("settings", "evicted"), [({}, 5), ({"cordon_share": 0.02}, 7), ({"cordon_limit": 2, "cordon_share": 0.0}, 2)]
)
def test_the_limit_grows_with_the_job(settings: dict[str, Any], evicted: int) -> None:
    """At 12,500 nodes there are 50 to 80 faults a day, of which a quarter is the machines'."""
    world = World(nodes=(400, 500), session=SessionInfo(), spare_nodes=10, **settings)
    world.careful = False
    node_ids = [f"m{number:03}" for number in range(500)]
    world.train(*node_ids)
    for node_id in node_ids[:7]:
        world.do(fails(world, node_id, INFOROM))
        world.prove()
        world.wait(3_600.0)
    assert len(cordoned(world)) == evicted


def test_the_monitor_may_blame_a_node_or_pardon_it() -> None:
    world = World(nodes=(1, 2), restarts=1).run("a", "b")
    world.do(fails(world, "b", 3, verdict=Verdict.CORDON))
    assert cordoned(world) == [("b", True)] and world.job.incidents.restarts_used == 0
    world = World(nodes=(1, 2), restarts=1).run("a", "b")
    world.do(fails(world, "b", INFOROM, verdict=Verdict.PARDON))
    assert not cordoned(world) and world.job.incidents.restarts_used == 1


def test_the_failover_extension_is_not_limited() -> None:
    world = World(nodes=(2, 2), restarts=1, cordon_limit=0).run("a", "b")
    world.do(fails(world, "b", 3, advice=FailoverStrategy.NODE_FAILOVER))
    assert cordoned(world) == [("b", False)] and world.gathering


# --- everybody's


def test_the_same_fault_on_two_machines_at_once_is_not_hardware() -> None:
    world = World(nodes=(1, 3), restarts=1).run("a", "b", "c")
    world.do(fails(world, "b", DRIVER), fails(world, "c", DRIVER))
    assert not cordoned(world) and world.members == ["a", "b", "c"]


def test_who_was_sent_away_a_moment_before_is_cleared() -> None:
    world = World(nodes=(1, 3), restarts=1).run("a", "b", "c")
    world.do(fails(world, "b", INFOROM))
    world.start_all()
    world.now += 20
    cleared = only(world.do(fails(world, "c", INFOROM)).records, r.NodeCleared)
    assert cordoned(world) == [("b", True)] and (cleared.node_id, cleared.machine) == ("b", "host-b")


def test_of_two_evictions_of_a_node_the_one_concerned_is_cleared() -> None:
    world = World(nodes=(1, 3), restarts=3).run("a", "b", "c")
    world.do(fails(world, "b", INFOROM))
    world.do(world.gone("b"))
    world.next_life("b")
    world.do(world.hello("b"))
    world.wait(world.settings.settle_s)
    world.start_all()
    world.now += 100
    world.do(fails(world, "b", DRIVER))
    world.start_all()
    world.now += 10
    cleared = only(world.do(fails(world, "c", DRIVER)).records, r.NodeCleared)
    assert (cleared.incarnation, cleared.fault) == ("b.2", "driver-error")
    assert world.job.incidents.cleared == {"b.2"}, "its first fault was its own"
    assert cordoned(world) == [("b", True), ("b", False)]


def test_later_it_is_hardware_again() -> None:
    world = World(nodes=(1, 3), restarts=1).run("a", "b", "c")
    world.do(fails(world, "b", INFOROM))
    world.start_all()
    world.now += 31
    world.do(fails(world, "c", INFOROM))
    assert cordoned(world) == [("b", True), ("c", True)]


def test_two_agents_of_one_machine_are_one_machine() -> None:
    world = World(nodes=(1, 3), restarts=1)
    world.do(world.hello("a"), world.hello("b", machine="twin"), world.hello("c", machine="twin"))
    world.start_all()
    world.do(fails(world, "b", INFOROM), fails(world, "c", INFOROM))
    assert cordoned(world) == [("b", True), ("c", True)]


# --- who gets ranks


def known(world: World, node_id: str, reputation: Reputation) -> Hello:
    return msgspec.structs.replace(world.hello(node_id), reputation=reputation)


def test_good_machines_get_ranks_first() -> None:
    world = World(nodes=(1, 2), spare_nodes=1)
    world.do(known(world, "a", PROBATION), world.hello("b"), world.hello("c"))
    assert world.members == ["b", "c"]
    assert doubtful_nodes(world.job) == {"a"}


def test_a_banned_machine_stands_by_and_is_told_why() -> None:
    world = World(nodes=(1, 2))
    world.do(known(world, "a", BANNED), world.hello("b"))
    world.wait(1)
    assert world.members == ["b"]
    order = world.order_to("a")
    assert isinstance(order, o.Hold) and "holdfast nodes uncordon host-a" in order.why and "keeps failing" in order.why


CORDONED = Reputation(Grade.CORDONED, "cordoned by ada: its fan is loud")


@pytest.mark.parametrize(("reputation", "spare_nodes"), [(BANNED, 1), (CORDONED, 0)])
def test_it_is_taken_when_the_time_is_up_and_nobody_else_came(reputation: Reputation, spare_nodes: int) -> None:
    world = World(nodes=(2, 2), join_timeout_s=60.0, spare_nodes=spare_nodes)
    world.do(known(world, "a", reputation), world.hello("b"))
    world.wait(59)
    assert world.gathering
    admitted = only(world.wait(2), r.NodeAdmitted)
    assert admitted.node_id == "a" and world.members == ["a", "b"]


def test_a_banned_one_is_taken_at_once_if_nobody_else_may_come() -> None:
    world = World(nodes=(1, 1))
    world.do(known(world, "a", BANNED))
    world.wait(1)
    assert world.members == ["a"]


def test_it_is_of_no_use_if_it_would_not_be_enough() -> None:
    world = World(nodes=(3, 3), join_timeout_s=60.0)
    world.do(known(world, "a", BANNED), world.hello("b"))
    world.wait(61)
    assert world.finished and world.finished.exit_code == 3


def test_a_node_with_a_fault_of_its_own_is_doubtful() -> None:
    world = World(nodes=(2, 2), restarts=1).run("a", "b")
    world.do(fails(world, "b", DRIVER))
    assert doubtful_nodes(world.job) == {"b"}
