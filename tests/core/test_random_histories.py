"""Orders of events nobody thought of: hypothesis chooses what happens next, and the core must cope.

Checked after every step, besides all that `World` checks: views only follow one another and keep ranks stable, no
store is used for two views, what agents do never runs ahead of the journal, and restarts are counted once. At the
end there are no more faults, and the job must come to rest where it should.

`HOLDFAST_EXAMPLES=5000` looks further, with other seeds.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from holdfast.core import events as e
from holdfast.core import orders as o
from holdfast.core import records as r
from holdfast.core.assess import living_holders
from holdfast.core.health.reputation import Grade, Reputation
from holdfast.core.rung_plans import may_resize
from holdfast.core.shard_map import ShardMap
from holdfast.core.state import JobState
from holdfast.core.state_coverage import missing_shards
from holdfast.core.strategies import LADDER, Strategy
from holdfast.core.views import View
from support.fleet import Agent, Fleet
from support.world import World

pytestmark = pytest.mark.timeout(900)  # when it fails, finding the shortest story takes longer than running
EXAMPLES = int(os.environ.get("HOLDFAST_EXAMPLES", "0"))
SIZES = [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (3, 3), (2, 5), (4, 6)]
NAMES = "abcdefgh"
SKEWS_S = [0.0, 0.0, 2.0, -3_600.0]
WORKERS = [0, 0, 1, 2, 3]
"""Of a node; 0: as many as most have."""
SESSIONS = [
    None,
    e.SessionInfo(),
    e.SessionInfo(),
    e.SessionInfo(resizable=False),
    e.SessionInfo(shard_map=ShardMap(2)),
    e.SessionInfo(shard_map=ShardMap(4), replicas=1, resizable=False),
    e.SessionInfo(shard_map=ShardMap(4), replicas=1),
]
RECOVERIES = [
    LADDER,
    LADDER,
    LADDER,
    *(tuple(s for s in LADDER if s is not rung) for rung in LADDER[:4]),
    (Strategy.RECOVER, Strategy.ELASTIC_TRAINING),
    (Strategy.EXIT,),
]
REPUTES = [Reputation(), Reputation(), *(Reputation(grade, "a reason") for grade in Grade if grade is not Grade.GOOD)]
PAUSES_S = [0.05, 0.3, 0.5, 4.0, 31.0]

picks = st.integers(0, 7)


class Machine(RuleBasedStateMachine):
    """A job under random fire."""

    @initialize(
        size=st.sampled_from(SIZES),
        restarts=st.sampled_from([0, 1, 3, 8, 8]),
        workers=st.integers(1, 2),
        joining=st.integers(1, 7),
        up=st.sampled_from([True, True, False]),
        session=st.sampled_from(SESSIONS),
        recovery=st.sampled_from(RECOVERIES),
        spares=st.integers(0, 2),
        spare_nodes=st.integers(0, 3),
        wait_s=st.sampled_from([0.0, 0.0, 5.0, 600.0]),
        check=st.sampled_from([False, False, True]),
        wrong=st.sampled_from(["", "", "b"]),
        slow=st.sampled_from(["", "", "a"]),
    )
    def begin(
        self,
        size: tuple[int, int],
        restarts: int,
        workers: int,
        joining: int,
        up: bool,
        session: e.SessionInfo | None,
        recovery: tuple[Strategy, ...],
        spares: int,
        spare_nodes: int,
        wait_s: float,
        check: bool,
        wrong: str,
        slow: str,
    ) -> None:
        online: dict[str, Any] = {
            "session": session,
            "recovery": recovery,
            "spares": spares,
            "spare_nodes": spare_nodes,
            "wait_for_nodes_s": wait_s,
        }
        online |= {"node_check": check, "exclude_straggler": True, "spare_check_interval_s": 0.0}
        self.world = World(nodes=size, restarts=restarts, workers=workers, **online)
        self.fleet = Fleet(self.world)
        self.fleet.wrong, self.fleet.slow = set(wrong), set(slow)
        for node_id in NAMES[:joining]:
            self.fleet.start(node_id, vouch=True)
        if up:  # most of what is interesting happens to a job that runs
            self.fleet.settle()

    def pick(self, number: int, candidates: list[Agent]) -> Agent:
        return candidates[number % len(candidates)]

    def linked(self) -> list[Agent]:
        return [a for a in self.fleet.agents if a.reachable]

    def unlinked(self) -> list[Agent]:
        return [a for a in self.fleet.agents if not a.connected]

    def cut_off(self) -> list[Agent]:
        return [a for a in self.fleet.agents if a.connected and a.cut]

    def working(self) -> list[Agent]:
        return [a for a in self.fleet.agents if a.running]

    def at_work(self) -> list[Agent]:
        """Whose workers may be through: of those that speak to Holdfast, such as have come into their view."""
        speaks = self.world.session is not None
        working = [a for a in self.working() if a.running - a.held]
        return [a for a in working if not speaks or (a.serve and a.joined == a.serve.view)]

    def speaking(self) -> list[Agent]:
        return [a for a in self.working() if self.world.session and a.running - a.held]

    # --- nodes come and go

    @precondition(lambda self: len(self.fleet.agents) < len(NAMES))
    @rule(
        node_id=st.sampled_from(NAMES),
        vouch=st.booleans(),
        reputation=st.sampled_from(REPUTES),
        workers=st.sampled_from(WORKERS),
        skew_s=st.sampled_from(SKEWS_S),
    )
    def a_node_starts(self, node_id: str, vouch: bool, reputation: Reputation, workers: int, skew_s: float) -> None:
        self.fleet.start(node_id, vouch=vouch, reputation=reputation, workers=workers, skew_s=skew_s)

    @precondition(lambda self: self.fleet.agents)
    @rule(pick=picks, reputation=st.sampled_from(REPUTES), lasts_s=st.sampled_from([None, 3.0, 60.0]))
    def a_machine_has_another_reputation(self, pick: int, reputation: Reputation, lasts_s: float | None) -> None:
        """As is known when its agent introduces itself the next time."""
        until = None if lasts_s is None or reputation.grade is not Grade.BANNED else self.world.now + lasts_s
        self.pick(pick, self.fleet.agents).reputation = replace(reputation, until=until)

    @precondition(lambda self: len(self.fleet.agents) > 2)
    @rule(pick=picks, count=st.integers(2, 5), apart_s=st.sampled_from([0.0, 0.5, 5.0]))
    def nodes_die_one_after_another(self, pick: int, count: int, apart_s: float) -> None:
        """A burst: what the orders from one bring about is under way when the next comes."""
        for number in range(min(count, len(self.fleet.agents) - 1)):
            self.fleet.kill(self.pick(pick + number, self.fleet.agents))
            self.world.wait(apart_s)
            self.fleet.route()

    @precondition(lambda self: self.fleet.agents)
    @rule(pick=picks)
    def a_node_dies(self, pick: int) -> None:
        self.fleet.kill(self.pick(pick, self.fleet.agents))

    @precondition(lambda self: any(not a.leaving for a in self.fleet.agents))
    @rule(pick=picks)
    def a_node_is_told_to_go(self, pick: int) -> None:
        self.fleet.leave(self.pick(pick, [a for a in self.fleet.agents if not a.leaving]))

    @precondition(lambda self: any(a.leaving and a.reachable for a in self.fleet.agents))
    @rule(pick=picks)
    def a_node_says_goodbye(self, pick: int) -> None:
        self.fleet.goodbye(self.pick(pick, [a for a in self.linked() if a.leaving]))

    # --- connections

    @precondition(lambda self: self.linked())
    @rule(pick=picks)
    def a_connection_breaks(self, pick: int) -> None:
        self.fleet.disconnect(self.pick(pick, self.linked()))

    @precondition(lambda self: self.unlinked())
    @rule(pick=picks)
    def a_node_connects_again(self, pick: int) -> None:
        self.fleet.hello(self.pick(pick, self.unlinked()))

    @precondition(lambda self: self.linked())
    @rule(pick=picks)
    def a_connection_is_cut(self, pick: int) -> None:
        self.pick(pick, self.linked()).cut = True

    @precondition(lambda self: self.cut_off())
    @rule(pick=picks)
    def a_cut_heals(self, pick: int) -> None:
        self.pick(pick, self.cut_off()).cut = False

    @precondition(lambda self: self.cut_off() or self.fleet.unnoticed)
    @rule(pick=picks)
    def a_node_is_missed(self, pick: int) -> None:
        self.fleet.fall_silent(self.pick(pick, self.cut_off() + self.fleet.unnoticed))

    # --- workers

    @precondition(lambda self: self.working())
    @rule(pick=picks, collateral=st.booleans(), code=st.sampled_from([1, 1, 3, 14, 139, 201]))
    def a_worker_fails(self, pick: int, collateral: bool, code: int) -> None:
        """By itself, or by a fault of its node."""
        agent = self.pick(pick, self.working())
        local_rank = sorted(agent.running)[pick % len(agent.running)]
        self.fleet.workers_fail(agent, local_rank, collateral=collateral, code=code)

    @precondition(lambda self: self.at_work())
    @rule(pick=picks)
    def a_worker_succeeds(self, pick: int) -> None:
        agent = self.pick(pick, self.at_work())
        self.fleet.worker_succeeds(agent, min(agent.running - agent.held))

    # --- workers that speak to Holdfast

    @precondition(lambda self: self.speaking())
    @rule(pick=picks, error=st.sampled_from(["", "", "OSError"]))
    def a_step_fails(self, pick: int, error: str) -> None:
        agent = self.pick(pick, self.speaking())
        self.fleet.step_fails(agent, sorted(agent.running - agent.held)[0], error)

    @precondition(lambda self: self.speaking())
    @rule(pick=picks)
    def nothing_moves(self, pick: int) -> None:
        self.fleet.stall(self.pick(pick, self.speaking()))

    @precondition(lambda self: self.speaking())
    @rule(pick=picks, what=st.sampled_from(["sleep", "wait_for_others", "move"]))
    def one_sleeps_others_wait_or_something_moves(self, pick: int, what: str) -> None:
        getattr(self.fleet, what)(self.pick(pick, self.speaking()))

    def stuck(self) -> list[Agent]:
        """The agents of all members, where each has workers of this view at work and can tell; none otherwise."""
        number, members = self.world.view_number, set(self.world.job.members)
        here = [a for a in self.speaking() if a.reachable and a.serve and a.serve.view == number]
        return here if self.world.serving and members and {a.node_id for a in here} == members else []

    @precondition(lambda self: self.stuck())
    @rule(first=picks, apart_s=st.sampled_from([0.0, 1.0, 55.0]))
    def no_member_ever_moves_again(self, first: int, apart_s: float) -> None:
        """Liveness: each node tells once, when it is beyond its own limit. That must not go unnoticed."""
        self.all_orders_and_reports_arrive(1)
        agents, number = self.stuck(), self.world.view_number
        for index in range(len(agents)):
            if self.world.finished or self.world.view_number > number:
                return
            self.fleet.stall(agents[(first + index) % len(agents)])
            self.fleet.deliver(len(self.fleet.mail) - 1)
            self.world.wait(apart_s)
            self.fleet.route()
        self.world.wait(self.world.settings.join_timeout_s + self.world.settings.wait_for_nodes_s)
        self.fleet.route()
        decided = [record for record in self.world.history if isinstance(record, r.IncidentDecided)]
        is_noticed = self.world.view_number > number or any(one.view == number for one in decided)
        assert not agents or is_noticed or self.world.finished, "nobody moves, and nobody noticed"

    @precondition(lambda self: any(a.parked < a.wanted for a in self.fleet.agents))
    @rule(pick=picks)
    def a_spare_parks(self, pick: int) -> None:
        self.fleet.park(self.pick(pick, [a for a in self.fleet.agents if a.parked < a.wanted]))

    @precondition(lambda self: self.world.session)
    @rule()
    def workers_train(self) -> None:
        self.fleet.train()

    @rule(node_id=st.sampled_from(NAMES))
    def a_node_is_to_drain(self, node_id: str) -> None:
        self.fleet.take_in(e.DrainRequested(node_id=node_id, why="asked to"))

    @rule(nodes=st.integers(1, 6))
    def another_size_is_wanted(self, nodes: int) -> None:
        self.fleet.take_in(e.ResizeRequested(nodes=nodes, why="asked to"))

    # --- what is under way arrives

    @precondition(lambda self: self.fleet.deliverable())
    @rule(pick=picks, again=st.booleans())
    def a_report_arrives(self, pick: int, again: bool) -> None:
        indices = self.fleet.deliverable()
        self.fleet.deliver(indices[pick % len(indices)], again=again)

    @precondition(lambda self: any(a.inbox for a in self.linked()))
    @rule(pick=picks, newest=st.booleans(), startable=st.sampled_from([True, True, True, False]))
    def an_order_is_obeyed(self, pick: int, newest: bool, startable: bool) -> None:
        agent = self.pick(pick, [a for a in self.linked() if a.inbox])
        self.fleet.obey(agent, newest=newest, startable=startable)

    @rule(rounds=st.integers(1, 3))
    def all_orders_and_reports_arrive(self, rounds: int) -> None:
        for _ in range(rounds):
            for agent in self.linked():
                while agent.inbox:
                    self.fleet.obey(agent)
            for index in reversed(self.fleet.deliverable()):
                self.fleet.deliver(index)

    @rule(missing=st.booleans())
    def there_is_peace_for_a_while(self, missing: bool) -> None:
        """Whoever is missing is started again, and everything comes to rest."""
        here = {a.node_id for a in self.fleet.agents}
        for node_id in NAMES[: self.world.settings.nodes_max if missing else 0]:
            if node_id not in here:
                self.fleet.start(node_id, vouch=True)
        self.fleet.settle()

    # --- time and the master

    @rule(seconds=st.sampled_from(PAUSES_S))
    def time_passes(self, seconds: float) -> None:
        self.world.wait(seconds)
        self.fleet.route()

    @rule(down_s=st.sampled_from([0.0, 1.0, 700.0]))
    def the_master_restarts(self, down_s: float) -> None:
        self.fleet.restart_master(down_s)

    @precondition(lambda self: self.fleet.deliverable())
    @rule(pick=picks)
    def the_master_dies_before_its_journal_has_what_it_decided(self, pick: int) -> None:
        indices = self.fleet.deliverable()
        _, event = self.fleet.mail[indices[pick % len(indices)]]
        self.fleet.restart_master(lost=event)

    # --- what must always hold

    @invariant()
    def views_follow_one_another(self) -> None:
        formed = [record.view for record in self.world.history if isinstance(record, r.ViewFormed)]
        assert [view.number for view in formed] == list(range(1, len(formed) + 1))
        stores = [(view.store_host, view.store_port) for view in formed]
        assert len(set(stores)) == len(stores), "a store was used for two views"
        for before, after in pairwise(formed):
            assert_stable(before, after)

    @invariant()
    def who_waits_is_told_why(self) -> None:
        orders = [order for agent in self.fleet.agents for order in agent.inbox]
        assert all(order.why for order in orders if isinstance(order, o.Hold))

    @invariant()
    def agents_do_not_run_ahead(self) -> None:
        job = self.world.job
        by_view: dict[int, list[Agent]] = {}
        for agent in self.fleet.agents:
            if agent.serve:
                by_view.setdefault(agent.serve.view, []).append(agent)
        for number, agents in by_view.items():
            assert number <= self.world.view_number, "a view that no journal has"
            orders = [a.serve for a in agents if a.serve]
            assert len({(s.world_size, s.store_host, s.store_port) for s in orders}) == 1
            assert len({s.group_rank for s in orders}) == len(orders), "two agents with one rank"
            if number == self.world.view_number:
                for agent in agents:
                    assert job.members[agent.node_id].incarnation == agent.life, "a stranger serves the view"

    @invariant()
    def nobody_is_sent_away_beyond_the_limits(self) -> None:
        sent = [record for record in self.world.history if isinstance(record, r.NodeCordoned)]
        for record in sent:
            within = [other for other in sent if record.at - 86_400 < other.at <= record.at]
            assert len(within) <= self.world.settings.cordon_limit

    @invariant()
    def restarts_are_counted_once_a_view(self) -> None:
        decided = [record for record in self.world.history if isinstance(record, r.IncidentDecided)]
        views = [d.view for d in decided]
        assert len(set(views)) == len(views), "decided twice about one view"
        assert self.world.job.incidents.restarts_used == sum(d.counted for d in decided)

    @invariant()
    def only_what_starts_anew_counts(self) -> None:
        for record in self.world.history:
            if isinstance(record, r.IncidentDecided) and record.counted:
                assert record.strategy in (Strategy.RESTART, Strategy.WAIT)

    @invariant()
    def a_recovery_that_kept_workers_was_proved(self) -> None:
        kept = {
            rec.view.number for rec in self.world.history if isinstance(rec, r.ViewFormed) and rec.view.keeps_workers
        }
        proved = {rec.view for rec in self.world.history if isinstance(rec, r.StepCommittedRecord)}
        closed = {rec.view_after for rec in self.world.history if isinstance(rec, r.IncidentClosed)}
        assert closed & kept <= proved

    # --- what must hold in the end

    def teardown(self) -> None:
        if not hasattr(self, "fleet"):
            return
        self.fleet.settle()
        if self.world.finished:
            assert not self.fleet.agents, "the job is over and somebody was not told"
            return
        settings = self.world.job.settings
        here = {a.node_id: a for a in self.fleet.agents}
        assert len(here) == len(self.fleet.agents), "two live under one id"
        if self.world.gathering:
            assert sum(n.eligible for n in self.world.job.nodes.values()) < settings.nodes_min, (
                "enough nodes are there and nothing happens"
            )
            return
        job = self.world.job
        assert not job.progress.failed and not job.progress.interrupted and job.progress.started == set(job.members)
        assert job.progress.succeeded or job.incidents.current is None, "a recovery does not come to an end"
        assert job.progress.succeeded or self.world.session is None or job.progress.first_committed >= 0, (
            "no step is committed"
        )
        workers = {(m.node_id, i) for m in job.members.values() for i in range(m.workers)}
        assert {node_id for node_id, _ in workers - job.progress.succeeded} <= set(here), (
            "a member with work left is gone"
        )
        if not job.progress.succeeded and (self.world.session is None or may_resize(job)):
            assert_full(job)
            full = all(m.workers == job.nodes[m.node_id].info.workers for m in job.members.values())
            assert full, "a local rank stays empty"
        for node_id, agent in here.items():
            assert (agent.serve.view if agent.serve else 0) == (self.world.view_number if node_id in job.members else 0)
        for agent in here.values():
            for local_rank in sorted(agent.running):
                self.fleet.worker_succeeds(agent, local_rank)
        self.fleet.settle()
        assert self.world.finished and self.world.finished.outcome is r.Outcome.SUCCEEDED


def assert_full(job: JobState) -> None:
    """As many nodes as are wanted, or as there are. One too many stays only where a part of the state would go with
    those that joined last."""
    excess = len(job.members) - job.settings.nodes_max
    if excess > 0:
        newest = sorted(job.members, key=lambda node_id: job.nodes[node_id].join_order)[-excess:]
        assert job.state.session and missing_shards(living_holders(job, without=newest)), (
            f"{newest} may go, and did not"
        )
        return
    assert len(job.members) == min(job.settings.nodes_max, len(job.able)), "somebody was not taken in"


def assert_stable(before: View, after: View) -> None:
    """Who stays keeps its rank, and so does who comes back; but the next life of a node may take over from one that
    only it is large enough for."""
    ranks = {member.node_id: member for member in before.members}
    workers = {member.group_rank: member.workers for member in before.members}
    for member in after.members:
        held = ranks.get(member.node_id)
        if held is None or held.group_rank >= len(after.members) or held.group_rank == member.group_rank:
            continue
        is_needed = after.strategy is Strategy.RECOVER and workers[member.group_rank] > held.workers
        assert is_needed and member.incarnation != held.incarnation, f"{member.node_id} was moved"


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=EXAMPLES or 400,
    derandomize=not EXAMPLES,
    stateful_step_count=40,
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
