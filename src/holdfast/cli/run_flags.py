"""The command line of `holdfast run`, as values: `parse_run` from words to `RunOptions`, checked as a whole.

What a single flag may say is checked where it is read (run_flag_table.py, run_flag_values.py), how it may be
spelled in run_flag_parser.py. Here are the flags that must fit each other, and the address that follows
from them. All of it is pure over the arguments: the process's own environment is never read.
"""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from holdfast.cli import run_flag_values as values
from holdfast.cli.run_flag_parser import build_parser
from holdfast.cli.run_flag_table import FLAGS
from holdfast.core.ladder import Strategy
from holdfast.errors import UsageError

__all__ = ["RunOptions", "build_parser", "master_endpoint", "parse_run"]

SHUTDOWN_TIMEOUT_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
SHUTDOWN_TIMEOUT_DEFAULT_S = 30.0
JOIN_TIMEOUT_DEFAULT_S = 600.0
PORT_DEFAULT = 29400
PORT_DEFAULT_STATIC = 29500
ANY_LOOPBACK_PORT = ("127.0.0.1", 0)

_Value = TypeVar("_Value")


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What one `holdfast run` was asked to do. A name that ends in _s is in seconds."""

    # Size.
    nnodes_min: int  # nodes without which the job does not start or go on, at least 1
    nnodes_max: int  # nodes beyond which further ones wait
    nproc_per_node: str  # workers a node: digits, or a word to resolve: auto, cpu, gpu, xpu, a device's name
    node_rank: int | None  # place of this node in the order of ranks; None: the master chooses
    node_id: str | None  # stable name of this node; None: chosen from the machine

    # Rendezvous.
    rdzv_backend: str  # static, c10d, etcd, etcd-v2, holdfast; it decides the rules of the address only
    rdzv_endpoint: str  # as given, "" if not; `master_endpoint` reads it
    rdzv_id: str  # name of the job; of no meaning with `standalone`
    rdzv_conf: dict[str, str]  # every pair that was given, the ones without meaning here too
    standalone: bool  # one node, any free loopback port
    master_addr: str  # host of the master, for the static backend
    master_port: int | None  # its port; None: not given
    local_addr: str | None  # address by which other nodes reach this one; None: looked up
    is_host: bool | None  # whether this node is to host the master; None: decided by the address
    join_timeout_s: float  # wait for the minimum of nodes
    settle_s: float  # wait for further nodes once the minimum is there

    # Launching.
    script: str  # path, module or program
    script_args: tuple[str, ...]
    module: bool  # `script` is a module
    no_python: bool  # `script` is a program of its own
    run_path: bool  # run inside the started interpreter; overrules the two above
    python_exec: str  # interpreter from PYTHON_EXEC; "": the one that runs Holdfast
    start_method: Literal["spawn", "forkserver"]  # `fork` has become forkserver
    preload: tuple[str, ...]  # modules the fork server imports ahead
    role: str  # ROLE_NAME of the workers
    numa_binding: Literal["node", "socket", "exclusive", "core-complex"] | None
    virtual_local_rank: bool  # each worker sees LOCAL_RANK 0 and its device as device 0
    signals_to_handle: tuple[str, ...]  # names such as SIGTERM, passed on to the workers
    shutdown_timeout_s: float  # from SIGTERM to SIGKILL when the job ends

    # Logs.
    log_dir: str | None  # None: one is made
    redirects: int | dict[int, int]  # streams to files only: sum of 1 (stdout) and 2 (stderr), or that by local rank
    tee: int | dict[int, int]  # streams to files and to the console, the same way; wins over `redirects`
    local_ranks_filter: frozenset[int] | None  # local ranks shown on the console; None: all
    duplicate_stdout_filters: tuple[str, ...]  # lines containing one of these go to a further file
    duplicate_stderr_filters: tuple[str, ...]
    log_line_prefix_template: str  # of tee'd lines, with ${role_name}, ${rank}, ${local_rank}; "": the usual prefix
    log_format: Literal["auto", "text", "json"]  # of Holdfast's own log
    event_log_handler: str  # without effect
    logs_specs: str | None  # without effect

    # Recovery.
    max_restarts: int  # restarts after failures of workers, at least 0
    recovery: tuple[Strategy, ...]  # rungs that may be used, in the ladder's order; exit is always there
    spares: int  # parked workers on each node, at least 0
    spare_nodes: int  # nodes beyond nnodes_max that may wait, at least 0
    replicas: int  # copies of each shard in other ranks' memory, and of snapshots on other nodes, at least 0
    replica_parity: int  # nodes in a group that keeps snapshots as parity; 0: copies are kept
    failure_domain: str | None  # what this node would go down with; None: its machine
    hang_timeout_s: float | None  # None: adaptive; 0: no limit
    dynamic_failover_extension: str | None  # module::Class
    fault_table: str | None  # path, ~ already replaced
    cordon_limit: int  # nodes sent away within a day because of faults, at least 0
    straggler_action: Literal["report", "shift", "swap"]
    straggler_interval_s: float  # how often a node tells how fast its ranks are, above 0
    machine: str | None  # stable name of this machine; None: its host's
    state_dir: str  # where the master's journal is; ~ is already replaced
    heartbeat_interval_s: float  # how often a node says that it lives, above 0
    silence_timeout_s: float  # a node silent for this long is lost; above the heartbeat interval
    reconnect_grace_s: float  # how long a broken connection may take to come back
    guard_window_s: float  # how long the id of a node that fell silent stays reserved
    restart_grace_s: float  # from SIGTERM to SIGKILL when workers are stopped by a restart
    monitor_interval_s: float  # without effect

    # State.
    snapshots: int  # steps between two snapshots; 0: as often as they cost nothing; -1: none
    snapshot_dir: str | None  # where they are; None: in shared memory
    checkpoint_dir: str | None  # or a URL; {job_id} in it is still to be replaced; None: in the job's directory
    checkpoint_every: tuple[int, float] | None  # steps or seconds, the other is 0; None: not said
    checkpoint_keep: str  # a policy, known to be a good one

    # Health.
    node_check: bool  # nodes are checked before they take part; also by --network-check
    network_check: bool
    exclude_straggler: bool  # slow ones are left out while the minimum holds
    accelerator: str | None  # name of a plug-in; None: found out on each node
    check_only: bool = False  # `holdfast check`: there is no script

    # Security. Paths, ~ already replaced.
    token_file: str | None  # None: HOLDFAST_TOKEN, or no token at all on loopback
    tls_cert: str | None  # given together with `tls_key`, or both None
    tls_key: str | None
    tls_ca: str | None  # root that the other side's certificate must come from

    @property
    def nodes_most(self) -> int:
        """Nodes that may be there at a time, those that wait as spares included."""
        return self.nnodes_max + self.spare_nodes


def parse_run(argv: Sequence[str], environ: Mapping[str, str]) -> RunOptions:
    """Read the words after `holdfast run`. Raises UsageError with the one sentence the user needs."""
    namespace = build_parser(environ).parse_args(argv)
    fields = _plain(namespace) | _read(namespace, environ) | _paths(namespace, environ)
    # convert() holds each value to its annotation: a wrong one here would be a bug of ours, and crash.
    options = msgspec.convert(fields, RunOptions)
    for sentence in _contradictions(options, namespace):
        raise UsageError(sentence)
    master_endpoint(options)
    return options


def master_endpoint(options: RunOptions) -> tuple[str, int]:
    """Host and port of the job's master by torchrun's rules. Port 0 means any free one."""
    is_static = options.rdzv_backend == "static"
    port_unsaid = options.master_port is None or not is_static
    if options.standalone or (not options.rdzv_endpoint and port_unsaid and options.nodes_most == 1):
        return ANY_LOOPBACK_PORT
    if options.rdzv_endpoint:
        said = f"--rdzv-endpoint {options.rdzv_endpoint}"
        default = PORT_DEFAULT_STATIC if is_static else PORT_DEFAULT
        host, port = _checked(said, values.endpoint, options.rdzv_endpoint, default)
    elif is_static:
        said = f"--master-port {options.master_port}"
        host = _checked(f"--master-addr {options.master_addr}", values.host, options.master_addr)
        port = PORT_DEFAULT_STATIC if options.master_port is None else options.master_port
    else:
        raise UsageError(
            f"--rdzv-backend {options.rdzv_backend} does not say where up to {options.nodes_most} nodes meet:"
            " give each of them the same --rdzv-endpoint HOST:PORT"
        )
    if port == 0 and options.nodes_most > 1:
        raise UsageError(f"{said}: the other nodes cannot know which free port is taken, give a port above 0")
    return host, port


def _plain(namespace: Namespace) -> dict[str, Any]:
    """The fields that are a flag's value and nothing else. An empty text means what no flag means."""
    found = {flag.field: getattr(namespace, flag.dest) for flag in FLAGS}
    unset = {flag.field: None for flag in FLAGS if flag.default is None and found[flag.field] == ""}
    script = {"script": namespace.training_script, "script_args": namespace.training_script_args}
    return found | unset | script


