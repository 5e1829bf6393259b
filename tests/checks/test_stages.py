"""The stages of a node alone, on the processor: what is right, what is wrong, and how long it takes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.checks import measure as measure_module
from holdfast.checks import measure as measuring
from holdfast.checks.accelerators import registry
from holdfast.checks.accelerators.base import Device
from holdfast.checks.accelerators.cpu import Cpu, parse_memory_info
from holdfast.checks.accelerators.generic import MatmulBenchmark
from holdfast.checks.measure import BLOCKS, measure, timing_of
from holdfast.checks.stages import check_alone, check_device, check_disk, memory_problem
from holdfast.errors import UsageError

HERE = str(threading.get_native_id())


class Small(Cpu):
    """A processor whose work is quickly done."""

    matmul_size = 64
    copy_bytes = 2**16


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.checks.stages.BLOCK_S", 0.002)
    monkeypatch.setattr(measure, "__kwdefaults__", {"block_s": 0.002})


@pytest.mark.parametrize("size", [1, 7, 64, 300])
def test_a_product_that_is_right_is_found_right(size: int) -> None:
    work = MatmulBenchmark(Small(), 0, size)
    work.run()
    assert work.verify() == ""


@pytest.mark.parametrize("change", [1.0, -1.0, 0.5, 2.0**20, float("nan"), float("inf")])
def test_one_wrong_number_of_thousands_is_found(change: float) -> None:
    work = MatmulBenchmark(Small(), 0, 64)
    work.run()
    work.product[17, 42] += change
    assert work.verify()
    if abs(change) < 10:
        assert work.verify() == "the product is wrong in 1 of 64 rows (17)"


def test_every_single_flipped_bit_is_found() -> None:
    work = MatmulBenchmark(Small(), 0, 16)
    work.run()
    right = work.product.clone()
    for bit in range(32):
        work.product = right.clone()
        flat = work.product.view(torch.int32).flatten()
        flat[5] ^= torch.tensor(1 << bit if bit < 31 else -(2**31), dtype=torch.int32)
        if not torch.equal(work.product, right):  # -0.0 is 0.0
            assert work.verify(), f"bit {bit}"


def test_the_product_is_exact_in_the_precisions_of_accelerators() -> None:
    work = MatmulBenchmark(Small(), 0, 256)
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
        faults: Any = registry.load("cuda").faults

        def prepare_matmul(self, index: int) -> MatmulBenchmark:
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


def test_memory_that_another_process_uses() -> None:
    cuda = registry.load("cuda")
    assert memory_problem(cuda, Device(index=0, name="x", memory_bytes=100, memory_free_bytes=95)) is None
    problem = memory_problem(cuda, Device(index=1, name="x", memory_bytes=80 * 2**30, memory_free_bytes=20 * 2**30))
    assert problem and problem.text == "only 20.0 of 80.0 GiB of its memory are free"


def test_a_disk_that_cannot_be_written_or_reads_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    _, problems = check_disk(tmp_path / "file")
    assert problems[0].fault == "disk-error" and "cannot be written" in problems[0].text
    monkeypatch.setattr("holdfast.checks.stages.os.pread", lambda *_: b"something else")
    _, problems = check_disk(tmp_path)
    assert "not what was written" in problems[0].text


def test_the_best_block_counts_and_the_spread_ignores_one_that_was_disturbed() -> None:
    timing = timing_of("matmul", [1.0, 1.01, 1.02, 9.0])
    assert timing.best_s == 1.0 and timing.spread == pytest.approx(0.02 / 1.02)
    assert timing_of("matmul", [2.0]).spread == 0.0
    assert timing_of("all-reduce", [1.0, 1.01, 1.02, 9.0]).best_s == 1.02, "a link is what it mostly is"


def busy_for(seconds: float) -> None:
    give_up_at = time.thread_time() + seconds
    while time.thread_time() < give_up_at:
        pass


def test_what_was_waited_for_others_is_no_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, others = 0.004, 0.001
    done = [0]
    clock = SimpleNamespace(perf_counter=lambda: done[0] * (ours + others))
    monkeypatch.setattr(measure_module, "time", clock)
    monkeypatch.setattr(measuring, "time", clock)
    threads = {"does it": (ours, others), "helps": (ours / 2, others / 2), "looks on": (ours / 100, 4 * others)}

    def told() -> dict[str, tuple[float, float]]:
        return {name: (done[0] * ran, done[0] * waited) for name, (ran, waited) in threads.items()}

    monkeypatch.setattr(measuring, "accounts_of_threads", told)
    monkeypatch.setattr(measuring, "throttling_accounts", list)

    def work() -> None:
        done[0] += 1

    timing = measure("matmul", work)
    assert timing.best_s == pytest.approx(ours) and timing.waited == pytest.approx(others / (ours + others))


def test_what_the_own_control_group_withholds_is_the_nodes_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (text, scale) in enumerate({"throttled_time": 1e9, "throttled_usec": 1e6}.items()):
        account = tmp_path / f"{number}" / "cpu.stat"
        account.parent.mkdir()
        account.write_text(f"nr_periods 3\n{text} 0\n")
        queued = {"here": 1.0}
        monkeypatch.setattr(measuring, "accounts_of_threads", lambda queued=queued: {HERE: (0.0, queued["here"])})
        monkeypatch.setattr(measuring, "throttling_accounts", lambda account=account: [account])
        since = measuring.Waiting()
        queued["here"] += 0.003
        account.write_text(f"nr_periods 4\n{text} {int(0.002 * scale)}\n")
        time.sleep(0.004)
        assert since.longest_s() == pytest.approx(0.001)


@pytest.mark.parametrize(
    ("threads", "longest_s"),
    [
        ({HERE: (0.0001, 0.002), "1": (0.0001, 0.009)}, 0.002),
        ({HERE: (0.0001, 0.002), "1": (0.01, 0.009), "2": (0.004, 0.0095)}, 0.009),
        ({HERE: (0.01, 0.002), "1": (0.006, 0.003)}, 0.003),
    ],
    ids=["one that looks on", "one that works for us, and one that works little", "two that work"],
)
def test_who_waits_is_who_works(
    monkeypatch: pytest.MonkeyPatch, threads: dict[str, tuple[float, float]], longest_s: float
) -> None:
    found: dict[str, tuple[float, float]] = {}
    monkeypatch.setattr(measuring, "accounts_of_threads", lambda: dict(found))
    monkeypatch.setattr(measuring, "throttling_accounts", list)
    since = measuring.Waiting()
    monkeypatch.setattr("holdfast.checks.measure.time.perf_counter", lambda began_s=since._since: began_s + 0.01)
    found.update(threads)
    assert since.longest_s() == pytest.approx(longest_s)


def test_two_that_want_one_processor_wait_for_each_other() -> None:
    if not measuring.accounts_of_threads():
        pytest.skip("this kernel does not count")
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cores)})
        other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            since = measuring.Waiting()
            busy_for(0.2)
            longest_s = since.longest_s()
            assert longest_s > 0.05 and since.summed_s() >= longest_s
        finally:
            other.kill()
            other.wait()
    finally:
        os.sched_setaffinity(0, cores)


@pytest.mark.parametrize(
    ("lines", "accounts"),
    [
        ("0::/user.slice/job", ["user.slice/job", "user.slice", ""]),
        ("3:memory:/elsewhere\n1:cpu,cpuacct:/job\n0::/", ["cpu,cpuacct/job", "cpu,cpuacct", ""]),
        ("1:cpu,cpuacct:/not/seen/from/here", ["cpu,cpuacct"]),
        ("", []),
    ],
)
def test_the_control_groups_of_both_kinds_of_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, accounts: list[str]
) -> None:
    for group in ("", "user.slice", "user.slice/job", "cpu,cpuacct", "cpu,cpuacct/job", "memory/elsewhere"):
        (tmp_path / "groups" / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / group / "cpu.stat").touch()
    (tmp_path / "own").write_text(lines)
    monkeypatch.setattr(measuring, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(measuring, "GROUPS", tmp_path / "groups")
    assert measuring.throttling_accounts() == [tmp_path / "groups" / name / "cpu.stat" for name in accounts]


@pytest.fixture
def no_kernel_counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that counts nobody's waiting."""
    for name in ("THREADS", "OWN_GROUPS", "GROUPS"):
        monkeypatch.setattr(measuring, name, tmp_path / "nothing")


