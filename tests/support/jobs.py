"""Real jobs for tests: `holdfast run` as a process, what it left in its journal, and what its workers wrote.

    job = Place(tmp_path)                                  where a job's state, ledger and outputs live
    agent = job.start("--nproc-per-node", "2", STEPS)      or start_agent(...), which it is made of
    wait_for(lambda: len(job.journal.pids()) == 2)         never a sleep: a condition and a generous deadline
    job.finish()                                           the workers of STEPS see a flag and end well
    assert agent.wait() == 0

Every process carries MARKER in its environment, so that what a test leaves behind is found (tests/conftest.py).
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from holdfast.core.records import DurableRecord, JobFinished, TermBegan, ViewFormed, WorkersStartedRecord
from holdfast.core.state import JobState
from holdfast.core.transact import replay
from holdfast.core.views import View
from holdfast.errors import JournalError
from holdfast.journal import read_entries

MARKER = "HOLDFAST_TEST_ID"
"""The variable that every process of a test has."""
DEADLINE_S = 60.0
"""For everything a test waits for: far longer than it takes, and within pytest's own limit."""
POLL_S = 0.02
SCRIPTS = Path(__file__).parents[1] / "e2e" / "scripts"
STEPS = str(SCRIPTS / "steps.py")
SPAWN = ("--start-method", "spawn")
"""For tests that do not care how workers start: nothing has to warm up."""

# A shell that runs the tests may be inside a job itself; what it says must not steer the jobs under test.
FOREIGN_PREFIXES = ("HOLDFAST_", "PET_", "TORCHELASTIC_", "TORCH_ELASTIC_")

T = TypeVar("T")
RecordT = TypeVar("RecordT")
agents: list[AgentProcess] = []
"""Those of the running test, the oldest first; its guard ends what is left of them."""


