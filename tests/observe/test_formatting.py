"""Durations, moments, and texts that cannot disturb a terminal."""

from __future__ import annotations

import re

import pytest

from holdfast.observe.formatting import format_duration, format_time, printable


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-3, "0.0 s"),
        (0.44, "0.4 s"),
        (9.96, "10.0 s"),
        (12.9, "12 s"),
        (59.9, "59 s"),
        (60, "1 min 0 s"),
        (3_599, "59 min 59 s"),
        (3_600, "1 h 0 min"),
        (86_399, "23 h 59 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_a_duration_has_two_units_at_most(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words


def test_a_moment_has_milliseconds() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.250", format_time(1_760_000_000.25))


def test_what_a_terminal_would_obey_is_taken_out() -> None:
    assert printable("\x1b[31mred\x1b[0m\r\x07\x9b2J") == "�[31mred�[0m���2J"
    assert printable("two lines\n\tand a tab, naïve → ok") == "two lines\n\tand a tab, naïve → ok"
