"""Texts of CUDA, cuBLAS, cuDNN, NCCL and Ascend: which of them end a process, and which only mean a lost peer."""

from __future__ import annotations

import pytest

from holdfast.checks.accelerators.cuda import Cuda
from holdfast.core.faults.device_errors import is_device_error
from holdfast.core.faults.failures import Exited, Failure, is_collateral
from holdfast.core.faults.fault_table import BUILT_IN, typed, with_accelerator
from holdfast.core.faults.fault_types import Blame

NCCL = "NCCL error in: NCCLUtils.cpp:77, "

STICKY = [
    ("DistBackendError", NCCL + "unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5"),
    ("DistBackendError", NCCL + "... Cuda failure 700 'an illegal memory access was encountered'"),
    ("DistBackendError", NCCL + "... Cuda failure 'uncorrectable ECC error encountered'"),
    ("DistBackendError", "Process group watchdog thread terminated with exception: CUDA error: unknown error"),
    ("torch.AcceleratorError", "whatever it says"),
    ("RuntimeError", "CUDA error: an illegal memory access was encountered"),
    ("RuntimeError", "CUDA error: uncorrectable NVLink error detected during the execution"),
    ("RuntimeError", "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"),
    ("RuntimeError", "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    ("RuntimeError", "CUDA driver error: device not ready"),
    ("RuntimeError", "HIP error: an illegal memory access was encountered"),
    ("RuntimeError", "The Inner error is reported: [Error]: The aicore execution is abnormal. EZ9999 aicore exception"),
    ("RuntimeError", "ACL stream synchronize failed, error code:507015"),
    ("RuntimeError", "UCE ERROR: memory of the device cannot be corrected"),
    ("RuntimeError", "HBM has a multi-bit ECC error"),
    ("holdfast.errors.DeviceError", "communicators of a view that is over cannot be freed"),
]
LOST_PEER = [
    ("DistBackendError", NCCL + "remote process exited or there was a network error, NCCL version 2.27.5"),
    ("DistBackendError", "ncclRemoteError: A call failed possibly due to a network error"),
    ("DistBackendError", "ncclSystemError: System call (e.g. socket, malloc) or external library call failed"),
    ("DistBackendError", "ncclInProgress: the communicator was aborted while it was connecting"),
    ("RuntimeError", "[Rank 1] NCCL communicator was aborted on rank 1."),
    ("RuntimeError", "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4) ran for 600000 ms"),
    ("RuntimeError", "FORCE STOP"),
    ("RuntimeError", "HCCL function error: EI0006 socket build timeout"),
    ("ValueError", "loss is nan"),
    ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB"),
]


@pytest.mark.parametrize(("exception", "text"), STICKY)
def test_errors_after_which_a_process_cannot_use_its_device(exception: str, text: str) -> None:
    assert is_device_error(exception, text)


@pytest.mark.parametrize(("exception", "text"), LOST_PEER)
def test_errors_that_leave_the_device_as_it_was(exception: str, text: str) -> None:
    assert not is_device_error(exception, text)


def failure(exception: str, message: str) -> Failure:
    return Failure(
        node_id="a",
        view=1,
        rank=0,
        local_rank=0,
        pid=1,
        end=Exited(1),
        failed_at=0.0,
        exception=exception,
        message=message,
    )


@pytest.mark.parametrize(("exception", "text"), STICKY)
def test_an_error_of_the_device_is_never_collateral(exception: str, text: str) -> None:
    assert not is_collateral(failure(exception, text))


TABLE = with_accelerator(BUILT_IN, Cuda.faults)


@pytest.mark.parametrize(
    ("text", "fault", "blame"),
    [
        ("CUDA error: an illegal memory access was encountered", "gpu-launch-failure", Blame.PROCESS),
        ("CUDA error: misaligned address", "gpu-launch-failure", Blame.PROCESS),
        ("CUDA error: the launch timed out and was terminated", "gpu-launch-failure", Blame.PROCESS),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling", "gpu-launch-failure", Blame.PROCESS),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "gpu-launch-failure", Blame.PROCESS),
        (NCCL + "unhandled cuda error (run with NCCL_DEBUG=INFO)", "gpu-launch-failure", Blame.PROCESS),
        ("CUDA error: device-side assert triggered", "device-assertion", Blame.USER_CODE),
        ("CUDA error: system not yet initialized", "gpu-driver-error", Blame.NODE),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", "gpu-residual-processes", Blame.PLATFORM),
        (NCCL + "Cuda failure 'uncorrectable ECC error encountered'", "gpu-memory-error", Blame.NODE),
    ],
)
def test_what_is_made_of_a_cuda_text(text: str, fault: str, blame: Blame) -> None:
    for exception in ("RuntimeError", "torch.AcceleratorError", "torch.distributed.DistBackendError"):
        found = typed(failure(exception, text), TABLE).fault
        assert found is not None and (found.name, found.blame) == (fault, blame)


def test_a_device_that_did_not_come_to_rest_is_the_processs_and_its_node_is_examined() -> None:
    found = typed(failure("holdfast.errors.DeviceError", "DeviceError: cannot be freed")).fault
    assert found is not None and (found.name, found.blame, found.examine) == ("device-stuck", Blame.PROCESS, True)
