"""`holdfast run`: the agent of this node, with torchrun's flags."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast import exit_codes
from holdfast.agent.file_timer import FILE_VARIABLE as TIMER_FILE_VARIABLE
from holdfast.agent.file_timer import timer_file
from holdfast.cli.addresses import is_local, is_loopback, is_name, own_address, primary_address, resolve_all
from holdfast.cli.capabilities import capabilities, check_checkpoint_dir, checkpoint_dir, snapshot_settings
from holdfast.cli.run_flag_values import shown
from holdfast.cli.run_flags import (
    ANY_LOOPBACK_PORT,
    STATE_DIR_DEFAULT,
    RunOptions,
    master_endpoint,
    parse_run,
)
from holdfast.errors import UsageError
from holdfast.observe.token_file import TOKEN_VARIABLE, find_or_create_token
from holdfast.util.files import read_small
from holdfast.util.logs import get_logger, set_up_logging
from holdfast.util.processes import module_command
from holdfast.util.state_directory import check_state_directory, journal_path, make_fallback, make_state_directory
from holdfast.util.versions import TORCH_TESTED, torch_version, untested

if TYPE_CHECKING:
    from holdfast.agent.config import AgentConfig, MasterPlan, Program
    from holdfast.agent.launch.fork_server_process import InheritedServer
    from holdfast.agent.launch.launcher import Launcher
    from holdfast.agent.results import Result
    from holdfast.agent.worker_logs import LogPlan
    from holdfast.core.faults.failures import Failure
    from holdfast.core.faults.fault_types import FaultTable

LOGS_SPECS_GROUP = "torchrun.logs_specs"
NO_RUN_ID = "none"
"""torchrun's default of --rdzv-id."""

JOB_STEM_CHARS_MAX = 64
"""How much of a script's name is in the name of its job (run_flag_values.job_name)."""
FAULT_TABLE_BYTES_MAX = 4 * 2**20

log = get_logger(__name__)


def run(argv: list[str]) -> int:
    """Parse the flags, run the agent, report how it ended; return the exit code."""
    try:
        return run_job(argv, is_command=True).exit_code
    except UsageError as error:  # an outer launcher reads its file, whatever went wrong
        _write_error_file(None, error.sentence)
        raise


def run_job(argv: list[str], inherited: InheritedServer | None = None, *, is_command: bool = False) -> Result:
    """Parse the flags, run the agent, report how it ended; return that. `inherited`: the fork server that is there
    already. `is_command`: whether these are the words that a person gave to `holdfast run`."""
    options = parse_run(argv, os.environ)
    set_up_logging(options.log_format, "agent", verbose=options.verbose)
    options = with_directories(options)
    check_options(options)
    result = asyncio.run(run_agent(options, inherited, argv if is_command else ()))
    if options.keep_jobs is not None:
        from holdfast.cli.job_removal import remove_old_jobs  # not before: the agent starts quickly

        remove_old_jobs(Path(options.state_dir), options.keep_jobs)
    return result


def with_directories(options: RunOptions) -> RunOptions:
    """Return the options with the directories that are used where none are named: of the state, and of workers' output.
    That one is in the directory for temporary files, as torchrun's is: homes have quotas, and are often slow."""
    if options.state_dir != STATE_DIR_DEFAULT:
        check_state_directory(Path(options.state_dir))
        return options
    temporary = make_fallback()
    state_dir = make_state_directory(temporary)
    if state_dir == temporary:
        log.warning(
            "state-directory-temporary",
            f"{options.state_dir} cannot be written to: the job's journal is in {state_dir}, which may not outlive a"
            " reboot; name a lasting directory with --state-dir",
        )
    return msgspec.structs.replace(options, state_dir=str(state_dir), output_dir=str(temporary))


def check_options(options: RunOptions) -> None:
    """Raise UsageError, before anything starts, for flags that cannot work on this machine."""
    check_program(options)
    check_versions(options)
    check_checkpoint_dir(options, checkpoint_dir(options, ""))
    if options.nodes_most > 1 and master_endpoint(options)[1] == 0:
        log.warning(
            "port-unknown",
            f"{options.rdzv_endpoint or options.master_addr}: other nodes cannot know which free port is taken, so none"
            " can join this job; give a port above 0 if some are to",
        )
    fault_table(options)
    if options.dynamic_failover_extension:
        from holdfast.failover import load

        load(options.dynamic_failover_extension)
    if options.accelerator:
        from holdfast.checks.accelerators import registry

        registry.load(options.accelerator)
    if options.logs_specs is not None:
        check_logs_specs(options.logs_specs)
    if options.log_dir and options.log_dir != os.devnull:
        make_log_directory(Path(options.log_dir))


