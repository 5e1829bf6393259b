"""Copying a value: into new memory, or into the memory of a live tensor, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.errors import StateError
from holdfast.state.dtensors import Sharded, into, layout_of, local_of, mismatch

IMMUTABLE = (str, int, float, bool, bytes, complex, type(None), torch.dtype, torch.device, torch.Size)


def cloned(value: Any) -> Any:
    """Return a copy that shares no memory with the value. It is several times faster than deepcopy for what state dicts
    hold."""
    kind = type(value)
    if kind in IMMUTABLE:
        return value
    if kind is dict:
        return {key: cloned(item) for key, item in value.items()}
    if kind is list:
        return [cloned(item) for item in value]
    if kind is tuple:
        return tuple(cloned(item) for item in value)
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Sharded):
        return Sharded(value.local.clone(), value.layout)
    return copy.deepcopy(value)


def revived(saved: Any, like: Callable[[], Any]) -> Any:
    """Return a copy for an object's own load_state_dict: shards become DTensors again, as in the state `like()` it has
    now."""
    if not _has_shards(saved):
        return cloned(saved)
    return _revived(saved, like())


def copy_into(live: torch.Tensor, saved: Any, path: str) -> None:
    """Overwrite a live tensor in place. Raise StateError if it is not of the same kind, shape and dtype."""
    if (problem := misfit(live, saved)) is not None:
        raise StateError(f"{path}: {problem}")
    overwrite(live, saved)


def overwrite(live: torch.Tensor, saved: Any) -> None:
    """Overwrite a live tensor with a value that is known to fit."""
    target = local_of(live)
    source = saved.local if isinstance(saved, Sharded) else saved
    if target.data_ptr() != source.data_ptr() or target.device != source.device:
        with torch.no_grad():
            target.copy_(source)


def misfit(live: torch.Tensor, saved: Any) -> str | None:
    """Return why the saved value cannot be copied into the live tensor; None if it can."""
    if isinstance(live, DTensor) != isinstance(saved, Sharded):
        return "one of the live and the saved tensor is sharded, the other is not: it must be resharded, not loaded"
    if not isinstance(saved, torch.Tensor | Sharded):
        return f"a tensor is expected, a {type(saved).__name__} was saved"
    stored = saved.local if isinstance(saved, Sharded) else saved
    target = local_of(live)
    if target.shape != stored.shape or target.dtype != stored.dtype:
        is_, was = f"{target.dtype} {list(target.shape)}", f"{stored.dtype} {list(stored.shape)}"
        return f"it is {is_}, saved was {was}"
    if isinstance(live, DTensor) and isinstance(saved, Sharded):
        ours = layout_of(live)
        if not ours.is_same_region(saved.layout):
            return f"{mismatch(saved.layout, ours)}: it must be resharded, not loaded"
    return None


def _revived(saved: Any, like: Any) -> Any:
    if isinstance(saved, Sharded):
        if not isinstance(like, DTensor):
            raise StateError("a shard was saved where there is none now: it must be resharded, not loaded")
        return into(saved, like)
    if type(saved) is dict:
        known = like if isinstance(like, dict) else {}
        return {key: _revived(item, known.get(key)) for key, item in saved.items()}
    if type(saved) in (list, tuple):
        beside = like if isinstance(like, list | tuple) and len(like) == len(saved) else [None] * len(saved)
        return type(saved)(_revived(item, other) for item, other in zip(saved, beside, strict=True))
    return cloned(saved)


def _has_shards(value: Any) -> bool:
    items = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    return isinstance(value, Sharded) or any(_has_shards(item) for item in items)
