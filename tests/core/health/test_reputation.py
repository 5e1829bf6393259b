"""What a machine is known for, from its history."""

from __future__ import annotations

import pytest

from holdfast.core.faults.fault_table import fault_of
from holdfast.core.health.findings import CheckProblem
from holdfast.core.health.reputation import (
    BAN_SCORE,
    DAY_S,
    HALF_LIFE_S,
    LIFT_SCORE,
    CordonMark,
    Grade,
    MachineEventKind,
    NodeEvent,
    add_up,
    ban,
    banned_for_s,
    check_weights,
    has_to_return,
    judge,
    judge_newcomer,
    weight_of,
)

HOUR_S = 3_600.0


def events(*lines: tuple[float, MachineEventKind]) -> list[NodeEvent]:
    """By day."""
    weights = {MachineEventKind.FAULT: 1.0, MachineEventKind.CLEARED: 1.0, MachineEventKind.CHECK_FAILED: 1.0}
    return [NodeEvent(at=day * DAY_S, kind=kind, fault="x", weight=weights.get(kind, 0.0)) for day, kind in lines]


def graded(history: list[NodeEvent], now: float) -> Grade:
    """With the ban that the history asks for."""
    return judge(history, now, ban("m", history, now, "job j")).grade


FAULT, BACK, PERSON, CLEARED = (
    MachineEventKind.FAULT,
    MachineEventKind.RETURNED,
    MachineEventKind.UNCORDONED,
    MachineEventKind.CLEARED,
)


@pytest.mark.parametrize(
    ("history", "day", "grade"),
    [
        ([], 0, Grade.GOOD),
        ([(1, FAULT)], 1.1, Grade.PROBATION),
        ([(1, FAULT)], 2.1, Grade.GOOD),
        ([(1, FAULT), (9, BACK)], 9.5, Grade.PROBATION),
        ([(1, FAULT), (9, BACK)], 10.1, Grade.GOOD),
        ([(9, BACK)], 9.5, Grade.GOOD),  # from what?
        ([(1, FAULT), (1.1, FAULT), (1.2, FAULT)], 3, Grade.BANNED),
        ([(1, FAULT), (8, FAULT), (15, FAULT)], 17, Grade.GOOD),  # one a week is bad luck
        ([(1, FAULT), (4, FAULT), (7, FAULT)], 9, Grade.BANNED),
        ([(1, FAULT), (1.1, FAULT), (1.2, FAULT)], 24, Grade.GOOD),  # decayed
        ([(1, FAULT), (1.1, FAULT), (1.2, FAULT)], 22, Grade.BANNED),
        ([(1, FAULT), (1.1, FAULT), (1.2, FAULT), (2, PERSON)], 2.5, Grade.PROBATION),
        ([(1, FAULT), (1.1, FAULT), (1.2, FAULT), (2, PERSON)], 4, Grade.GOOD),
        ([(1, FAULT), (1.1, FAULT), (1.2, FAULT), (2, PERSON), (5, FAULT), (6, FAULT)], 8, Grade.BANNED),
        ([(1, FAULT), (1.1, CLEARED)], 1.2, Grade.GOOD),
        ([(1, FAULT), (1.1, FAULT), (1.2, FAULT), (1.3, CLEARED)], 3, Grade.GOOD),
        ([(1, MachineEventKind.CHECK_FAILED)], 5, Grade.PROBATION),
        ([(1, MachineEventKind.CHECK_FAILED), (2, MachineEventKind.CHECK_PASSED)], 5, Grade.GOOD),
    ],
)
def test_grades(history: list[tuple[float, MachineEventKind]], day: float, grade: Grade) -> None:
    assert graded(events(*history), day * DAY_S) is grade


