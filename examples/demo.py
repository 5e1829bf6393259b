"""Recovery shown in a minute: train with two workers and a spare, kill one worker half way, and see the job go on. Then
train without a fault, and compare the bits of the two models.

    python examples/demo.py            (or: make demo)
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from holdfast.core.records import IncidentClosed, JobFinished, WorkersStartedRecord
from holdfast.core.sentences import phase_durations
from holdfast.journal import read_entries

ROOT = Path(__file__).resolve().parent.parent
STEPS = 200
JOB = "demo"


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as directory:
        return demonstrate(Path(directory))


def demonstrate(directory: Path) -> int:
    with_fault = train(directory, JOB, kill=True)
    show(directory)
    print("\nthe same training without a fault:\n", flush=True)
    without_fault = train(directory, "without-fault", kill=False)
    print(f"\nwith a kill  {with_fault}\nwithout      {without_fault}")
    is_same = bool(with_fault) and with_fault == without_fault
    print("the same bits" if is_same else "NOT the same bits")
    return 0 if is_same else 1


def train(directory: Path, job_id: str, *, kill: bool) -> str:
    """Train, and return a digest of the trained parameters; an empty text if the job failed."""
    result = directory / f"{job_id}.digest"
    command = [sys.executable, "-m", "holdfast", "run", "--nproc-per-node", "2", "--spares", "1"]
    command += ["--rdzv-id", job_id, "--log-format", "text", str(ROOT / "examples/train_session.py")]
    command += ["--steps", str(STEPS), "--result", str(result)]
    command += [str(path) for path in sorted((ROOT / "docs").glob("*.md"))]
    print("holdfast run " + " ".join(command[4:-1])[:110] + " …\n", flush=True)
    job = subprocess.Popen(command, env=os.environ | {"HOLDFAST_STATE_DIR": str(directory), "OMP_NUM_THREADS": "1"})
    try:
        if kill and (victim := wait_until_half_way(directory, job)):
            print(f"\n>>> kill -9 {victim} (the worker of rank 1)\n", flush=True)
            os.kill(victim, signal.SIGKILL)
        code = job.wait()
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait()
    return result.read_text() if code == 0 else ""


def journal_of(directory: Path) -> list[object]:
    path = directory / "jobs" / JOB / "journal.sqlite"
    return [entry.record for entry in read_entries(path)] if path.exists() else []


def wait_until_half_way(directory: Path, job: subprocess.Popen) -> int:
    """Wait until the log of steps has half of them, and return the process id of rank 1; 0 if the job ended before."""
    while job.poll() is None:
        logs = list(directory.glob("logs/*/attempt_0/0/steps.jsonl"))
        if logs and len(logs[0].read_text().splitlines()) >= STEPS // 2:
            started = [record for record in journal_of(directory) if isinstance(record, WorkersStartedRecord)]
            return started[-1].pids[1]
        time.sleep(0.05)
    return 0


def show(directory: Path) -> None:
    """Print from the journal what the recovery took, which processes stayed, and how the job ended."""
    started = [record for record in journal_of(directory) if isinstance(record, WorkersStartedRecord)]
    for record in journal_of(directory):
        if isinstance(record, IncidentClosed):
            print(f"\nwhat happened: {record.cause}")
            print(f"what was done: {record.strategy.value}, view {record.view_before} → {record.view_after}")
            for phase, duration_s in phase_durations(record):
                print(f"  {phase:12s} {duration_s * 1000:7.1f} ms")
            print(f"  {'total':12s} {(record.at - record.happened_at) * 1000:7.1f} ms")
        if isinstance(record, JobFinished):
            print(f"\nthe job {record.outcome.value}: {record.why}")
    for before, after in pairwise(started):
        print(f"processes: {list(before.pids)} → {list(after.pids)}")


if __name__ == "__main__":
    sys.exit(main())
