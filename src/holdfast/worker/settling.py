"""Which step the members of a new view go on with. A pure function of what each of them says, so that all agree.

Each rank says (`Standing`): whether it has the state, its next step, the highest step it knows to have been begun (its
own, and its node's dead workers'), and whether it waits at the barrier before an update, or after a whole step.

1. Who has begun to apply step s has passed its barrier, so every rank had its full gradient then: s is committed.
   The next step is the one after the highest that was begun.
2. A rank that is one step behind waits at that very barrier: it rolls forward, by going on.
3. A rank that is in the middle of the next step repeats it.
4. A rank without the state is a newcomer: it is given the state of the settled step before that step begins.
5. If nobody has a state the run begins: from scratch, or from the same checkpoint everywhere. If some of them came as
   newcomers, those who had the state died before they could hand it on: all look for it together (engine.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast.errors import SettleError


class Standing(NamedTuple):
    """What one rank says. Numbers only: they travel in one small collective."""

    has_state: int
    next_step: int
    begun: int
    at_barrier: int
    seed: int
    first_step: int
    keeps_copy: int
    """Whether a copy of the state is kept to roll an update back; see transaction.py."""
    shards: int = 1
    """Into how many the state is cut that its objects hold; 0: they are new, the state lies in copies beside them."""
    shard: int = 0
    """Which of them it is."""


class Settlement(NamedTuple):
    """What all ranks conclude."""

    next_step: int
    newcomers: tuple[int, ...]
    holders: tuple[int, ...]
    seed: int
    first_step: int
    keeps_copy: bool
    is_start: bool
    """Whether this is the beginning of the run, with nobody's state to take over."""
    held: tuple[tuple[int, int], ...] = ()
    """Of each holder: how many shards there are of what its objects hold, and which it is; see `Standing`."""


def settle(standings: Sequence[Standing]) -> Settlement:
    """Raises SettleError where the ranks contradict one another."""
    holders = [rank for rank, standing in enumerate(standings) if standing.has_state]
    if not holders:
        return _start(standings)
    next_step = max(
        max(standing.begun for standing in standings) + 1, max(standings[rank].next_step for rank in holders)
    )
    for rank in holders:
        behind = next_step - standings[rank].next_step
        if behind > 1 or (behind == 1 and not standings[rank].at_barrier):
            raise SettleError(
                f"rank {rank} is at step {standings[rank].next_step} while step {next_step - 1} is committed: its"
                " state cannot be used"
            )
    first = standings[holders[0]]
    return Settlement(
        next_step=next_step,
        newcomers=tuple(rank for rank, standing in enumerate(standings) if not standing.has_state),
        holders=tuple(holders),
        seed=first.seed,
        first_step=first.first_step,
        keeps_copy=any(standings[rank].keeps_copy for rank in holders),
        is_start=False,
        held=tuple((standings[rank].shards, standings[rank].shard) for rank in holders),
    )


def _start(standings: Sequence[Standing]) -> Settlement:
    steps = {standing.next_step for standing in standings}
    if len(steps) > 1:
        found = ", ".join(f"rank {rank}: {standing.next_step}" for rank, standing in enumerate(standings))
        raise SettleError(
            f"the ranks start from different steps ({found}): give all nodes the same --checkpoint-dir, on storage they"
            " share"
        )
    return Settlement(
        next_step=standings[0].next_step,
        newcomers=(),
        holders=tuple(range(len(standings))),
        seed=standings[0].seed,
        first_step=standings[0].next_step,
        keeps_copy=True,
        is_start=True,
    )
