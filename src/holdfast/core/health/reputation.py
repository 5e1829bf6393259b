"""What is to be expected of a machine, from what is known of it across jobs. Pure.

The numbers come from a public trace of 400 eight-GPU servers over 348 days (bench/reputation.py prints them):

    probation   a machine back from repair fails again within a day at 66 times the usual rate, on the second day at 9
                times, in the second week at 3 times: 22 % of all faults come in that first day, which is 0.3 % of the
                machines' time
    ban         5 % of the machines have a quarter of the faults; one that has its third fault within two weeks has
                another within a month in 2 of 3 cases, against 1 of 8 for any machine

The score of a machine is the number of its faults, each counted half after every two weeks. A score of 2.5 (the third
fault in about a week) is a ban, until it has decayed to 1. On the trace that bans 33 machines for 0.4 % of the time,
and keeps 7 % of the faults out of jobs, 17 times as many as bans at random would; probation takes another 18 % of the
faults to where there is somebody else, in 0.3 % of the time.

Good machines get ranks first, those on probation stand by if there are enough others, those that are banned or
cordoned are a last resort: taken when the job could not start or go on without them (conclude.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from holdfast.core.fault_types import Blame, Fault

DAY_S = 86_400.0
PROBATION_S = DAY_S
HALF_LIFE_S = 14 * DAY_S
BAN_SCORE = 2.5
LIFT_SCORE = 1.0
WEIGHTS = {"node-lost": 0.5, "link-down": 0.5, "hang": 0.1, "residual-processes": 0.5, "device-slow": 0.5}
"""Of faults that may well have been somebody else's: most hangs are scripts'. The rest of those blamed on nodes count
whole, others nothing."""
TELLING_WEIGHT = 0.5
"""From which on a single fault is a reason for probation."""


class Grade(StrEnum):
    """What a job makes of a machine. In the order of preference."""

    GOOD = "good"
    PROBATION = "probation"
    BANNED = "banned"
    CORDONED = "cordoned"


ORDER = tuple(Grade)
LAST_RESORT = frozenset({Grade.BANNED, Grade.CORDONED})


class Repute(msgspec.Struct, frozen=True):
    """A machine's grade when it joined, and why."""

    grade: Grade = Grade.GOOD
    why: str = ""


class Kind(StrEnum):
    """What can happen to a machine."""

    FAULT = "fault"
    CLEARED = "cleared"
    """Its last fault was not its own after all."""
    RETURNED = "returned"
    """It joined a job after a fault."""
    CORDONED = "cordoned"
    UNCORDONED = "uncordoned"
    """Somebody let it back, so it was repaired."""
    CHECK_PASSED = "check-passed"
    CHECK_FAILED = "check-failed"


class NodeEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a machine's history."""

    at: float
    kind: Kind
    fault: str = ""
    weight: float = 0.0
    job_id: str = ""
    why: str = ""


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that no job is to have."""

    machine: str
    at: float
    by: str
    why: str
    until: float | None = None
    """None: until somebody lets it back."""


class Record(msgspec.Struct):
    """A machine's history, added up to some moment."""

    score: float = 0.0
    at: float = 0.0
    is_banned: bool = False
    returned_at: float | None = None
    """Since it was last back from a fault; None: it never was, or is still to come back."""
    last: NodeEvent | None = None
    """Its last fault."""
    failed_check: NodeEvent | None = None


def weight_of(fault: Fault) -> float:
    """How much a fault says against the machine it happened on."""
    return WEIGHTS.get(fault.name, 1.0 if fault.blame is Blame.NODE else 0.0)


def add_up(history: Iterable[NodeEvent], now: float) -> Record:
    """What a history, the oldest first, comes to."""
    record = Record()
    for event in history:
        _decay(record, event.at)
        _add(record, event)
    _decay(record, now)
    return record


def _decay(record: Record, at: float) -> None:
    record.score *= 0.5 ** (max(at - record.at, 0.0) / HALF_LIFE_S)
    record.at = max(at, record.at)
    if record.score <= LIFT_SCORE:
        record.is_banned = False


def _add(record: Record, event: NodeEvent) -> None:
    match event.kind:
        case Kind.FAULT:
            record.score += event.weight
            record.is_banned |= record.score >= BAN_SCORE
            if event.weight >= TELLING_WEIGHT:
                record.last, record.returned_at = event, None
        case Kind.CLEARED:
            record.score = max(record.score - event.weight, 0.0)
            record.is_banned &= record.score >= BAN_SCORE
            record.last = None
        case Kind.RETURNED:
            record.returned_at = event.at if record.last else None
        case Kind.UNCORDONED:
            record.score, record.is_banned = min(record.score, LIFT_SCORE), False
            record.returned_at, record.failed_check = event.at, None
        case Kind.CHECK_PASSED:
            record.failed_check = None
        case Kind.CHECK_FAILED:
            record.failed_check = event
            record.score += event.weight
            record.is_banned |= record.score >= BAN_SCORE
        case Kind.CORDONED:
            pass  # the mark says so, for as long as it is there


def judge(history: Iterable[NodeEvent], now: float, mark: Mark | None = None) -> Repute:
    """A machine's grade now."""
    if mark and mark.until is None:
        return Repute(Grade.CORDONED, f"cordoned {ago(now - mark.at)} by {mark.by}: {mark.why}")
    if mark and mark.until is not None and mark.until > now:
        return Repute(Grade.BANNED, f"{mark.why}; since {span(now - mark.at)}, for another {span(mark.until - now)}")
    record = add_up(history, now)
    last = f"the last one {record.last.fault} {ago(now - record.last.at)}" if record.last else "none lately"
    if record.is_banned:
        left = span(banned_for_s(record.score))
        return Repute(Grade.BANNED, f"it keeps failing: a score of {record.score:.1f} faults, {last}; for {left}")
    if record.failed_check:
        return Repute(Grade.PROBATION, f"a check of it failed {ago(now - record.failed_check.at)}")
    if record.returned_at is not None and now - record.returned_at < PROBATION_S:
        if record.last is None:
            return Repute(Grade.PROBATION, f"it was let back {ago(now - record.returned_at)}")
        return Repute(Grade.PROBATION, f"it is back from a fault since {span(now - record.returned_at)} only ({last})")
    if record.last and now - record.last.at < PROBATION_S:
        return Repute(Grade.PROBATION, f"it failed {ago(now - record.last.at)}: {record.last.fault}")
    return Repute()


def banned_for_s(score: float) -> float:
    """How long it takes a score to decay to where a ban is lifted."""
    return HALF_LIFE_S * math.log2(score / LIFT_SCORE) if score > LIFT_SCORE else 0.0


def has_to_return(history: Iterable[NodeEvent]) -> bool:
    """Whether joining a job is news: something happened to it that it is now back from."""
    telling = (Kind.FAULT, Kind.RETURNED, Kind.UNCORDONED, Kind.CLEARED)
    return [event.kind for event in history if event.kind in telling][-1:] == [Kind.FAULT]


def preference(repute: Repute) -> int:
    """The smaller, the sooner it gets ranks."""
    return ORDER.index(repute.grade)


def ago(seconds: float) -> str:
    return f"{span(seconds)} ago"


def span(seconds: float) -> str:
    """In one unit, for a sentence."""
    for size, name in ((DAY_S, "d"), (3_600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {name}"
    return f"{max(seconds, 0.0):.0f} s"
