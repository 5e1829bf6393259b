"""A job on disk: the core driven event by event, its records in a real journal, its workers' output in real files.

demo = JobOnDisk(tmp_path, "demo", workers=2)
demo.join("a")                     # view 1 is formed
demo.start("a")
demo.fail("a", 1, message="ValueError: boom")
demo.offer("a")                    # a store for view 2, which is formed
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.core import events as e
from holdfast.core.faults.failures import Exited, Failure
from holdfast.core.records import is_durable
from holdfast.core.settings import Settings
from holdfast.core.state import JobState
from holdfast.core.transact import Turn, begin, transact
from holdfast.core.views import Member
from holdfast.journal import JournalEntry, SqliteJournal, read_entries

START = 1_760_000_000.0
COLLATERAL = {"exception": "DistNetworkError", "message": "DistNetworkError: Connection reset by peer"}
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    step()\nValueError: boom'
BOOM: dict[str, Any] = {"exception": "ValueError", "message": "ValueError: boom", "traceback": TRACEBACK}


class JobOnDisk:
    """A job whose master is the test. Time stands still but for `pass_s`."""

    def __init__(
        self,
        state_dir: Path,
        job_id: str = "demo",
        *,
        nodes: tuple[int, int] = (1, 1),
        workers: int = 2,
        restarts: int = 3,
        start: float = START,
    ) -> None:
        self.state_dir, self.job_id, self.workers = state_dir, job_id, workers
        self.settings = Settings(nodes_min=nodes[0], nodes_max=nodes[1], restarts_max=restarts)
        self.path = state_dir / "jobs" / job_id / "journal.sqlite"
        self.journal = SqliteJournal(self.path)
        assert list(self.journal.replay()) == []
        self.now, self.job, self._port = start, JobState(), 29_000
        self._commit(begin(self.job, job_id, self.settings, self.now))

    def pass_s(self, seconds: float) -> JobOnDisk:
        self.now += seconds
        return self

    def do(self, *events: e.Event) -> JobOnDisk:
        self._commit(transact(self.job, events, self.now))
        return self

    def _commit(self, done: Turn) -> None:
        self.journal.append([record for record in done.records if is_durable(record)])  # type: ignore[misc]

    def entries(self) -> list[JournalEntry]:
        return read_entries(self.path)

    def close(self) -> JobOnDisk:
        self.journal.close()
        return self

    # --- what nodes say

    def join(self, node_id: str, **info: Any) -> JobOnDisk:
        return self.do(hello(node_id, self.settings, self._next_port(), workers=self.workers, **info))

    def offer(self, node_id: str) -> JobOnDisk:
        return self.do(e.StoreOffered(node_id=node_id, incarnation=incarnation_of(node_id), port=self._next_port()))

    def start(self, node_id: str, first_pid: int = 4_000, logs: tuple[str, ...] = ()) -> JobOnDisk:
        pids = tuple(range(first_pid, first_pid + self.member(node_id).workers))
        return self.do(
            e.WorkersStarted(node_id=node_id, incarnation=incarnation_of(node_id), view=self.view, pids=pids, logs=logs)
        )

    def settle(self, node_id: str) -> JobOnDisk:
        """Its workers, which speak to Holdfast, are in the view with their state."""
        return self.do(
            e.ViewJoined(node_id=node_id, incarnation=incarnation_of(node_id), view=self.view, session=e.SessionInfo())
        )

    def commit_step(self, node_id: str, step: int) -> JobOnDisk:
        return self.do(e.StepCommitted(node_id=node_id, incarnation=incarnation_of(node_id), view=self.view, step=step))

    def fail(self, node_id: str, local_rank: int = 0, **facts: Any) -> JobOnDisk:
        return self.do(self.failed(node_id, local_rank, **facts))

    def failed(self, node_id: str, local_rank: int = 0, **facts: Any) -> e.WorkerFailed:
        rank = self.member(node_id).first_rank + local_rank
        known: dict[str, Any] = {"pid": 4_000 + local_rank, "end": Exited(1), "failed_at": self.now}
        failure = Failure(node_id=node_id, view=self.view, rank=rank, local_rank=local_rank, **known | facts)
        return e.WorkerFailed(node_id=node_id, incarnation=incarnation_of(node_id), view=self.view, failure=failure)

    def succeed(self, node_id: str) -> JobOnDisk:
        done = [
            e.WorkerSucceeded(node_id=node_id, incarnation=incarnation_of(node_id), view=self.view, local_rank=i)
            for i in range(self.member(node_id).workers)
        ]
        return self.do(*done)

    def restart_once(self, node_id: str = "a", *, at_s: float = 60.0) -> JobOnDisk:
        """One worker fails, everyone starts again: the whole way of a fault, 430 ms long."""
        self.pass_s(at_s).fail(node_id, 1, failed_at=self.now - 0.012, **BOOM)
        return self.pass_s(0.015).offer(node_id).pass_s(0.403).start(node_id, 5_000)

    # --- questions

    @property
    def view(self) -> int:
        assert self.job.view is not None
        return self.job.view.number

    def member(self, node_id: str) -> Member:
        return self.job.members[node_id]

    def _next_port(self) -> int:
        self._port += 1
        return self._port


def incarnation_of(node_id: str) -> str:
    return f"{node_id}.1"


def hello(node_id: str, settings: Settings, store_port: int, **info: Any) -> e.Hello:
    itself: dict[str, Any] = {
        "host": f"host-{node_id}",
        "address": "127.0.0.1",
        "machine_id": f"machine-{node_id}",
        "boot_id": "boot",
        "pid": 1_000,
        "workers": 2,
    }
    s = settings
    spec = e.JobSpec(run_id="", nodes_min=s.nodes_min, nodes_max=s.nodes_max, restarts_max=s.restarts_max)
    return e.Hello(
        node_id=node_id,
        incarnation=incarnation_of(node_id),
        info=e.NodeInfo(**itself | info),
        spec=spec,
        store_port=store_port,
    )


def write_output(log_dir: Path, view: int, local_rank: int, stdout: bytes = b"", stderr: bytes = b"") -> Path:
    """What an agent's worker would have written; appends."""
    directory = log_dir / f"attempt_{view - 1}" / str(local_rank)
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in (("stdout.log", stdout), ("stderr.log", stderr)):
        with (directory / name).open("ab") as file:
            file.write(text)
    return directory
