"""Huawei's Ascend processors, through the package torch_npu and the tool npu-smi.

Not run on such a device by this project's tests, which have none: the parser is, on what the tool prints.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from holdfast.checks.accelerators.base import DeviceProblem, FaultRule, tool_output
from holdfast.checks.accelerators.generic import TorchAccelerator

TABLE = ("npu-smi", "info")
ROW = re.compile(r"^\|\s*(?P<index>\d+)\s+(?P<name>\S+)\s*\|\s*(?P<health>\w+)\s*\|")
GOOD = frozenset({"OK"})


class Npu(TorchAccelerator):
    """Huawei's Ascend processors."""

    name = "npu"
    backend = "hccl"
    communicator = "holdfast.worker.collectives.communicators:Hccl"
    faults = (
        FaultRule(fault="npu-memory-error", text=r"HBM.*(multi-?bit|uncorrectable) ECC|\b(507053|507054)\b"),
        FaultRule(fault="npu-lost", text=r"drv.*device.*lost"),
        # What scripts and kernels do wrong on a device that is well, most often; and what both ends of a link see.
        FaultRule(fault="device-not-found", text=r"\b107001\b|drv.*device.*not exist"),
        FaultRule(fault="gpu-launch-failure", text=r"\b(507014|507015)\b|aicore (exception|timeout)|AIC ERROR"),
        FaultRule(fault="collective-timeout", text=r"EI0002|EI0006|HCCL.*(socket|notify) (timeout|wait)"),
        FaultRule(fault="link-down", text=r"link down|\b507056\b"),
        FaultRule(fault="npu-driver-error", text=r"\b507899\b|rtDeviceReset.*fail|aclrtSetDevice.*fail"),
    )

    def is_present(self) -> bool:
        """Return whether the driver has device files."""
        return has_device_files()

    def is_available(self) -> bool:
        """Return whether the driver has device files: a device that exists and cannot be used must be found by the
        check, not skipped."""
        if importlib.util.find_spec("torch_npu") is None:
            return False
        return has_device_files() or bool(self._module().is_available())

    def ailments(self) -> list[DeviceProblem]:
        """Return what npu-smi reports."""
        table = tool_output(TABLE)
        if table is None:
            silent = has_device_files()
            return [DeviceProblem(fault="npu-driver-error", text="npu-smi does not answer")] if silent else []
        return parse_table(table)

    def _module(self) -> Any:
        import torch_npu  # type: ignore[import-not-found]

        return torch_npu.npu


def has_device_files() -> bool:
    """Return whether the driver knows a device."""
    return any(path.name.removeprefix("davinci").isdigit() for path in Path("/dev").glob("davinci*"))


def parse_table(text: str) -> list[DeviceProblem]:
    """Return from the output of `npu-smi info` the health of each device that is not OK."""
    rows = [match for line in text.splitlines() if (match := ROW.match(line))]
    return [
        DeviceProblem(fault="npu-unhealthy", text=f"npu-smi calls its health {row['health']}", device=int(row["index"]))
        for row in rows
        if row["health"] not in GOOD
    ]
