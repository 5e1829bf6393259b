"""Every flag of `holdfast run`, one row each: the parser, the help and the tests read this table.

torchrun's flags fall back to `PET_<NAME>`, ours to `HOLDFAST_<NAME>`. A default that differs from
torchrun's is listed in docs/torchrun.md, and tests/cli/test_run_flags.py holds the list to it.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.cli.run_flag_values import PORT_MAX, comma_separated, seconds, seconds_above_zero, whole_number
from holdfast.core.ladder import LADDER


class Flag(msgspec.Struct, frozen=True):
    """One flag. Without a metavar it is a switch."""

    name: str  # the spelling in messages and in the help, as "--node-rank"
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
    Flag("--node-rank", "place of this node, from 0; the master chooses if not given", "N", None, whole_number(0)),
    _ours("--node-id", "name of this node, kept across its restarts", "NAME"),
)

RENDEZVOUS = (
    Flag(
        "--rdzv-backend",
        "static, c10d, etcd, etcd-v2 or holdfast; nodes meet at the Holdfast master with each of them",
        "NAME",
        "static",
    ),
    Flag("--rdzv-endpoint", "where the master listens; port 29400 (static: 29500) if none is given", "HOST:PORT", ""),
    Flag("--rdzv-id", "name of the job, the same on each node", "NAME", "none"),
    Flag("--rdzv-conf", "key=value,...; join_timeout, last_call_timeout and is_host count", "PAIRS", ""),
    Flag("--standalone", "one node, any free port on loopback; overrules the other rendezvous flags"),
    Flag("--master-addr", "host of the master with the static backend", "HOST", "127.0.0.1"),
    Flag(
        "--master-port",
        "its port with the static backend; 29500 for several nodes, any free one for one node",
        "PORT",
        None,
        whole_number(0, PORT_MAX),
    ),
    Flag("--local-addr", "address by which other nodes reach this one; looked up if not given", "HOST"),
    _ours("--settle", "wait for further nodes once the minimum is there", "SECONDS", 0.5, parse=seconds),
)

LAUNCHING = (
    Flag("--module", "run SCRIPT as a module, as python -m does", short="-m"),
    Flag("--no-python", "run SCRIPT itself, without python"),
    Flag("--run-path", "run SCRIPT inside the started interpreter; overrules --no-python and --module"),
    Flag(
        "--start-method",
        "how workers start: forked from a warm server (fork means the same here) or spawned",
        "METHOD",
        "forkserver",
        choices=("spawn", "fork", "forkserver"),
    ),
    _ours("--preload", "modules the fork server imports ahead, beside torch; none: not even torch", "MODULES", ""),
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
        "signals passed on to the workers, with commas between",
        "NAMES",
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    ),
    Flag(
        "--shutdown-timeout",
        "from SIGTERM to SIGKILL for workers when the job ends; else TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30",
        "SECONDS",
        None,
        seconds,
    ),
)

LOGS = (
    Flag("--log-dir", "directory for the workers' output; one is made if not given", "DIR"),
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
        "Holdfast's own log: auto is json unless stderr is a terminal",
        "FORMAT",
        "auto",
        choices=("auto", "text", "json"),
    ),
    Flag(
        "--event-log-handler",
        "accepted for compatibility: events go to Holdfast's own log",
        "NAME",
        "null",
    ),
    Flag(
        "--logs-specs",
        "accepted for compatibility: the other log flags say where output goes",
        "NAME",
        variable_prefix="",
    ),
)

RECOVERY = (
    Flag("--max-restarts", "restarts of the workers before the job fails", "N", 0, whole_number(0)),
    _ours(
        "--recovery",
        "what may be done about a fault, with commas between; tried in the order of the default, exit always",
        "STRATEGIES",
        ",".join(LADDER),
    ),
    _ours("--spares", "workers a node keeps parked, to take the rank of one that fails", "N", 0, parse=whole_number(0)),
    _ours(
        "--spare-nodes",
        "nodes beyond the most of --nnodes that may wait, to take the place of a lost one",
        "N",
        0,
        parse=whole_number(0),
    ),
    _ours(
        "--replicas",
        "copies of each shard in other ranks' memory, and of each snapshot on other nodes, where the state is sharded",
        "N",
        1,
        parse=whole_number(0),
    ),
    _ours(
        "--replica-parity",
        "keep snapshots as parity in groups of K nodes instead of as copies; 0 for copies",
        "K",
        0,
        parse=whole_number(0),
    ),
    _ours("--failure-domain", "what this node would go down with, as a rack; its machine if not given", "NAME"),
    _ours(
        "--hang-timeout",
        "workers that make no progress for this long are hung: seconds, auto by the job's own step times, 0 never",
        "TIME",
        "auto",
    ),
    _ours(
        "--dynamic-failover-extension",
        "your class that is asked about each failure, see holdfast.failover",
        "MODULE::CLASS",
    ),
    _ours("--fault-table", "your own faults and what they look like, a TOML file before the built-in table", "FILE"),
    _ours(
        "--cordon-limit",
        "nodes that may be sent away within a day because a fault is blamed on them",
        "N",
        3,
        parse=whole_number(0),
    ),
    _ours(
        "--straggler-action",
        "what to do about a rank that is slower than the others: report it, shift a part of its share of the global"
        " batch to the others, or swap its node for one that stands by",
        "ACTION",
        "report",
        choices=("report", "shift", "swap"),
    ),
    _ours(
        "--straggler-interval",
        "how often a node tells how fast its ranks are; slow in three reports in a row is a straggler",
        "SECONDS",
        5.0,
        parse=seconds_above_zero,
    ),
    _ours("--machine", "name by which this machine is known across jobs; its host's if not given", "NAME"),
    _ours("--state-dir", "directory of the master's journal", "DIR", "~/.holdfast"),
    _ours(
        "--heartbeat-interval",
        "how often a node says that it lives",
        "SECONDS",
        1.0,
        parse=seconds_above_zero,
    ),
    _ours("--silence-timeout", "a node silent for this long is lost", "SECONDS", 5.0, parse=seconds),
    _ours(
        "--reconnect-grace",
        "a node whose connection broke has this long to come back",
        "SECONDS",
        0.3,
        parse=seconds,
    ),
    _ours(
        "--guard-window",
        "the id of a node that fell silent stays reserved for this long",
        "SECONDS",
        30.0,
        parse=seconds,
    ),
    _ours(
        "--restart-grace",
        "from SIGTERM to SIGKILL for workers stopped by a restart",
        "SECONDS",
        5.0,
        parse=seconds,
    ),
    Flag(
        "--monitor-interval",
        "accepted for compatibility: a worker's end is an event here, nothing is polled",
        "SECONDS",
        0.1,
        seconds,
    ),
)

STATE = (
    _ours(
        "--snapshots",
        "how often workers copy their state into the node's memory: every N steps, off, or auto, as it costs nothing",
        "N",
        "auto",
    ),
    _ours("--snapshot-dir", "where that memory is; /dev/shm/holdfast-UID if not given", "DIR"),
    _ours(
        "--checkpoint-dir",
        "directory or URL (s3:// gs:// az:// ...) of the job's checkpoints, {job_id} in it is replaced;"
        " jobs/{job_id}/checkpoints of --state-dir if not given",
        "DIR_OR_URL",
    ),
    _ours(
        "--checkpoint-every",
        "how often a snapshot becomes a checkpoint: steps (500), or time (90s, 10m, 2h), or never; if not given, every"
        " 10m where --checkpoint-dir is given, else never. Failing and ended jobs leave one all the same",
        "N",
    ),
    _ours(
        "--checkpoint-keep",
        "which checkpoints stay: last:N, every:STEPS, best:METRIC:min|max:N, with commas between; every:1 is all",
        "POLICY",
        "last:3",
    ),
)

HEALTH = (
    _switch("--node-check", "check each node, alone and in pairs, before it takes part; see docs/health.md"),
    _switch("--network-check", "the same as --node-check"),
    _switch("--exclude-straggler", "with --node-check: leave slow nodes out as long as the least of --nnodes is there"),
    _ours(
        "--accelerator",
        "kind of processor to check: cpu, cuda, npu, xpu, mps or a plug-in's name; looked for if not given",
        "NAME",
    ),
)

SECURITY = (
    _ours("--token-file", "file with the job's secret; or put the secret into HOLDFAST_TOKEN", "FILE"),
    _ours("--tls-cert", "certificate of this node", "FILE"),
    _ours("--tls-key", "key of that certificate", "FILE"),
    _ours("--tls-ca", "the root that the other side's certificate must come from", "FILE"),
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
