"""Who sits where in a view that keeps its workers, and what each of them is told. Pure.

The rule of seats (local ranks), when the living of one view go into the next; the master counts on it (core/copies.py):

1. If this node has as many seats as before, or more, each keeps its own: the dead one's seat is the one that is filled.
2. If it has fewer, the living close up in order: 0, 2, 3 become 0, 1, 2. If there are too many even so, those that have
   never been in a view go first, then the highest.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.ladder import Strategy
from holdfast.core.orders import Serve
from holdfast.wire.session import Place


def reseat(living: Mapping[int, bool], seats_before: int, seats: int) -> dict[int, int]:
    """From old seats to new ones, by the rule. `living` says of each whether it has been in a view; who is not in the
    answer has to go."""
    if seats >= seats_before:
        return {seat: seat for seat in living}
    staying = sorted(living, key=lambda seat: (not living[seat], seat))[:seats]
    return {seat: index for index, seat in enumerate(sorted(staying))}


def place_in(order: Serve, local_rank: int, *, newcomer: bool, begun: int, whole: int, checkpoint_dir: str) -> Place:
    """What the worker of a seat is told."""
    return Place(
        view=order.view,
        rank=order.first_rank + local_rank,
        world_size=order.world_size,
        local_rank=local_rank,
        local_world_size=order.workers,
        group_rank=order.group_rank,
        group_world_size=order.group_world_size,
        store_host=order.store_host,
        store_port=order.store_port,
        first_ranks=order.first_ranks,
        strategy=order.strategy.value if order.strategy else "",
        planned=order.planned,
        newcomer=newcomer,
        begun=begun,
        whole=whole if order.kept else -1,
        dump=checkpoint_dir if order.strategy is Strategy.DUMP else "",
        weights=order.weights,
        run=order.run,
        faults_per_node_day=order.faults_per_node_day,
    )
