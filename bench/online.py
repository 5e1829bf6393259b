"""The online soak: a session hurt at random moments for as long as asked, then compared with an undisturbed run.

The number of steps is fixed beforehand (as many as fit into the time if nothing went wrong), so the reference runs
exactly as many. When the time is over, nothing is hurt any more and the steps are no longer slowed down.

In rounds: one to three faults, milliseconds to seconds apart, then every rank must commit a step again. What would
leave no complete copy of the state in memory is not done (two neighbours of a fully sharded run, all ranks of a
replicated one): nobody promises to survive that online.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import verdict
from hurting import Hurting
from ledger import Ledger
from machine import benchmark_environment
from processes import Run, marked_pids

from holdfast.core.state import JobState, Serving
from holdfast.core.transact import replay
from holdfast.errors import JournalError
from holdfast.journal import read_entries

SCRIPT = Path(__file__).parent / "scripts" / "online.py"
JOB = "online"
PAUSE_MS = 50.0
"""By which a step is slowed down: most faults then hit a step, and not its way to the next."""
HEAL_TIMEOUT_S = 40.0
FINISH_TIMEOUT_S = 240.0
STACKS_S = 1.0
SLOTS = 12
"""Of the loader in an elastic run, so that dropout is the same in a world of any size."""
SAME_WORLD = "retry,recover-in-place,recover,exit"
ANY_WORLD = {1: "retry,elastic-training,exit", 2: "retry,recover-in-place,recover,elastic-training,exit"}


class Violation(RuntimeError):
    """A promise was broken."""


class Campaign:
    """The job that is hurt, and how it does."""

    def __init__(self, run: Run, options: argparse.Namespace) -> None:
        self.run, self.options = run, options
        self.directory = run.directory
        self.work = run.directory / "work"
        (self.work / "ears").mkdir(parents=True)
        (self.directory / "tmp").mkdir()
        self.ranks: int = options.ranks
        self.steps = steps_of(options)
        self.ledger = Ledger(self.work / "ledger")
        self.nodes = node_names(options)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.agents_killed = 0
        self.calm_since = float("inf")
        """When the last round was over (wall clock): from then on nobody hurts the job."""
        self.later: list[tuple[float, Callable[[], None]]] = []
        """What is due at a moment: an agent goes on, a node comes back."""

    @property
    def workers(self) -> int:
        """Of one node."""
        return self.ranks // int(self.options.nodes)

    def start_agent(self, node: str) -> None:
        if node in self.agents and self.agents[node].poll() is None:
            return
        options, words = self.options, [sys.executable, "-m", "holdfast", "run", "--log-format", "text"]
        least = 1 if options.elastic else options.nodes
        words += ["--nnodes", f"{least}:{options.nodes}", "--nproc-per-node", str(self.workers)]
        words += ["--recovery", ANY_WORLD[options.nodes] if options.elastic else SAME_WORLD]
        words += ["--spares", str(options.spares), "--hang-timeout", "2", "--shutdown-timeout", "2"]
        words += ["--spare-nodes", str(len(self.nodes) - options.nodes), "--node-id", node, "--rdzv-id", JOB]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}", *options.flags.split()]
        self.agents[node] = self.run.start([*words, *script(options)], environment(self.directory), node)

    def job(self) -> JobState:
        path = self.directory / "jobs" / JOB / "journal.sqlite"
        try:
            return replay(entry.record for entry in read_entries(path)) if path.exists() else JobState()
        except JournalError:
            return JobState()  # it is just being made

    def do_what_is_due(self) -> None:
        now = time.monotonic()
        due = [what for at, what in self.later if at <= now]
        self.later = [(at, what) for at, what in self.later if at > now]
        for what in due:
            what()

    def agents_are_missing(self) -> bool:
        """A node is still to come back."""
        return any(agent.poll() is not None for agent in self.agents.values())

    def is_over(self) -> bool:
        """An agent that was not killed has ended: the job has."""
        return any(agent.poll() not in (None, -signal.SIGKILL) for agent in self.agents.values())

    def wait_until_whole(self, since: float) -> None:
        """Every rank of the full world has committed a step after the last fault, and no incident is open."""
        give_up_at = time.monotonic() + HEAL_TIMEOUT_S
        while True:
            self.do_what_is_due()
            self.ledger.read_on()
            if self.ledger.whole_after(since, self.ranks) >= 0 and not self.later:
                job = self.job()
                if isinstance(job.phase, Serving) and job.incidents.current is None:
                    return
            if self.is_over():
                raise Violation(f"the job ended: {self.job().phase}")
            if time.monotonic() > give_up_at:
                raise Violation(f"no step of all ranks for {HEAL_TIMEOUT_S:.0f} s, or an incident that stays open")
            time.sleep(0.02)

    def wait_until_all_are_back(self) -> None:
        """One that comes when the job is over is refused, and rightly."""
        give_up_at = time.monotonic() + HEAL_TIMEOUT_S
        while any(agent.poll() is None for agent in self.agents.values()):
            nodes = self.job().nodes
            here = {node for node in self.nodes if node in nodes and nodes[node].info.pid == self.agents[node].pid}
            if here == set(self.nodes):
                return
            if time.monotonic() > give_up_at:
                raise Violation(f"nodes {set(self.nodes) - here} did not come back in {HEAL_TIMEOUT_S:.0f} s")
            time.sleep(0.1)

    def finish(self) -> None:
        self.calm_since = time.time()
        self.wait_until_all_are_back()
        (self.work / "fast").touch()
        give_up_at = time.monotonic() + FINISH_TIMEOUT_S
        while any(agent.poll() is None for agent in self.agents.values()):
            if time.monotonic() > give_up_at:
                raise Violation(f"not at its end within {FINISH_TIMEOUT_S:.0f} s")
            time.sleep(0.05)
        codes = {node: agent.poll() for node, agent in self.agents.items() if agent.poll()}
        if codes:
            raise Violation(f"agents ended with {codes}: {self.job().phase}")
        self.ledger.read_on()

    def take_stacks(self) -> None:
        """Of every process of the script, into the output of its node."""
        for pid in self.script_pids():
            try:
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGUSR2)
            except ProcessLookupError:
                pass
        time.sleep(STACKS_S)

    def script_pids(self, node: str | None = None) -> list[int]:
        """Processes that have reached the script's first lines; SIGUSR2 would end one that has not."""
        ears = {int(path.name) for path in (self.work / "ears").iterdir()}
        where = {"BENCH_NODE": node} if node else {}
        return [pid for pid in marked_pids({"BENCH_RUN": self.run.mark} | where) if pid in ears]


