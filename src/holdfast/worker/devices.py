"""How many devices this node has, for `--nproc-per-node auto`, `gpu`, `xpu` or a device's name.

A process of its own (`python -m holdfast.worker.devices NAME` prints a number): the agent does not import torch.
"""

from __future__ import annotations

import os
import sys


def count_devices(name: str) -> int:
    """Return how many devices of this name there are. Raises ValueError with the reason if there are none."""
    import torch

    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        return torch.accelerator.device_count() if current else len(os.sched_getaffinity(0))
    wanted = "cuda" if name == "gpu" else name
    if current is None or current.type != wanted:
        there = f"this machine has {current.type}" if current else "this machine has no accelerator"
        raise ValueError(f"{there}: give a number, cpu or auto")
    return torch.accelerator.device_count()


if __name__ == "__main__":
    try:
        sys.stdout.write(str(count_devices(sys.argv[1])))
    except (ImportError, ValueError, RuntimeError) as error:
        sys.exit(str(error))
