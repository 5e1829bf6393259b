"""The stages of a node alone: its devices and their counters, a matrix multiplication, a copy, its disk.

Whatever a stage raises is a problem of the node, named by the table of the accelerator where that knows the text. A
device that fails one stage is not asked for the next.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.checks.accelerators.base import Accelerator, Benchmark, Device
from holdfast.checks.measure import measure
from holdfast.core.health.findings import TEXT_CHARS_MAX, WRONG_RESULT, CheckProblem, Stage, Timing

CHECK_FAILED = "check-failed"

Found = tuple[list[Timing], list[CheckProblem]]


def check_alone(accelerator: Accelerator, directory: Path, workers: int, stages: Sequence[Stage] = ()) -> Found:
    """Run the given stages, or all."""
    timings, problems = check_disk(directory) if not stages or "disk" in stages else ([], [])
    try:
        devices = accelerator.devices()
        problems += device_problems(accelerator, devices, workers)
    except Exception as error:  # a driver may raise anything
        return timings, [*problems, problem_of(accelerator, "device", error)]
    for device in devices:
        more_timings, more_problems = check_device(accelerator, device, stages)
        timings += more_timings
        problems += more_problems
    return timings, problems


def device_problems(accelerator: Accelerator, devices: list[Device], workers: int) -> list[CheckProblem]:
    """Return the problems with the number of devices, their memory and their counters."""
    found = [CheckProblem("device", ailment.fault, ailment.text, ailment.device) for ailment in accelerator.ailments()]
    if not devices:
        found.append(CheckProblem("device", "device-missing", f"torch sees no {accelerator.name} device"))
    elif accelerator.name != "cpu" and len(devices) < workers:
        text = f"{workers} workers are to run, but torch sees {len(devices)} {accelerator.name} devices"
        found.append(CheckProblem("device", "device-missing", text))
    return [*found, *(problem for device in devices if (problem := memory_problem(accelerator, device)))]


def memory_problem(accelerator: Accelerator, device: Device) -> CheckProblem | None:
    """Return a problem if a foreign process uses the device's memory."""
    wanted = device.memory_bytes * accelerator.memory_free_share_min
    if device.memory_free_bytes >= wanted:
        return None
    free, total = device.memory_free_bytes / 2**30, device.memory_bytes / 2**30
    text = f"only {free:.1f} of {total:.1f} GiB of its memory are free"
    return CheckProblem("device", "device-memory-taken", text, device.index)


def check_device(accelerator: Accelerator, device: Device, stages: Sequence[Stage] = ()) -> Found:
    """Measure the speed of both tasks, or of those asked for, and verify their results."""
    timings: list[Timing] = []
    tasks: list[tuple[Stage, Callable[[int], Benchmark]]] = [
        ("matmul", accelerator.prepare_matmul),
        ("bandwidth", accelerator.prepare_bandwidth),
    ]
    for stage, prepare in tasks:
        if stages and stage not in stages:
            continue
        try:
            work = prepare(device.index)
            timings.append(measure(stage, work.run, device.index))
            wrong = work.verify()
        except Exception as error:  # a driver may raise anything
            return timings, [problem_of(accelerator, stage, error, device.index)]
        if wrong:
            return timings, [CheckProblem(stage, WRONG_RESULT, wrong, device.index)]
    return timings, []


def problem_of(accelerator: Accelerator, stage: Stage, error: BaseException, device: int = -1) -> CheckProblem:
    """Return an exception as a problem."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return CheckProblem(stage, fault_of(accelerator, text), text[:TEXT_CHARS_MAX], device)


def fault_of(accelerator: Accelerator, text: str) -> str:
    """Return the fault that the accelerator's table finds in a text, if any."""
    rules = [rule for rule in accelerator.faults if rule.text and rule.code is None and not rule.signal]
    return next((rule.fault for rule in rules if re.search(rule.text, text)), CHECK_FAILED)


# --- the disk

BLOCK_S = 0.1
SIZE_BYTES = 4 * 2**20
PATTERN = bytes(range(256)) * (SIZE_BYTES // 256)


def check_disk(directory: Path) -> tuple[list[Timing], list[CheckProblem]]:
    """Write, sync and read a file, and remove it again."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            timing = measure("disk", lambda: _write(file.fileno()), block_s=BLOCK_S)
            problem = _compare(file.fileno())
    except OSError as error:
        return [], [CheckProblem("disk", "disk-error", f"{directory} cannot be written: {error.strerror}")]
    return [timing], [CheckProblem("disk", WRONG_RESULT, f"{directory}: {problem}")] if problem else []


def _write(descriptor: int) -> None:
    os.pwrite(descriptor, PATTERN, 0)
    os.fdatasync(descriptor)


def _compare(descriptor: int) -> str:
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # from the disk, as far as the kernel obliges
    found = os.pread(descriptor, SIZE_BYTES, 0)
    return "" if found == PATTERN else "what was read back is not what was written"
