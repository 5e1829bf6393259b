"""Numbers that should not be committed: a loss or a gradient that is not finite, or far from all before.

Right before the commit all ranks agree on whether any of them has seen one. The first time the step is undone and
repeated by all ranks: it draws the same samples and the same random numbers, so what comes back is the script's or the
data's, and what does not was the hardware's. The second time the policy decides:

    skip     the batch is passed over: the step is committed without its update, on all ranks
    stop     the rank that saw it, one of those whose own loss was odd if there are any, fails; the others can write a
             checkpoint of the last committed step
    go-on    the step is committed as it is

All of it is journaled. Gradients are not looked at where a GradScaler is tracked, which expects them to overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal, get_args

import torch

from holdfast.core.anomalies import DEVIATIONS, AnomalyHistory
from holdfast.core.shard_map import ShardMap
from holdfast.errors import NumericError, RepeatStep, UsageError
from holdfast.state.dtensors import local_of
from holdfast.state.tracked import Tracked
from holdfast.torch_compat import norms_of
from holdfast.wire.worker_messages import NumbersReportedMessage
from holdfast.worker.param_checksums import ParamChecksums
from holdfast.worker.transaction import StepTransaction

Policy = Literal["skip", "stop", "go-on"]
Agree = Callable[[tuple[int, int]], list[int]]
"""The maximum of each over all ranks."""
RANKS_MAX = 1 << 32
Tell = Callable[[int, str, str], None]
"""Step, what was seen, what became of it."""


class NumericWatch:
    """The guard of one worker. `measure` before the update, `before_commit` at the barrier."""

    def __init__(self, tracked: Tracked, policy: Policy, tell: Tell, deviations: float = DEVIATIONS) -> None:
        self._tracked, self._policy, self._tell = tracked, policy, tell
        self._losses: list[torch.Tensor] = []
        self._histories = {
            "the loss": AnomalyHistory(is_norm=False, deviations=deviations),
            "the gradient's norm": AnomalyHistory(is_norm=True, deviations=deviations),
        }
        self._norm: float | None = None
        self._repeated = -1
        """The step that was repeated last."""
        self._saw = False
        """Whether it was for our numbers."""
        self._waiting: tuple[int, dict[str, float]] = (-1, {})
        """Of the last step that was let pass: its numbers count once a later one comes."""

    def record_loss(self, loss: torch.Tensor) -> None:
        """Record a part of the step's loss."""
        self._losses.append(loss.detach())

    @property
    def losses(self) -> list[torch.Tensor]:
        """The losses of the step, as far as it has come."""
        return list(self._losses)

    @losses.setter
    def losses(self, losses: list[torch.Tensor]) -> None:
        self._losses = list(losses)

    def measure(self) -> None:
        """Compute the norm right before the update, while the gradients are there."""
        gradients = [] if self._has_scaler() else list(self._gradients())
        if gradients:
            self._norm = float(torch.linalg.vector_norm(torch.stack(norms_of(gradients))))

    def begin(self) -> None:
        """Begin a step, perhaps again."""
        self._losses, self._norm = [], None

    def before_commit(self, step: int, rank: int, transaction: StepTransaction, agree: Agree) -> None:
        """Return if the step may be committed; raise RepeatStep or NumericError if not."""
        numbers = self._numbers()
        if step > self._waiting[0]:
            for name, value in self._waiting[1].items():
                self._histories[name].add(value)
        odd = {name: text for name, value in numbers.items() if (text := self._histories[name].judge(value))}
        what = "; ".join(f"{name} {text}" for name, text in odd.items())
        self._waiting = (step, {} if what else numbers)
        own = _guilt("the loss" in odd, rank) if odd else 0
        # A rank that came in between the two attempts does not know that this is the second.
        worst, is_again = agree((own, int(self._repeated == step)))
        if worst and not is_again:
            self._repeated, self._saw = step, bool(what)
            if what:
                self._tell(step, what, "repeated")
            raise RepeatStep
        if worst:
            self._follow_policy(step, what, own == worst, transaction)
        elif is_again and self._saw:
            self._tell(step, "", "passed")

    def _follow_policy(self, step: int, what: str, is_worst: bool, transaction: StepTransaction) -> None:
        outcome = {"skip": "skipped", "stop": "stopped", "go-on": "kept"}[self._policy]
        if is_worst:
            self._tell(step, what, outcome)
        if self._policy == "skip":
            transaction.drop_update()
        elif self._policy == "stop" and is_worst:
            raise NumericError(f"in step {step} {what}, also when the step was repeated")

    def _numbers(self) -> dict[str, float]:
        found = {}
        if self._losses:
            found["the loss"] = float(torch.stack([loss.float().mean() for loss in self._losses]).mean())
        if self._norm is not None:
            found["the gradient's norm"] = self._norm
        return found

    def _gradients(self) -> Iterator[torch.Tensor]:
        for optimizer in self._tracked.optimizers().values():
            for group in optimizer.param_groups:
                yield from (_dense(local_of(p.grad)) for p in group["params"] if p.grad is not None)

    def _has_scaler(self) -> bool:
        return any(isinstance(thing, torch.amp.GradScaler) for thing in self._tracked.others().values())


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return all of a gradient that is not zero: a sparse one, as of an embedding, has no norms of its own."""
    if gradient.layout is torch.strided:
        return gradient
    return (gradient.coalesce() if gradient.is_sparse else gradient).values()


def _guilt(is_own: bool, rank: int) -> int:
    """Return a number that is the larger, the more the numbers are this rank's own: reduced gradients are those of all
    ranks."""
    return (1 + is_own) * RANKS_MAX - rank


if TYPE_CHECKING:
    from holdfast.worker.engine import Engine


class NumericGuards:
    """Those of one worker; none unless the script asks for them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numerics: NumericWatch | None = None
        self._consistency: ParamChecksums | None = None

    def watch(self, tracked: Tracked, numbers: Policy | None, deviations: float, checksum_every: int) -> None:
        """Start to watch as the script asked; see Job.watch."""
        if numbers is not None and numbers not in get_args(Policy):
            raise UsageError(f"numbers is {numbers!r}; it can be {', '.join(get_args(Policy))}")
        if not isinstance(deviations, int | float) or not 0 < deviations < float("inf"):
            raise UsageError(f"deviations is {deviations!r}: give a number above 0, as in {DEVIATIONS}")
        if not isinstance(checksum_every, int) or checksum_every < 0:
            raise UsageError(f"checksum_every is {checksum_every!r}: give a number of steps, or 0 for never")
        self._numerics = NumericWatch(tracked, numbers, self._tell, deviations) if numbers else None
        self._consistency = None
        if checksum_every:
            self._consistency = ParamChecksums(
                lambda: parameters(tracked), checksum_every, self._engine.distrust_snapshots
            )

    def record_loss(self, loss: torch.Tensor) -> None:
        if self._numerics is not None:
            self._numerics.record_loss(loss)

    def losses(self) -> list[torch.Tensor]:
        """Return the losses of the step under way, if they are watched."""
        return self._numerics.losses if self._numerics is not None else []

    def put_back(self, losses: list[torch.Tensor]) -> None:
        """Make the losses of the step what they were."""
        if self._numerics is not None:
            self._numerics.losses = losses

    def measure(self) -> None:
        """Compute what is watched, right before an update."""
        if self._numerics is not None:
            self._numerics.measure()

    def begin(self) -> None:
        """Begin a step."""
        if self._numerics is not None:
            self._numerics.begin()

    def before_commit(self, shard_map: ShardMap) -> None:
        """Compare and judge the numbers of a step, at the barrier, on all ranks."""
        step = self._engine.next_step
        if self._consistency is not None:
            self._consistency.before_commit(
                step, self._engine.collectives.rank(), shard_map, self._engine.collectives.gather
            )
        if self._numerics is not None:
            self._numerics.before_commit(
                step, self._engine.collectives.rank(), self._engine.transaction, self._engine.collectives.agree
            )

    def _tell(self, step: int, what: str, outcome: str) -> None:
        self._engine.tell(NumbersReportedMessage(step=step, what=what, outcome=outcome))


def parameters(tracked: Tracked) -> Iterator[torch.Tensor]:
    """Yield the parameters in an order that all ranks share."""
    local = tracked.local_names()
    for module in (one for name, one in tracked.modules().items() if name not in local):
        yield from module.parameters()
