"""Ranks that are slower than the others."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core import records as r
from holdfast.core.events import Event, SessionInfo, StepTime, StepTimesReported
from holdfast.core.sentences import sentence
from support.world import World, only


def report(world: World, node_id: str, *own_ms: float, view: int | None = None) -> Event:
    step_times = tuple(StepTime(local_rank, ms / 1000, 20) for local_rank, ms in enumerate(own_ms))
    number = view if view is not None else world.view_number
    return StepTimesReported(node_id=node_id, incarnation=world.life(node_id), view=number, step_times=step_times)


def training(**settings: Any) -> World:
    return World(nodes=(2, 2), session=SessionInfo(), workers=2, restarts=0, **settings).train("a", "b")


def rounds(world: World, count: int, a: tuple[float, ...], b: tuple[float, ...]) -> list[r.Record]:
    happened: list[r.Record] = []
    for _ in range(count):
        world.now += 5
        happened += world.do(report(world, "a", *a), report(world, "b", *b)).records
    return [record for record in happened if r.is_durable(record)]


@pytest.mark.parametrize(
    ("a", "b", "rank"),
    [
        ((50, 50), (50, 50), None),
        ((50, 51), (49, 57), None),  # 14 % is within the noise of a step
        ((50, 51), (49, 70), 3),
        ((50, 50), (150, 50), 2),
        ((40, 60), (50, 75), None),  # they all differ
        ((50, 50), (10, 50), None),  # faster is no problem
        ((0.1, 0.1), (0.1, 0.9), None),  # below what schedulers do to anybody
    ],
)
def test_who_is_slow(a: tuple[float, ...], b: tuple[float, ...], rank: int | None) -> None:
    found = rounds(training(), 6, a, b)
    assert [record.rank for record in found if isinstance(record, r.StragglerFound)] == ([] if rank is None else [rank])


def test_it_takes_three_reports_in_a_row_and_is_told_once() -> None:
    world = training()
    assert not rounds(world, 2, (50, 50), (50, 90))
    assert not rounds(world, 1, (50, 50), (50, 50))
    assert not rounds(world, 2, (50, 50), (50, 90))
    found = only(rounds(world, 4, (50, 50), (50, 90)), r.StragglerFound)
    assert (found.node_id, found.rank, found.own_s, found.usual_s) == ("b", 3, 0.09, 0.05)
    assert "1.8 times as long" in sentence(found)


def test_of_two_ranks_the_slower_one_is_slow() -> None:
    world = World(nodes=(2, 2), session=SessionInfo(), workers=1).train("a", "b")
    assert only(rounds(world, 3, (50,), (80,)), r.StragglerFound).node_id == "b"


def test_among_many_it_is_found_too_and_quickly() -> None:
    world = World(nodes=(64, 64), session=SessionInfo(), workers=8)
    world.careful = False
    names = [f"n{number}" for number in range(64)]
    world.train(*names)
    for _ in range(4):
        world.now += 6
        world.do(*(report(world, name, *([50.0] * 7), 95.0 if name == "n17" else 51.0) for name in names))
    found = [record for record in world.history if isinstance(record, r.StragglerFound)]
    assert [record.node_id for record in found] == ["n17"]


def test_what_is_said_of_another_view_or_of_no_seat_does_not_count() -> None:
    world = training()
    for _ in range(6):
        world.do(report(world, "a", 50, 50), report(world, "b", 50, 90, view=7), report(world, "b", 50, 50, 90))
    assert not world.job.progress.stragglers


def test_swap_sends_the_node_away_at_a_step_boundary_if_another_stands_by() -> None:
    world = training(straggler_action="swap", spare_nodes=1)
    rounds(world, 4, (50, 50), (50, 90))
    assert world.members == ["a", "b"], "nobody could take its place"
    world.do(world.hello("c"))
    world.do(world.parked("c", 2))
    assert world.members == ["a", "c"] and world.job.view and world.job.view.planned
    assert "a straggler" in only(world.history, r.NodeDraining).why


def test_report_sends_nobody_away() -> None:
    world = training(spare_nodes=1)
    world.do(world.hello("c"))
    rounds(world, 4, (50, 50), (50, 90))
    assert world.members == ["a", "b"]
