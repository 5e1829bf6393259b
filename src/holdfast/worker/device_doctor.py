"""The tests that a node makes of its own devices for `holdfast doctor --device`: what Holdfast relies on, tried out.

A process of its own (`python -m holdfast.worker.device_doctor NAME`), as it imports torch; prints a line of JSON. No
test stops another: each says what it found, or what was raised.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch

from holdfast.checks.accelerators import registry
from holdfast.checks.accelerators.base import Accelerator, Device
from holdfast.checks.stages import check_alone
from holdfast.core.memory_plan import gib
from holdfast.errors import HoldfastError
from holdfast.torch_compat import device_generator
from holdfast.util.cgroups import memory_headroom
from holdfast.worker.determinism import missing_for_same_bits
from holdfast.worker.device_wait import fence_of

COPY_BYTES = 128 * 2**20
EVENT_TIMEOUT_S = 20.0
SEED = 11


class DoctorLine(msgspec.Struct, frozen=True):
    """One test: its name, whether what Holdfast needs is so (None: it is only said), and what was found."""

    name: str
    is_well: bool | None
    text: str


def examine(name: str) -> list[DoctorLine]:
    """Run all tests on one kind of processor; on that which is detected if the name is empty."""
    plug_in = registry.load(name) if name else registry.detect()[0]
    lines = [DoctorLine("processor", None, f"{plug_in.name}, torch {torch.__version__}, backend {plug_in.backend}")]
    with tempfile.TemporaryDirectory() as directory:
        lines += _stages(plug_in, Path(directory))
    tests: list[tuple[str, Callable[[Accelerator], DoctorLine]]] = [
        ("events", _events),
        ("random numbers", _generators),
        ("copy to the host", _host_copy),
        ("communicator", _communicator),
        ("host memory", _host_memory),
        ("equal bits", _bits),
    ]
    return [*lines, *(_tried(test, plug_in, name) for name, test in tests)]


def _tried(test: Callable[[Accelerator], DoctorLine], plug_in: Accelerator, name: str) -> DoctorLine:
    try:
        return test(plug_in)
    except Exception as error:  # a vendor's library may raise anything: that is what is to be found out
        return DoctorLine(name, False, " ".join(f"{type(error).__name__}: {error}".split())[:500])


def _stages(plug_in: Accelerator, directory: Path) -> Iterator[DoctorLine]:
    """Yield what a node check measures: counters, a multiplication with its proof, a copy, the disk."""
    timings, problems = check_alone(plug_in, directory, workers=1)
    for timing in timings:
        yield DoctorLine(timing.stage, True, f"device {timing.device}: {1e3 * timing.best_s:.2f} ms")
    for problem in problems:
        yield DoctorLine(problem.stage, False, f"device {problem.device}: {problem.fault}: {problem.text}")


def _first(plug_in: Accelerator) -> Device:
    devices = plug_in.devices()
    if not devices:
        raise HoldfastError(f"torch sees no {plug_in.name} device")
    return devices[0]


def _events(plug_in: Accelerator) -> DoctorLine:
    """Wait for queued work by polling an event, as each commit does."""
    fence = fence_of([torch.device(plug_in.name, _first(plug_in).index)])
    if fence is None:
        return DoctorLine("events", True, "a call that has returned is done: commits need not wait")
    tensor = plug_in.tensor(0, COPY_BYTES)
    began_at = time.monotonic()
    for _ in range(100):
        tensor.add_(1.0)
    queued_s = time.monotonic() - began_at
    fence.wait(lambda: None, EVENT_TIMEOUT_S)
    text = f"100 kernels queued in {1e3 * queued_s:.1f} ms, done after {1e3 * (time.monotonic() - began_at):.1f} ms"
    is_right = float(tensor[0].item()) == 101.0
    return DoctorLine("events", is_right, text if is_right else f"{text}, and the sum is wrong")


def _generators(plug_in: Accelerator) -> DoctorLine:
    """Draw twice from the same seed."""
    if plug_in.name == "cpu":
        draws = [torch.Generator().manual_seed(SEED) for _ in range(2)]
        is_same = torch.equal(*(torch.rand(8, generator=one, device="cpu") for one in draws))
        return DoctorLine("random numbers", is_same, "the same seed draws the same numbers")
    plug_in.tensor(0, 4)
    found = device_generator()
    if found is None:
        return DoctorLine("random numbers", False, "its package of torch has no get_rng_state: dropout is not repeated")
    draws_there = []
    for _ in range(2):
        found[1].manual_seed(SEED)
        draws_there.append(torch.rand(8, device=torch.device(plug_in.name, 0)).cpu())
    return DoctorLine("random numbers", torch.equal(*draws_there), "the same seed draws the same numbers")


def _host_copy(plug_in: Accelerator) -> DoctorLine:
    """Measure what `holdfast plan` calls --host-link and --host-copy."""
    host, other = (
        torch.ones(COPY_BYTES, dtype=torch.uint8, device="cpu"),
        torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cpu"),
    )
    torch.set_num_threads(1)
    copy = COPY_BYTES / _time_s(lambda: other.copy_(host))
    if plug_in.name == "cpu":
        return DoctorLine("copy to the host", None, f"--host-copy {copy:.1e}")
    there, pinned = plug_in.tensor(0, COPY_BYTES), torch.empty(COPY_BYTES // 4, pin_memory=True, device="cpu")

    def carry() -> None:
        pinned.copy_(there, non_blocking=True)
        plug_in.synchronize(0)

    link = COPY_BYTES / _time_s(carry)
    return DoctorLine("copy to the host", None, f"--host-link {link:.1e} --host-copy {copy:.1e}")


def _time_s(work: Callable[[], object]) -> float:
    """Return the shortest of some times."""
    times = []
    for _ in range(5):
        began_at = time.perf_counter()
        work()
        times.append(time.perf_counter() - began_at)
    return min(times)


def _communicator(plug_in: Accelerator) -> DoctorLine:
    """Look whether what communicates can be made and freed, without making one."""
    if plug_in.communicator:
        kind = registry.resolve(plug_in.communicator)
        missing = [name for name in ("make", "free", "drop") if not hasattr(kind, name)]
        missing += getattr(kind, "lacking", list)()
        text = f"{kind.__name__} lacks {', '.join(missing)}" if missing else f"{kind.__name__} can be freed"
        return DoctorLine("communicator", not missing, text)
    is_known = torch.distributed.is_backend_available(plug_in.backend)
    text = f"torch's {plug_in.backend}, freed by its abort()" if is_known else f"torch knows no {plug_in.backend}"
    return DoctorLine("communicator", is_known, text)


def _host_memory(plug_in: Accelerator) -> DoctorLine:
    """Say what there is for snapshots and copies; `holdfast plan` says what a model needs."""
    free = memory_headroom()
    shared = os.statvfs("/dev/shm")
    room = gib(shared.f_bavail * shared.f_frsize)
    return DoctorLine("host memory", None, f"{gib(free.free_bytes)} free {free.where}, {room} in /dev/shm")


def _bits(plug_in: Accelerator) -> DoctorLine:
    if plug_in.name == "cpu":
        return DoctorLine("equal bits", True, "a repeated step has the same bits")
    missing = missing_for_same_bits(plug_in.name, os.environ)
    text = f"a script has to set {', '.join(missing)}" if missing else "all that is known to be needed is set"
    return DoctorLine("equal bits", None, text)


def main() -> None:
    """Print what was found."""
    try:
        lines = examine(sys.argv[1])
    except HoldfastError as error:
        lines = [DoctorLine("processor", False, str(error))]
    sys.stdout.write(msgspec.json.encode(lines).decode() + "\n")


if __name__ == "__main__":
    main()
