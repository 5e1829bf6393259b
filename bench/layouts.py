"""What a killed rank costs in each layout, and what a session costs a step where nothing fails.

For each layout one job of four ranks in which rank 1 is killed some times: from the kill to the first step of all ranks
after it. Then the same script without faults, in turn as a session and under torchrun: the time of a step.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import machine
from processes import Run
from samples import markdown, spread

SCRIPT = Path(__file__).with_name("scripts") / "layouts.py"
LAYOUTS = ("ddp", "fsdp2", "hsdp", "fsdp2_tp", "pipeline_ddp")
HEADER = ("layout", "kill to the next step of all ranks", "step in a session", "step under torchrun", "ratio")
LIMIT_S = 240.0
WARM_STEPS = 5
APART = 10
"""Steps between two kills."""


@dataclass
class Finding:
    """Of one layout, in seconds."""

    layout: str
    recovered_s: list[float]
    session_s: list[float]
    torchrun_s: list[float]

    def cells(self) -> tuple[str, ...]:
        session, torchrun = median(self.session_s), median(self.torchrun_s)
        return (
            self.layout,
            spread(self.recovered_s, "s", 2),
            f"{session * 1e3:.1f} ms",
            f"{torchrun * 1e3:.1f} ms",
            f"{session / torchrun:.2f}",
        )


def run_script(command: list[str], layout: str, steps: int, kills: list[int]) -> list[tuple[str, int, int, float]]:
    """Return the lines that the ranks wrote."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        output = Path(name) / "result"
        words = [*command, str(SCRIPT), layout, str(steps), str(output), *map(str, kills)]
        environment = machine.benchmark_environment() | {"TMPDIR": name, "HOLDFAST_STATE_DIR": f"{name}/state"}
        with Run(Path(name)) as run:
            if code := run.start(words, environment).wait(LIMIT_S):
                raise RuntimeError(f"{layout} ended with {code}:\n{run.output()[-4000:]}")
        lines = [line.split() for line in output.read_text().splitlines()]
    return [(what, int(number), int(rank), float(at)) for what, number, rank, at in lines]


def recovered(lines: list[tuple[str, int, int, float]], ranks: int) -> list[float]:
    """Return how long each kill kept the job from its next step on all ranks."""
    at_step: dict[int, dict[int, float]] = defaultdict(dict)
    for what, number, rank, at in lines:
        if what == "step":
            at_step[number][rank] = at
    kills = [(number, at) for what, number, _, at in lines if what == "kill"]
    return [max(at_step[number].values()) - at for number, at in kills if len(at_step[number]) == ranks]


def step_times(lines: list[tuple[str, int, int, float]]) -> list[float]:
    at = [time for what, number, rank, time in sorted(lines, key=lambda line: line[1]) if (what, rank) == ("step", 0)]
    return [after - before for before, after in zip(at[WARM_STEPS:], at[WARM_STEPS + 1 :], strict=False)]


def measure(layout: str, options: argparse.Namespace) -> Finding:
    ranks = ("--nproc-per-node", str(options.ranks))
    ours = [sys.executable, "-m", "holdfast", "run", *ranks]
    theirs = [sys.executable, "-m", "torch.distributed.run", "--standalone", *ranks]
    kills = [APART * nth for nth in range(1, options.kills + 1)]
    found = Finding(layout, recovered(run_script(ours, layout, kills[-1] + APART, kills), options.ranks), [], [])
    for _ in range(options.rounds):
        found.session_s += step_times(run_script(ours, layout, options.steps, []))
        found.torchrun_s += step_times(run_script(theirs, layout, options.steps, []))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--only", choices=LAYOUTS, action="append")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("-o", "--output", type=Path, help="write everything as JSON")
    options = parser.parse_args()
    here, load_before = machine.describe(), machine.load()
    print(f"{machine.heading(here)}\nload average at the start: {load_before}\n")
    findings = []
    for layout in options.only or LAYOUTS:
        findings.append(measure(layout, options))
        print(" | ".join(findings[-1].cells()), flush=True)
    load_after = machine.load()
    print("\n" + "\n".join(markdown(HEADER, [finding.cells() for finding in findings])))
    print(f"\nload average at the end: {load_after}")
    if options.output:
        about = {"machine": here, "load_before": load_before, "load_after": load_after}
        document = {**about, "findings": [asdict(finding) for finding in findings]}
        options.output.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
