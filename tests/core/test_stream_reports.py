"""What the master writes down of streamed shards: what committed steps granted, once, and nothing of a past life."""

from __future__ import annotations

from typing import Any

from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.sentences import sentence
from holdfast.core.shard_leases import REPORTS_MAX, TRIES_MAX, WHY_CHARS_MAX, Lease, ShardProblem
from support.world import World, only, tags

FIRST, SECOND = Lease(0, 0, 0, "a.tar", 0), Lease(7, 0, 1, "b.tar", 3)


def news(
    world: World, *leases: Lease, view: int | None = None, problems: tuple[ShardProblem, ...] = (), life: str = ""
) -> Any:
    return e.StreamReported(
        node_id="a",
        incarnation=life or world.life("a"),
        view=world.view_number if view is None else view,
        stream="data",
        step=8,
        leases=leases,
        problems=problems,
    )


def problem(tries: int, why: str = "OSError: gone") -> ShardProblem:
    return ShardProblem(slot=0, epoch=0, shard="a.tar", cursor=1_234, tries=tries, why=why)


def training() -> World:
    return World(session=e.SessionInfo()).train("a", "b")


def test_a_lease_is_written_down_once_however_often_it_is_told() -> None:
    world = training()
    found = only(world.do(news(world, FIRST)).records, r.ShardsLeased)
    assert (found.stream, found.view, found.leases) == ("data", world.view_number, (FIRST,))
    assert not world.do(news(world, FIRST)).records
    assert only(world.do(news(world, FIRST, SECOND)).records, r.ShardsLeased).leases == (SECOND,)
    world.restart_master()
    world.reconnect_all()
    assert not world.do(news(world, FIRST, SECOND)).records
    assert world.job.data.streams.by_name["data"].epoch == 1


def test_failures_then_the_quarantine() -> None:
    world = training()
    assert tags(world.do(news(world, problems=(problem(1),))).records) == ["shard-failed"]
    assert not world.do(news(world, problems=(problem(1, ""),))).records
    found = world.do(news(world, problems=(problem(TRIES_MAX, "x" * 9_999),))).records
    assert tags(found) == ["shard-quarantined"]
    assert len(only(found, r.ShardQuarantined).problem.why) == WHY_CHARS_MAX
    assert "a.tar could not be read from record 1,234 on in epoch 0" in sentence(found[0])
    assert list(world.job.data.streams.by_name["data"].quarantined) == [(0, "a.tar")]


def test_a_kept_view_leaves_leases_in_force_and_late_news_of_the_view_before_count() -> None:
    world = training()
    before = world.view_number
    world.do(news(world, FIRST))
    world.do(world.stumbled("b", error="RetryableError"))
    assert world.view_number == before + 1 and world.job.view and world.job.view.keeps_workers
    assert not world.do(news(world, FIRST)).records
    assert tags(world.do(news(world, SECOND, view=before)).records) == ["shards-leased"]


def test_who_went_back_to_a_checkpoint_grants_anew_and_the_life_before_is_not_heard() -> None:
    world = World().run("a", "b")
    before = world.view_number
    world.do(news(world, FIRST, SECOND))
    world.do(world.failed("b"))
    world.start_all()
    assert world.view_number > before and world.job.view and not world.job.view.keeps_workers
    assert not world.do(news(world, Lease(8, 0, 1, "c.tar", 0), view=before)).records
    assert only(world.do(news(world, FIRST)).records, r.ShardsLeased).leases == (FIRST,)


def test_neither_another_life_nor_a_view_to_come_is_heard() -> None:
    world = training()
    assert not world.do(news(world, FIRST, life="a.0")).records
    assert not world.do(news(world, FIRST, view=world.view_number + 1)).records


def test_one_message_has_its_bounds() -> None:
    world = training()
    many = tuple(Lease(number, number, 0, "a.tar", 0) for number in range(REPORTS_MAX + 5))
    assert len(only(world.do(news(world, *many)).records, r.ShardsLeased).leases) == REPORTS_MAX
