"""Who is compared by recovery.py: how each is started, and what it does about a fault by itself.

`spares` are processes beyond the ranks (a spare, a reserve rank). `refills` says after which faults a full world can be
expected again: waiting for what cannot come would only cost time.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import machine
from diary import Diary
from processes import Run

Found = TypeVar("Found")
SCRIPTS = Path(__file__).parent / "scripts" / "recovery"
LOOK_S = 0.005
RELAUNCHES_MAX = 5
PORTS = 16
"""NVRx: one for its store, and one for the process group of each iteration."""


@dataclass(frozen=True)
class Workload:
    """What all of them train; see scripts/recovery/workload.py."""

    ranks: int
    model: str = "ddp"
    rows: int = 32
    pause_s: float = 0.01
    checkpoint_every: int = 10
    gate_steps: int = 0


class Contender:
    """One way to keep the workload running."""

    refills: frozenset[str] = frozenset({"kill", "hang"})
    models: frozenset[str] = frozenset({"ddp"})

    def __init__(self, key: str, name: str, spares: int = 0, missing: str = "") -> None:
        self.key, self.name, self.spares = key, name, spares
        self.missing = missing
        """Why it cannot be run here; empty if it can."""

    def launch(self, job: Job) -> None:
        raise NotImplementedError

    def tend(self, job: Job) -> None:
        """Whatever its users' own supervisor would do now. Called often."""


class Holdfast(Contender):
    """The script is guarded by a session; the launcher by nothing but itself."""

    models = frozenset({"ddp", "fsdp2"})

    def __init__(
        self, key: str, name: str, recovery: str, spares: int, flags: tuple[str, ...], checksum_every: int = 0
    ) -> None:
        super().__init__(key, name, spares)
        self._watch = {"BENCH_WATCH": str(checksum_every)} if checksum_every else {}
        spare_flags = ("--spares", str(spares)) if spares else ()
        self._flags = ("--standalone", "--recovery", recovery, *spare_flags, *flags)

    def launch(self, job: Job) -> None:
        size = ("--nproc-per-node", str(job.workload.ranks))
        words = [sys.executable, "-m", "holdfast", "run", *size, *self._flags, str(SCRIPTS / "under_holdfast.py")]
        job.start(words, self._watch)


class Torchrun(Contender):
    """With a store of the workers' own: with the shared one part of its restarts never recover (see restart.py)."""

    models = frozenset({"ddp", "fsdp2"})

    def __init__(self, key: str, name: str, plain: bool = False) -> None:
        super().__init__(key, name)
        self._plain = plain

    def launch(self, job: Job) -> None:
        flags = ["--standalone", "--nproc-per-node", str(job.workload.ranks)]
        flags += ["--max-restarts", "0" if self._plain else "10"]
        more = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        if self._plain:
            more["BENCH_CHECKPOINT_EVERY"] = "0"
        script = str(SCRIPTS / "under_torchrun.py")
        job.start([sys.executable, "-m", "torch.distributed.run", *flags, script], more)


class Torchft(Contender):
    """A lighthouse and a process for each replica group, started again the moment it ends.

    Nobody starts a replica group again that hangs: torchft leaves it out, and its own supervisor sees a living process.
    """

    refills = frozenset({"kill"})

    def __init__(self, key: str, name: str, python: str, spares: int, heartbeat_ms: int, missing: str) -> None:
        super().__init__(key, name, spares, missing)
        self._python, self._heartbeat_ms = python, heartbeat_ms
        if spares:
            self.refills = frozenset({"kill", "hang"})

    def launch(self, job: Job) -> None:
        port = free_ports(1)
        lighthouse = [str(Path(self._python).with_name("torchft_lighthouse")), "--bind", f"[::]:{port}"]
        lighthouse += ["--min_replicas", str(job.workload.ranks if self.spares else 1), "--quorum_tick_ms", "100"]
        lighthouse += ["--join_timeout_ms", "10000", "--heartbeat_timeout_ms", str(self._heartbeat_ms)]
        job.start(lighthouse, node="lighthouse")
        wait_until_listening(port)
        job.common["TORCHFT_LIGHTHOUSE"] = f"http://127.0.0.1:{port}"
        job.common["BENCH_COLLECTIVE_TIMEOUT_S"] = str(self._heartbeat_ms / 1e3)
        for group in range(job.workload.ranks + self.spares):
            self._start_group(job, str(group))

    def _start_group(self, job: Job, group: str) -> None:
        command = [self._python, str(SCRIPTS / "under_torchft.py")]
        job.named[group] = job.start(command, {"REPLICA_GROUP_ID": group}, node=f"group-{group}")

    def tend(self, job: Job) -> None:
        for group, process in list(job.named.items()):
            if process.poll() is not None and job.relaunches < RELAUNCHES_MAX:
                job.relaunches += 1
                self._start_group(job, group)


