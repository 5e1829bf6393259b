"""One run: machines that fail and are repaired, and the production core that answers.

    agenda      what will happen on the machines: faults, repairs, phases that end. In order of time, then of entry
    turn        all entries of one moment give their events to the core at once, as a master's inbox would
    records     what the core made of them; each moves the machines on

An entry of the agenda returns events for the core. It never gives them to the core by itself, so that a moment costs
one turn, and a run as many turns as there are moments. Between two entries the core is woken at its deadlines.

Training goes on from the first step of a view until a machine with ranks has a fault, another view replaces it, or the
job ends. A job that has ended is started again by the platform, as often as it takes.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any

import msgspec

from holdfast import exit_codes
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.health.reputation import LAST_RESORT
from holdfast.core.orders import Hold
from holdfast.core.shard_map import ShardMap
from holdfast.core.state import Serving
from holdfast.core.strategies import Strategy
from holdfast.core.views import View
from holdfast.sim.core_driver import CoreDriver
from holdfast.sim.machine_histories import MachineHistories
from holdfast.sim.outages import Outage, OutageKind, repair_share
from holdfast.sim.phase_times import Samples
from holdfast.sim.scenario import Scenario
from holdfast.sim.simulated_fleet import DEVICE_FAULT, PROCESS_FAULT, SimulatedFleet, SimulatedMachine
from holdfast.sim.time_ledger import TRAINING, WAITING, TimeLedger

GOODBYE_S = 1.0
"""How long an agent takes to end its workers and to say goodbye."""
STORE_S = 0.1
"""How long an agent takes to make the store of a later view."""
REASONS_MAX = 5
"""Ends of jobs whose reasons are kept."""

Entry = Callable[[], Iterable[e.Event]]


class SimulatedRun(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a run. Shares are of the time of all machines, unless they say otherwise."""

    seed: int
    days: float
    goodput: float
    """Work that counts, of all machines: spares are charged."""
    job_rate: float
    """The same work, of the machines that have ranks when all is well."""
    bound: float
    """The share of the machines' time that is not lost to repairs: no job gets more."""
    accounts: dict[str, float]
    faults: int
    faults_of_members: int
    incidents: int
    strategies: dict[str, int]
    views: int
    jobs_ended: int
    why_ended: tuple[str, ...]
    training_course: tuple[float, ...]
    repair_course: tuple[float, ...]
    turns: int
    events: int
    processor_s: float


