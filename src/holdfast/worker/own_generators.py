"""Random generators of the script's own that a step draws from: warned of.

Holdfast sets the global generators at the start of each step, so that a repeated step and a replacement draw the same
numbers. A torch.Generator, numpy.random.Generator or random.Random of the script goes on where the aborted attempt left
it, and begins again in a replacement. What is seeded in the step itself is right, and so is what a DataLoader or its
sampler shuffles by: a replacement draws that from the beginning.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from holdfast.worker.untracked_copies import Holding, IsOwn, holdings


class OwnGenerators:
    """The script's own generators at the start of a step. `shufflers`: the process's DataLoaders and samplers."""

    def __init__(
        self, is_own: IsOwn, is_known: Callable[[Any], bool], shufflers: list[DataLoader[Any] | Sampler[Any]]
    ) -> None:
        left_out = {id(getattr(one, "generator", None)) for one in shufflers} | {id(torch.default_generator)}
        self._found: dict[int, tuple[Holding, Any, tuple[Any, Any]]] = {}
        for holding in holdings(is_own, is_generator):
            generator = holding.read()
            if id(generator) not in left_out and not is_known(generator) and id(generator) not in self._found:
                self._found[id(generator)] = (holding, generator, position_of(generator))

    def finding(self) -> str:
        """Return what to warn of: the first generator that was drawn from and not seeded again; empty if there is
        none."""
        for holding, generator, (seed, state) in self._found.values():
            new_seed, new_state = position_of(generator)
            if new_state != state and new_seed == seed:
                return (
                    f"{holding.where} is a random generator of the script's own, from which this step draws: a repeated"
                    " step and a replacement draw other numbers. Use the global generators, which are set at the start"
                    " of each step, or seed it in the step from step.number and job.rank; if its numbers do not matter,"
                    " say so with job.ignore(generator)"
                )
        return ""


def is_generator(value: Any) -> bool:
    """Return whether this is a random generator."""
    kind = type(value)
    return issubclass(kind, torch.Generator | random.Random) or issubclass(kind, numpy_kinds())


def numpy_kinds() -> tuple[type, ...]:
    """Return NumPy's kinds of generators; none if NumPy is not in use."""
    numpy = sys.modules.get("numpy.random")
    return (numpy.Generator, numpy.RandomState) if numpy is not None else ()


def position_of(generator: Any) -> tuple[Any, Any]:
    """Return the seed of a generator, as far as it says, and its state."""
    if isinstance(generator, torch.Generator):
        return generator.initial_seed(), generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return None, generator.getstate()
    return None, repr(generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state())
