"""Plain values in the state: numbers, words, None, tracked by name beside models and optimizers.

    job.track(model=model, optimizer=optimizer, best=float("inf"))
    ...
    with step:
        ...
        job.values.best = min(job.values.best, loss)

Each is a branch of the state like any object, so it is put back when a step is repeated, given to newcomers, kept in
snapshots and checkpoints, and restored by `job.track`. What all ranks share must be the same on all ranks: they compare
a checksum of the values at every commit.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from holdfast.errors import ScriptError
from holdfast.state.tracked import Tracked

PLAIN_TYPES = (bool, int, float, str, type(None))


class PlainValue:
    """One plain value in the form of the objects that are tracked beside it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        """Return the value as a state."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the value of a state."""
        self.value = state["value"]


class TrackedValues:
    """The plain values that a script has tracked: read and set as attributes."""

    _tracked: dict[str, PlainValue]

    def __init__(self) -> None:
        object.__setattr__(self, "_tracked", {})

    def __getattr__(self, name: str) -> Any:
        if (held := self._tracked.get(name)) is None:
            raise AttributeError(f"no value {name} is tracked{self._which()}: name it in job.track({name}=…)")
        return held.value

    def __setattr__(self, name: str, value: Any) -> None:
        if (held := self._tracked.get(name)) is None:
            raise ScriptError(
                f"job.values.{name} is set and not tracked{self._which()}: name it with its first value in"
                f" job.track({name}=…), or it is lost with its worker"
            )
        held.value = plain(name, value)

    def __dir__(self) -> list[str]:
        return [*self._tracked]

    def __repr__(self) -> str:
        return f"TrackedValues({', '.join(f'{name}={held.value!r}' for name, held in self._tracked.items())})"

    def _which(self) -> str:
        return f" (there are {', '.join(self._tracked)})" if self._tracked else ""


def with_values_held(objects: Mapping[str, Any], values: TrackedValues) -> dict[str, Any]:
    """Return what is tracked in place of what was named: a PlainValue for each plain value, which `values` shows from
    now on."""
    found = {name: PlainValue(thing) if type(thing) in PLAIN_TYPES else thing for name, thing in objects.items()}
    values._tracked.update({name: thing for name, thing in found.items() if isinstance(thing, PlainValue)})
    return found


def forget_values(values: TrackedValues) -> None:
    """Show no values any more, until others are tracked."""
    values._tracked.clear()


def plain(name: str, value: Any) -> Any:
    """Return the value as one that can be kept: the number in a tensor or an array of one element. Raise ScriptError
    for anything else."""
    if type(value) in PLAIN_TYPES:
        return value
    try:
        number = value.item()  # a tensor, a number of NumPy's
    except (AttributeError, TypeError, ValueError, RuntimeError):
        number = value
    if type(number) not in PLAIN_TYPES:
        raise ScriptError(
            f"job.values.{name} is set to a {type(value).__name__}: a value is a number, a word or None; for anything"
            " else track an object with state_dict and load_state_dict"
        )
    return number


def shared_values(tracked: Tracked) -> dict[str, Any]:
    """Return the plain values that all ranks have alike, by name."""
    local = tracked.local_names()
    others = tracked.others()
    return {name: one.value for name, one in others.items() if isinstance(one, PlainValue) and name not in local}


def mark_of_values(tracked: Tracked) -> int:
    """Return a number that is equal on two ranks whose shared values are the same, to the bit."""
    return zlib.crc32(repr(shared_values(tracked)).encode(errors="surrogatepass"))
