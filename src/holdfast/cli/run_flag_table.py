"""Every flag of `holdfast run`, one row each: the parser, the help and the tests read this table.

torchrun's flags fall back to `PET_<NAME>`, ours to `HOLDFAST_<NAME>`. A default that differs from
torchrun's is listed in docs/torchrun.md, and tests/cli/test_run_flags.py holds the list to it.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.cli.run_flag_values import (
    NODES_MAX,
    PORT_MAX,
    WORKERS_MAX,
    comma_separated,
    job_name,
    seconds,
    seconds_between_messages,
    whole_number,
)
from holdfast.core.strategies import LADDER


class Flag(msgspec.Struct, frozen=True):
    """One flag. Without a metavar it is a switch."""

    name: str  # the spelling in messages and in the help, e.g. "--node-rank"
    help: str
    metavar: str | None = None
    default: Any = None
    parse: Callable[[str], Any] = str
    choices: tuple[str, ...] | None = None
    short: str | None = None
    variable_prefix: str = "PET_"  # "" where torchrun reads no variable either

    @property
    def dest(self) -> str:
        return self.name[2:].replace("-", "_")

    @property
    def spellings(self) -> tuple[str, ...]:
        spellings = (self.short, self.name, "--" + self.dest)
        return tuple(dict.fromkeys(spelling for spelling in spellings if spelling))

    @property
    def variable(self) -> str | None:
        return self.variable_prefix + self.dest.upper() if self.variable_prefix else None

    @property
    def is_ours(self) -> bool:
        return self.variable_prefix == "HOLDFAST_"

    @property
    def field(self) -> str:
        """The name in RunOptions, where times carry their unit."""
        return f"{self.dest}_s" if self.metavar == "SECONDS" else self.dest


def _ours(name: str, help: str, metavar: str, default: Any = None, **more: Any) -> Flag:
    return Flag(name, help, metavar, default, variable_prefix="HOLDFAST_", **more)


def _switch(name: str, help: str) -> Flag:
    return Flag(name, help, variable_prefix="HOLDFAST_")


HELP = Flag("--help", "show this text and exit", short="-h", variable_prefix="")

SIZE = (
    Flag("--nnodes", "how many nodes, or the least and the most", "MIN[:MAX]", "1:1"),
    Flag("--nproc-per-node", "workers on each node: a number, auto, cpu, gpu or xpu", "N", "1"),
    Flag("--node-rank", "rank of this node, from 0; the master chooses if not given", "N", None, whole_number(0)),
    _ours("--node-id", "name of this node, the same after its restarts", "NAME"),
)

RENDEZVOUS = (
    Flag(
        "--rdzv-backend",
        "static, c10d, etcd, etcd-v2 or holdfast; nodes meet at the Holdfast master with each of them",
        "NAME",
        "static",
    ),
    Flag("--rdzv-endpoint", "where the master listens; port 29400 (static: 29500) if none is given", "HOST:PORT", ""),
    Flag("--rdzv-id", "name of the job, the same on each node", "NAME", "none", job_name),
    Flag("--rdzv-conf", "key=value,...; join_timeout, last_call_timeout and is_host have an effect", "PAIRS", ""),
    Flag("--standalone", "one node, any free port on loopback; overrides the other rendezvous flags but --rdzv-id"),
    Flag("--master-addr", "host of the master with the static backend", "HOST", "127.0.0.1"),
    Flag(
        "--master-port",
        "its port with the static backend; 29500 for several nodes, any free one for one node",
        "PORT",
        None,
        whole_number(0, PORT_MAX),
    ),
    Flag("--local-addr", "address by which other nodes reach this one; detected if not given", "HOST"),
    _ours("--settle", "wait for further nodes once the minimum is there", "SECONDS", 0.5, parse=seconds),
)

LAUNCHING = (
    Flag("--module", "run SCRIPT as a module, as python -m does", short="-m"),
    Flag("--no-python", "run SCRIPT itself, without python"),
    Flag("--run-path", "run SCRIPT inside the started interpreter; overrides --no-python and --module"),
    Flag(
        "--start-method",
        "how workers start: forked from a warm server (fork means the same here) or spawned",
        "METHOD",
        "forkserver",
        choices=("spawn", "fork", "forkserver"),
    ),
    _ours(
        "--preload",
        "what the fork server imports in advance besides torch: auto (what the script imports first) or module names;"
        " none: not even torch",
        "MODULES",
        "auto",
    ),
    Flag("--role", "name of the workers' role", "NAME", "default"),
    Flag(
        "--numa-binding",
        "bind each worker to the processors near its device",
        "MODE",
        choices=("node", "socket", "exclusive", "core-complex"),
        variable_prefix="",
    ),
    Flag("--virtual-local-rank", "each worker sees LOCAL_RANK 0 and its own device as device 0"),
    Flag(
        "--signals-to-handle",
        "signals that are passed on to the workers, separated by commas",
        "NAMES",
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    ),
    Flag(
        "--shutdown-timeout",
        "time from SIGTERM to SIGKILL for workers when the job ends; else TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30",
        "SECONDS",
        None,
        seconds,
    ),
)

LOGS = (
    Flag("--log-dir", "directory for the workers' output; one is created if not given", "DIR"),
    Flag(
        "--redirects",
        "streams sent to files only: 0 none, 1 stdout, 2 stderr, 3 both, or 0:1,1:2 by local rank",
        "STREAMS",
        "0",
        short="-r",
    ),
    Flag("--tee", "streams sent to files and to the console, written as in -r", "STREAMS", "0", short="-t"),
    Flag("--local-ranks-filter", "show only these local ranks on the console, as in 0,1", "RANKS", ""),
    Flag(
        "--duplicate-stdout-filters",
        "copy stdout lines that contain one of these texts to a further file; ,, is a comma",
        "TEXTS",
        [],
        comma_separated,
    ),
    Flag("--duplicate-stderr-filters", "the same for stderr", "TEXTS", [], comma_separated),
    _ours(
        "--log-format",
        "Holdfast's own messages: text, or json with every message for machines; auto is text",
        "FORMAT",
        "auto",
        choices=("auto", "text", "json"),
    ),
    _ours(
        "--error-format",
        "how the failure of a job is shown at its end: holdfast, or torchrun (the fields of its ChildFailedError, for"
        " tools that search logs)",
        "FORMAT",
        "holdfast",
        choices=("holdfast", "torchrun"),
    ),
    Flag(
        "--verbose",
        "show every message of Holdfast, not only the job's start, progress, incidents and end",
        short="-v",
        variable_prefix="HOLDFAST_",
    ),
    Flag(
        "--event-log-handler",
        "accepted for compatibility: events go to Holdfast's own log",
        "NAME",
        "null",
    ),
    Flag(
        "--logs-specs",
        "default, or not given: torchrun's other logs specs are refused; -r, -t and --log-dir say where output goes",
        "NAME",
        variable_prefix="",
    ),
)

RECOVERY = (
    Flag("--max-restarts", "restarts of the workers before the job fails", "N", 0, whole_number(0)),
    _ours(
        "--recovery",
        "strategies that may be used after a fault, separated by commas; tried in the default's order, exit always",
        "STRATEGIES",
        ",".join(LADDER),
    ),
    _ours(
        "--collective-retries",
        "how often a collective is run again on new connections if one broke and all of its processes live; after that"
        " the step is repeated (the strategy retry). 0: never, which is the default",
        "N",
        0,
        parse=whole_number(0),
    ),
    _ours(
        "--spares",
        "spare worker processes on each node, ready to replace one that fails",
        "N",
        0,
        parse=whole_number(0, WORKERS_MAX),
    ),
    _ours(
        "--spare-nodes",
        "spare nodes beyond the maximum of --nnodes, ready to replace a lost one",
        "N",
        0,
        parse=whole_number(0, NODES_MAX),
    ),
    _ours(
        "--replicas",
        "copies of each shard in other ranks' memory, and of each snapshot on other nodes, if the state is sharded",
        "N",
        1,
        parse=whole_number(0, NODES_MAX),
    ),
    _ours(
        "--replica-parity",
        "store snapshots as parity in groups of K nodes instead of as copies; 0 for copies",
        "K",
        0,
        parse=whole_number(0, NODES_MAX),
    ),
    _ours("--failure-domain", "failure domain of this node, for example its rack; its machine if not given", "NAME"),
    _ours(
        "--hang-timeout",
        "workers without progress for this long are hung: seconds, auto (by the job's own step times), 0 never",
        "TIME",
        "auto",
    ),
    _ours(
        "--dynamic-failover-extension",
        "your class that decides about each failure, see holdfast.failover",
        "MODULE::CLASS",
    ),
    _ours("--fault-table", "TOML file with your own fault rules, which come before the built-in ones", "FILE"),
    _ours(
        "--cordon-limit",
        "most nodes that may be cordoned within a day because a fault is blamed on them: a number, or a share of the"
        " nodes like 1%%, which is three nodes at least",
        "N|P%",
        "1%",
    ),
    _ours(
        "--wait-for-nodes",
        "how long survivors hold their state and wait for a replacement, when a lost node leaves too few of them; 0"
        " dumps the state at once; auto: the join timeout in a pod of Kubernetes, which starts it again, elsewhere 0",
        "SECONDS",
        "auto",
    ),
    _ours(
        "--straggler-action",
        "what to do about a rank that is slower than the others: report it, shift a part of its share of the global"
        " batch to the others, or swap its node for a spare node",
        "ACTION",
        "report",
        choices=("report", "shift", "swap"),
    ),
    _ours(
        "--straggler-interval",
        "how often a node reports its ranks' step times; a rank that is slow in three reports in a row is a straggler",
        "SECONDS",
        5.0,
        parse=seconds_between_messages,
    ),
    _ours("--machine", "name of this machine in the fault history across jobs; its host name if not given", "NAME"),
    _ours("--state-dir", "directory of the master's journal", "DIR", "~/.holdfast"),
    _ours(
        "--keep-jobs",
        "how long journals and logs of jobs that ended stay in the state directory (30d, 12h), or forever. Checkpoints"
        " and jobs that have not ended always stay",
        "AGE",
        "90d",
    ),
    _ours(
        "--heartbeat-interval",
        "how often a node sends a heartbeat",
        "SECONDS",
        1.0,
        parse=seconds_between_messages,
    ),
    _ours("--silence-timeout", "a node without a heartbeat for this long is lost", "SECONDS", 5.0, parse=seconds),
    _ours(
        "--reconnect-grace",
        "time in which a node whose connection broke must reconnect",
        "SECONDS",
        0.3,
        parse=seconds,
    ),
    _ours(
        "--master-timeout",
        "how long workers that need a decision wait for a master on another machine that is away, before the node ends",
        "SECONDS",
        120.0,
        parse=seconds,
    ),
    _ours(
        "--farewell-timeout",
        "time that the master of an ended job waits for lost nodes",
        "SECONDS",
        60.0,
        parse=seconds,
    ),
    _ours(
        "--guard-window",
        "time for which the id of a silent node stays reserved",
        "SECONDS",
        30.0,
        parse=seconds,
    ),
    _ours(
        "--restart-grace",
        "time from SIGTERM to SIGKILL for workers stopped by a restart",
        "SECONDS",
        5.0,
        parse=seconds,
    ),
    Flag(
        "--monitor-interval",
        "accepted for compatibility: the end of a worker is an event, nothing is polled",
        "SECONDS",
        0.1,
        seconds,
    ),
)

STATE = (
    _ours(
        "--snapshots",
        "how often workers copy their state into the node's memory: every N steps, off, or auto (whenever it is free)",
        "N",
        "auto",
    ),
    _ours("--snapshot-dir", "directory of snapshots; one with a random name in /dev/shm if not given", "DIR"),
    _ours(
        "--checkpoint-dir",
        "directory or URL (s3:// gs:// az:// ...) of the job's checkpoints, {job_id} in it is replaced;"
        " jobs/{job_id}/checkpoints of --state-dir if not given",
        "DIR_OR_URL",
    ),
    _ours(
        "--checkpoint-every",
        "how often a snapshot becomes a checkpoint: steps (500), or time (90s, 10m, 2h), or never; if not given, every"
        " 10m with --checkpoint-dir, else never. Jobs that fail or end write one in any case",
        "N",
    ),
    _ours(
        "--checkpoint-keep",
        "which checkpoints are kept: last:N, every:STEPS, best:METRIC:min|max:N, comma-separated; every:1 keeps all",
        "POLICY",
        "last:3",
    ),
)

HEALTH = (
    _switch("--node-check", "check each node, alone and in pairs, before it joins; see docs/health.md"),
    _switch("--network-check", "the same as --node-check"),
    _switch("--exclude-straggler", "with --node-check: leave out slow nodes while the minimum of --nnodes is there"),
    _ours(
        "--accelerator",
        "kind of processor to check: cpu, cuda, npu, xpu, mps or a plug-in's name; detected if not given",
        "NAME",
    ),
)

SECURITY = (
    _ours("--token-file", "file with the job's token; or put the token into HOLDFAST_TOKEN", "FILE"),
    _ours("--tls-cert", "certificate of this node", "FILE"),
    _ours("--tls-key", "key of that certificate", "FILE"),
    _ours("--tls-ca", "root certificate by which the other side's certificate is verified", "FILE"),
)

GROUPS: dict[str, tuple[Flag, ...]] = {
    "size": SIZE,
    "rendezvous": RENDEZVOUS,
    "launching": LAUNCHING,
    "logs": LOGS,
    "recovery": RECOVERY,
    "state": STATE,
    "health": HEALTH,
    "security": SECURITY,
}
FLAGS: tuple[Flag, ...] = tuple(flag for flags in GROUPS.values() for flag in flags)
