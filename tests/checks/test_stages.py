"""The stages of a node alone, on the processor: what is right, what is wrong, and how long it takes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from holdfast.checks import disk
from holdfast.checks.accelerators import registry
from holdfast.checks.accelerators.base import Device
from holdfast.checks.accelerators.cpu import Cpu, parse_memory_info
from holdfast.checks.accelerators.generic import Matmul
from holdfast.checks.disk import check_disk
from holdfast.checks.measuring import BLOCKS, measure, timing_of
from holdfast.checks.stages import check_alone, check_device, memory_problem
from holdfast.errors import UsageError


class Small(Cpu):
    """A processor whose work is quickly done."""

    matmul_size = 64
    copy_bytes = 2**16


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.checks.measuring.BLOCK_S", 0.002)
    monkeypatch.setattr(measure, "__kwdefaults__", {"block_s": 0.002})


@pytest.mark.parametrize("size", [1, 7, 64, 300])
def test_a_product_that_is_right_is_found_right(size: int) -> None:
    work = Matmul(Small(), 0, size)
    work.run()
    assert work.verify() == ""


@pytest.mark.parametrize("change", [1.0, -1.0, 0.5, 2.0**20, float("nan"), float("inf")])
def test_one_wrong_number_of_thousands_is_found(change: float) -> None:
    work = Matmul(Small(), 0, 64)
    work.run()
    work.product[17, 42] += change
    assert work.verify()
    if abs(change) < 10:
        assert work.verify() == "the product is wrong in 1 of 64 rows (17)"


def test_every_single_flipped_bit_is_found() -> None:
    work = Matmul(Small(), 0, 16)
    work.run()
    right = work.product.clone()
    for bit in range(32):
        work.product = right.clone()
        flat = work.product.view(torch.int32).flatten()
        flat[5] ^= torch.tensor(1 << bit if bit < 31 else -(2**31), dtype=torch.int32)
        if not torch.equal(work.product, right):  # -0.0 is 0.0
            assert work.verify(), f"bit {bit}"


def test_the_product_is_exact_in_the_precisions_of_accelerators() -> None:
    work = Matmul(Small(), 0, 256)
    for dtype in (torch.bfloat16, torch.float16):
        left, right = work._left_there.to(dtype), work._right_there.to(dtype)
        assert torch.equal(left.float(), work._left_there) and torch.equal(right.float(), work._right_there)


def test_all_stages_of_this_machine(tmp_path: Path) -> None:
    timings, problems = check_alone(Small(), tmp_path, 1)
    assert not problems
    assert [timing.stage for timing in timings] == ["disk", "matmul", "bandwidth"]
    assert all(timing.best_s > 0 and timing.spread >= 0 for timing in timings)
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_a_device_that_raises_is_named_and_not_asked_for_more() -> None:
    class Dead(Small):
        faults = registry.load("cuda").faults

        def prepare_matmul(self, index: int) -> Matmul:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    timings, problems = check_device(Dead(), Device(index=3, name="x", memory_bytes=1, memory_free_bytes=1))
    assert not timings and len(problems) == 1
    assert (problems[0].stage, problems[0].fault, problems[0].device) == ("matmul", "gpu-memory-error", 3)


def test_a_machine_without_the_devices_it_should_have() -> None:
    class Empty(Small):
        name = "cuda"

        def devices(self) -> list[Device]:
            return []

    _, problems = check_alone(Empty(), Path("/tmp"), 8)
    assert [problem.fault for problem in problems] == ["device-missing"]


def test_memory_that_somebody_else_has_taken() -> None:
    cuda = registry.load("cuda")
    assert memory_problem(cuda, Device(index=0, name="x", memory_bytes=100, memory_free_bytes=95)) is None
    problem = memory_problem(cuda, Device(index=1, name="x", memory_bytes=80 * 2**30, memory_free_bytes=20 * 2**30))
    assert problem and problem.text == "only 20.0 of 80.0 GiB of its memory are free"


def test_a_disk_that_cannot_be_written_or_reads_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    _, problems = check_disk(tmp_path / "file")
    assert problems[0].fault == "disk-error" and "cannot be written" in problems[0].text
    monkeypatch.setattr(disk.os, "pread", lambda *_: b"something else")
    _, problems = check_disk(tmp_path)
    assert "not what was written" in problems[0].text


def test_the_best_block_counts_and_the_spread_ignores_one_that_was_disturbed() -> None:
    timing = timing_of("matmul", [1.0, 1.01, 1.02, 9.0])
    assert timing.best_s == 1.0 and timing.spread == pytest.approx(0.02 / 1.02)
    assert timing_of("matmul", [2.0]).spread == 0.0
    assert timing_of("all-reduce", [1.0, 1.01, 1.02, 9.0]).best_s == 1.02, "a link is what it mostly is"


def test_work_is_repeated_in_blocks() -> None:
    runs = []
    timing = measure("matmul", lambda: runs.append(time.sleep(0.003)))
    assert len(runs) == 1 + BLOCKS and timing.best_s >= 0.003


def test_memory_as_the_kernel_tells_it() -> None:
    text = "MemTotal:       16 kB\nMemAvailable:    8 kB\nHugePages_Total:   3\nnonsense\n"
    assert parse_memory_info(text) == {"MemTotal": 16_384, "MemAvailable": 8_192, "HugePages_Total": 3}


def test_a_plug_in_that_is_not_there_is_refused_with_the_names_of_those_that_are() -> None:
    with pytest.raises(UsageError, match=r"no plug-in of this name, only .*cuda, npu, xpu, mps, cpu"):
        registry.load("abacus")


def test_without_any_accelerator_the_processor_is_found() -> None:
    found, problems = registry.detect()
    assert found.name == "cpu" and problems == []
