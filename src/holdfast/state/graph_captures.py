"""What a thread may ask of a CUDA device while another one captures a graph.

A script's capture (`with torch.cuda.graph(...)`) forbids every thread of its process to query an event: the query
fails, and the capture with it. Threads of ours query events, while a copy of the state comes from the device or the
host stands still, and a script does not know of them. The driver has a mode for each thread in which it is not
concerned by the captures of others. torch's own watchdog uses it, in C++ (c10/cuda/CUDAGraphsC10Utils.h); Python has no
name for it.

Not run on a GPU by this project's tests, which have none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

DRIVER = "libcuda.so.1"
THREAD_LOCAL = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL of CUDA's driver."""


@contextmanager
def captures_of_others_ignored() -> Iterator[None]:
    """Let this thread query events in this context, whatever other threads capture. Does nothing where CUDA is not in
    use."""
    exchange = _exchange()
    mode = ctypes.c_int(THREAD_LOCAL)
    if exchange is not None:
        exchange(ctypes.byref(mode))  # writes the mode that it was
    try:
        yield
    finally:
        if exchange is not None:
            exchange(ctypes.byref(mode))


def _exchange() -> Any:
    if torch.version.cuda is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    try:
        return ctypes.CDLL(DRIVER).cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # as it was before CUDA 10.1: queries are what every thread's are
        return None
