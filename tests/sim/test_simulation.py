"""The production core on a simulated fleet."""

from __future__ import annotations

import math
import sys

import msgspec
import pytest

from holdfast.core.events import JobSpec
from holdfast.core.faults.failures import Exited, Failure
from holdfast.core.faults.fault_table import fault_of
from holdfast.core.health.reputation import Grade, Reputation
from holdfast.core.records import NodeJoined, WorkerFailedRecord
from holdfast.core.strategies import Strategy
from holdfast.sim.core_driver import CoreDriver
from holdfast.sim.fault_models import Arrivals, FaultModel
from holdfast.sim.machine_histories import MachineHistories
from holdfast.sim.outages import DAY_S, HOUR_S, Outage, OutageKind, Trace
from holdfast.sim.phase_times import PhaseTimes
from holdfast.sim.scenario import RecoveryPlan, Scenario
from holdfast.sim.simulated_fleet import SimulatedFleet
from holdfast.sim.simulation import SimulatedRun, Simulation
from holdfast.sim.time_ledger import IN_REPAIR, SINCE_CHECKPOINT, TRAINING, WAITING

BUSY = FaultModel(
    per_node_day=0.1,
    shape=0.62,
    burst_share=0.3,
    lemon_nodes=0.05,
    lemon_share=0.25,
    repair_median_s=2 * HOUR_S,
    repair_mean_s=8 * HOUR_S,
)
FT_HSDP = Scenario(
    nodes=12,
    gpus_per_node=8_192,
    days=5.0,
    checkpoint_every_s=1.0,
    model=FaultModel(
        per_node_day=80.0 / 12.0, arrivals=Arrivals.REGULAR, repair_median_s=420.0, repair_mean_s=420.0
    ),
    times=PhaseTimes(
        detect=(60.0,), restart=(540.0,), recover=(180.0,), planned=(0.0,), park=(0.0,), step=(20.0,),
        checkpoint_stall=(0.0,),
    ),
)  # fmt: skip
"""12 groups of 8,192 devices; a fault every 18 minutes takes one of them away for 7 minutes."""


def single(kind: OutageKind, *, end_h: float = 3.0, node: int = 1) -> Trace:
    return Trace((Outage(node, HOUR_S, end_h * HOUR_S, kind),), nodes=4, span_s=5 * HOUR_S)


def simulated(trace: Trace, **choices: object) -> SimulatedRun:
    choices = {"nodes": 4, "days": 5.0 / 24.0, "trace": trace, **choices}
    return Simulation(Scenario(**choices), 0).run()  # type: ignore[arg-type]


def calls_of_a_view(nodes: int) -> float:
    """Return how many functions are called for a view, with a fault every hour, once the job has started."""

    def calls_in(hours: float) -> tuple[int, int]:
        model = FaultModel(per_node_day=24.0 / nodes, arrivals=Arrivals.REGULAR, kinds={OutageKind.DIES: 1.0})
        simulation, calls = Simulation(Scenario(nodes=nodes, days=hours / 24.0, model=model), 1), 0

        def count(_: object, event: str, __: object) -> None:
            nonlocal calls
            calls += event == "call"

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            run = simulation.run()
        finally:
            sys.setprofile(before)
        return calls, run.views

    (few, views), (many, views_later) = calls_in(2.0), calls_in(12.0)
    return (many - few) / (views_later - views)


def test_a_view_hardly_asks_about_machines_that_it_does_not_change() -> None:
    assert (calls_of_a_view(300) - calls_of_a_view(100)) / 200 <= 6.0


@pytest.mark.parametrize("plan", list(RecoveryPlan))
def test_every_second_is_in_one_account_and_a_seed_is_a_history(plan: RecoveryPlan) -> None:
    scenario = Scenario(nodes=20, spares=1, plan=plan, days=8.0, model=BUSY)
    run, again, other = (Simulation(scenario, seed).run() for seed in (1, 1, 2))
    assert sum(run.accounts.values()) == pytest.approx(1.0)
    assert 0.0 < run.goodput == run.accounts[TRAINING] <= run.bound
    assert run.faults > 5 and run.incidents > 0 and run.jobs_ended == 0
    quiet = {"processor_s": 0.0}
    assert msgspec.structs.replace(run, **quiet) == msgspec.structs.replace(again, **quiet)
    assert run.accounts != other.accounts


@pytest.mark.parametrize("kind", [OutageKind.DIES, OutageKind.SILENT, OutageKind.DEVICE, OutageKind.LEAVES])
def test_a_spare_takes_over_and_the_machine_comes_back_as_one(kind: OutageKind) -> None:
    run = simulated(single(kind), spares=1)
    assert run.strategies == {Strategy.RECOVER.value: 1} and run.views == 2
    assert run.accounts[IN_REPAIR] == pytest.approx(2.0 / 20.0, abs=0.001)
    assert run.job_rate > 0.99 and run.goodput == pytest.approx(0.75 * run.job_rate)


