"""What the members of a group do about a broken connection, from what all of them have reported."""

from __future__ import annotations

import pytest

from holdfast.core.environment_variables import RETRIES_VARIABLE
from holdfast.worker.collectives.collective_retries import RetryCounter, RetryReport, decide, retries_allowed


def report(begun: int = 5, first: int = 5, oldest: int = 0, **other: object) -> RetryReport:
    return RetryReport(begun=begun, first=first, oldest=oldest, **other)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reports", "first"),
    [
        ([report(), report()], 5),
        ([report(6, 5), report(6, 5)], 5),
        ([report(6, 6), report(6, 5)], 5),  # one has succeeded, and serves the other
        ([report(7, 7, oldest=4), report(4, 4, oldest=4)], 4),  # a broadcast's root is three ahead
        ([report(sent={"1": 3}), report(received={"0": 3})], 5),
    ],
)
def test_all_repeat_from_the_first_that_has_not_succeeded_everywhere(reports: list[RetryReport], first: int) -> None:
    decision = decide(reports, 1)
    assert (decision.first, decision.refusal) == (first, "")


@pytest.mark.parametrize(
    ("reports", "why"),
    [
        ([report(6, 6, oldest=6), report(6, 5)], "rank 0 of the group does not have the inputs of collective 5"),
        ([report(), report(in_a_row=1)], "broke again after 1 retries"),
        ([report(refusal="it hangs"), report()], "it hangs"),
        ([report(sent={"1": 3}), report(received={"0": 2})], "rank 0 has sent 3 times to rank 1, which got 2"),
        ([report(sent={"1": 1}), report()], "which got 0"),
    ],
)
def test_nothing_is_repeated_that_would_not_be_right(reports: list[RetryReport], why: str) -> None:
    assert why in decide(reports, 1).refusal


def test_a_retry_that_broke_is_made_again_as_often_as_is_allowed() -> None:
    assert decide([report(in_a_row=1)], 2).refusal == ""
    assert decide([report(in_a_row=2)], 2).refusal
    assert decide([report()], 0).refusal


def test_without_an_agent_there_are_no_retries() -> None:
    assert retries_allowed({}) == 0
    assert retries_allowed({RETRIES_VARIABLE: "3"}) == 3


def test_the_number_of_retries_is_shown() -> None:
    shown: list[int] = []
    counter = RetryCounter()
    counter.show = shown.append
    counter.add(2)
    counter.add(1)
    assert shown == [2, 3]
