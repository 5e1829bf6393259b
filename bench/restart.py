"""How long until training goes on: Holdfast and torchrun, alternately, on the same script with the same flags.

    cold      from the launcher's start to the first optimizer step done on all ranks
    worker    from `kill -9` of one worker, at random, to the first new step on all ranks
    node      two nodes on loopback (--nnodes 1:2); from the death of all processes of the one that does not host the
              rendezvous, to the first new step of the survivor
    host      the same, for the one that does host it: Holdfast's master, torchrun's store
    agent     the same, but only the launcher's own process dies on the host, and what dies with it

A new step is one of a process that did not live before the kill. Times are the script's own (its diary), so how
often this program looks does not enter. torchrun is run twice, as it comes and with
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without that, its workers meet at a store that still holds the keys of their
former lives, and many restarts fail. Whoever is not back within the limit is counted, not waited for.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import machine
from diary import Diary
from processes import Run
from samples import Sample, split_table, table

from holdfast.core.records import ViewFormed, WorkerFailedRecord
from holdfast.journal import read_entries

SCRIPT = Path(__file__).parent / "scripts" / "ddp.py"
START_LIMIT_S = 120.0
WORKER_LIMIT_S = 60.0
NODE_LIMIT_S = 150.0
LOOK_S = 0.02
WARM_STEPS = 20
"""Before anything is killed: first steps are slow, and DDP rearranges its buckets after them."""


class Launcher(NamedTuple):
    """A contender: the module that is run, and what it needs in its environment."""

    name: str
    module: tuple[str, ...]
    environment: dict[str, str]


HOLDFAST = Launcher("holdfast", ("holdfast", "run"), {})
TORCHRUN = Launcher("torchrun", ("torch.distributed.run",), {})
TORCHRUN_OWN_STORE = Launcher(
    "torchrun, own store", ("torch.distributed.run",), {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
)
PEERS = {
    "all": [TORCHRUN, TORCHRUN_OWN_STORE],
    "shared-store": [TORCHRUN],
    "own-store": [TORCHRUN_OWN_STORE],
    "none": [],
}


class Scene:
    """One job under one launcher, with its diary."""

    def __init__(self, launcher: Launcher, directory: Path) -> None:
        self.launcher, self.directory = launcher, directory
        self.run = Run(directory)
        (directory / "diary").mkdir()
        self.diary = Diary(directory / "diary")
        self._environment = machine.benchmark_environment() | launcher.environment
        self._environment |= {
            "BENCH_DIARY": str(directory / "diary"),
            "HOLDFAST_STATE_DIR": str(directory / "state"),
            "TMPDIR": str(directory),
        }

    def start(self, *flags: str, node: str = "0") -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", *self.launcher.module, "--max-restarts", "3", *flags, str(SCRIPT)]
        return self.run.start(command, self._environment, node)

    def wait_for(self, reached: Callable[[], float | None], limit_s: float) -> float | None:
        """When it was reached; None if the job ended or the limit passed before."""
        give_up_at = time.monotonic() + limit_s
        while time.monotonic() < give_up_at:
            over = self.run.over
            self.diary.read_on()
            if (at := reached()) is not None:
                return at
            if over:
                return None
            time.sleep(LOOK_S)
        return None

    def recovered(self, old_pids: set[int], killed_at: float, world: int, limit_s: float) -> tuple[float | None, str]:
        """How long the first new step took; without one, why."""
        at = self.wait_for(lambda: self.diary.all_reached(1, old_pids, world), limit_s)
        if at is not None:
            return at - killed_at, ""
        return None, "the job ended" if self.run.over else f"no step within {limit_s:.0f} s"


# --- the measurements


def one_node(scene: Scene, *, kill: bool) -> Iterator[Sample]:
    """Two workers on one node: the cold start, and then perhaps the death of one of them."""
    name = scene.launcher.name
    began_at = time.time()
    scene.start("--standalone", "--nproc-per-node", "2")
    first_at = scene.wait_for(lambda: scene.diary.all_reached(1, set()), START_LIMIT_S)
    if first_at is None:
        raise RuntimeError(f"{name} did not start:\n{scene.run.output()}")
    yield Sample("cold", name, first_at - began_at)
    if kill:
        yield kill_worker(scene)


def kill_worker(scene: Scene) -> Sample:
    warm_up(scene, world=2)
    old_pids, victim = scene.diary.pids, scene.diary.running_pid(random.randrange(2))
    killed_at = time.time()
    os.kill(victim, signal.SIGKILL)
    seconds, why = scene.recovered(old_pids, killed_at, 2, WORKER_LIMIT_S)
    split_s = split(scene, old_pids, killed_at) if scene.launcher is HOLDFAST and seconds is not None else {}
    return Sample("worker", scene.launcher.name, seconds, why, split_s)


def two_nodes(scene: Scene, measure: str) -> Iterator[Sample]:
    """One worker on each of two nodes, of which one dies."""
    endpoint = f"127.0.0.1:{free_port()}"
    flags = ("--nnodes", "1:2", "--nproc-per-node", "1", "--local-addr", "127.0.0.1")
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "bench")
    host = scene.start(*flags, *rendezvous, node="host")
    wait_until_listening(endpoint)
    scene.start(*flags, *rendezvous, node="node")
    warm_up(scene, world=2)
    old_pids, killed_at = scene.diary.pids, time.time()
    if measure == "agent":
        os.kill(host.pid, signal.SIGKILL)
    else:
        scene.run.kill_node(measure)
    seconds, why = scene.recovered(old_pids, killed_at, 1, NODE_LIMIT_S)
    yield Sample(measure, scene.launcher.name, seconds, why)


def warm_up(scene: Scene, world: int) -> None:
    """Train for a while, to an end that is not in step with anything."""
    if scene.wait_for(lambda: scene.diary.all_reached(WARM_STEPS, set(), world), START_LIMIT_S) is None:
        raise RuntimeError(f"{scene.launcher.name} did not train on {world} ranks:\n{scene.run.output()}")
    time.sleep(random.uniform(0.5, 0.6))
    scene.diary.read_on()


def split(scene: Scene, old_pids: set[int], killed_at: float) -> dict[str, float]:
    """Holdfast's phases, from its journal and from the diary; each up to the last rank that passed it."""
    [path] = (scene.directory / "state" / "jobs").glob("*/journal.sqlite")
    records = [entry.record for entry in read_entries(path)]
    lost = next(record for record in records if isinstance(record, WorkerFailedRecord))
    view = [record for record in records if isinstance(record, ViewFormed)][-1]
    reached = {
        "its agent sees the death": lost.failure.failed_at,
        "the master hears of it and decides": view.at,
        "workers stopped, new ones forked, script begins": scene.diary.last("started", old_pids),
        "imports": scene.diary.last("imported", old_pids),
        "init_process_group": scene.diary.last("joined", old_pids),
        "DistributedDataParallel, optimizer": scene.diary.last("wrapped", old_pids),
        "first step": scene.diary.last("step", old_pids),
    }
    times = [killed_at, *reached.values()]
    return {phase: after - before for phase, before, after in zip(reached, times, times[1:], strict=False)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_listening(endpoint: str) -> None:
    """The second node comes when there is somebody to meet, so that it is known which one hosts."""
    host, _, port = endpoint.partition(":")
    give_up_at = time.monotonic() + START_LIMIT_S
    while time.monotonic() < give_up_at:
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
            return
        except OSError:
            time.sleep(LOOK_S)
    raise RuntimeError(f"nobody listens at {endpoint}")


# --- the command


def measure_all(options: argparse.Namespace) -> Iterator[Sample]:
    peers = PEERS[options.peer]
    wanted = options.only
    for launcher in [HOLDFAST, *peers] * options.rehearsals:
        list(in_scene(launcher, lambda scene: one_node(scene, kill=False)))
    if wanted in (None, "cold", "worker"):
        for launcher in [HOLDFAST, *peers] * options.repetitions:
            yield from in_scene(launcher, lambda scene: one_node(scene, kill=wanted != "cold"))
    if wanted in (None, "node"):
        for launcher in [HOLDFAST, *peers[-1:]] * options.node_repetitions:
            for measure in ("node", "host", "agent"):
                yield from in_scene(launcher, lambda scene, measure=measure: two_nodes(scene, measure))


def in_scene(launcher: Launcher, measure: Callable[[Scene], Iterator[Sample]]) -> Iterator[Sample]:
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory:
        scene = Scene(launcher, Path(directory))
        with scene.run:
            yield from measure(scene)


def shown(samples: Iterator[Sample]) -> Iterator[Sample]:
    """Says each as it comes: some of them take a minute."""
    for sample in samples:
        result = f"{sample.seconds:.3f} s" if sample.seconds is not None else sample.why
        print(f"{sample.measure:7} {sample.launcher:20} {result}   (load {os.getloadavg()[0]:.2f})", flush=True)
        yield sample


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--repetitions", type=int, default=5, help="of the cold start and the worker's death")
    parser.add_argument("--node-repetitions", type=int, default=2, help="of each node's death: torchrun takes a minute")
    parser.add_argument("--rehearsals", type=int, default=1, help="cold starts before anything is measured")
    parser.add_argument("--only", choices=["cold", "worker", "node"], help="`worker` has a cold start too")
    parser.add_argument("--peer", choices=list(PEERS), default="all", help="torchrun's kinds of store to compare with")
    parser.add_argument("--seed", type=int, default=0, help="of the victims and the moments")
    parser.add_argument("-o", "--output", type=Path, help="write everything as JSON")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    random.seed(options.seed)
    here, load_before = machine.describe(), machine.load()
    print(f"{machine.heading(here)}\nload average at the start: {load_before}\n")
    samples = list(shown(measure_all(options)))
    load_after = machine.load()
    print("\n" + "\n".join(table(samples, HOLDFAST.name)))
    if any(sample.split_s for sample in samples):
        print("\nHoldfast, from the death of a worker to the first new step:\n\n" + "\n".join(split_table(samples)))
    print(f"\nload average at the end: {load_after}")
    if options.output:
        write(options.output, {"machine": here, "load_before": load_before, "load_after": load_after}, samples)


def write(path: Path, about: dict[str, Any], samples: list[Sample]) -> None:
    path.write_text(json.dumps({**about, "samples": [dataclasses.asdict(s) for s in samples]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