def wait_for(predicate: Callable[[], T], deadline_s: float = DEADLINE_S, what: str = "") -> T:
    """What the predicate returns, once it is true. Fails the test after the deadline."""
    deadline = time.monotonic() + deadline_s
    while not (found := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {deadline_s:.0f} s in vain for {what or 'a condition'}; last seen: {found!r}")
        time.sleep(POLL_S)
    return found


def marker() -> str:
    """The running test's id: eight characters, for names of things that the guard must find."""
    return os.environ[MARKER]


def free_port() -> int:
    """Below the range from which the kernel hands out ports, so that no store or client takes it meanwhile."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def snapshot_dir(wanted_marker: str = "") -> Path:
    """Where the agents of the running test keep snapshots."""
    return Path("/dev/shm") / f"holdfast-{wanted_marker or marker()}"


def agent_environment(state_dir: Path, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a test's agent: the shell's without what steers jobs, and `env` on top."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(FOREIGN_PREFIXES)}
    ours = {
        MARKER: marker(),
        "OMP_NUM_THREADS": "1",
        "HOLDFAST_STATE_DIR": str(state_dir),
        "HOLDFAST_SNAPSHOT_DIR": str(snapshot_dir()),
        "HOLDFAST_FAREWELL_TIMEOUT": "0",  # nodes that a test has killed do not come back
    }
    return kept | ours | dict(env or {})


@dataclass(eq=False)
class AgentProcess:
    """A running or ended `holdfast run`."""

    process: subprocess.Popen[bytes]
    arguments: list[str]
    state_dir: Path
    output: Path
    """Directory of its stdout and stderr."""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9, and reap."""
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Its exit code; negative for a signal. Fails the test if it does not end."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the agent did not end in {deadline_s:.0f} s:\n{self.stderr[-4000:]}") from None

    @property
    def stdout(self) -> str:
        return (self.output / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return (self.output / "stderr").read_text(errors="replace")

    @property
    def said(self) -> str:
        """Its stderr as a person would read it: of messages in JSON their text."""
        return "\n".join(
            json.loads(line)["message"] if line.startswith('{"time"') and line.endswith("}") else line
            for line in self.stderr.splitlines()
        )

    def logged(self, event: str) -> list[str]:
        """Return the messages with this event key that it, or the master that it supervises, has logged so far."""
        lines = [json.loads(line) for line in self.stderr.splitlines() if line.startswith("{") and line.endswith("}")]
        return [line.get("message", "") for line in lines if line.get("event") == event]

    def master_pid(self) -> int:
        """Return the master that this agent supervises; 0 if it has none now."""
        found = [p.pid for p in marked_processes() if p.is_master and p.value_of("--parent-pid") == str(self.pid)]
        return found[0] if found else 0


def start_agent(
    args: Sequence[str],
    *,
    state_dir: Path,
    env: Mapping[str, str] | None = None,
    netns: str | None = None,
    cwd: Path | None = None,
    command: Sequence[str] = (sys.executable, "-m", "holdfast", "run", "--log-format", "json"),
) -> AgentProcess:
    """`holdfast run ARGS`, in a network namespace if one is named. Its output goes to files beside the state."""
    state_dir.mkdir(parents=True, exist_ok=True)
    output = state_dir.parent / f"agent-{len(agents)}"
    output.mkdir()
    inside = ["ip", "netns", "exec", netns] if netns else []  # execs: the pid is the agent's own
    words = [*inside, *command, *args]
    with (output / "stdout").open("wb") as stdout, (output / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            words,
            env=agent_environment(state_dir, env),
            cwd=cwd or state_dir.parent,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    agent = AgentProcess(process, words, state_dir, output)
    agents.append(agent)
    return agent


# --- processes


class MarkedProcess(NamedTuple):
    """A process of the running test."""

    pid: int
    arguments: list[str]

    @property
    def is_master(self) -> bool:
        return "holdfast" in self.arguments and "master" in self.arguments

    def value_of(self, flag: str) -> str:
        """What follows a flag on its command line."""
        after = self.arguments[self.arguments.index(flag) + 1 :] if flag in self.arguments else []
        return after[0] if after else ""

    @property
    def is_fork_server(self) -> bool:
        return self.arguments[:1] == ["holdfast: fork server"]

    @property
    def is_store_host(self) -> bool:
        return self.arguments[:1] == ["holdfast: store host"]


def marked_processes(wanted_marker: str = "") -> list[MarkedProcess]:
    """All processes of the running test that are alive, this one aside."""
    wanted = f"{MARKER}={wanted_marker or marker()}".encode()
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        pid = int(directory.name)
        try:
            is_ours = pid != os.getpid() and wanted in (directory / "environ").read_bytes().split(b"\0")
            words = (directory / "cmdline").read_bytes() if is_ours else b""
        except OSError:
            continue
        if is_ours and is_alive(pid):
            found.append(MarkedProcess(pid, words.rstrip(b"\0").decode(errors="replace").split("\0")))
    return found


def is_alive(pid: int) -> bool:
    """Whether the process exists and is more than a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def kill9(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def wait_until_gone(*pids: int) -> None:
    wait_for(lambda: not [pid for pid in pids if is_alive(pid)], what=f"the end of {pids}")


def wait_until_nothing_left() -> None:
    """Until no process of this test is alive: the end of agents that were killed takes a moment."""
    wait_for(lambda: not marked_processes(), what="the end of all processes of this test")


# --- what the master wrote down


class StartedView(NamedTuple):
    """A view and its processes by rank, as far as they were reported."""

    view: View
    pids: dict[int, int]


@dataclass
class Journal:
    """The records of the one job in a state directory, or of the one with this id."""

    state_dir: Path
    job_id: str = "*"

    @property
    def path(self) -> Path | None:
        found = list(self.state_dir.glob(f"jobs/{self.job_id}/journal.sqlite"))
        assert len(found) < 2, f"several jobs in {self.state_dir}"
        return found[0] if found else None

    def records(self) -> list[DurableRecord]:
        """All of them so far; none while the master is still making the file."""
        if self.path is None:
            return []
        try:
            return [entry.record for entry in read_entries(self.path)]
        except JournalError as error:
            if "has format 0" in str(error):
                return []
            raise

    def of(self, kind: type[RecordT]) -> list[RecordT]:
        return [record for record in self.records() if isinstance(record, kind)]

    def job(self) -> JobState:
        """The job as the journal tells it."""
        return replay(self.records())

    def view(self) -> int:
        """The number of the newest view; 0 before the first."""
        return max((record.view.number for record in self.of(ViewFormed)), default=0)

    def term(self) -> int:
        return max((record.term for record in self.of(TermBegan)), default=0)

    def started(self, view: int | None = None) -> StartedView | None:
        """Return a view, the newest unless given, and its processes, from one reading of the journal: two readings
        could be of two different views. None before the view is formed."""
        records = self.records()
        formed = [record.view for record in records if isinstance(record, ViewFormed)]
        chosen = next((v for v in reversed(formed) if view in (None, v.number)), None)
        if chosen is None:
            return None
        members = {member.node_id: member for member in chosen.members}
        started = [r for r in records if isinstance(r, WorkersStartedRecord) and r.view == chosen.number]
        pids = {members[s.node_id].first_rank + i: pid for s in started for i, pid in enumerate(s.pids)}
        return StartedView(chosen, pids)

    def pids(self, view: int | None = None) -> dict[int, int]:
        """Return process ids by rank of a view, the newest unless given, for the nodes that have reported theirs. A
        worker that ends at once may never be reported: `Place.pid_of` asks the workers themselves."""
        found = self.started(view)
        return found.pids if found else {}

    def wait_for_workers(self, count: int, view: int | None = None) -> dict[int, int]:
        """Wait until the newest view (or `view`) has this many workers and all of them run; return their process ids by
        rank."""

        def running() -> dict[int, int]:
            found = self.started(view)
            return found.pids if found and len(found.pids) == count == found.view.world_size else {}

        return wait_for(running, what=f"{count} workers in {f'view {view}' if view else 'the newest view'}")

    def finished(self) -> JobFinished:
        """The job's end, which must have come."""
        found = self.of(JobFinished)
        assert len(found) == 1, f"{len(found)} ends in the journal"
        return found[0]

    def wait_for(self, kind: type[RecordT], accept: Callable[[RecordT], bool] = lambda record: True) -> RecordT:
        """The first such record, once it is there."""
        return wait_for(lambda: [r for r in self.of(kind) if accept(r)], what=f"a {kind.__name__} record")[0]


# --- what the workers wrote


class Line(NamedTuple):
    """What a worker of steps.py wrote when it started, or at a step."""

    what: str
    rank: int
    local_rank: int
    world_size: int
    view: int
    pid: int
    restart_count: int
    store_port: int
    step: int


@dataclass
class Place:
    """A test's directory: the state of its jobs, and the ledger and flags of the workers of steps.py."""

    directory: Path
    journal: Journal = field(init=False)

    def __post_init__(self) -> None:
        self.state_dir = self.directory / "state"
        self.work = self.directory / "work"
        self.work.mkdir(parents=True, exist_ok=True)
        self.journal = Journal(self.state_dir)

    def start(self, *args: str, **choices: Any) -> AgentProcess:
        """An agent whose state is here. `WORK` in the environment tells steps.py where to write."""
        env = {"WORK": str(self.work), **choices.pop("env", {})}
        if STEPS in map(str, args):
            env.setdefault("HOLDFAST_PRELOAD", "none")  # it needs no torch, whose import is most of such a test's work
        return start_agent([str(arg) for arg in args], state_dir=self.state_dir, env=env, **choices)

    def torchrun(self, *args: str, **choices: Any) -> AgentProcess:
        """torchrun itself, to compare with."""
        return self.start(*args, command=(sys.executable, "-m", "torch.distributed.run"), **choices)

    def finish(self) -> None:
        """Workers of steps.py end well, now and later."""
        (self.work / "finish").touch()

    def tell(self, rank: int, command: str) -> None:
        """The worker of this rank does it once: `exit 3`, `raise ValueError text`, `kill 9`."""
        draft = self.work / f"draft-{rank}"
        draft.write_text(command)
        draft.rename(self.work / f"do-{rank}")

    def ledger(self, what: str = "") -> list[Line]:
        """The lines that workers have written, in order."""
        path = self.work / "ledger"
        lines = path.read_text().splitlines() if path.exists() else []
        parsed = [Line(words[0], *map(int, words[1:])) for line in lines if len(words := line.split()) == 9]
        return [line for line in parsed if what in ("", line.what)]

    def pid_of(self, rank: int, view: int = 1) -> int:
        """Wait until the worker of this rank has started; return its process id, by its own line: the journal has none
        of a worker that ends before all workers of its node were started."""
        found = wait_for(
            lambda: [line.pid for line in self.ledger("start") if (line.rank, line.view) == (rank, view)],
            what=f"the start of rank {rank} in view {view}",
        )
        return found[0]

    def steps_of(self, pid: int) -> int:
        """How far a worker has come."""
        return max((line.step for line in self.ledger() if line.pid == pid), default=-1)

    def wait_for_steps(self, *pids: int, more: int = 2) -> None:
        """Until each of these workers has made further steps: it lives and works."""
        before = {pid: self.steps_of(pid) for pid in pids}
        wait_for(lambda: all(self.steps_of(p) >= before[p] + more for p in pids), what=f"steps of {pids}")
