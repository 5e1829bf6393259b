"""The master's connections: which agents are connected, and when each was last heard from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from itertools import takewhile
from typing import Protocol

from holdfast.master.job_clock import AgentClock
from holdfast.wire.auth import Role
from holdfast.wire.control_messages import FromMaster, ToMaster


class MasterConnection(Protocol):
    """One connection to the master, proved; `wire.control.ServerConnection` on a network."""

    @property
    def role(self) -> Role: ...

    def send(self, message: FromMaster) -> None:
        """Send a message without waiting; a side that reads nothing is disconnected in the end."""

    async def drain(self) -> None:
        """Wait until the other side has read most of what was sent. WireError if the connection ends before."""

    async def receive(self) -> ToMaster | None:
        """Return the next message; None when the connection is over."""

    def finish(self) -> None:
        """End the connection after what was sent."""

    def abort(self) -> None:
        """End the connection at once."""


class MasterTransport(Protocol):
    """What a master listens with; `wire.control.Server` on a network."""

    async def start(self, handler: Callable[[MasterConnection], Awaitable[None]]) -> int:
        """Call the handler for every connection from now on; return the port."""

    async def stop(self, grace_s: float) -> None:
        """End all connections; what was sent has this long to get out."""


class AgentConnectionState:
    """One connected agent, or an operator with a request."""

    def __init__(self, connection: MasterConnection, node_id: str, incarnation: str, now: float) -> None:
        self.connection = connection
        self.node_id = node_id
        self.incarnation = incarnation
        self.heard_at = now
        self.clock = AgentClock()
        self.introduced = False
        """Whether the core has processed its Hello."""
        self.was_stopped = False
        """Whether its process was found stopped by a signal when it was last silent for too long."""


class Connections:
    """All agents' connections, by incarnation: two incarnations of a node never share one."""

    def __init__(self) -> None:
        self._agents: OrderedDict[str, AgentConnectionState] = OrderedDict()  # who was heard longest ago comes first

    def __len__(self) -> int:
        return len(self._agents)

    def add(self, agent: AgentConnectionState) -> None:
        """Add a connection; an older one of the same incarnation is ended."""
        if old := self._agents.get(agent.incarnation):
            old.connection.abort()
        self._agents[agent.incarnation] = agent
        self._agents.move_to_end(agent.incarnation)

    def heard(self, agent: AgentConnectionState, now: float) -> None:
        """Note that something came from an agent."""
        agent.heard_at = now
        if self._agents.get(agent.incarnation) is agent:
            self._agents.move_to_end(agent.incarnation)

    def introduced(self) -> list[AgentConnectionState]:
        """Return the agents whose Hello the core has processed."""
        return [agent for agent in self._agents.values() if agent.introduced]

    def remove(self, agent: AgentConnectionState) -> bool:
        """Remove a connection; return whether it was the current one of its incarnation."""
        if self._agents.get(agent.incarnation) is not agent:
            return False
        del self._agents[agent.incarnation]
        return True

    def send(self, incarnation: str, message: FromMaster) -> None:
        """Send to an agent. One that is not connected gets its standing order when it comes back."""
        if agent := self._agents.get(incarnation):
            agent.connection.send(message)

    def finish_all(self) -> None:
        """End all connections after what was sent."""
        for agent in list(self._agents.values()):
            agent.connection.finish()

    def forget_introductions(self, now: float) -> None:
        """End the connections of agents that sent their Hello: they reconnect and send it again."""
        for agent in self._agents.values():
            agent.heard_at = now
            if agent.introduced:
                agent.connection.finish()

    def silent_since(self, heard_before: float) -> list[AgentConnectionState]:
        """Return the agents from which nothing came since then."""
        return list(takewhile(lambda agent: agent.heard_at <= heard_before, self._agents.values()))

    def quietest_at(self) -> float | None:
        """Return when the agent that has been silent for longest was last heard from."""
        return next((agent.heard_at for agent in self._agents.values()), None)