def test_where_the_kernel_does_not_count_the_wait_is_zero(no_kernel_counters: None) -> None:
    since = measuring.Waiting()
    assert since.longest_s() == since.summed_s() == 0.0


def test_only_the_stages_that_are_asked_for_are_measured(tmp_path: Path) -> None:
    for stages in (("matmul",), ("disk", "bandwidth")):
        timings, problems = check_alone(Small(), tmp_path, 1, stages)
        assert not problems and {timing.stage for timing in timings} == set(stages)


def test_work_is_repeated_in_blocks(no_kernel_counters: None) -> None:
    # Untold: work that sleeps would be held to have waited for as long as any other thread of the tests' process did.
    runs: list[Any] = []
    timing = measure("matmul", lambda: runs.append(time.sleep(0.003)))
    assert len(runs) == 1 + BLOCKS and timing.best_s >= 0.003


def test_memory_as_the_kernel_tells_it() -> None:
    text = "MemTotal:       16 kB\nMemAvailable:    8 kB\nHugePages_Total:   3\nnonsense\n"
    assert parse_memory_info(text) == {"MemTotal": 16_384, "MemAvailable": 8_192, "HugePages_Total": 3}


def test_a_plug_in_that_is_not_there_is_refused_with_the_names_of_those_that_are() -> None:
    with pytest.raises(UsageError, match=r"no plug-in of this name, only .*cuda, npu, xpu, mps, cpu"):
        registry.load("abacus")


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ("FaultRule(fault='abacus-jammed', text='(['),", r"row 1 .* key text: '\(\[' is no regular expression"),
        ("FaultRule(fault='abacus-jammed'),", "row 1 .* a rule needs at least one of"),
        ("'abacus-jammed',", "no rows of FaultRule: Expected `object`, got `str`"),
    ],
)
def test_a_plug_in_with_faults_that_cannot_be_meant_is_refused_by_name_and_no_reason_not_to_start(
    rows: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "abacus.py").write_text(
        "from holdfast.checks.accelerators.base import Accelerator, FaultRule\n"
        "class Abacus(Accelerator):\n"
        f"    name, faults = 'abacus', ({rows})\n"
        "    def is_present(self): return True\n"
    )
    about = tmp_path / "abacus-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: abacus\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[holdfast.accelerators]\nabacus = abacus:Abacus\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "abacus", raising=False)
    with pytest.raises(UsageError, match=f"--accelerator abacus: .*{sentence}"):
        registry.load("abacus")
    assert "abacus" not in [kind.name for kind in registry.present()]


def test_without_any_accelerator_the_processor_is_found() -> None:
    found, problems = registry.detect()
    assert found.name == "cpu" and problems == []
