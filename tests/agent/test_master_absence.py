"""A master that is away: when a decision is needed, how long it is waited for, what the status file says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.agent import master_absence
from holdfast.agent.master_absence import LocalFacts, MasterAbsence, undecided
from holdfast.cli.local_status import local_lines
from holdfast.core.events import Event, StepError, StepInterrupted, StoreOffered
from holdfast.util.node_status import read_statuses

FACTS = LocalFacts("job", "host0:29400", "host0:29400: refused", 3, (), "/checkpoints/step-40")
OFFER = StoreOffered(node_id="b", incarnation="b.1", port=1)
ERROR = StepError(
    rank=1,
    local_rank=0,
    step=41,
    at=0.0,
    exception="RuntimeError",
    message="Connection closed by peer",
    traceback="",
    collateral=True,
)
INTERRUPTED = StepInterrupted(node_id="b", incarnation="b.1", view=3, step_error=ERROR)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0
        self.set_s = 0.0
        """By how much the machine's time of day was set."""

    def time(self) -> float:
        return self.now + self.set_s

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(master_absence, "time", clock)
    return clock


def test_only_what_stops_workers_needs_a_decision() -> None:
    assert undecided([OFFER]) == ""
    assert undecided([OFFER, INTERRUPTED]).startswith("step 41 was interrupted: RuntimeError")


def test_a_decision_is_waited_for_from_the_moment_it_is_needed(tmp_path: Path, clock: Clock) -> None:
    async def scenario() -> None:
        absence = MasterAbsence(str(tmp_path), "b", 120.0, lambda: FACTS)

        def looks(seconds: int, away: bool, events: list[Event]) -> list[bool]:
            found = []
            for _ in range(seconds):
                clock.now += 1.0
                found.append(absence.look(5.0 if away else 0.0, events))
            return found

        assert not any(looks(10_000, True, [OFFER])), "workers train on, however long"
        assert not any(looks(100, True, [INTERRUPTED]))
        assert not any(looks(100, False, [])), "it was back"
        assert not any(looks(121, True, [INTERRUPTED]))
        assert all(looks(3, True, [INTERRUPTED]))
        await absence.end("the last checkpoint is /checkpoints/step-40")
        absence.close()
        (status,) = read_statuses(tmp_path, "jo")
        assert status.ended and status.needs_decision and status.view == 3
        assert "  ended: the last checkpoint is /checkpoints/step-40" in list(local_lines([status]))

    asyncio.run(scenario())


def test_a_clock_that_is_set_is_no_time_that_has_passed(tmp_path: Path, clock: Clock) -> None:
    async def scenario() -> None:
        absence = MasterAbsence(str(tmp_path), "b", 120.0, lambda: FACTS)
        found = []
        for second in range(123):
            clock.now += 1.0
            clock.set_s = (0.0, 3_600.0, -3_600.0)[second % 3]
            found.append(absence.look(5.0, [INTERRUPTED]))
        assert found == [False] * 121 + [True] * 2
        await absence.end("")

    asyncio.run(scenario())


def test_the_file_goes_with_a_job_that_ends_as_it_should(tmp_path: Path) -> None:
    async def scenario() -> None:
        absence = MasterAbsence(str(tmp_path), "b", 120.0, lambda: FACTS)
        absence.look(7.0, [])
        assert absence._writing is not None
        await absence._writing
        (status,) = read_statuses(tmp_path, None)
        lines = "\n".join(local_lines([status]))
        assert "is away for 7" in lines and "train on" in lines and "step-40" in lines
        absence.close()
        assert not read_statuses(tmp_path, None) and not list(tmp_path.glob("jobs/*"))

    asyncio.run(scenario())
