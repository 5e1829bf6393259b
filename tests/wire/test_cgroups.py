"""How much memory may still be taken, by made-up files of a kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.util.cgroups import LIMIT_BYTES_MAX, Headroom, memory_headroom

MIB = 2**20
UNIFIED = "35 25 0:30 {root} {point} rw - cgroup2 cgroup2 rw\n"
LEGACY = "36 25 0:31 {root} {point} rw - cgroup cgroup rw,memory\n"


class Kernel:
    def __init__(self, directory: Path, mount: str, membership: str, root: str = "/") -> None:
        self.proc, self.point = directory / "proc", directory / "cgroup"
        self.put(self.proc / "self" / "mountinfo", mount.format(root=root, point=self.point))
        self.put(self.proc / "self" / "cgroup", membership)
        self.put(self.proc / "meminfo", f"MemTotal: 99999999 kB\nMemAvailable:   {1_000 * 1_024} kB\n")

    def put(self, path: Path, content: object) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")

    def v2(self, group: str, limit: object, used: int, stat: str = "") -> None:
        for name, content in (("memory.max", limit), ("memory.current", used), ("memory.stat", stat)):
            self.put(self.point / group / name, content)

    def v1(self, group: str, limit: int, used: int, stat: str = "") -> None:
        for name, content in (("limit_in_bytes", limit), ("usage_in_bytes", used), ("stat", stat)):
            self.put(self.point / group / f"memory.{name}", content)


def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, UNIFIED, "0::/pod/box")
    kernel.v2("pod/box", "max", 5 * MIB)
    assert memory_headroom(kernel.proc) == Headroom(1_000 * MIB, "on this machine")


def test_a_machine_that_says_nothing_has_no_limit(tmp_path: Path) -> None:
    assert memory_headroom(tmp_path).free_bytes == LIMIT_BYTES_MAX


def test_the_least_that_is_left_on_the_way_up_counts(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, UNIFIED, "0::/pod/box")
    kernel.v2("pod/box", 800 * MIB, 100 * MIB)
    assert memory_headroom(kernel.proc).free_bytes == 700 * MIB
    kernel.v2("pod", 900 * MIB, 650 * MIB)
    assert memory_headroom(kernel.proc) == Headroom(250 * MIB, "within the limit of cgroup /pod, 900 MiB")
    kernel.v2("pod", 900 * MIB, 950 * MIB)
    assert memory_headroom(kernel.proc).free_bytes == 0


def test_the_page_cache_is_given_back_and_shared_memory_is_not(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, UNIFIED, "0::/box")
    stat = f"anon {50 * MIB}\nshmem {30 * MIB}\ninactive_file {10 * MIB}\nactive_file {10 * MIB}"
    kernel.v2("box", 200 * MIB, 100 * MIB, stat)
    assert memory_headroom(kernel.proc).free_bytes == 120 * MIB


@pytest.mark.parametrize("root", ["/", "/docker/abc"])
def test_the_limit_of_a_container_that_sees_only_itself(tmp_path: Path, root: str) -> None:
    kernel = Kernel(tmp_path, UNIFIED, f"0::{root}", root)
    kernel.v2("", 64 * MIB, 4 * MIB)
    assert memory_headroom(kernel.proc) == Headroom(60 * MIB, "within the limit of cgroup /, 64 MiB")


def test_limits_of_the_first_version(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, LEGACY, "4:cpu,memory:/job/task\n0::/elsewhere")
    kernel.v1("", 2**63 - 4096, 10**12)
    kernel.v1("job", 300 * MIB, 120 * MIB, f"inactive_file 0\ntotal_inactive_file {20 * MIB}\ntotal_active_file 0")
    kernel.v1("job/task", 2**63 - 4096, 10 * MIB)
    assert memory_headroom(kernel.proc) == Headroom(200 * MIB, "within the limit of cgroup /job, 300 MiB")
