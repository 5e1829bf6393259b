"""Plain attributes of tracked modules and optimizers: the numbers, words and switches that no state_dict() has.

    self.calls += 1                      in a forward; a temperature that falls
    model.dropout.p += 0.01              a schedule by hand
    self.count += 1                      in an optimizer's step()

They decide bits as buffers do. So they are remembered before a step and put back when it is repeated, and what the loop
has changed since the first step is part of the state, as flags are (module_flags.py). Where ranks that share
everything else
have other values (the loss of its last batch that a module keeps to be looked at), a replacement is not given another
rank's: it has them as its script builds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.nn import Module

PLAIN = (bool, int, float, complex, str, type(None))
OWN = frozenset(vars(Module()))
"""What every module has: switched and kept by itself (module_flags.py)."""
INTEGER_MAX = 2**40
"""Above it, an integer may be an address, which means nothing in another process."""
WORD_CHARACTERS_MAX = 256

Values = dict[str, Any]
"""By attribute."""


class Attributes:
    """The plain attributes of the tracked modules and optimizers."""

    def __init__(self) -> None:
        self._holders: dict[str, object] = {}
        self._local: set[str] = set()
        self._built: dict[str, Values] = {}
        self.of_each_rank: set[str] = set()
        """Those that differ between ranks that are the same otherwise: HOLDER.ATTRIBUTE."""

    def refresh(self, holders: Mapping[str, object], local: Iterable[str]) -> None:
        """Look at these objects, by name. `local`: the names of those that each rank has for itself."""
        self._holders, self._local = dict(holders), set(local)

    def begin(self) -> None:
        """The script is about to make its first step."""
        self._built = self.capture()

    def capture(self) -> dict[str, Values]:
        """Remember all of them."""
        return {name: values for name, holder in self._holders.items() if (values := plain_values(holder))}

    def restore(self, saved: Mapping[str, Values]) -> None:
        """Put all of them back. What is no plain value by now (a cache that was filled) stays."""
        for name, holder in self._holders.items():
            then, now = saved.get(name, {}), plain_values(holder)
            if then == now:
                continue
            attributes = vars(holder)
            for attribute in now.keys() - then.keys():
                del attributes[attribute]
            attributes |= {key: value for key, value in then.items() if key in now or key not in attributes}

    def changed(self) -> dict[str, Values]:
        """Return what the loop has changed, and what all ranks have alike."""
        found: dict[str, Values] = {}
        for name, holder in self._holders.items():
            now, built = plain_values(holder), self._built.get(name, {})
            if name not in self._local and now != built:
                found[name] = {
                    key: value
                    for key, value in now.items()
                    if (key not in built or built[key] != value) and f"{name}.{key}" not in self.of_each_rank
                }
        return {name: values for name, values in found.items() if values}

    def load(self, saved: Mapping[str, Values]) -> None:
        """Make them what they were when `changed()` was asked. What this script does not have is left out."""
        for name, holder in self._holders.items():
            if name not in self._local:
                kept = {key: value for key, value in plain_values(holder).items() if self._is_own(name, key)}
                self.restore_one(holder, {**self._built.get(name, {}), **kept, **saved.get(name, {})})

    @staticmethod
    def restore_one(holder: object, values: Values) -> None:
        """Set the plain attributes of one object, unless they hold something else by now."""
        now, attributes = plain_values(holder), vars(holder)
        attributes |= {key: value for key, value in values.items() if key in now or key not in attributes}

    def _is_own(self, name: str, attribute: str) -> bool:
        return f"{name}.{attribute}" in self.of_each_rank


def plain_values(holder: object) -> Values:
    """Return the attributes of an object that are plain values."""
    return {
        name: value
        for name, value in vars(holder).items()
        if type(value) in PLAIN and name not in OWN and not is_long(value)
    }


def is_long(value: Any) -> bool:
    """Return whether the value may be an address, or is a text."""
    if type(value) is int:
        return abs(value) > INTEGER_MAX
    return type(value) is str and len(value) > WORD_CHARACTERS_MAX
