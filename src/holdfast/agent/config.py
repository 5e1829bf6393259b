"""The configuration of an agent, known at its start."""

from __future__ import annotations

import signal
from pathlib import Path
from string import Template
from typing import Literal

import msgspec

from holdfast.agent.worker_logs import LogPlan
from holdfast.core.events import JobSpec
from holdfast.core.faults.fault_table import BUILT_IN
from holdfast.core.faults.fault_types import FaultTable
from holdfast.wire.tls import Tls
from holdfast.wire.worker_messages import SnapshotSettings


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """The user's program, and how its processes are started."""

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

    def for_local_rank(self, local_rank: int) -> Program:
        """Return the program with the local rank in the place of `${local_rank}` in its arguments, as torchrun does it:
        `$$` stands for one dollar sign there."""
        fixed = 1 if self.kind == "exec" else 0  # torchrun leaves the command itself alone
        filled = (Template(word).safe_substitute(local_rank=local_rank) for word in self.argv[fixed:])
        return msgspec.structs.replace(self, argv=(*self.argv[:fixed], *filled))

    def command(self) -> tuple[str, ...]:
        """Return the command line of a worker that is a program of its own."""
        if self.kind == "exec":
            return self.argv
        return (self.python, "-u", *(["-m"] if self.kind == "module" else []), *self.argv)


class MasterPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How to start the job's master on this node."""

    arguments: tuple[str, ...]
    """The arguments of `holdfast master`, without the job's id and the address."""
    listen_host: str
    job_id: str
    """The job to create; a master that is taken over belongs to the job this agent has joined."""
    journal: Path
    """Where that job's journal is, if there is one."""
    required: bool
    """Whether it is an error if the port is in use; otherwise another agent of this machine has the master."""
    has_one_node: bool = False
    """Whether no other agent can take part: what has the port is not this job's."""


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one agent. Times are in seconds."""

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
    master_name: str = ""
    """The host of a static rendezvous as it was given: workers' MASTER_ADDR, where it leads to their store."""
    master_addresses: tuple[str, ...] = ()
    """What that name stands for."""
    state_dir: str = ""
    """Where this node's status is written (util/node_status.py); empty: nowhere."""
    master_timeout_s: float = 120.0
    """How long workers that need a decision are held for a master on another machine that is away. A machine that only
    restarts is back by then; beyond it, processors that stand still cost more than a start from the last checkpoint."""
    farewell_timeout_s: float = 0.0
    """How long the master of a finished job may stay for nodes that were lost."""
    checkpoint_dir: str = ""
    """Where workers with a session read and write checkpoints; empty: nowhere."""
    replicas: int = 0
    """In-memory copies of each shard that other ranks are to hold."""
    are_replicas_default: bool = False
    """Whether that was not said by the user."""
    snapshots: SnapshotSettings = SnapshotSettings(every=-1)
    """How often workers copy their state, and how often that becomes a checkpoint."""
    snapshot_dir: str = ""
    """Where the copies are: shared memory."""
    is_resumable: bool = True
    """Whether a later start can continue this job by its id; if not, what a killed agent leaves is of no use."""
    checkpoint_keep: str = "every:1"
    """Which checkpoints stay (storage/retention.py)."""
    failure_domain: str = ""
    """What fails together with this node, as a rack; empty: its machine."""
    hang_timeout_s: float | None = None
    """How long nothing may move on this node. None: a multiple of its own steps (hangs.py); 0: no limit."""
    collective_retries: int = 0
    """How often a worker may run one collective again below the step when a connection broke; 0: never."""
    straggler_interval_s: float = 5.0
    """How often the step times of this node's workers are reported."""
    accelerator: str = ""
    """The kind of processor that checks of this node examine; empty: whichever it has."""
    failover: str = ""
    """The user's failover extension, `module::Class`; empty: none."""
    fault_table: FaultTable = BUILT_IN
    """What faults look like: the user's rules, the accelerator's, ours."""
    timer_file: str = ""
    """The named pipe by which workers set timers (file_timer.py); empty: they cannot."""
    machine: str = ""
    """The name by which this machine is known across jobs; empty: its host's."""
