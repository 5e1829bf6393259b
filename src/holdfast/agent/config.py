"""What an agent is told once, at its start."""

from __future__ import annotations

import signal
from typing import Literal

import msgspec

from holdfast.agent.logs import LogPlan
from holdfast.core.events import JobSpec
from holdfast.core.fault_table import BUILT_IN
from holdfast.core.fault_types import FaultTable
from holdfast.wire.channel import Tls
from holdfast.wire.session import Snapshots


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """The user's program, and how its processes are made."""

    kind: Literal["script", "module", "path", "exec"]
    """A Python script, a module, a path for runpy, or a program of its own."""
    argv: tuple[str, ...]
    """As the program will see it; for `exec`, the command itself."""
    clean: bool
    """A clean interpreter for each worker, instead of a fork of the warm one."""
    python: str
    preload: tuple[str, ...] = ()
    numa_binding: str = ""
    virtual_local_rank: bool = False

    def command(self) -> tuple[str, ...]:
        """The command line of a worker that is a program of its own."""
        if self.kind == "exec":
            return self.argv
        return (self.python, "-u", *(["-m"] if self.kind == "module" else []), *self.argv)


class MasterPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How to start the job's master on this node."""

    arguments: tuple[str, ...]
    """Of `holdfast master`, all but the job's id and the address."""
    listen_host: str
    job_id: str
    """The job to create; a master that is taken over belongs to the job this agent has joined."""
    required: bool
    """Whether it is an error if the port is taken; otherwise another agent of this machine has the master."""


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an agent needs to know. Times in seconds."""

    node_id: str
    address: str
    workers: int
    role: str
    requested_rank: int | None
    spec: JobSpec
    program: Program
    environment: dict[str, str]
    """What every worker inherits."""
    master_host: str
    master_port: int
    master: MasterPlan | None
    """None: the master runs elsewhere."""
    token: str
    tls: Tls | None
    logs: LogPlan
    signals: tuple[signal.Signals, ...]
    heartbeat_interval_s: float
    silence_timeout_s: float
    restart_grace_s: float
    shutdown_timeout_s: float
    join_timeout_s: float
    checkpoint_dir: str = ""
    """Where workers that speak to Holdfast find and leave checkpoints; empty: nowhere."""
    replicas: int = 0
    """In-memory copies of each shard that other ranks are to hold."""
    snapshots: Snapshots = Snapshots(every=-1)
    """How often workers copy their state, and how often that becomes a checkpoint."""
    snapshot_dir: str = ""
    """Where the copies are: shared memory."""
    checkpoint_keep: str = "every:1"
    """Which checkpoints stay (storage/retention.py)."""
    failure_domain: str = ""
    """What this node would go down with; empty: its machine."""
    hang_timeout_s: float | None = None
    """How long nothing may move on this node. None: as long as its own steps make reasonable; 0: for ever."""
    straggler_interval_s: float = 5.0
    """How often the pace of this node's workers is told."""
    accelerator: str = ""
    """The kind of processor that checks of this node examine; empty: whichever it has."""
    failover: str = ""
    """The user's failover extension, `module::Class`; empty: none."""
    fault_table: FaultTable = BUILT_IN
    """What faults look like: the user's rules, the accelerator's, ours."""
    machine: str = ""
    """The name by which this machine is known across jobs; empty: its host's."""