def node_names(options: argparse.Namespace) -> list[str]:
    """Where nodes die and the world must stay as it is, one more stands by."""
    spare = options.nodes > 1 and not options.elastic
    return [chr(ord("a") + number) for number in range(options.nodes + spare)]


def steps_of(options: argparse.Namespace) -> int:
    return int(options.seconds * 1e3 / PAUSE_MS)


def script(options: argparse.Namespace) -> list[str]:
    slots = SLOTS if options.elastic else 0
    return [str(SCRIPT), options.model, str(steps_of(options)), str(PAUSE_MS), str(slots)]


def environment(directory: Path) -> dict[str, str]:
    """Sockets' directories come to be below the run's own, so that what is left of them is seen."""
    ours = {"HOLDFAST_STATE_DIR": str(directory), "WORK": str(directory / "work"), "TMPDIR": str(directory / "tmp")}
    return {name: text for name, text in benchmark_environment().items() if name != "XDG_RUNTIME_DIR"} | ours


def undisturbed(directory: Path, options: argparse.Namespace) -> Ledger:
    """The same training, with nobody around."""
    work = directory / "work"
    (work / "ears").mkdir(parents=True)
    (directory / "tmp").mkdir()
    (work / "fast").touch()
    with Run(directory) as run:
        words = [sys.executable, "-m", "holdfast", "run", "--nproc-per-node", str(options.ranks), *script(options)]
        agent = run.start(words, environment(directory))
        if code := agent.wait(FINISH_TIMEOUT_S):
            raise Violation(f"the undisturbed run ended with {code}:\n{run.output()}")
    ledger = Ledger(work / "ledger")
    ledger.read_on()
    return ledger


def hurt(campaign: Campaign, hurting: Hurting, chance: random.Random) -> None:
    for node in campaign.nodes:
        campaign.start_agent(node)
    campaign.wait_until_whole(0.0)
    hurting.wait_until_ready()
    end_at = time.monotonic() + campaign.options.seconds
    while time.monotonic() < end_at:
        hurting.begin_round()
        for _ in range(chance.choice([1, 1, 1, 2, 2, 3])):
            hurting.hit()
            pause_until = time.monotonic() + chance.choice([0.0, chance.uniform(0.005, 0.1), chance.uniform(0.1, 1.5)])
            while time.monotonic() < pause_until:
                campaign.do_what_is_due()
                time.sleep(min(0.01, max(0.0, pause_until - time.monotonic())))
        campaign.wait_until_whole(time.time())
        if campaign.ledger.done[-1].step >= campaign.steps - 1:
            break
        time.sleep(chance.uniform(0.0, 0.3))


def soak(options: argparse.Namespace) -> int:
    """The exit code."""
    directory = Path(tempfile.mkdtemp(prefix="soak-"))
    (directory / "job").mkdir()
    chance = random.Random(options.seed)
    shared = verdict.shared_memory()
    with Run(directory / "job") as run:
        campaign = Campaign(run, options)
        hurting = Hurting(campaign, chance)
        try:
            hurt(campaign, hurting, chance)
            campaign.finish()
            problems = verdict.left_behind(campaign, shared)
        except Violation as violation:
            campaign.take_stacks()
            problems = [str(violation)]
    campaign.ledger.read_on()
    verdict.print_diary(campaign, hurting)
    if not problems:
        problems = verdict.compare(campaign, undisturbed(directory / "reference", options), directory)
    if problems:
        again = " ".join(sys.argv[1:]) + ("" if "--seed" in sys.argv else f" --seed {options.seed}")
        print(f"\nVIOLATED (seed {options.seed}; again: python bench/soak.py {again}; evidence: {directory})")
        for problem in problems:
            print(f"  {problem}")
        return 1
    shutil.rmtree(directory)
    promise = "same samples, losses close" if options.elastic else "the same bits, losses and samples"
    print(f"\nheld: {steps_of(options)} steps, {promise} as undisturbed; nothing lost, open or left behind")
    return 0
