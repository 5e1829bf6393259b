"""Faults in bursts and jobs with spares: what is lost one after another is replaced as long as somebody stands by."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.core import records as r
from holdfast.core.events import SessionInfo, WorkerFailed
from holdfast.core.faults.failures import Exited, Signalled
from holdfast.core.faults.fault_table import typed
from holdfast.core.health.reputation import Grade, Reputation
from holdfast.core.strategies import Strategy
from support.world import World, only

KILLED = Signalled(9, "SIGKILL")
FIXED = SessionInfo(resizable=False, why_fixed="each rank has a meter")


def names(count: int, first: int = 0) -> list[str]:
    return [f"n{i:02}" for i in range(first, first + count)]


def standing_by(members: int, spares: int, session: SessionInfo, *, nodes_min: int = 0, **more: Any) -> World:
    """A job at work beside nodes whose workers are all parked."""
    settings = {"workers": 1, "restarts": 0, "spare_nodes": spares} | more
    world = World(nodes=(nodes_min or members, members), session=session, **settings).train(*names(members))
    world.do(*(world.hello(node_id) for node_id in names(spares, members)))
    world.do(*(world.parked(node_id, world.workers) for node_id in names(spares, members)))
    return world


def decided(world: World) -> r.IncidentDecided:
    return [record for record in world.history if isinstance(record, r.IncidentDecided)][-1]


def raises(world: World, node_id: str, message: str) -> WorkerFailed:
    failed = world.failed(node_id, end=Exited(1), exception="OSError")
    return replace(failed, failure=replace(failed.failure, message=message))


# --- one after another


@pytest.mark.parametrize("session", [SessionInfo(), FIXED], ids=["elastic", "fixed"])
@pytest.mark.parametrize("echoes", [False, True])
def test_a_burst_of_lost_nodes_is_survived_while_others_stand_by(session: SessionInfo, echoes: bool) -> None:
    world = standing_by(30, 20, session)
    for node_id in names(14):  # each before the recovery from the one before has committed a step
        world.start_all()
        if echoes:  # all others notice first, and are told to try again
            world.do(*(world.settled(m) for m in world.members))
            world.do(*(world.stumbled(m) for m in world.members))
        world.do(world.broke(node_id))
        world.wait(5.0)
        assert not world.finished and decided(world).strategy is Strategy.RECOVER, decided(world).why
    world.prove()
    assert len(world.members) == 30 and world.job.incidents.current is None


def test_a_burst_of_killed_workers_is_survived_in_place() -> None:
    world = standing_by(10, 0, FIXED)
    for node_id in names(9):
        world.start_all()
        world.do(world.failed(node_id, end=KILLED))
        assert decided(world).strategy is Strategy.RECOVER_IN_PLACE
    world.prove()


def test_one_worker_that_is_killed_again_and_again_is_given_up() -> None:
    world = standing_by(3, 0, SessionInfo(), nodes_min=2)
    chosen = []
    for _ in range(4):
        world.start_all()
        world.do(world.failed("n01", end=KILLED))
        chosen.append(decided(world).strategy)
    assert chosen == [Strategy.RECOVER_IN_PLACE] * 3 + [Strategy.ELASTIC_TRAINING]


def test_one_failure_that_goes_from_rank_to_rank_is_one_failure() -> None:
    world = standing_by(6, 0, FIXED)
    chosen = []
    for number, node_id in enumerate(names(4)):
        world.start_all()
        world.do(raises(world, node_id, f"no space left, error {number}"))
        chosen.append(decided(world).strategy)
    assert chosen == [Strategy.RECOVER_IN_PLACE] * 3 + [Strategy.DUMP]


def test_a_node_that_is_lost_again_and_again_is_given_up() -> None:
    world = standing_by(2, 0, FIXED)
    for _ in range(3):
        former = world.life("n01")
        world.next_life("n01")
        world.do(world.hello("n01", dead_incarnations=[former]))
        assert world.job.incidents.current and decided(world).strategy is Strategy.RECOVER
        world.start_all()
    former = world.life("n01")
    world.next_life("n01")
    world.do(world.hello("n01", dead_incarnations=[former]))
    assert decided(world).strategy is Strategy.DUMP


def test_a_rung_that_did_not_help_is_not_climbed_by_another_name() -> None:
    """Where a node is lost beside, `recover` makes new processes on the others too: not for what those did not cure."""
    world = standing_by(3, 1, FIXED)
    world.do(world.failed("n00", end=Exited(3)))
    assert decided(world).strategy is Strategy.RECOVER_IN_PLACE
    world.start_all()
    world.do(world.broke("n02"), world.failed("n00", end=Exited(3)))
    world.wait(1.0)
    assert "n00" not in world.members, decided(world).why


def test_both_are_replaced_where_enough_stand_by() -> None:
    world = standing_by(3, 2, FIXED)
    world.do(world.failed("n00", end=Exited(3)))
    world.start_all()
    world.do(world.broke("n02"), world.failed("n00", end=Exited(3)))
    world.wait(1.0)
    assert world.members == ["n03", "n01", "n04"] or world.members == ["n04", "n01", "n03"]


# --- who takes over


def test_a_parked_spare_goes_before_the_cold_next_life_of_a_node_that_has_just_died() -> None:
    world = standing_by(2, 1, SessionInfo(), workers=2)
    former = world.life("n01")
    world.next_life("n01")
    world.do(world.hello("n01", dead_incarnations=[former]))
    world.wait(1.0)
    assert world.members == ["n00", "n02"]


def test_the_next_life_of_a_node_goes_before_a_cold_spare() -> None:
    world = standing_by(2, 1, SessionInfo(), workers=2)
    world.do(world.parked("n02", 0))
    former = world.life("n01")
    world.next_life("n01")
    world.do(world.hello("n01", dead_incarnations=[former]))
    world.wait(1.0)
    assert world.members == ["n00", "n01"]


def test_a_node_that_comes_back_keeps_its_rank_though_it_could_take_another() -> None:
    world = World(nodes=(2, 3), workers=1, session=SessionInfo(), spare_nodes=2)
    world.do(world.hello("a", workers=2), world.hello("b", workers=1), world.hello("c", workers=1))
    world.wait(1.0)
    world.prove()
    ranks = {m.node_id: m.group_rank for m in world.job.members.values()}
    world.do(world.hello("y", workers=1))
    world.do(world.parked("y", 1))
    former = world.life("b")
    world.next_life("b")
    world.do(world.broke("a"), world.hello("b", workers=2, dead_incarnations=[former]))
    world.wait(1.0)
    after = {m.node_id: m.group_rank for m in world.job.members.values()}
    assert after["b"] == ranks["b"], f"{ranks} -> {after}: {decided(world).why}"


def test_a_large_spare_is_kept_for_the_member_that_needs_it() -> None:
    world = World(nodes=(3, 3), workers=1, session=FIXED, spare_nodes=2)
    world.do(world.hello("a", workers=1), world.hello("b", workers=2), world.hello("c", workers=1))
    world.wait(1.0)
    world.prove()
    world.do(world.hello("y", workers=2), world.hello("z", workers=1))
    world.do(world.broke("a"), world.broke("b"))
    world.wait(1.0)
    assert decided(world).strategy is Strategy.RECOVER
    assert {m.node_id: m.workers for m in world.job.members.values()} == {"z": 1, "y": 2, "c": 1}


def test_with_too_few_left_those_that_stand_by_fill_the_minimum() -> None:
    world = standing_by(4, 1, SessionInfo(), nodes_min=3)
    world.do(world.broke("n02"), world.broke("n03"))
    world.wait(1.0)
    assert world.members == ["n00", "n01", "n04"], decided(world).why
    assert decided(world).strategy is Strategy.ELASTIC_TRAINING
    world.prove()


# --- connections of those that stand by


def test_a_spare_whose_connection_broke_does_not_hold_up_a_recovery() -> None:
    world = standing_by(2, 1, SessionInfo())
    world.do(world.broke("n02"))
    world.do(world.failed("n00", end=KILLED))
    assert world.view_number == 2


def test_a_spare_that_died_with_the_master_does_not_hold_up_a_recovery() -> None:
    world = standing_by(2, 1, SessionInfo())
    world.restart_master()
    world.do(world.hello("n00"), world.hello("n01"))
    world.do(world.failed("n00", end=KILLED))
    assert world.view_number == 2


def test_a_spare_that_is_needed_has_a_blink_to_come_back() -> None:
    world = standing_by(2, 1, FIXED)
    world.do(world.broke("n01"))
    world.now += 0.25
    world.do(world.broke("n02"))
    world.wait(0.1)
    assert world.view_number == 1, "the survivor would have to give up"
    world.do(world.hello("n02", parked=1))
    assert world.members == ["n00", "n02"]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_spare_that_does_not_come_back_is_not_waited_for_any_longer(is_restarted: bool) -> None:
    world = standing_by(2, 1, SessionInfo(), nodes_min=1)
    if is_restarted:
        world.restart_master()
        world.do(world.hello("n00"), world.hello("n01"))
    else:
        world.do(world.broke("n02"))
    world.do(world.silent("n01"))
    assert world.view_number == 1, "with the spare the job would go on at its size"
    world.wait((world.settings.silence_timeout_s if is_restarted else world.settings.reconnect_grace_s) + 0.01)
    assert world.members == ["n00"]


def test_a_change_by_plan_is_not_held_up_by_a_spare_whose_link_flaps() -> None:
    world = standing_by(3, 2, SessionInfo(), nodes_min=2)
    world.do(world.broke("n03"))
    world.do(world.leaving("n01"))
    assert world.members == ["n00", "n04", "n02"]


def test_without_another_it_waits_for_the_spare_for_a_blink() -> None:
    world = standing_by(3, 1, SessionInfo(), nodes_min=2)
    world.do(world.broke("n03"))
    world.do(world.leaving("n01"))
    assert world.view_number == 1
    world.wait(world.settings.reconnect_grace_s + 0.01)
    assert world.members == ["n00", "n02"]


# --- machines of bad reputation

BANNED = Reputation(Grade.BANNED, "it keeps failing")


def test_a_node_of_bad_reputation_is_taken_before_the_job_is_given_up() -> None:
    world = World(nodes=(2, 2), session=SessionInfo(), spare_nodes=1).train("a", "b")
    world.do(replace(world.hello("c"), reputation=BANNED))
    world.do(world.broke("b"))
    world.wait(2.0)
    assert world.members == ["a", "c"] and only(world.history, r.NodeAdmitted).node_id == "c"


def test_it_is_not_taken_while_another_stands_by() -> None:
    world = World(nodes=(2, 2), session=SessionInfo(), spare_nodes=2).train("a", "b")
    world.do(replace(world.hello("c"), reputation=BANNED), world.hello("d"))
    world.do(world.broke("b"))
    world.wait(2.0)
    assert world.members == ["a", "d"] and not [x for x in world.history if isinstance(x, r.NodeAdmitted)]


def test_it_is_not_taken_where_it_would_be_of_no_use() -> None:
    world = World(nodes=(3, 3), session=FIXED, spare_nodes=1, restarts=0).train("a", "b", "c")
    world.do(replace(world.hello("d"), reputation=BANNED))
    world.do(world.broke("b"), world.broke("c"))
    world.wait(2.0)
    assert not [x for x in world.history if isinstance(x, r.NodeAdmitted)]
    assert decided(world).strategy is Strategy.DUMP


# --- what waiting for a newcomer costs


def test_a_newcomer_that_is_not_ready_is_waited_for_as_long_as_its_time_is_worth() -> None:
    """Taken in as it is, all others wait for it at the step boundary: of 99 nodes that is 99 times its own time."""
    world = World(nodes=(90, 100), session=SessionInfo()).train(*names(99))
    world.do(world.hello("late"))
    world.wait(98 * world.settings.park_timeout_s)
    assert "late" not in world.members
    world.do(world.parked("late", 1))
    assert "late" in world.members, "ready, it costs nobody anything"


def test_one_that_never_gets_ready_is_taken_in_the_end() -> None:
    world = World(nodes=(90, 100), session=SessionInfo()).train(*names(99))
    world.do(world.hello("late"))
    world.wait(99 * world.settings.park_timeout_s + 1.0)
    assert "late" in world.members


def test_nodes_that_come_back_one_by_one_do_not_restart_everybody_each_time() -> None:
    world = World(nodes=(80, 100), restarts=3)
    world.careful = False
    world.run(*names(90))
    for node_id in names(10, 90):
        world.do(world.hello(node_id))
        world.wait(1.0)
        world.start_all()
        world.wait(360.0)
    assert 2 <= world.view_number <= 4, f"{world.view_number - 1} restarts of 90 nodes within an hour"
    world.wait(3_600.0)
    assert len(world.members) == 100 and world.view_number <= 5


@pytest.mark.parametrize("came", [1, 6])
def test_what_is_much_of_the_job_is_taken_in_at_once(came: int) -> None:
    members = 16 * came
    world = World(nodes=(1, members + came), restarts=3).run(*names(members))
    world.do(*(world.hello(node_id) for node_id in names(came, members)))
    world.wait(1.0)
    assert len(world.members) == members + came


# --- bans that run out


def banned(until: float) -> Reputation:
    return Reputation(Grade.BANNED, "it keeps failing", until)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_ban_that_has_run_out_keeps_nobody_out(is_restarted: bool) -> None:
    world = World(nodes=(1, 3), session=SessionInfo()).train("a", "b")
    reputation = banned(world.now + 3_600.0)
    world.do(replace(world.hello("c"), reputation=reputation))
    world.do(world.parked("c", 1))
    world.wait(3_500.0)
    assert "c" not in world.members
    if is_restarted:
        world.restart_master()
        world.do(world.hello("a"), world.hello("b"), replace(world.hello("c", parked=1), reputation=reputation))
    world.wait(200.0)
    assert "c" in world.members and only(world.history, r.NodeReputationChanged).reputation.grade is Grade.PROBATION


def test_without_a_session_too() -> None:
    world = World(nodes=(1, 2), restarts=0).run("a")
    world.do(replace(world.hello("b"), reputation=banned(world.now + 60.0)))
    world.wait(59.0)
    assert world.members == ["a"]
    world.wait(2.0)
    assert world.members == ["a", "b"]


def test_a_node_that_is_gone_by_then_is_no_news() -> None:
    world = World(nodes=(1, 2), restarts=0).run("a")
    world.do(replace(world.hello("b"), reputation=banned(world.now + 60.0)))
    world.do(world.leaving("b"), world.gone("b"))
    world.wait(100.0)
    assert not [record for record in world.history if isinstance(record, r.NodeReputationChanged)]


def test_a_machine_that_was_let_back_takes_part_when_its_node_connects_again() -> None:
    world = World(nodes=(1, 2), restarts=0).run("a")
    world.do(replace(world.hello("b"), reputation=Reputation(Grade.CORDONED, "by a person")))
    world.do(world.broke("b"))
    world.do(world.hello("b"))
    world.wait(1.0)
    assert world.members == ["a", "b"]


def test_what_is_heard_of_a_machine_at_work_is_for_the_next_time_that_it_joins() -> None:
    world = World(nodes=(1, 2), restarts=0).run("a", "b")
    world.do(world.broke("b"))
    world.do(replace(world.hello("b"), reputation=banned(world.now + 60.0)))
    assert world.job.nodes["b"].reputation.grade is Grade.GOOD


# --- clocks


@pytest.mark.parametrize("skew_s", [-2.0, 0.0, 2.0, 3_600.0])
def test_one_attempt_that_fails_on_two_ranks_is_no_bug_whatever_the_nodes_clocks_say(skew_s: float) -> None:
    world = World(nodes=(3, 3), session=SessionInfo()).train("a", "b", "c")

    def boom(node_id: str, failed_at: float) -> WorkerFailed:
        event = world.failed(node_id, exception="ValueError", failed_at=failed_at)
        failure = typed(replace(event.failure, step=7, message="transient", pid=ord(node_id)))
        return replace(event, failure=failure)

    at = world.now
    world.do(boom("a", at))
    assert world.view_number == 2
    world.now += 0.05
    world.do(boom("b", at + skew_s))  # in the same attempt; its process took longer to end
    assert decided(world).strategy is not Strategy.DUMP, decided(world).why
    world.settle_all()
    world.do(boom("c", at + skew_s))
    assert decided(world).strategy is Strategy.DUMP and "is a bug" in decided(world).why
