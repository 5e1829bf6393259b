"""A job's time only grows, whatever happens to clocks; agents' times are translated to it."""

from __future__ import annotations

import time

from holdfast.core.events import StepError, StepInterrupted, WorkerFailed
from holdfast.core.faults.failures import Exited, Failure
from holdfast.core.records import TermBegan
from holdfast.core.settings import Settings
from holdfast.master.job_clock import AgentClock, JobClock, steady_s
from holdfast.master.master import Master
from support.simulated_master import SimulatedJournal, SimulatedTransport

HOUR_S = 3_600.0


class Machine:
    """A wall clock that may be set, and one that may not."""

    def __init__(self, wall_s: float, up_s: float = 77.0) -> None:
        self.wall_s, self.up_s = wall_s, up_s

    def wall(self) -> float:
        return self.wall_s

    def steady(self) -> float:
        return self.up_s

    def wait(self, seconds: float) -> None:
        self.wall_s += seconds
        self.up_s += seconds

    def clock(self, not_before: float = 0.0) -> JobClock:
        return JobClock(not_before, self.wall, self.steady)


def failed(failed_at: float) -> WorkerFailed:
    failure = Failure(node_id="b", view=1, rank=1, local_rank=0, pid=1, end=Exited(1), failed_at=failed_at)
    return WorkerFailed(node_id="b", incarnation="b.1", view=1, failure=failure)


def test_a_wall_clock_that_is_set_changes_nothing_in_a_term() -> None:
    machine = Machine(1_000_000.0)
    clock = machine.clock()
    for set_by_s in (-HOUR_S, HOUR_S, 24 * HOUR_S):
        before = clock()
        machine.wall_s += set_by_s
        machine.wait(0.3)
        assert clock() - before == 0.3 or abs(clock() - before - 0.3) < 1e-6


def test_the_time_of_the_next_term_begins_where_the_journal_ends_at_the_earliest() -> None:
    behind, ahead = Machine(1_000_000.0 - HOUR_S, up_s=5.0), Machine(1_000_000.0 + HOUR_S, up_s=9_999.0)
    assert behind.clock(1_000_050.0)() == 1_000_050.0
    assert ahead.clock(1_000_050.0)() == 1_000_000.0 + HOUR_S


def test_a_master_on_a_machine_whose_clock_is_behind_goes_on_from_the_journals_end() -> None:
    ahead = time.time() + HOUR_S
    journal = SimulatedJournal()
    Master(journal, SimulatedTransport([]), "demo", Settings(), lambda: ahead)
    Master(journal, SimulatedTransport([]), "demo", Settings())
    times = [record.at for record in journal.records]
    assert times == sorted(times) and [record.term for record in journal.of(TermBegan)] == [1, 2]
    assert ahead <= times[-1] < ahead + HOUR_S / 2


def test_the_steady_clock_is_there() -> None:
    first = steady_s()
    assert steady_s() >= first > 0


def test_agents_times_are_translated() -> None:
    clock = AgentClock()
    for sent_at, now in ((50_002.0, 50_001.5), (50_003.0, 50_001.0), (50_004.0, 50_003.9)):  # 2 s ahead, delays differ
        clock.heard(sent_at, now)
    event = clock.translated(failed(50_010.0), 50_009.0)
    assert isinstance(event, WorkerFailed) and event.failure.failed_at == 50_008.0
    error = StepError(
        rank=1, local_rank=0, step=7, at=50_020.0, exception="OSError", message="", traceback="", collateral=False
    )
    interrupted = clock.translated(StepInterrupted(node_id="b", incarnation="b.1", view=1, step_error=error), 50_009.0)
    assert isinstance(interrupted, StepInterrupted) and interrupted.step_error.at == 50_009.0, "not yet to come"


def test_without_a_time_of_sending_they_are_as_they_are() -> None:
    clock = AgentClock()
    clock.heard(0.0, 50_000.0)
    event = clock.translated(failed(49_999.0), 50_000.0)
    assert isinstance(event, WorkerFailed) and event.failure.failed_at == 49_999.0
