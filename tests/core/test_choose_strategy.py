"""The ladder: each rung by itself, and as the fall-back of the one above."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.core import orders as o
from holdfast.core import records as r
from holdfast.core.assess import ENDING_TIMEOUT_S
from holdfast.core.events import DrainRequested, ResizeRequested, SessionInfo
from holdfast.core.faults.failures import Exited, Signalled
from holdfast.core.faults.fault_table import typed
from holdfast.core.shard_map import ShardMap
from holdfast.core.state import ECHOES_LISTED_MAX
from holdfast.core.strategies import LADDER, FailoverStrategy, Strategy
from holdfast.core.views import View
from support.world import World, only

KILLED = Signalled(9, "SIGKILL")
DDP = SessionInfo()
FSDP = SessionInfo(shard_map=ShardMap(4), replicas=1, resizable=False)
OWN = SessionInfo(resizable=False, per_rank=True, local_replicas=1, why_fixed="each rank has a meter")
BARE = SessionInfo(shard_map=ShardMap(4), replicas=0, resizable=False)


def training(*, session: SessionInfo = DDP, nodes: tuple[int, int] = (1, 2), **settings: Any) -> World:
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
    assert view(world).keeps_workers == (strategy is not Strategy.EXIT)
    assert world.job.incidents.restarts_used == 0
    assert (world.finished is not None) == (strategy is Strategy.EXIT)


def test_a_recovery_is_over_when_a_step_is_committed_and_not_before() -> None:
    world = training()
    kill(world, "b")
    world.settle_all()
    assert world.job.incidents.current
    closed = only(world.do(world.committed("a", 9)).records, r.IncidentClosed)
    assert closed.step == 9 and closed.restored_at and closed.strategy is Strategy.RECOVER_IN_PLACE
    assert world.job.incidents.current is None


def test_spares_of_the_node_come_before_new_processes_and_are_used_up() -> None:
    world = training(spares=1)
    assert serve(world, "a").spares == 1 and serve(world, "a").session == DDP
    world.do(world.parked("a", 1), world.parked("b", 1))
    kill(world, "a")
    assert decided(world).strategy is Strategy.RECOVER and "faster" in decided(world).why
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
    world.do(world.hello("b", dead_incarnations=[old], parked=1), world.hello("d"))
    world.wait(0.3)
    assert view(world).keeps_workers and world.members == ["d", "b", "c"]


def test_a_lost_node_and_a_death_elsewhere_are_repaired_together() -> None:
    world = training()
    world.do(world.hello("c"))
    world.do(world.failed("a", 1, end=KILLED), world.broke("b"))
    world.wait(0.3)
    assert world.members == ["a", "c"] and decided(world).strategy is Strategy.RECOVER
    assert [m.workers for m in view(world).members] == [2, 2]


# --- dumps


@pytest.mark.parametrize(
    ("session", "apart", "machines", "strategy", "writers"),
    [
        (FSDP, False, "ab", Strategy.DUMP, ["a", "b"]),
        (FSDP, True, "aa", Strategy.DUMP, ["a", "b"]),
        (FSDP, True, "ab", Strategy.DUMP, ["a"]),  # with the copies of the others' shards
        (BARE, True, "ab", Strategy.EXIT, []),
        (DDP, True, "ab", Strategy.DUMP, ["a"]),
        (SessionInfo(shard_map=ShardMap(2), replicas=0, resizable=False), True, "ab", Strategy.DUMP, ["a"]),
    ],
)
def test_only_those_dump_who_write_into_one_directory(
    session: SessionInfo, apart: bool, machines: str, strategy: Strategy, writers: list[str]
) -> None:
    settings = {"recovery": allowed("dump,exit"), "checkpoints_apart": apart}
    world = World(nodes=(2, 2), workers=2, restarts=0, session=session, **settings)
    world.do(*(world.hello(n, machine_id=machine) for n, machine in zip("ab", machines, strict=True)))
    world.wait(world.settings.settle_s)
    world.prove()
    cut_links(world)
    world.wait(world.settings.collect_window_s)
    assert decided(world).strategy is strategy
    if strategy is Strategy.DUMP:
        assert world.members == writers
    else:
        assert world.finished and "--checkpoint-dir" in world.finished.why


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


def fail_by_itself(world: World, local_rank: int = 1, *, step: int = 7) -> None:
    """A worker of node b raises, as it does each time that it is brought in. Each is a process of its own."""
    event = world.failed("b", local_rank, exception="holdfast.errors.HoldfastError")
    failure = replace(
        event.failure, step=step, message="the group was made by another rank", pid=100 + world.view_number
    )
    world.now += 1
    world.do(replace(event, failure=typed(replace(failure, failed_at=world.now))))


def test_a_spare_that_fails_by_itself_gives_way_to_a_new_process() -> None:
    """As spares did that had built a group of their own as another rank: the job ended with a dump."""
    world = training(recovery=allowed("-elastic-training"))
    world.do(world.parked("b", 2))
    kill(world, "b", 1)
    assert decided(world).strategy is Strategy.RECOVER
    world.settle_all()
    fail_by_itself(world)
    assert decided(world).strategy is Strategy.RECOVER_IN_PLACE
    world.prove()
    kill(world, "b", 1)
    assert decided(world).strategy is Strategy.RECOVER, "another incident: the next spare may be well"


def test_a_spare_gives_way_also_if_its_end_is_heard_of_in_the_next_view() -> None:
    """Its neighbours leave the step first, and the step is repeated before the process has ended."""
    world = training()
    world.do(world.parked("b", 2))
    kill(world, "b", 1)
    world.settle_all()
    cut_links(world)
    assert decided(world).strategy is Strategy.RETRY
    world.start_all()
    fail_by_itself(world)
    assert decided(world).strategy is Strategy.RECOVER_IN_PLACE


def test_a_spare_that_is_killed_from_outside_is_followed_by_the_next() -> None:
    world = training()
    world.do(world.parked("b", 2))
    for _ in range(2):
        kill(world, "b", 1)
        assert decided(world).strategy is Strategy.RECOVER
        world.settle_all()


def test_a_spare_that_hangs_gives_way_to_a_new_process() -> None:
    world = training()
    world.do(world.parked("b", 2))
    kill(world, "b", 1)
    world.settle_all()
    world.do(world.stalled("a", 5, 5), world.stalled("b", 5, 4))
    assert view(world).replaced == (("b", 1),) and decided(world).strategy is Strategy.RECOVER_IN_PLACE


def test_newcomers_that_fail_by_themselves_each_time_cost_a_restart_before_a_dump() -> None:
    world = training(recovery=allowed("-elastic-training"), restarts=1)
    kill(world, "b", 1)
    chosen = []
    for _ in range(2):
        world.settle_all()
        fail_by_itself(world)
        chosen.append(decided(world).strategy)
    assert chosen == [Strategy.RECOVER_IN_PLACE, Strategy.RESTART]
    assert decided(world).counted and "newly started workers fail by themselves" in decided(world).why
    world.prove()
    fail_by_itself(world)  # now it is no newcomer: the step itself is at fault
    assert decided(world).strategy is Strategy.DUMP and "is a bug" in decided(world).why


@pytest.mark.parametrize(
    ("text", "last"), [("-elastic-training", Strategy.DUMP), ("recover-in-place,exit", Strategy.EXIT)]
)
def test_without_a_restart_left_they_cost_the_job(text: str, last: Strategy) -> None:
    world = training(recovery=allowed(text), restarts=0)
    kill(world, "b", 1)
    for _ in range(2):
        world.settle_all()
        fail_by_itself(world)
    assert decided(world).strategy is last


def test_newcomers_that_cannot_be_built_cost_a_restart_where_the_ladder_ends() -> None:
    """They fail before their first step, so no step is at fault."""
    world = training(recovery=allowed("recover-in-place,exit"), restarts=1)
    kill(world, "b", 1)
    for _ in range(2):
        world.start_all()
        fail_by_itself(world, step=-1)
    assert decided(world).strategy is Strategy.RESTART and world.job.incidents.restarts_used == 1 and not world.finished


def test_an_error_that_the_first_process_of_a_rank_raised_too_is_a_bug() -> None:
    world = training(restarts=3)
    fail_by_itself(world)
    world.settle_all()
    fail_by_itself(world)
    assert decided(world).strategy is Strategy.DUMP and "is a bug" in decided(world).why


def test_another_failure_on_the_same_node_is_answered_by_the_same_rung_for_so_many_times() -> None:
    world = training(rung_tries_max=3)
    chosen = []
    for node_id, local_rank in [("a", 0), ("a", 1), ("a", 0), ("a", 1)]:
        kill(world, node_id, local_rank)
        chosen.append(decided(world).strategy)
        world.start_all()
        world.do(world.settled("a"))  # never all of them: no step is committed
    assert chosen[:3] == [Strategy.RECOVER_IN_PLACE] * 3 and chosen[3] is Strategy.ELASTIC_TRAINING
    assert world.job.incidents.current and world.job.incidents.current.tries[Strategy.RECOVER_IN_PLACE] == 3


def test_a_new_incident_begins_at_the_first_rung_again() -> None:
    world = training()
    for _ in range(5):
        kill(world, "b", 1)
        assert decided(world).strategy is Strategy.RECOVER_IN_PLACE
        world.prove()
    assert world.job.incidents.opened == 5 and world.job.incidents.restarts_used == 0


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
    assert decided(world).strategy is Strategy.RESTART and decided(world).counted and not view(world).keeps_workers
    world.settle_all()
    assert world.job.incidents.current is None
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
        (OWN, [("a", 0)], True),
        (OWN, [("a", 0), ("a", 1)], True),  # their copies are on b
        (OWN, [("a", 0), ("b", 0)], False),  # a copy of what each rank has for itself died with its rank
        (FSDP, [("a", 0)], True),
        (FSDP, [("a", 0), ("a", 1)], True),  # its copies are on b
        (FSDP, [("a", 0), ("b", 0)], False),  # rank 0's copy is with rank 2, and rank 2's with rank 0
        (FSDP, [("a", 0), ("b", 1)], True),
        (BARE, [("a", 0)], False),
        (
            SessionInfo(shard_map=ShardMap(2)),
            [("a", 0), ("b", 1)],
            True,
        ),  # hybrid: ranks 0 and 2, 1 and 3 have the same
        (SessionInfo(shard_map=ShardMap(2)), [("a", 0), ("b", 0)], False),
    ],
)
def test_shards_must_all_have_a_live_copy(session: SessionInfo, dead: list[tuple[str, int]], online: bool) -> None:
    world = training(session=session, restarts=1)
    world.do(*(world.failed(n, i, end=KILLED) for n, i in dead))
    assert view(world).keeps_workers == online and world.job.incidents.restarts_used == (not online)
    if not online:
        assert ("own state" if session.per_rank else "shard") in decided(world).why


def test_no_restart_is_left_when_a_shard_is() -> None:
    world = training(session=BARE)
    kill(world, "a")
    assert world.finished and "shard 0 of 4" in world.finished.why and "--max-restarts 0" in world.finished.why


def test_a_newcomers_copies_of_others_count_once_its_node_has_settled() -> None:
    world = training(session=FSDP, restarts=1)
    kill(world, "a", 0)  # rank 0's successor has no copy of rank 2's shard yet
    kill(world, "b", 0)
    assert not view(world).keeps_workers
    world = training(session=FSDP, restarts=1)
    kill(world, "a", 0)
    world.settle_all()  # the copies were exchanged before the first step
    kill(world, "b", 0)
    assert view(world).keeps_workers


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
    assert view(world).keeps_workers, "rank 3 has been there all the time"
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
    assert view(world).number == 2, "its agent fills the local rank"
    world.do(world.offered("a"))
    world.do(world.failed("a", 0, view=1))
    assert decided(world).strategy is Strategy.RESTART and view(world).number == 3


def test_living_workers_close_up_and_are_still_known() -> None:
    world = World(nodes=(1, 1), workers=4, session=DDP, recovery=(Strategy.ELASTIC_TRAINING,)).train("a")
    kill(world, "a", 1)
    assert view(world).world_size == 3 and [h.rank for h in world.job.progress.holders["a"] if h] == [0, 2, 3]
    world.start_all()
    world.do(world.failed("a", 0), world.failed("a", 1))
    assert [h.rank for h in world.job.progress.holders["a"] if h] == [3]


def test_the_late_success_of_a_worker_that_was_ended_for_hanging_is_no_news_of_the_others() -> None:
    world = World(nodes=(1, 1), workers=2, session=DDP, recovery=(Strategy.ELASTIC_TRAINING,)).train("a")
    world.do(world.stalled("a", 5, 6))
    assert view(world).world_size == 1 and view(world).replaced == (("a", 0),)
    assert world.do(world.succeeded("a", 0, view=1)).records == []
    assert [h.rank for h in world.job.progress.holders["a"] if h] == [1], "the other is still counted on"
    only(world.do(world.succeeded("a", 1, view=1)).records, r.WorkerSucceededRecord)
    assert world.job.progress.holders["a"] == (None,)


def test_a_stumble_of_an_older_view_says_nothing() -> None:
    world = training()
    kill(world, "b")
    assert world.do(world.stumbled("a", 0, view=1), world.stalled("a", 3, 3, view=1)).records == []


# --- waiting for the cause


def test_echoes_wait_for_the_cause() -> None:
    world = training()
    world.do(world.stumbled("a", 0), world.stumbled("b", 0))
    assert world.job.incidents.current and view(world).number == 1
    kill(world, "b", 1)
    assert decided(world).strategy is Strategy.RECOVER_IN_PLACE and "rank 3" in decided(world).cause


@pytest.mark.parametrize("recovery", ["-retry", "recover-in-place,exit"])
def test_where_no_step_is_tried_again_echoes_of_all_wait_for_the_cause_too(recovery: str) -> None:
    world = training(recovery=allowed(recovery))
    cut_links(world)
    assert world.job.incidents.current and not world.finished and view(world).number == 1, "somebody may still say why"
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


def test_where_all_wait_and_none_is_behind_no_rank_is_blamed_for_its_number() -> None:
    """As where all hosts wait for their devices: which of these hangs, no host can tell. The collectives are aborted,
    and a device that does not come to rest after that has its process replaced."""
    world = training()
    world.do(world.stalled("a", 5, 5), world.stalled("b", 5, 5))
    assert decided(world).strategy is Strategy.RETRY and not view(world).replaced
    assert "no rank has come less far" in decided(world).cause


def test_a_hang_happened_when_the_last_thing_moved() -> None:
    world = training()
    hang(world)
    closed = only(world.prove(), r.IncidentClosed)
    assert closed.happened_at == pytest.approx(closed.detected_at - 12.0)


def test_who_waits_for_a_view_is_not_the_one_that_hangs() -> None:
    world = training()
    world.do(world.stalled("a", 3, 3, joining=True), world.stalled("b", 3, 3, joining=True))
    assert view(world).number == 1, "they wait for somebody, or something, else"
    world.do(world.moved("b"))
    world.do(world.stalled("b", 5, 4))
    assert view(world).replaced == (("b", 1),)


def test_those_who_wait_for_a_busy_node_do_not_hang() -> None:
    world = training()
    world.do(world.stalled("a", 5, 4))
    world.wait(60.0)
    assert view(world).number == 1 and world.job.incidents.current is None


def test_a_stall_that_has_dissolved_does_not_count() -> None:
    world = training()
    world.do(world.stalled("a", 3, 3))
    world.do(world.moved("a"))
    world.do(world.stalled("b", 9, 8))
    assert view(world).number == 1, "what a said is of another stall"
    world.do(world.stalled("a", 9, 9))
    assert view(world).replaced == (("b", 1),)


@pytest.mark.parametrize("apart_s", [1.0, 11.0, 3600.0])
def test_reports_of_a_stall_hold_until_something_moves(apart_s: float) -> None:
    """Nodes whose steps differ have limits that differ: their reports come minutes apart."""
    world = training()
    world.do(world.stalled("a", 5, 5))
    world.wait(apart_s)
    world.do(world.stalled("b", 5, 4))
    assert view(world).replaced == (("b", 1),)


def test_who_does_not_wait_hangs_whatever_number_of_collectives_others_have_made() -> None:
    """The first stage of a pipeline makes fewer than the one in the middle, which hangs."""
    world = training()
    world.do(world.stalled("a", 5, 5, collectives=(2, 4), idle=(1,)), world.stalled("b", 5, 5, collectives=(2, 2)))
    assert view(world).replaced == (("a", 1),)
    assert "does not wait for other ranks" in decided(world).cause


def test_who_is_still_in_the_view_before_hangs_whatever_step_its_attempt_was_at() -> None:
    world = training()
    a = world.stalled("a", 5, 5, collectives=(0, 9), views=(2, 1))
    world.do(a, world.stalled("b", 5, 5, collectives=(0, 0), views=(2, 2)))
    assert view(world).replaced == (("a", 1),)


def test_all_sleepers_are_replaced_at_once_while_all_others_wait() -> None:
    world = training()
    world.do(world.stalled("a", 5, 5, asleep=(1,), stalled_s=1.0))
    assert view(world).number == 1, "is the other node at work?"
    world.do(world.stalled("b", 5, 5, asleep=(0,), stalled_s=1.0))
    assert view(world).replaced == (("a", 1), ("b", 0))
    assert "rank 1 on a hangs" in decided(world).cause and "rank 2 on b too" in decided(world).cause


def test_a_sleeper_is_replaced_as_soon_as_the_other_nodes_wait() -> None:
    world = training()
    world.do(world.waiting("b"))
    assert world.job.incidents.current is None, "nobody is known to hang"
    world.do(world.stalled("a", 5, 5, asleep=(0,), stalled_s=1.0))
    assert view(world).replaced == (("a", 0),)


def test_ranks_that_all_sleep_are_left_alone_until_that_has_lasted_too_long() -> None:
    world = training()
    for stalled_s, is_overdue in ((10.0, False), (60.0, True)):
        assert world.job.incidents.current is None, "a script may have all its ranks sleep"
        for node_id in "ab":
            world.do(world.stalled(node_id, 5, 5, asleep=(0, 1), stalled_s=stalled_s, is_overdue=is_overdue))
    assert world.job.incidents.current is not None


def test_sleepers_of_one_node_are_replaced_when_those_of_another_stand_still_and_do_not_sleep() -> None:
    """They wait for something that no page says: a lock, a communicator that is not torch's."""
    world = training()
    world.do(world.stalled("a", 5, 5, asleep=(0, 1), stalled_s=1.0, is_overdue=False))
    assert view(world).number == 1
    world.do(world.stalled("b", 5, 5, idle=(0, 1)))
    assert view(world).replaced == (("a", 0), ("a", 1))


