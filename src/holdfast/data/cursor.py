"""The cursor: how far a run's data is committed. One integer, and the plan that gives it its meaning.

A loader is ahead of the training loop: workers have fetched batches that nobody has trained on. Counting those loses
samples at the next resume. So drawing and committing are two things:

    drawn       given to torch's workers; forgotten at a resume
    committed   trained on: the loop says so with `commit()`, once after each optimizer step

`state_dict()` holds the committed position only. All ranks commit the same steps, so one rank's state is
everybody's, at any world size.

An epoch that is committed stays finished: `set_epoch` of it leaves nothing to draw. So a loop over all epochs, from 0,
may be entered again after `load_state_dict` and continues in the middle of the right one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from holdfast.data.plan import Plan
from holdfast.data.skips import Skips
from holdfast.data.slots import loss_scale
from holdfast.errors import UsageError


def own_place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size: as given, or torch.distributed's, or the launcher's, or a world of one."""
    if (rank is None) != (world_size is None):
        raise UsageError("give both rank and world_size, or neither")
    if rank is None or world_size is None:
        if dist.is_available() and dist.is_initialized():
            rank, world_size = dist.get_rank(), dist.get_world_size()
        else:
            rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} does not exist in a world of {world_size}")
    return rank, world_size


def size_of(dataset: Any) -> int:
    """The number of samples of a dataset, or the number itself."""
    if isinstance(dataset, int):
        return dataset
    try:
        return len(dataset)
    except TypeError as error:
        kind = type(dataset).__name__
        raise UsageError(f"{kind} has no length: only map-style datasets have an exact order") from error


class Cursor:
    """What sampler and loader share: the place in the run, and its state."""

    def __init__(self, plan: Plan, rank: int, world_size: int, weights: Sequence[float] | None) -> None:
        self.plan = plan
        self.rank, self.world_size = rank, world_size
        self.weights = None if weights is None else tuple(weights)
        self.plan.share(0, rank, world_size, self.weights)  # refuses weights that cannot be
        self.skips = Skips()
        """The steps that are passed over."""
        self._step = 0
        self._drawn = 0
        self._epoch_wish: int | None = None
        self._pass: range | None = None

    @property
    def step(self) -> int:
        """The number of committed steps; also the number of the step being trained on."""
        return self._step

    @property
    def position(self) -> int:
        """The number of committed samples."""
        return self.plan.span(self._step).start

    @property
    def epoch(self) -> int:
        """The epoch of the next step to commit."""
        return self.plan.epoch_of(self._step)

    def commit(self, steps: int = 1) -> None:
        """Say that the batch was trained on: call it after each `optimizer.step()`, on every rank."""
        step = self._step
        for _ in range(steps):
            if step >= self._drawn:
                break
            step = self.skips.following(step + 1)
        else:
            if steps >= 0:
                self._step = step
                return
        drawn = f"{self._step} of {self._drawn} drawn steps are committed"
        raise UsageError(f"{drawn}, so commit({steps}) cannot be: commit once for each batch")

    def commit_drawn(self) -> None:
        """Commit the step being trained on, if anything of it was drawn: what the session does after each step."""
        if self._drawn > self._step:
            self._step = self.skips.following(self._step + 1)

    def skip(self, steps: range | None = None, *, samples: range | None = None, why: str = "") -> range:
        """Pass over a stretch that does harm: steps by their numbers, or samples by their positions in the run, rounded
        to whole steps. What was handed out already is past; returns the steps that will be passed over. On every rank
        alike. It is part of the state, and in a session of the journal."""
        if (steps is None) == (samples is None):
            raise UsageError("give either steps=range(first, end) or samples=range(first, end)")
        stretch = self._steps_of(samples) if steps is None else steps
        assert stretch is not None
        if stretch.step != 1 or stretch.start < 0 or not stretch:
            raise UsageError(f"{stretch} is no stretch of steps: give range(first, end)")
        first_free = max(self._step, self._drawn)
        if stretch.stop <= first_free:
            raise UsageError(f"steps {stretch.start} to {stretch.stop - 1} were handed out already: it is too late")
        stretch = range(max(stretch.start, first_free), stretch.stop)
        self.skips.add(stretch, why)
        if self._drawn <= self._step:
            self._step = self._drawn = self.skips.following(self._step)
        return stretch

    def set_epoch(self, epoch: int) -> None:
        """The next pass is over what is not yet committed of this epoch. Uncommitted samples before it are given up."""
        self._warn_if_forgotten()
        self._epoch_wish = epoch
        if (first := self.skips.following(self.plan.first_step(epoch))) > self._step:
            self._step = self._drawn = first

    def state_dict(self) -> dict[str, Any]:
        """The committed position and the configuration: the same on every rank, plain numbers and words."""
        skips = {"skips": self.skips.state()} if self.skips else {}
        return self.plan.state(self._step) | skips

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last committed step, at whatever world size. Takes no longer for a later position."""
        step = self.plan.step_of_state(state)
        self.skips.load(state.get("skips", []))
        self._move_to(step)

    def __len__(self) -> int:
        """The number of steps of the epoch, committed ones included, so that schedules do not change at a resume."""
        epoch = self.epoch if self._epoch_wish is None else self._epoch_wish
        return self.plan.first_step(epoch + 1) - self.plan.first_step(epoch)

    def scale_of(self, step: int, positions: range) -> float:
        """The loss scale of a batch with these positions of a step."""
        return loss_scale(len(positions), len(self.plan.span(step)), self.world_size)

    def _move_to(self, step: int) -> None:
        self._step = self._drawn = self.skips.following(step)
        self._epoch_wish = self._pass = None

    def _steps_of(self, positions: range | None) -> range:
        """Those that have any of these positions."""
        if not positions or positions.step != 1 or positions.start < 0:
            raise UsageError(f"{positions} is no stretch of samples: give range(first, end)")
        last = self.plan.step_with(positions.stop - 1)
        has_last = self.plan.span(last).start < positions.stop  # else it is left out at the end of an epoch
        return range(self.plan.step_with(positions.start), last + has_last)

    def _begin_pass(self) -> range:
        """The steps of the next pass: the rest of the epoch."""
        self._warn_if_forgotten()
        epoch = self.epoch if self._epoch_wish is None else self._epoch_wish
        self._epoch_wish = None
        self._drawn = self._step
        self._pass = range(max(self._step, self.plan.first_step(epoch)), self.plan.first_step(epoch + 1))
        return self._pass

    def _warn_if_forgotten(self) -> None:
        whole_pass, self._pass = self._pass, None
        if whole_pass and self._step == whole_pass.start and self._drawn == whole_pass.stop:
            warnings.warn(
                "an epoch was drawn and no step of it committed: call commit() after each optimizer step", stacklevel=3
            )
