"""Which step the members of a new view go on with. A pure function of what each of them says, so that all agree.

Each rank says (`RankStatus`): whether it has the state, its next step, the highest step it knows to have been begun
(its
own, and its node's dead workers'), and whether it waits at the barrier before an update, or after a whole step.

1. Who has begun to apply step s has passed its barrier, so every rank had its full gradient then: s is committed.
   The next step is the one after the highest that was begun.
2. A rank that is one step behind waits at that very barrier: it rolls forward, by going on.
3. A rank that is in the middle of the next step repeats it.
4. A rank without the state is a newcomer: it is given the state of the settled step before that step begins.
5. If no rank has a state the run begins: from scratch, or from the same checkpoint everywhere. If some of them came as
   newcomers, those who had the state died before they could hand it on: all look for it together (engine.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast.errors import ScriptError, StateConflictError, StateLostError


class RankStatus(NamedTuple):
    """What one rank says. Numbers only: they travel in one small collective."""

    has_state: int
    next_step: int
    applied_step: int
    at_barrier: int
    seed: int
    first_step: int
    keeps_copy: int
    """Whether a copy of the state is kept to roll an update back; see transaction.py."""
    shards: int = 1
    """Into how many the state is cut that its objects hold; 0: they are new, the state lies in copies beside them."""
    shard: int = 0
    """Which of them it is."""
    owner_rank: int = -1
    """The rank whose own state its objects hold (state/per_rank_state.py); -1: there is none."""
    owner_world: int = 0
    """The size of the world in which it had that rank."""
    local_since: int = -1
    """The first step that begins with gradients which differ between ranks; see local_state.py."""
    has_device_groups: int = 0
    """Whether groups were connected on a device in the view before."""
    holdings: int = 0
    """What its objects hold of the models (parallel/holdings.py)."""
    total: int = 0
    """How many steps its script makes, from the start of the run."""
    accumulates: int = 0
    """Whether there were steps without an update."""


class ResumePoint(NamedTuple):
    """What all ranks conclude."""

    next_step: int
    newcomers: tuple[int, ...]
    holders: tuple[int, ...]
    seed: int
    first_step: int
    keeps_copy: bool
    is_start: bool
    """Whether this is the beginning of the run, with no rank's state to take over."""
    held: tuple[tuple[int, int], ...] = ()
    """Of each holder: how many shards there are of what its objects hold, and which it is; see `RankStatus`."""
    local_since: int = -1
    """As in `RankStatus`, of a committed step."""
    has_device_groups: bool = False
    """Whether any rank has; then all connect them before they go on."""
    holdings: tuple[int, ...] = ()
    """By rank, as in `RankStatus`."""
    accumulates: bool = False
    """Whether there were steps without an update."""


def find_resume_point(statuses: Sequence[RankStatus]) -> ResumePoint:
    """Return where all ranks go on. Raises StateConflictError where they contradict one another."""
    _check_totals(statuses)
    holders = [rank for rank, status in enumerate(statuses) if status.has_state]
    if not holders:
        return _start(statuses)
    next_step = max(
        max(status.applied_step for status in statuses) + 1, max(statuses[rank].next_step for rank in holders)
    )
    for rank in holders:
        behind = next_step - statuses[rank].next_step
        if behind > 1 or (behind == 1 and not statuses[rank].at_barrier):
            raise StateConflictError(
                f"rank {rank} is at step {statuses[rank].next_step} while step {next_step - 1} is committed: its"
                " state cannot be used"
            )
    _check_owners(statuses, holders)
    found = [statuses[rank].local_since for rank in holders if 0 <= statuses[rank].local_since <= next_step]
    first = statuses[holders[0]]
    return ResumePoint(
        next_step=next_step,
        newcomers=tuple(rank for rank, status in enumerate(statuses) if not status.has_state),
        holders=tuple(holders),
        seed=first.seed,
        first_step=first.first_step,
        keeps_copy=any(statuses[rank].keeps_copy for rank in holders),
        is_start=False,
        held=tuple((statuses[rank].shards, statuses[rank].shard) for rank in holders),
        local_since=min(found, default=-1),
        has_device_groups=any(status.has_device_groups for status in statuses),
        holdings=tuple(status.holdings for status in statuses),
        accumulates=any(status.accumulates for status in statuses),
    )


def _check_totals(statuses: Sequence[RankStatus]) -> None:
    """Raise ScriptError for ranks that would leave the loop after different steps."""
    for rank, status in enumerate(statuses):
        if status.total != statuses[0].total:
            raise ScriptError(
                f"the script makes {statuses[0].total} steps on rank 0 and {status.total} on rank {rank}: give"
                " job.steps and job.epochs the number from the start of the run, the same on every rank. Holdfast goes"
                " on at the right step by itself: do not subtract the steps in a checkpoint of the script's own, which"
                " a replacement would load too"
            )


def _check_owners(statuses: Sequence[RankStatus], holders: Sequence[int]) -> None:
    """Raise StateLostError for a rank that would go on with what another one had for itself."""
    for rank in holders:
        owner = (statuses[rank].owner_rank, statuses[rank].owner_world)
        if owner[0] >= 0 and owner != (rank, len(statuses)):
            raise StateLostError(
                f"rank {rank} of {len(statuses)} has what rank {owner[0]} of {owner[1]} had for itself: another number"
                " of ranks cannot go on with it"
            )


def _start(statuses: Sequence[RankStatus]) -> ResumePoint:
    steps = {status.next_step for status in statuses}
    if len(steps) > 1:
        found = ", ".join(f"rank {rank}: {status.next_step}" for rank, status in enumerate(statuses))
        raise StateConflictError(
            f"the ranks start from different steps ({found}): give all nodes the same --checkpoint-dir, on storage they"
            " share"
        )
    return ResumePoint(
        next_step=statuses[0].next_step,
        newcomers=(),
        holders=tuple(range(len(statuses))),
        seed=statuses[0].seed,
        first_step=statuses[0].next_step,
        keeps_copy=True,
        is_start=True,
        local_since=max(status.local_since for status in statuses),
        has_device_groups=any(status.has_device_groups for status in statuses),
        holdings=tuple(status.holdings for status in statuses),
        accumulates=any(status.accumulates for status in statuses),
    )
