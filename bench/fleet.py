"""A thousand agents in a few processes: real links to a real master, and no workers behind them.

Each is an `Uplink` as the agent has it, speaking for a node that answers every order in the way of one whose workers
start at once. The benchmark tells a fleet what to do next through a pipe; the fleet answers with times.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

import structlog

from holdfast.agent.identity import new_incarnation
from holdfast.agent.uplink import Uplink
from holdfast.core.events import Hello, JobSpec, NodeInfo, StoreOffered, WorkersStarted
from holdfast.core.orders import Order, Refuse, Serve

JOB_ID = "bench"
RESTARTS_MAX = 3
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


class FakeAgent:
    """One node of the job, as the master sees it."""

    def __init__(self, node_id: str, plan: Plan) -> None:
        self._node_id, self._plan = node_id, plan
        self._incarnation = new_incarnation()
        self._store_port = 1
        self.served = asyncio.Event()
        self.served_at = 0.0
        self.view = 0
        self.uplink = Uplink(
            self,
            lambda: ("127.0.0.1", plan.port),
            token=plan.token,
            tls=None,
            heartbeat_interval_s=plan.heartbeat_interval_s,
            silence_timeout_s=SILENCE_TIMEOUT_S,
        )
        self.task = asyncio.create_task(self.uplink.run())

    def hello(self) -> Hello:
        info = NodeInfo(host=self._node_id, address="127.0.0.1", machine_id="bench", boot_id="bench", pid=1, workers=8)
        spec = JobSpec(run_id=JOB_ID, nodes_min=self._plan.nodes, nodes_max=self._plan.nodes, restarts_max=RESTARTS_MAX)
        return Hello(
            node_id=self._node_id,
            incarnation=self._incarnation,
            info=info,
            spec=spec,
            store_port=self._store_port,
            serving=self.view,
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
        if order.store_here:
            self._store_port += 1
            self.uplink.report(StoreOffered(**who, port=self._store_port))


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
    for agent in agents:
        agent.task.cancel()
    await asyncio.gather(*(agent.task for agent in agents), return_exceptions=True)


def serve(plan: Plan, benchmark: Connection) -> None:
    """A fleet's process: commands in, times out, until it is told to close."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    asyncio.run(_serve(plan, benchmark))


async def _serve(plan: Plan, benchmark: Connection) -> None:
    fleet = Fleet(plan)
    command = ""
    while command != "close":
        command, *arguments = await asyncio.to_thread(benchmark.recv)
        benchmark.send(await getattr(fleet, command)(*arguments))