def test_ranks_that_all_sleep_are_left_alone_though_one_node_has_said_that_it_takes_too_long() -> None:
    world = training()
    world.do(world.stalled("a", 5, 5, asleep=(0, 1)))
    world.do(world.stalled("b", 5, 5, asleep=(0, 1), is_overdue=False))
    assert view(world).number == 1 and world.job.incidents.current is None
    world.do(world.moved("b"))
    world.do(world.waiting("b"))
    assert view(world).replaced == (("a", 0), ("a", 1))


def test_a_sleeper_is_left_alone_while_another_node_moves() -> None:
    world = training()
    world.do(world.waiting("b"), world.moved("b"), world.stalled("a", 5, 5, asleep=(0,), stalled_s=1.0))
    assert view(world).number == 1 and world.job.incidents.current is None


def test_a_survivor_that_hangs_in_a_recovery_is_replaced_by_the_rung_that_was_tried_before() -> None:
    world = training()
    kill(world, "b", 1)
    world.start_all()
    world.do(world.stalled("b", 5, 5, joining=True), world.stalled("a", 5, 5, joining=True, idle=(1,)))
    assert view(world).replaced == (("a", 1),) and decided(world).strategy is Strategy.RECOVER_IN_PLACE


def test_a_rung_that_was_spent_on_the_wrong_suspects_is_open_for_the_right_one() -> None:
    world = training()
    for suspect in range(4):
        steps = [[5, 5], [5, 5]]
        steps[suspect // 2][suspect % 2] = 4
        world.do(world.stalled("a", *steps[0]), world.stalled("b", *steps[1]))
        assert view(world).replaced == (("ab"[suspect // 2], suspect % 2),)
        assert decided(world).strategy is Strategy.RECOVER_IN_PLACE
        world.settle_all()


@pytest.mark.parametrize(("hang", "tries"), [({"asleep": (1,), "is_overdue": False}, 6), ({"idle": (1,)}, 3)])
def test_a_rank_that_hangs_again_is_replaced_again_before_the_job_is_given_up(hang: dict[str, Any], tries: int) -> None:
    """It waits for storage that is away, in the new process as in the old one; its agent waits longer each time."""
    world = training(session=OWN)
    for _ in range(tries):
        world.do(world.stalled("b", 5, 5), world.stalled("a", 5, 5, **hang))
        assert decided(world).strategy is Strategy.RECOVER_IN_PLACE and view(world).replaced == (("a", 1),)
        world.settle_all()
    world.do(world.stalled("b", 5, 5), world.stalled("a", 5, 5, **hang))
    assert decided(world).strategy in (Strategy.DUMP, Strategy.EXIT), "one that hangs for ever is given up in the end"


def test_where_all_wait_to_join_for_long_the_view_is_tried_again() -> None:
    world = training()
    kill(world, "b", 1)
    world.start_all()
    number = view(world).number
    for stalled_s in (world.settings.joining_stall_s / 2, world.settings.joining_stall_s):
        assert view(world).number == number
        world.do(*(world.stalled(node, 5, 5, joining=True, stalled_s=stalled_s) for node in "ab"))
    assert view(world).number == number + 1 and not view(world).replaced
    assert decided(world).strategy is Strategy.RETRY


def test_a_hang_of_the_only_holder_of_a_shard_restarts_all() -> None:
    world = training(session=SessionInfo(shard_map=ShardMap(4)), restarts=1)
    world.do(world.stalled("a", 5, 5, idle=(0,)), world.stalled("b", 5, 5))
    assert not view(world).keeps_workers and decided(world).strategy is Strategy.RESTART


# --- advice


def test_a_blamed_node_is_sent_away() -> None:
    world = training()
    world.do(world.failed("b", 0, end=KILLED, advice=FailoverStrategy.NODE_FAILOVER))
    assert world.members == ["a"] and decided(world).strategy is Strategy.ELASTIC_TRAINING
    assert isinstance(world.order_to("b"), o.Hold)


def test_a_node_leaves_while_nothing_moves() -> None:
    world = training()
    world.do(world.stalled("a", 5, 5), world.stalled("b", 5, 5), DrainRequested(node_id="b", why="maintenance"))
    assert world.members == ["a"] and view(world).keeps_workers and not view(world).planned


def test_a_blamed_node_is_replaced() -> None:
    world = training()
    world.do(world.hello("c"))
    world.do(world.failed("b", 0, end=KILLED, advice=FailoverStrategy.NODE_FAILOVER))
    assert world.members == ["a", "c"]


def test_a_global_failover_restarts_all_and_counts() -> None:
    world = training(restarts=1)
    world.do(world.failed("b", 0, advice=FailoverStrategy.GLOBAL_FAILOVER))
    assert decided(world).strategy is Strategy.RESTART and world.job.incidents.restarts_used == 1


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
    world.do(DrainRequested(node_id="b", why="maintenance"))
    assert world.members == ["a"] and view(world).keeps_workers and view(world).planned
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
    assert world.members == ["a"] and not view(world).keeps_workers and world.job.incidents.restarts_used == 0


def test_a_leaving_node_serves_until_it_is_calm() -> None:
    world = training()
    kill(world, "a")
    world.do(DrainRequested(node_id="b", why="maintenance"))
    assert world.members == ["a", "b"] and isinstance(world.order_to("b"), o.Serve)
    world.prove()
    assert world.members == ["a"] and view(world).planned


def test_an_unknown_node_cannot_drain() -> None:
    world = training()
    assert world.do(DrainRequested(node_id="z", why="maintenance")).records == []


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
    world.wait(59.0)
    assert world.members == ["a", "b"]
    world.wait(1.0)
    assert world.members == ["a", "b", "c"]


@pytest.mark.parametrize("session", [FSDP, DDP])
def test_a_world_that_may_not_change_does_not_grow(session: SessionInfo) -> None:
    without = tuple(s for s in LADDER if s is not Strategy.ELASTIC_TRAINING)
    world = training(session=session, nodes=(1, 3), recovery=LADDER if session is FSDP else without)
    world.do(world.hello("c", parked=2))
    world.wait(100.0)
    assert world.members == ["a", "b"]


def test_empty_local_ranks_are_filled_again() -> None:
    world = training(recovery=(Strategy.ELASTIC_TRAINING,))
    kill(world, "b", 0)
    assert [m.workers for m in view(world).members] == [2, 1]
    assert serve(world, "b").spares == 1 and serve(world, "b").workers == 1
    world.do(world.parked("b", 1))
    assert view(world).number == 2, "first things first"
    world.prove()
    assert [m.workers for m in view(world).members] == [2, 2] and view(world).planned
    world.prove()
    assert serve(world, "b").spares == 0 and world.job.incidents.current is None


def test_fewer_nodes_are_wanted_and_then_more() -> None:
    world = training(nodes=(1, 2))
    world.do(ResizeRequested(nodes=1, why="asked"))
    assert world.members == ["a"] and view(world).planned and world.order_to("b").release == 2  # type: ignore[union-attr]
    world.prove()
    world.do(ResizeRequested(nodes=3, why="asked"), world.parked("b", 2))
    assert world.members == ["a", "b"]
    world.prove()
    world.do(world.hello("c", parked=2))
    assert world.members == ["a", "b", "c"]


def test_fewer_than_the_minimum_cannot_be_had() -> None:
    world = training(nodes=(2, 2))
    assert world.do(ResizeRequested(nodes=1, why="asked")).records == []


def test_scripts_of_others_are_resized_by_a_restart() -> None:
    world = World(nodes=(1, 2)).run("a", "b")
    world.do(ResizeRequested(nodes=1, why="asked"))
    assert world.members == ["a"] and not view(world).keeps_workers and world.job.incidents.restarts_used == 0


def test_a_fault_before_the_boundary_is_a_fault() -> None:
    world = training()
    world.do(DrainRequested(node_id="b", why="maintenance"))
    assert view(world).planned
    world.do(world.offered("a"))
    world.do(world.failed("a", 0, view=1, end=KILLED))
    assert view(world).number == 3 and view(world).keeps_workers and not view(world).planned
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


# --- what is found out in the middle of a view


def test_state_that_turns_out_to_differ_between_ranks_counts_from_then_on() -> None:
    """Every node hears of it, and two ranks that keep one another's copies can no longer die together."""
    world = training()
    noted = only(world.do(world.revised("b", OWN)).records, r.SessionRevisedRecord)
    assert noted.session == OWN == world.job.state.session
    assert serve(world, "a").session == OWN and serve(world, "b").session == OWN
    assert not world.do(world.revised("a", OWN)).records, "known already"
    world.do(world.failed("a", 0, end=KILLED), world.failed("b", 0, end=KILLED))
    assert decided(world).strategy is not Strategy.RECOVER_IN_PLACE
    assert "the own state of rank 0" in decided(world).why


def test_what_was_found_out_stays_known_when_newcomers_cannot_know_it_yet() -> None:
    world = training()
    world.do(world.revised("a", OWN))
    kill(world, "b", 0)
    assert decided(world).strategy is Strategy.RECOVER_IN_PLACE
    world.do(world.settled("a", session=OWN), world.settled("b", session=SessionInfo()))
    assert world.job.state.session == OWN


def test_it_is_also_heard_of_workers_that_were_kept_since() -> None:
    world = training()
    late = world.revised("a", OWN)
    kill(world, "b", 0)
    world.do(late)
    assert world.job.state.session == OWN


def test_why_there_are_not_fewer_ranks_is_said() -> None:
    world = training(session=OWN, recovery=allowed("elastic-training,exit"))
    lose(world, "b")
    assert decided(world).strategy is Strategy.EXIT
    assert "no elastic-training: each rank has a meter" in decided(world).why


def test_a_state_that_was_cut_again_for_fewer_ranks_is_held_as_it_is_cut_now() -> None:
    """Workers that enter their function again have other shards: what was known of the old ones counts no more."""
    world = World(nodes=(1, 3), workers=1, session=SessionInfo(shard_map=ShardMap(3), replicas=1, resizable=True))
    world.train("a", "b", "c")
    world.do(world.broke("c"))
    world.wait(60.0)
    assert world.job.view is not None and world.job.view.strategy is Strategy.ELASTIC_TRAINING
    world.session = SessionInfo(shard_map=ShardMap(2), replicas=1, resizable=True)
    world.prove(step=9)
    assert world.job.state.session == world.session and world.job.incidents.current is None
    of_nodes = world.job.progress.holders.values()
    assert {holder.layout.shards for holders in of_nodes for holder in holders if holder} == {2}


def test_the_end_of_a_worker_that_has_failed_is_waited_for_beyond_the_window() -> None:
    world = training()
    world.do(world.failing("a", 0), world.stumbled("a", 1), world.stumbled("b", 0), world.stumbled("b", 1))
    assert not [record for record in world.wait(20.0) if isinstance(record, r.IncidentDecided)]
    world.do(world.failed("a", 0))
    assert decided(world).strategy is Strategy.RECOVER_IN_PLACE
    assert "rank 0 on a" in decided(world).cause


def test_a_failed_worker_that_never_ends_is_waited_for_no_longer_than_its_agent_does() -> None:
    world = training()
    world.do(world.failing("a", 0), world.stumbled("a", 1), world.stumbled("b", 0), world.stumbled("b", 1))
    world.wait(ENDING_TIMEOUT_S)
    assert decided(world).strategy is Strategy.RETRY


def test_the_cause_is_named_from_the_first_moment_on_and_not_what_it_broke() -> None:
    """The agent of rank 1 hears of the exception at once; its process ends seconds later, after those of the others."""
    world = training()
    world.do(world.failing("a", 1, message="ValueError: sample 2 is broken"), world.stumbled("a", 0))
    opened = [record for record in world.history if isinstance(record, r.IncidentOpened)]
    assert opened[-1].cause == "rank 1 on a failed: ValueError: sample 2 is broken"


def test_a_script_without_a_session_that_has_failed_is_waited_for_before_its_victims_are_believed() -> None:
    world = World(nodes=(1, 1), workers=2, restarts=0)
    world.do(world.hello("a"))
    world.start_all()
    world.do(world.failing("a", 1, message="ValueError: sample 2 is broken"))
    world.do(world.failing("a", 0, message="RuntimeError: Connection closed by peer"))
    world.do(world.failed("a", 0, collateral=True))
    assert not [record for record in world.wait(20.0) if isinstance(record, r.IncidentDecided)]
    world.do(world.failed("a", 1, exception="ValueError"))
    assert world.finished and world.finished.cause and world.finished.cause.rank == 1
    assert world.finished.why.startswith("rank 1 on a exited with code 1")


def test_a_victim_that_reports_its_own_error_delays_nothing() -> None:
    world = World(nodes=(1, 1), workers=2, restarts=0)
    world.do(world.hello("a"))
    world.start_all()
    world.do(world.failing("a", 1, message="RuntimeError: Connection closed by peer"))
    world.do(world.failed("a", 0, collateral=True))
    world.wait(world.settings.collect_window_s)
    assert world.finished and world.finished.cause and world.finished.cause.rank == 0


def test_a_failed_worker_alone_is_no_trouble_before_it_ends_and_news_of_the_past_is_none() -> None:
    world = training()
    assert world.do(world.failing("a", 0), world.failing("a", 0)).records
    assert not [record for record in world.wait(5.0) if isinstance(record, r.IncidentOpened)]
    kill(world, "a")
    assert not world.do(world.failing("a", 0, view=1)).records, "of a view that is over"


def test_of_many_interrupted_steps_the_first_are_listed_and_the_rest_counted() -> None:
    """All but one rank of 50 nodes report a broken collective: the journal has the first of them, and how many."""
    nodes = [f"n{number:02}" for number in range(50)]
    world = World(nodes=(50, 50), workers=2, session=SessionInfo()).train(*nodes)
    told = [world.stumbled(node_id, local_rank) for node_id in nodes for local_rank in range(2)][1:]
    world.do(*told, *told)
    world.do(world.failed("n00"))
    listed = [record for record in world.history if isinstance(record, r.StepInterruptedRecord)]
    decided = only(world.history, r.IncidentDecided)
    assert (len(listed), decided.echoes) == (ECHOES_LISTED_MAX, 99 - ECHOES_LISTED_MAX)
    assert decided.strategy is Strategy.RECOVER_IN_PLACE and world.view_number == 2


def test_where_all_ranks_are_interrupted_no_cause_is_waited_for_however_many_there_are() -> None:
    nodes = [f"n{number:02}" for number in range(50)]
    world = World(nodes=(50, 50), workers=2, session=SessionInfo()).train(*nodes)
    world.do(*(world.stumbled(node_id, local_rank) for node_id in nodes for local_rank in range(2)))
    decided = only(world.history, r.IncidentDecided)
    assert decided.strategy is Strategy.RETRY and "100 ranks were interrupted" in decided.cause


def test_a_master_that_restarts_in_the_middle_of_many_echoes_decides_all_the_same() -> None:
    nodes = [f"n{number:02}" for number in range(50)]
    world = World(nodes=(50, 50), workers=2, session=SessionInfo()).train(*nodes)
    world.do(*(world.stumbled(node_id, local_rank) for node_id in nodes[1:] for local_rank in range(2)))
    world.restart_master()
    world.reconnect_all()
    world.wait(1.0)
    assert only(world.history, r.IncidentDecided).strategy is Strategy.RETRY


# --- whole replicas of a model that is cut

PIPELINE = SessionInfo(shard_map=ShardMap(2, (2, 2), (False, True)), world_multiple=2, world_size=4)
"""Ranks 0 and 1 have the first stage, 2 and 3 the second."""


def in_replicas(nodes: tuple[int, int] = (1, 2), **settings: Any) -> World:
    return training(session=PIPELINE, nodes=nodes, recovery=allowed("elastic-training,exit"), **settings)


@pytest.mark.parametrize(
    ("node_id", "local_rank", "surplus"),
    [("a", 0, ("b", 1)), ("a", 1, ("b", 1)), ("b", 0, ("a", 1)), ("b", 1, ("a", 1))],
)
def test_the_living_form_whole_replicas_and_no_shard_is_left_out(
    node_id: str, local_rank: int, surplus: tuple[str, int]
) -> None:
    world = in_replicas()
    kill(world, node_id, local_rank)
    assert decided(world).strategy is Strategy.ELASTIC_TRAINING
    assert "in whole replicas of 2; 1 worker left over" in decided(world).why
    assert view(world).surplus == (surplus,) and view(world).world_size == 2
    assert tuple(m.workers for m in view(world).members) == (1, 1)
    assert serve(world, surplus[0]).surplus == (surplus[1],) and serve(world, node_id).surplus == ()


def test_a_job_whose_living_form_no_whole_replica_does_not_go_on() -> None:
    world = in_replicas()
    kill(world, "a", 0)
    settle(world, ShardMap(2))
    kill(world, "b", 0)
    assert world.finished is not None


def test_who_has_no_rank_parks_and_the_next_replica_needs_all_its_workers() -> None:
    world = in_replicas()
    kill(world, "b", 1)
    settle(world, ShardMap(2))
    assert [serve(world, node_id).spares for node_id in "ab"] == [1, 1]
    world.do(world.committed("a", 7))
    world.do(world.parked("a", 1))
    assert view(world).world_size == 2, "one more rank would be no replica"
    world.do(world.parked("b", 1))
    assert view(world).planned and view(world).world_size == 4
    assert tuple(m.workers for m in view(world).members) == (2, 2)


def test_a_node_is_taken_in_with_as_many_workers_as_make_whole_replicas() -> None:
    world = in_replicas(nodes=(1, 4))
    world.do(world.committed("a", 7))
    world.do(world.hello("c", workers=1))
    world.do(world.parked("c", 1))
    assert view(world).world_size == 4
    world.do(world.hello("d", workers=2))
    world.do(world.parked("d", 2))
    world.wait(10)
    assert view(world).planned and view(world).world_size == 6


def test_a_map_of_another_world_is_not_told_to_newcomers() -> None:
    assert PIPELINE.map_in(4) == PIPELINE.shard_map
    small = replace(PIPELINE, shard_map=ShardMap(2), world_size=2)
    assert small.map_in(2) == ShardMap(2) and small.map_in(4) is None


def settle(world: World, shard_map: ShardMap) -> None:
    """The workers of the view have joined it, cut like this."""
    world.session = replace(PIPELINE, shard_map=shard_map, world_size=view(world).world_size)
    world.do(*(world.settled(member.node_id) for member in view(world).members))
