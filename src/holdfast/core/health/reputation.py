"""What is to be expected of a machine, from what is known of it across jobs. Pure.

The numbers come from a public trace of 400 eight-GPU servers over 348 days (bench/reputation.py prints them):

    probation   a machine back from repair fails again within a day at 65 times the usual rate, on the second day at 8
                times, in the second week at 3 times: 22 % of all faults come in that first day, which is 0.3 % of the
                machines' time
    ban         5 % of the machines have a quarter of the faults; one that has its third fault within two weeks has
                another within a month in 2 of 3 cases, against 1 of 8 for any machine

The score of a machine is the number of its faults, each counted half after every two weeks. A score of 2.5 (the third
fault in about a week) asks for a ban, until it has decayed to 1. On the trace that bans 33 machines for 0.4 % of the
time, and keeps 7 % of the faults out of jobs, 17 times as many as bans at random would; probation takes another 18 % of
the faults to where there is another machine, in 0.3 % of the time.

A ban is a mark that runs out. The master that sets it applies the limit (master/machine_registry.py); a machine that
keeps failing and was not banned because of the limit is on probation.

Good machines get ranks first, those on probation stand by if there are enough others, those that are banned or
cordoned are a last resort: taken when the job could not start or go on without them (policy.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from holdfast.core.faults.fault_table import blame_of
from holdfast.core.faults.fault_types import Blame, Fault
from holdfast.core.health.findings import CheckProblem

DAY_S = 86_400.0
PROBATION_S = DAY_S
HALF_LIFE_S = 14 * DAY_S
BAN_SCORE = 2.5
LIFT_SCORE = 1.0
WEIGHTS = {"node-lost": 0.5, "link-down": 0.5, "hang": 0.1, "residual-processes": 0.5, "device-slow": 0.5}
"""Weights of faults that may have another cause: most hangs are scripts'. Other faults of nodes count 1, the rest 0."""
NO_HARDWARE = frozenset({"check-failed", "no-answer", "device-missing", "device-memory-taken", "disk-error"})
"""What a check may fail by on a machine that is well: a wrong flag, another's process, a full disk, no time."""
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


class Reputation(msgspec.Struct, frozen=True):
    """A machine's grade when it joined, and why."""

    grade: Grade = Grade.GOOD
    why: str = ""
    until: float | None = None
    """When a ban runs out, on the master's clock; None: it does not by itself."""


BY_JOB = "job "
"""The prefix of `CordonMark.by` if a job set the mark."""


class MachineEventKind(StrEnum):
    """What can happen to a machine."""

    FAULT = "fault"
    CLEARED = "cleared"
    """Its last fault of this kind in this job was not its own after all, or part of another."""
    RETURNED = "returned"
    """It joined a job after a fault."""
    CORDONED = "cordoned"
    UNCORDONED = "uncordoned"
    """A person uncordoned it, so it was repaired."""
    CHECK_PASSED = "check-passed"
    CHECK_FAILED = "check-failed"


class NodeEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a machine's history."""

    at: float
    kind: MachineEventKind
    fault: str = ""
    weight: float = 0.0
    job_id: str = ""
    why: str = ""


