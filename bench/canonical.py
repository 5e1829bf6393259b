"""What `reduction="canonical"` costs: steps of the same model and slots, with it and with DDP's all-reduce, in turn.

Both add gradients slot by slot, on gloo over loopback, within one process a rank. Blocks of steps alternate in every
round, in a random order, so that what else the machine does hits both alike; a ratio is one of neighbours. The first
round is not counted. `nodes` is how many subtrees a rank has to give away at most: more of them are more bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import machine
from processes import Run
from samples import markdown, spread

from holdfast.data.slots import slots_of
from holdfast.worker.parallel.tree_sum import largest_nodes

SCRIPT = Path(__file__).with_name("scripts") / "canonical.py"
HEADER = ("ranks", "slots", "nodes", "gradient", "DDP", "canonical", "× DDP")
LIMIT_S = 600.0


@dataclass(frozen=True)
class Finding:
    ranks: int
    slots: int
    gradient_mb: float
    average_s: list[float]
    canonical_s: list[float]

    @property
    def ratios(self) -> list[float]:
        """Of each round."""
        return [ours / plain for ours, plain in zip(self.canonical_s, self.average_s, strict=True)]

    def cells(self) -> tuple[str, ...]:
        parts = (slots_of(rank, self.ranks, self.slots) for rank in range(self.ranks))
        nodes = max(len(largest_nodes(part, self.slots)) for part in parts)
        times = (spread([value * 1e3 for value in found], "ms", 1) for found in (self.average_s, self.canonical_s))
        return (
            *map(str, (self.ranks, self.slots, nodes)),
            f"{self.gradient_mb:.0f} MB",
            *times,
            f"{median(self.ratios):.2f} [{min(self.ratios):.2f}–{max(self.ratios):.2f}]",
        )


def measure(options: argparse.Namespace, ranks: int, slots: int) -> Finding:
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        directory = Path(name)
        output = directory / "result.json"
        numbers = (options.rounds, options.steps, options.width, options.layers, slots, options.batch)
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
        command = [sys.executable, *launcher, str(SCRIPT), *map(str, numbers), str(output)]
        with Run(directory) as run:
            environment = machine.benchmark_environment() | {"TMPDIR": name}  # torch leaves things behind
            code = run.start(command, environment).wait(LIMIT_S)
            if code != 0:
                raise RuntimeError(f"the job ended with {code}:\n{run.output()}")
        found = json.loads(output.read_text())
    by_name = {key: [s for name, s in found["blocks"] if name == key] for key in ("average", "canonical")}
    return Finding(ranks, slots, found["gradient_mb"], by_name["average"], by_name["canonical"])


def shown(options: argparse.Namespace) -> Iterator[Finding]:
    for text in options.worlds.split(","):
        finding = measure(options, *map(int, text.split(":")))
        print(f"{text}: {finding.cells()[-1]}", flush=True)
        yield finding


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--worlds", default="1:8,2:2,2:8,3:8,4:8", help="ranks:slots, several by commas")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8, help="in a block")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=256, help="the global batch")
    parser.add_argument("-o", "--output", type=Path, help="write everything as JSON")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    here, load_before = machine.describe(), machine.load()
    print(f"{machine.heading(here)}\nload average at the start: {load_before}\n")
    findings = list(shown(options))
    load_after = machine.load()
    print("\n" + "\n".join(markdown(HEADER, [finding.cells() for finding in findings])))
    print(f"\nload average at the end: {load_after}")
    if options.output:
        about = {"machine": here, "load_before": load_before, "load_after": load_after}
        document = {**about, "findings": [asdict(finding) for finding in findings]}
        options.output.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