class Simulation:
    """A fleet, a job on it, and their time."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario, self.seed = scenario, seed
        self.now = 0.0
        self.settings = scenario.settings()
        spec = e.JobSpec(
            run_id="",
            nodes_min=self.settings.nodes_min,
            nodes_max=self.settings.nodes_max,
            restarts_max=self.settings.restarts_max,
        )
        self.fleet = SimulatedFleet(scenario.nodes, scenario.workers_per_node, spec)
        self.histories = MachineHistories()
        self.outages = scenario.outages(seed)
        times = scenario.times
        self.ledger = TimeLedger(
            scenario.nodes, scenario.span_s, scenario.checkpoint_every_s, _mean(times.checkpoint_stall)
        )
        self.counts: Counter[str] = Counter()
        self.strategies: Counter[str] = Counter()
        self.why_ended: list[str] = []
        self.turns = 0
        self._random = Random(f"{seed} phases")
        self._agenda: list[tuple[float, int, Entry]] = []
        self._entries = 0
        self._gone: set[str] = set()
        """Machines that are not here."""
        self._broken: set[str] = set()
        """Machines that are here, broken."""
        self._leaving: set[str] = set()
        """Machines that were told to leave and have not left."""
        self._drained: set[str] = set()
        """Those of them that run no ranks any more, and say goodbye in a moment."""
        self._unparked: list[tuple[SimulatedMachine, int]] = []
        """Machines that stand by without parked workers, as their order wants none: it may in another view."""
        self._building: list[SimulatedMachine] = []
        """Machines whose workers were not parked when a view was last formed."""
        self._unreported: dict[str, int] = {}
        """Machines of which a worker has failed that the master does not know of yet, by view."""
        self._jobs = 0
        self.driver = self._new_job()

    # --- the loop

    def run(self, on_progress: Callable[[float], None] | None = None) -> SimulatedRun:
        """Simulate to the end of the time; return what came of it. `on_progress` is told the share that is done."""
        began, end, told = time.process_time(), self.scenario.span_s, 0.0
        for outage in self.outages:
            if outage.start_s > 0.0:
                self._at(outage.start_s, partial(self._fault, outage))
            elif outage.end_s > 0.0:
                self._begin_in_repair(outage)
        self._start_job()
        while (moment := self._next_moment()) < end:
            self.now = max(moment, self.now)
            self._turn(self._due_events())
            if on_progress and self.now - told > end / 200.0:
                told = self.now
                on_progress(self.now / end)
        self.ledger.advance(end)
        return self._result(time.process_time() - began)

    def _next_moment(self) -> float:
        agenda = self._agenda[0][0] if self._agenda else float("inf")
        deadline = self.driver.deadline()
        return agenda if deadline is None else min(agenda, deadline)

    def _due_events(self) -> list[e.Event]:
        """Return the events of all entries that are due. What they enter for the same moment comes in the next turn: it
        may depend on what the core makes of this one."""
        due: list[Entry] = []
        while self._agenda and self._agenda[0][0] <= self.now:
            due.append(heapq.heappop(self._agenda)[2])
        return [event for entry in due for event in entry()]

    def _turn(self, events: Sequence[e.Event]) -> None:
        """Give the core the events of this moment, and move the machines on by what it makes of them."""
        deadline = self.driver.deadline()
        if not events and (deadline is None or deadline > self.now):
            return  # only machines have moved
        self.turns += 1
        records = self.driver.take(events, self.now)
        self.histories.learn(records, self.driver.job, self.now)
        for record in records:
            self._heed(record)
        if self._leaving:
            self._let_leave()

    def _at(self, at: float, entry: Entry) -> None:
        self._entries += 1
        heapq.heappush(self._agenda, (at, self._entries, entry))

    def _after(self, delay_s: float, make: Callable[..., Iterable[e.Event]], *arguments: Any) -> None:
        self._at(self.now + delay_s, partial(make, *arguments))

    def _draw(self, phase: str) -> float:
        samples: Samples = getattr(self.scenario.times, phase)
        return samples[0] if len(samples) == 1 else self._random.choice(samples)

    # --- jobs

    def _new_job(self) -> CoreDriver:
        self._jobs += 1
        return CoreDriver(f"sim-{self._jobs}", self.settings, self.now)

    def _start_job(self) -> None:
        """Start the first job: all machines that are well join at once."""
        self._turn([self._hello(machine) for machine in self.fleet.machines if not machine.is_broken])

    def _job_ended(self, record: r.JobFinished) -> None:
        """Let the platform start the job again. What was not saved is lost."""
        self.counts["jobs ended"] += 1
        self.why_ended = [*self.why_ended, f"day {self.now / 86_400.0:.1f}: {record.why}"][:REASONS_MAX]
        self.ledger.stop("stalled: started again", self.now)
        if record.exit_code == exit_codes.DUMPED:
            self.ledger.save()
        else:
            self.ledger.lose_unsaved()
        self.ledger.members = float(self.scenario.nodes)
        self._leaving.clear()
        self._drained.clear()
        self._after(GOODBYE_S, self._start_again)

    def _start_again(self) -> Iterator[e.Event]:
        self.ledger.advance(self.now)
        self.driver = self._new_job()
        self.ledger.members, self.ledger.why_stalled = 0.0, WAITING
        for machine in self.fleet.machines:
            if machine.is_here:
                yield self._hello(machine)

    # --- what the core decided

    def _heed(self, record: r.Record) -> None:
        match record:
            case r.ViewFormed(view=view):
                self._view_formed(view)
            case r.NodesAwaited():
                self.ledger.stop(WAITING, self.now)
            case r.GatheringBegan():
                self.ledger.stop(WAITING, self.now)
                self.ledger.lose_unsaved()
            case r.NodeCordoned(node_id=node_id) | r.NodeDraining(node_id=node_id):
                self._leaving.add(node_id)
            case r.NodeLost(node_id=node_id) | r.NodeLeftRecord(node_id=node_id):
                self._leaving.discard(node_id)
            case r.NodeAdmitted(node_id=node_id):
                self._set_banned(self.fleet.by_name[node_id], False)
            case r.IncidentDecided(strategy=strategy):
                self.strategies[strategy.value] += 1
            case r.IncidentClosed():
                self.counts["incidents"] += 1
            case r.JobFinished():
                self._job_ended(record)
            case _:
                pass

    def _view_formed(self, view: View) -> None:
        self.counts["views"] += 1
        members = view.world_size / self.scenario.workers_per_node
        self._after(STORE_S, self._offer_store, view.store_node_id)
        if not view.keeps_workers:
            self._restart(view, members)
        elif view.strategy is Strategy.DUMP:
            self._stop("stalled: dump", members)
            self._after(self._draw("dump"), self._dumped, view.number)
        elif view.planned:
            self._stop("stalled: planned change", members, is_broken_off=False)
            self._after(self._wait_for_newcomers(view) + self._draw("planned"), self._proved, view.number)
        else:
            strategy = view.strategy or Strategy.RECOVER
            self._stop(f"stalled: {strategy.value}", members)
            phase = "fork" if strategy is Strategy.RECOVER_IN_PLACE or view.replaced else "recover"
            self._after(self._wait_for_newcomers(view) + self._draw(phase), self._proved, view.number)

        for machine, incarnation in self._unparked:
            self._after(0.0, self._parked, machine, incarnation)
        self._unparked.clear()

    def _offer_store(self, node_id: str) -> Iterator[e.Event]:
        """Offer another store on the node whose store the view has taken."""
        if self.fleet.by_name[node_id].is_here:
            yield self.fleet.offer(node_id)

    def _restart(self, view: View, members: float) -> None:
        self._stop("stalled: restart", members)
        if view.number > 1:
            self.ledger.lose_unsaved()
        is_first = view.number == 1 and self._jobs == 1
        self._after(0.0 if is_first else self._draw("restart"), self._all_started, view.number)

    def _wait_for_newcomers(self, view: View) -> float:
        """Return how long all wait for members whose workers are not parked yet."""
        building = [one for one in self._building if one.ready_at > self.now]
        self._building = building
        members = self.driver.job.members
        return max((one.ready_at - self.now for one in building if one.name in members), default=0.0)

    def _stop(self, why: str, members: float, *, is_broken_off: bool = True) -> None:
        self.ledger.stop(why, self.now, self._draw("step") / 2.0 if is_broken_off else 0.0)
        self.ledger.members = members

    def _let_leave(self) -> None:
        """Let agents go whose standing order is to leave and that run no ranks any more."""
        for node_id in sorted(self._leaving - self._drained):
            order = self.driver.order_for(node_id)
            if isinstance(order, Hold) and order.leaving:
                self._drained.add(node_id)
                machine = self.fleet.by_name[node_id]
                self._after(GOODBYE_S, self._goodbye, machine, machine.incarnation)

    # --- what training reports

    def _all_started(self, number: int) -> Iterator[e.Event]:
        """Report that all workers of a view in which all restart are at work."""
        if not self._is_intact(number):
            return
        view = self.driver.job.view
        assert view is not None
        for member in view.members:
            yield e.WorkersStarted(node_id=member.node_id, incarnation=member.incarnation, view=number, pids=(1,))
        if self.scenario.keeps_workers:
            first = view.members[0]
            session = e.SessionInfo(shard_map=ShardMap(self.scenario.shards), replicas=self._copies(view))
            yield e.ViewJoined(node_id=first.node_id, incarnation=first.incarnation, view=number, session=session)
        yield from self._train(view)

    def _copies(self, view: View) -> int:
        """Return the copies that ranks keep for each other: where the cut itself leaves none."""
        return self.scenario.replicas if self.scenario.shards >= view.world_size else 0

    def _proved(self, number: int) -> Iterator[e.Event]:
        """Report the first step of a view, if all of its workers live."""
        view = self.driver.job.view
        if view is not None and self._is_intact(number):
            yield from self._train(view)

    def _train(self, view: View) -> Iterator[e.Event]:
        self.ledger.go(view.world_size / self.scenario.workers_per_node, self.now)
        if self.scenario.keeps_workers:
            first = view.members[0]
            yield e.StepCommitted(
                node_id=first.node_id,
                incarnation=first.incarnation,
                view=view.number,
                step=self.driver.job.state.committed + 1,
            )
        for node_id in sorted(self._broken):
            machine = self.fleet.by_name[node_id]
            relapse_s = self._random.expovariate(1.0 / max(self._draw("relapse"), 1e-3))
            self._after(relapse_s, self._relapse, machine, machine.incarnation, view.number)

    def _dumped(self, number: int) -> Iterator[e.Event]:
        view = self.driver.job.view
        if view is None or not self._is_intact(number):
            return
        for member in view.members:
            for local_rank in range(member.workers):
                yield e.WorkerSucceeded(
                    node_id=member.node_id, incarnation=member.incarnation, view=number, local_rank=local_rank
                )

    def _is_current(self, number: int) -> bool:
        view = self.driver.job.view
        return isinstance(self.driver.job.phase, Serving) and view is not None and view.number == number

    def _is_intact(self, number: int) -> bool:
        """Return whether the view is in force and all of its workers live."""
        job = self.driver.job
        if not self._is_current(number) or job.progress.failed or number in self._unreported.values():
            return False
        return not any(self._is_member(self.fleet.by_name[node_id], is_gone=True) for node_id in self._gone)

    def _is_member(self, machine: SimulatedMachine, *, is_gone: bool = False) -> bool:
        member = self.driver.job.members.get(machine.name)
        is_here = machine.is_here or is_gone
        return is_here and member is not None and member.incarnation == machine.life and self._is_serving()

    def _is_serving(self) -> bool:
        return isinstance(self.driver.job.phase, Serving)

    # --- machines that come and go

    def _hello(self, machine: SimulatedMachine) -> e.Hello:
        self.ledger.advance(self.now)
        if machine.name in self._gone:
            self._gone.discard(machine.name)
            self.ledger.away -= 1
        reputation = self.histories.reputation(machine.name, self.now)
        hello = self.fleet.hello(machine, reputation)
        is_first = self._jobs == 1 and machine.incarnation == 1 and self.now == 0.0
        park_s = self._draw("park")
        machine.ready_at = 0.0 if is_first else self.now + park_s
        if not is_first:
            self._building.append(machine)
        self._set_banned(machine, reputation.grade in LAST_RESORT)
        if self.scenario.keeps_workers:
            self._after(park_s, self._parked, machine, machine.incarnation)
        return hello

    def _parked(self, machine: SimulatedMachine, incarnation: int) -> Iterator[e.Event]:
        if not machine.is_here or machine.incarnation != incarnation or self._is_member(machine):
            return
        order = self.driver.order_for(machine.name)
        if isinstance(order, Hold) and order.spares:
            yield self.fleet.parked(machine, order.spares)
        elif isinstance(order, Hold) and not order.leaving:
            self._unparked.append((machine, incarnation))

    def _set_banned(self, machine: SimulatedMachine, is_banned: bool) -> None:
        self.ledger.advance(self.now)
        self.ledger.banned += is_banned - machine.is_banned
        machine.is_banned = is_banned

    def _go(self, machine: SimulatedMachine) -> None:
        """Note that a machine is not here any more."""
        self.ledger.advance(self.now)
        machine.is_here = False
        self._set_banned(machine, False)
        self._gone.add(machine.name)
        self._broken.discard(machine.name)
        self._leaving.discard(machine.name)
        self._drained.discard(machine.name)
        if machine.is_broken:
            self.ledger.in_repair += 1
        else:
            self.ledger.away += 1

    def _goodbye(self, machine: SimulatedMachine, incarnation: int) -> Iterator[e.Event]:
        if not machine.is_here or machine.incarnation != incarnation:
            return
        life = machine.life
        self._go(machine)
        if not machine.is_broken:
            self._after(self._draw("rejoin"), self._join, machine, incarnation)
        yield e.NodeLeft(node_id=machine.name, incarnation=life)

    def _join(self, machine: SimulatedMachine, incarnation: int) -> Iterator[e.Event]:
        if not machine.is_here and not machine.is_broken and machine.incarnation == incarnation:
            yield self._hello(machine)

    # --- faults

    def _fault(self, outage: Outage) -> Iterator[e.Event]:
        machine = self.fleet.machines[outage.node]
        self.counts["faults"] += 1
        is_member = self._is_member(machine)
        self.counts["faults of members"] += is_member
        if outage.kind is not OutageKind.PROCESS:
            self._break(machine, outage)
        if not machine.is_here:
            return
        match outage.kind:
            case OutageKind.PROCESS if is_member:
                yield from self._worker_fails(machine, PROCESS_FAULT)
            case OutageKind.PROCESS:
                pass  # no worker of the job is there
            case OutageKind.DEVICE if is_member:
                yield from self._worker_fails(machine, DEVICE_FAULT)
            case OutageKind.LEAVES:
                yield e.DrainRequested(node_id=machine.name, why="a test of it failed")
            case OutageKind.SILENT:
                self._vanish(machine, is_member)
                silent_s = self.settings.silence_timeout_s
                self._after(silent_s, self._missed, machine.name, machine.life, silent_s)
            case _:
                self._vanish(machine, is_member)
                yield self.fleet.link_broke(machine)

    def _break(self, machine: SimulatedMachine, outage: Outage) -> None:
        self.ledger.advance(self.now)
        if not machine.is_here and not machine.is_broken:
            self.ledger.away -= 1
            self.ledger.in_repair += 1
        machine.broken_until = max(machine.broken_until, outage.end_s, self.now)
        if machine.is_here:
            self._broken.add(machine.name)
        self._at(machine.broken_until, partial(self._repaired, machine))

    def _begin_in_repair(self, outage: Outage) -> None:
        """Let a machine come to the job once it is repaired."""
        machine = self.fleet.machines[outage.node]
        machine.broken_until = outage.end_s
        self._gone.add(machine.name)
        self.ledger.in_repair += 1
        self._at(outage.end_s, partial(self._repaired, machine))

    def _vanish(self, machine: SimulatedMachine, is_member: bool) -> None:
        if is_member:
            self._stop("stalled: detection", self.ledger.members)
        self._go(machine)

    def _missed(self, name: str, life: str, silent_s: float) -> Iterator[e.Event]:
        yield e.NodeSilent(node_id=name, incarnation=life, silent_s=silent_s)

    def _worker_fails(self, machine: SimulatedMachine, fault: str) -> Iterator[e.Event]:
        """Report a failed worker once its agent has noticed."""
        job = self.driver.job
        assert job.view is not None
        self._stop("stalled: detection", self.ledger.members)
        failed = self.fleet.failure(machine, job.members[machine.name], job.view.number, fault, self.now)
        self._unreported[machine.name] = job.view.number
        self._after(self._draw("detect"), self._report, failed)
        yield from ()

    def _report(self, failed: e.WorkerFailed) -> Iterator[e.Event]:
        self._unreported.pop(failed.node_id, None)
        yield failed

    def _relapse(self, machine: SimulatedMachine, incarnation: int, number: int) -> Iterator[e.Event]:
        """Let a broken machine that was kept fail again, if it still works."""
        is_same = machine.incarnation == incarnation and machine.is_broken and self._is_current(number)
        if is_same and self._is_member(machine) and not self.ledger.why_stalled:
            self.counts["relapses"] += 1
            yield from self._worker_fails(machine, DEVICE_FAULT)

    def _repaired(self, machine: SimulatedMachine) -> Iterator[e.Event]:
        if not machine.is_broken or machine.broken_until > self.now:
            return  # another fault made it last longer
        self.ledger.advance(self.now)
        machine.broken_until = -1.0
        self._broken.discard(machine.name)
        if machine.is_here:
            return
        self.ledger.in_repair -= 1
        self.ledger.away += 1
        yield from self._join(machine, machine.incarnation)

    # --- the result

    def _result(self, processor_s: float) -> SimulatedRun:
        scenario, ledger = self.scenario, self.ledger
        total = scenario.nodes * scenario.span_s
        trained = ledger.accounts[TRAINING]
        return SimulatedRun(
            seed=self.seed,
            days=scenario.days,
            goodput=trained / total,
            job_rate=trained / (scenario.working_nodes * scenario.span_s),
            bound=1.0 - repair_share(self.outages, scenario.nodes, scenario.span_s),
            accounts={
                name: seconds / total
                for name, seconds in sorted(ledger.accounts.items(), key=lambda pair: -pair[1])
                if seconds > 0.0
            },
            faults=self.counts["faults"],
            faults_of_members=self.counts["faults of members"],
            incidents=self.counts["incidents"],
            strategies=dict(self.strategies.most_common()),
            views=self.counts["views"],
            jobs_ended=self.counts["jobs ended"],
            why_ended=tuple(self.why_ended),
            training_course=tuple(ledger.training_course),
            repair_course=tuple(ledger.repair_course),
            turns=self.turns,
            events=self.driver.events,
            processor_s=processor_s,
        )


def _mean(samples: Sequence[float]) -> float:
    return sum(samples) / len(samples)
