"""Jobs of scripts/session.py: started, hurt, and compared with an undisturbed run of the same.

reference = undisturbed("ddp", ranks=3)                      once a test session and kind of job
run = Run(tmp_path).start("ddp", ranks=3, faults=["forward:5:1:kill"], flags=["--spares", "1"])
run.finish()
assert run.finals == reference.finals and run.losses == reference.losses

run.join("a", "ddp", nnodes="2", ranks=1)                    several nodes on this machine, by name
run.wait_until_calm(world_size=2)                            all trouble is over and everybody works
run.kill_node("a")
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from holdfast.core.records import IncidentClosed, IncidentOpened, NodeJoined, ViewFormed
from holdfast.core.views import View
from support.jobs import (
    DEADLINE_S,
    SCRIPTS,
    AgentProcess,
    Place,
    agent_environment,
    free_port,
    is_alive,
    marked_processes,
    wait_for,
)
from support.references import made_once

SESSION = str(SCRIPTS / "session.py")
STEPS = 30


def _is_of(node_id: str, joined: NodeJoined) -> bool:
    return joined.node_id == node_id


class StepLine(NamedTuple):
    """A committed step of a rank."""

    step: int
    rank: int
    pid: int
    view: int
    world_size: int
    loss: str


@dataclass
class Run:
    """One job."""

    directory: Path

    def __post_init__(self) -> None:
        self.place = Place(self.directory)
        self.agents: list[AgentProcess] = []
        """Those that are to end by themselves."""
        self.nodes: dict[str, AgentProcess] = {}
        """By name, those that joined."""
        self.port = 0

    def start(
        self,
        model: str,
        *,
        ranks: int,
        steps: int = STEPS,
        faults: list[str] | None = None,
        flags: list[str] | None = None,
        features: str = "",
        options: list[str] | None = None,
        **choices: Any,
    ) -> Run:
        words = [word for fault in faults or [] for word in ("--fault", fault)]
        self.agents.append(
            self.place.start(
                *("--nproc-per-node", str(ranks)),
                *(flags or []),
                SESSION,
                model,
                str(steps),
                *words,
                *("--features", features),
                *(options or []),
                **choices,
            )
        )
        return self

    def finish(self, code: int = 0) -> Self:
        for agent in self.agents:
            assert agent.wait() == code, agent.stderr[-6000:]
        return self

    # --- several nodes

    def join(
        self, name: str, model: str, *, nnodes: str, ranks: int = 1, flags: list[str] | None = None, **choices: Any
    ) -> Any:
        """One more node, which its script knows as NODE."""
        self.port = self.port or free_port()
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", "fleet"]
        all_flags = ["--node-id", name, *meeting, "--nnodes", nnodes, "--settle", "0.1", *(flags or [])]
        self.start(model, ranks=ranks, flags=all_flags, env={"NODE": name}, **choices)
        self.nodes[name] = self.agents[-1]
        return self.nodes[name]

    def wait_for_nodes(self, *names: str) -> None:
        """Until all of these are known to the master, with a rank or standing by."""
        for name in names:
            self.place.journal.wait_for(NodeJoined, partial(_is_of, name))

    def kill_node(self, name: str) -> None:
        """SIGKILL to everything that its agent started, itself and the master too, if that is there. First all are
        stopped, so that none can tell of another's end."""
        agent = self.nodes.pop(name)
        self.agents.remove(agent)
        victims = [agent.pid, *descendants(agent.pid)]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        agent.wait()

    def other_than_the_masters(self) -> str:
        """The name of a member of the view that does not have the master."""
        view = self.view()
        return next(m.node_id for m in view.members if not self.nodes[m.node_id].master_pid())

    def operate(self, *words: str) -> None:
        """`holdfast drain …` or `holdfast resize …`."""
        self.say(*words)

    def say(self, *words: str) -> str:
        """What a command about the job prints."""
        command = [sys.executable, "-m", "holdfast", *words, "--state-dir", str(self.place.state_dir)]
        environment = agent_environment(self.place.state_dir)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    # --- what it is doing

    def view(self) -> View:
        """The newest."""
        return self.place.journal.of(ViewFormed)[-1].view

    def views(self) -> list[View]:
        return [formed.view for formed in self.place.journal.of(ViewFormed)]

    def pid_of(self, rank: int) -> int:
        """Of the process that committed the newest step under this rank."""
        return next(line.pid for line in reversed(self.ledger) if line.rank == rank)

    def wait_until_calm(self, world_size: int, closed: int = 0) -> int:
        """Until as many incidents are closed, none is open, and all ranks of a world of this size have committed a
        step that was still to come; that step."""
        journal = self.place.journal

        def quiet() -> bool:
            done = len(journal.of(IncidentClosed))
            formed = journal.of(ViewFormed)
            size_fits = bool(formed) and formed[-1].view.world_size == world_size
            return size_fits and done >= closed and done == len(journal.of(IncidentOpened))

        wait_for(quiet, what=f"{closed} closed incidents and a world of {world_size}")
        before = max((line.step for line in self.ledger), default=-1)

        def steps() -> list[int]:
            ranks = Counter(n.step for n in self.ledger if n.step > before and n.world_size == world_size)
            return [step for step, count in ranks.items() if count >= world_size]

        found = wait_for(steps, what=f"a step of {world_size} ranks after step {before}")[0]
        return found if quiet() else self.wait_until_calm(world_size, closed)

    def wait_for_view(self, number: int) -> View:
        """As soon as there is one with this number or a later one. Looks all the time: what a test does then is to
        come in the middle of a recovery."""
        while self.place.journal.view() < number:
            assert any(agent.is_running for agent in self.agents), self.agents[0].stderr[-4000:]
        return self.view()

    def spares(self) -> set[int]:
        """Processes that have built their model and never committed a step."""
        built = {int(path.name.split("-")[1]) for path in self.place.work.glob("started-*")}
        return {pid for pid in built - {line.pid for line in self.ledger} if is_alive(pid)}

    def wait_for_spares(self, count: int) -> set[int]:
        """Until there are as many, and for another step, so that they are parked and their agent knows it."""
        found = wait_for(lambda: now if len(now := self.spares()) == count else set(), what=f"{count} spares")
        self.wait_for_step(max(line.step for line in self.ledger) + 2)
        return found

    def hurry(self) -> Run:
        """The script pauses no more."""
        (self.place.work / "hurry").touch()
        return self

    @property
    def trained(self) -> dict[int, list[int]]:
        """By committed step: the samples it was made of, in order of their numbers."""
        found: dict[int, list[int]] = {}
        for line in (self.place.work / "trained").read_text().splitlines():
            step, _, *samples = map(int, line.split())
            found[step] = sorted([*found.get(step, []), *samples])
        return found

    @property
    def loss_sums(self) -> dict[int, float]:
        """By step: of all ranks."""
        found: dict[int, float] = {}
        for line in self.ledger:
            found[line.step] = found.get(line.step, 0.0) + float.fromhex(line.loss)
        return found

    @property
    def ledger(self) -> list[StepLine]:
        path = self.place.work / "ledger"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [
            StepLine._make([*map(int, words[:5]), words[5]]) for words in lines if len(words) == 6 and words[0] != "#"
        ]

    @property
    def fired(self) -> int:
        """How many faults have happened."""
        return len(list(self.place.work.glob("fired-*")))

    @property
    def finals(self) -> dict[int, str]:
        """By rank: the number of steps and the digest of the state at the end."""
        return {int(path.name.split("-")[1]): path.read_text() for path in self.place.work.glob("final-*")}

    @property
    def losses(self) -> dict[tuple[int, int], set[str]]:
        """By (step, rank): every loss that was committed, as exact numbers. More than one would be two histories."""
        found: dict[tuple[int, int], set[str]] = {}
        for line in self.ledger:
            found.setdefault((line.step, line.rank), set()).add(line.loss)
        return found

    @property
    def pids(self) -> dict[int, set[int]]:
        """By rank: the processes that committed steps under it."""
        found: dict[int, set[int]] = {}
        for line in self.ledger:
            found.setdefault(line.rank, set()).add(line.pid)
        return found

    def repeated(self) -> list[tuple[int, int]]:
        """(step, rank) that were committed more than once."""
        counts = Counter((line.step, line.rank) for line in self.ledger)
        return [key for key, count in counts.items() if count > 1]

    def wait_for_step(self, step: int) -> None:
        wait_for(lambda: any(line.step >= step for line in self.ledger), what=f"step {step}")

    @property
    def incidents(self) -> list[IncidentClosed]:
        return self.place.journal.of(IncidentClosed)


