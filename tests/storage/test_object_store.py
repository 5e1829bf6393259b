"""Trying again, with a clock of our own."""

from __future__ import annotations

import errno
import fcntl
import logging
from pathlib import Path

import pytest

from holdfast.errors import CheckpointError, OutageError, StorageError
from holdfast.storage.object_store import PAUSE_MAX_S, retry
from support.saves import saved


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        self.now += pause_s


class Work:
    def __init__(self, failures: int, error: Exception | None = None) -> None:
        self.failures = failures
        self.error = error or OutageError("s3://b/x cannot be written: away")

    def __call__(self) -> str:
        self.failures -= 1
        if self.failures >= 0:
            raise self.error
        return "done"


def test_pauses_grow_up_to_a_bound() -> None:
    clock = Clock()
    assert retry(Work(30), 10_000.0, clock, clock.sleep) == "done"
    assert all(later > earlier / 2 for earlier, later in zip(clock.pauses, clock.pauses[1:], strict=False))
    assert clock.pauses[0] <= 0.2 < max(clock.pauses) <= PAUSE_MAX_S


def test_the_deadline_is_for_all_tries_together() -> None:
    clock = Clock()
    with pytest.raises(StorageError, match=r"away \(given up after \d+ tries in 60 s\)"):
        retry(Work(10**9), 60.0, clock, clock.sleep)
    assert 30.0 < clock.now < 60.0


def test_what_is_no_outage_is_not_tried_again() -> None:
    clock = Clock()
    with pytest.raises(StorageError, match="credentials"):
        retry(Work(1, StorageError("wrong credentials")), 60.0, clock, clock.sleep)
    assert clock.pauses == []


def test_a_file_system_without_locks_is_read_with_a_warning_and_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    catalogue = saved(tmp_path, [1, 2])

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING):
        saved(tmp_path, [3])
        assert catalogue.latest(on_damage=pytest.fail) is not None
    assert "no locks" in caplog.text
    with pytest.raises(CheckpointError, match=r"no locks \(flock\)"):
        catalogue.remove(1)
    assert (tmp_path / "step-1").exists()
