"""What watches over the numbers of a run, as the script asked for: `job.watch(...)`. Where the engine meets them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, get_args

import torch
import torch.distributed as dist

from holdfast.core.oddities import DEVIATIONS
from holdfast.errors import UsageError
from holdfast.state.tracked import Tracked
from holdfast.wire.session import Numbers
from holdfast.worker.collectives import groups
from holdfast.worker.consistency import Consistency
from holdfast.worker.numerics import Numerics, Policy

if TYPE_CHECKING:
    from holdfast.worker.engine import Engine


class Guards:
    """Those of one worker; none unless the script asks for them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numerics: Numerics | None = None
        self._consistency: Consistency | None = None

    def watch(self, tracked: Tracked, numbers: Policy | None, deviations: float, checksum_every: int) -> None:
        """See Job.watch."""
        if numbers is not None and numbers not in get_args(Policy):
            raise UsageError(f"numbers is {numbers!r}; it can be {', '.join(get_args(Policy))}")
        if not isinstance(deviations, int | float) or not 0 < deviations < float("inf"):
            raise UsageError(f"deviations is {deviations!r}: give a number above 0, as in {DEVIATIONS}")
        if not isinstance(checksum_every, int) or checksum_every < 0:
            raise UsageError(f"checksum_every is {checksum_every!r}: give a number of steps, or 0 for never")
        self._numerics = Numerics(tracked, numbers, self._tell, deviations) if numbers else None
        self._consistency = None
        if checksum_every:
            self._consistency = Consistency(lambda: parameters(tracked), checksum_every, self._engine.distrust)

    def see_loss(self, loss: torch.Tensor) -> None:
        if self._numerics is not None:
            self._numerics.see_loss(loss)

    def look(self) -> None:
        """Right before an update."""
        if self._numerics is not None:
            self._numerics.look()

    def begin(self) -> None:
        """A step begins."""
        if self._numerics is not None:
            self._numerics.begin()

    def before_commit(self, shards: int) -> None:
        """At the barrier, on all ranks."""
        step = self._engine.next_step
        if self._consistency is not None:
            self._consistency.before_commit(step, dist.get_rank(), shards, groups.gather)
        if self._numerics is not None:
            self._numerics.before_commit(step, dist.get_rank(), self._engine.transaction, groups.agree)

    def _tell(self, step: int, what: str, outcome: str) -> None:
        self._engine.tell(Numbers(step=step, what=what, outcome=outcome))


def parameters(tracked: Tracked) -> Iterator[torch.Tensor]:
    """In an order that all ranks share."""
    for module in tracked.modules().values():
        yield from module.parameters()


__all__ = ["DEVIATIONS", "Guards", "Policy"]
