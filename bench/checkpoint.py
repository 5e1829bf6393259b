"""What a checkpoint costs: Holdfast beside torch's own ways and DLRover, and beside the raw speed of memory and disk.

    first      the first save: into memory that was never used; and how much memory it takes
    stall      how long a save keeps the training: the call, and what the update waits; and how much slower the steps
               after it are. Once with a core left over (one thread computes), once with none (two do)
    cadence    steps with snapshots as often as is advised, and steps without
    durable    from the call until it is on the disk, beside nothing
    persist    an image in memory to a published checkpoint; the same bytes written raw
    restore    from shared memory, and from a disk whose cache is empty; the same bytes copied, and read raw

Contenders take turns in every round, and every turn measures a memcpy of the same state first: ratios are of
neighbours, and medians over rounds. `others` is how many cores everybody else used meanwhile: what the machine does
besides is in the times, less in the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import machine
import peers
from checkpoint_tables import tables
from contenders import free_ports, wait_until_listening
from processes import RUN_VARIABLE, Run, marked_pids

SCRIPTS = Path(__file__).parent / "scripts" / "checkpoint"
SAVERS = {
    "session": "session",
    "session-checkpoint": "session",
    "checkpointer": "bare",
    "torch.save": "bare",
    "dcp.save": "bare",
    "dcp.async-thread": "bare",
    "dcp.async-process": "bare",
    "dlrover-memory": "dlrover",
    "dlrover-disk": "dlrover",
}
"""Contender → the process that it is in."""
IN_MEMORY = ("session", "dlrover-memory")
"""Those save nothing durable."""
MEASURES = ("first", "stall", "cadence", "durable", "persist", "restore")
START_LIMIT_S, ANSWER_LIMIT_S = 180.0, 600.0
LOOK_S = 0.01
SHARED_MEMORY, DLROVER_MEMORY = Path("/dev/shm"), "standalone_*_ckpt_shm_*"


@dataclass(frozen=True)
class Sample:
    """An answer of a contender in one turn."""

    measure: str
    contender: str
    threads: int
    round: int
    load: float
    found: dict[str, Any]


class Lab:
    """The processes, which answer one at a time."""

    def __init__(self, directory: Path, storage: Path, run: Run, options: argparse.Namespace) -> None:
        self._directory, self._storage, self._run, self._options = directory, storage, run, options
        self._counts: dict[str, int] = {}
        self._turns = directory / "turns"
        self._turns.mkdir()

    def start(self, name: str, dlrover_python: str) -> None:
        environment = machine.benchmark_environment() | self._settings()
        script = str(SCRIPTS / {"bare": "bare.py", "session": "under_holdfast.py", "dlrover": "under_dlrover.py"}[name])
        match name:
            case "bare":
                command = [sys.executable, script]
            case "session":
                flags = ["--standalone", "--nproc-per-node", "1", "--snapshots", "1000000"]
                flags += ["--checkpoint-dir", str(self._storage / "session"), "--checkpoint-keep", "last:1"]
                command = [sys.executable, "-m", "holdfast", "run", *flags, script]
            case _:
                port = free_ports(1)
                master = [dlrover_python, "-u", "-m", "dlrover.python.master.main", "--platform", "local"]
                master += ["--port", str(port), "--node_num", "1", "--job_name", f"bench-{os.getpid()}"]
                self._run.start(master, environment, "master")
                wait_until_listening(port, 60.0)
                environment |= {"DLROVER_MASTER_ADDR": f"127.0.0.1:{port}", "NODE_RANK": "0", "NODE_NUM": "1"}
                run = str(Path(dlrover_python).with_name("dlrover-run"))
                command = [dlrover_python, run, "--nnodes=1", "--nproc_per_node=1", "--max_restarts=0", script]
        self._run.start(command, environment, name)
        self._until(self._turns / f"{name}.ready", START_LIMIT_S, name)

    def ask(self, name: str, what: str, **more: Any) -> dict[str, Any]:
        number = self._counts.get(name, 0)
        self._counts[name] = number + 1
        unfinished = self._turns / f"{name}.{number}.asking"
        unfinished.write_text(json.dumps({"what": what, **more}))
        unfinished.rename(self._turns / f"{name}.{number}.ask")
        answer = self._turns / f"{name}.{number}.answer"
        self._until(answer, ANSWER_LIMIT_S, name)
        found: dict[str, Any] = json.loads(answer.read_text())
        return found

    def _until(self, path: Path, limit_s: float, name: str) -> None:
        give_up_at = time.monotonic() + limit_s
        while not path.exists():
            if time.monotonic() > give_up_at:
                raise RuntimeError(f"{name} does not answer:\n{self._run.output()}")
            time.sleep(LOOK_S)

    def _settings(self) -> dict[str, str]:
        return {
            "BENCH_TURNS": str(self._turns),
            "BENCH_STORAGE": str(self._storage),
            "BENCH_SIZE_MB": str(self._options.size_mb),
            "BENCH_ROWS": str(self._options.rows),
            "HOLDFAST_STATE_DIR": str(self._directory / "state"),
            "TMPDIR": str(self._directory),
        }

    @contextmanager
    def memory(self) -> Iterator[list[float]]:
        """How much memory all of it uses at most, in bytes beyond what it used before; shared memory counted once."""
        before, highest, is_over = self._used_bytes(), [0.0], threading.Event()

        def look() -> None:
            while not is_over.wait(0.05):
                highest[0] = max(highest[0], self._used_bytes() - before)

        watching = threading.Thread(target=look)
        watching.start()
        try:
            yield highest
        finally:
            is_over.set()
            watching.join()

    def _used_bytes(self) -> float:
        total = 0
        for pid in marked_pids({RUN_VARIABLE: self._run.mark}):
            try:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            except OSError:
                continue
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        return float(total)


def measure(lab: Lab, savers: list[str], options: argparse.Namespace) -> Iterator[Sample]:
    """In rounds, so that a busy minute of the machine hits all of them."""

    def sample(what: str, saver: str, number: int, threads: int = 1, **more: Any) -> Sample:
        load, process = os.getloadavg()[0], SAVERS.get(saver, "bare")
        found = lab.ask(process, what, saver=saver, threads=threads, **more)
        return Sample(what, saver, threads, number, load, found)

    if "first" in options.only:
        for saver in (one for one in savers if one not in ("session-checkpoint", "dlrover-disk")):
            with lab.memory() as highest:
                first = sample("first", saver, 0)
            first.found["memory_bytes"] = highest[0]
            if saver == "session":
                first.found.update(lab.ask("session", "memcpy"))
            yield first
    for number in range(options.rounds):
        if "stall" in options.only:
            for threads in (1, 2):
                yield from (sample("stall", saver, number, threads, steps=options.steps) for saver in savers)
        if "cadence" in options.only and "session" in savers:
            yield from (sample("cadence", "session", number, n, steps=options.steps * 2) for n in (1, 2))
        if "durable" in options.only and number < options.disk_rounds:
            yield from (sample("durable", saver, number, 2) for saver in savers if saver not in IN_MEMORY)
        if "persist" in options.only and number < options.disk_rounds:
            yield sample("persist", "persist", number, 2)
        if "restore" in options.only and number < options.disk_rounds:
            yield sample("restore", "restore", number, 2)
            others = [s for s in savers if not s.startswith("session") and s != "dlrover-disk"]
            yield from (sample("load", saver, number, 2) for saver in others)


def shown(samples: Iterator[Sample]) -> Iterator[Sample]:
    """Says each as it comes."""
    for sample in samples:
        numbers = ", ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in sample.found.items())
        print(
            f"{sample.measure:8} {sample.contender:18} {sample.threads}  {numbers}   (load {sample.load:.1f})",
            flush=True,
        )
        yield sample


def find_dlrover(options: argparse.Namespace) -> tuple[str, str, str]:
    """Its Python, its version, and why there is none."""
    python, why, version = options.dlrover_python, "", ""
    if python is None and options.install_peers:
        try:
            python = peers.install(peers.DLROVER, options.install_peers)
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            why = f"could not be installed: {str(error).splitlines()[-1]}"
    if python is not None:
        version, why = peers.version(peers.DLROVER, python)
    return python or "", version, why or ("" if python else "not installed (--dlrover-python or --install-peers)")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--size-mb", type=float, default=1000.0, help="of the model and its Adam state, in 10^6 bytes")
    parser.add_argument("--rows", type=int, default=64, help="of a batch: how long a step is")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--disk-rounds", type=int, default=5, help="in how many of them the disk is measured")
    parser.add_argument("--steps", type=int, default=3, help="before a save, and after it, in a turn")
    parser.add_argument("--only", help=f"some of {','.join(MEASURES)}")
    parser.add_argument("--contenders", help=f"some of {','.join(SAVERS)}")
    parser.add_argument("--storage", type=Path, help="where checkpoints go; a temporary directory if not given")
    parser.add_argument("--dlrover-python", help="Python of an environment that has dlrover")
    parser.add_argument("--install-peers", type=Path, metavar="DIR", help="make such an environment there, or use it")
    parser.add_argument("-o", "--output", type=Path, help="write everything as JSON")
    options = parser.parse_args()
    options.only = options.only.split(",") if options.only else list(MEASURES)
    options.contenders = options.contenders.split(",") if options.contenders else list(SAVERS)
    if unknown := (set(options.only) - set(MEASURES)) | (set(options.contenders) - set(SAVERS)):
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    return options


@contextmanager
def left_by_dlrover() -> Iterator[None]:
    """Its shared memory outlives it. What a living process has mapped is somebody else's."""
    before = set(SHARED_MEMORY.glob(DLROVER_MEMORY))
    try:
        yield
    finally:
        mapped = "".join(_maps())
        for path in set(SHARED_MEMORY.glob(DLROVER_MEMORY)) - before:
            if str(path) not in mapped:
                path.unlink(missing_ok=True)