def make_log_directory(directory: Path) -> None:
    """Make the directory of --log-dir, as torchrun does; raise UsageError if it cannot be made or written to."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--log-dir {directory} cannot be made: {error.strerror}; name another directory") from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UsageError(f"--log-dir {directory} may not be written to by this user; name another directory")


def check_logs_specs(name: str) -> None:
    """Raise UsageError for every entry point but torch's own, which says what Holdfast does by itself."""
    from difflib import get_close_matches
    from importlib.metadata import entry_points

    found = {entry.name: entry for entry in entry_points(group=LOGS_SPECS_GROUP)}
    if name not in found:
        near = get_close_matches(name, found, n=1)
        hint = f"did you mean {near[0]}?" if near else f"installed are: {', '.join(sorted(found)) or 'none'}"
        raise UsageError(
            f"--logs-specs {name}: no installed package has an entry point {LOGS_SPECS_GROUP!r} of that name, {hint}"
        )
    if not found[name].value.startswith("torch."):
        raise UsageError(
            f"--logs-specs {name}: Holdfast opens the workers' log files itself and cannot call {found[name].value}:"
            " say where output goes with --log-dir, -r and -t, and leave --logs-specs out"
        )


def check_program(options: RunOptions) -> None:
    """Raise UsageError for a script, module or program that is not there. Another interpreter may find more modules."""
    name, here = options.script, Path.cwd()
    if options.check_only:
        return
    if options.module and not options.run_path and not options.no_python:
        top = name.partition(".")[0]
        if not options.python_exec and not (top and _is_module(top, here)):
            raise UsageError(
                f"no module named {shown(top or name)}: install it, or start from the directory that it is in, not"
                f" {here}"
            )
    elif options.no_python and not options.run_path:
        if shutil.which(name) is None:
            raise UsageError(f"no program {name}: name one that is on PATH, or the path of one that can be executed")
    elif name == "-":
        raise UsageError("a script cannot come from standard input, which all workers share: save it to a file")
    elif not Path(name).exists():
        raise UsageError(f"no script {name} in {here}: give its path" if "/" not in name else f"no script {name}")
    elif Path(name).is_dir() and not (Path(name) / "__main__.py").exists():
        raise UsageError(f"{name} is a directory without a __main__.py: give the path of a script")
    elif not os.access(name, os.R_OK):
        raise UsageError(f"the script {name} may not be read by this user: change its permissions")


def _is_module(top: str, here: Path) -> bool:
    """Return whether a top-level module can be found, by the finders of packages that are installed as editable too.
    Nothing is imported."""
    if top in sys.builtin_module_names or PathFinder.find_spec(top, [str(here), *sys.path]):
        return True
    finders = (finder for finder in sys.meta_path if finder is not PathFinder and hasattr(finder, "find_spec"))
    return any(finder.find_spec(top, None) for finder in finders)


def check_versions(options: RunOptions) -> None:
    """Raise UsageError if torch is not installed where the workers need it; log a warning for untested versions."""
    torch = torch_version()
    if torch is None and not options.python_exec and not _is_exec(options):
        raise UsageError(
            f"torch is not installed in the environment of Holdfast ({sys.executable}): install it there, in the build"
            f" that your accelerator needs, as in `pip install torch=={TORCH_TESTED[-1]}.0`; or give a program that"
            " needs no torch with --no-python"
        )
    if text := untested(torch):
        log.warning("versions-untested", text)


def fault_table(options: RunOptions) -> FaultTable:
    """Return the rules by which faults are recognised: the user's, then those of this machine's processors, then the
    built-in ones. Raise UsageError for a file that is wrong, with its line."""
    from holdfast.checks.accelerators import registry
    from holdfast.core.faults.fault_table import BUILT_IN, read_fault_table, with_accelerator, with_detected

    if options.accelerator:
        table = with_accelerator(BUILT_IN, registry.load(options.accelerator).faults)
    else:
        table = with_detected(BUILT_IN, [rule for kind in registry.present() for rule in kind.faults])
    if not options.fault_table:
        return table
    try:
        text = read_small(options.fault_table, FAULT_TABLE_BYTES_MAX).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"--fault-table {options.fault_table} cannot be read: {reason}") from None
    return read_fault_table(text, options.fault_table, table)


