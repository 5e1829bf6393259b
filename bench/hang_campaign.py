"""Ranks that stop (SIGSTOP) or sleep at each point of a job's life: who is replaced, when does training go on, and are
the bits at the end those of an undisturbed run?

    python bench/hang_campaign.py                              all of it: an hour
    python bench/hang_campaign.py --models ddp --nodes 1 --only forward,settle --actions stop

*seconds*: from the hang to the first step that all ranks have committed after it. `right`: the process that hung was
replaced, and every process that neither hung nor was killed stayed (except where a shard is lost with its only replica:
then all start again from the snapshots in memory). A wrong bit, a wrong process or a job that does not
go on within `--limit` ends the campaign with 1. With `--evidence DIR` the logs of such cases are kept there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import machine
from processes import Run
from samples import markdown

from holdfast.core.views import ring_partner

SCRIPT = Path(__file__).parent / "scripts" / "hanging.py"
MODELS, NODES, ACTIONS = ("ddp", "fsdp"), (1, 2), ("stop", "sleep")
RANKS = 4
STEPS, AT, STEP_S = 24, 8, 0.05
KILL = f"forward:{AT}:2:kill"
"""What makes the recoveries in which ranks hang."""
NEVER = -1.0
POINTS: dict[str, tuple[str, ...]] = {
    "first step": ("forward:0:1:{}",),
    "second step": ("forward:1:1:{}",),
    "third step": ("forward:2:1:{}",),
    "data": (f"data:{AT}:1:{{}}",),
    "forward": (f"forward:{AT}:1:{{}}",),
    "collective": (f"collective:{AT}:1:{{}}",),
    "barrier": (f"barrier:{AT}:1:{{}}",),
    "update": (f"update:{AT}:1:{{}}",),
    "capture": (f"capture:{AT}:1:{{}}",),
    "between": (f"between:{AT}:1:{{}}",),
    "two at once": (f"forward:{AT}:2:{{}}", f"forward:{AT}:OTHER:{{}}"),
    "join": (KILL, f"join:{AT}:OTHER:{{}}"),
    "settle": (KILL, f"settle:{AT}:OTHER:{{}}"),
    "restore, as source": (KILL, f"restore:{AT}:SOURCE:{{}}"),
    "restore, as receiver": (KILL, f"restore:{AT}:2:{{}}"),
    "restored": (KILL, f"restored:{AT}:OTHER:{{}}"),
    "twice in a recovery": (KILL, f"join:{AT}:OTHER:{{}}", f"restored:{AT}:1:{{}}"),
    "newcomer": (KILL, "build:-1:2:{}"),
    "spare": ("spare:-1:-1:{}", KILL),
    "close": (f"close:{STEPS}:1:{{}}",),
}
UNDETECTED = {("newcomer", "sleep"), ("first step", "sleep"), ("second step", "sleep"), ("spare", "sleep")}
"""Before the third step nothing is known of the job's pace, and building a model may take minutes: these have a limit
of minutes by design, and are left out."""
HEADER = ("point", "action", "seconds, median [min–max]", "right", "bits equal", "cases")


class Case(NamedTuple):
    """One job."""

    model: str
    nodes: int
    point: str
    action: str

    @property
    def faults(self) -> tuple[str, ...]:
        """SOURCE sends rank 2 its state: the nearest rank, or the keeper of its replica. OTHER and rank 2 do not keep
        each other's replicas: no state is lost with both."""
        keeper = [ring_partner(tuple(range(0, RANKS, RANKS // self.nodes)), RANKS, rank, 1) for rank in range(RANKS)]
        source = str(keeper[2] if self.model == "fsdp" else 0 if self.nodes == 1 else 3)
        other = next(str(rank) for rank in range(RANKS) if rank not in (2, keeper[2]) and keeper[rank] != 2)
        named = (fault.replace("SOURCE", source).replace("OTHER", other) for fault in POINTS[self.point])
        return tuple(fault.format(self.action) for fault in named)

    @property
    def loses_state(self) -> bool:
        """Return whether a shard dies with its only replica: then all start again from the snapshots in memory."""
        return self.model == "fsdp" and self.point in ("restore, as source", "twice in a recovery")


class Outcome(NamedTuple):
    """What came of it."""

    case: Case
    seconds: float
    """Until training went on; NEVER if it did not."""
    is_right: bool
    is_exact: bool
    why: str


class Ledger:
    """What the script of a run wrote."""

    def __init__(self, path: Path) -> None:
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        self.steps = [
            (float(at), int(step), int(rank), int(pid), loss)
            for kind, at, step, rank, pid, loss in (line for line in lines if line[0] == "step")
        ]
        faults = (line for line in lines if line[0] == "fault")
        self.faults = [(float(at), int(rank), int(pid)) for _, at, _, rank, pid in faults]
        ends = [line for line in lines if line[0] == "end"]
        self.ends = {int(rank): digest for _, _, rank, _, digest in ends}
        self.last_pids = {rank: pid for _, _, rank, pid, _ in self.steps}
        self.last_pids |= {int(rank): int(pid) for _, _, rank, pid, _ in ends}
        self.ended_at = max((float(at) for _, at, *_ in ends), default=0.0)

    def went_on_s(self) -> float:
        """The time between the last fault and the first step that all ranks committed after it."""
        hung_at = max(at for at, _, _ in self.faults)
        done: dict[int, dict[int, float]] = {}
        for at, step, rank, _, _ in self.steps:
            if at > hung_at:
                done.setdefault(step, {}).setdefault(rank, at)
        whole = [max(ranks.values()) for ranks in done.values() if len(ranks) == RANKS]
        if not whole and len(self.ends) == RANKS:
            return self.ended_at - hung_at  # it hung behind the last step
        return min(whole) - hung_at if whole else NEVER

    def is_right(self, loses_state: bool) -> bool:
        """Whether those that were hurt, and no others, were replaced; all, where the state was lost."""
        hurt = {pid for _, _, pid in self.faults}
        hurt_ranks = {rank for _, rank, _ in self.faults}
        processes: dict[int, set[int]] = {}
        for _, _, rank, pid, _ in self.steps:
            processes.setdefault(rank, set()).add(pid)
        others = loses_state or all(len(pids) == 1 for rank, pids in processes.items() if rank not in hurt_ranks)
        return others and not hurt & set(self.last_pids.values())

    def losses(self) -> set[tuple[int, int, str]]:
        return {(step, rank, loss) for _, step, rank, _, loss in self.steps}


def run_job(run: Run, model: str, nodes: int, faults: tuple[str, ...], flags: list[str], limit_s: float) -> int | None:
    """Run a job to its end. Return the worst exit code, None if it did not end in time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = machine.benchmark_environment() | {
        "WORK": str(run.directory),
        "TMPDIR": str(run.directory),
        "HOLDFAST_STATE_DIR": str(run.directory / "state"),
    }
    agents = []
    for node in range(nodes):
        command = [sys.executable, "-m", "holdfast", "run", "--nproc-per-node", str(RANKS // nodes)]
        if nodes > 1:
            command += ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-id", "hangs"]
            command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--node-id", f"node-{node}"]
        if any(fault.startswith("spare") for fault in faults):
            command += ["--spares", "1"]
        command += [*flags, str(SCRIPT), model, str(STEPS), str(STEP_S), *faults]
        agents.append(run.start(command, environment, str(node)))
    give_up_at = time.monotonic() + limit_s
    while not run.over and time.monotonic() < give_up_at:
        time.sleep(0.02)
    return max(abs(agent.returncode) for agent in agents) if run.over else None


def try_case(case: Case, reference: Ledger, options: argparse.Namespace) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="holdfast-hangs-") as directory, Run(Path(directory)) as run:
        code = run_job(run, case.model, case.nodes, case.faults, options.flags.split(), options.limit)
        ledger = Ledger(run.directory / "ledger")
        seconds = ledger.went_on_s() if ledger.faults else NEVER
        is_exact = ledger.ends == reference.ends and ledger.losses() <= reference.losses()
        why = "it did not end in time" if code is None else f"it ended with {code}" if code else ""
        if len(ledger.faults) < len(case.faults):
            why = why or f"only {len(ledger.faults)} of {len(case.faults)} faults happened"
        outcome = Outcome(case, seconds, ledger.is_right(case.loses_state), is_exact, why)
        if options.evidence and is_broken(outcome):
            kept = options.evidence / f"{case.model}-{case.nodes}-{case.point}-{case.action}".replace(" ", "-")
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(directory, kept, ignore_dangling_symlinks=True)
        return outcome


def is_broken(outcome: Outcome) -> bool:
    return bool(outcome.why) or outcome.seconds == NEVER or not outcome.is_right or not outcome.is_exact


def undisturbed(model: str, options: argparse.Namespace) -> Ledger:
    with tempfile.TemporaryDirectory(prefix="holdfast-hangs-") as directory, Run(Path(directory)) as run:
        code = run_job(run, model, 1, (), [], options.limit)
        ledger = Ledger(run.directory / "ledger")
        if code != 0 or len(ledger.ends) != RANKS:
            raise RuntimeError(f"the undisturbed job ended with {code}: {run.output()}")
        return ledger


def cases(options: argparse.Namespace) -> Iterator[Case]:
    for model, nodes, point, action in itertools.product(options.models, options.nodes, options.only, options.actions):
        if (point, action) not in UNDETECTED or options.all:
            yield Case(model, nodes, point, action)


def rows(outcomes: list[Outcome]) -> Iterator[tuple[str, ...]]:
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.case.point, outcome.case.action), []).append(outcome)
    for (point, action), found in groups.items():
        times = [outcome.seconds for outcome in found if outcome.seconds != NEVER]
        spread = f"{median(times):.2f} [{min(times):.2f}–{max(times):.2f}]" if times else "–"
        count = len(found)
        right, exact = sum(one.is_right for one in found), sum(one.is_exact for one in found)
        yield point, action, spread, f"{right} of {count}", f"{exact} of {count}", f"{len(times)} of {count} went on"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--nodes", default=",".join(map(str, NODES)))
    parser.add_argument("--actions", default=",".join(ACTIONS))
    parser.add_argument("--only", default=",".join(POINTS).replace("restore, ", "restore "), help="some of the points")
    parser.add_argument("--all", action="store_true", help="also those whose limit is minutes by design")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for a job")
    parser.add_argument("--flags", default="", help="further flags of `holdfast run`, in one argument")
    parser.add_argument("--evidence", type=Path, help="a directory for what broken cases leave")
    parser.add_argument("-o", "--output", type=Path, help="write everything as JSON")
    options = parser.parse_args()
    options.models, options.actions = options.models.split(","), options.actions.split(",")
    options.nodes = [int(nodes) for nodes in options.nodes.split(",")]
    options.only = [name.replace("restore as", "restore, as") for name in options.only.split(",")]
    if unknown := set(options.only) - set(POINTS):
        parser.error(f"--only knows no {', '.join(sorted(unknown))}")
    return options


def main() -> None:
    options = parse_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that everything started is ended
    here, load_before = machine.describe(), machine.load()
    print(f"{machine.heading(here)}\nload average at the start: {load_before}\n", flush=True)
    references = {model: undisturbed(model, options) for model in options.models}
    outcomes: list[Outcome] = []
    for case in cases(options):
        outcome = try_case(case, references[case.model], options)
        outcomes.append(outcome)
        took = f"{outcome.seconds:.2f} s" if outcome.seconds != NEVER else "never"
        verdict = "" if outcome.is_right else "  WRONG PROCESS"
        verdict += "" if outcome.is_exact else "  OTHER BITS"
        print(f"{case.model} {case.nodes} {case.point} {case.action}: {took}{verdict}  {outcome.why}", flush=True)
    load_after = machine.load()
    print("\n" + "\n".join(markdown(HEADER, rows(outcomes))) + f"\n\nload average at the end: {load_after}")
    broken = [outcome for outcome in outcomes if is_broken(outcome)]
    if options.output:
        about = {"machine": here, "load_before": load_before, "load_after": load_after}
        found = [{**one.case._asdict(), **one._replace(case=None)._asdict()} for one in outcomes]  # type: ignore[arg-type]
        options.output.write_text(json.dumps({**about, "outcomes": found}, indent=2) + "\n")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