def descendants(pid: int) -> Iterator[int]:
    """Of a process, now."""
    parents: dict[int, list[int]] = {}
    for process in marked_processes():
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{process.pid}/stat").read_text()
            parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(process.pid)
    found = list(parents.get(pid, []))
    for child in found:
        found += parents.get(child, [])
    return iter(found)


def undisturbed(model: str, *, ranks: int, steps: int = STEPS, features: str = "", options: Any = None) -> Run:
    """The same job without a fault. Run once."""

    def make(directory: Path) -> None:
        run = Run(directory)
        run.start(model, ranks=ranks, steps=steps, features=features, options=options).finish()
        assert len(run.finals) == ranks and not run.repeated()

    return Run(made_once(f"{model} {ranks} {steps} {features} {' '.join(options or [])}", make))


def assert_same_bits(run: Run, reference: Run, missing: int = 0) -> None:
    """Every state and every loss equal. A worker that dies right after a commit cannot tell its loss: `missing`."""
    assert run.finals == reference.finals
    seen, wanted = run.losses, reference.losses
    assert all(seen[key] == wanted[key] for key in seen), "a step was committed with another loss"
    assert len(wanted) - len(seen) <= missing, f"steps without a commit: {sorted(set(wanted) - set(seen))}"


def assert_same_samples(run: Run, reference: Run) -> None:
    """Every committed step was made of the very samples of the undisturbed one, each once, and its loss is close,
    whatever the sizes of the worlds."""
    assert run.trained == reference.trained
    sums, wanted = run.loss_sums, reference.loss_sums
    assert sums.keys() == wanted.keys()
    assert all(abs(sums[step] - wanted[step]) < 1e-3 * abs(wanted[step]) for step in wanted)