def _read(namespace: Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    """The fields whose text has a grammar, and those that come from elsewhere than one flag."""

    def read(dest: str, parse: Callable[[str], Any]) -> Any:
        return _checked(_said(namespace, dest), parse, getattr(namespace, dest))

    conf: dict[str, str] = read("rdzv_conf", values.configuration)
    nnodes_min, nnodes_max = read("nnodes", values.node_range)
    return {
        "nnodes_min": nnodes_min,
        "nnodes_max": nnodes_max,
        "nproc_per_node": read("nproc_per_node", values.workers_per_node),
        "node_id": read("node_id", values.node_name) if namespace.node_id else None,
        "machine": read("machine", values.node_name) if namespace.machine else None,
        "rdzv_backend": read("rdzv_backend", values.backend),
        "rdzv_endpoint": namespace.rdzv_endpoint.strip(),
        "node_check": namespace.node_check or namespace.network_check,
        "rdzv_conf": conf,
        "start_method": "spawn" if namespace.start_method == "spawn" else "forkserver",
        "preload": read("preload", values.module_names),
        "recovery": read("recovery", values.strategies),
        "hang_timeout_s": read("hang_timeout", values.hang_timeout),
        "snapshots": read("snapshots", values.snapshots),
        "checkpoint_every": read("checkpoint_every", values.steps_or_seconds) if namespace.checkpoint_every else None,
        "checkpoint_keep": read("checkpoint_keep", values.retention),
        "dynamic_failover_extension": (
            read("dynamic_failover_extension", values.extension_name) if namespace.dynamic_failover_extension else None
        ),
        "redirects": read("redirects", values.streams),
        "tee": read("tee", values.streams),
        "local_ranks_filter": read("local_ranks_filter", values.local_ranks),
        "signals_to_handle": read("signals_to_handle", values.signal_names),
        "shutdown_timeout_s": _shutdown_timeout_s(namespace, environ),
        "log_line_prefix_template": environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", ""),
        "python_exec": environ.get("PYTHON_EXEC", ""),
        **_from_configuration(conf, namespace),
    }


def _from_configuration(conf: Mapping[str, str], namespace: Namespace) -> dict[str, Any]:
    def read(key: str, parse: Callable[[str], Any], default: Any) -> Any:
        return _checked(f"--rdzv-conf {key}={conf[key]}", parse, conf[key]) if key in conf else default

    join_key = "join_timeout" if "join_timeout" in conf else "timeout"
    last_call_s = read("last_call_timeout", values.seconds, namespace.settle)
    return {
        "join_timeout_s": read(join_key, values.seconds_above_zero, JOIN_TIMEOUT_DEFAULT_S),
        "settle_s": namespace.settle if "settle" in namespace.given else last_call_s,
        "is_host": read("is_host", values.yes_or_no, None),
    }


def _shutdown_timeout_s(namespace: Namespace, environ: Mapping[str, str]) -> float:
    if namespace.shutdown_timeout is not None:
        return float(namespace.shutdown_timeout)
    text = environ.get(SHUTDOWN_TIMEOUT_VARIABLE)
    if text is None:
        return SHUTDOWN_TIMEOUT_DEFAULT_S
    return _checked(f"{SHUTDOWN_TIMEOUT_VARIABLE}={text}", values.seconds, text)


def _paths(namespace: Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    ours = [flag for flag in FLAGS if flag.is_ours and flag.metavar in ("DIR", "FILE", "DIR_OR_URL")]
    return {
        flag.field: _checked(_said(namespace, flag.dest), values.home_expanded, text, environ)
        for flag in ours
        if (text := getattr(namespace, flag.dest))
    }


def _contradictions(options: RunOptions, namespace: Namespace) -> Iterator[str]:
    """A sentence for each pair of flags that cannot both be meant. The first one is enough."""

    def said(dest: str) -> str:
        return _said(namespace, dest)

    if options.no_python and options.module and not options.run_path:
        yield f"{said('no_python')} and {said('module')} exclude each other: a module needs python, drop one"
    if options.standalone and options.nnodes_max > 1:
        yield f"{said('standalone')} is for one node: drop it, or {said('nnodes')}"
    if options.standalone and options.spare_nodes:
        yield f"{said('standalone')} is for one node: drop it, or {said('spare_nodes')}"
    if options.node_rank is not None and options.node_rank >= options.nodes_most:
        yield (
            f"{said('node_rank')} does not fit {said('nnodes')}: ranks of nodes go from 0 to"
            f" {options.nodes_most - 1}, lower the rank or raise --nnodes"
        )
    for spare in ("spares", "spare_nodes"):
        if getattr(options, spare) and Strategy.RECOVER not in options.recovery:
            yield (
                f"{said(spare)} would wait for nothing, as {said('recovery')} leaves out recover, which takes spares:"
                f" add recover to --recovery, or drop --{spare.replace('_', '-')}"
            )
    if options.replica_parity == 1 or options.replica_parity > options.nnodes_max:
        yield (
            f"{said('replica_parity')} does not fit {said('nnodes')}: a group has at least 2 nodes, and at most as many"
            " as there are"
        )
    if options.exclude_straggler and not options.node_check:
        yield f"{said('exclude_straggler')} needs to know who is slow: add --node-check"
    if not options.rdzv_id and not options.standalone:
        yield "--rdzv-id is empty: give every node of the job the same name, or leave the flag out"
    if not options.state_dir:
        yield "--state-dir is empty: name a directory, or leave the flag out"
    if options.tls_cert and not options.tls_key:
        yield f"{said('tls_cert')} needs its key: add --tls-key FILE"
    if options.tls_key and not options.tls_cert:
        yield f"{said('tls_key')} needs its certificate: add --tls-cert FILE"
    if options.silence_timeout_s <= options.heartbeat_interval_s:
        yield (
            f"{said('silence_timeout')} would lose healthy nodes between two heartbeats:"
            f" make it several times longer than {said('heartbeat_interval')}"
        )


def _said(namespace: Namespace, dest: str) -> str:
    """A flag as the user gave it, or as its default stands."""
    default = f"--{dest.replace('_', '-')} {getattr(namespace, dest)}"
    return str(namespace.given.get(dest, default))


def _checked(said: str, parse: Callable[..., _Value], *args: Any) -> _Value:
    """Complete the sentence of a refused value with the words that gave it."""
    try:
        return parse(*args)
    except ArgumentTypeError as error:
        raise UsageError(f"{said}: {error}") from None