async def run_agent(options: RunOptions, inherited: InheritedServer | None = None, argv: Sequence[str] = ()) -> Result:
    """Run the agent until the job is over; return how it ended. `argv`: the words after `holdfast run`."""
    environment = worker_base_environment(options, os.environ)
    # first of all: the fork server warms up while the rest is imported
    from holdfast.agent.launch.launcher import Launcher
    from holdfast.wire.launch_messages import PreloadPlan, ScriptKind

    warm = options.start_method == "forkserver" and not _is_exec(options) and not options.python_exec
    kind: ScriptKind = "path" if options.run_path else "module" if options.module else "script"
    plan = PreloadPlan(modules=options.preload, script_kind=kind, script=options.script)
    launcher = await Launcher.start("warm" if warm else "cold", plan, environment, inherited)
    try:
        config = await asyncio.to_thread(build_config, options, environment)
        result = await _agent(config, launcher)
    finally:
        await launcher.close()
    _report(result, options, resume_command(argv, options, result.job_id) if argv else "")
    return result


def resume_command(argv: Sequence[str], options: RunOptions, job_id: str) -> str:
    """Return the command that goes on with a job: the same one, with the job's name."""
    words = list(argv)
    if options.rdzv_id in (NO_RUN_ID, ""):
        words = ["--rdzv-id", job_id, *words]
    return shlex.join(["holdfast", "run", *words])


async def _agent(config: AgentConfig, launcher: Launcher) -> Result:
    from holdfast.agent.agent import Agent

    return await Agent(config, launcher).run()


def _report(result: Result, options: RunOptions, again: str) -> None:
    from holdfast.cli.child_failures import child_failures, torchrun_summary
    from holdfast.core.records import Outcome
    from holdfast.core.sentences import failure_report

    failures = child_failures(result.cause, result.failures) if result.exit_code else ()
    text = result.last_line if result.last_line and not options.check_only else result.why
    if options.error_format == "torchrun" and failures:
        print(torchrun_summary(options.script, failures), file=sys.stderr)
    elif result.cause is not None:
        report = f"{failure_report(result.cause)}\n`holdfast explain` shows the whole incident"
        if options.log_format == "json":
            log.error("root-cause", report)
        else:
            print(report, file=sys.stderr)
            text = without_message(text, result.cause)
    if result.exit_code:
        _write_error_file(result.cause, result.why)
    if result.outcome is Outcome.STOPPED and result.saved and result.job_id:
        text += f"; to go on from {result.saved}, run: {again}" if again else f"; its state is in {result.saved}"
    is_asked_for = result.outcome is Outcome.STOPPED or result.exit_code == exit_codes.SUCCESS
    (log.notice if is_asked_for else log.error)("job-ended", text)


def _write_error_file(cause: Failure | None, why: str) -> None:
    from holdfast.cli.launcher_error_file import ERROR_FILE_VARIABLE, write_launcher_error_file

    if error_file := os.environ.get(ERROR_FILE_VARIABLE):
        write_launcher_error_file(error_file, cause, why)


def without_message(text: str, cause: Failure) -> str:
    """Return the end of a job with the type of the exception alone: the report above it has the traceback."""
    if not cause.traceback or not cause.exception:
        return text
    return text.replace(f": {cause.message}", f": {cause.exception}", 1)


# --- from flags to the agent's configuration


