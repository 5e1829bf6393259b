"""Holdfast's node check and DLRover's, on the same two nodes: how long each takes, and what it finds.

    python bench/node_check.py                     both, alternately; DLRover is installed in an environment of its own
    python bench/node_check.py --peer none         Holdfast alone

Two agents on loopback, one worker each, the script does nothing. What is wrong is wrong for both in the same way:

    healthy     nothing
    share       node 1 may run for a tenth of the time (a control group, from its start on)
    wrong       a matrix product of node 1 has one wrong number (torch.matmul is replaced as torch is imported)

DLRover keeps its results under /tmp/dlrover, for one node a machine: each of its agents gets a mount of its own there.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import machine
import msgspec
from peers import Peer, install, version
from processes import Run

from holdfast.core.records import CheckConcluded
from holdfast.journal import read_entries

SCENARIOS = ("healthy", "share", "wrong")
LIMIT_S = 240.0
LOOK_S = 0.02
QUOTA_US = 10_000
CGROUP = Path("/sys/fs/cgroup/cpu")
DLROVER = Peer("dlrover[k8s,torch]==0.6.1", "dlrover", released_as="dlrover", besides=("protobuf", "psutil"))
IN_GROUP = ("sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"')
WITH_OWN_RESULTS = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /tmp/dlrover && exec "$0" "$@"')
SCRIPT = "import sys, time, pathlib\npathlib.Path(sys.argv[1]).open('a').write(f'{time.time()}\\n')\n"
WRONG_PRODUCT = """\
import importlib.util, sys


class WrongProduct:
    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            right = module.matmul

            def matmul(*args, **options):
                product = right(*args, **options)
                product.view(-1)[7] += 1
                return product

            module.matmul = matmul

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, WrongProduct())
"""


class Sample(NamedTuple):
    """One run. `check_s`: the check itself. `until_training_s`: from the launch to the script's first line, if any."""

    contender: str
    scenario: str
    check_s: float | None
    until_training_s: float | None
    found: str


class Stage(NamedTuple):
    """Where a run takes place."""

    run: Run
    directory: Path
    scenario: str

    @property
    def diary(self) -> Path:
        return self.directory / "diary"

    @property
    def script(self) -> str:
        path = self.directory / "nothing.py"
        path.write_text(SCRIPT)
        return str(path)

    def environment(self, node: int) -> dict[str, str]:
        environment = machine.benchmark_environment()
        environment = {name: text for name, text in environment.items() if not name.startswith("HOLDFAST_")}
        environment["TMPDIR"] = str(self.directory)  # torch leaves a directory there
        if self.scenario == "wrong" and node == 1:
            hook = self.directory / "hook"
            hook.mkdir(exist_ok=True)
            (hook / "sitecustomize.py").write_text(WRONG_PRODUCT)
            known = environment.get("PYTHONPATH", "")
            environment["PYTHONPATH"] = f"{hook}{os.pathsep}{known}" if known else str(hook)
        return environment

    def start(self, node: int, command: Sequence[str], more: Mapping[str, str]) -> subprocess.Popen[bytes]:
        limited = (*IN_GROUP, str(group_of(self.run))) if self.scenario == "share" and node == 1 else ()
        return self.run.start([*limited, *command], self.environment(node) | dict(more), node=str(node))

    def began_training_at(self) -> float | None:
        lines = self.diary.read_text().split() if self.diary.exists() else []
        return min(map(float, lines)) if len(lines) == 2 else None


def group_of(run: Run) -> Path:
    return CGROUP / f"bench-{run.mark}"


# --- the contenders


def holdfast(stage: Stage, _: str) -> Sample:
    port, state = free_port(), stage.directory / "state"
    began_at = time.time()
    agents = []
    for node in (0, 1):
        meet = ["--nnodes", "2", "--node-rank", str(node), "--master-port", str(port), "--state-dir", str(state)]
        command = [sys.executable, "-m", "holdfast", "run", *meet, "--node-check", "--log-format", "json"]
        agents.append(stage.start(node, [*command, stage.script, str(stage.diary)], {}))
    journal = lambda: next(iter(state.glob("jobs/*/journal.sqlite")), None)  # noqa: E731
    wait_for(lambda: (path := journal()) and checks(path), agents)
    checked = checks(path) if (path := journal()) else []
    bad = [f"{v.node_id} is {v.fitness}: {v.why}" for c in checked for v in c.nodes if v.fitness != "fit"]
    if not any("unfit" in text for text in bad):  # else two nodes are not there, and the job waits for another
        wait_for(stage.began_training_at, agents)
    at = stage.began_training_at()
    took_s = checked[0].took_s if checked else None
    return Sample("holdfast", stage.scenario, took_s, at - began_at if at else None, "; ".join(bad) or "nothing")


def checks(journal: Path) -> list[CheckConcluded]:
    return [entry.record for entry in read_entries(journal) if isinstance(entry.record, CheckConcluded)]


