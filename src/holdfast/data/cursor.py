"""The cursor: how far a run's data is committed. One integer, and the plan that gives it its meaning.

A loader is ahead of the training loop: workers have fetched batches that were not trained on yet. Counting those loses
samples at the next resume. So drawing and committing are two things:

    drawn       given to torch's workers; forgotten at a resume
    committed   trained on: the loop says so with `commit()`, once after each optimizer step

`state_dict()` holds the committed position only. All ranks commit the same steps, so one rank's state is
that of every rank, at any world size.

An epoch that is committed stays finished: `set_epoch` of it leaves nothing to draw. So a loop over all epochs, from 0,
may be entered again after `load_state_dict` and continues in the middle of the right one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from holdfast.core.environment_variables import SPARE_VARIABLE
from holdfast.data.data_coordinates import DataCoordinates, coordinates_along
from holdfast.data.slots import loss_scale
from holdfast.data.step_plan import StepPlan
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def own_assignment(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return rank and world size: as given, or torch.distributed's, or the launcher's, or those of a world of one."""
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


def assigned(rank: int | None, world_size: int | None) -> tuple[int, int] | None:
    """Return `own_assignment`, or None in a spare that has no rank yet: asking would park it there
    (worker/parking.py)."""
    if rank is None and world_size is None and os.environ.get(SPARE_VARIABLE):
        return None
    return own_assignment(rank, world_size)


class RankAssignment:
    """An object whose batches belong to a rank, or to all ranks of a data coordinate, where there is a mesh. In a spare
    rank and world size are read when they are first needed, not before."""

    _assignment: tuple[int, int] | None = None
    """Rank and world size of the job."""
    coordinates: DataCoordinates | None = None
    """The data coordinates of all ranks; None: each rank has batches of its own."""

    @property
    def rank(self) -> int:
        """The number of this rank among those that share the data out; with a mesh, its data coordinate."""
        rank, world_size = self._known_assignment()
        return rank if self.coordinates is None else self.coordinates.of(rank, world_size)

    @property
    def world_size(self) -> int:
        """The number of ranks that share the data out; with a mesh, of data coordinates."""
        return self._known_assignment()[1] if self.coordinates is None else self.coordinates.count

    @property
    def is_lowest_of_coordinate(self) -> bool:
        """Whether no lower rank gets the same batches."""
        return self.coordinates is None or self.coordinates.is_lowest(self._known_assignment()[0])

    def audited(self, samples: int, total: int) -> tuple[int, int]:
        """Return what of a batch enters the sample audit: its samples, and the sum of their digests."""
        if self.coordinates is None:
            return samples, total
        return self.coordinates.audited(self._known_assignment()[0], samples, total)

    def _take_mesh(self, mesh: DeviceMesh | None, rank: int | None, world_size: int | None) -> None:
        """Share the data out along a mesh, if there is one."""
        if mesh is None:
            return
        if rank is not None or world_size is not None:
            raise UsageError("give either mesh=, or rank= and world_size=: the mesh says which batches a rank has")
        self.coordinates = coordinates_along(mesh)

    def _shared_weights(self, weights: Sequence[float] | None) -> tuple[float, ...] | None:
        """Return the weights of those that share the data out, from one a rank."""
        if weights is None:
            return None
        return tuple(weights) if self.coordinates is None else self.coordinates.slowest(weights)

    @property
    def _job_size(self) -> int:
        """The number of ranks of the job."""
        return self._known_assignment()[1]

    def _known_assignment(self) -> tuple[int, int]:
        if self._assignment is None:
            self._assignment = own_assignment(None, None)
        return self._assignment


def size_of(dataset: Any) -> int:
    """Return the number of samples of a dataset, or the number itself."""
    if isinstance(dataset, int):
        return dataset
    try:
        return len(dataset)
    except TypeError as error:
        kind = type(dataset).__name__
        raise UsageError(f"{kind} has no length: only map-style datasets have an exact order") from error


