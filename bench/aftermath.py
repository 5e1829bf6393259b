"""What a fault did to a job, read from the workers' diaries.

A step counts as new when all ranks of its world finished it after the fault and none of them is the victim. One that
the survivors still finished with the victim's last contribution is not new: a line of its world is missing.

    goes on    the first new step, in a world of any size
    whole      the first new step in a world of the full size
    lost       steps that had been finished by some rank and were done again
    short      steps done by fewer ranks before the job was whole: their batches were smaller than asked for
    replaced   ranks of the last world whose process is not the one that had the rank before

A job that went on from its very beginning has not recovered, it has started over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from diary import Entry


class NewStep(NamedTuple):
    """All of a world have finished it; `at` is when the last of them did."""

    step: int
    world: int
    at: float
    pids: tuple[int, ...]


class Fault(NamedTuple):
    """The moment, the victim, and who had which rank then."""

    at: float
    victim: int
    pids: dict[int, int]


@dataclass(frozen=True)
class Aftermath:
    """Times are from the fault; None for what did not happen."""

    goes_on_s: float | None
    whole_s: float | None
    steps_lost: int | None
    short_steps: int
    replaced: int
    started_over: bool = False


def pids_by_rank(entries: Iterable[Entry], world: int) -> dict[int, int]:
    """The process that has each rank now."""
    last: dict[int, Entry] = {}
    for entry in entries:
        if entry.event == "step" and entry.world == world:
            last[entry.rank] = max(entry, last.get(entry.rank, entry), key=lambda one: one.at)
    return {rank: entry.pid for rank, entry in last.items()}


def steps_done(entries: Iterable[Entry], world: int) -> int:
    """By the rank that has done the fewest in a world of this size: some begin in a smaller one, and are joined."""
    done = dict.fromkeys(range(world), 0)
    for entry in entries:
        if entry.event == "step" and entry.world == world:
            done[entry.rank] += 1
    return min(done.values())


def new_steps(entries: Iterable[Entry], fault: Fault) -> list[NewStep]:
    """In the order in which they were finished."""
    ranks: dict[tuple[int, int], dict[int, Entry]] = {}
    for entry in sorted(entries, key=lambda one: one.at):
        if entry.event == "step" and entry.at > fault.at and entry.pid != fault.victim:
            ranks.setdefault((entry.step, entry.world), {})[entry.rank] = entry
    found = [
        NewStep(step, world, max(one.at for one in who.values()), tuple(who[rank].pid for rank in sorted(who)))
        for (step, world), who in ranks.items()
        if len(who) == world
    ]
    return sorted(found, key=lambda one: one.at)


def first(entries: Iterable[Entry], fault: Fault, world: int | None = None) -> NewStep | None:
    return next((one for one in new_steps(entries, fault) if world in (None, one.world)), None)


def aftermath(entries: list[Entry], fault: Fault) -> Aftermath:
    size = len(fault.pids)
    steps = new_steps(entries, fault)
    goes_on, whole = first(entries, fault), first(entries, fault, size)
    last = whole or goes_on
    return Aftermath(
        goes_on.at - fault.at if goes_on else None,
        whole.at - fault.at if whole else None,
        _lost(entries, fault, goes_on) if goes_on else None,
        sum(one.world < size and (whole is None or one.at < whole.at) for one in steps),
        sum(pid != fault.pids[rank] for rank, pid in enumerate(last.pids)) if last else 0,
        goes_on is not None and goes_on.step <= 1,
    )


def _lost(entries: list[Entry], fault: Fault, goes_on: NewStep) -> int:
    """Up to the highest step that any rank, the victim included, had finished before the job went on."""
    before = [e.step for e in entries if e.event == "step" and e.at < goes_on.at and e.step != goes_on.step]
    repeated = [e for e in entries if e.event == "step" and e.step == goes_on.step and e.at <= fault.at]
    highest = max([*before, *(e.step for e in repeated)], default=0)
    return max(0, highest - goes_on.step + 1)
