"""What strangers may cost: lines in the log, and places."""

import logging
from typing import Any

import pytest

from holdfast.wire import strangers
from holdfast.wire.strangers import StrangerLog, UnprovedConnections, printable


class Clock:
    now = 0.0

    def __call__(self) -> Any:
        return self.now


@pytest.fixture
def clock() -> Any:
    return Clock()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, logger="holdfast")
    return lambda: [(vars(record)["holdfast_event"], record.getMessage()) for record in caplog.records]


def test_a_strangers_text_is_cut_and_stays_on_one_line() -> None:
    assert printable("plain words") == "plain words"
    found = printable("first\nsecond\x1b[31m" + "A" * 500)
    assert len(found) == 200 and found.isprintable() and found.endswith("...")


def test_an_address_has_one_line_a_minute_with_a_count(clock: Any, lines: Any) -> None:
    log = StrangerLog("control", clock)
    for port in range(1_000):
        log.turned_away(f"10.0.0.1:{port}", "noise")
    log.turned_away("10.0.0.2:1", "other noise")
    assert [key for key, _ in lines()] == ["stranger-refused"] * 2
    assert "turned 10.0.0.1:0 away: noise" in lines()[0][1]
    clock.now = 61.0
    log.turned_away("10.0.0.1:9", "noise again")
    assert [key for key, _ in lines()[2:]] == ["strangers-refused", "stranger-refused"]
    assert "turned 999 more connections from 10.0.0.1 away" in lines()[2][1]


def test_all_addresses_together_have_a_cap(clock: Any, lines: Any) -> None:
    log = StrangerLog("control", clock)
    for number in range(10_000):
        log.turned_away(f"10.{number // 65_536}.{number // 256 % 256}.{number % 256}:7", "x" * 10_000)
    assert len(lines()) == strangers.LINES_MAX + 1, "one for the addresses beyond the cap"
    assert sum(len(text) for _, text in lines()) < 50_000
    log.close()
    assert "from other addresses away" in lines()[-1][1]


def test_unproved_connections_are_counted_in_all_and_by_address() -> None:
    unproved = UnprovedConnections(total_max=3, address_max=2)
    assert [unproved.enter("a"), unproved.enter("a"), unproved.enter("a")] == [True, True, False]
    assert unproved.enter("b") and unproved.is_full and not unproved.enter("c")
    unproved.leave("a")
    assert unproved.enter("c") and unproved.is_full
