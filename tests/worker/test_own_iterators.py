"""An iterator of the script's own that a step draws from by hand is found, and others are left alone."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast.worker.own_iterators import OwnIterators


def numbers(start: int) -> Iterator[int]:
    while True:
        yield start
        start += 1


def forever() -> Iterator[int]:
    while True:
        yield from [1, 2, 3]


class Feed:
    """Holds an iterator."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self.iterator


def look() -> OwnIterators:
    return OwnIterators(lambda name: name == __name__, lambda thing: False)


def found(iterator: Iterator[Any], draw: Callable[[Any], object], *drawn: Any, before: int = 0) -> str:
    holder = Feed(iterator)
    for _ in range(before):
        next(iterator)
    iterators = look()
    draw(holder.iterator)
    return iterators.finding(drawn)


@pytest.mark.parametrize("before", [0, 1, 5])
@pytest.mark.parametrize(
    "make",
    [lambda: numbers(3), lambda: iter([1, 2, 3, 4, 5, 6, 7]), lambda: iter(range(9)), lambda: itertools.count(4)],
    ids=["generator", "list", "range", "count"],
)
def test_an_iterator_that_a_step_draws_from(make: Callable[[], Iterator[int]], before: int) -> None:
    text = found(make(), next, before=before)
    assert "is an iterator of the script's own" in text and "step.batches(iterator)" in text, text
    assert not found(make(), lambda one: None, before=before), "nothing was drawn"


def test_the_first_draw_of_a_generator_that_delegates_is_seen() -> None:
    assert found(forever(), next)


def test_what_step_batches_draws_is_left_alone() -> None:
    iterator = numbers(0)
    assert not found(iterator, next, map(str, iterator))
    assert not found(iterator, next, Feed(iterator))


def test_nothing_that_a_variable_held_stays_alive() -> None:
    class Output:
        """As a model's."""

    output = Output()
    alive = weakref.ref(output)
    look().finding(())
    del output
    assert alive() is None, "a frame keeps the variables that were looked at"
