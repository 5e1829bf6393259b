"""Durations learned from a job's receipts."""

from __future__ import annotations

from holdfast.core.events import SessionInfo
from holdfast.core.records import CheckpointPublishedRecord
from holdfast.sim.phase_times import ASSUMED, learn
from support.world import World


def test_receipts_teach_how_long_recoveries_take() -> None:
    world = World(nodes=(2, 2), session=SessionInfo(), workers=2).train("a", "b")
    for seconds in (0.4, 0.6):
        world.now += 10.0
        world.do(world.failed("b", 1, failed_at=world.now - 0.05))
        world.now += seconds
        world.prove()
    published = [CheckpointPublishedRecord(at=at, step=int(at), url="") for at in (100.0, 400.0, 700.0)]
    learned = learn([*world.history, *published])
    assert [round(duration, 3) for duration in learned.times.fork] == [0.4, 0.6]
    assert [round(duration, 3) for duration in learned.times.detect] == [0.05, 0.05]
    assert learned.found == {"fork": 2, "detect": 2} and learned.checkpoint_every_s == 300.0
    assert learned.times.recover == ASSUMED.recover, "what is not in the journal stays assumed"


def test_a_journal_without_receipts_teaches_nothing() -> None:
    learned = learn(World(nodes=(1, 1)).history)
    assert learned.times == ASSUMED and not learned.found and learned.checkpoint_every_s == 0.0
