"""All workers are gone, and their state is in the nodes' memory: they start from it, and no restart is counted, as long
as it is nobody's error and gets further each time."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.core import events as e
from holdfast.core import orders as o
from holdfast.core import records as r
from holdfast.core.durability import IMAGES_MAX, JOURNAL_EVERY_S, Durability, ImageReport, SnapshotStats
from holdfast.core.events import SessionInfo
from holdfast.core.faults.failures import Exited, Signalled
from holdfast.core.snapshot_interval import DAY_S, FAULTS_PER_NODE_DAY, fault_rate
from holdfast.core.strategies import FailoverStrategy, Strategy
from support.world import World

KILLED = Signalled(9, "SIGKILL")


def training(restarts: int = 0, nodes: tuple[int, int] = (1, 2)) -> World:
    return World(nodes=nodes, session=SessionInfo(), workers=1, restarts=restarts).train("a", "b")


def keep(world: World, node_id: str, part: int, *steps: int, view: int = 1) -> None:
    world.do(world.kept(node_id, *(ImageReport(step, part, 1, 2, view) for step in steps)))


def keep_all(world: World, *steps: int) -> None:
    keep(world, "a", 0, *steps)
    keep(world, "b", 1, *steps)


def kill_all(world: World, **choices: Any) -> r.IncidentDecided:
    choices = {"end": KILLED} | choices
    world.do(world.failed("a", 0, **choices), world.failed("b", 0, **choices))
    return [record for record in world.history if isinstance(record, r.IncidentDecided)][-1]


def test_a_restart_from_memory_is_not_counted() -> None:
    world = training()
    keep_all(world, 8, 9)
    decided = kill_all(world)
    assert (decided.strategy, decided.counted, decided.reload) == (Strategy.RESTART, False, 9)
    assert "step 9 or later in the nodes' memory" in decided.why
    assert (world.job.incidents.restarts_used, world.job.state.reloaded) == (0, 9)


def test_without_memory_it_is_and_none_is_left() -> None:
    world = training()
    decided = kill_all(world)
    assert (decided.strategy, decided.reload) == (Strategy.EXIT, -1) and "--max-restarts 0" in decided.why


@pytest.mark.parametrize("said", [((8, 9), (8,)), ((40, 41), (37, 38))])
def test_nodes_need_not_have_spoken_at_the_same_moment(said: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    world = training()
    keep(world, "a", 0, *said[0])
    keep(world, "b", 1, *said[1])
    decided = kill_all(world)
    assert (decided.strategy, decided.counted, decided.reload) == (Strategy.RESTART, False, said[1][-1])


def test_an_error_of_their_own_counts() -> None:
    world = training(restarts=1)
    keep_all(world, 8, 9)
    decided = kill_all(world, exception="ValueError")
    assert (decided.strategy, decided.counted) == (Strategy.RESTART, True)


def test_a_wish_of_the_extension_counts() -> None:
    world = training(restarts=1)
    keep_all(world, 8, 9)
    decided = kill_all(world, advice=FailoverStrategy.GLOBAL_FAILOVER)
    assert (decided.strategy, decided.counted, decided.reload) == (Strategy.RESTART, True, 9)


def test_what_a_healthy_rank_suffers_when_another_goes_does_not() -> None:
    world = training()
    keep_all(world, 8, 9)
    world.do(world.failed("a", 0, end=KILLED), world.failed("b", 0, collateral=True))
    decided = [record for record in world.history if isinstance(record, r.IncidentDecided)][-1]
    assert (decided.strategy, decided.counted, decided.reload) == (Strategy.RESTART, False, 9)


def test_what_gets_no_further_counts() -> None:
    world = training(restarts=1)
    keep_all(world, 8, 9)
    assert not kill_all(world).counted
    world.prove()
    keep_all(world, 8, 9)
    second = kill_all(world)
    assert (second.strategy, second.counted) == (Strategy.RESTART, True)


def test_what_gets_further_does_not() -> None:
    world = training()
    for step in (9, 10, 11):
        keep_all(world, step)
        decided = kill_all(world)
        assert (decided.strategy, decided.counted, decided.reload) == (Strategy.RESTART, False, step)
        world.prove(step)


def test_parts_on_a_node_that_is_gone_are_gone() -> None:
    world = training()
    keep_all(world, 8, 9)
    world.do(world.broke("b"))
    world.wait(0.3)
    world.do(world.failed("a", 0, end=KILLED))
    decided = [record for record in world.history if isinstance(record, r.IncidentDecided)][-1]
    assert decided.reload == -1


def test_a_node_that_comes_again_says_what_it_has() -> None:
    """Its next life is asked anew; what the last one said is forgotten."""
    world = training()
    keep_all(world, 8, 9)
    world.do(world.broke("b"))
    world.wait(0.3)
    world.next_life("b")
    world.do(world.hello("b"))
    assert "b" not in world.job.state.images


def test_memory_is_written_down_now_and_then_only() -> None:
    world = training()
    for step in range(1, 50):
        keep_all(world, step)
    said = [record for record in world.history if isinstance(record, r.DurabilityChanged)]
    assert len(said) <= 2 and not any(r.is_durable(x) for x in world.history if isinstance(x, r.ImagesReportedRecord))
    world.wait(JOURNAL_EVERY_S)
    keep_all(world, 60)
    assert world.job.state.durability.memory >= 49
    assert isinstance(world.job.state.durability, Durability)


def test_a_node_may_not_say_too_much() -> None:
    world = training()
    keep(world, "a", 0, *range(IMAGES_MAX + 5))
    assert len(world.job.state.images["a"]) == IMAGES_MAX


def test_a_checkpoint_is_known_by_its_highest_step() -> None:
    world = training()
    for step in (5, 10, 7):
        world.do(e.CheckpointPublished(node_id="a", incarnation=world.life("a"), step=step, url=f"/c/step-{step}"))
    assert (world.job.state.checkpoint_step, world.job.state.checkpoint_url) == (10, "/c/step-10")
    assert len([record for record in world.history if isinstance(record, r.CheckpointPublishedRecord)]) == 2


def test_the_fault_rate_follows_from_what_has_happened_to_the_job() -> None:
    world = training()
    before = world.order_to("a")
    assert isinstance(before, o.Serve) and before.faults_per_node_day == FAULTS_PER_NODE_DAY
    keep_all(world, 7)
    world.wait(DAY_S)
    kill_all(world)
    after = world.order_to("a")
    assert isinstance(after, o.Serve) and after.view > before.view
    assert after.faults_per_node_day == pytest.approx(fault_rate(1, 2 * DAY_S)), "two nodes, a day, a fault"


def test_how_snapshots_are_made_is_written_down_with_what_is_safe() -> None:
    world = training()
    for node_id, snapshot_stats in (
        ("a", SnapshotStats(5, False, 1.0, 0.05, 3, 1, 0)),
        ("b", SnapshotStats(5, False, 1.1, 0.04, 4, 0, 2)),
    ):
        said = world.kept(node_id, *(ImageReport(7, part, 1, 2, 1) for part in (0, 1)))
        world.wait(JOURNAL_EVERY_S)
        world.do(msgspec.structs.replace(said, snapshot_stats=snapshot_stats))
    assert world.job.state.snapshot_stats == SnapshotStats(5, False, 1.0, 0.05, 7, 1, 2), (
        "the slowest counts, numbers are added up"
    )


def test_messages_from_before_there_was_pacing_are_understood() -> None:
    said = msgspec.msgpack.decode(msgspec.msgpack.encode(e.ImagesReported(node_id="a", incarnation="a.1", images=())))
    del said["snapshot_stats"]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=e.ImagesReported).snapshot_stats == SnapshotStats()


def test_survivors_that_find_a_part_of_the_state_gone_are_no_error_of_the_script() -> None:
    """They raise it when more has died than was known when the view was formed."""
    world = training()
    keep_all(world, 8, 9)
    decided = kill_all(world, end=Exited(1), exception="StateLostError")
    assert (decided.strategy, decided.counted, decided.reload) == (Strategy.RESTART, False, 9)
