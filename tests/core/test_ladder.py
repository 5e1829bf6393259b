"""The ladder: each rung by itself, and as the fall-back of the one above."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from core.world import World, only
from holdfast.core import orders as o
from holdfast.core import records as r
from holdfast.core.events import DrainAsked, ResizeAsked, SessionInfo
from holdfast.core.faults import Exited, Signalled
from holdfast.core.ladder import LADDER, FailoverStrategy, Strategy
from holdfast.core.views import View

KILLED = Signalled(9, "SIGKILL")
DDP = SessionInfo()
FSDP = SessionInfo(shards=4, replicas=1, resizable=False)
BARE = SessionInfo(shards=4, replicas=0, resizable=False)


def training(*, session: SessionInfo = DDP, nodes: tuple[int, int] = (1, 2), **settings: object) -> World:
    """Two nodes of two workers each, at work."""
    settings = {"workers": 2, "restarts": 0} | settings
    return World(nodes=nodes, session=session, **settings).train("a", "b")


def lose(world: World, node_id: str) -> list[r.Record]:
    world.do(world.broke(node_id))
    return world.wait(0.3)


def kill(world: World, node_id: str, local_rank: int = 0) -> list[r.Record]:
    return world.do(world.failed(node_id, local_rank, end=KILLED)).records


def decided(world: World) -> r.IncidentDecided:
    return [record for record in world.history if isinstance(record, r.IncidentDecided)][-1]


def view(world: World) -> View:
    assert world.job.view
    return world.job.view


def serve(world: World, node_id: str) -> o.Serve:
    order = world.order_to(node_id)
    assert isinstance(order, o.Serve)
    return order


def cut_links(world: World) -> None:
    world.do(*(world.stumbled(n, i) for n in "ab" for i in range(2)))


def cut_links_for_good(world: World) -> None:
    cut_links(world)
    world.wait(world.settings.collect_window_s)


def error(world: World) -> None:
    world.do(world.stumbled("b", 1, error="OSError"))


def hang(world: World) -> None:
    world.do(world.stalled("a", 5, 5), world.stalled("b", 5, 4))


def one_dies(world: World) -> None:
    kill(world, "b", 1)


def one_dies_beside_a_spare(world: World) -> None:
    world.do(world.parked("b", 1))
    kill(world, "b", 1)


def a_node_dies(world: World) -> None:
    lose(world, "b")


def a_node_dies_beside_a_spare_node(world: World) -> None:
    world.do(world.hello("c"))
    lose(world, "b")


CASES: dict[str, tuple[Callable[[World], None], str, Strategy, tuple[int, ...]]] = {
    # what happens, what is allowed, what is chosen, how many workers each node has then
    "all links cut": (cut_links, "all", Strategy.RETRY, (2, 2)),
    "an error that may pass": (error, "all", Strategy.RETRY, (2, 2)),
    "an error, no retry": (error, "-retry", Strategy.RECOVER_IN_PLACE, (2, 2)),
    "a hang": (hang, "all", Strategy.RECOVER_IN_PLACE, (2, 2)),
    "a hang, elastic only": (hang, "elastic-training", Strategy.ELASTIC_TRAINING, (2, 1)),
    "a death": (one_dies, "all", Strategy.RECOVER_IN_PLACE, (2, 2)),
    "a death, a spare parked": (one_dies_beside_a_spare, "all", Strategy.RECOVER, (2, 2)),
    "a death, a spare, no recover": (one_dies_beside_a_spare, "-recover", Strategy.RECOVER_IN_PLACE, (2, 2)),
    "a death, not in place": (one_dies, "-recover-in-place", Strategy.ELASTIC_TRAINING, (2, 1)),
    "a death, dump only": (one_dies, "dump,exit", Strategy.DUMP, (2, 1)),
    "a death, exit only": (one_dies, "exit", Strategy.EXIT, (2, 2)),
    "a death, nothing that fits": (one_dies, "retry", Strategy.EXIT, (2, 2)),
    "a node lost": (a_node_dies, "all", Strategy.ELASTIC_TRAINING, (2,)),
    "a node lost, another by": (a_node_dies_beside_a_spare_node, "all", Strategy.RECOVER, (2, 2)),
    "a node lost, another by, no recover": (
        a_node_dies_beside_a_spare_node,
        "-recover",
        Strategy.ELASTIC_TRAINING,
        (2,),
    ),
    "a node lost, not elastic": (a_node_dies, "-elastic-training", Strategy.DUMP, (2,)),
    "a node lost, in place only": (a_node_dies, "recover-in-place", Strategy.EXIT, (2, 2)),
    "links cut, no retry": (cut_links_for_good, "-retry", Strategy.DUMP, (2, 2)),
}


def allowed(text: str) -> tuple[Strategy, ...]:
    if text == "all":
        return LADDER
    if text.startswith("-"):
        return tuple(s for s in LADDER if s.value != text[1:])
    return tuple(Strategy(word) for word in text.split(","))


@pytest.mark.parametrize("case", CASES)
def test_the_cheapest_rung_that_is_allowed_and_fits_is_taken(case: str) -> None:
    happen, text, strategy, workers = CASES[case]
    world = training(recovery=allowed(text))
    happen(world)
    assert decided(world).strategy is strategy and not decided(world).counted and decided(world).why
    assert tuple(m.workers for m in view(world).members) == workers
    assert view(world).kept == (strategy is not Strategy.EXIT)
    assert world.job.restarts_used == 0
    assert (world.finished is not None) == (strategy is Strategy.EXIT)


def test_a_recovery_is_over_when_a_step_is_committed_and_not_before() -> None:
    world = training()
    kill(world, "b")
    world.settle_all()
    assert world.job.incident
    closed = only(world.do(world.committed("a", 9)).records, r.IncidentClosed)
    assert closed.step == 9 and closed.settled_at and closed.strategy is Strategy.RECOVER_IN_PLACE
    assert world.job.incident is None


def test_spares_of_the_node_come_before_new_processes_and_are_used_up() -> None:
    world = training(spares=1)
    assert serve(world, "a").spares == 1 and serve(world, "a").session == DDP
    world.do(world.parked("a", 1), world.parked("b", 1))
    kill(world, "a")
    assert decided(world).strategy is Strategy.RECOVER and "sooner" in decided(world).why
    assert [world.job.nodes[n].parked for n in "ab"] == [0, 1]


def test_two_deaths_beside_one_spare_start_in_place() -> None:
    world = training()
    world.do(world.parked("b", 1))
    world.do(world.failed("b", 0, end=KILLED), world.failed("b", 1, end=KILLED))
    assert decided(world).strategy is Strategy.RECOVER_IN_PLACE and world.job.nodes["b"].parked == 1


def test_dead_workers_without_a_spare_go_with_their_node_to_a_spare_node() -> None:
    world = training(recovery=(Strategy.RECOVER,))
    world.do(world.hello("c"))
    kill(world, "b", 1)
    assert world.members == ["a", "c"] and view(world).strategy is Strategy.RECOVER
    assert isinstance(world.order_to("b"), o.Hold) and world.order_to("b").release == 0  # type: ignore[union-attr]


def test_a_node_that_takes_over_has_the_very_ranks() -> None:
    world = training(nodes=(1, 2))
    world.do(world.hello("c", requested_rank=1))
    lose(world, "a")
    assert world.members == ["c", "b"] and [m.first_rank for m in view(world).members] == [0, 2]


def test_a_node_that_comes_back_while_another_is_lost_has_its_own_ranks_again() -> None:
    world = World(nodes=(1, 3), session=DDP, restarts=0).train("a", "b", "c")
    world.do(world.broke("a"))
    old = world.life("b")
    world.next_life("b")
    world.do(world.hello("b", dead_lives=[old], parked=1), world.hello("d"))
    world.wait(0.3)
    assert view(world).kept and world.members == ["d", "b", "c"]


def test_a_lost_node_and_a_death_elsewhere_are_repaired_together() -> None:
    world = training()
    world.do(world.hello("c"))
    world.do(world.failed("a", 1, end=KILLED), world.broke("b"))
    world.wait(0.3)
    assert world.members == ["a", "c"] and decided(world).strategy is Strategy.RECOVER
    assert [m.workers for m in view(world).members] == [2, 2]


# --- rungs that fail


def test_the_same_failure_of_the_same_rank_is_answered_by_the_next_rung() -> None:
    world = training()
    world.do(world.parked("b", 2))
    chosen = []
    for _ in range(3):
        world.do(world.failed("b", 1, end=Exited(1)))
        chosen.append(decided(world).strategy)
        world.start_all()
    assert chosen == [Strategy.RECOVER, Strategy.RECOVER_IN_PLACE, Strategy.ELASTIC_TRAINING]


def test_being_killed_from_outside_twice_is_not_the_same_failure() -> None:
    world = training(rung_tries_max=2)
    chosen = []
    for _ in range(3):
        kill(world, "b", 1)
        chosen.append(decided(world).strategy)
        world.start_all()
    assert chosen == [Strategy.RECOVER_IN_PLACE, Strategy.RECOVER_IN_PLACE, Strategy.ELASTIC_TRAINING]


def test_another_failure_is_answered_by_the_same_rung_for_so_many_times() -> None:
    world = training(rung_tries_max=3)
    chosen = []
    for node_id, local_rank in [("a", 0), ("b", 0), ("a", 1), ("b", 1)]:
        kill(world, node_id, local_rank)
        chosen.append(decided(world).strategy)
        world.start_all()
        world.do(world.settled("a"))  # never all of them: no step is committed
    assert chosen[:3] == [Strategy.RECOVER_IN_PLACE] * 3 and chosen[3] is Strategy.ELASTIC_TRAINING
    assert world.job.incident and world.job.incident.tries[Strategy.RECOVER_IN_PLACE] == 3


def test_a_new_incident_begins_at_the_first_rung_again() -> None:
    world = training()
    for _ in range(5):
        kill(world, "b", 1)
        assert decided(world).strategy is Strategy.RECOVER_IN_PLACE
        world.prove()
    assert world.job.incidents_opened == 5 and world.job.restarts_used == 0


def test_an_error_that_comes_back_costs_its_process_and_then_its_rank() -> None:
    world = training()
    chosen = []
    for _ in range(3):
        error(world)
        chosen.append((decided(world).strategy, view(world).replaced))
        world.settle_all()
    assert chosen == [
        (Strategy.RETRY, ()),
        (Strategy.RECOVER_IN_PLACE, (("b", 1),)),
        (Strategy.ELASTIC_TRAINING, (("b", 1),)),
    ]


def test_links_that_break_again_and_again_are_retried_so_many_times() -> None:
    world = training()
    for _ in range(3):
        cut_links(world)
        assert decided(world).strategy is Strategy.RETRY
        world.settle_all()
    cut_links_for_good(world)
    assert decided(world).strategy is Strategy.DUMP


# --- dump and exit


def test_a_dump_may_be_smaller_than_the_minimum_and_ends_the_job() -> None:
    world = training(nodes=(2, 2))
    lose(world, "b")
    assert decided(world).strategy is Strategy.DUMP and world.members == ["a"]
    assert serve(world, "a").strategy is Strategy.DUMP and serve(world, "a").spares == 0
    world.start_all()
    world.do(world.succeeded("a", 0), world.succeeded("a", 1))
    assert world.finished and world.finished.outcome is r.Outcome.FAILED and world.finished.exit_code == 7
    assert "node b was lost" in world.finished.why and "checkpoint" in world.finished.why


def test_newcomers_without_the_state_write_no_checkpoint() -> None:
    world = training(session=FSDP, recovery=allowed("recover-in-place,dump,exit"))
    kill(world, "a", 0)
    world.start_all()
    kill(world, "b", 1)
    world.start_all()
    assert view(world).world_size == 4  # both start again, and have nothing yet
    kill(world, "b", 1)
    world.start_all()
    kill(world, "b", 1)
    assert decided(world).strategy is Strategy.DUMP
    assert [(m.node_id, m.workers) for m in view(world).members] == [("a", 1), ("b", 1)]
    assert view(world).replaced == (("a", 0),) and serve(world, "a").replaced == (0,)


def test_a_dump_that_fails_is_tried_by_who_is_left_and_never_restarts() -> None:
    world = training(nodes=(2, 2), restarts=3)
    lose(world, "b")
    world.start_all()
    kill(world, "a", 1)
    assert decided(world).strategy is Strategy.DUMP and view(world).world_size == 1
    world.start_all()
    kill(world, "a", 0)
    assert world.finished and world.finished.exit_code == 1


def test_who_dies_while_others_have_written_ends_the_job() -> None:
    world = training(nodes=(2, 2), restarts=3)
    lose(world, "b")
    world.do(world.succeeded("a", 0))
    kill(world, "a", 1)
    assert world.finished and world.finished.exit_code == 1


# --- no complete copy


def test_workers_without_state_start_anew_and_count() -> None:
    world = World(nodes=(1, 2), workers=2, restarts=1, session=DDP).run("a", "b")
    kill(world, "b")
    assert decided(world).strategy is Strategy.RESTART and decided(world).counted and not view(world).kept
    world.settle_all()
    assert world.job.incident is None
    kill(world, "b")
    assert decided(world).strategy is Strategy.RECOVER_IN_PLACE, "now they have"


def test_a_finished_worker_leaves_nothing_to_repair() -> None:
    world = training(restarts=1)
    world.do(world.succeeded("a", 0))
    kill(world, "b")
    assert decided(world).strategy is Strategy.RESTART and "finished" in decided(world).why


@pytest.mark.parametrize(
    ("session", "dead", "online"),
    [
        (FSDP, [("a", 0)], True),
        (FSDP, [("a", 0), ("a", 1)], True),  # its copies are on b
        (FSDP, [("a", 0), ("b", 0)], False),  # rank 0's copy is with rank 2, and rank 2's with rank 0
        (FSDP, [("a", 0), ("b", 1)], True),
        (BARE, [("a", 0)], False),
        (SessionInfo(shards=2), [("a", 0), ("b", 1)], True),  # hybrid: ranks 0 and 2, 1 and 3 have the same
        (SessionInfo(shards=2), [("a", 0), ("b", 0)], False),
    ],
)
def test_shards_must_all_have_a_live_copy(session: SessionInfo, dead: list[tuple[str, int]], online: bool) -> None:
    world = training(session=session, restarts=1)
    world.do(*(world.failed(n, i, end=KILLED) for n, i in dead))
    assert view(world).kept == online and world.job.restarts_used == (not online)
    if not online:
        assert "shard" in decided(world).why


def test_no_restart_is_left_when_a_shard_is() -> None:
    world = training(session=BARE)
    kill(world, "a")
    assert world.finished and "shard 0 of 4" in world.finished.why and "--max-restarts 0" in world.finished.why


def test_a_newcomers_copies_of_others_count_from_the_first_commit() -> None:
    world = training(session=FSDP, restarts=1)
    kill(world, "a", 0)
    world.settle_all()  # rank 0 has its own shard again, but not yet a copy of rank 2's
    kill(world, "b", 0)
    assert not view(world).kept
    world = training(session=FSDP, restarts=1)
    kill(world, "a", 0)
    world.prove()
    kill(world, "b", 0)
    assert view(world).kept


def test_a_sharded_world_does_not_shrink() -> None:
    world = training(session=FSDP)
    lose(world, "b")
    assert decided(world).strategy is Strategy.DUMP


# --- faults during a recovery


def test_survivors_of_the_view_before_hold_the_state() -> None:
    world = training()
    kill(world, "a", 0)
    world.start_all()
    world.do(world.failed("a", 1, end=KILLED), world.failed("b", 0, end=KILLED))
    assert view(world).kept, "rank 3 has been there all the time"
    world.start_all()
    world.do(world.failed("b", 1, end=KILLED))
    assert world.finished and "no worker that holds the state is left" in world.finished.why


def test_newcomers_that_have_not_settled_hold_nothing() -> None:
    world = World(nodes=(1, 1), workers=2, restarts=1, session=DDP).train("a")
    kill(world, "a", 0)
    world.start_all()
    kill(world, "a", 1)
    assert decided(world).strategy is Strategy.RESTART and decided(world).counted


def test_a_worker_that_turns_out_to_have_died_before_is_not_counted_on() -> None:
    world = World(nodes=(1, 1), workers=2, restarts=1, session=DDP).train("a")
    world.do(world.stumbled("a", 0))
    world.wait(0.5)
    assert decided(world).strategy is Strategy.RETRY
    world.do(world.failed("a", 1, view=1))
    assert view(world).number == 2, "its agent fills the seat"
    world.do(world.offered("a"))
    world.do(world.failed("a", 0, view=1))
    assert decided(world).strategy is Strategy.RESTART and view(world).number == 3


def test_living_workers_close_up_and_are_still_known() -> None:
    world = World(nodes=(1, 1), workers=4, session=DDP, recovery=(Strategy.ELASTIC_TRAINING,)).train("a")
    kill(world, "a", 1)
    assert view(world).world_size == 3 and [h.rank for h in world.job.crew["a"] if h] == [0, 2, 3]
    world.start_all()
    world.do(world.failed("a", 0), world.failed("a", 1))
    assert [h.rank for h in world.job.crew["a"] if h] == [3]


def test_the_late_success_of_a_worker_that_was_ended_for_hanging_is_no_news_of_the_others() -> None:
    world = World(nodes=(1, 1), workers=2, session=DDP, recovery=(Strategy.ELASTIC_TRAINING,)).train("a")
    world.do(world.stalled("a", 5, 6))
    assert view(world).world_size == 1 and view(world).replaced == (("a", 0),)
    assert world.do(world.succeeded("a", 0, view=1)).records == []
    assert [h.rank for h in world.job.crew["a"] if h] == [1], "the other is still counted on"
    only(world.do(world.succeeded("a", 1, view=1)).records, r.WorkerDone)
    assert world.job.crew["a"] == (None,)


def test_a_stumble_of_an_older_view_says_nothing() -> None:
    world = training()
    kill(world, "b")
    assert world.do(world.stumbled("a", 0, view=1), world.stalled("a", 3, 3, view=1)).records == []


# --- waiting for the cause


def test_echoes_wait_for_the_cause() -> None:
    world = training()
    world.do(world.stumbled("a", 0), world.stumbled("b", 0))
    assert world.job.incident and view(world).number == 1
    kill(world, "b", 1)
    assert decided(world).strategy is Strategy.RECOVER_IN_PLACE and "rank 3" in decided(world).cause


@pytest.mark.parametrize("recovery", ["-retry", "recover-in-place,exit"])
def test_where_no_step_is_tried_again_echoes_of_all_wait_for_the_cause_too(recovery: str) -> None:
    world = training(recovery=allowed(recovery))
    cut_links(world)
    assert world.job.incident and not world.finished and view(world).number == 1, "somebody may still say why"
    world.wait(world.settings.collect_window_s / 2)
    kill(world, "b", 1)
    assert decided(world).strategy is Strategy.RECOVER_IN_PLACE and "rank 3" in decided(world).cause


def test_a_node_that_is_lost_after_all_have_left_the_step_is_the_cause() -> None:
    world = training(recovery=allowed("elastic-training"))
    cut_links(world)
    lose(world, "b")
    assert decided(world).strategy is Strategy.ELASTIC_TRAINING and world.members == ["a"]


def test_echoes_without_a_cause_end_the_job_in_time_where_no_step_is_tried_again() -> None:
    world = training(recovery=allowed("recover-in-place"))
    cut_links(world)
    assert not world.finished
    world.wait(world.settings.collect_window_s)
    assert world.finished and "connections broke" in world.finished.why


def test_echoes_alone_are_retried_in_time() -> None:
    world = training()
    world.do(world.stumbled("a", 0))
    world.wait(0.49)
    assert view(world).number == 1
    world.wait(0.02)
    assert decided(world).strategy is Strategy.RETRY


def test_the_worker_that_came_least_far_is_replaced_alone() -> None:
    world = training()
    world.do(world.stalled("a", 5, 5))
    assert view(world).number == 1, "what does the other node say?"
    world.do(world.stalled("b", 5, 4))
    assert view(world).replaced == (("b", 1),)
    assert serve(world, "b").replaced == (1,) and serve(world, "a").replaced == ()
    assert "rank 3 on b hangs" in decided(world).cause and "12.0 s" in decided(world).cause


def test_a_hang_happened_when_the_last_thing_moved() -> None:
    world = training()
    hang(world)
    closed = only(world.prove(), r.IncidentClosed)
    assert closed.happened_at == pytest.approx(closed.detected_at - 12.0)


def test_who_waits_for_a_view_is_not_the_one_that_hangs() -> None:
    world = training()
    world.do(world.stalled("a", 3, 3, joining=True), world.stalled("b", 3, 3, joining=True))
    assert view(world).number == 1, "they wait for somebody, or something, else"
    world.do(world.stalled("b", 5, 5))
    assert view(world).replaced == (("b", 0),)


def test_those_who_wait_for_a_busy_node_do_not_hang() -> None:
    world = training()
    world.do(world.stalled("a", 5, 4))
    world.wait(60.0)
    assert view(world).number == 1 and world.job.incident is None


def test_a_stall_that_has_dissolved_does_not_count() -> None:
    world = training()
    world.do(world.stalled("a", 3, 3))
    world.wait(30.0)
    world.do(world.stalled("b", 9, 8))
    assert view(world).number == 1, "what a said is of another stall"
    world.do(world.stalled("a", 9, 9))
    assert view(world).replaced == (("b", 1),)


# --- advice


def test_a_blamed_node_is_sent_away() -> None:
    world = training()
    world.do(world.failed("b", 0, end=KILLED, advice=FailoverStrategy.NODE_FAILOVER))
    assert world.members == ["a"] and decided(world).strategy is Strategy.ELASTIC_TRAINING
    assert isinstance(world.order_to("b"), o.Hold)


def test_a_node_leaves_while_nothing_moves() -> None:
    world = training()
    world.do(world.stalled("a", 5, 5), world.stalled("b", 5, 5), DrainAsked(node_id="b", why="maintenance"))
    assert world.members == ["a"] and view(world).kept and not view(world).planned


def test_a_blamed_node_is_replaced() -> None:
    world = training()
    world.do(world.hello("c"))
    world.do(world.failed("b", 0, end=KILLED, advice=FailoverStrategy.NODE_FAILOVER))
    assert world.members == ["a", "c"]


def test_a_global_failover_restarts_all_and_counts() -> None:
    world = training(restarts=1)
    world.do(world.failed("b", 0, advice=FailoverStrategy.GLOBAL_FAILOVER))
    assert decided(world).strategy is Strategy.RESTART and world.job.restarts_used == 1


def test_an_abortion_ends_the_job() -> None:
    world = training(restarts=1)
    world.do(world.failed("b", 0, advice=FailoverStrategy.ABORTION_FAILOVER))
    assert world.finished and world.finished.exit_code == 1


# --- stores


def test_a_recovery_waits_for_a_store_and_not_for_ever() -> None:
    world = World(nodes=(1, 1), workers=2, session=DDP, restarts=0)
    world.gather("a")
    world.do(world.started("a"), world.settled("a"), world.committed("a"))
    kill(world, "a")
    assert view(world).number == 1
    world.wait(1.0)
    world.do(world.offered("a"))
    assert view(world).number == 2
    kill(world, "a", 1)
    world.wait(600.0)
    assert world.finished and world.finished.exit_code in (1, 3)


# --- planned changes


def test_a_node_drains_at_a_step_boundary() -> None:
    world = training()
    world.do(DrainAsked(node_id="b", why="maintenance"))
    assert world.members == ["a"] and view(world).kept and view(world).planned
    order = world.order_to("b")
    assert isinstance(order, o.Hold) and order.release == 2
    closed = only(world.prove(), r.IncidentClosed)
    assert closed.kind == "planned" and closed.step == 8


def test_a_node_that_stands_by_takes_over_from_one_that_leaves() -> None:
    world = training(session=FSDP, spare_nodes=1)
    world.do(world.hello("c"))
    held = world.order_to("c")
    assert isinstance(held, o.Hold) and held.spares == 2 and held.session == FSDP and held.world_size == 4
    world.do(world.leaving("a"))
    assert world.members == ["c", "b"] and view(world).planned and view(world).strategy is Strategy.RECOVER


def test_a_node_that_nobody_can_replace_leaves_as_ever() -> None:
    world = training(session=FSDP)
    world.do(world.leaving("b"))
    assert world.members == ["a"] and not view(world).kept and world.job.restarts_used == 0


def test_a_leaving_node_serves_until_it_is_calm() -> None:
    world = training()
    kill(world, "a")
    world.do(DrainAsked(node_id="b", why="maintenance"))
    assert world.members == ["a", "b"] and isinstance(world.order_to("b"), o.Serve)
    world.prove()
    assert world.members == ["a"] and view(world).planned


def test_an_unknown_node_cannot_drain() -> None:
    world = training()
    assert world.do(DrainAsked(node_id="z", why="maintenance")).records == []


def test_a_node_is_taken_in_once_its_workers_are_parked() -> None:
    world = training(nodes=(1, 3))
    world.do(world.hello("c"))
    world.wait(20.0)
    assert world.members == ["a", "b"] and world.order_to("c").spares == 2  # type: ignore[union-attr]
    world.do(world.parked("c", 2))
    assert world.members == ["a", "b", "c"] and view(world).planned and view(world).strategy is Strategy.RECOVER
    assert decided(world).strategy is Strategy.ELASTIC_TRAINING


def test_newcomers_that_nobody_will_meet_do_not_keep_the_job_from_its_end() -> None:
    world = training(nodes=(1, 3))
    world.do(world.hello("c"))
    world.do(world.parked("c", 2))
    assert world.members == ["a", "b", "c"]
    for node_id in ("a", "b"):
        world.do(*(world.succeeded(node_id, local_rank) for local_rank in range(2)))
    assert world.finished and world.finished.outcome is r.Outcome.SUCCEEDED


def test_a_node_that_cannot_park_is_taken_in_all_the_same() -> None:
    world = training(nodes=(1, 3), park_timeout_s=30.0)
    world.do(world.hello("c"))
    world.wait(30.0)
    assert world.members == ["a", "b", "c"]


@pytest.mark.parametrize("session", [FSDP, DDP])
def test_a_world_that_may_not_change_does_not_grow(session: SessionInfo) -> None:
    without = tuple(s for s in LADDER if s is not Strategy.ELASTIC_TRAINING)
    world = training(session=session, nodes=(1, 3), recovery=LADDER if session is FSDP else without)
    world.do(world.hello("c", parked=2))
    world.wait(100.0)
    assert world.members == ["a", "b"]


def test_empty_seats_are_filled_again() -> None:
    world = training(recovery=(Strategy.ELASTIC_TRAINING,))
    kill(world, "b", 0)
    assert [m.workers for m in view(world).members] == [2, 1]
    assert serve(world, "b").spares == 1 and serve(world, "b").workers == 1
    world.do(world.parked("b", 1))
    assert view(world).number == 2, "first things first"
    world.prove()
    assert [m.workers for m in view(world).members] == [2, 2] and view(world).planned
    world.prove()
    assert serve(world, "b").spares == 0 and world.job.incident is None


def test_fewer_nodes_are_wanted_and_then_more() -> None:
    world = training(nodes=(1, 2))
    world.do(ResizeAsked(nodes=1, why="asked"))
    assert world.members == ["a"] and view(world).planned and world.order_to("b").release == 2  # type: ignore[union-attr]
    world.prove()
    world.do(ResizeAsked(nodes=3, why="asked"), world.parked("b", 2))
    assert world.members == ["a", "b"]
    world.prove()
    world.do(world.hello("c", parked=2))
    assert world.members == ["a", "b", "c"]


def test_fewer_than_the_minimum_cannot_be_had() -> None:
    world = training(nodes=(2, 2))
    assert world.do(ResizeAsked(nodes=1, why="asked")).records == []


def test_scripts_of_others_are_resized_by_a_restart() -> None:
    world = World(nodes=(1, 2)).run("a", "b")
    world.do(ResizeAsked(nodes=1, why="asked"))
    assert world.members == ["a"] and not view(world).kept and world.job.restarts_used == 0


def test_a_fault_before_the_boundary_is_a_fault() -> None:
    world = training()
    world.do(DrainAsked(node_id="b", why="maintenance"))
    assert view(world).planned
    world.do(world.offered("a"))
    world.do(world.failed("a", 0, view=1, end=KILLED))
    assert view(world).number == 3 and view(world).kept and not view(world).planned
    assert view(world).strategy is Strategy.RECOVER_IN_PLACE


def test_nodes_beyond_the_spare_ones_keep_nothing_ready() -> None:
    world = training(spare_nodes=1)
    world.do(world.hello("c"), world.hello("d"))
    assert [world.order_to(n).spares for n in "cd"] == [2, 0]  # type: ignore[union-attr]
    world.do(world.leaving("c"))
    assert world.order_to("d").spares == 2, "it moves up"  # type: ignore[union-attr]


def test_the_kind_of_state_is_told_to_all_once_it_is_known() -> None:
    world = World(nodes=(1, 2), workers=2, spares=1, session=DDP).run("a", "b")
    assert serve(world, "a").session is None and serve(world, "a").spares == 0
    said = len(world.said)
    world.do(world.settled("b"))
    assert {a.node_id for a in world.said[said:]} == {"a", "b"} and serve(world, "a").spares == 1
    said = len(world.said)
    world.do(world.settled("a"))
    assert world.said[said:] == []
