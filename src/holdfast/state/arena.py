"""A copy of a state in one arena: all tensors one after another in one run of bytes, and the skeleton beside it.

An arena is sent and written as one run of bytes and read by views: there is nothing to serialise. Each tensor begins
at a multiple of 64 bytes. Where it lies follows from the dtypes and shapes alone, so the arena is reused while those
stay the same, whatever numbers the skeleton holds.

A snapshot says of itself what it is worth: EMPTY → WRITING → SEALED(step). One whose writing broke off stays WRITING
and is never restored from.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

import torch

from holdfast.errors import StateError
from holdfast.state.tracked import Tracked
from holdfast.state.tree import TENSORS_BYTES_MAX, FlatTree, specs
from holdfast.torch_compat import copy_all

ALIGNMENT_BYTES = 64
"""A cache line, and what the widest vector instructions want."""

Shapes = tuple[tuple[torch.dtype, tuple[int, ...]], ...]


class ArenaStatus(enum.Enum):
    EMPTY = "empty"
    WRITING = "writing"
    SEALED = "sealed"


class ArenaPlan:
    """Where each tensor lies in an arena: a function of dtypes and shapes."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.offsets: list[int] = []
        end = 0
        for dtype, shape in shapes:
            start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            self.offsets.append(start)
            end = start + math.prod(shape) * dtype.itemsize
        self.size_bytes = end

    def views(self, arena: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of an arena, as views of it."""
        if arena.dtype != torch.uint8 or arena.dim() != 1 or arena.numel() < self.size_bytes:
            raise StateError(f"the arena has {arena.numel()} {arena.dtype}, {self.size_bytes} bytes are needed")
        return [
            arena[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            if math.prod(shape)
            else torch.empty(shape, dtype=dtype, device="cpu")
            for start, (dtype, shape) in zip(self.offsets, self.shapes, strict=True)
        ]


def plan_of(skeleton: bytes, bytes_max: int = TENSORS_BYTES_MAX) -> ArenaPlan:
    """Return the plan of a skeleton that came from elsewhere."""
    plan = ArenaPlan(tuple((spec.dtype, spec.shape) for spec in specs(skeleton)))
    if plan.size_bytes > bytes_max:
        raise StateError(f"the skeleton asks for {plan.size_bytes} bytes, more than the {bytes_max} allowed")
    return plan


class Arena:
    """One copy of a state, and the step it is of."""

    def __init__(self, flat: FlatTree | None = None, *, is_kept: bool = True) -> None:
        """Make an arena. Given a state, its memory is allocated now, not at the first `take`. `is_kept`: it is used
        more than once, so that a device's state is worth pinned memory, which takes longer to make than one copy into
        ordinary memory does."""
        self.status = ArenaStatus.EMPTY
        self.step = -1
        self.skeleton = b""
        self._plan = ArenaPlan(())
        self._arena = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._views: list[torch.Tensor] = []
        self._is_kept = is_kept
        if flat is not None:
            self._fit(_shapes(flat.tensors), is_pinned=is_kept and _has_device(flat.tensors))

    @property
    def is_complete(self) -> bool:
        return self.status is ArenaStatus.SEALED

    @property
    def size_bytes(self) -> int:
        return self._plan.size_bytes

    def take(self, flat: FlatTree, step: int) -> None:
        """Copy a state. Until it returns, the snapshot is worth nothing."""
        self.status = ArenaStatus.WRITING
        has_device = _has_device(flat.tensors)
        self._fit(_shapes(flat.tensors), has_device and self._is_kept)
        if self._views:
            with torch.no_grad():
                copy_all(self._views, flat.tensors, non_blocking=has_device)
        if has_device:
            torch.accelerator.synchronize()
        self.skeleton, self.step = flat.skeleton, step
        self.status = ArenaStatus.SEALED

    def receive(self, skeleton: bytes, step: int, bytes_max: int = TENSORS_BYTES_MAX) -> list[torch.Tensor]:
        """Make room for a snapshot from elsewhere: receive into these parts, then `seal`."""
        plan = plan_of(skeleton, bytes_max)
        self.status = ArenaStatus.WRITING
        self._fit(plan.shapes, is_pinned=False)
        self.skeleton, self.step = skeleton, step
        return self._parts()

    def seal(self) -> None:
        """Say that everything was received."""
        if self.status is not ArenaStatus.WRITING:
            raise AssertionError("nothing was being received")
        self.status = ArenaStatus.SEALED

    def parts(self) -> list[torch.Tensor]:
        """Return the bytes to send or write, as a few large buffers."""
        self._check_complete()
        return self._parts()

    def flat(self) -> FlatTree:
        """Return the state, as views of the arena: valid until the next `take`."""
        self._check_complete()
        return FlatTree(self.skeleton, self._views)

    def restore_into(self, tracked: Tracked, with_others: bool = True) -> int:
        """Make the objects what they were at the snapshot's step, which is returned."""
        tracked.load(self.flat(), with_others=with_others)
        return self.step

    def _parts(self) -> list[torch.Tensor]:
        return [self._arena[: self._plan.size_bytes]] if self._plan.size_bytes else []

    def _check_complete(self) -> None:
        if not self.is_complete:
            raise StateError(f"the snapshot is {self.status.value}, not complete: nothing can be restored from it")

    def _fit(self, shapes: Shapes, is_pinned: bool) -> None:
        if shapes == self._plan.shapes and is_pinned <= self._arena.is_pinned():
            return
        self._plan, self._views = ArenaPlan(shapes), []
        if self._plan.size_bytes > self._arena.numel() or is_pinned > self._arena.is_pinned():
            self._arena = torch.empty(0, dtype=torch.uint8, device="cpu")  # the old one goes before the new one comes
            self._arena = torch.empty(self._plan.size_bytes, dtype=torch.uint8, pin_memory=is_pinned, device="cpu")
        self._views = self._plan.views(self._arena)


def _shapes(tensors: Sequence[torch.Tensor]) -> Shapes:
    return tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)


def _has_device(tensors: Sequence[torch.Tensor]) -> bool:
    return any(not tensor.is_cpu for tensor in tensors)
