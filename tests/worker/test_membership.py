"""Which errors of a step are held, so that the step is repeated in the same process, and which end it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast.errors import DeviceError, RetryableError, UsageError, ViewOverError
from holdfast.worker.collectives import groups
from holdfast.worker.collectives.elastic_group import state
from holdfast.worker.collectives.view_connections import ViewConnections
from holdfast.worker.membership import Membership

NCCL = "NCCL error in: NCCLUtils.cpp:77, "


@pytest.fixture(params=["live", "over"])
def view(request: pytest.FixtureRequest) -> Iterator[str]:
    connections = ViewConnections(1, None, 0, 2)
    state.connections = connections
    if request.param == "over":
        connections.end("a peer died")
    yield request.param
    state.connections = None


def membership(*, runs_on_device: bool) -> Membership:
    nothing: Any = None
    made = Membership(nothing, nothing, None, timedelta(seconds=1), is_newcomer=False)
    made.runs_on_device = runs_on_device
    return made


def raised_while_handling(first: BaseException, second: BaseException) -> BaseException:
    try:
        try:
            raise first
        except type(first):
            raise second from None
    except type(second) as error:
        return error


NEVER = [
    dist.DistBackendError(NCCL + "unhandled cuda error, Cuda failure 700 'an illegal memory access was encountered'"),
    dist.DistBackendError("NCCL error ... Cuda failure 'uncorrectable ECC error encountered'"),
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."),
    RuntimeError("Xid 63"),
    RuntimeError("ACL stream synchronize failed, error code:507015"),
    torch.OutOfMemoryError("CUDA out of memory"),
    DeviceError("the device did not come to rest"),
    UsageError("not tracked"),
    raised_while_handling(RuntimeError("CUDA error: misaligned address"), ViewOverError("over")),
    raised_while_handling(RuntimeError("CUDA error: misaligned address"), RetryableError("again")),
]
ALWAYS = [
    dist.DistBackendError(NCCL + "remote process exited or there was a network error"),
    RuntimeError("NCCL communicator was aborted on rank 1."),
    RuntimeError("FORCE STOP"),
    RetryableError("again"),
    ConnectionResetError(),
    ViewOverError("over"),
]
OWN = [ValueError("loss is nan"), FloatingPointError("nan"), AssertionError(), KeyError("x")]


@pytest.mark.parametrize("error", NEVER, ids=str)
@pytest.mark.parametrize("runs_on_device", [False, True])
def test_never_held(view: str, error: BaseException, runs_on_device: bool) -> None:
    assert not membership(runs_on_device=runs_on_device).can_hold(error)


@pytest.mark.parametrize("error", ALWAYS, ids=repr)
def test_always_held(view: str, error: BaseException) -> None:
    assert membership(runs_on_device=False).can_hold(error)


@pytest.mark.parametrize("error", OWN, ids=repr)
def test_a_scripts_own_error_is_excused_on_a_device_whose_view_is_over(view: str, error: BaseException) -> None:
    """An abort leaves partial sums, from which the host may read a loss that is not a number."""
    assert membership(runs_on_device=True).can_hold(error) is (view == "over")


@pytest.mark.parametrize("error", OWN, ids=repr)
def test_on_the_cpu_it_is_evidence_against_the_script(view: str, error: BaseException) -> None:
    assert not membership(runs_on_device=False).can_hold(error)


def test_what_a_handler_raises_counts_as_what_it_handled_if_the_view_is_over(view: str) -> None:
    error = raised_while_handling(ViewOverError("over"), ValueError("the step failed"))
    assert membership(runs_on_device=False).can_hold(error) is (view == "over")
    assert groups.is_communication_error(error) is (view == "over")
