"""Parsers of what `holdfast sim` is told. Each error is a sentence that says what to write instead."""

from __future__ import annotations

import math
import re

from holdfast.errors import UsageError
from holdfast.sim.fault_models import KINDS
from holdfast.sim.outages import DAY_S, OutageKind

_UNITS_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3_600.0, "d": DAY_S, "w": 7 * DAY_S}
_LENGTH = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(s|m|min|h|d|w)?")
_RATE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(?:/(\d{1,9}))?/(day|hour)")
LENGTH_S_MAX = 1e9
RATE_MAX = 1_000.0
"""Faults of a machine a day."""


def length_of_time(flag: str, text: str, *, may_be_zero: bool = False) -> float:
    """Parse a duration: 90, 90s, 18m, 20h, 2d."""
    found = _LENGTH.fullmatch(text.strip())
    seconds = float(found[1]) * _UNITS_S[found[2] or "s"] if found else -1.0
    if not 0.0 <= seconds <= LENGTH_S_MAX or (seconds == 0.0 and not may_be_zero):
        raise UsageError(f"{flag} {text}: give a time with its unit, as in 90s, 18m, 20h or 2d")
    return seconds


def fault_rate(flag: str, text: str, nodes: int) -> float:
    """Parse a rate as faults of one machine a day: 4/1000/day is of a thousand machines, 80/day of all."""
    found = _RATE.fullmatch(text.strip())
    of = int(found[2] or nodes) if found else 0
    if not found or of < 1 or float(found[1]) == 0.0:
        raise UsageError(
            f"{flag} {text}: write 4/1000/day for 4 faults of 1,000 machines a day, or 80/day for all of them"
        )
    rate = float(found[1]) / of * (24.0 if found[3] == "hour" else 1.0)
    if rate > RATE_MAX:
        raise UsageError(f"{flag} {text}: a machine would fail {rate:.0f} times a day, {RATE_MAX:.0f} are the most")
    return rate


def repair_times(flag: str, text: str) -> tuple[float, float]:
    """Parse median:mean of repairs, or one time for all."""
    median, _, mean = text.partition(":")
    median_s = length_of_time(flag, median, may_be_zero=True)
    mean_s = length_of_time(flag, mean) if mean else median_s
    if mean_s < median_s or (mean and median_s == 0.0):
        raise UsageError(
            f"{flag} {text}: write MEDIAN:MEAN, the mean not below the median, or one time for all repairs"
        )
    return median_s, mean_s


def share(flag: str, number: float, *, may_be_one: bool = False) -> float:
    """Check a share of something."""
    if not (0.0 <= number < 1.0 or (may_be_one and number == 1.0)):
        raise UsageError(f"{flag} {number:g}: give a share from 0 to 1, as in 0.27")
    return number


def lemons(flag: str, text: str) -> tuple[float, float]:
    """Parse the share of the machines that fail often, and the share of the faults that they have."""
    machines, _, faults = text.partition(":")
    try:
        found = share(flag, float(machines)), share(flag, float(faults))
    except ValueError:
        raise UsageError(f"{flag} {text}: write MACHINES:FAULTS, as in 0.05:0.245") from None
    if not (found[0] and found[1]):
        raise UsageError(f"{flag} {text}: write MACHINES:FAULTS, both above 0, as in 0.05:0.245")
    return found


def fault_kinds(flag: str, text: str) -> dict[OutageKind, float]:
    """Parse how often each kind of fault comes: dies=2,device=1, or one kind alone."""
    if not text:
        return dict(KINDS)
    found: dict[OutageKind, float] = {}
    for part in text.split(","):
        name, _, weight = part.strip().partition("=")
        try:
            found[OutageKind(name)] = float(weight or 1.0)
        except ValueError:
            names = ", ".join(kind.value for kind in OutageKind)
            raise UsageError(f"{flag} {text}: write kinds with weights, dies=2,device=1; there are {names}") from None
    if not all(0.0 <= weight < math.inf for weight in found.values()) or not any(found.values()):
        raise UsageError(f"{flag} {text}: weights are numbers from 0 on, and one is above 0")
    return found
