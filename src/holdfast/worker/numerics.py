"""Numbers that should not be committed: a loss or a gradient that is not finite, or far from all before.

Right before the commit all ranks agree on whether anybody has seen one. The first time the step is undone and repeated
by everybody: it draws the same samples and the same random numbers, so what comes back is the script's or the data's,
and what does not was the hardware's. The second time the policy decides:

    skip     the batch is passed over: the step is committed without its update, on all ranks
    stop     the rank that saw it, one of those whose own loss was odd if there are any, fails; the others can write a
             checkpoint of the last committed step
    go-on    the step is committed as it is

All of it is journaled. Gradients are not looked at where a GradScaler is tracked, which expects them to overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch

from holdfast.core.oddities import DEVIATIONS, History
from holdfast.errors import NumericError
from holdfast.state.sharded import local_of
from holdfast.state.tracked import Tracked
from holdfast.worker.transaction import RepeatStep, Transaction

Policy = Literal["skip", "stop", "go-on"]
Agree = Callable[[tuple[int, int]], list[int]]
"""The maximum of each over all ranks."""
RANKS_MAX = 1 << 32
Tell = Callable[[int, str, str], None]
"""Step, what was seen, what became of it."""


class Numerics:
    """The guard of one worker. `look` before the update, `before_commit` at the barrier."""

    def __init__(self, tracked: Tracked, policy: Policy, tell: Tell, deviations: float = DEVIATIONS) -> None:
        self._tracked, self._policy, self._tell = tracked, policy, tell
        self._losses: list[torch.Tensor] = []
        self._histories = {
            "the loss": History(is_norm=False, deviations=deviations),
            "the gradient's norm": History(is_norm=True, deviations=deviations),
        }
        self._norm: float | None = None
        self._repeated = -1
        """The step that was repeated last."""
        self._saw = False
        """Whether it was for our numbers."""
        self._waiting: tuple[int, dict[str, float]] = (-1, {})
        """Of the last step that was let pass: its numbers count once a later one comes."""

    def see_loss(self, loss: torch.Tensor) -> None:
        """A part of the step's loss."""
        self._losses.append(loss.detach())

    def look(self) -> None:
        """Right before the update, while the gradients are there."""
        gradients = [] if self._has_scaler() else list(self._gradients())
        if gradients:
            self._norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))

    def begin(self) -> None:
        """A step begins, perhaps again."""
        self._losses, self._norm = [], None

    def before_commit(self, step: int, rank: int, transaction: Transaction, agree: Agree) -> None:
        """Returns if the step may be committed; raises RepeatStep or NumericError if not."""
        numbers = self._numbers()
        if step > self._waiting[0]:
            for name, value in self._waiting[1].items():
                self._histories[name].add(value)
        odd = {name: text for name, value in numbers.items() if (text := self._histories[name].judge(value))}
        what = "; ".join(f"{name} {text}" for name, text in odd.items())
        self._waiting = (step, {} if what else numbers)
        own = _guilt("the loss" in odd, rank) if odd else 0
        # Whoever came in between the two attempts does not know that this is the second.
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

    def _follow_policy(self, step: int, what: str, is_worst: bool, transaction: Transaction) -> None:
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
    """All of it that is not zero, as of an embedding with sparse gradients: it has no norms of its own."""
    if gradient.layout is torch.strided:
        return gradient
    return (gradient.coalesce() if gradient.is_sparse else gradient).values()


def _guilt(is_own: bool, rank: int) -> int:
    """The larger, the more the numbers are this rank's: gradients are everybody's once they are reduced."""
    return (1 + is_own) * RANKS_MAX - rank
