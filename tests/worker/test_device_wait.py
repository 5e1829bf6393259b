"""Waiting for a device that runs behind its host: what ends the wait, and where there is none."""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from holdfast import torch_compat
from holdfast.checks.accelerators.base import Accelerator, DeviceCounters
from holdfast.checks.accelerators.cpu import Cpu
from holdfast.checks.accelerators.cuda import Cuda
from holdfast.checks.accelerators.npu import Npu
from holdfast.errors import DeviceError, ViewOverError
from holdfast.state.tracked import Tracked
from holdfast.wire.progress_page import ProgressPage
from holdfast.worker import device_wait
from holdfast.worker.collectives import groups
from holdfast.worker.collectives.view_connections import ViewConnections
from holdfast.worker.device_wait import DeviceFence, fence_of
from holdfast.worker.membership import Membership
from holdfast.worker.parallel.models import gathering_devices
from holdfast.worker.resume_point import RankStatus
from holdfast.worker.worker_state import WorkerState


class After:
    """Done when it was asked so often; raises if there is something to raise."""

    def __init__(self, looks: int, error: Exception | None = None) -> None:
        self.looks, self.error = looks, error

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        self.looks -= 1
        return self.looks < 0


class Fake(Accelerator):
    name = "fake"

    def __init__(self, looks: int = 0, error: Exception | None = None) -> None:
        self._looks, self._error = looks, error

    def record(self, index: int) -> DeviceCounters:
        return After(self._looks, self._error)


NEVER = 10**9


def nothing() -> None:
    return None


def test_it_returns_once_all_devices_are_done() -> None:
    checks: list[int] = []
    DeviceFence([(Fake(3), 0), (Fake(2), 1)]).wait(lambda: checks.append(1), 60.0)
    assert len(checks) == 5, "between two looks it is asked whether the view is over"


def test_a_view_that_is_over_ends_the_wait_for_a_device_that_never_comes_to_rest() -> None:
    began_at = time.monotonic()

    def check() -> None:
        if time.monotonic() - began_at > 0.1:
            raise ViewOverError("a peer died")

    with pytest.raises(ViewOverError):
        DeviceFence([(Fake(NEVER), 0)]).wait(check, 60.0)


def test_the_wait_has_a_deadline() -> None:
    with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
        DeviceFence([(Fake(NEVER), 0)]).wait(nothing, 0.05)


@pytest.mark.parametrize("fake", [Fake(NEVER), Fake(error=RuntimeError("CUDA error: misaligned address"))])
def test_a_device_that_does_not_come_to_rest_after_an_abort_ends_the_process(fake: Fake) -> None:
    with pytest.raises(DeviceError, match="did not come to rest"):
        DeviceFence([(fake, 0)]).settle(0.05)


def test_on_the_cpu_there_is_nothing_to_wait_for() -> None:
    assert fence_of([torch.device("cpu")]) is None
    assert not Cpu.runs_behind_host


def test_every_other_processor_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Cuda.runs_behind_host and Npu.runs_behind_host and Accelerator.runs_behind_host
    monkeypatch.setattr(device_wait, "_behind_host", lambda kind: Fake() if kind == "cuda" else None)
    fence = fence_of([torch.device("cpu"), torch.device("cuda", 1), torch.device("cuda:1")])
    assert fence is not None and [index for _, index in fence._devices] == [1]


class Broken:
    """A communicator whose own threads have seen an error that no collective has raised."""

    def __init__(self, text: str) -> None:
        self._text = text

    def error_of(self, inner: Any) -> str:
        return self._text


def test_communicators_are_asked_for_errors_that_no_collective_has_raised() -> None:
    made: Any = [(SimpleNamespace(), None), (Broken(""), None)]
    connections = ViewConnections(1, None, 0, 2)
    connections._made = made
    connections.check_communicators()
    broken: Any = Broken("NCCL communicator failed: REMOTE_ERROR")
    connections._made = [*made, (broken, None)]
    with pytest.raises(torch.distributed.DistBackendError, match="REMOTE_ERROR"):
        connections.check_communicators()


def test_who_agrees_has_waited_for_its_device_and_asked_its_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    worker_state = WorkerState(Tracked(), ProgressPage.private(), None)
    worker_state._fence = cast(DeviceFence, SimpleNamespace(wait=lambda check, timeout_s: order.append("device")))
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(groups, "check_communicators", lambda: order.append("communicators"))
    worker_state.wait_for_device(1.0)
    assert order == ["device", "communicators"]
    worker_state._fence = None
    worker_state.wait_for_device(1.0)
    assert len(order) == 2, "where nothing runs on a device nothing is asked"


def test_a_view_is_joined_once_the_device_is_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the old view's kernels still write is undone in the next one."""
    order: list[str] = []
    asked: Any = SimpleNamespace(newest_view=0)
    groups_there: Any = SimpleNamespace(
        switch=lambda *_, **__: order.append("switched"), gather=lambda values: [list(values)]
    )
    to_join: Any = SimpleNamespace(view=2, rank=0, world_size=1, applied_step=-1)
    member = Membership(
        asked,
        ProgressPage.private(),
        to_join,
        timedelta(seconds=1),
        is_newcomer=False,
        collectives=groups_there,
        connect_to=lambda *_: dist.HashStore(),
    )
    member.settle_device = lambda: order.append("at rest")
    member._join(RankStatus(1, 0, -1, 0, 0, 0, 0))
    assert order == ["at rest", "switched"]


def test_a_model_that_is_offloaded_is_waited_for_where_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 with CPUOffloadPolicy: all parameters are the CPU's."""
    model = torch.nn.Linear(2, 2)
    assert gathering_devices([model]) == set()
    computed: Any = [SimpleNamespace(_device=torch.device("cuda", 1))]
    monkeypatch.setattr(torch_compat, "fsdp_states", lambda model: iter(computed))
    assert gathering_devices([model]) == {torch.device("cuda", 1)}