def dlrover(stage: Stage, python: str) -> Sample:
    port = free_port()
    master = [python, "-u", "-m", "dlrover.python.master.main", "--platform", "local", "--port", str(port)]
    keeper = stage.run.start([*master, "--node_num", "2", "--job_name", "check"], stage.environment(0), node="master")
    wait_for(lambda: answers(port), [keeper])
    Path("/tmp/dlrover").mkdir(exist_ok=True)
    began_at = time.time()
    agents = []
    for node in (0, 1):
        command = [str(Path(python).with_name("dlrover-run")), "--network-check", "--nnodes=2", "--nproc_per_node=1"]
        told = {"DLROVER_MASTER_ADDR": f"127.0.0.1:{port}", "NODE_RANK": str(node), "NODE_ID": str(node)}
        told |= {"NODE_NUM": "2", "WORKER_NUM": "2", "ELASTIC_JOB_NAME": f"check_{node}"}
        words = [*WITH_OWN_RESULTS, *command, stage.script, str(stage.diary)]
        agents.append(stage.start(node, words, told))
    wait_for(lambda: stage.began_training_at() or all(a.poll() is not None for a in agents), agents)
    log = (stage.directory / "output-0").read_text(errors="replace")
    at = stage.began_training_at()
    begin, end = stamp_of(log, "starting node-check workers"), stamp_of(log, "Network check result is|NodeCheckFailed")
    found = re.findall(r"Fault nodes are: (\[.*?\]).*stragglers are: (\[.*?\])", log)
    text = "; ".join(f"faults {faults}, stragglers {slow}" for faults, slow in found) or "no verdict"
    took_s = end - begin if begin and end else None
    return Sample("dlrover", stage.scenario, took_s, at - began_at if at else None, text)


def stamp_of(log: str, pattern: str) -> float | None:
    for line in log.splitlines():
        if re.search(pattern, line) and (stamp := re.match(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+)\]", line)):
            return datetime.strptime(stamp[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
    return None


# --- running them


def measure(contender: str, scenario: str, python: str) -> Sample:
    with tempfile.TemporaryDirectory() as name, Run(Path(name)) as run:
        group = group_of(run)
        if scenario == "share":
            group.mkdir()
            (group / "cpu.cfs_quota_us").write_text(str(QUOTA_US))
        try:
            return {"holdfast": holdfast, "dlrover": dlrover}[contender](Stage(run, Path(name), scenario), python)
        finally:
            run.end()
            if scenario == "share":
                remove(group)


def remove(group: Path) -> None:
    """Once the kernel has let go of those who were killed."""
    give_up_at = time.monotonic() + 10.0
    while True:
        try:
            return group.rmdir()
        except OSError:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(LOOK_S)


def wait_for(done: object, agents: Sequence[subprocess.Popen[bytes]]) -> None:
    give_up_at = time.monotonic() + LIMIT_S
    while time.monotonic() < give_up_at and any(agent.poll() is None for agent in agents):
        if done():  # type: ignore[operator]
            return
        time.sleep(LOOK_S)


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def obstacle(scenario: str) -> str:
    if scenario == "share" and not os.access(CGROUP / "cgroup.procs", os.W_OK):
        return "no control groups (v1) for the processor that may be written"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=("dlrover", "none"), default="dlrover")
    parser.add_argument("--only", choices=SCENARIOS, action="append")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--environments", type=Path, default=Path("~/.cache/holdfast-bench").expanduser())
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    about = machine.describe()
    print(machine.heading(about))
    print(f"load average at the start: {machine.load()}")
    contenders, python = ["holdfast"], ""
    if options.peer == "dlrover":
        if os.getuid() != 0:
            raise SystemExit("DLRover's agents need a mount each, which needs root: --peer none does without")
        python = install(DLROVER, options.environments)
        print(f"dlrover: {version(DLROVER, python)[0]}")
        contenders.append("dlrover")
    samples = []
    for _ in range(options.repetitions):
        for scenario in options.only or SCENARIOS:
            if why := obstacle(scenario):
                print(f"{scenario}: left out, {why}")
                continue
            for contender in contenders:
                samples.append(measure(contender, scenario, python))
                print(f"  {samples[-1]}", flush=True)
    report(samples)
    print(f"load average at the end: {machine.load()}")
    if options.output:
        options.output.write_bytes(msgspec.json.encode({"machine": about, "samples": [s._asdict() for s in samples]}))


def report(samples: Sequence[Sample]) -> None:
    print("\n| scenario | who | check | until training | found |\n| --- | --- | --- | --- | --- |")
    for scenario in SCENARIOS:
        for contender in ("holdfast", "dlrover"):
            of = [s for s in samples if (s.scenario, s.contender) == (scenario, contender)]
            if of:
                times = [spread([s.check_s for s in of]), spread([s.until_training_s for s in of])]
                print(f"| {scenario} | {contender} | {' | '.join(times)} | {of[-1].found} |")


def spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    return f"{statistics.median(known):.1f} [{min(known):.1f}–{max(known):.1f}] s"


if __name__ == "__main__":
    main()
