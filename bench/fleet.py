"""A thousand agents in a few processes: real links to a real master, and no workers behind them.

Each is an `Uplink` as the agent has it, speaking for a node that answers every order in the way of one whose workers
start at once. The benchmark tells a fleet what to do next through a pipe; the fleet answers with times.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

from holdfast.agent.incarnation import new_incarnation
from holdfast.agent.uplink import Uplink
from holdfast.core.durability import ImageReport, SnapshotStats
from holdfast.core.events import (
    Hello,
    ImagesReported,
    JobSpec,
    NodeInfo,
    SessionInfo,
    StepCommitted,
    StoreOffered,
    ViewJoined,
    WorkersStarted,
)
from holdfast.core.orders import Order, Refuse, Serve

JOB_ID = "bench"
RESTARTS_MAX = 3
SNAPSHOT_EVERY_S = 1.0
SILENCE_TIMEOUT_S = 30.0
"""Of the agents for the master: long, so that a slow benchmark is slow instead of something else."""


class Plan(NamedTuple):
    """What a fleet is told at its start."""

    first: int
    agents: int
    nodes: int
    port: int
    token: str
    heartbeat_interval_s: float
    snapshots: bool = False
    """Whether its workers have a session, and a snapshot every second."""


class FakeAgent:
    """One node of the job, as the master sees it."""

    def __init__(self, node_id: str, plan: Plan) -> None:
        self._node_id, self._plan = node_id, plan
        self._incarnation = new_incarnation()
        self._store_port = 1
        self.served = asyncio.Event()
        self.served_at = 0.0
        self.view = 0
        self.step = 1
        self._order: Serve | None = None
        self.uplink = Uplink(
            self,
            lambda: ("127.0.0.1", plan.port),
            token=plan.token,
            tls=None,
            heartbeat_interval_s=plan.heartbeat_interval_s,
            silence_timeout_s=SILENCE_TIMEOUT_S,
        )
        self.task = asyncio.create_task(self.uplink.run())
        self.snapshots = asyncio.create_task(self._take_snapshots()) if plan.snapshots else None

    @property
    def waiting(self) -> int:
        """How many of its reports the master has not answered."""
        return self.uplink.waiting

    async def end(self) -> None:
        tasks = [task for task in (self.task, self.snapshots) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def hello(self) -> Hello:
        info = NodeInfo(host=self._node_id, address="127.0.0.1", machine_id="bench", boot_id="bench", pid=1, workers=8)
        spec = JobSpec(run_id=JOB_ID, nodes_min=self._plan.nodes, nodes_max=self._plan.nodes, restarts_max=RESTARTS_MAX)
        return Hello(
            node_id=self._node_id,
            incarnation=self._incarnation,
            info=info,
            spec=spec,
            store_port=self._store_port,
            term=self.uplink.term,
        )

    def obey(self, order: Order) -> None:
        match order:
            case Serve():
                self.served_at = time.time()
                self.served.set()
                if order.view != self.view:
                    self._serve(order)
            case Refuse(rejoin=True):
                self._incarnation, self.view = new_incarnation(), 0
                self.uplink.forget_reports()
                self.uplink.reconnect()
            case _:
                pass

    def _serve(self, order: Serve) -> None:
        """The workers start at once, and a store that is taken up is followed by another."""
        self.view = order.view
        who = {"node_id": self._node_id, "incarnation": self._incarnation}
        self.uplink.report(WorkersStarted(**who, view=order.view, pids=tuple(range(1, 9))))
        self._order = order
        if self._plan.snapshots:
            self.uplink.report(ViewJoined(**who, view=order.view, session=SessionInfo()))
            if order.group_rank == 0:
                self.uplink.report(StepCommitted(**who, view=order.view, step=self.step))
        if order.store_here:
            self._store_port += 1
            self.uplink.report(StoreOffered(**who, port=self._store_port))

    async def _take_snapshots(self) -> None:
        """Each worker's two newest images, and those of a partner's."""
        while True:
            await asyncio.sleep(SNAPSHOT_EVERY_S)
            if self._order is None:
                continue
            self.step += 1
            order, who = self._order, {"node_id": self._node_id, "incarnation": self._incarnation}
            images = tuple(
                ImageReport(step, order.first_rank + worker, 1, order.world_size, order.view, is_replica)
                for worker in range(order.workers)
                for step in (self.step, self.step - 1)
                for is_replica in (False, True)
            )
            stats = SnapshotStats(every=10, step_s=0.1, stall_s=0.001, taken=self.step)
            self.uplink.report(ImagesReported(**who, images=images, snapshot_stats=stats))


class Fleet:
    """The agents of one process, and the benchmark's commands to them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._agents: list[FakeAgent] = []
        self._hired = 0

    async def ready(self) -> float:
        """Everything is imported; what comes next may be measured."""
        return time.time()

    async def join(self) -> float:
        """All connect at once; when the last one was given its place in a view."""
        self._hire(self._plan.agents)
        return await served(self._agents)

    async def reconnect(self, count: int) -> float:
        """Some connections end and are made again; when the last of them had its standing order again."""
        cut = self._agents[:count]
        for agent in cut:
            agent.served.clear()
            agent.uplink.reconnect()
        return await served(cut)

    async def replace(self, count: int) -> float:
        """Some agents die and others come; when the last of all had its place in the next view."""
        dead, self._agents = self._agents[:count], self._agents[count:]
        for agent in self._agents:
            agent.served.clear()
        await end(dead)
        self._hire(count)
        return await served(self._agents)

    async def waiting(self) -> float:
        """How many reports the master has not answered."""
        return float(sum(agent.waiting for agent in self._agents))

    async def close(self) -> float:
        await end(self._agents)
        return time.time()

    def _hire(self, count: int) -> None:
        numbers = range(self._hired, self._hired + count)
        self._agents += [FakeAgent(f"node-{self._plan.first}-{number}", self._plan) for number in numbers]
        self._hired += count


async def served(agents: Sequence[FakeAgent]) -> float:
    await asyncio.gather(*(agent.served.wait() for agent in agents))
    return max((agent.served_at for agent in agents), default=0.0)


async def end(agents: Sequence[FakeAgent]) -> None:
    await asyncio.gather(*(agent.end() for agent in agents))


def serve(plan: Plan, benchmark: Connection) -> None:
    """A fleet's process: commands in, times out, until it is told to close."""
    asyncio.run(_serve(plan, benchmark))


async def _serve(plan: Plan, benchmark: Connection) -> None:
    fleet = Fleet(plan)
    command = ""
    while command != "close":
        command, *arguments = await asyncio.to_thread(benchmark.recv)
        benchmark.send(await getattr(fleet, command)(*arguments))
