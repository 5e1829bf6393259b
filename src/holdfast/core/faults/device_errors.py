"""Error texts after which a process cannot use its device any more, and those that only mean a broken connection. Pure.

A CUDA context with an error like 700 (illegal address), 214 (uncorrectable memory error) or 719 (launch failure) fails
every later call; so does an Ascend context after an AI-core exception. A process with such a context must end, however
the error is dressed: cuBLAS, cuDNN and NCCL report it in words and types of their own, and NCCL's in the same type as
a lost peer. So texts decide before types.

The first table wins over the second: "unhandled cuda error" comes as a `DistBackendError`, as does "remote process
exited". Sources: CUDA's `cudaGetErrorString`, torch's CUDAException.cpp, CUDABlas.cpp, NCCLUtils.cpp (torch 2.13), the
error codes of Ascend's runtime (`rt_error_codes.h`) and of torch_npu. None of these was provoked on a device here.
"""

from __future__ import annotations

import re

STICKY_TYPES = frozenset({"AcceleratorError", "DeviceError"})
"""torch's own for a device's errors since 2.8, and ours."""

STICKY_TEXTS: dict[str, tuple[str, ...]] = {
    "CUDA": (
        r"CUDA error\b",
        r"CUDA driver error\b",
        r"Cuda failure\b",
        r"cudaError[A-Z]",
        r"CUBLAS_STATUS_",
        r"CUDNN_STATUS_",
        r"cuDNN error\b",
        r"CUSPARSE_STATUS_",
        r"CUSOLVER_STATUS_",
        r"CUFFT_(INTERNAL_ERROR|EXEC_FAILED)",
        r"illegal memory access",
        r"misaligned address",
        r"device-side assert",
        r"unspecified launch failure",
        r"uncorrectable (NVLink |ECC )?error",
        r"GPU is lost|fallen off the bus",
        r"\bXid\b",
        r"HIP error\b",
    ),
    "NCCL": (
        r"unhandled cuda error",
        r"ncclUnhandledCudaError",
    ),
    "Ascend": (
        r"\b(507010|507011|507014|507015|507034|507035|507046|507053|507054|507057|507899|507901)\b",
        r"aicore (exception|timeout|trap)|AIC(ORE)? ERROR|AI ?Core (error|exception)",
        r"UCE ERROR",
        r"HBM.*(multi-?bit|uncorrectable) ECC",
        r"\bACL_ERROR_RT_\w*(AICORE|VECTOR_CORE|DEVICE_MEM|DEV_)\w*",
    ),
    "XPU": (r"UR_RESULT_ERROR_DEVICE_LOST|ZE_RESULT_ERROR_DEVICE_LOST",),
}
"""By vendor: regular expressions. "uncorrectable" alone is not one: a data loader's message may say it."""

_STICKY = re.compile("|".join(f"(?:{text})" for texts in STICKY_TEXTS.values() for text in texts))


def is_device_error(type_name: str, text: str) -> bool:
    """Return whether an exception of this type and text says that the process cannot use its device any more. Out of
    memory is not such an error."""
    return type_name.rpartition(".")[2] in STICKY_TYPES or _STICKY.search(text) is not None
