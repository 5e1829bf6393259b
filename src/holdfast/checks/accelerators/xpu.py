"""Intel's GPUs, through torch.xpu and the tool xpu-smi. Not run on such a device by this project's tests."""

from __future__ import annotations

import re
from pathlib import Path

from holdfast.checks.accelerators.base import DeviceProblem, FaultRule, tool_output
from holdfast.checks.accelerators.generic import TorchAccelerator

TABLE = ("xpu-smi", "health", "-l")
DEVICE = re.compile(r"^\|\s*Device ID\s*\|\s*(?P<index>\d+)")
STATUS = re.compile(r"^\|\s*\d*\.?\s*(?P<what>[A-Z][\w ]+?)\s*\|\s*Status:\s*(?P<status>\w+)")
INTEL = "0x8086"
BAD = frozenset({"Warning", "Critical"})


class Xpu(TorchAccelerator):
    """Intel's GPUs."""

    name = "xpu"
    backend = "xccl"
    communicator = "holdfast.worker.collectives.communicators:Xccl"
    faults = (
        FaultRule(fault="gpu-driver-error", text=r"(UR|ZE)_RESULT_ERROR_(UNINITIALIZED|DEVICE_REQUIRES_RESET)"),
        FaultRule(fault="gpu-memory-error", text=r"uncorrectable .*memory error"),
        # The driver says so too when a kernel reads where nothing is, or memory runs out.
        FaultRule(fault="gpu-launch-failure", text=r"(UR|ZE)_RESULT_ERROR_DEVICE_LOST|GPU HANG"),
    )

    def is_present(self) -> bool:
        """Return whether the kernel names Intel as the maker of a display controller."""
        return any(_reads(path) == INTEL for path in Path("/sys/class/drm").glob("renderD*/device/vendor"))

    def ailments(self) -> list[DeviceProblem]:
        """Return what xpu-smi reports, where it is installed."""
        return parse_health(tool_output(TABLE) or "")


def _reads(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def parse_health(text: str) -> list[DeviceProblem]:
    """Return from the output of `xpu-smi health -l` whatever is not healthy, by device."""
    found, index = [], -1
    for line in text.splitlines():
        if device := DEVICE.match(line):
            index = int(device["index"])
        elif (row := STATUS.match(line)) and row["status"] in BAD:
            text_of_it = f"xpu-smi calls its {row['what'].lower()} {row['status'].lower()}"
            found.append(DeviceProblem(fault="gpu-unhealthy", text=text_of_it, device=index))
    return found
