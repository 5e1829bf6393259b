"""`kill -9` at random moments of snapshots and checkpoints, thousands of times: after each, a whole state is there.

    memory     ranks that snapshot into real slots: some step can be restored on all of them, bit for bit
    sharded    the same, with a shard of the state on each rank
    replicate  the same, each rank on a node of its own, whose agent copies its snapshots to the next and is killed too;
               nodes are lost with all they had
    parity     the same with parity in groups, of which those that are left make again what is lost
    persist    as memory, with an agent that writes checkpoints and is killed too; nodes lose their memory
    both       as replicate, with agents that write checkpoints as well
    storage    writers of a checkpoint, killed at each named point and at random moments

See fire/ for what is killed and how it is judged. A broken promise ends the campaign with 1, names the seed and keeps
the evidence.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

import machine
from fire.failure import BrokenError
from samples import markdown

PHASES = ("storage", "memory", "sharded", "replicate", "parity", "persist", "both")
SHARED_MEMORY = Path("/dev/shm")
HEADER = ("phase", "what", "count")


class Phase(Protocol):
    """Something that is killed again and again."""

    counts: Counter[str]

    def again(self) -> None:
        """Once more. Raises BrokenError."""


def prepare(name: str, options: argparse.Namespace, memory: Path, storage: Path) -> Phase:
    if name == "storage":
        from fire.writers import Siege

        return Siege(storage, options.seed)
    from fire.memory import KINDS, Campaign  # imports torch: the writers' processes are lighter without

    return Campaign(memory, storage, KINDS[name], options.scale, options.seed)


def besiege(name: str, options: argparse.Namespace) -> tuple[Counter[str], str]:
    """What was counted, and which promise was broken."""
    prefix = f"holdfast-campaign-{os.getpid()}-"
    memory = Path(tempfile.mkdtemp(prefix=prefix, dir=SHARED_MEMORY))
    storage = Path(tempfile.mkdtemp(prefix=prefix))
    phase, broken = prepare(name, options, memory, storage), ""
    began_at = said_at = time.monotonic()
    try:
        while phase.counts["kills"] < options.kills and time.monotonic() - began_at < options.seconds:
            phase.again()
            if time.monotonic() - said_at > 30.0:
                said_at = time.monotonic()
                print(f"{name}: {dict(phase.counts)}   (load {machine.load()})", flush=True)
    except BrokenError as error:
        broken = f"{name}, seed {options.seed}: {error}. Evidence: {memory} {storage}"
    if not broken:
        for directory in (memory, storage):
            shutil.rmtree(directory)
    return phase.counts, broken


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=1000, help="of processes, in each phase")
    parser.add_argument("--seconds", type=float, default=3600.0, help="and no longer than that for each")
    parser.add_argument("--only", help=f"some of {','.join(PHASES)}")
    parser.add_argument("--scale", type=int, default=2, help="of the state: each is 3.7 MB")
    parser.add_argument("--seed", type=int, default=0, help="of moments and victims; the kernel has its own")
    parser.add_argument("-o", "--output", type=Path, help="write everything as JSON")
    options = parser.parse_args()
    options.only = options.only.split(",") if options.only else list(PHASES)
    if unknown := set(options.only) - set(PHASES):
        parser.error(f"--only knows no {', '.join(sorted(unknown))}")
    return options


def main() -> None:
    options = parse_options()
    logging.disable(logging.WARNING)
    here, load_before = machine.describe(), machine.load()
    print(f"{machine.heading(here)}\nload average at the start: {load_before}\n", flush=True)
    counts: dict[str, Any] = {}
    troubles = []
    for name in options.only:
        counts[name], broken = besiege(name, options)
        troubles += [broken] if broken else []
        print(f"{name}: {broken or 'held'}", flush=True)
    rows = [(name, what, str(count)) for name, counted in counts.items() for what, count in counted.items()]
    load_after = machine.load()
    print("\n" + "\n".join(markdown(HEADER, rows)) + f"\n\nload average at the end: {load_after}")
    if options.output:
        about = {"machine": here, "load_before": load_before, "load_after": load_after, "seed": options.seed}
        found = {**about, "pid": os.getpid(), "counts": counts, "broken": troubles}
        options.output.write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(1 if troubles else 0)


if __name__ == "__main__":
    main()