def test_without_a_spare_the_others_go_on_and_it_joins_them_again() -> None:
    run = simulated(single(OutageKind.DIES), nodes_min=2)
    assert run.strategies == {Strategy.ELASTIC_TRAINING.value: 2} and run.views == 3
    assert run.bound == pytest.approx(0.9) and 0.89 < run.goodput < 0.9


def test_a_fixed_job_waits_for_its_machine_with_its_state_or_loses_what_it_had_not_saved() -> None:
    kept = simulated(single(OutageKind.DIES), plan=RecoveryPlan.RECOVER_FIXED)
    lost = simulated(single(OutageKind.DIES), plan=RecoveryPlan.RESTART, checkpoint_every_s=10 * HOUR_S)
    assert kept.accounts[WAITING] == pytest.approx(3 * 2.0 / 20.0, abs=0.01) and SINCE_CHECKPOINT not in kept.accounts
    assert lost.accounts[SINCE_CHECKPOINT] == pytest.approx(4.0 / 20.0, abs=0.01)
    assert kept.jobs_ended == lost.jobs_ended == 0


def test_a_failed_process_costs_a_recovery_and_no_machine() -> None:
    run = simulated(single(OutageKind.PROCESS))
    assert run.strategies == {Strategy.RECOVER_IN_PLACE.value: 1} and run.bound == 1.0 and IN_REPAIR not in run.accounts


def test_one_worker_stands_for_all_devices_of_a_machine() -> None:
    one, all_eight = (
        Simulation(Scenario(nodes=12, spares=1, workers_per_node=workers, days=10.0, model=BUSY), 1).run()
        for workers in (1, 8)
    )
    assert one.views == all_eight.views and one.strategies == all_eight.strategies
    assert one.goodput == pytest.approx(all_eight.goodput, abs=1e-9)


def test_ft_hsdp_s_published_figures_follow_from_its_own_inputs() -> None:
    """98,304 devices, a fault every 18 minutes: about 80 % with recoveries of 3 minutes, 44 % with restarts of 10."""
    kinds = {"recover": OutageKind.DIES, "restart": OutageKind.PROCESS}
    runs = {}
    for plan, kind in kinds.items():
        assert FT_HSDP.model is not None
        model = msgspec.structs.replace(FT_HSDP.model, kinds={kind: 1.0})
        scenario = msgspec.structs.replace(FT_HSDP, plan=RecoveryPlan(plan), nodes_min=6, model=model)
        runs[plan] = Simulation(scenario, 0).run()
    assert runs["recover"].goodput == pytest.approx(0.80, abs=0.03)
    assert runs["restart"].goodput == pytest.approx(0.44, abs=0.03)


def test_restarts_under_poisson_faults_give_what_theory_says() -> None:
    """A moment counts if no fault came in the ten minutes before it: exp(-10/18), not (18 - 10)/18."""
    assert FT_HSDP.model is not None
    model = msgspec.structs.replace(FT_HSDP.model, arrivals=Arrivals.WEIBULL, kinds={OutageKind.PROCESS: 1.0})
    scenario = msgspec.structs.replace(FT_HSDP, plan=RecoveryPlan.RESTART, days=30.0, model=model)
    run = Simulation(scenario, 3).run()
    per_s = run.faults / (30.0 * DAY_S)
    half_steps = run.accounts["redone steps"]
    assert run.goodput + half_steps == pytest.approx(math.exp(-600.0 * per_s), abs=0.03)


def test_a_machine_that_keeps_failing_is_banned_in_simulation_too() -> None:
    scenario = Scenario(nodes=4, nodes_min=2)
    driver, histories = CoreDriver("sim", scenario.settings(), 0.0), MachineHistories()
    fleet = SimulatedFleet(4, 1, JobSpec(run_id="", nodes_min=2, nodes_max=4, restarts_max=0))
    machine = fleet.machines[1]
    for day in range(3):
        failure = Failure(
            node_id=machine.name, view=1, rank=1, local_rank=0, pid=day, end=Exited(1), failed_at=day * DAY_S,
            fault=fault_of("device-error"),
        )  # fmt: skip
        histories.learn([WorkerFailedRecord(at=day * DAY_S, failure=failure, late=False)], driver.job, day * DAY_S)
    assert histories.reputation(machine.name, 2.1 * DAY_S).grade is Grade.BANNED
    assert histories.reputation(machine.name, 90 * DAY_S).grade is Grade.PROBATION  # in its first day after the repair
    info = fleet.hello(machine, Reputation()).info
    joined = NodeJoined(at=90 * DAY_S, node_id=machine.name, incarnation="1", info=info)
    histories.learn([joined], driver.job, 90 * DAY_S)
    assert histories.reputation(machine.name, 90.9 * DAY_S).grade is Grade.PROBATION
    assert histories.reputation(machine.name, 91.1 * DAY_S).grade is Grade.GOOD
    assert histories.reputation("another", 2.1 * DAY_S).grade is Grade.GOOD
