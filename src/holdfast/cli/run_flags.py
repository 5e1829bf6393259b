"""The command line of `holdfast run`, as values: `parse_run` from words to `RunOptions`, checked as a whole.

The value of a single flag is checked where it is read (run_flag_table.py, run_flag_values.py), its spelling in
run_flag_parser.py. This module checks the flags that must fit each other, and derives the master's address from them.
All of it is pure over the arguments: the process's own environment is never read.
"""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from holdfast.cli import run_flag_values as values
from holdfast.cli.run_flag_parser import build_parser
from holdfast.cli.run_flag_table import FLAGS
from holdfast.core.strategies import Strategy
from holdfast.errors import UsageError

__all__ = ["RunOptions", "build_parser", "master_endpoint", "parse_run"]

SHUTDOWN_TIMEOUT_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
SHUTDOWN_TIMEOUT_DEFAULT_S = 30.0
JOIN_TIMEOUT_DEFAULT_S = 600.0
POD_VARIABLE = "KUBERNETES_SERVICE_HOST"
"""It is in the environment of every pod. A pod that is lost is started again, elsewhere if need be; Slurm keeps a job's
allocation and replaces nothing in it."""
STATE_DIR_DEFAULT = "~/.holdfast"
PORT_DEFAULT = 29400
PORT_DEFAULT_STATIC = 29500
ANY_LOOPBACK_PORT = ("127.0.0.1", 0)

_Value = TypeVar("_Value")


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one `holdfast run`. A name that ends in _s is in seconds."""

    # Size.
    nnodes_min: int  # nodes without which the job does not start or go on, at least 1
    nnodes_max: int  # the most nodes of the job; further ones wait
    nproc_per_node: str  # workers a node: digits, or a word to resolve: auto, cpu, gpu, xpu, a device's name
    node_rank: int | None  # position of this node in the order of ranks; None: the master chooses
    node_id: str | None  # stable name of this node; None: chosen from the machine

    # Rendezvous.
    rdzv_backend: str  # static, c10d, etcd, etcd-v2, holdfast; it decides the rules of the address only
    rdzv_endpoint: str  # as given, "" if not; `master_endpoint` parses it
    rdzv_id: str  # name of the job; "none" or "": one is made
    rdzv_conf: dict[str, str]  # every pair that was given, also those without meaning here
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
    preload: tuple[str, ...]  # what the fork server imports ahead: modules, "auto", or "none" alone
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
    log_format: Literal["auto", "text", "json"]  # of Holdfast's own messages
    verbose: bool  # all of them, not only what the console shows of a job
    error_format: Literal["holdfast", "torchrun"]  # how a failed job's end is shown
    event_log_handler: str  # without effect
    logs_specs: str | None  # without effect

    # Recovery.
    max_restarts: int  # restarts after failures of workers, at least 0
    recovery: tuple[Strategy, ...]  # rungs that may be used, in the ladder's order; exit is always there
    spares: int  # parked workers on each node, at least 0
    spare_nodes: int  # nodes beyond nnodes_max that may wait, at least 0
    are_replicas_default: bool  # --replicas was not given
    replicas: int  # copies of each shard in other ranks' memory, and of snapshots on other nodes, at least 0
    replica_parity: int  # nodes in a group that keeps snapshots as parity; 0: copies are kept
    failure_domain: str | None  # the failure domain of this node, e.g. its rack; None: its machine
    hang_timeout_s: float | None  # None: adaptive; 0: no limit
    dynamic_failover_extension: str | None  # module::Class
    fault_table: str | None  # path, ~ already replaced
    cordon_limit: str  # nodes that may be cordoned within a day because of faults: a number, or a share like 1%
    wait_for_nodes_s: float  # how long survivors hold their state and wait for a replacement; 0: not at all
    straggler_action: Literal["report", "shift", "swap"]
    collective_retries: int  # how often one collective may be run again below the step, at least 0
    straggler_interval_s: float  # how often a node reports its ranks' step times, above 0
    machine: str | None  # stable name of this machine; None: its host's
    keep_jobs: float | None  # seconds since a job ended, after which it is removed from there; None: never
    state_dir: str  # where the master's journal is; ~ is already replaced, but in the default
    output_dir: str = ""  # where workers' output goes without log_dir; "": to the state directory
    heartbeat_interval_s: float  # how often a node sends a heartbeat, above 0
    silence_timeout_s: float  # a node silent for this long is lost; above the heartbeat interval
    reconnect_grace_s: float  # how long a broken connection may take to come back
    master_timeout_s: float  # how long a decision of a master that is away is waited for
    farewell_timeout_s: float  # how long the master of a finished job waits for lost nodes
    guard_window_s: float  # how long the id of a node that fell silent stays reserved
    restart_grace_s: float  # from SIGTERM to SIGKILL when workers are stopped by a restart
    monitor_interval_s: float  # without effect

    # State.
    snapshots: int  # steps between two snapshots; 0: as often as they cost nothing; -1: none
    snapshot_dir: str | None  # where they are; None: in shared memory
    checkpoint_dir: str | None  # or a URL; {job_id} in it is still to be replaced; None: in the job's directory
    checkpoint_every: tuple[int, float] | None  # steps or seconds, the other is 0; None: not given
    checkpoint_keep: str  # a valid policy

    # Health.
    node_check: bool  # nodes are checked before they join a view; also by --network-check
    network_check: bool
    exclude_straggler: bool  # slow nodes are left out while the minimum of nodes is there
    accelerator: str | None  # name of a plug-in; None: detected on each node
    check_only: bool = False  # `holdfast check`: there is no script

    # Security. Paths, ~ already replaced.
    token_file: str | None  # None: HOLDFAST_TOKEN, or no token at all on loopback
    tls_cert: str | None  # given together with `tls_key`, or both None
    tls_key: str | None
    tls_ca: str | None  # root that the other side's certificate must come from

    @property
    def nodes_most(self) -> int:
        """The most nodes at a time, waiting spares included."""
        return self.nnodes_max + self.spare_nodes


def parse_run(argv: Sequence[str], environ: Mapping[str, str]) -> RunOptions:
    """Parse the words after `holdfast run`. Raise UsageError with the one sentence the user needs."""
    namespace = build_parser(environ).parse_args(argv)
    fields = _plain(namespace) | _read(namespace, environ) | _paths(namespace, environ)
    # convert() checks each value against its annotation: a wrong one here would be a bug of ours, and crash.
    options = msgspec.convert(fields, RunOptions)
    for sentence in _contradictions(options, namespace):
        raise UsageError(sentence)
    master_endpoint(options)
    return options


def master_endpoint(options: RunOptions) -> tuple[str, int]:
    """Return host and port of the job's master by torchrun's rules. Port 0 means any free one."""
    is_static = options.rdzv_backend == "static"
    port_not_given = options.master_port is None or not is_static
    if options.standalone or (not options.rdzv_endpoint and port_not_given and options.nodes_most == 1):
        return ANY_LOOPBACK_PORT
    if options.rdzv_endpoint:
        source = f"--rdzv-endpoint {values.shown(options.rdzv_endpoint)}"
        default = PORT_DEFAULT_STATIC if is_static else PORT_DEFAULT
        host, port = _checked(source, values.endpoint, options.rdzv_endpoint, default)
    elif is_static:
        source = f"--master-port {options.master_port}"
        host = _checked(f"--master-addr {values.shown(options.master_addr)}", values.host, options.master_addr)
        port = PORT_DEFAULT_STATIC if options.master_port is None else options.master_port
    else:
        raise UsageError(
            f"--rdzv-backend {options.rdzv_backend} needs an address at which up to {options.nodes_most} nodes meet:"
            " give each of them the same --rdzv-endpoint HOST:PORT"
        )
    if port == 0 and (options.nnodes_min > 1 or options.spare_nodes):  # with 1:N one node is enough
        raise UsageError(f"{source}: the other nodes cannot know which free port is taken, give a port above 0")
    return host, port


def _plain(namespace: Namespace) -> dict[str, Any]:
    """Return the fields that are a flag's value. An empty text means that the flag was not given."""
    found = {flag.field: getattr(namespace, flag.dest) for flag in FLAGS}
    unset = {flag.field: None for flag in FLAGS if flag.default is None and found[flag.field] == ""}
    script = {"script": namespace.training_script, "script_args": namespace.training_script_args}
    return found | unset | script