class Nvrx(Contender):
    """Every rank is started once; a lost one comes back only as a reserve rank that takes its place."""

    def __init__(self, key: str, name: str, python: str, spares: int, tuned_s: float, missing: str) -> None:
        super().__init__(key, name, spares, missing)
        self._python, self._tuned_s = python, tuned_s
        if not spares:
            self.refills = frozenset()

    def launch(self, job: Job) -> None:
        world = job.workload.ranks + self.spares
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(PORTS)), "WORLD_SIZE": str(world)}
        common |= {"BENCH_TUNED_S": str(self._tuned_s), "BENCH_COLLECTIVE_TIMEOUT_S": "3" if self._tuned_s else "10"}
        for rank in range(world):
            command = [self._python, str(SCRIPTS / "under_nvrx.py")]
            job.start(command, common | {"RANK": str(rank)}, node=f"rank-{rank}")


@dataclass
class Job:
    """One contender at work, in a directory of its own. Leaving the block ends all of it."""

    contender: Contender
    workload: Workload
    common: dict[str, str] = field(default_factory=dict)
    named: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    relaunches: int = 0

    def __enter__(self) -> Job:
        self._temporary = tempfile.TemporaryDirectory(prefix="holdfast-bench-", ignore_cleanup_errors=True)
        self.directory = Path(self._temporary.name)
        for name in ("diary", "gates", "checkpoint"):
            (self.directory / name).mkdir()
        self.diary, self.run = Diary(self.directory / "diary"), Run(self.directory)
        self.common |= machine.benchmark_environment() | self._settings()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.run.end()
        finally:
            self._temporary.cleanup()

    def _settings(self) -> dict[str, str]:
        workload, directory = self.workload, self.directory
        return {
            "BENCH_DIARY": str(directory / "diary"),
            "BENCH_GATES": str(directory / "gates"),
            "BENCH_CHECKPOINT": str(directory / "checkpoint"),
            "BENCH_CHECKPOINT_EVERY": str(workload.checkpoint_every),
            "BENCH_GATE_STEPS": str(workload.gate_steps),
            "BENCH_MODEL": workload.model,
            "BENCH_PAUSE_S": str(workload.pause_s),
            "BENCH_RANKS": str(workload.ranks),
            "BENCH_ROWS": str(workload.rows),
            "BENCH_SPARES": str(self.contender.spares),
            "HOLDFAST_STATE_DIR": str(directory / "state"),
            "TMPDIR": str(directory),
        }

    def start(self, command: list[str], more: dict[str, str] | None = None, node: str = "0") -> subprocess.Popen[bytes]:
        return self.run.start(command, self.common | (more or {}), node)

    def wait_for(self, reached: Callable[[], Found | None], limit_s: float) -> Found | None:
        """What was reached; None if the job ended or the limit passed before."""
        give_up_at = time.monotonic() + limit_s
        while time.monotonic() < give_up_at:
            over = self.run.over
            self.contender.tend(self)
            self.diary.read_on()
            if (found := reached()) is not None:
                return found
            if over:
                return None
            time.sleep(LOOK_S)
        return None


def free_ports(count: int) -> int:
    """The first of so many in a row that nobody listens at."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = int(probe.getsockname()[1])
        if all(_is_free(port) for port in range(first, first + count)):
            return first


def _is_free(port: int) -> bool:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return True
    except (OSError, OverflowError):
        return False


def wait_until_listening(port: int, limit_s: float = 10.0) -> None:
    give_up_at = time.monotonic() + limit_s
    while time.monotonic() < give_up_at:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return
        except OSError:
            time.sleep(LOOK_S)
    raise RuntimeError(f"nobody listens at port {port}")
