"""NVIDIA's GPUs. Their counters are read through nvidia-smi, which is there wherever the driver is; the XIDs that the
driver writes into the kernel's log, through dmesg where that may be read.

Not run on a GPU by this project's tests, which have none: the parsers are, on what the tools print.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

from holdfast.checks.accelerators.base import DeviceProblem, FaultRule, tool_output
from holdfast.checks.accelerators.generic import TorchAccelerator

FIELDS = (
    "index",
    "ecc.errors.uncorrected.volatile.total",
    "remapped_rows.pending",
    "remapped_rows.failure",
    "retired_pages.pending",
    "pcie.link.width.current",
    "pcie.link.width.max",
)
QUERY = ("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
KERNEL_LOG = ("dmesg", "--level=emerg,alert,crit,err,warn")
XID = re.compile(r"(?m)^\[ *(?P<at_s>\d+\.\d+)\].* NVRM: Xid \(PCI:(?P<bus>[0-9A-Fa-f:.]+)\): (?P<number>\d+)")
XIDS_AGE_MAX_S = 3_600.0
"""The log goes back to the machine's start, and what was repaired since is in it too."""

# Those after which the driver's documentation asks for a reset of the GPU, a restart of the node or a repair. Others
# are mostly an application's own (13, 31, 43, 45), or a repair that the GPU made itself (63).
HARDWARE_XIDS = {
    48: "a double-bit memory error",
    62: "the micro-controller halted",
    64: "a memory page or row could not be retired",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    92: "a high rate of single-bit memory errors",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "the GPU's system processor does not answer",
    120: "the GPU's system processor failed",
    140: "an unrecovered memory error",
    143: "the GPU could not be initialised",
}


class Cuda(TorchAccelerator):
    """NVIDIA's GPUs."""

    name = "cuda"
    backend = "nccl"
    communicator = "holdfast.worker.collectives.communicators:Nccl"
    faults = (
        FaultRule(fault="gpu-inforom-corrupted", code=14),
        FaultRule(fault="gpu-inforom-corrupted", text=r"infoROM is corrupted"),
        FaultRule(fault="gpu-unknown-device", code=128),
        FaultRule(fault="gpu-driver-error", code=201),
        FaultRule(fault="gpu-residual-processes", code=202),
        FaultRule(fault="gpu-lost", text=r"GPU is lost|fallen off the bus|Xid .*: 79\b"),
        FaultRule(fault="gpu-memory-error", text=r"uncorrectable ECC error|Xid .*: (48|64|92|94|95|140)\b"),
        FaultRule(fault="gpu-driver-error", text=r"CUDA driver (version|initialization) |Xid .*: (62|119|120|143)\b"),
        FaultRule(fault="gpu-driver-error", text=r"CUDA error: system (not yet initialized|has unsupported display)"),
        FaultRule(fault="gpu-residual-processes", text=r"device(s|\(s\))? is/are busy or unavailable"),
        FaultRule(fault="gpu-link-error", text=r"NVLink error|Xid .*: 74\b"),
        FaultRule(fault="gpu-driver-error", text=r"CUDA error: unknown error"),
        # What scripts and kernels do wrong on a device that is well, most often.
        FaultRule(fault="device-not-found", text=r"CUDA error: (invalid device ordinal|no CUDA-capable device)"),
        FaultRule(fault="device-assertion", text=r"device-side assert"),
        FaultRule(fault="gpu-launch-failure", text=r"CUDA error: (unspecified launch failure|hardware stack error)"),
        FaultRule(fault="gpu-launch-failure", text=r"illegal (memory access|instruction|address)|misaligned address"),
        FaultRule(fault="gpu-launch-failure", text=r"the launch timed out and was terminated"),
        FaultRule(fault="gpu-launch-failure", text=r"(CUBLAS|CUDNN|CUSPARSE|CUSOLVER)_STATUS_(EXECUTION|INTERNAL)"),
        FaultRule(fault="gpu-launch-failure", text=r"unhandled cuda error"),
        FaultRule(fault="network-device-error", text=r"NCCL WARN .*(ibv_|IB ).*(error|failed)|Got completion .* error"),
    )

    def is_present(self) -> bool:
        """Return whether the driver has device files."""
        return has_device_files()

    def is_available(self) -> bool:
        """Return whether the driver has device files: a device that exists and cannot be used must be found by the
        check, not skipped."""
        import torch

        is_built = bool(torch.backends.cuda.is_built())  # type: ignore[no-untyped-call]
        return is_built and (has_device_files() or torch.cuda.is_available())

    def ailments(self) -> list[DeviceProblem]:
        """Return what nvidia-smi and the kernel's log report."""
        counters = tool_output(QUERY)
        if counters is None:
            silent = has_device_files()
            return [DeviceProblem(fault="gpu-driver-error", text="nvidia-smi does not answer")] if silent else []
        return [*parse_counters(counters), *parse_xids(tool_output(KERNEL_LOG) or "", time.monotonic())]


def has_device_files() -> bool:
    """Return whether the driver knows a GPU."""
    return any(path.name.removeprefix("nvidia").isdigit() for path in Path("/dev").glob("nvidia*"))


def parse_counters(text: str) -> list[DeviceProblem]:
    """Return the problems in QUERY's output. A counter that a GPU does not have reads `[N/A]` or the like, and is
    ignored."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(FIELDS) or not cells[0].isdigit():
            continue
        row = dict(zip(FIELDS, cells, strict=True))
        found += _of_gpu(int(cells[0]), row)
    return found


def _of_gpu(index: int, row: dict[str, str]) -> list[DeviceProblem]:
    found = []
    errors = _number(row["ecc.errors.uncorrected.volatile.total"])
    if errors:
        found.append(
            DeviceProblem(fault="gpu-memory-error", text=f"{errors} uncorrectable memory errors", device=index)
        )
    if _says_yes(row["remapped_rows.failure"]):
        found.append(DeviceProblem(fault="gpu-memory-error", text="rows of memory could not be remapped", device=index))
    if _says_yes(row["remapped_rows.pending"]) or _says_yes(row["retired_pages.pending"]):
        text = "memory waits for a reset of the GPU to be retired"
        found.append(DeviceProblem(fault="gpu-memory-error", text=text, device=index))
    width, width_max = _number(row["pcie.link.width.current"]), _number(row["pcie.link.width.max"])
    if 0 < width < width_max:
        text = f"its PCIe link has {width} of {width_max} lanes"
        found.append(DeviceProblem(fault="gpu-link-error", text=text, device=index))
    return found


def parse_xids(text: str, now_s: float) -> list[DeviceProblem]:
    """Return the recent Xid errors in the kernel's log, whose times are seconds since the start, as is `now_s`: each
    kind once per GPU, which is named by its bus."""
    found: dict[tuple[str, int], DeviceProblem] = {}
    for match in XID.finditer(text):
        number, is_recent = int(match["number"]), float(match["at_s"]) > now_s - XIDS_AGE_MAX_S
        if number in HARDWARE_XIDS and is_recent:
            what = f"Xid {number} on {match['bus']}: {HARDWARE_XIDS[number]}"
            found[(match["bus"], number)] = DeviceProblem(fault=_fault_of(number), text=what)
    return list(found.values())


def _fault_of(xid: int) -> str:
    names = {79: "gpu-lost", 74: "gpu-link-error", 62: "gpu-driver-error", 119: "gpu-driver-error"}
    return names.get(xid, "gpu-driver-error" if xid in (120, 143) else "gpu-memory-error")


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _says_yes(text: str) -> bool:
    return text.casefold() == "yes" or _number(text) > 0
