"""The numbers behind core/health/reputation.py, from a trace of faults.

    python bench/reputation.py --trace infinitehbd_fault_trace.json [--nodes 400]

The trace is a JSON list of events in days: {"node_id", "event_time", "event_type": "fault_start" | "fault_end"}, as
published with InfiniteHBD (StepFun, Apache-2.0). It is not part of this project.

Printed: how much more often a machine fails after a repair, how unevenly faults are spread, and what the policy itself,
the functions that masters call, makes of it: which faults probation and bans would have kept out of jobs, and at what
cost in machines' time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

from holdfast.core.health.reputation import DAY_S, Grade, MachineEventKind, NodeEvent, ban, judge

BINS_DAYS = ((0, 1), (1, 2), (2, 7), (7, 14), (14, 30), (30, 1_000))

Outage = tuple[float, float]
"""From fault to repair, in days."""


def read(path: Path) -> dict[str, list[Outage]]:
    """By machine: the times in which at least one fault was open. At equal times starts come first: a fault that ends
    as it starts would else stay open to the end of the trace."""
    events = sorted(json.loads(path.read_text()), key=lambda e: (e["event_time"], e["event_type"] == "fault_end"))
    last = events[-1]["event_time"]
    begun: dict[str, list[float]] = {}
    found: dict[str, list[Outage]] = {}
    for event in events:
        node, at = event["node_id"], event["event_time"]
        if event["event_type"] == "fault_start":
            begun.setdefault(node, []).append(at)
        elif len(open_ones := begun.get(node, [])) > 1:
            open_ones.pop()
        elif open_ones:
            found.setdefault(node, []).append((open_ones.pop(), at))
    for node, left in begun.items():
        if left:
            found.setdefault(node, []).append((left[0], last))
    return found


def hazards(outages: dict[str, list[Outage]], nodes: int, days: float) -> list[tuple[str, float, float, float]]:
    """By time since a repair: share of the faults, share of the machines' time, times the usual rate."""
    faults = sum(map(len, outages.values()))
    up_days = nodes * days - sum(end - begin for one in outages.values() for begin, end in one)
    rows = []
    for low, high in BINS_DAYS:
        gaps = [(b[0] - a[1], True) for one in outages.values() for a, b in pairwise(one)]
        gaps += [(days - one[-1][1], False) for one in outages.values()]
        exposed = sum(max(min(gap, high) - low, 0.0) for gap, _ in gaps)
        count = sum(is_fault and low <= gap < high for gap, is_fault in gaps)
        rows.append((f"{low} to {high} d", count / faults, exposed / up_days, (count / exposed) / (faults / up_days)))
    return rows


def replay(outages: dict[str, list[Outage]], days: float) -> tuple[Counter[Grade], dict[Grade, float], set[str]]:
    """What each machine was graded when its faults came, the days spent under each grade, and who was ever banned.
    A fault of a banned machine does not happen in a job, so it is not noted."""
    at_fault: Counter[Grade] = Counter()
    time_days = dict.fromkeys(Grade, 0.0)
    banned: set[str] = set()
    for node, one in outages.items():
        history: list[NodeEvent] = []
        for (begin, end), following in zip(one, [*(b for b, _ in one[1:]), days], strict=True):
            grade = _grade(history, begin)
            at_fault[grade] += 1
            if grade is not Grade.BANNED:
                history.append(NodeEvent(at=begin * DAY_S, kind=MachineEventKind.FAULT, fault="fault", weight=1.0))
                history.append(NodeEvent(at=end * DAY_S, kind=MachineEventKind.RETURNED))
            for hour in range(int(max(following - end, 0.0) * 24)):
                now = _grade(history, end + hour / 24)
                time_days[now] += 1 / 24
                if now is Grade.BANNED:
                    banned.add(node)
    return at_fault, time_days, banned


def _grade(history: list[NodeEvent], day: float) -> Grade:
    """With a ban where there is reason for one: no limit."""
    return judge(history, day * DAY_S, ban("", history, day * DAY_S, "")).grade


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--nodes", type=int, default=400, help="machines in the cluster, also those without a fault")
    options = parser.parse_args()
    outages = read(options.trace)
    days = max(end for one in outages.values() for _, end in one)
    faults = sum(map(len, outages.values()))
    print(f"{faults} outages of {len(outages)} of {options.nodes} machines in {days:.0f} days:")
    print(f"  {1000 * faults / (options.nodes * days):.2f} a day of 1,000 machines")
    down_days = sum(end - begin for one in outages.values() for begin, end in one)
    print(f"  {down_days:.0f} machine-days down, {down_days / (options.nodes * days):.1%} of the time")
    worst = sorted(map(len, outages.values()), reverse=True)[: options.nodes // 20]
    print(f"  the worst 5 % of the machines have {sum(worst) / faults:.1%} of them")
    print("\nsince its last repair   share of the faults   of the machines' time   times the usual rate")
    for name, share, time_share, times in hazards(outages, options.nodes, days):
        print(f"  {name:<20}  {share:>17.1%}  {time_share:>20.2%}  {times:>20.1f}")
    at_fault, time_days, banned = replay(outages, days)
    print("\nby this policy         faults   share    days of machines   share")
    for grade in (Grade.PROBATION, Grade.BANNED):
        spent, share = time_days[grade], f"{at_fault[grade] / faults:.1%}"
        time_share = f"{spent / (options.nodes * days):.2%}"
        print(f"  {grade.value:<18}  {at_fault[grade]:>7}  {share:>6}  {spent:>18.0f}  {time_share:>6}")
    print(f"  banned at some time: {len(banned)} machines, {len(banned) / options.nodes:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
