"""What an agent knows of its node, in a file of its machine: for `holdfast status` where the master, which has the
journal, is on another machine and may be away.

    <state dir>/jobs/<job>/nodes/<node>.json

The agent writes it when something changes and removes it when its job is over. After a job that had to end without its
master, and after an agent that was killed, it stays."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from holdfast.util.files import read_small, write_atomically

FILE_BYTES_MAX = 2**20


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One node as its own agent sees it. Times are seconds since the epoch; 0: never."""

    job_id: str
    node_id: str
    agent_pid: int
    written_at: float = 0.0
    master: str
    """The master's address."""
    master_away_since: float = 0.0
    """0: the master is connected."""
    trouble: str = ""
    """Why the master cannot be reached."""
    view: int = 0
    ranks: tuple[int, ...] = ()
    world_size: int = 0
    workers_running: int = 0
    needs_decision: str = ""
    """What waits for the master's decision; empty: nothing, the workers train on without it."""
    gives_up_at: float = 0.0
    """When the agent ends because the decision has not come."""
    checkpoint: str = ""
    """The last checkpoint that this node knows of."""
    ended: str = ""
    """How it ended without its master."""


def status_path(state_dir: str | Path, job_id: str, node_id: str) -> Path:
    """Return where the file of a node is."""
    return Path(state_dir) / "jobs" / job_id.replace("/", "_") / "nodes" / f"{node_id.replace('/', '_')}.json"


def write_status(path: Path, status: NodeStatus) -> None:
    """Write the file, complete or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(path, msgspec.json.encode(status), durable=False)


def remove_status(path: Path) -> None:
    """Remove the file, and its directories if nothing else is in them."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()
        path.parent.parent.rmdir()


def read_statuses(state_dir: Path, job: str | None) -> list[NodeStatus]:
    """Return the nodes of the jobs whose id begins with `job`, or of all, the one written last first. Files that cannot
    be read are left out."""
    found = []
    for path in state_dir.glob("jobs/*/nodes/*.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            status = msgspec.json.decode(read_small(path, FILE_BYTES_MAX), type=NodeStatus)
            if job is None or status.job_id.startswith(job) or path.parents[1].name.startswith(job):
                found.append(status)
    return sorted(found, key=lambda status: status.written_at, reverse=True)
