"""The main job in one minute: train with two workers, kill one half way, see the run go on and finish.

    python examples/demo.py            (or: make demo)
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from holdfast.core.records import IncidentClosed, JobFinished, NodeStarted
from holdfast.core.sentences import phase_durations
from holdfast.journal import read_entries

ROOT = Path(__file__).resolve().parent.parent
STEPS = 200
JOB = "demo"


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as directory:
        return demonstrate(Path(directory))


def demonstrate(directory: Path) -> int:
    print(f"holdfast run --nproc-per-node 2 --max-restarts 3 examples/train_characters.py --steps {STEPS} …\n")
    command = [sys.executable, "-m", "holdfast", "run", "--nproc-per-node", "2", "--max-restarts", "3"]
    command += ["--rdzv-id", JOB, "--log-format", "text", str(ROOT / "examples/train_characters.py")]
    command += ["--steps", str(STEPS), "--checkpoint", str(directory / "characters.pt")]
    command += [str(path) for path in sorted((ROOT / "docs").glob("*.md"))]
    job = subprocess.Popen(command, env=os.environ | {"HOLDFAST_STATE_DIR": str(directory)})
    try:
        victim = wait_until_half_way(directory, job)
        if victim:
            print(f"\n>>> kill -9 {victim} (the worker of rank 1)\n", flush=True)
            os.kill(victim, signal.SIGKILL)
        code = job.wait()
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait()
    show(directory)
    return code


def journal_of(directory: Path) -> list[object]:
    path = directory / "jobs" / JOB / "journal.sqlite"
    return [entry.record for entry in read_entries(path)] if path.exists() else []


def wait_until_half_way(directory: Path, job: subprocess.Popen) -> int:
    """The process id of rank 1, once half of the steps are saved."""
    import torch

    checkpoint = directory / "characters.pt"
    while job.poll() is None:
        if checkpoint.exists() and torch.load(checkpoint, weights_only=True)["step"] >= STEPS // 2:
            started = [record for record in journal_of(directory) if isinstance(record, NodeStarted)]
            return started[-1].pids[1]
        time.sleep(0.05)
    return 0


def show(directory: Path) -> None:
    """The receipt of the recovery, and how the job ended, from its journal."""
    for record in journal_of(directory):
        if isinstance(record, IncidentClosed):
            print(f"\nwhat happened: {record.cause}")
            print(f"what was done: {record.strategy.value}, view {record.view_before} → {record.view_after}")
            for phase, duration_s in phase_durations(record):
                print(f"  {phase:12s} {duration_s * 1000:7.1f} ms")
            print(f"  {'in all':12s} {(record.at - record.happened_at) * 1000:7.1f} ms")
        if isinstance(record, JobFinished):
            print(f"\nthe job {record.outcome.value}: {record.why}")


if __name__ == "__main__":
    sys.exit(main())
