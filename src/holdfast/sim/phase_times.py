"""How long each phase takes: stated, or learned from a job's journal.

Learned phases are the durations of that job's receipts (`IncidentClosed`), one of which is drawn at random for each
simulated recovery. How long the core itself waits (a broken connection, the settling time) is not among them: in a
simulation it waits by itself.

    phase       from                                       to
    detect      a worker fails                             the master knows
    recover     the new view                               its first step; workers are kept, spares fill in
    fork        the new view                               its first step; new processes run the script from its top
    planned     the new view, of a planned change          its first step
    restart     the new view, in which all start again     its first step
    park        a node joins                               its workers are parked, ready for ranks
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from statistics import median

import msgspec

from holdfast.core import records as r
from holdfast.core.strategies import Strategy

SAMPLES_MAX = 10_000
"""Receipts that are kept of one phase."""

Samples = tuple[float, ...]


class PhaseTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Durations in seconds; of several, one is drawn each time."""

    detect: Samples = (0.1,)
    recover: Samples = (6.0,)
    fork: Samples = (30.0,)
    planned: Samples = (3.0,)
    restart: Samples = (600.0,)
    park: Samples = (120.0,)
    step: Samples = (10.0,)
    """A training step: a fault costs half of one on the average."""
    dump: Samples = (30.0,)
    """Writing the last state before the job ends."""
    checkpoint_stall: Samples = (0.5,)
    """How long a checkpoint keeps the training waiting."""
    relapse: Samples = (600.0,)
    """A broken machine that is kept in the job fails again after so long, on the average. Two never do at the same
    moment: the policy would take that for something other than the machines."""
    rejoin: Samples = (60.0,)
    """A machine that was sent away, and is well, comes back after so long."""


ASSUMED = PhaseTimes()


class LearnedTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What a journal says."""

    times: PhaseTimes
    found: dict[str, int]
    """By phase: how many durations there were. Phases that are missing keep their assumed duration."""
    checkpoint_every_s: float = 0.0
    """0: the job published fewer than two checkpoints."""


def learn(records: Iterable[r.Record], assumed: PhaseTimes = ASSUMED) -> LearnedTimes:
    """Return the durations in a job's records."""
    found: dict[str, list[float]] = {}
    published: list[float] = []
    for record in records:
        match record:
            case r.IncidentClosed():
                _learn_incident(record, found)
            case r.DurabilityChanged(snapshot_stats=stats) if stats.step_s > 0.0:
                found.setdefault("step", []).append(stats.step_s)
                found.setdefault("checkpoint_stall", []).append(stats.stall_s)
            case r.CheckpointPublishedRecord(at=at):
                published.append(at)
            case _:
                pass
    kept = {phase: tuple(durations[-SAMPLES_MAX:]) for phase, durations in found.items()}
    gaps = [after - before for before, after in pairwise(published)]
    return LearnedTimes(
        times=msgspec.structs.replace(assumed, **kept),
        found={phase: len(durations) for phase, durations in kept.items()},
        checkpoint_every_s=median(gaps) if gaps else 0.0,
    )


def _learn_incident(closed: r.IncidentClosed, found: dict[str, list[float]]) -> None:
    if closed.rebuilt_at <= 0.0:
        return  # it passed without a new view
    found.setdefault(_phase(closed), []).append(max(closed.at - closed.rebuilt_at, 0.0))
    if closed.kind == "worker":
        found.setdefault("detect", []).append(max(closed.detected_at - closed.happened_at, 0.0))


def _phase(closed: r.IncidentClosed) -> str:
    if closed.strategy is Strategy.RESTART:
        return "restart"
    if closed.kind == "planned":
        return "planned"
    return "fork" if closed.strategy is Strategy.RECOVER_IN_PLACE else "recover"
