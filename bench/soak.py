"""Random faults against a real elastic job for minutes: what is promised must hold whatever the order.

    python bench/soak.py --minutes 3 --seed 7                 a script without a session, restarted
    python bench/soak.py --online --seconds 120 --seed 7      one with a session, repaired while it runs (online.py)

Three agents on loopback (`--nnodes 1:3`, gloo workers). At random moments: a worker is killed, the master is killed, an
agent is killed and comes back, an agent is told to go and comes back, an agent is stopped for a while, a fork server
or a store host is killed; often two of these within milliseconds. Every so often, and at the end, the job must serve
a view of all three nodes again. Then it is told to finish: every agent ends with 0, the journal replays into a finished
job whose invariants hold, and nothing is left behind. The seed repeats the order of faults, not their exact moments.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NoReturn

import online
from machine import benchmark_environment, describe, heading, load
from processes import Run, kill, marked_pids

from holdfast.core.invariants import check_all
from holdfast.core.records import IncidentClosed, Outcome
from holdfast.core.state import Finished, JobState, Serving
from holdfast.core.transact import replay
from holdfast.journal import read_entries

NODES = ("a", "b", "c")
HEAL_TIMEOUT_S = 90.0
PREEMPTION_GRACE_S = 4.0
JOB = "soak"
SCRIPT = Path(__file__).parent / "scripts" / "rounds.py"


class Soak:
    def __init__(self, run: Run, chance: random.Random) -> None:
        self.run, self.chance = run, chance
        self.stop = run.directory / "stop"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.stopped: dict[str, float] = {}
        self.doomed: dict[subprocess.Popen[bytes], float] = {}
        self.faults: Counter[str] = Counter()

    def start_agent(self, node: str) -> None:
        command = [sys.executable, "-m", "holdfast", "run", "--nnodes", "1:3", "--nproc-per-node", "1"]
        command += ["--max-restarts", "100000", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}"]
        command += ["--rdzv-id", JOB, "--node-id", node, "--silence-timeout", "3", "--shutdown-timeout", "2"]
        ours = {"HOLDFAST_STATE_DIR": str(self.run.directory), "SOAK_STOP": str(self.stop)}
        self.agents[node] = self.run.start([*command, str(SCRIPT)], benchmark_environment() | ours, node)

    def job(self) -> JobState:
        path = self.run.directory / "jobs" / JOB / "journal.sqlite"
        return replay(entry.record for entry in read_entries(path)) if path.exists() else JobState()

    def whole(self) -> bool:
        """All three nodes serve the view in force, and every one of its workers runs."""
        job = self.job()
        serving = isinstance(job.phase, Serving) and job.incidents.current is None
        return serving and set(job.members) == set(NODES) and job.progress.started == set(NODES)

    def wait_until_whole(self) -> None:
        give_up_at = time.monotonic() + HEAL_TIMEOUT_S
        while not self.whole():
            self.bring_back()
            if time.monotonic() > give_up_at:
                raise RuntimeError(f"the job did not become whole again: {self.job()}\n{self.run.output()}")
            time.sleep(0.1)

    def bring_back(self) -> None:
        """Agents that have ended start again; ones that were stopped long enough go on."""
        for node, until in list(self.stopped.items()):
            if time.monotonic() >= until:
                del self.stopped[node]
                self.agents[node].send_signal(signal.SIGCONT)
        for agent, at in list(self.doomed.items()):
            if time.monotonic() >= at:
                del self.doomed[agent]
                agent.kill()
        for node in NODES:
            if node not in self.agents or self.agents[node].poll() is not None:
                self.start_agent(node)

    # --- faults

    def pids_of(self, words: str) -> list[int]:
        pids = marked_pids({"BENCH_RUN": self.run.mark})
        return [pid for pid in pids if words in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")]

    def kill_one(self, words: str) -> None:
        try:
            pids = self.pids_of(words)
        except OSError:
            return  # it ended while we looked
        if pids:
            kill([self.chance.choice(pids)])

    def kill_agent(self) -> None:
        kill([self.agents[self.chance.choice(NODES)].pid])

    def drain_agent(self) -> None:
        """A preemption: a notice, and the end after the grace period, also for one that stays for the master."""
        node = self.chance.choice(NODES)
        self.agents[node].send_signal(signal.SIGTERM)
        self.doomed[self.agents[node]] = time.monotonic() + PREEMPTION_GRACE_S

    def stop_agent(self) -> None:
        node = self.chance.choice(NODES)
        self.agents[node].send_signal(signal.SIGSTOP)
        self.stopped[node] = time.monotonic() + self.chance.choice([0.5, 5.0])

    def hit(self) -> None:
        faults: list[tuple[str, int, Callable[[], None]]] = [
            ("worker killed", 6, lambda: self.kill_one("-u " + str(SCRIPT))),
            ("master killed", 3, lambda: self.kill_one("holdfast master")),
            ("agent killed", 2, self.kill_agent),
            ("agent drained", 1, self.drain_agent),
            ("agent stopped for a while", 1, self.stop_agent),
            ("fork server killed", 1, lambda: self.kill_one("holdfast: fork server")),
            ("store host killed", 1, lambda: self.kill_one("holdfast: store host")),
        ]
        name, _, fault = self.chance.choices(faults, weights=[weight for _, weight, _ in faults])[0]
        self.faults[name] += 1
        fault()


def soak(run: Run, minutes: float, seed: int) -> None:
    chance = random.Random(seed)
    campaign = Soak(run, chance)
    for node in NODES:
        campaign.start_agent(node)
    campaign.wait_until_whole()
    end_at = time.monotonic() + minutes * 60
    rounds = 0
    while time.monotonic() < end_at:
        for _ in range(chance.randint(1, 4)):
            campaign.hit()
            time.sleep(chance.choice([0.0, 0.01, 0.1, 0.5, 2.0]))
            campaign.bring_back()
        campaign.wait_until_whole()
        rounds += 1
    campaign.stop.touch()
    finish(campaign)
    report(campaign, rounds)


def finish(campaign: Soak) -> None:
    for node, agent in campaign.agents.items():
        code = agent.wait(HEAL_TIMEOUT_S)
        if code:
            raise RuntimeError(f"agent {node} ended with {code}\n{campaign.run.output()}")
    job = campaign.job()
    check_all(job)
    if not isinstance(job.phase, Finished) or job.phase.record.outcome is not Outcome.SUCCEEDED:
        raise RuntimeError(f"the job did not succeed: {job.phase}")
    give_up_at = time.monotonic() + 10
    while left := marked_pids({"BENCH_RUN": campaign.run.mark}):
        if time.monotonic() > give_up_at:
            raise RuntimeError(f"left behind: {left}")
        time.sleep(0.05)


def report(campaign: Soak, rounds: int) -> None:
    path = campaign.run.directory / "jobs" / JOB / "journal.sqlite"
    entries = read_entries(path)
    closed = [entry.record for entry in entries if isinstance(entry.record, IncidentClosed)]
    took_s = [record.at - record.happened_at for record in closed if record.kind == "worker"]
    for name, count in campaign.faults.most_common():
        print(f"  {count:4d}  {name}")
    job = campaign.job()
    print(f"{rounds} rounds, {len(closed)} incidents, {job.view.number if job.view else 0} views, {job.term} terms")
    if took_s:
        print(f"worker failure -> workers up: median {median(took_s) * 1000:.0f} ms of {len(took_s)}")
    print("the job was whole again after every round, and succeeded; nothing was left behind")


def online_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--online", action="store_true", help="hurt a session, and compare it with an undisturbed one")
    group.add_argument("--model", choices=["ddp", "fsdp", "hsdp"], default="ddp")
    group.add_argument("--ranks", type=int, default=0, help="of the whole job; 3, or 4 where it must be even")
    group.add_argument("--nodes", type=int, choices=[1, 2], default=1, help="2: nodes die too, a third stands by")
    group.add_argument("--spares", type=int, default=1, help="parked workers of each node")
    group.add_argument("--seconds", type=float, default=120.0)
    group.add_argument("--elastic", action="store_true", help="ranks may be lost: samples exact, losses close")
    group.add_argument("--only", default="", help="names of faults (hurting.FAULTS), with commas between")
    group.add_argument("--without", default="", help="the same, of those to leave out")
    group.add_argument("--flags", default="", help="further flags of `holdfast run`, in one argument")


def check(arguments: argparse.Namespace, error: Callable[[str], NoReturn]) -> None:
    even = arguments.model == "hsdp" or arguments.nodes > 1
    arguments.ranks = arguments.ranks or (4 if even else 3)
    if even and arguments.ranks % 2:
        error("hsdp and two nodes need an even number of ranks")
    if arguments.elastic and arguments.model != "ddp":
        error("--elastic is for ddp: a sharded model is built anew in a world of another size")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4)))
    online_flags(parser.add_argument_group("online"))
    arguments = parser.parse_args()
    print(f"{heading(describe())}; load {load()}; seed {arguments.seed}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that everything started is ended
    if arguments.online:
        check(arguments, parser.error)
        sys.exit(online.soak(arguments))
    with tempfile.TemporaryDirectory(prefix="holdfast-soak-") as directory, Run(Path(directory)) as run:
        soak(run, arguments.minutes, arguments.seed)


if __name__ == "__main__":
    main()
