"""A thousand nodes through a day of faults: the whole policy, in simulated time, to the same end each time."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from holdfast.core.events import SessionInfo
from holdfast.core.records import ViewFormed
from holdfast.core.state import Present
from holdfast.core.strategies import Strategy
from support.world import World, durable

NODES = 1_000
ONLINE_NODES = 60
SPARES = 8
DAY_S = 86_400.0
START_UP_S = 2.0
REPAIR_MEAN_S = 1_800.0
FAULTS_A_DAY = {"node dies": 24, "node falls silent": 8, "worker fails": 24, "node is told to go": 12, "master dies": 4}


class Day:
    """Makes a day's events from a seed, and follows them to its end."""

    def __init__(self, seed: int, nodes: int = NODES, **settings: Any) -> None:
        self.random, self.nodes = Random(seed), nodes
        self.world = World(nodes=(nodes - nodes // 10, nodes), **{"restarts": 1_000} | settings)
        self.world.careful = False
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.entries = 0

    def at(self, delay_s: float, what: Callable[[], None]) -> None:
        self.entries += 1
        heapq.heappush(self.agenda, (self.world.now + delay_s, self.entries, what))

    def live(self) -> None:
        world, end = self.world, self.world.now + DAY_S
        ids = [f"n{i:04}" for i in range(self.nodes + SPARES)]
        self.random.shuffle(ids)
        world.do(*(world.hello(node_id) for node_id in ids))
        self.settle_down()
        kinds = {
            "node dies": self.die,
            "node falls silent": self.fall_silent,
            "worker fails": self.fail,
            "node is told to go": self.go,
            "master dies": self.restart_master,
        }
        for kind, times in FAULTS_A_DAY.items():
            for _ in range(times):
                self.at(self.random.uniform(0.0, DAY_S), kinds[kind])
        while self.agenda and self.agenda[0][0] < end:
            moment, _, what = heapq.heappop(self.agenda)
            world.wait(max(moment - world.now, 0.0))
            what()
            self.settle_down()

    def settle_down(self) -> None:
        """Time for verdicts and settling, then every member starts."""
        self.world.wait(1.0)
        job = self.world.job
        while self.world.serving and not self.world.finished and len(job.progress.started) < len(job.members):
            self.world.wait(START_UP_S)
            self.world.start_all()
            job = self.world.job

    def someone(self) -> str:
        nodes = self.world.job.nodes.values()
        return self.random.choice([n.node_id for n in nodes if isinstance(n.standing, Present)])

    def come_back(self, node_id: str) -> None:
        former = self.world.life(node_id)
        self.world.next_life(node_id)
        self.world.do(self.world.hello(node_id, dead_incarnations=[former]))

    def repair(self, node_id: str) -> None:
        self.at(self.random.expovariate(1 / REPAIR_MEAN_S), lambda: self.come_back(node_id))

    def die(self) -> None:
        node_id = self.someone()
        neighbours = self.random.sample(self.world.members, 2)
        self.world.do(*(self.world.failed(n, collateral=True) for n in neighbours if n != node_id))
        self.world.do(self.world.broke(node_id))
        self.repair(node_id)

    def fall_silent(self) -> None:
        node_id = self.someone()
        self.world.do(self.world.silent(node_id))
        self.repair(node_id)

    def fail(self) -> None:
        self.world.do(self.world.failed(self.random.choice(self.world.members)))

    def go(self) -> None:
        node_id = self.someone()
        self.world.do(self.world.leaving(node_id))
        self.world.do(self.world.gone(node_id))
        self.repair(node_id)

    def restart_master(self) -> None:
        self.world.restart_master(down_s=3.0)
        self.world.reconnect_all()

    def digest(self) -> str:
        digest = hashlib.sha256()
        for line in self.world.journal:
            digest.update(line)
        return digest.hexdigest()


class OnlineDay(Day):
    """The same for workers that speak to Holdfast."""

    def settle_down(self) -> None:
        """Time for verdicts; who is to keep spares has them; every view settles and commits a step."""
        world = self.world
        world.wait(1.0)
        for _ in range(20):
            wanted = {n: world.told[world.life(n)].spares for n in self.here()}  # type: ignore[union-attr]
            world.do(*(world.parked(n, spares) for n, spares in wanted.items() if world.job.nodes[n].parked < spares))
            world.wait(1.0)
            if world.finished or not world.serving or world.job.progress.first_committed >= 0:
                return
            world.wait(START_UP_S)
            world.prove()
        raise AssertionError("it does not come to rest")

    def here(self) -> list[str]:
        nodes = self.world.job.nodes.values()
        return [n.node_id for n in nodes if n.eligible and self.world.life(n.node_id) in self.world.told]

    def die(self) -> None:
        node_id = self.someone()
        neighbours = self.random.sample(self.world.members, 2)
        self.world.do(*(self.world.stumbled(n) for n in neighbours if n != node_id))
        self.world.do(self.world.broke(node_id))
        self.repair(node_id)


def test_workers_that_are_kept_live_through_a_day_without_a_restart() -> None:
    day = OnlineDay(11, ONLINE_NODES, workers=2, restarts=0, session=SessionInfo(), spares=1, spare_nodes=SPARES)
    day.live()
    job = day.world.job
    assert (
        day.world.serving
        and job.incidents.current is None
        and job.progress.first_committed >= 0
        and job.incidents.restarts_used == 0
    )
    formed = [record.view for record in day.world.history if isinstance(record, ViewFormed)]
    assert all(view.keeps_workers for view in formed[1:]) and len(formed) > sum(FAULTS_A_DAY.values()) / 2
    assert all(incident.step >= 0 for incident in job.incidents.closed)
    assert {i.strategy for i in job.incidents.closed} >= {Strategy.RECOVER} and {
        i.kind for i in job.incidents.closed
    } >= {"worker"}
    alive = sum(node.eligible for node in job.nodes.values())
    assert len(job.members) == min(ONLINE_NODES, alive) and job.view and job.view.world_size == 2 * len(job.members)


@pytest.fixture(scope="module")
def day() -> Day:
    day = Day(seed=7)
    day.live()
    return day


def test_a_thousand_nodes_live_through_a_day(day: Day) -> None:
    job = day.world.job
    alive = sum(node.alive for node in job.nodes.values())
    assert day.world.serving and job.incidents.current is None
    assert len(job.members) == min(NODES, alive) == len(job.progress.started)
    assert job.incidents.restarts_used == FAULTS_A_DAY["worker fails"], (
        "a restart for each worker that failed, and no other"
    )
    kinds = [incident.kind for incident in job.incidents.closed]
    assert kinds.count("worker") == FAULTS_A_DAY["worker fails"] and "node" in kinds and "planned" in kinds
    assert job.term == 1 + FAULTS_A_DAY["master dies"]


def test_the_journal_of_the_day_rebuilds_the_job(day: Day) -> None:
    assert durable(day.world.replayed()) == durable(day.world.job)


def test_the_same_seed_makes_the_same_history() -> None:
    days = [Day(seed, nodes=100) for seed in (7, 7, 8)]
    for day in days:
        day.live()
    one, again, other = (day.digest() for day in days)
    assert one == again != other