class Cursor(RankAssignment):
    """The position in the run and its state, shared by sampler and loader."""

    def __init__(self, plan: StepPlan, assignment: tuple[int, int] | None, weights: Sequence[float] | None) -> None:
        self.plan = plan
        self._assignment = assignment
        self.weights = self._shared_weights(weights)
        if assignment is not None:
            self.plan.share(0, self.rank, self.world_size, self.weights)  # refuses weights that cannot be
        self.skips = Skips()
        """The steps that are left out."""
        self._step = 0
        self._drawn = 0
        self._requested_epoch: int | None = None
        self._pass: range | None = None

    @property
    def step(self) -> int:
        """Return the number of committed steps, which is also the number of the step being trained on."""
        return self._step

    @property
    def position(self) -> int:
        """Return the number of committed samples."""
        return self.plan.span(self._step).start

    @property
    def epoch(self) -> int:
        """Return the epoch of the next step to commit."""
        return self.plan.epoch_of(self._step)

    def commit(self, steps: int = 1) -> None:
        """Record that the batch was trained on: call it after each `optimizer.step()`, on every rank."""
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
        raise UsageError(f"{drawn}, so commit({steps}) is not possible: commit once for each batch")

    def commit_drawn(self) -> None:
        """Commit the step being trained on, if anything of it was drawn. The session calls this after each step."""
        if self._drawn > self._step:
            self._step = self.skips.following(self._step + 1)

    def skip(self, steps: range | None = None, *, samples: range | None = None, why: str = "") -> range:
        """Leave out data that does harm: steps by their numbers, or samples by their positions in the run, rounded to
        full steps. Steps that were handed out already cannot be skipped; return those that will be. Call it on every
        rank alike. Skips are part of the state, and in a session of the journal."""
        if (steps is None) == (samples is None):
            raise UsageError("give either steps=range(first, end) or samples=range(first, end)")
        stretch = self._steps_of(samples) if steps is None else steps
        assert stretch is not None
        if stretch.step != 1 or stretch.start < 0 or not stretch:
            raise UsageError(f"{stretch} is not a range of steps: give range(first, end)")
        first_free = max(self._step, self._drawn)
        if stretch.stop <= first_free:
            raise UsageError(f"steps {stretch.start} to {stretch.stop - 1} were handed out already: it is too late")
        stretch = range(max(stretch.start, first_free), stretch.stop)
        self.skips.add(stretch, why)
        if self._drawn <= self._step:
            self._step = self._drawn = self.skips.following(self._step)
        return stretch

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be over what is not yet committed of this epoch. Uncommitted samples before it are
        dropped."""
        self._warn_if_forgotten()
        self._requested_epoch = epoch
        if (first := self.skips.following(self.plan.first_step(epoch))) > self._step:
            self._step = self._drawn = first

    def state_dict(self) -> dict[str, Any]:
        """Return the committed position and the configuration: the same on every rank, plain numbers and strings."""
        skips = {"skips": self.skips.state()} if self.skips else {}
        return self.plan.state(self._step) | skips

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last committed step, at any world size. A later position takes no longer."""
        step = self.plan.step_of_state(state)
        self.skips.load(state.get("skips", []))
        self._move_to(step)

    def __len__(self) -> int:
        """Return the number of steps of the epoch, committed ones included, so that schedules do not change at a
        resume."""
        epoch = self.epoch if self._requested_epoch is None else self._requested_epoch
        return self.plan.first_step(epoch + 1) - self.plan.first_step(epoch)

    def scale_of(self, step: int, positions: range) -> float:
        """Return the loss scale of a batch with these positions of a step."""
        return loss_scale(len(positions), len(self.plan.span(step)), self.world_size)

    def _move_to(self, step: int) -> None:
        self._step = self._drawn = self.skips.following(step)
        self._requested_epoch = self._pass = None

    def _steps_of(self, positions: range | None) -> range:
        """Return the steps that have any of these positions."""
        if not positions or positions.step != 1 or positions.start < 0:
            raise UsageError(f"{positions} is not a range of samples: give range(first, end)")
        last = self.plan.step_with(positions.stop - 1)
        has_last = self.plan.span(last).start < positions.stop  # else it is left out at the end of an epoch
        return range(self.plan.step_with(positions.start), last + has_last)

    def _begin_pass(self) -> range:
        """Return the steps of the next pass: the rest of the epoch."""
        self._warn_if_forgotten()
        epoch = self.epoch if self._requested_epoch is None else self._requested_epoch
        self._requested_epoch = None
        self._drawn = self._step
        self._pass = range(max(self._step, self.plan.first_step(epoch)), self.plan.first_step(epoch + 1))
        return self._pass

    def _warn_if_forgotten(self) -> None:
        full_pass, self._pass = self._pass, None
        if full_pass and self._step == full_pass.start and self._drawn == full_pass.stop:
            warnings.warn(
                "an epoch was drawn and no step of it committed: call commit() after each optimizer step", stacklevel=3
            )


# --- skipped steps

SKIPS_MAX = 1_000
WHY_CHARS_MAX = 200


class Skip(NamedTuple):
    """One range of steps that is skipped."""

    steps: range
    why: str


class Skips:
    """The ranges of steps that a loader leaves out, in the order in which they were asked for.

    Data that does harm is left out as loss spikes are cured: by going round their batches. The plan stays as it is, so
    all other steps have the samples they would have had. What is asked for in samples is rounded to full steps. Only
    steps that were not handed out yet can be skipped.

    Skips are part of the state, and must be asked for on every rank alike, as all that a script does to its state: in
    a session the ranks compare at each commit, and stop with an error if they differ.
    """

    def __init__(self) -> None:
        self._skips: list[Skip] = []
        self.changes = 0
        """How often they have changed: a prefetcher compares it to know that it must start over."""

    def __iter__(self) -> Iterator[Skip]:
        return iter(self._skips)

    def __len__(self) -> int:
        return len(self._skips)

    def __contains__(self, step: int) -> bool:
        return any(step in skip.steps for skip in self._skips)

    def __str__(self) -> str:
        return ",".join(f"{skip.steps.start}-{skip.steps.stop}" for skip in self._skips)

    def add(self, steps: range, why: str) -> None:
        """Skip these steps as well."""
        if len(self._skips) >= SKIPS_MAX:
            raise UsageError(f"{SKIPS_MAX} ranges are skipped already: leave such samples out of the dataset")
        self._skips.append(Skip(steps, why[:WHY_CHARS_MAX]))
        self.changes += 1

    def following(self, step: int) -> int:
        """Return the step itself, or the next one that is not skipped."""
        while found := next((skip for skip in self._skips if step in skip.steps), None):
            step = found.steps.stop
        return step

    def remaining(self, steps: range) -> list[range]:
        """Yield what is left of a run of steps."""
        left, begin = [], self.following(steps.start)
        while begin < steps.stop:
            ends = [skip.steps.start for skip in self._skips if skip.steps.start > begin]
            end = min([steps.stop, *ends])
            left.append(range(begin, end))
            begin = self.following(end)
        return left

    def state(self) -> list[list[Any]]:
        """Return the skips for the loader's state."""
        return [[skip.steps.start, skip.steps.stop, skip.why] for skip in self._skips]

    def load(self, state: list[list[Any]]) -> None:
        """Restore the skips of a state."""
        loaded = [Skip(range(int(first), int(end)), str(why)) for first, end, why in state]
        self.changes += loaded != self._skips
        self._skips = loaded
