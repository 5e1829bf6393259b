"""Generators and iterators of the script's own from which a step draws by hand: refused.

    batches = make_batches()                            # a generator function of the script's own
    for step in job.steps(n):
        with step:
            x, y = next(batches)                        # a repeated step gets the next, a replacement the first ones

`step.batches(make_batches())` keeps the batch until its step is committed, and brings a replacement to its position.
They are looked for where a script has them: in the variables of its functions and modules that are running, in what its
functions have closed over, in the attributes of its objects. An iterator that begins in the step is left alone, and so
is what `step.batches` draws from.
"""

from __future__ import annotations

import gc
import itertools
import operator
import types
from collections.abc import Callable, Iterable
from typing import Any

from holdfast.worker.frame_variables import variables_of
from holdfast.worker.untracked_copies import Holding, IsOwn, holdings

PLAIN = (int, float, str, bool, type(None))
LISTS: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))))
"""Iterators that know how much is left of them."""
DEPTH_MAX = 4
"""How deep it is looked for the iterator inside of what `step.batches` draws from."""
REFERENTS_MAX = 1000


class OwnIterators:
    """The script's own iterators at the start of a step."""

    def __init__(self, is_own: IsOwn, is_known: Callable[[Any], bool]) -> None:
        self._found: dict[int, tuple[Holding, Any, Any]] = {}
        for holding in holdings(is_own, lambda value: is_iterator(value, is_own)):
            iterator = holding.read()
            if id(iterator) not in self._found and not is_known(iterator):
                self._found[id(iterator)] = (holding, iterator, position_of(iterator))

    def finding(self, drawn: Iterable[Any]) -> str:
        """Return what to say of the first iterator that was drawn from; empty if there is none. `drawn`: what
        `step.batches` draws from."""
        inside: set[int] | None = None
        for holding, iterator, before in self._found.values():
            if position_of(iterator) == before:
                continue
            inside = _ids_inside(drawn) if inside is None else inside
            if id(iterator) not in inside:
                return (
                    f"{holding.where} is an iterator of the script's own, from which this step draws by hand: a"
                    " repeated step would get what comes next, and a replacement what came first. Write `for batch in"
                    " step.batches(iterator):` in the step, derive what it gives from step.number, or declare with"
                    " job.ignore(iterator) that it is not part of the state"
                )
        return ""


def is_iterator(value: Any, is_own: IsOwn) -> bool:
    """Return whether this is an iterator whose position is known: one of Python's own over a list or numbers, or of a
    generator function of the script's that does not run now."""
    kind = type(value)
    if kind is types.GeneratorType:
        frame = value.gi_frame
        return frame is not None and not value.gi_running and is_own(frame.f_globals.get("__name__", ""))
    return kind in LISTS or kind is itertools.count


def position_of(iterator: Any) -> Any:
    """Return what is another value when something was drawn: for a generator, where it stands, and the plain values
    and iterators among its variables."""
    kind = type(iterator)
    if kind is types.GeneratorType:
        frame = iterator.gi_frame
        if frame is None or iterator.gi_running:
            return None
        values = variables_of(frame)
        plain = {name: value for name, value in values.items() if type(value) in PLAIN}
        inner = {name: position_of(value) for name, value in values.items() if type(value) in LISTS}
        return frame.f_lasti, plain, inner
    if kind in LISTS:
        return operator.length_hint(iterator)
    return repr(iterator) if kind is itertools.count else None


def _ids_inside(drawn: Iterable[Any]) -> set[int]:
    """Return id() of these objects and of what they hold."""
    level, found = list(drawn), {id(one) for one in drawn}
    for _ in range(DEPTH_MAX):
        level = [
            one
            for holder in level
            for one in gc.get_referents(holder)[:REFERENTS_MAX]
            if id(one) not in found and not isinstance(one, type | types.ModuleType | types.CodeType)
        ]
        found |= {id(one) for one in level}
    return found
