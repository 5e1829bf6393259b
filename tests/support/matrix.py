"""The matrix of scripts and faults: every variation (scripts/variations) with every plan of faults, with and without a
spare. Each case ends bit-identical to the undisturbed run of the same variation, with the same samples and with no
process replaced but those that died; or, where the variation says so, it is refused in its first steps. (A variation
that does what Holdfast warns of may cost processes, but no bits.)

With DEVICE each case runs on the accelerator in software too (e2e/lab/soft_device.cpp), which is behind its host.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.scripts.variations import ALL, Variation
from holdfast.core.records import IncidentClosed, IncidentOpened
from holdfast.core.strategies import Strategy
from support.jobs import SCRIPTS, AgentProcess, Place
from support.references import made_once
from support.soft_device import install_soft_device

VARIED = str(SCRIPTS / "varied.py")
STEPS = 26
FLAGS = ("--hang-timeout", "60")
"""A fault waits for the repair of the one before, on a busy machine for some time: that is no hang."""
DEADLINE_S = 120.0
"""For a job. A test may have to make the reference first."""
LIMIT_S = 300
"""For a test, so that both deadlines fit in."""
DEVICE = "soft"
NOT_ON_DEVICE = {"sparse_embedding", "compiled", "compiled_outside"}
"""It has no sparse tensors, and torch's compiler does not know it."""
LATE_S = 0.01
"""What the device waits before each collective: the host is through with its step by then."""

# Points and actions, each with its step. Their ranks are the first and the last in turn.
PLANS: dict[str, tuple[tuple[str, int, str], ...]] = {
    "kills": (
        ("body", 0, "kill"),
        ("body", 4, "kill"),
        ("before", 8, "kill"),
        ("after", 12, "kill"),
        ("end", 16, "kill"),
        ("between", 19, "kill"),
    ),
    "errors": (
        ("before", 0, "raise"),
        ("body", 3, "exit"),
        ("before", 7, "exit"),
        ("after", 10, "raise"),
        ("end", 14, "exit"),
        ("between", 17, "raise"),
        ("between", 21, "exit"),
    ),
}
INSIDE = (("forward", 3, "kill"), ("backward", 7, "kill"), ("forward", 11, "raise"), ("backward", 15, "kill"))
"""In the middle of passes, of scripts that have these points: the plan `inside`."""


@dataclass(frozen=True)
class Case:
    """One job."""

    variation: Variation
    plan: str
    spares: int
    device: str = "cpu"

    @property
    def id(self) -> str:
        device = f"-{self.device}" * (self.device != "cpu")
        return f"{self.variation.name}-{self.plan}-{'spare' if self.spares else 'no_spare'}{device}"

    @property
    def faults(self) -> list[str]:
        """POINT:STEP:RANK:ACTION of each. With a spare, the other rank begins: so each point hits both. For people who
        look for a cause, FAULTS in the environment says others."""
        if chosen := os.environ.get("FAULTS"):
            return chosen.split()
        last = self.variation.ranks - 1
        return [
            f"{point}:{step}:{0 if (index + self.spares) % 2 else last}:{action}"
            for index, (point, step, action) in enumerate({**PLANS, "inside": INSIDE}.get(self.plan, ()))
        ]


def all_cases(device: str = "cpu") -> list[Case]:
    """The whole matrix. What is refused never comes to a fault."""
    found = []
    for variation in ALL.values():
        if device != "cpu" and variation.name in NOT_ON_DEVICE:
            continue
        plans = ["start"] if variation.refused else list(PLANS)
        found += [Case(variation, plan, spares, device) for plan in plans for spares in (0, 1)]
    return found


class Outcome:
    """What a job has left."""

    def __init__(self, directory: Path, device: str = "cpu") -> None:
        self.place, self.device = Place(directory), device

    def start(self, variation: Variation, faults: list[str], spares: int) -> AgentProcess:
        words = [word for fault in faults for word in ("--fault", fault)]
        flags = ["--nproc-per-node", str(variation.ranks), "--spares", str(spares), *FLAGS]
        if variation.warned:
            flags += ["--max-restarts", str(len(faults))]
        script = [VARIED, variation.name, str(STEPS), *words, *(["--spares"] if spares else [])]
        if self.device == "cpu":
            return self.place.start(*flags, *script)
        flags += ["--replicas", "1"]  # on a device the default is to go back to a snapshot
        env = {**install_soft_device(self.place.directory), "BENCH_DEVICE": self.device, "SOFT_LATE_S": str(LATE_S)}
        return self.place.start(*flags, *script, env=env)

    @property
    def events(self) -> list[dict[str, Any]]:
        path = self.place.work / "events"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def of(self, what: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["what"] == what]

    @property
    def logs(self) -> str:
        """What the workers said."""
        return "".join(path.read_text() for path in self.place.state_dir.rglob("stderr.log"))

    @property
    def finals(self) -> dict[str, dict[str, str]]:
        """By rank and name: the digests at the end."""
        return {path.name: json.loads(path.read_text()) for path in sorted(self.place.work.glob("final-*"))}

    def by_step(self, what: str, value: str) -> dict[tuple[int, int], list[Any]]:
        """By (step, rank), all of an event's values in order."""
        found: dict[tuple[int, int], list[Any]] = {}
        for event in self.of(what):
            found.setdefault((event["step"], event["rank"]), []).append(event[value])
        return found

    @property
    def processes(self) -> dict[int, list[int]]:
        """By rank: the processes that began steps under it, in order."""
        found: dict[int, list[int]] = {}
        for event in self.of("begin"):
            pids = found.setdefault(event["rank"], [])
            if event["pid"] not in pids:
                pids.append(event["pid"])
        return found


