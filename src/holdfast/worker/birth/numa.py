"""Binds this worker to the processors near its device, with torch's own rules, as torchrun's `--numa-binding` does."""

from __future__ import annotations

import logging
import sys
from typing import NoReturn

from holdfast.worker.birth.error_file import write_error_file

CANNOT_BIND_EXIT_CODE = 2


def bind(mode: str, local_rank: int) -> None:
    """A worker that asked to be bound and cannot be does not start: it would be slow, and nobody would know why."""
    if not mode:
        return
    logger = logging.getLogger("torch.numa.binding")
    logger.disabled = True  # it logs the traceback of what is one sentence below
    try:
        from torch.numa import binding

        options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
        binding._maybe_apply_numa_binding_to_current_process(gpu_index=local_rank, numa_options=options)
    except Exception as error:  # torch raises whatever its lookups raise: no device, no driver, no sysfs, no numactl
        refuse(mode, local_rank, error)
    finally:
        logger.disabled = False


def refuse(mode: str, local_rank: int, error: Exception) -> NoReturn:
    write_error_file(error)
    reason = " ".join(str(error).split())
    sys.stderr.write(
        f"holdfast: --numa-binding {mode} cannot be applied to local rank {local_rank}: "
        f"{type(error).__name__}: {reason}; leave the flag out, or run where there is a device to bind to\n"
    )
    sys.exit(CANNOT_BIND_EXIT_CODE)
