"""A loop that is left by choice is told from one that an exception leaves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from holdfast.worker.loop_exit import is_left_by_choice

Wrap = Callable[[Iterable[int]], Iterable[Any]]


def steps(said: list[bool], total: int = 5) -> Iterator[int]:
    try:
        yield from range(total)
    except GeneratorExit:
        said.append(is_left_by_choice(sys._getframe()))
        raise


def passed_on(iterable: Iterable[int]) -> Iterator[int]:
    for thing in iterable:  # noqa: UP028
        yield thing


class Bar:
    """As tqdm: an object that holds the iterable, with a generator as its `__iter__`."""

    def __init__(self, iterable: Iterable[int]) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[int]:
        iterable = self.iterable
        try:
            for thing in iterable:  # noqa: UP028
                yield thing
        finally:
            self.is_closed = True


def plain(iterable: Iterable[int]) -> Iterable[int]:
    return iterable


WRAPS = [plain, passed_on, Bar, enumerate, lambda i: zip(i, range(9), strict=False), lambda i: (x for x in i)]
NAMES = ["plain", "generator", "bar", "enumerate", "zip", "expression"]


def fail() -> None:
    raise OSError("network unreachable")


def leave(wrap: Wrap, said: list[bool], how: str) -> int:
    for _ in wrap(steps(said)):
        if how == "break":
            break
        if how == "return":
            return 7
        if how == "call":
            fail()
        if how == "raise":
            raise ValueError
        if how == "exit":
            sys.exit(3)
        if how == "arithmetic":
            return 1 // 0
        if how == "with":
            with pytest.raises(KeyError):
                fail()
        if how == "caught":
            try:
                fail()
            except OSError as error:
                raise RuntimeError("again") from error
    return 0


@pytest.mark.parametrize("wrap", WRAPS, ids=NAMES)
@pytest.mark.parametrize("how", ["break", "return"])
def test_by_choice(wrap: Wrap, how: str) -> None:
    said: list[bool] = []
    leave(wrap, said, how)
    assert said == [True]


@pytest.mark.parametrize("wrap", WRAPS, ids=NAMES)
@pytest.mark.parametrize("how", ["call", "raise", "exit", "arithmetic", "with", "caught"])
def test_by_an_exception(wrap: Wrap, how: str) -> None:
    said: list[bool] = []
    with pytest.raises(BaseException) as caught:
        leave(wrap, said, how)
    caught.value.__traceback__ = None
    assert said == [False]


def test_an_exception_that_is_caught_around_the_loop() -> None:
    said: list[bool] = []
    try:
        for _ in steps(said):
            fail()
    except OSError:
        assert said == [False], "at the moment of the exception"
    assert said == [False]


def test_a_variable_that_holds_the_steps() -> None:
    said: list[bool] = []
    held: Iterator[int] | None = steps(said)
    for _ in held or ():
        break
    assert said == []
    held = None
    assert said == [True] and held is None


def test_all_steps_made_is_no_exit() -> None:
    said: list[bool] = []
    assert len(list(steps(said))) == 5 and said == []
