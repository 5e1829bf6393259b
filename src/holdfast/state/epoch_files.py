"""Checkpoints as many scripts write them: `torch.save({'epoch', 'model_state_dict', 'optimizer_state_dict', 'loss'})`
into `checkpoint_epoch_N.pt`, so that users can come over.

    old = epoch_files.latest(folder)             the newest that can be read; damaged ones are skipped with a warning
    old.load(model=model, optimizer=optimizer)   exactly what was saved; returns the epoch

Read with `weights_only=True`: nothing in the file is executed. A file that needs more than that is refused. Nothing is
written in this shape.
"""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from holdfast.errors import CheckpointError
from holdfast.state.modules import unwrapped
from holdfast.storage.checkpoint_catalogue import warn_of_damage

NAME = re.compile(r"checkpoint_epoch_(0|[1-9][0-9]{0,17})\.pt\Z")
WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DistributedDataParallel and torch.compile put before each name."""


@dataclass(frozen=True, slots=True)
class EpochFile:
    """The content of such a file."""

    path: Path
    epoch: int
    model_state: dict[str, Any]
    optimizer_state: dict[str, Any] | None
    loss: float | None
    more: dict[str, Any]
    """Whatever else was saved with it: schedulers, for example."""

    def load(self, model: Module, optimizer: Optimizer | None = None) -> int:
        """Make them what they were; the epoch that was saved. A file without an optimizer's state is refused if one is
        to be loaded."""
        if optimizer is not None and self.optimizer_state is None:
            raise CheckpointError(f"{self.path} has no state of an optimizer")
        try:
            model = unwrapped(model)
            model.load_state_dict(_fitting(self.model_state, model))
            if optimizer is not None and self.optimizer_state is not None:
                optimizer.load_state_dict(self.optimizer_state)
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(f"{self.path} does not fit: {error}") from error
        return self.epoch


def candidates(folder: Path) -> list[Path]:
    """Return the files named so, newest epoch first."""
    try:
        named = [(int(match[1]), path) for path in folder.iterdir() if (match := NAME.match(path.name))]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be listed: {error.strerror}") from error
    return [path for _, path in sorted(named, reverse=True)]


def latest(folder: Path, on_damage: Callable[[str], None] = warn_of_damage) -> EpochFile | None:
    """Return the newest file that can be read; None if there are no such files. Damaged ones are reported and skipped,
    and stay where they are. Raise CheckpointError if none can be read: to start from the beginning would hide the
    damage."""
    paths = candidates(folder)
    for path in paths:
        try:
            return read(path)
        except CheckpointError as error:
            on_damage(f"checkpoint skipped: {error}")
    if paths:
        raise CheckpointError(f"{folder} has {len(paths)} files checkpoint_epoch_N.pt, none of which can be read")
    return None


def read(path: Path) -> EpochFile:
    """Read one file onto the CPU. Raise CheckpointError if it is damaged, or needs code to be executed."""
    try:
        with torch.serialization.safe_globals(_numpy_scalars()):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{path} holds more than tensors and plain values, or is damaged: {reason}") from None
    except (RuntimeError, ValueError, EOFError, KeyError, IndexError, TypeError, AttributeError) as error:
        # What torch says about a file that is truncated or not an archive differs from version to version.
        raise CheckpointError(f"{path} is damaged, or not written by torch.save: {str(error)[:200]}") from None
    return _understood(path, content)


def _numpy_scalars() -> list[Any]:
    """Return the types that a NumPy number consists of: a loss is often the mean of an array. They execute nothing."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return []
    rebuild = numpy.float64(0.0).__reduce__()[0]
    kinds = {type(numpy.dtype(kind)) for kind in ("f2", "f4", "f8", "i4", "i8")}
    return [numpy.dtype, *kinds, *((rebuild, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core"))]


def _understood(path: Path, content: Any) -> EpochFile:
    match content:
        case {"epoch": int(epoch), "model_state_dict": Mapping() as model_state, **more}:
            pass
        case _:
            raise CheckpointError(f"{path} has no epoch and model_state_dict: it is of another shape")
    optimizer_state, loss = more.pop("optimizer_state_dict", None), more.pop("loss", None)
    if optimizer_state is not None and not isinstance(optimizer_state, dict):
        raise CheckpointError(f"{path} has an optimizer_state_dict that is not one")
    return EpochFile(
        path=path,
        epoch=epoch,
        model_state=dict(model_state),
        optimizer_state=optimizer_state,
        loss=_number(loss),
        more={str(name): value for name, value in more.items()},
    )


def _fitting(state: dict[str, Any], model: Module) -> dict[str, Any]:
    """Return the state by the model's own names, whatever wrapped it when it was saved."""
    names = model.state_dict().keys()
    for prefix in ("", *WRAPPERS, *WRAPPERS):  # either may be around the other
        if state.keys() == names or not all(name.startswith(prefix) for name in state):
            continue
        state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


def _number(loss: Any) -> float | None:
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return float(loss.item())
    return float(loss) if isinstance(loss, Real) else None
