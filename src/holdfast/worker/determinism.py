"""What "the same bits" needs on an accelerator.

On the CPU a repeated step computes the bits that it computed before. On a device that is so only with kernels that do
not depend on which thread is first, with algorithms that are not chosen by timing, and with collectives that sum in the
same order in every view: a communicator that is made again may choose another ring. None of these is torch's default,
because they cost speed. Without them a run that was repaired differs from one without faults in the last bits, as two
runs without faults do; nothing else depends on them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
FIXED_WORKSPACES = (":4096:8", ":16:8")
"""The values of CUBLAS_VARIABLE with which cuBLAS always chooses the same algorithm."""
COLLECTIVE_VARIABLES: dict[str, tuple[str, ...]] = {
    "cuda": ("NCCL_ALGO", "NCCL_PROTO"),
    "npu": ("HCCL_DETERMINISTIC",),
}
"""Variables that fix the order in which collectives sum, by kind of device, where this is known."""


def missing_for_same_bits(kind: str, environment: Mapping[str, str]) -> list[str]:
    """Return what is to be set so that a repeated step has the same bits on this kind of device, in the words of a
    script or a shell; nothing if all of it is set."""
    missing = []
    if not torch.are_deterministic_algorithms_enabled():
        missing.append("torch.use_deterministic_algorithms(True)")
    if kind == "cuda":
        if environment.get(CUBLAS_VARIABLE) not in FIXED_WORKSPACES:
            missing.append(f"{CUBLAS_VARIABLE}={FIXED_WORKSPACES[0]}")
        if torch.backends.cudnn.benchmark:
            missing.append("torch.backends.cudnn.benchmark = False")
    missing += [f"{name}=…" for name in COLLECTIVE_VARIABLES.get(kind, ()) if name not in environment]
    return missing


def describe_missing(kind: str, environment: Mapping[str, str]) -> str:
    """Return a warning that names what is missing; empty if nothing is."""
    missing = missing_for_same_bits(kind, environment)
    if not missing:
        return ""
    return (
        f"on {kind} a repeated step repeats its samples and random numbers, but not every bit of its sums: for that set"
        f" {', '.join(missing)}. Without it the run is as reproducible as two runs without faults are"
    )
