"""A thread that queries events is not concerned by a CUDA graph that another one captures."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.state import copier
from holdfast.state.graph_captures import THREAD_LOCAL, captures_of_others_ignored

GLOBAL = 0
"""CUDA's default: the captures of all threads concern all."""


class Driver:
    """As much of CUDA's driver as is called: each thread has a mode, which is exchanged."""

    def __init__(self) -> None:
        self.mode = GLOBAL

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        mode._obj.value, self.mode = self.mode, mode._obj.value
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": made}.__getitem__)
    return made


def test_the_mode_is_put_back_whatever_happens(driver: Driver) -> None:
    with pytest.raises(ValueError), captures_of_others_ignored():
        assert driver.mode == THREAD_LOCAL
        raise ValueError
    assert driver.mode == GLOBAL


def test_the_arrival_of_a_copy_is_asked_for_in_it(driver: Driver) -> None:
    looks: list[int] = []

    def query() -> bool:
        looks.append(driver.mode)
        return len(looks) == 3

    arrival = object.__new__(copier.DeviceArrival)
    arrival._arrived = SimpleNamespace(query=query)  # type: ignore[assignment]
    arrival.synchronize()
    assert looks == [THREAD_LOCAL] * 3 and driver.mode == GLOBAL


def test_without_cuda_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail(name))
    with captures_of_others_ignored():
        pass
