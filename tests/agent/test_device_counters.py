"""What the devices' counters say, read when something has gone wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.agent.device_counters import Counters
from holdfast.checks.accelerators import cpu
from holdfast.core.events import WorkerFailed, WorkersStalled, WorkersStarted
from holdfast.core.faults.failures import Exited, Failure


def failed(view: int, exception: str = "ValueError") -> WorkerFailed:
    failure = Failure(
        node_id="a", view=view, rank=0, local_rank=0, pid=1, end=Exited(1), failed_at=0.0, exception=exception
    )
    return WorkerFailed(node_id="a", incarnation="1", view=view, failure=failure)


def test_counters_are_read_once_a_view_and_reported_only_if_something_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = tmp_path / "mc0" / "ue_count"
    count.parent.mkdir()
    count.write_text("0")
    monkeypatch.setattr(cpu, "ERROR_COUNTS", tmp_path)
    told: list[tuple[int, tuple[str, ...]]] = []
    counters = Counters("cpu", lambda *what: told.append(what))
    asyncio.run(counters.read(1))
    assert told == []
    count.write_text("2")
    asyncio.run(counters.read(1))
    assert told == []
    asyncio.run(counters.read(2))
    assert told == [(2, ("2 uncorrectable errors of memory controller mc0 (memory-uncorrectable)",))]
    count.write_text("no number")
    asyncio.run(counters.read(3))
    assert len(told) == 1, "a plug-in may raise anything"


def test_failures_and_stalls_are_reasons_and_echoes_are_not() -> None:
    counters = Counters("", lambda *what: None)
    assert counters.view_of(failed(3)) == 3
    assert (
        counters.view_of(WorkersStalled(node_id="a", incarnation="1", view=4, stalled_s=9.0, worker_progress=())) == 4
    )
    assert counters.view_of(failed(3, "ConnectionResetError")) == 0
    assert counters.view_of(WorkersStarted(node_id="a", incarnation="1", view=3, pids=(), logs=())) == 0