def _read(namespace: Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields whose text must be parsed, and those that do not come from exactly one flag."""

    def read(dest: str, parse: Callable[[str], Any]) -> Any:
        return _checked(_as_given(namespace, dest), parse, getattr(namespace, dest))

    conf: dict[str, str] = read("rdzv_conf", values.configuration)
    nnodes_min, nnodes_max = read("nnodes", values.node_range)
    return {
        "nnodes_min": nnodes_min,
        "nnodes_max": nnodes_max,
        "nproc_per_node": read("nproc_per_node", values.workers_per_node),
        "local_addr": read("local_addr", values.host) if namespace.local_addr else None,
        "node_id": read("node_id", values.node_name) if namespace.node_id else None,
        "machine": read("machine", values.node_name) if namespace.machine else None,
        "rdzv_backend": read("rdzv_backend", values.backend),
        "rdzv_endpoint": namespace.rdzv_endpoint.strip(),
        "node_check": namespace.node_check or namespace.network_check,
        "rdzv_conf": conf,
        "start_method": "spawn" if namespace.start_method == "spawn" else "forkserver",
        "preload": read("preload", values.module_names),
        "recovery": read("recovery", values.strategies),
        "cordon_limit": values.shown_cordon_limit(read("cordon_limit", values.cordon_limit)),
        "hang_timeout_s": read("hang_timeout", values.hang_timeout),
        "snapshots": read("snapshots", values.snapshots),
        "keep_jobs": read("keep_jobs", values.age_or_forever),
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
        **_from_configuration(conf, namespace, environ),
    }


def _from_configuration(conf: Mapping[str, str], namespace: Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    def read(key: str, parse: Callable[[str], Any], default: Any) -> Any:
        return _checked(f"--rdzv-conf {key}={values.shown(conf[key])}", parse, conf[key]) if key in conf else default

    join_key = "join_timeout" if "join_timeout" in conf else "timeout"
    last_call_s = read("last_call_timeout", values.seconds, namespace.settle)
    join_timeout_s = read(join_key, values.seconds_above_zero, JOIN_TIMEOUT_DEFAULT_S)
    wait_s = _checked(_as_given(namespace, "wait_for_nodes"), values.seconds_or_auto, namespace.wait_for_nodes)
    if wait_s is None:
        wait_s = join_timeout_s if POD_VARIABLE in environ else 0.0
    return {
        "join_timeout_s": join_timeout_s,
        "wait_for_nodes_s": wait_s,
        "are_replicas_default": "replicas" not in namespace.given,
        "settle_s": namespace.settle if "settle" in namespace.given else last_call_s,
        "is_host": read("is_host", values.yes_or_no, None),
    }


def _shutdown_timeout_s(namespace: Namespace, environ: Mapping[str, str]) -> float:
    if namespace.shutdown_timeout is not None:
        return float(namespace.shutdown_timeout)
    text = environ.get(SHUTDOWN_TIMEOUT_VARIABLE)
    if text is None:
        return SHUTDOWN_TIMEOUT_DEFAULT_S
    return _checked(f"{SHUTDOWN_TIMEOUT_VARIABLE}={values.shown(text)}", values.seconds, text)


def _paths(namespace: Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the fields that are paths. The default state directory is left as it is: where it is depends on what can
    be written to (util/state_directory.py)."""
    ours = [flag for flag in FLAGS if flag.is_ours and flag.metavar in ("DIR", "FILE", "DIR_OR_URL")]
    return {
        flag.field: _checked(_as_given(namespace, flag.dest), values.home_expanded, text, environ)
        for flag in ours
        if (text := getattr(namespace, flag.dest)) and (flag.dest, text) != ("state_dir", STATE_DIR_DEFAULT)
    }


def _contradictions(options: RunOptions, namespace: Namespace) -> Iterator[str]:
    """Yield a sentence for each pair of flags that exclude each other."""

    def given(dest: str) -> str:
        return _as_given(namespace, dest)

    if options.no_python and options.module and not options.run_path:
        yield f"{given('no_python')} and {given('module')} exclude each other: a module needs python, drop one"
    if options.standalone and options.nnodes_max > 1:
        yield f"{given('standalone')} is for one node: drop it, or {given('nnodes')}"
    if options.standalone and options.spare_nodes:
        yield f"{given('standalone')} is for one node: drop it, or {given('spare_nodes')}"
    if options.node_rank is not None and options.node_rank >= options.nodes_most:
        yield (
            f"{given('node_rank')} does not fit {given('nnodes')}: ranks of nodes go from 0 to"
            f" {options.nodes_most - 1}, lower the rank or raise --nnodes"
        )
    for spare in ("spares", "spare_nodes"):
        if getattr(options, spare) and Strategy.RECOVER not in options.recovery:
            yield (
                f"{given(spare)} has no effect, because {given('recovery')} leaves out recover, which uses spares:"
                f" add recover to --recovery, or drop --{spare.replace('_', '-')}"
            )
    if options.replica_parity == 1 or options.replica_parity > options.nnodes_max:
        yield (
            f"{given('replica_parity')} does not fit {given('nnodes')}: a group has at least 2 nodes, and at most"
            " as many as there are"
        )
    if options.exclude_straggler and not options.node_check:
        yield f"{given('exclude_straggler')} needs a check that measures the nodes: add --node-check"
    if not options.rdzv_id and not options.standalone:
        yield "--rdzv-id is empty: give every node of the job the same name, or leave the flag out"
    if not options.state_dir:
        yield "--state-dir is empty: name a directory, or leave the flag out"
    if options.tls_cert and not options.tls_key:
        yield f"{given('tls_cert')} needs its key: add --tls-key FILE"
    if options.tls_key and not options.tls_cert:
        yield f"{given('tls_key')} needs its certificate: add --tls-cert FILE"
    if options.tls_ca and not options.tls_cert:
        yield f"{given('tls_ca')} alone encrypts nothing: add --tls-cert FILE and --tls-key FILE"
    if options.silence_timeout_s <= options.heartbeat_interval_s:
        yield (
            f"{given('silence_timeout')} would lose healthy nodes between two heartbeats:"
            f" make it several times longer than {given('heartbeat_interval')}"
        )


def _as_given(namespace: Namespace, dest: str) -> str:
    """Return a flag as the user gave it, or with its default."""
    default = f"--{dest.replace('_', '-')} {getattr(namespace, dest)}"
    return str(namespace.given.get(dest, default))


def _checked(source: str, parse: Callable[..., _Value], *args: Any) -> _Value:
    """Parse a value; the sentence about a wrong one begins with the words that gave it."""
    try:
        return parse(*args)
    except ArgumentTypeError as error:
        raise UsageError(f"{source}: {error}") from None
