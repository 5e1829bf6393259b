"""The simulator's driver is the master's: the same loop, with the same checks."""

from __future__ import annotations

import pytest

from holdfast.core import choose_strategy
from holdfast.core import events as e
from holdfast.core.settings import Settings
from holdfast.core.state import JobState
from holdfast.core.strategies import Strategy
from holdfast.core.transact import begin, transact
from holdfast.sim.core_driver import CoreDriver
from support.world import World

SETTINGS = Settings(nodes_min=2, nodes_max=2, restarts_max=0, spare_nodes=1)


def told() -> list[tuple[float, list[e.Event]]]:
    """A job of two nodes and a spare that loses one node: what its master heard, and when."""
    world = World(nodes=(2, 2), session=e.SessionInfo(), spare_nodes=1, restarts=0)
    names = ["a", "b", "c"]
    heard: list[tuple[float, list[e.Event]]] = [(100.0, [world.hello(name) for name in names])]
    world.do(*heard[0][1])
    heard.append((101.0, [world.started(name) for name in world.members]))
    heard.append((102.0, [world.settled(world.members[0])]))
    heard.append((103.0, [world.committed(world.members[0]), world.offered(world.members[0])]))
    heard.append((104.0, [world.broke(world.members[1])]))
    return [*heard, (105.0, [])]


def test_it_makes_the_records_that_a_master_makes() -> None:
    driver, job = CoreDriver("job", SETTINGS, 99.0), JobState()
    assert driver.began == begin(job, "job", SETTINGS, 99.0).records
    made = 0
    for at, events in told():
        records = driver.take(events, at)
        assert records == transact(job, events, at).records
        made += len(records)
    assert driver.records == made > 5 and driver.job == job
    assert job.view and job.view.number == 2


def test_what_would_crash_a_master_crashes_a_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated fleet lives through more than a job ever will: a mistake of the policy must not pass there."""
    forgotten = (Strategy.RECOVER, Strategy.ELASTIC_TRAINING)
    monkeypatch.setattr(choose_strategy, "RUNGS", [one for one in choose_strategy.RUNGS if one[0] not in forgotten])
    driver = CoreDriver("job", SETTINGS, 99.0)
    with pytest.raises(AssertionError, match="although a node stands by for each that is lost"):
        for at, events in told():
            driver.take(events, at)


def test_time_that_goes_back_crashes() -> None:
    driver = CoreDriver("job", SETTINGS, 99.0)
    with pytest.raises(AssertionError, match="time went back"):
        driver.take(told()[0][1], 98.0)
