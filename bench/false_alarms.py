"""Slow ranks and an overloaded machine: nothing hangs, so nothing may be taken for a hang.

    python bench/false_alarms.py --minutes 20 --load 30

Runs `scripts/slow.py` on four ranks, on one node and on two, beside `--load` processes that compute. Every incident is
a false alarm, names itself and ends the command with 1.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import machine
from processes import Run
from samples import markdown

from holdfast.core.records import IncidentOpened, WorkersStalledRecord
from holdfast.journal import read_entries

SCRIPT = Path(__file__).parent / "scripts" / "slow.py"
RANKS = 4
HEADER = ("nodes", "minutes", "slow moments", "stalls reported", "incidents")
END_TIMEOUT_S = 300.0


def try_nodes(nodes: int, minutes: float, load: int) -> tuple[tuple[str, ...], list[str]]:
    """Return the row of the table, and the false alarms."""
    with tempfile.TemporaryDirectory(prefix="holdfast-alarms-") as directory, Run(Path(directory)) as run:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ours = {"WORK": directory, "TMPDIR": directory, "HOLDFAST_STATE_DIR": str(run.directory / "state")}
        environment = machine.benchmark_environment() | ours
        agents: list[subprocess.Popen[bytes]] = []
        for node in range(nodes):
            command = [sys.executable, "-m", "holdfast", "run", "--nproc-per-node", str(RANKS // nodes)]
            if nodes > 1:
                command += ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-id", "alarms"]
                command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--node-id", f"node-{node}"]
                command += ["--silence-timeout", "30"]
            agents.append(run.start([*command, str(SCRIPT), str(60 * minutes)], environment, str(node)))
        hogs = [run.start([sys.executable, "-c", "while True: pass"], environment, "hogs") for _ in range(load)]
        give_up_at = time.monotonic() + 60 * minutes + END_TIMEOUT_S
        while any(agent.poll() is None for agent in agents) and time.monotonic() < give_up_at:
            time.sleep(0.5)
        for hog in hogs:
            hog.kill()
        codes = [agent.poll() for agent in agents]
        (journal,) = run.directory.glob("state/jobs/*/journal.sqlite")
        records = [entry.record for entry in read_entries(journal)]
        alarms = [record.cause for record in records if isinstance(record, IncidentOpened)]
        if codes != [0] * nodes:
            alarms.append(f"the agents ended with {codes}: {run.output()}")
        stalls = sum(isinstance(record, WorkersStalledRecord) for record in records)
        slow = run.directory / "slow"
        moments = Counter(line.split()[6] for line in slow.read_text().splitlines()) if slow.exists() else Counter()
        print(f"{nodes} nodes: {dict(moments)}; alarms: {alarms}", flush=True)
        return (str(nodes), f"{minutes:g}", str(moments.total()), str(stalls), str(len(alarms))), alarms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="for each number of nodes")
    parser.add_argument("--load", type=int, default=30, help="processes that compute meanwhile")
    parser.add_argument("--nodes", default="1,2")
    parser.add_argument("-o", "--output", type=Path, help="write everything as JSON")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that everything started is ended
    here, load_before = machine.describe(), machine.load()
    print(f"{machine.heading(here)}\nload average at the start: {load_before}\n", flush=True)
    found = [try_nodes(int(nodes), options.minutes, options.load) for nodes in options.nodes.split(",")]
    load_after = machine.load()
    print("\n" + "\n".join(markdown(HEADER, [row for row, _ in found])))
    print(f"\nload average at the end: {load_after}")
    alarms = [alarm for _, some in found for alarm in some]
    if options.output:
        about = {"machine": here, "load_before": load_before, "load_after": load_after}
        options.output.write_text(
            json.dumps({**about, "alarms": alarms, "rows": [r for r, _ in found]}, indent=2) + "\n"
        )
    sys.exit(1 if alarms else 0)


if __name__ == "__main__":
    main()