def _maps() -> Iterator[str]:
    """What all processes have mapped."""
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            yield path.read_text(errors="replace")
        except OSError:
            continue  # it has ended


def run(options: argparse.Namespace, dlrover_python: str, missing: dict[str, str]) -> list[Sample]:
    wanted = [name for name in options.contenders if name not in missing]
    processes = {SAVERS[name] for name in wanted} | ({"bare"} if {"persist", "restore"} & set(options.only) else set())
    home = tempfile.TemporaryDirectory(prefix="holdfast-bench-", ignore_cleanup_errors=True)
    with left_by_dlrover(), home as name:
        directory = Path(name)
        parent = options.storage or directory
        with tempfile.TemporaryDirectory(prefix="storage-", dir=parent) as storage, Run(directory) as started:
            lab = Lab(directory, Path(storage), started, options)
            for process in sorted(processes):
                try:
                    lab.start(process, dlrover_python)
                except RuntimeError as error:
                    if process != "dlrover":
                        raise
                    print(error, file=sys.stderr)
                    missing |= {saver: "did not start" for saver in wanted if SAVERS[saver] == process}
            wanted = [saver for saver in wanted if saver not in missing]
            samples = []
            try:
                for sample in shown(measure(lab, wanted, options)):
                    samples.append(sample)
            except KeyboardInterrupt:
                print("interrupted: what there is", file=sys.stderr)
            for process in sorted(processes):
                (lab._turns / f"{process}.{lab._counts.get(process, 0)}.ask").write_text('{"what": "stop"}')
            return samples


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an exception: what there is is shown, and all is ended
    options = parse_options()
    python, version, why = find_dlrover(options)
    missing = {name: why for name, process in SAVERS.items() if process == "dlrover"} if why else {}
    here = machine.describe() | ({"dlrover": version} if version else {})
    load_before = machine.load()
    print(f"{machine.heading(here)}\nload average at the start: {load_before}\n", flush=True)
    samples = run(options, python, missing)
    load_after = machine.load()
    print("\n" + "\n".join(tables([asdict(sample) for sample in samples], options.size_mb * 1e6)))
    for name, reason in missing.items():
        if name in options.contenders:
            print(f"not measured: {name}: {reason}")
    loads = [sample.load for sample in samples]
    if loads:
        print(f"\nload average of the turns: {median(loads):.1f} [{min(loads):.1f}–{max(loads):.1f}]")
    print(f"load average at the end: {load_after}")
    if options.output:
        about = {"machine": here, "load_before": load_before, "load_after": load_after, "missing": missing}
        chosen = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
        document = {"options": chosen, **about, "samples": [asdict(sample) for sample in samples]}
        options.output.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