@pytest.mark.parametrize(
    ("history", "day", "grade"),
    [
        ([], 9, Grade.GOOD),
        ([(1, FAULT)], 9, Grade.PROBATION),  # back from a repair of a week
        ([(1, FAULT), (2, BACK)], 9, Grade.GOOD),
        ([(1, FAULT), (1.1, CLEARED)], 9, Grade.GOOD),
        ([(1, FAULT), (1.1, FAULT), (1.2, FAULT)], 9, Grade.BANNED),
        ([(1, FAULT), (1.1, FAULT), (1.2, FAULT)], 40, Grade.PROBATION),
        ([(1, FAULT), (2, PERSON)], 9, Grade.GOOD),
    ],
)
def test_a_machine_that_joins_is_back_with_that(
    history: list[tuple[float, MachineEventKind]], day: float, grade: Grade
) -> None:
    known, now = events(*history), day * DAY_S
    assert judge_newcomer(known, now, ban("m", known, now, "job j")).grade is grade


def test_what_is_most_often_somebody_elses_is_no_reason_for_probation() -> None:
    hang = NodeEvent(at=0.0, kind=FAULT, fault="hang", weight=weight_of(fault_of("hang")))
    assert judge([hang], HOUR_S).grade is Grade.GOOD
    assert graded([hang] * 25, HOUR_S) is Grade.BANNED


def test_a_mark_goes_before_the_history_and_may_run_out() -> None:
    mark = CordonMark(machine="m", at=0.0, by="ada", why="its fan is loud")
    assert judge([], 3 * HOUR_S, mark) == judge(events((0, FAULT)), 3 * HOUR_S, mark)
    assert judge([], 3 * HOUR_S, mark).grade is Grade.CORDONED
    assert judge([], 3 * HOUR_S, mark).why == "cordoned 3 h ago by ada: its fan is loud"
    ban = CordonMark(machine="m", at=0.0, by="job a", why="it keeps failing", until=DAY_S)
    assert judge([], HOUR_S, ban).grade is Grade.BANNED
    assert judge([], 2 * DAY_S, ban).grade is Grade.GOOD


def test_a_ban_lasts_until_the_score_has_decayed() -> None:
    record = add_up(events((1, FAULT), (1, FAULT), (1, FAULT)), DAY_S)
    assert record.score == 3.0 and record.is_lemon
    over_at = DAY_S + banned_for_s(record.score)
    assert graded(events((1, FAULT), (1, FAULT), (1, FAULT)), over_at - 1) is Grade.BANNED
    assert graded(events((1, FAULT), (1, FAULT), (1, FAULT)), over_at + 1) is Grade.GOOD
    assert banned_for_s(BAN_SCORE) == pytest.approx(HALF_LIFE_S * 1.3219, rel=1e-3)
    assert banned_for_s(LIFT_SCORE) == 0.0


def test_one_that_keeps_failing_and_has_no_mark_is_on_probation() -> None:
    history = events(
        (1, FAULT), (1.1, FAULT), (1.2, MachineEventKind.CHECK_FAILED), (1.3, MachineEventKind.CHECK_PASSED)
    )
    reputation = judge(history, 4 * DAY_S)
    assert reputation.grade is Grade.PROBATION
    assert reputation.why == "it keeps failing: a score of 2.6 faults, the last one x 3 d ago"


def test_a_hang_is_nothing_to_come_back_from() -> None:
    hang = NodeEvent(at=300 * DAY_S, kind=FAULT, fault="hang", weight=0.1)
    history = [*events((1, FAULT), (2, BACK)), hang]
    assert not has_to_return(history)
    back = NodeEvent(at=300.1 * DAY_S, kind=BACK)  # as older masters wrote it
    assert judge([*history, back], 300.2 * DAY_S).grade is Grade.GOOD


def test_what_was_taken_back_is_as_if_it_had_not_been() -> None:
    history = events((1, FAULT), (9, BACK))
    other = [
        NodeEvent(at=9.1 * DAY_S, kind=kind, fault="y", weight=1.0, job_id="j")
        for kind in (FAULT, MachineEventKind.CLEARED)
    ]
    assert add_up([*history, *other], 9.2 * DAY_S) == add_up(history, 9.2 * DAY_S)


