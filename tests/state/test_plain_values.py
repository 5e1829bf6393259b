"""Plain values in the state: what may be tracked, read and set, and that the bits come back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.errors import ScriptError
from holdfast.state.plain_values import TrackedValues, forget_values, mark_of_values, with_values_held
from holdfast.state.tracked import Tracked


def made(local: dict[str, Any] | None = None, **objects: Any) -> tuple[TrackedValues, Tracked]:
    """What `job.track_local(**local)` and `job.track(**objects)` make."""
    values, tracked = TrackedValues(), Tracked()
    for name, thing in with_values_held(local or {}, values).items():
        tracked.add(name, thing, is_local=True)
    for name, thing in with_values_held(objects, values).items():
        tracked.add(name, thing)
    return values, tracked


@pytest.mark.parametrize("value", [0.1, math.inf, -0.0, math.nan, 2**80, -3, True, None, "wörd", ""], ids=repr)
def test_a_value_comes_back_with_its_bits_and_its_type(value: Any) -> None:
    values, tracked = made(best=value, model=torch.nn.Linear(2, 2))
    state = tracked.state()
    values.best = 7
    tracked.load(state)
    assert repr(values.best) == repr(value) and type(values.best) is type(value)


def test_a_repeated_step_finds_what_was_there_at_its_start() -> None:
    values, tracked = made(best=math.inf, seen=0)
    at_start = tracked.volatile()
    for _ in range(2):
        values.best, values.seen = 0.25, values.seen + 1
        tracked.restore_volatile(at_start)
        assert (values.best, values.seen) == (math.inf, 0)


@pytest.mark.parametrize("number", [torch.tensor(0.5), torch.tensor([0.5]), np.float64(0.5), np.array(0.5)], ids=repr)
def test_the_number_in_a_tensor_or_an_array_is_taken_out(number: Any) -> None:
    values, _ = made(best=math.inf)
    values.best = number
    assert values.best == 0.5 and type(values.best) is float


@pytest.mark.parametrize("thing", [torch.zeros(2), [1, 2], {"a": 1}, b"bytes", print], ids=["tensor", *"ldbf"])
def test_anything_else_is_refused_with_what_to_do(thing: Any) -> None:
    values, _ = made(best=math.inf)
    with pytest.raises(ScriptError, match=r"job.values.best is set to a \w+: a value is a number, a word or None; .*"):
        values.best = thing
    assert values.best == math.inf


def test_a_name_that_is_not_tracked_is_named_with_those_that_are() -> None:
    values, _ = made(best=0.0, seen=1)
    with pytest.raises(
        AttributeError, match=r"no value bets is tracked \(there are best, seen\): name it in job.track"
    ):
        _ = values.bets
    with pytest.raises(ScriptError, match=r"job.values.bets is set and not tracked \(there are best, seen\): name it"):
        values.bets = 1
    assert dir(values) == ["best", "seen"] and repr(values) == "TrackedValues(best=0.0, seen=1)"


def test_forgotten_values_are_there_no_more() -> None:
    values, _ = made(best=0.0)
    forget_values(values)
    assert not hasattr(values, "best") and dir(values) == []


def test_the_mark_tells_shared_values_apart_to_the_bit_and_leaves_those_of_each_rank_out() -> None:
    def mark(best: Any, own: float = 0.0) -> int:
        return mark_of_values(made({"own": own}, best=best)[1])

    assert mark(0.1) == mark(0.1, own=5.0)
    assert len({mark(value) for value in (0.1, math.nextafter(0.1, 1), 0.0, -0.0, 0, False, None, "0")}) == 8