def build_config(options: RunOptions, environment: dict[str, str]) -> AgentConfig:
    """Return the agent's configuration, resolved on this machine."""
    from holdfast.agent.config import AgentConfig
    from holdfast.core.events import JobSpec
    from holdfast.wire.tls import Tls

    host, port = master_endpoint(options)
    given = _master_name(options, host)
    if options.nodes_most > 1 and is_name(host) and is_loopback(host):
        host = primary_address()  # as on Debian, where a machine's own name is 127.0.1.1, which others cannot reach
    loopback = is_loopback(host)
    token = find_or_create_token(os.environ, options.token_file, options.state_dir, loopback=loopback)
    os.environ[TOKEN_VARIABLE] = token  # for the master this agent may start; workers do not get it
    node_id = options.node_id or _node_id(options)
    run_id = "" if options.rdzv_id == NO_RUN_ID else options.rdzv_id
    tls = Tls(options.tls_cert, options.tls_key or "", options.tls_ca or "") if options.tls_cert else None
    if tls:
        tls.server_context()  # before a master is started that cannot use them either
    plan = _master_plan(options, host, port, run_id)
    workers = count_workers(options.nproc_per_node)
    return AgentConfig(
        node_id=node_id,
        state_dir=options.state_dir,
        address=options.local_addr or own_address(host),
        workers=workers,
        role=options.role,
        requested_rank=options.node_rank,
        spec=JobSpec(
            run_id=run_id,
            nodes_min=options.nnodes_min,
            nodes_max=options.nnodes_max,
            restarts_max=options.max_restarts,
        ),
        program=_program(options),
        environment=environment,
        master_host=host,
        master_name=given,
        master_addresses=resolve_all(given) if given else (),
        master_port=port,
        master=plan,
        token=token,
        tls=tls,
        logs=_log_plan(options, node_id, run_id, workers),
        signals=tuple(signal.Signals[name] for name in options.signals_to_handle),
        heartbeat_interval_s=options.heartbeat_interval_s,
        silence_timeout_s=options.silence_timeout_s,
        restart_grace_s=options.restart_grace_s,
        shutdown_timeout_s=options.shutdown_timeout_s,
        join_timeout_s=options.join_timeout_s,
        farewell_timeout_s=options.farewell_timeout_s,
        master_timeout_s=options.master_timeout_s,
        checkpoint_dir=_checkpoints(options, run_id, plan),
        replicas=options.replicas,
        are_replicas_default=options.are_replicas_default,
        snapshots=snapshot_settings(options),
        snapshot_dir=_snapshot_dir(options),
        is_resumable=bool(run_id) or (host, port) != ANY_LOOPBACK_PORT,
        checkpoint_keep=options.checkpoint_keep,
        failure_domain=options.failure_domain or "",
        hang_timeout_s=options.hang_timeout_s,
        collective_retries=options.collective_retries,
        straggler_interval_s=options.straggler_interval_s,
        accelerator=options.accelerator or "",
        failover=options.dynamic_failover_extension or "",
        fault_table=fault_table(options),
        timer_file=environment.get(TIMER_FILE_VARIABLE, "") if timer_file(os.environ) else "",
        machine=options.machine or socket.gethostname(),
    )


def _master_name(options: RunOptions, host: str) -> str:
    """Return the host of a static rendezvous as it was given; empty for the other backends."""
    if options.rdzv_backend != "static":
        return ""
    text = options.rdzv_endpoint or options.master_addr
    return "localhost" if text.partition(":")[0].strip() == "localhost" else host


def _snapshot_dir(options: RunOptions) -> str:
    from holdfast.snapshots.directories import default_root

    if options.snapshot_dir:
        return options.snapshot_dir
    try:
        return str(default_root(Path(options.state_dir)))
    except OSError as error:
        raise UsageError(
            f"cannot write to the state directory {options.state_dir}: {error.strerror or error}; choose another"
            " --state-dir"
        ) from error


def _checkpoints(options: RunOptions, run_id: str, plan: MasterPlan | None) -> str:
    """Return the directory of checkpoints. It is logged, with the other means of recovery."""
    job_id = run_id or (plan.job_id if plan and plan.required else "")  # a required master creates the very job planned
    directory = checkpoint_dir(options, job_id)
    log.info("recovery-means", capabilities(options, directory))
    return directory


