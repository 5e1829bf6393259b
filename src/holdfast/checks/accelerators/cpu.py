"""The processor itself: what a job without accelerators computes on. One device, however many cores."""

from __future__ import annotations

import platform
from pathlib import Path

from holdfast.checks.accelerators.base import Device, DeviceProblem, FaultRule
from holdfast.checks.accelerators.generic import TorchAccelerator

MEMORY_INFO = Path("/proc/meminfo")
ERROR_COUNTS = Path("/sys/devices/system/edac/mc")


class Cpu(TorchAccelerator):
    """The processor itself. Its counters are the kernel's: EDAC, which counts the errors that memory controllers
    report."""

    name = "cpu"
    backend = "gloo"
    communicator = "holdfast.worker.collectives.communicators:Gloo"
    runs_behind_host = False
    memory_free_share_min = 0.02  # shared with all processes: just enough to start a worker at all
    matmul_size = 512
    copy_bytes = 64 * 2**20
    faults = (
        FaultRule(fault="cpu-machine-check", text=r"mce: .*(Hardware Error|Machine check)"),
        FaultRule(fault="memory-uncorrectable", text=r"EDAC .*\bUE\b|uncorrected (memory|hardware) error"),
        FaultRule(fault="memory-uncorrectable", signal="SIGBUS", text=r"hardware memory (error|corruption)"),
    )

    def is_present(self) -> bool:
        """Return True: every machine has one."""
        return True

    def is_available(self) -> bool:
        """Return True: every machine has one."""
        return True

    def devices(self) -> list[Device]:
        """Return the one device."""
        memory = parse_memory_info(MEMORY_INFO.read_text())
        name = platform.processor() or platform.machine()
        free = memory.get("MemAvailable", memory.get("MemFree", 0))
        return [Device(index=0, name=name, memory_bytes=memory.get("MemTotal", 0), memory_free_bytes=free)]

    def synchronize(self, index: int) -> None:
        """Do nothing: a call that has returned is done."""

    def ailments(self) -> list[DeviceProblem]:
        """Return the uncorrectable memory errors since the machine was started."""
        counts = {path.parent.name: path.read_text() for path in ERROR_COUNTS.glob("mc*/ue_count")}
        return [
            DeviceProblem(
                fault="memory-uncorrectable", text=f"{int(count)} uncorrectable errors of memory controller {name}"
            )
            for name, count in sorted(counts.items())
            if int(count) > 0
        ]


def parse_memory_info(text: str) -> dict[str, int]:
    """Return the bytes by name."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found
