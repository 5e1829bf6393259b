"""What to keep: a table, pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as some

from holdfast.errors import UsageError
from holdfast.storage.retention import AnyOf, BestBy, EveryK, LastN, Policy, Tagged, parse_policy


@dataclass(frozen=True)
class Candidate:
    step: int
    tags: tuple[str, ...] = ()
    metrics: dict[str, float | None] = field(default_factory=dict)


CANDIDATES = [
    Candidate(500, metrics={"loss": 3.0}),
    Candidate(400, metrics={"loss": 1.0}, tags=("best",)),
    Candidate(300, metrics={"loss": 2.0, "accuracy": 0.9}),
    Candidate(200, metrics={"loss": None}),
    Candidate(100, metrics={"loss": 1.0}),
    Candidate(0),
]


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (LastN(2), {500, 400}),
        (LastN(100), {500, 400, 300, 200, 100, 0}),
        (EveryK(200), {400, 200, 0}),
        (BestBy("loss"), {400}),
        (BestBy("loss", "min", 2), {400, 100}),
        (BestBy("loss", "max", 2), {500, 300}),
        (BestBy("accuracy", "max", 5), {300}),
        (BestBy("unknown"), set()),
        (Tagged(), {400}),
        (LastN(1) | EveryK(300), {500, 300, 0}),
        (LastN(1) | EveryK(300) | Tagged(), {500, 400, 300, 0}),
    ],
)
def test_a_policy_keeps(policy: Policy, kept: set[int]) -> None:
    assert set(policy.keeps(CANDIDATES)) == kept


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("last:3", LastN(3)),
        ("every:1000", EveryK(1000)),
        ("best:loss:max", BestBy("loss", "max", 1)),
        (" last:3, best:loss:min:2,tagged", AnyOf((LastN(3), BestBy("loss", "min", 2), Tagged()))),
    ],
)
def test_a_policy_is_written_as_text(text: str, policy: Policy) -> None:
    assert parse_policy(text) == policy
    assert parse_policy(str(policy)) == policy


@pytest.mark.parametrize(
    "text", ["", ",", "last", "last:0", "last:-1", "last:x", "last:²", "best:loss", "best::min", "x:1"]
)
def test_other_texts_are_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(UsageError):
        parse_policy(text)


policies = some.one_of(
    some.builds(LastN, some.integers(1, 9)),
    some.builds(EveryK, some.integers(1, 9)),
    some.builds(BestBy, some.just("loss"), some.sampled_from(["min", "max"]), some.integers(1, 4)),
    some.just(Tagged()),
)


@given(some.lists(policies, min_size=1, max_size=4), some.sets(some.integers(0, 50), max_size=12))
def test_together_they_keep_what_each_of_them_keeps(parts: list[Policy], steps: set[int]) -> None:
    candidates = [Candidate(step, metrics={"loss": float(step % 7)}) for step in sorted(steps, reverse=True)]
    together = parts[0]
    for policy in parts[1:]:
        together = together | policy
    assert set(together.keeps(candidates)) == set().union(*(policy.keeps(candidates) for policy in parts))
    assert parse_policy(str(together)).keeps(candidates) == together.keeps(candidates)