def worker_base_environment(options: RunOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that workers inherit: this one without the job's token, with one thread each by default,
    and with the pipe for their timers, if there is one."""
    environment = {name: value for name, value in environ.items() if name != TOKEN_VARIABLE}
    if path := timer_file(environ):
        environment[TIMER_FILE_VARIABLE] = path
    if "OMP_NUM_THREADS" not in environment and options.nproc_per_node != "1":
        log.info("omp-num-threads", "OMP_NUM_THREADS is not set: each worker gets 1, so that all find a processor")
        environment["OMP_NUM_THREADS"] = "1"
    return environment


def count_workers(nproc_per_node: str) -> int:
    """Return the number of workers of this node."""
    if nproc_per_node.isdigit():
        return int(nproc_per_node)
    if nproc_per_node == "cpu":
        return len(os.sched_getaffinity(0))
    # The agent does not import torch: a helper process asks it for the devices.
    probe = subprocess.run(
        [*module_command("holdfast.worker.devices"), nproc_per_node], capture_output=True, text=True, check=False
    )
    if probe.returncode:
        reason = (probe.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UsageError(f"--nproc-per-node {nproc_per_node}: {reason}")
    return int(probe.stdout)


def _node_id(options: RunOptions) -> str:
    if options.node_rank is not None and options.nodes_most > 1:
        return f"node-{options.node_rank}"
    return f"{socket.gethostname()}-{secrets.token_hex(2)}"


def _is_exec(options: RunOptions) -> bool:
    return options.no_python and not options.run_path


def _program(options: RunOptions) -> Program:
    from holdfast.agent.config import Program

    kind = "path" if options.run_path else "exec" if options.no_python else "module" if options.module else "script"
    clean = kind != "path" and (options.start_method == "spawn" or bool(options.python_exec))
    return Program(
        kind=kind,  # type: ignore[arg-type]  # one of the four literals above
        argv=(options.script, *options.script_args),
        clean=clean,
        python=options.python_exec or sys.executable,
        preload=options.preload,
        numa_binding=options.numa_binding or "",
        virtual_local_rank=options.virtual_local_rank,
    )


def _master_plan(options: RunOptions, host: str, port: int, run_id: str) -> MasterPlan | None:
    """Return how to start the job's master, or None if it is not this node's part."""
    from holdfast.agent.config import MasterPlan

    by_rank = options.node_rank if options.rdzv_backend == "static" and options.nodes_most > 1 else None
    here = options.is_host
    if here is None:
        here = by_rank == 0 if by_rank is not None else is_local(host)
    if not here:
        return None
    listen_host = host if is_local(host) else "0.0.0.0"  # is_host=1 was given, for an address that leads here
    arguments = {
        "--nnodes": f"{options.nnodes_min}:{options.nnodes_max}",
        "--max-restarts": options.max_restarts,
        "--recovery": ",".join(options.recovery),
        "--spares": options.spares,
        "--spare-nodes": options.spare_nodes,
        "--replicas": options.replicas,
        "--replica-parity": options.replica_parity,
        "--cordon-limit": options.cordon_limit,
        "--wait-for-nodes": options.wait_for_nodes_s,
        "--straggler-action": options.straggler_action,
        "--node-check": int(options.node_check),
        "--exclude-straggler": int(options.exclude_straggler),
        "--check-only": int(options.check_only),
        "--settle": options.settle_s,
        "--join-timeout": options.join_timeout_s,
        "--heartbeat-interval": options.heartbeat_interval_s,
        "--silence-timeout": options.silence_timeout_s,
        "--reconnect-grace": options.reconnect_grace_s,
        "--guard-window": options.guard_window_s,
        "--farewell-timeout": options.farewell_timeout_s,
        "--checkpoints-apart": int(options.checkpoint_dir is None and options.nodes_most > 1),
        "--state-dir": options.state_dir,
        "--log-format": options.log_format,
        "--verbose": int(options.verbose),
        "--parent-pid": os.getpid(),
    }
    if options.tls_cert:
        arguments |= {"--tls-cert": options.tls_cert, "--tls-key": options.tls_key, "--tls-ca": options.tls_ca or ""}
    if options.dynamic_failover_extension:
        arguments["--dynamic-failover-extension"] = options.dynamic_failover_extension
    flat = tuple(str(word) for pair in arguments.items() for word in pair)
    job_id = run_id or _new_job_id(options.script)
    journal = journal_path(Path(options.state_dir), job_id)
    return MasterPlan(
        arguments=flat,
        job_id=job_id,
        journal=journal,
        listen_host=listen_host,
        required=port == 0,
        has_one_node=options.nodes_most == 1,
    )


def _new_job_id(script: str) -> str:
    stem = re.sub(r"[^A-Za-z0-9_.]+", "-", Path(script).stem).strip("-.")[:JOB_STEM_CHARS_MAX]
    return f"{stem or 'job'}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _log_plan(options: RunOptions, node_id: str, run_id: str, workers: int) -> LogPlan:
    from holdfast.agent.worker_logs import LogPlan

    if options.log_dir == os.devnull:
        run_dir = Path(os.devnull)
    elif options.log_dir:
        run_dir = Path(options.log_dir).absolute() / f"{run_id or NO_RUN_ID}_{secrets.token_hex(4)}"
    else:
        run_dir = Path(options.output_dir or options.state_dir) / "logs" / f"{node_id}_{secrets.token_hex(4)}"
    return LogPlan(
        run_dir=run_dir,
        role=options.role,
        redirects=options.redirects,
        tee=options.tee,
        local_ranks_filter=options.local_ranks_filter or frozenset(),
        prefix_template=options.log_line_prefix_template,
        duplicate_stdout_filters=options.duplicate_stdout_filters,
        duplicate_stderr_filters=options.duplicate_stderr_filters,
        workers=workers,
        has_report=options.error_format == "holdfast" and options.log_format != "json",
    )
