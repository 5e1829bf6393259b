"""From a cut connection to the next commit, with all processes alive: collectives run again, or the step repeated.

Two kinds of runs in turn, of the same session on this machine: with `--collective-retries 1`, and with 0, where the
rung `retry` handles the cut. Then the same twice without cuts: what keeping inputs costs a step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import machine
from processes import Run

SCRIPT = Path(__file__).parent / "scripts" / "cut.py"
LIMIT_S = 240.0


def run_once(options: argparse.Namespace, retries: int, cuts: int) -> tuple[list[float], float]:
    """Return the milliseconds from each cut to the commit of its step, and those of an ordinary step."""
    with tempfile.TemporaryDirectory() as directory, Run(Path(directory)) as run:
        out = Path(directory) / "out"
        flags = ["--standalone", "--nproc-per-node", str(options.ranks), "--collective-retries", str(retries)]
        flags += ["--snapshots", "off", "--state-dir", directory]
        arguments = [str(options.steps), str(options.width), str(cuts), str(out)]
        command = [sys.executable, "-m", "holdfast", "run", *flags, str(SCRIPT), *arguments]
        process = run.start(command, machine.benchmark_environment())
        if process.wait(LIMIT_S) != 0:
            raise SystemExit(run.output())
        lines = [line.split() for line in out.read_text().splitlines()]
    return [float(ms) for what, ms in lines if what == "cut"], float(lines[-1][1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--width", type=int, default=512, help="of each of six layers: 6 MB of gradients if not given")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(f"{machine.heading(machine.describe())}\nload average at the start: {machine.load()}\n")
    to_commit: dict[int, list[float]] = {0: [], 1: []}
    steps: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(options.rounds):
        for retries in (0, 1):
            to_commit[retries] += run_once(options, retries, 1)[0]
            steps[retries].append(run_once(options, retries, 0)[1])
    for retries, what in ((0, "the step repeated (retry)"), (1, "collectives run again")):
        found = to_commit[retries]
        print(f"{what:28} cut → commit {statistics.median(found):8.1f} ms (max {max(found):.1f}, {len(found)} cuts)")
    print(f"ratio {statistics.median(to_commit[1]) / statistics.median(to_commit[0]):.2f}")
    before, after = (statistics.median(steps[retries]) for retries in (0, 1))
    print(f"a step without cuts: {before:.2f} ms without retries, {after:.2f} ms with ({after / before:.3f})")


if __name__ == "__main__":
    main()
