"""Make-believe agents around a `World`: they follow the orders they get, over connections that break.

What lies between an agent and the master is explicit, so that a test can choose what happens next:

- reports wait in `mail`, to be delivered in any order, late, or twice; those of a living agent are never lost,
  since an agent keeps a report until it is acknowledged;
- orders wait in the agent's inbox, in order; a broken connection empties it;
- a cut connection delivers nothing either way until it heals, and nobody is told.

Workers that speak to Holdfast (`World.session`) are modelled by what they hold. A view settles when all of its workers
are there and one complete copy of the state is among them; then it commits. When one of them dies or its step fails,
the others' steps fail too. So if the core counts on somebody who holds nothing it comes out: the view never settles.

Ports for stores are offered once and never again: with each hello, and whenever an order was followed, since views
that the agent never heard of may have taken the port it offered last. What was offered stays open until it is used.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import assert_never

import msgspec

from holdfast.core import events as e
from holdfast.core import orders as o
from holdfast.core.decide import decide
from holdfast.core.faults.failures import Exited, NotStarted
from holdfast.core.health.findings import ALONE, PAIRED, CheckProblem, CheckResult, CheckTask, Timing
from holdfast.core.health.reputation import Reputation
from holdfast.core.policy import next_deadline
from holdfast.core.shard_map import ShardMap
from holdfast.core.state import Awaited, Gathering
from holdfast.core.state_coverage import ShardLayout, StateHolder, missing_shards
from holdfast.core.strategies import Strategy
from holdfast.core.views import reassign_local_ranks
from support.world import World

GOOD = Reputation()
ROUNDS_MAX = 300
"""A fleet that is left alone comes to rest long before."""


@dataclass(eq=False)
class Agent:
    """One life of a node, as it sees itself."""

    node_id: str
    life: str
    dead_incarnations: tuple[str, ...] = ()
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
    dead: set[int] = field(default_factory=set)
    """Those that failed in the view it serves."""
    held: set[int] = field(default_factory=set)
    """Those whose step failed in it."""
    holds: dict[int, StateHolder] = field(default_factory=dict)
    """By local rank: what it has of the state."""
    former: dict[int, StateHolder] = field(default_factory=dict)
    """The same under the cut before, kept until a step is committed under the new one."""
    joined: int = 0
    committed: int = 0
    """The last view its workers came into, and committed a step in."""
    parked: int = 0
    examined: set[tuple[str, int]] = field(default_factory=set)
    """Rounds of checks that it has been through."""
    wanted: int = 0
    """Spares that it has, and was told to keep."""
    reputation: Reputation = Reputation()
    """What its machine is known for."""
    workers: int = 1
    """How many it can run."""
    skew_s: float = 0.0
    """How far its clock is ahead of the master's."""

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
        self.wrong: set[str] = set()
        """Nodes that get a wrong result when they are checked."""
        self.slow: set[str] = set()
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

    def start(
        self, node_id: str, *, vouch: bool, reputation: Reputation = GOOD, workers: int = 0, skew_s: float = 0.0
    ) -> Agent:
        """A new life; `vouch`: it can see which lives before it on its machine are dead."""
        life = self.world.next_life(node_id)
        former = tuple(sorted(d for d in self.dead if d.startswith(f"{node_id}."))) if vouch else ()
        agent = Agent(node_id, life, former)
        agent.reputation, agent.workers, agent.skew_s = reputation, workers or self.world.workers, skew_s
        self.agents.append(agent)
        self.hello(agent)
        return agent

    def hello(self, agent: Agent) -> None:
        agent.inbox.clear()
        agent.connected, agent.cut = True, False
        self.mail = [(a, m) for a, m in self.mail if a is not agent or not isinstance(m, e.StoreOffered)]
        port = self._open_port(agent)
        hello = self.world.hello(
            agent.node_id,
            life=agent.life,
            store_port=port,
            dead_incarnations=agent.dead_incarnations,
            parked=agent.parked,
            workers=agent.workers,
        )
        self.take_in(msgspec.structs.replace(hello, reputation=agent.reputation))

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
        agent.leaving = True
        self._stop(agent)
        self._report(agent, self.world.leaving(agent.node_id, life=agent.life))

    def goodbye(self, agent: Agent) -> None:
        self._report(agent, self.world.gone(agent.node_id, life=agent.life))
        self._end(agent)

    def _end(self, agent: Agent) -> None:
        agent.alive, agent.connected = False, False
        agent.inbox.clear()
        self._stop(agent)
        self.agents.remove(agent)
        self.dead.add(agent.life)

    def _stop(self, agent: Agent) -> None:
        agent.serve, agent.parked, agent.wanted = None, 0, 0
        for workers in (agent.running, agent.dead, agent.held, agent.holds, agent.former):
            workers.clear()

    # --- reports

    def _report(self, agent: Agent, event: e.Event) -> None:
        self.mail.append((agent, event))

    def deliverable(self) -> list[int]:
        """Of living agents what their connection lets through; of dead ones what was already under way."""
        return [i for i, (agent, _) in enumerate(self.mail) if agent.reachable or not agent.alive]

    def deliver(self, index: int, *, again: bool = False) -> None:
        agent, event = self.mail[index]
        offer = isinstance(event, e.StoreOffered | e.SparesChanged)  # used up by what they lead to
        if not again or offer:
            del self.mail[index]
        if self.world.job.live(agent.node_id, agent.life) is None:
            assert decide(self.world.job, event, self.world.now) == [], "a life that is over was heard"
        self.take_in(event)
        assert offer or decide(self.world.job, event, self.world.now) == [], "to be told twice makes a difference"

    def workers_fail(self, agent: Agent, local_rank: int, *, collateral: bool, code: int = 1) -> None:
        """As its agent would report it: typed, by the tables."""
        assert agent.serve is not None
        self._end_worker(agent, local_rank)
        agent.dead.add(local_rank)
        event = self.world.failed(
            agent.node_id,
            local_rank,
            view=agent.serve.view,
            life=agent.life,
            collateral=collateral,
            end=Exited(code),
            failed_at=self.world.now + agent.skew_s,
        )
        self._report(agent, event)

    def _end_worker(self, agent: Agent, local_rank: int) -> None:
        agent.running.discard(local_rank)
        agent.held.discard(local_rank)
        agent.holds.pop(local_rank, None)
        agent.former.pop(local_rank, None)

    def worker_succeeds(self, agent: Agent, local_rank: int) -> None:
        assert agent.serve is not None
        self._end_worker(agent, local_rank)
        self._report(agent, self.world.succeeded(agent.node_id, local_rank, view=agent.serve.view, life=agent.life))

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
                self._hold(agent, order)
            case o.Exit():
                self._end(agent)
            case o.Refuse():
                self._refused(agent, order)
            case _:
                assert_never(order)

    def _serve(self, agent: Agent, order: o.Serve, startable: bool) -> None:
        if agent.leaving:
            return
        agent.wanted = order.spares
        if agent.serve and agent.serve.view == order.view:
            return
        assert agent.serve is None or agent.serve.view < order.view, "an older view is ordered"
        new = self._move_workers(agent, order)
        agent.serve = order
        if order.store_here:
            agent.ports.remove(order.store_port)
        self._offer(agent)
        if startable or not new:
            self._report(agent, self.world.started(agent.node_id, view=order.view, life=agent.life))
        else:
            self._end_worker(agent, new[0])
            agent.dead.add(new[0])
            end = NotStarted("no such file")
            event = self.world.failed(agent.node_id, new[0], view=order.view, life=agent.life, end=end)
            self._report(agent, event)

    def _move_workers(self, agent: Agent, order: o.Serve) -> list[int]:
        """Move living workers to their new local ranks, and fill the others; return those that were filled."""
        living = sorted(agent.running - set(order.replaced)) if order.keeps_workers else []
        if len(living) >= order.workers:
            held = {seat: seat in agent.holds for seat in living}  # who has never joined a view goes first
            moves = reassign_local_ranks(held, len(living) + 1, order.workers)
        else:
            assert not living or living[-1] < order.workers or len(living) < order.workers
            free = iter([local_rank for local_rank in range(order.workers) if local_rank not in living])
            moves = {local_rank: local_rank if local_rank < order.workers else next(free) for local_rank in living}
        agent.holds = {moves[local_rank]: holder for local_rank, holder in agent.holds.items() if local_rank in moves}
        agent.former = {moves[local_rank]: holder for local_rank, holder in agent.former.items() if local_rank in moves}
        agent.running = set(range(order.workers))
        agent.dead, agent.held = set(), set()
        new = sorted(agent.running - set(moves.values()))
        if not order.keeps_workers:
            self._park(agent, 0)
        elif order.strategy is Strategy.RECOVER:
            self._park(agent, max(agent.parked - len(new), 0))
        return new

    def _hold(self, agent: Agent, order: o.Hold) -> None:
        parked = agent.parked
        self._stop(agent)
        agent.parked, agent.wanted = parked, order.spares
        agent.leaving = agent.leaving or order.leaving
        self._park(agent, min(parked, order.spares))
        self._offer(agent)
        if order.check:
            self._examine(agent, order.check)

    def _examine(self, agent: Agent, task: CheckTask) -> None:
        if (task.checkup, task.round) in agent.examined:
            return
        agent.examined.add((task.checkup, task.round))
        stages = PAIRED if task.kind == "pair" else ALONE if task.kind == "alone" else ()
        is_wrong = task.kind == "alone" and agent.node_id in self.wrong
        times = 3.0 if {agent.node_id, task.partner} & self.slow else 1.0
        result = CheckResult(
            timings=tuple(Timing(stage, times, 0.001) for stage in stages),
            problems=(CheckProblem("matmul", "wrong-result", "the product is wrong"),) if is_wrong else (),
            store_port=29_900,
        )
        self._report(
            agent,
            e.NodeChecked(
                node_id=agent.node_id,
                incarnation=agent.life,
                checkup=task.checkup,
                round=task.round,
                result=result,
            ),
        )

    # --- workers that speak to Holdfast

    def _park(self, agent: Agent, parked: int) -> None:
        if parked != agent.parked:
            agent.parked = parked
            self._report(agent, self.world.parked(agent.node_id, parked, life=agent.life))

    def park(self, agent: Agent) -> None:
        """One more spare is ready, if it was wanted."""
        self._park(agent, min(agent.parked + 1, agent.wanted))

    def step_fails(self, agent: Agent, local_rank: int, error: str = "") -> None:
        assert agent.serve is not None
        agent.held.add(local_rank)
        view = agent.serve.view
        self._report(agent, self.world.stumbled(agent.node_id, local_rank, view=view, life=agent.life, error=error))

    def stall(self, agent: Agent) -> None:
        assert agent.serve is not None
        steps = [5 + local_rank for local_rank in range(agent.serve.workers)]
        self._report(agent, self.world.stalled(agent.node_id, *steps, view=agent.serve.view, life=agent.life))

    def sleep(self, agent: Agent) -> None:
        """One of the agent's workers sleeps, and the others wait."""
        assert agent.serve is not None
        steps, view = [5] * agent.serve.workers, agent.serve.view
        self._report(agent, self.world.stalled(agent.node_id, *steps, asleep=(0,), view=view, life=agent.life))

    def wait_for_others(self, agent: Agent) -> None:
        assert agent.serve is not None
        self._report(agent, self.world.waiting(agent.node_id, view=agent.serve.view, life=agent.life))

    def move(self, agent: Agent) -> None:
        """Something moves again."""
        assert agent.serve is not None
        self._report(agent, self.world.moved(agent.node_id, view=agent.serve.view, life=agent.life))

    def train(self) -> bool:
        """What goes on between workers: echoes of faults, views that settle, steps that commit. Did anything happen?"""
        if self.world.session is None:
            return False
        by_view: dict[int, list[Agent]] = {}
        for agent in self.agents:
            if agent.serve:
                by_view.setdefault(agent.serve.view, []).append(agent)
        went_on = [self._train(agents) for agents in by_view.values()]
        return any(went_on)

    def _train(self, agents: list[Agent]) -> bool:
        serve = agents[0].serve
        assert serve is not None and self.world.session is not None
        together = len(agents) == serve.group_world_size
        torn = not together and any(a.joined == serve.view for a in agents)
        if torn or any(a.dead or a.held for a in agents):
            return self._echo(agents)
        if not together or any(a.serve is None or len(a.running) < a.serve.workers for a in agents):
            return False
        if any(a.joined < serve.view for a in agents):
            return self._join(agents, serve)
        if serve.strategy is Strategy.DUMP:
            for agent in agents:
                for local_rank in sorted(agent.running):
                    self.worker_succeeds(agent, local_rank)
            return True
        return self._commit(agents, serve)

    def _echo(self, agents: list[Agent]) -> bool:
        echoes = [(a, i) for a in agents for i in sorted(a.running - a.held)]
        for agent, local_rank in echoes:
            self.step_fails(agent, local_rank)
        return bool(echoes)

    def _join(self, agents: list[Agent], serve: o.Serve) -> bool:
        if serve.keeps_workers and missing_shards(
            holder for a in agents for holder in (*a.holds.values(), *a.former.values())
        ):
            return False  # they wait for a state that nobody has
        info = self.world.session
        assert info is not None
        session = msgspec.structs.replace(info, shard_map=ShardMap(min(info.shards, serve.world_size)))
        layout = ShardLayout(
            shard_map=session.shard_map,
            replicas=session.replicas,
            world_size=serve.world_size,
            first_ranks=serve.first_ranks,
        )
        for agent in agents:
            assert agent.serve is not None
            for local_rank in agent.running:
                had = agent.holds.get(local_rank)
                if had and had.layout != layout:
                    agent.former[local_rank] = had
                rank = agent.serve.first_rank + local_rank
                agent.holds[local_rank] = StateHolder(view=serve.view, rank=rank, layout=layout)
            agent.joined = serve.view
            self._report(agent, self.world.settled(agent.node_id, session, view=serve.view, life=agent.life))
        return True

    def _commit(self, agents: list[Agent], serve: o.Serve) -> bool:
        late = [agent for agent in agents if agent.committed < serve.view]
        for agent in late:
            agent.committed = serve.view
            agent.former.clear()
            self._report(agent, self.world.committed(agent.node_id, view=serve.view, life=agent.life))
        return bool(late)

    def _refused(self, agent: Agent, order: o.Refuse) -> None:
        agent.connected = False
        agent.inbox.clear()
        if agent.leaving or order.retry_after_s is None:
            self._end(agent)
        elif order.rejoin:
            self._end(agent)
            life = self.world.next_life(agent.node_id)
            rejoined = Agent(agent.node_id, life, (*agent.dead_incarnations, agent.life))
            rejoined.workers, rejoined.skew_s = agent.workers, agent.skew_s
            self.agents.append(rejoined)
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
        if job.checks.checkup:
            return False
        able = [n for n in job.nodes.values() if n.eligible or (n.is_here and isinstance(n.health, Awaited))]
        few = len(able) < job.settings.nodes_min
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
        for agent in self.agents:
            if agent.parked < agent.wanted:
                self.park(agent)
                busy = True
        return self.train() or busy
