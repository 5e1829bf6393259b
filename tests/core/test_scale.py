"""A thousand nodes through a day of faults: the whole policy, in simulated time, to the same end each time."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable
from random import Random

import pytest

from core.world import World, durable
from holdfast.core.state import Present

NODES = 1_000
SPARES = 8
DAY_S = 86_400.0
START_UP_S = 2.0
REPAIR_MEAN_S = 1_800.0
FAULTS_A_DAY = {"node dies": 24, "node falls silent": 8, "worker fails": 24, "node is told to go": 12, "master dies": 4}


class Day:
    """Makes a day's events from a seed, and follows them to its end."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.world = World(nodes=(NODES - 100, NODES), restarts=1_000)
        self.world.careful = False
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.entries = 0

    def at(self, delay_s: float, what: Callable[[], None]) -> None:
        self.entries += 1
        heapq.heappush(self.agenda, (self.world.now + delay_s, self.entries, what))

    def live(self) -> None:
        world, end = self.world, self.world.now + DAY_S
        ids = [f"n{i:04}" for i in range(NODES + SPARES)]
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
        while self.world.serving and not self.world.finished and len(job.started) < len(job.members):
            self.world.wait(START_UP_S)
            self.world.start_all()
            job = self.world.job

    def someone(self) -> str:
        nodes = self.world.job.nodes.values()
        return self.random.choice([n.node_id for n in nodes if isinstance(n.standing, Present)])

    def come_back(self, node_id: str) -> None:
        former = self.world.life(node_id)
        self.world.next_life(node_id)
        self.world.do(self.world.hello(node_id, dead_lives=[former]))

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


@pytest.fixture(scope="module")
def day() -> Day:
    day = Day(seed=7)
    day.live()
    return day


def test_a_thousand_nodes_live_through_a_day(day: Day) -> None:
    job = day.world.job
    alive = sum(node.alive for node in job.nodes.values())
    assert day.world.serving and job.incident is None
    assert len(job.members) == min(NODES, alive) == len(job.started)
    assert job.restarts_used == FAULTS_A_DAY["worker fails"], "a restart for each worker that failed, and no other"
    kinds = [incident.kind for incident in job.incidents]
    assert kinds.count("worker") == FAULTS_A_DAY["worker fails"] and "node" in kinds and "planned" in kinds
    assert job.term == 1 + FAULTS_A_DAY["master dies"]


def test_the_journal_of_the_day_rebuilds_the_job(day: Day) -> None:
    assert durable(day.world.replayed()) == durable(day.world.job)


def test_the_same_seed_makes_the_same_history(day: Day) -> None:
    again = Day(seed=7)
    again.live()
    assert again.digest() == day.digest()