class CordonMark(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that no job may use."""

    machine: str
    at: float
    by: str
    why: str
    until: float | None = None
    """None: until a person uncordons it."""

    @property
    def is_of_job(self) -> bool:
        """Return whether a job set the mark, not a person."""
        return self.by.startswith(BY_JOB)


class MachineRecord(msgspec.Struct):
    """A machine's history, added up to some moment."""

    score: float = 0.0
    at: float = 0.0
    is_lemon: bool = False
    """Its score asks for a ban."""
    returned_at: float | None = None
    """Since it was last back from a fault; None: it never was, or is still to come back."""
    last: NodeEvent | None = None
    """Its last fault that is a reason for probation."""
    counted: NodeEvent | None = None
    """What last added to the score: a fault, or a check that failed."""
    failed_check: NodeEvent | None = None
    """Since one was passed; of several the one that counts most."""


def weight_of(fault: Fault) -> float:
    """Return how much a fault counts against the machine it happened on."""
    return WEIGHTS.get(fault.name, 1.0 if fault.blame is Blame.NODE else 0.0)


def check_weights(problems: Mapping[str, Iterable[CheckProblem]]) -> dict[str, float]:
    """Return how much a failed check counts against each machine. A fault that several machines share is not
    hardware."""
    faults = {machine: {one.fault for one in found if is_hardware(one)} for machine, found in problems.items()}
    seen = Counter(fault for those in faults.values() for fault in those)
    return {machine: float(any(seen[fault] == 1 for fault in those)) for machine, those in faults.items()}


def is_hardware(problem: CheckProblem) -> bool:
    """Return whether the problem means that the machine is broken: a wrong result, a counter, a device's own error."""
    return problem.fault not in NO_HARDWARE and blame_of(problem.fault) is Blame.NODE


def uncleared(history: Iterable[NodeEvent]) -> list[NodeEvent]:
    """Return the history without the faults that were cleared."""
    kept: list[NodeEvent] = []
    for event in history:
        if event.kind is not MachineEventKind.CLEARED:
            kept.append(event)
            continue
        same = (MachineEventKind.FAULT, event.fault, event.job_id)
        found = next((one for one in reversed(kept) if (one.kind, one.fault, one.job_id) == same), None)
        if found:
            kept.remove(found)
    return kept


def add_up(history: Iterable[NodeEvent], now: float) -> MachineRecord:
    """Return the summary of a history, which has the oldest event first."""
    record = MachineRecord()
    for event in uncleared(history):
        _decay(record, event.at)
        _add(record, event)
    _decay(record, now)
    return record


def _decay(record: MachineRecord, at: float) -> None:
    record.score *= 0.5 ** (max(at - record.at, 0.0) / HALF_LIFE_S)
    record.at = max(at, record.at)
    if record.score <= LIFT_SCORE:
        record.is_lemon = False


def _add(record: MachineRecord, event: NodeEvent) -> None:
    match event.kind:
        case MachineEventKind.FAULT:
            _count(record, event)
            if event.weight >= TELLING_WEIGHT:
                record.last, record.returned_at = event, None
        case MachineEventKind.RETURNED if record.last and record.returned_at is None:
            record.returned_at = event.at
        case MachineEventKind.UNCORDONED:
            record.score, record.is_lemon = min(record.score, LIFT_SCORE), False
            record.returned_at, record.last, record.failed_check = event.at, None, None
        case MachineEventKind.CHECK_PASSED:
            record.failed_check = None
        case MachineEventKind.CHECK_FAILED:
            _count(record, event)
            if record.failed_check is None or event.weight > record.failed_check.weight:
                record.failed_check = event
        case _:
            pass  # a cordon's mark says so, for as long as it is there


def _count(record: MachineRecord, event: NodeEvent) -> None:
    record.score += event.weight
    record.is_lemon |= record.score >= BAN_SCORE
    if event.weight > 0:
        record.counted = event


def judge(history: Iterable[NodeEvent], now: float, mark: CordonMark | None = None) -> Reputation:
    """Return a machine's current grade."""
    if mark and mark.until is None:
        return Reputation(Grade.CORDONED, f"cordoned {ago(now - mark.at)} by {mark.by}: {mark.why}")
    if mark and mark.until is not None and mark.until > now:
        return Reputation(
            Grade.BANNED, f"{mark.why}; since {span(now - mark.at)}, for another {span(mark.until - now)}", mark.until
        )
    record = add_up(history, now)
    if why := _doubt(record, now):
        return Reputation(Grade.PROBATION, why)
    return Reputation()


def _doubt(record: MachineRecord, now: float) -> str:
    """Return why a machine without a mark is on probation; empty if it is not."""
    if record.is_lemon and record.counted:
        return f"{_keeps_failing(record)} {ago(now - record.counted.at)}"
    if record.failed_check:
        return f"a check of it failed {ago(now - record.failed_check.at)}, and none was passed since"
    if record.returned_at is not None and now - record.returned_at < PROBATION_S:
        if record.last is None:
            return f"it was let back {ago(now - record.returned_at)}"
        last = f"{record.last.fault} {ago(now - record.last.at)}"
        return f"it is back from a fault since {span(now - record.returned_at)} only (the last one {last})"
    if record.last and now - record.last.at < PROBATION_S:
        return f"it failed {ago(now - record.last.at)}: {record.last.fault}"
    return ""


def _keeps_failing(record: MachineRecord) -> str:
    last = record.counted.fault if record.counted else ""
    return f"it keeps failing: a score of {record.score:.1f} faults, the last one {last}"


def ban(machine: str, history: Iterable[NodeEvent], now: float, by: str) -> CordonMark | None:
    """Return the mark that a machine with this history should have; None if there is no reason."""
    record = add_up(history, now)
    if not record.is_lemon:
        return None
    until = now + banned_for_s(record.score)
    return CordonMark(machine=machine, at=now, by=by, why=_keeps_failing(record), until=until)


def may_replace(there: CordonMark, mark: CordonMark) -> bool:
    """Return whether a job's mark may replace the existing one. A person's stays until a person removes it, and none is
    shortened."""
    return there.until is not None or (there.is_of_job and mark.until is None)


def banned_for_s(score: float) -> float:
    """Return how long a score takes to decay to where a ban is lifted."""
    return HALF_LIFE_S * math.log2(score / LIFT_SCORE) if score > LIFT_SCORE else 0.0


def judge_newcomer(history: Sequence[NodeEvent], now: float, mark: CordonMark | None = None) -> Reputation:
    """Return the grade with which a machine joins: after a fault it is back with that, however long the repair took."""
    back = [NodeEvent(at=now, kind=MachineEventKind.RETURNED)] if has_to_return(history) else []
    return judge([*history, *back], now, mark)


def has_to_return(history: Iterable[NodeEvent]) -> bool:
    """Return whether a join must be recorded: the machine is back from a fault."""
    record = add_up(history, 0.0)
    return record.last is not None and record.returned_at is None


def preference(reputation: Reputation) -> int:
    """Return a number that is smaller the sooner the machine gets ranks."""
    return ORDER.index(reputation.grade)


def ago(seconds: float) -> str:
    return f"{span(seconds)} ago"


def span(seconds: float) -> str:
    """Return the time in one unit, for a sentence."""
    for size, name in ((DAY_S, "d"), (3_600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {name}"
    return f"{max(seconds, 0.0):.0f} s"
