"""Small exchanges of whole numbers among all ranks: over the session's group, over torch's own, or alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
import torch.distributed as dist

from holdfast.worker.collectives import groups


class SmallCollectives(NamedTuple):
    """How ranks come to know the same."""

    rank: int
    size: int
    agree: Callable[[Sequence[int]], list[int]]
    """The element-wise maximum over all ranks."""
    gather: Callable[[Sequence[int]], list[list[int]]]
    """Every rank's values, by rank."""


def in_session() -> SmallCollectives:
    """Return the exchanges over the view's group, which raise when the view is over."""
    return SmallCollectives(dist.get_rank(), dist.get_world_size(), groups.agree, groups.gather)


def outside() -> SmallCollectives:
    """Return the exchanges for scripts with a loop, and a group, of their own."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return SmallCollectives(0, 1, list, lambda values: [list(values)])
    return SmallCollectives(dist.get_rank(), dist.get_world_size(), _agree, _gather)


def _agree(values: Sequence[int]) -> list[int]:
    tensor = torch.tensor(list(values), dtype=torch.int64, device=_device())
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return cast(list[int], tensor.tolist())


def _gather(values: Sequence[int]) -> list[list[int]]:
    mine = torch.tensor(list(values), dtype=torch.int64, device=_device())
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return [row.tolist() for row in rows]


def _device() -> torch.device:
    """Return where the group takes tensors: gloo takes those of the host, the others only a device's."""
    if dist.get_backend() in ("gloo", "mpi", "holdfast"):
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")