def problem(fault: str, stage: str = "device") -> CheckProblem:
    return CheckProblem(stage, fault, "")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("problems", "weights"),
    [
        ({"a": ["wrong-result"]}, {"a": 1.0}),
        ({"a": ["gpu-memory-error", "device-missing"]}, {"a": 1.0}),
        ({"a": ["device-missing", "device-memory-taken", "disk-error", "check-failed", "no-answer"]}, {"a": 0.0}),
        ({"a": ["gpu-residual-processes", "device-out-of-memory", "collective-timeout"]}, {"a": 0.0}),
        ({"a": []}, {"a": 0.0}),  # fails with every partner: it may be what lies between
        ({"a": ["gpu-driver-error"], "b": ["gpu-driver-error"]}, {"a": 0.0, "b": 0.0}),
        ({"a": ["gpu-driver-error", "gpu-lost"], "b": ["gpu-driver-error"]}, {"a": 1.0, "b": 0.0}),
    ],
)
def test_what_a_failed_check_says_against_its_machine(
    problems: dict[str, list[str]], weights: dict[str, float]
) -> None:
    assert check_weights({machine: list(map(problem, faults)) for machine, faults in problems.items()}) == weights


def test_a_clock_that_was_set_back_does_no_harm() -> None:
    assert judge(events((5, FAULT), (1, FAULT)), 0.0).grade is Grade.PROBATION


@pytest.mark.parametrize(
    ("fault", "weight"),
    [("device-lost", 1), ("driver-error", 1), ("node-lost", 0.5), ("hang", 0.1), ("killed", 0), ("script-error", 0)],
)
def test_what_a_fault_says_against_its_machine(fault: str, weight: float) -> None:
    assert weight_of(fault_of(fault)) == weight


def test_joining_is_news_after_a_fault_only() -> None:
    assert not has_to_return([])
    assert has_to_return(events((1, FAULT)))
    assert has_to_return(events((1, FAULT), (2, BACK), (3, FAULT), (3, MachineEventKind.CHECK_PASSED)))
    assert not has_to_return(events((1, FAULT), (2, BACK)))
    assert not has_to_return(events((1, FAULT), (2, CLEARED)))


# Five of the worst of 400 machines, in days from fault to repair; from the trace published with InfiniteHBD (StepFun,
# Apache-2.0), rounded. bench/reputation.py has the whole.
LEMONS = [
    [(60.5, 61.9), (62.0, 62.0), (62.1, 65.9), (66.8, 72.7), (78.1, 78.7), (78.8, 80.1), (130.9, 131.9), (255.7, 256)],
    [(66.8, 67.0), (67.7, 68.9), (72.2, 86.9), (87.9, 88.7), (88.7, 88.8), (88.8, 89.7), (89.7, 90.1), (90.1, 94.7)],
    [(239.4, 239.4), (239.5, 239.9), (254.7, 254.7), (254.7, 254.9), (290.7, 290.9), (319.3, 319.3), (324.5, 324.8)],
    [(325.0, 325.1), (326.8, 328.7), (331.8, 331.8), (332.3, 333.9), (340.2, 341.2), (341.2, 344.8), (344.8, 345.9)],
    [(33.6, 38.9), (46.2, 47.9), (61.2, 89.2), (211.9, 212.7), (212.7, 213.7), (251.7, 251.9), (267.8, 267.8)],
]


def test_half_of_the_faults_of_machines_that_were_lemons_come_when_they_are_doubted() -> None:
    doubted = faults = 0
    for lemon in LEMONS:
        history: list[NodeEvent] = []
        for begin, end in lemon:
            grade = graded(history, begin * DAY_S)
            faults, doubted = faults + 1, doubted + (grade is not Grade.GOOD)
            if grade is not Grade.BANNED:  # else it was in no job
                history += events((begin, FAULT), (end, BACK))
    assert (faults, doubted) == (37, 18)