def undisturbed(variation: Variation, device: str = "cpu") -> Outcome:
    """The job without a fault. Run once."""

    def make(directory: Path) -> None:
        outcome = Outcome(directory, device)
        agent = outcome.start(variation, [], 0)
        assert agent.wait(DEADLINE_S) == 0, f"the undisturbed run of {variation.name} failed:\n{agent.stderr[-6000:]}"
        assert len(outcome.finals) == variation.ranks
        losses = outcome.by_step("committed", "loss")
        assert sorted(losses) == [(step, rank) for step in range(STEPS) for rank in range(variation.ranks)]
        assert all(len(found) == 1 for found in losses.values())

    return Outcome(made_once(f"variation {variation.name} {device}", make), device)


def run_case(case: Case, directory: Path) -> None:
    """Run it and check everything that is promised."""
    if case.variation.refused:
        run_refused(case, directory)
        return
    reference = undisturbed(case.variation, case.device)
    outcome = Outcome(directory, case.device)
    agent = outcome.start(case.variation, case.faults, case.spares)
    code = agent.wait(DEADLINE_S)
    assert code == 0, f"exit code {code}\n{agent.stderr[-6000:]}"
    faults = outcome.of("fault")
    assert len(faults) == len(case.faults), "not every fault has happened"
    assert_same_bits(outcome, reference, faults, may_restart=bool(case.variation.warned))
    assert_same_samples(outcome, reference)
    if case.variation.warned:
        assert case.variation.warned in reference.logs and case.variation.warned in outcome.logs
        return
    assert_processes(outcome, faults)
    incidents = outcome.place.journal.of(IncidentClosed)
    assert len(incidents) == len(outcome.place.journal.of(IncidentOpened)) == len(faults), incidents
    expected = Strategy.RECOVER if case.spares else Strategy.RECOVER_IN_PLACE
    allowed = {Strategy.RECOVER, Strategy.RECOVER_IN_PLACE}
    if any(fault["action"] != "kill" for fault in faults):  # its connections close before it ends: all seem to live
        allowed.add(Strategy.RETRY)
    used = {incident.strategy for incident in incidents}
    assert expected in used and used <= allowed, used
    if case.variation.verify is not None:
        case.variation.verify(outcome.events, reference.events)


def assert_same_bits(outcome: Outcome, reference: Outcome, faults: list[dict[str, Any]], *, may_restart: bool) -> None:
    """Every digest and every loss equal, and each step committed once by each rank. Of a process that dies there are
    two exceptions: between the commit and the end of its step it has not recorded the step yet; and right after it,
    it may have been the only one to know of the commit, so that its successor makes the same step again. Where all
    workers may have started again, from a snapshot, the steps since that are made again too."""
    finals, wanted = outcome.finals, reference.finals
    differing = [
        f"{name} of {rank}"
        for rank in wanted
        for name in wanted[rank]
        if finals.get(rank, {}).get(name) != wanted[rank][name]
    ]
    assert not differing and finals.keys() == wanted.keys(), f"other bits at the end: {', '.join(differing)}"
    losses, expected = outcome.by_step("committed", "loss"), reference.by_step("committed", "loss")
    other = [key for key in sorted(losses) if set(losses[key]) != set(expected[key])]
    assert not other, f"(step, rank) committed with another loss: {other}"
    untold = {(fault["step"], fault["rank"]) for fault in faults if fault["point"] not in ("body", "before", "between")}
    twice = {(fault["step"], fault["rank"]) for fault in faults if fault["point"] == "between"}
    missing, repeated = set(expected) - set(losses), {key for key, found in losses.items() if len(found) > 1}
    assert missing <= untold, f"(step, rank) without a commit: {sorted(missing)}"
    assert may_restart or repeated <= twice, f"(step, rank) committed more than once: {sorted(repeated)}"


def assert_same_samples(outcome: Outcome, reference: Outcome) -> None:
    """Each step was made of the same samples on each rank, in every attempt."""
    drawn, expected = outcome.by_step("drew", "samples"), reference.by_step("drew", "samples")
    assert drawn.keys() == expected.keys()
    other = [key for key in sorted(drawn) if any(samples != expected[key][0] for samples in drawn[key])]
    assert not other, f"(step, rank) made of other samples: {other}"


def assert_processes(outcome: Outcome, faults: list[dict[str, Any]]) -> None:
    """One process for each rank, and one more for each of its faults, each of them replaced by the next."""
    deaths = Counter(fault["rank"] for fault in faults)
    counts = {rank: len(pids) for rank, pids in outcome.processes.items()}
    assert counts == {rank: 1 + deaths[rank] for rank in counts}, f"processes by rank: {outcome.processes}"
    for rank, pids in outcome.processes.items():
        died = [fault["pid"] for fault in faults if fault["rank"] == rank]
        assert died == pids[:-1], f"of rank {rank} {died} died, and {pids[:-1]} were replaced"


def run_refused(case: Case, directory: Path) -> None:
    """Ended with the sentence as its cause, before the third step is committed."""
    outcome = Outcome(directory, case.device)
    agent = outcome.start(case.variation, [], case.spares)
    code = agent.wait(DEADLINE_S)
    committed = sorted({event["step"] for event in outcome.of("committed")})
    assert code != 0, f"exit code 0 after steps {committed}"
    why = outcome.place.journal.finished().why
    assert case.variation.refused in why, f"refused with another sentence: {why}"
    assert not [step for step in committed if step >= 2], f"refused after steps {committed}"
    assert len({event["pid"] for event in outcome.of("begin")}) <= case.variation.ranks, "it was tried again"
