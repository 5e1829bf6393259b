"""Make-believe agents around a `World`: they follow the orders they get, over connections that break.

What lies between an agent and the master is explicit, so that a test can choose what happens next:

- reports wait in `mail`, to be delivered in any order, late, or twice; those of a living agent are never lost,
  since an agent keeps a report until it is acknowledged;
- orders wait in the agent's inbox, in order; a broken connection empties it;
- a cut connection delivers nothing either way until it heals, and nobody is told.

Ports for stores are offered once and never again: with each hello, and whenever an order was followed, since views
that the agent never heard of may have taken the port it offered last. What was offered stays open until it is used.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import assert_never

from core.world import World
from holdfast.core import events as e
from holdfast.core import orders as o
from holdfast.core.conclude import next_deadline
from holdfast.core.decide import decide
from holdfast.core.faults import NotStarted
from holdfast.core.state import Gathering

ROUNDS_MAX = 300
"""A fleet that is left alone comes to rest long before."""


@dataclass(eq=False)
class Agent:
    """One life of a node, as it sees itself."""

    node_id: str
    life: str
    dead_lives: tuple[str, ...] = ()
    alive: bool = True
    leaving: bool = False
    connected: bool = False
    cut: bool = False
    retry_at: float = 0.0
    """When it may say hello again."""
    inbox: deque[o.Order] = field(default_factory=deque)
    ports: set[int] = field(default_factory=set)
    """Offered and not used."""
    serve: o.Serve | None = None
    running: set[int] = field(default_factory=set)
    """Local ranks whose processes run."""

    @property
    def reachable(self) -> bool:
        return self.alive and self.connected and not self.cut


class Fleet:
    """All agents of a job, and what is under way between them and the master."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.agents: list[Agent] = []
        self.dead: set[str] = set()
        self.unnoticed: list[Agent] = []
        """Dead behind a cut: the master has yet to miss them."""
        self.mail: list[tuple[Agent, e.Event]] = []
        self.said = 0

    def route(self) -> None:
        """Put the orders that left the master into the inboxes of those they can reach."""
        for addressed in self.world.said[self.said :]:
            for agent in self.agents:
                if agent.life == addressed.incarnation and agent.connected:
                    agent.inbox.append(addressed.order)
        self.said = len(self.world.said)

    def take_in(self, event: e.Event) -> None:
        self.world.do(event)
        self.route()

    # --- lives and connections

    def start(self, node_id: str, *, vouch: bool) -> Agent:
        """A new life; `vouch`: it can see which lives before it on its machine are dead."""
        life = self.world.next_life(node_id)
        former = tuple(sorted(d for d in self.dead if d.startswith(f"{node_id}."))) if vouch else ()
        agent = Agent(node_id, life, former)
        self.agents.append(agent)
        self.hello(agent)
        return agent

    def hello(self, agent: Agent) -> None:
        agent.inbox.clear()
        agent.connected, agent.cut = True, False
        self.mail = [(a, m) for a, m in self.mail if a is not agent or not isinstance(m, e.StoreOffered)]
        port = self._open_port(agent)
        self.take_in(
            self.world.hello(agent.node_id, life=agent.life, store_port=port, dead_lives=agent.dead_lives)
        )

    def _open_port(self, agent: Agent) -> int:
        port = self.world.port()
        agent.ports.add(port)
        return port

    def _offer(self, agent: Agent) -> None:
        self._report(agent, self.world.offered(agent.node_id, self._open_port(agent), life=agent.life))

    def disconnect(self, agent: Agent) -> None:
        agent.connected, agent.cut = False, False
        agent.inbox.clear()
        self.take_in(self.world.broke(agent.node_id, life=agent.life))

    def kill(self, agent: Agent) -> None:
        noticed = agent.reachable
        self._end(agent)
        if noticed:
            self.take_in(self.world.broke(agent.node_id, life=agent.life))
        else:
            self.unnoticed.append(agent)

    def fall_silent(self, agent: Agent) -> None:
        """The master misses an agent that is cut off or dead, and ends its connection."""
        if agent in self.unnoticed:
            self.unnoticed.remove(agent)
        agent.connected, agent.cut = False, False
        agent.inbox.clear()
        self.take_in(self.world.silent(agent.node_id, life=agent.life))

    def leave(self, agent: Agent) -> None:
        agent.leaving, agent.serve = True, None
        agent.running.clear()
        self._report(agent, self.world.leaving(agent.node_id, life=agent.life))

    def goodbye(self, agent: Agent) -> None:
        self._report(agent, self.world.gone(agent.node_id, life=agent.life))
        self._end(agent)

    def _end(self, agent: Agent) -> None:
        agent.alive, agent.connected, agent.serve = False, False, None
        agent.inbox.clear()
        agent.running.clear()
        self.agents.remove(agent)
        self.dead.add(agent.life)

    # --- reports

    def _report(self, agent: Agent, event: e.Event) -> None:
        self.mail.append((agent, event))

    def deliverable(self) -> list[int]:
        """Of living agents what their connection lets through; of dead ones what was already under way."""
        return [i for i, (agent, _) in enumerate(self.mail) if agent.reachable or not agent.alive]

    def deliver(self, index: int, *, again: bool = False) -> None:
        agent, event = self.mail[index]
        offer = isinstance(event, e.StoreOffered)
        if not again or offer:
            del self.mail[index]
        if self.world.job.live(agent.node_id, agent.life) is None:
            assert decide(self.world.job, event, self.world.now) == [], "a life that is over was heard"
        self.take_in(event)
        assert offer or decide(self.world.job, event, self.world.now) == [], "to be told twice makes a difference"

    def workers_fail(self, agent: Agent, local_rank: int, *, collateral: bool) -> None:
        assert agent.serve is not None
        agent.running.discard(local_rank)
        event = self.world.failed(
            agent.node_id, local_rank, view=agent.serve.view, life=agent.life, collateral=collateral
        )
        self._report(agent, event)

    def worker_succeeds(self, agent: Agent, local_rank: int) -> None:
        assert agent.serve is not None
        agent.running.discard(local_rank)
        self._report(
            agent, self.world.succeeded(agent.node_id, local_rank, view=agent.serve.view, life=agent.life)
        )

    # --- orders

    def obey(self, agent: Agent, *, newest: bool = False, startable: bool = True) -> None:
        """Follow the oldest order in the inbox; or, as an agent does that was busy, the newest and none before it."""
        order = agent.inbox.popleft()
        while newest and agent.inbox:
            order = agent.inbox.popleft()
        match order:
            case o.Serve():
                self._serve(agent, order, startable)
            case o.Hold():
                agent.serve = None
                agent.running.clear()
                self._offer(agent)
            case o.Exit():
                self._end(agent)
            case o.Refuse():
                self._refused(agent, order)
            case _:
                assert_never(order)

    def _serve(self, agent: Agent, order: o.Serve, startable: bool) -> None:
        if agent.leaving or (agent.serve and agent.serve.view == order.view):
            return
        assert agent.serve is None or agent.serve.view < order.view, "an older view is ordered"
        agent.serve = order
        agent.running = set(range(self.world.workers))
        if order.store_here:
            agent.ports.remove(order.store_port)
        self._offer(agent)
        if startable:
            self._report(agent, self.world.started(agent.node_id, view=order.view, life=agent.life))
        else:
            agent.running.discard(0)
            end = NotStarted("no such file")
            self._report(agent, self.world.failed(agent.node_id, view=order.view, life=agent.life, end=end))

    def _refused(self, agent: Agent, order: o.Refuse) -> None:
        agent.connected = False
        agent.inbox.clear()
        if agent.leaving or order.retry_after_s is None:
            self._end(agent)
        elif order.rejoin:
            self._end(agent)
            life = self.world.next_life(agent.node_id)
            self.agents.append(Agent(agent.node_id, life, (*agent.dead_lives, agent.life)))
        else:
            agent.retry_at = self.world.now + order.retry_after_s

    # --- the master

    def restart_master(self, down_s: float = 0.0, lost: e.Event | None = None) -> None:
        """All connections are gone, and what dead agents had under way; `lost`: what it was just deciding about."""
        for agent in self.agents:
            agent.connected, agent.cut = False, False
            agent.inbox.clear()
        self.mail = [(agent, event) for agent, event in self.mail if agent.alive]
        self.unnoticed.clear()
        if lost is not None:
            self.world.lose_batch(lost)
        else:
            self.world.restart_master(down_s)
        self.route()

    # --- left alone

    def settle(self) -> None:
        """No more faults: everything is delivered, everybody obeys, time passes. It must come to rest."""
        for _ in range(ROUNDS_MAX):
            if self._bustle():
                continue
            wakes = [a.retry_at for a in self.agents if not a.connected]
            deadline = next_deadline(self.world.job)
            if deadline is not None and not self._only_more_nodes_would_help():
                wakes.append(deadline)
            if not wakes:
                return
            self.world.wait(min(wakes) - self.world.now + 1e-6)
            self.route()
        raise AssertionError("it does not come to rest")

    def _only_more_nodes_would_help(self) -> bool:
        """Gathering, and nothing but its time-out to come."""
        job = self.world.job
        unsure = any(node.doubtful for node in job.nodes.values())
        few = sum(node.eligible for node in job.nodes.values()) < job.settings.nodes_min
        return isinstance(job.phase, Gathering) and few and not unsure

    def _bustle(self) -> bool:
        """Everything that can happen without time passing; whether anything did."""
        for agent in self.agents:
            agent.cut = False
        busy = bool(self.deliverable() or self.unnoticed)
        for agent in list(self.unnoticed):
            self.fall_silent(agent)
        for agent in list(self.agents):
            if not agent.connected and agent.retry_at <= self.world.now:
                self.hello(agent)
                busy = True
            while agent.inbox:
                self.obey(agent)
                busy = True
            if agent.leaving and agent.reachable and not any(sender is agent for sender, _ in self.mail):
                self.goodbye(agent)
                busy = True
        for index in reversed(self.deliverable()):
            self.deliver(index)
        return busy
