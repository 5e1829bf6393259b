"""`os.environ` of a spare: reading a variable that depends on the rank waits until there is one (worker/parking.py).

A script may read RANK before it imports anything of ours, so this stands before the script's first line.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from holdfast.core.environment_variables import RANK_VARIABLES, SPARE_VARIABLE

UNCLAIMED = "1"
"""What the agent sets the variable to."""


class SpareEnvironment(os._Environ):  # type: ignore[type-arg]
    """The variables of a rank are there, and reading one waits for the assignment. A child process, which can neither
    wait nor be told, sees variables that are not set."""

    def __getitem__(self, key):  # type: ignore[no-untyped-def]
        if _waits_for(key):
            parking: Any = import_module("holdfast.worker.parking")  # it stands on what is imported after this
            parking.current().wait()
        return os._Environ.__getitem__(self, key)  # not super(): by now this is an ordinary environment

    def __contains__(self, key):  # type: ignore[no-untyped-def]
        return _waits_for(key) or os._Environ.__contains__(self, key)

    def __iter__(self):  # type: ignore[no-untyped-def]
        """Iterate over all names: code that copies the environment wants the names of the rank's variables too."""
        if _waits_for(RANK_VARIABLES[0]):
            names = RANK_VARIABLES if self is os.environ else [os.fsencode(name) for name in RANK_VARIABLES]
            yield from (name for name in names if self.encodekey(name) not in self._data)  # type: ignore[attr-defined]
        yield from os._Environ.__iter__(self)


def watch() -> None:
    """Let reads of the rank's variables wait, if this process is a spare. Costs nothing otherwise."""
    if os.environ.get(SPARE_VARIABLE) == UNCLAIMED:
        os.environ[SPARE_VARIABLE] = str(os.getpid())  # a program that this one starts is no spare
        for environment in (os.environ, os.environb):
            environment.__class__ = SpareEnvironment


def is_watched() -> bool:
    """Return whether this process is a spare that has no rank yet."""
    return os.environ.get(SPARE_VARIABLE) == str(os.getpid())


def release() -> None:
    """Make it an ordinary environment again: the rank's variables are about to be set."""
    for environment in (os.environ, os.environb):
        environment.__class__ = os._Environ
    os.environ[SPARE_VARIABLE] = ""  # not removed: another thread may be copying all of it just now


def _waits_for(key: object) -> bool:
    name = os.fsdecode(key) if isinstance(key, bytes) else key
    return name in RANK_VARIABLES and is_watched()
