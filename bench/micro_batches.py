"""What a fault costs in a step of many micro-batches, with `step.batches(data, keep=True)` and without, in turn.

A rank is killed after some of the micro-batches of a step. Reported are the micro-batches that the survivors compute
again, and the time the step takes longer than those without a fault, beside the lost rank's own work: what it had
computed and its replacement has to compute. A micro-batch is a sleep of fixed length, as if a device computed it, so
that ranks do not compete for the machine's processors.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import machine
from processes import Run
from samples import markdown, spread

SCRIPT = Path(__file__).with_name("scripts") / "micro_batches.py"
HEADER = ("keep", "computed again by a survivor", "time lost", "of it beyond the lost rank's work", "copy a step")
LIMIT_S = 240.0
WARM_STEPS = 3


@dataclass(frozen=True)
class Finding:
    """One run. Times in seconds."""

    keep: bool
    again: list[int]
    lost_s: list[float]
    own_s: float
    """The lost rank's work."""
    copy_s: list[float]

    def cells(self) -> tuple[str, ...]:
        beyond = [(seconds - self.own_s) * 1e3 for seconds in self.lost_s]
        return (
            "yes" if self.keep else "no",
            spread([float(count) for count in self.again], "", 0),
            spread([seconds * 1e3 for seconds in self.lost_s], "ms", 0),
            spread(beyond, "ms", 0),
            spread([seconds * 1e3 for seconds in self.copy_s], "ms", 2),
        )


def measure(options: argparse.Namespace, *, keep: bool) -> Finding:
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        directory = Path(name)
        output = directory / "result"
        numbers = (options.micro, options.micros, 5 * options.kills + 5, options.after, int(keep), options.parameters)
        flags = (
            "--nproc-per-node",
            str(options.ranks),
            "--state-dir",
            str(directory / "state"),
            *options.flags.split(),
        )
        command = [sys.executable, "-m", "holdfast", "run", *flags, str(SCRIPT), *map(str, numbers), str(output)]
        with Run(directory) as run:
            code = run.start(command, machine.benchmark_environment() | {"TMPDIR": name}).wait(LIMIT_S)
            if code != 0:
                raise RuntimeError(f"the job ended with {code}:\n{run.output()}")
        lines = [line.split() for line in output.read_text().splitlines()]
    rows = [(int(w[0]), int(w[1]), float(w[2]), w[3], int(w[4]), float(w[5])) for w in lines if int(w[0]) >= WARM_STEPS]
    survivors = [row for row in rows if row[1] == 0]
    calm = median(seconds for _, _, seconds, kind, _, _ in survivors if kind == "none")
    kills = [row for row in survivors if row[3] == "kill"][: options.kills]
    return Finding(
        keep,
        [count - options.micros for *_, count, _ in kills],
        [seconds - calm for _, _, seconds, *_ in kills],
        options.after * options.micro,
        [copy_s for _, _, _, kind, _, copy_s in survivors if kind == "none"],
    )


def merged(findings: list[Finding]) -> Finding:
    first = findings[0]
    return Finding(
        first.keep,
        [count for one in findings for count in one.again],
        [seconds for one in findings for seconds in one.lost_s],
        first.own_s,
        [seconds for one in findings for seconds in one.copy_s],
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micros", type=int, default=16, help="micro-batches a rank and step")
    parser.add_argument("--micro", type=float, default=0.03, help="seconds that each takes")
    parser.add_argument("--after", type=int, default=12, help="micro-batches that are finished when a rank dies")
    parser.add_argument("--kills", type=int, default=4, help="in a run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--flags", default="", help="further ones of `holdfast run`")
    parser.add_argument("-o", "--output", type=Path, help="write everything as JSON")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    here, load_before = machine.describe(), machine.load()
    print(f"{machine.heading(here)}\nload average at the start: {load_before}\n")
    found: dict[bool, list[Finding]] = {True: [], False: []}
    for _ in range(options.rounds):
        for keep in found:
            found[keep].append(measure(options, keep=keep))
            print(" | ".join(found[keep][-1].cells()), flush=True)
    findings = [merged(of_one) for of_one in found.values()]
    load_after = machine.load()
    print("\n" + "\n".join(markdown(HEADER, [finding.cells() for finding in findings])))
    print(f"\nload average at the end: {load_after}")
    if options.output:
        about = {"machine": here, "load_before": load_before, "load_after": load_after}
        document = {**about, "findings": [asdict(finding) for finding in findings]}
        options.output.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
