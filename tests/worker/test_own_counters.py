"""What an aborted attempt leaves behind in numbers and lists of the script's own is named, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.worker.own_counters import OwnCounters

total = 0
last = 0.0
seen: list[int] = []


class Trainer:
    """A script's own object."""

    def __init__(self) -> None:
        self.updates, self.loss, self.losses = 0, 0.0, [1.0]

    def step(self) -> None:
        self.updates += 1
        self.loss = self.losses[-1] / 2
        self.losses.append(self.loss)

    def look(self) -> None:
        self.loss = 3.0


def of_function(counters: OwnCounters) -> list[str]:
    calls, best, rate = 0, 9.0, 0.1
    history: list[float] = []
    fresh: list[float] = []
    counters.begin()
    calls += 1
    best = min(best, 3.0)
    rate = 0.2
    history.append(rate)
    fresh = [rate, best]
    found = counters.changed()
    assert fresh and calls
    return found


def of_module(counters: OwnCounters) -> list[str]:
    global total, last
    counters.begin()
    total += 1
    last = 2.0 * total
    seen.append(total)
    return counters.changed()


def of_object(counters: OwnCounters, thing: Trainer, use: Callable[[Trainer], None]) -> list[str]:
    counters.begin()
    use(thing)
    return counters.changed()


def made(*known: Any) -> OwnCounters:
    return OwnCounters(lambda thing: any(thing is one for one in known))


def test_variables_that_follow_from_what_they_were_are_named() -> None:
    assert {"calls", "best", "history"} <= set(found := of_function(made())) and "rate" not in found, found


def test_numbers_of_a_module_are_named_and_what_only_takes_new_values_is_not() -> None:
    found = of_module(made())
    assert {"total", "seen"} <= set(found) and "last" not in found, found


@pytest.mark.parametrize(
    ("use", "expected"),
    [(Trainer.step, ["updates of a Trainer", "losses of a Trainer"]), (Trainer.look, [])],
    ids=["counts", "looks"],
)
def test_attributes_of_the_scripts_objects(use: Callable[[Trainer], None], expected: list[str]) -> None:
    thing = Trainer()
    assert of_object(made(), thing, use) == expected


def test_a_tensor_in_a_tracked_module_is_named_and_a_number_is_not() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean: torch.Tensor | None = None
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = x if self.mean is None else self.mean * 0.9 + x
            self.calls += 1
            return x

    thing = Average()
    counters = made(thing)
    counters.begin()
    thing(torch.ones(2))
    assert counters.changed() == ["mean of a Average"]


def test_what_is_tracked_is_left_out() -> None:
    thing = Trainer()
    assert of_object(made(thing), thing, Trainer.step) == []


def test_a_list_that_another_takes_the_place_of_is_left_out() -> None:
    counters = made()
    kept = [1]
    counters.begin()
    kept_before = kept
    kept = [1]
    assert "kept" not in counters.changed() and kept_before == kept
