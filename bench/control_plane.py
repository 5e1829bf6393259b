"""What the control plane costs: a real master, a thousand agents on it, and one real agent looked at closely.

    join        all agents connect at once; from the first connection to the last agent that has its place in the view
    heartbeats  then nothing happens but heartbeats: the master's use of one core; with --snapshots all agents' reports
                of their images too, every second
    reconnect   a tenth of the connections end and are made again; until each agent has its standing order again
    replace     a tenth of the agents die and others come; until every agent has its place in the next view
    agent       a real `holdfast run`: from its exec to its node in the journal, its memory, and its use of a core
                while two workers sleep

Master and agents share the machine, so the first four include what the agents themselves cost.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import fleet
import machine
from processes import Run, cpu_s, resident_bytes, started_at
from restart import free_port, wait_until_listening
from samples import markdown

from holdfast.core.records import NodeJoined, NodeLost, TermBegan, WorkersStartedRecord
from holdfast.core.settings import Settings, heartbeat_interval
from holdfast.journal import read_entries

SLEEPER = Path(__file__).parent / "scripts" / "sleep.py"
ANSWER_LIMIT_S = 120.0
JOURNAL_LIMIT_S = 60.0
LOOK_S = 0.01


class Finding(NamedTuple):
    """One number, beside what we want it to be."""

    what: str
    value: float
    unit: str
    goal: float | None = None

    def cells(self) -> tuple[str, str, str]:
        goal = f"< {self.goal:g} {self.unit}" if self.goal is not None else ""
        return self.what, f"{self.value:.3g} {self.unit}", goal


# --- a thousand agents


class Fleets:
    """The processes that hold the agents."""

    def __init__(self, options: argparse.Namespace, port: int, token: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for number, size in enumerate(shares(options.agents, options.processes)):
            ours, theirs = context.Pipe()
            interval = options.heartbeat_interval
            plan = fleet.Plan(number, size, options.agents, port, token, interval, options.snapshots)
            process = context.Process(target=fleet.serve, args=(plan, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def tell(self, command: str, total: int = 0) -> float:
        """Give all fleets the command, with their shares of the total; how long until the last of them was done."""
        began_at = time.time()
        for pipe, share in zip(self._pipes, shares(total, len(self._pipes)), strict=True):
            pipe.send((command, share) if total else (command,))
        return max(self._answers()) - began_at

    def waiting(self) -> int:
        """How many reports the master has not answered."""
        for pipe in self._pipes:
            pipe.send(("waiting",))
        return int(sum(self._answers()))

    def _answers(self) -> list[float]:
        return [self._answer(pipe) for pipe in self._pipes]

    def _answer(self, pipe: Any) -> float:
        if not pipe.poll(ANSWER_LIMIT_S):
            raise RuntimeError(f"the agents were not done within {ANSWER_LIMIT_S:.0f} s")
        return float(pipe.recv())

    def close(self) -> None:
        self.tell("close")
        for process in self._processes:
            process.join()


def shares(total: int, parts: int) -> list[int]:
    return [total // parts + (number < total % parts) for number in range(parts)]


def many_agents(options: argparse.Namespace, directory: Path) -> Iterator[Finding]:
    port, token = free_port(), secrets.token_hex(16)
    with Run(directory) as run:
        master_pid = start_master(run, options, port, token)
        fleets = Fleets(options, port, token)
        fleets.tell("ready")
        tenth = max(options.agents // 10, 1)
        with used(master_pid) as use, used(*fleets.pids) as agents_use:
            joined_s = fleets.tell("join")
        yield Finding(f"{options.agents} agents join: view served to all", joined_s, "s", goal=2.0)
        yield Finding("… the master's processor time for it", use(), "s")
        yield Finding("… the agents' processor time for it", agents_use(), "s")
        yield from heartbeats(options, master_pid)
        if options.snapshots:
            yield Finding("reports that the master has not answered", fleets.waiting(), "reports", goal=options.agents)
            yield Finding("agents taken for lost so far", lost_nodes(directory), "agents", goal=1)
            yield Finding("terms of the master", terms(directory), "terms", goal=2)
        yield Finding(f"{tenth} connections end and come back", fleets.tell("reconnect", tenth), "s")
        yield Finding(f"{tenth} agents are replaced: next view served to all", fleets.tell("replace", tenth), "s")
        yield Finding("agents that lived and were taken for lost", lost_nodes(directory) - tenth, "agents", goal=1)
        yield Finding("the master's memory", resident_bytes(master_pid) / 1e6, "MB")
        fleets.close()


def start_master(run: Run, options: argparse.Namespace, port: int, token: str) -> int:
    environment = machine.benchmark_environment() | {"HOLDFAST_TOKEN": token}
    command = [sys.executable, "-m", "holdfast", "master", "--port", str(port), "--job-id", fleet.JOB_ID]
    command += ["--nnodes", str(options.agents), "--max-restarts", str(fleet.RESTARTS_MAX)]
    command += ["--state-dir", str(run.directory), "--heartbeat-interval", str(options.heartbeat_interval)]
    process = run.start(command, environment)
    wait_until_listening(f"127.0.0.1:{port}")
    return process.pid


def heartbeats(options: argparse.Namespace, master_pid: int) -> Iterator[Finding]:
    time.sleep(options.heartbeat_interval)  # what came with the view is over
    began_at = time.monotonic()
    with used(master_pid) as use:
        time.sleep(options.steady)
    took_s = time.monotonic() - began_at
    percent = 100 * use() / took_s
    if options.snapshots:
        yield Finding("heartbeats and a snapshot a second: the master's use of a core", percent, "%", goal=30.0)
        return
    interval_s = heartbeat_interval(Settings(heartbeat_interval_s=options.heartbeat_interval), options.agents)
    messages = 2 * options.agents / interval_s
    yield Finding(f"heartbeats and echoes ({messages:.0f}/s): the master's use of a core", percent, "%", goal=20.0)


@contextmanager
def used(*pids: int) -> Iterator[Callable[[], float]]:
    """The processor time that processes have used inside the block, known after it."""
    before = sum(map(cpu_s, pids))
    after: list[float] = []
    yield lambda: after[0] - before
    after.append(sum(map(cpu_s, pids)))


def terms(directory: Path) -> int:
    return sum(isinstance(record, TermBegan) for record in records(directory))


def lost_nodes(directory: Path) -> int:
    return sum(isinstance(record, NodeLost) for record in records(directory))


# --- one real agent


def one_agent(options: argparse.Namespace, directory: Path) -> Iterator[Finding]:
    with Run(directory) as run:
        environment = machine.benchmark_environment() | {"HOLDFAST_STATE_DIR": str(directory)}
        flags = ["--standalone", "--nproc-per-node", "2", "--start-method", "spawn"]
        process = run.start([sys.executable, "-m", "holdfast", "run", *flags, str(SLEEPER)], environment)
        joined = wait_for_record(run, NodeJoined)
        yield Finding("agent: from exec to its node in the journal", joined.at - started_at(process.pid), "s", goal=0.5)
        wait_for_record(run, WorkersStartedRecord)
        time.sleep(1.0)
        yield Finding("agent: memory", resident_bytes(process.pid) / 1e6, "MB", goal=80.0)
        with used(process.pid) as use:
            time.sleep(options.steady)
        yield Finding("agent: use of a core while its two workers sleep", 100 * use() / options.steady, "%")


def wait_for_record(run: Run, kind: type) -> Any:
    give_up_at = time.monotonic() + JOURNAL_LIMIT_S
    while time.monotonic() < give_up_at and not run.over:
        found = [record for record in records(run.directory) if isinstance(record, kind)]
        if found:
            return found[0]
        time.sleep(LOOK_S)
    raise RuntimeError(f"no {kind.__name__} in the journal:\n{run.output()}")


def records(directory: Path) -> list[Any]:
    paths = list((directory / "jobs").glob("*/journal.sqlite"))
    try:
        return [entry.record for entry in read_entries(paths[0])] if paths else []
    except Exception:  # the journal is being made at this very moment
        return []


# --- the command


def measure_all(options: argparse.Namespace) -> Iterator[Finding]:
    parts = {"agents": many_agents, "agent": one_agent}
    for name, part in parts.items():
        if options.only in (None, name):
            with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory:
                yield from part(options, Path(directory))


def shown(findings: Iterator[Finding]) -> Iterator[Finding]:
    for finding in findings:
        print("{}: {}   {}".format(*finding.cells()), flush=True)
        yield finding


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--agents", type=int, default=1_000)
    parser.add_argument("--processes", type=int, default=1, help="over which the agents are spread")
    parser.add_argument("--snapshots", action="store_true", help="workers with a session, and a snapshot every second")
    parser.add_argument("--heartbeat-interval", type=float, default=1.0, help="seconds")
    parser.add_argument("--steady", type=float, default=10.0, help="seconds over which use of a core is measured")
    parser.add_argument("--only", choices=["agents", "agent"])
    parser.add_argument("-o", "--output", type=Path, help="write everything as JSON")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    here, load_before = machine.describe(), machine.load()
    print(f"{machine.heading(here)}\nload average at the start: {load_before}\n")
    findings = list(shown(measure_all(options)))
    load_after = machine.load()
    print("\n" + "\n".join(markdown(("measure", "here", "goal"), [finding.cells() for finding in findings])))
    print(f"\nload average at the end: {load_after}")
    if options.output:
        about = {"machine": here, "load_before": load_before, "load_after": load_after}
        document = {**about, "findings": [finding._asdict() for finding in findings]}
        options.output.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
