"""`holdfast run`: this node's agent, with torchrun's flags."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from holdfast.cli.addresses import is_local, is_loopback, is_name, own_address, primary_address
from holdfast.cli.capabilities import capabilities, check_checkpoint_dir, checkpoint_dir, snapshot_settings
from holdfast.cli.console import set_up_logging
from holdfast.cli.run_flags import RunOptions, master_endpoint, parse_run
from holdfast.cli.secrets import TOKEN_VARIABLE, find_token
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.agent.agent import Result
    from holdfast.agent.birth.launcher import Launcher
    from holdfast.agent.config import AgentConfig, MasterPlan, Program
    from holdfast.agent.logs import LogPlan
    from holdfast.core.fault_types import FaultTable

NO_RUN_ID = "none"
"""torchrun's default of --rdzv-id."""

log = structlog.get_logger("agent")


def run(argv: list[str]) -> int:
    """Parse the flags, run the agent, say how it ended."""
    options = parse_run(argv, os.environ)
    set_up_logging(options.log_format, "agent")
    check_options(options)
    return asyncio.run(run_agent(options))


def check_options(options: RunOptions) -> None:
    """What cannot work here is refused before anything starts. Those who ask the extension load it themselves."""
    check_checkpoint_dir(options, checkpoint_dir(options, ""))
    fault_table(options)
    if options.dynamic_failover_extension:
        from holdfast.failover import load

        load(options.dynamic_failover_extension)
    if options.accelerator:
        from holdfast.checks.accelerators import registry

        registry.load(options.accelerator)


def fault_table(options: RunOptions) -> FaultTable:
    """The user's rules, before those of the processors here, before ours. A file that cannot be meant is refused, with
    its line."""
    from holdfast.checks.accelerators import registry
    from holdfast.core.fault_table import BUILT_IN, read_fault_table, with_accelerator, with_detected

    if options.accelerator:
        table = with_accelerator(BUILT_IN, registry.load(options.accelerator).faults)
    else:
        table = with_detected(BUILT_IN, [rule for kind in registry.present() for rule in kind.faults])
    if not options.fault_table:
        return table
    try:
        text = Path(options.fault_table).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"--fault-table {options.fault_table} cannot be read: {reason}") from None
    return read_fault_table(text, options.fault_table, table)


async def run_agent(options: RunOptions) -> int:
    environment = worker_base_environment(options, os.environ)
    # before gRPC: the fork server warms up while the rest is imported
    from holdfast.agent.birth.launcher import Launcher

    warm = options.start_method == "forkserver" and not _is_exec(options) and not options.python_exec
    launcher = await Launcher.start("warm" if warm else "cold", options.preload, environment)
    try:
        config = await asyncio.to_thread(build_config, options, environment)
        result = await _agent(config, launcher)
    finally:
        await launcher.close()
    _say(result)
    return result.exit_code


async def _agent(config: AgentConfig, launcher: Launcher) -> Result:
    from holdfast.agent.agent import Agent

    return await Agent(config, launcher).run()


def _say(result: Result) -> None:
    from holdfast.core.sentences import failure_report

    if result.cause is not None:
        print(f"{failure_report(result.cause)}\n`holdfast explain` tells the whole incident", file=sys.stderr)
    say = log.info if result.exit_code == 0 else log.error
    say(f"{result.outcome.value if result.outcome else 'failed'}: {result.why}", exit_code=result.exit_code)


# --- from flags to the agent's configuration


def build_config(options: RunOptions, environment: dict[str, str]) -> AgentConfig:
    """Everything the agent needs to know, resolved against this machine."""
    from holdfast.agent.config import AgentConfig
    from holdfast.core.events import JobSpec
    from holdfast.wire.channel import Tls

    host, port = master_endpoint(options)
    if options.nodes_most > 1 and is_name(host) and is_loopback(host):
        host = primary_address()  # as on Debian, where a machine's own name is 127.0.1.1, which others cannot reach
    loopback = is_loopback(host)
    token = find_token(os.environ, options.token_file, options.state_dir, loopback=loopback)
    os.environ[TOKEN_VARIABLE] = token  # for the master this agent may start; workers' environment is without it
    node_id = options.node_id or _node_id(options)
    run_id = "" if options.standalone or options.rdzv_id == NO_RUN_ID else options.rdzv_id
    tls = Tls(options.tls_cert, options.tls_key or "", options.tls_ca or "") if options.tls_cert else None
    plan = _master_plan(options, host, port, run_id)
    return AgentConfig(
        node_id=node_id,
        address=options.local_addr or own_address(host),
        workers=count_workers(options.nproc_per_node),
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
        master_port=port,
        master=plan,
        token=token,
        tls=tls,
        logs=_log_plan(options, node_id, run_id),
        signals=tuple(signal.Signals[name] for name in options.signals_to_handle),
        heartbeat_interval_s=options.heartbeat_interval_s,
        silence_timeout_s=options.silence_timeout_s,
        restart_grace_s=options.restart_grace_s,
        shutdown_timeout_s=options.shutdown_timeout_s,
        join_timeout_s=options.join_timeout_s,
        checkpoint_dir=_checkpoints(options, run_id, plan),
        replicas=options.replicas,
        snapshots=snapshot_settings(options),
        snapshot_dir=options.snapshot_dir or f"/dev/shm/holdfast-{os.getuid()}",
        checkpoint_keep=options.checkpoint_keep,
        failure_domain=options.failure_domain or "",
        hang_timeout_s=options.hang_timeout_s,
        straggler_interval_s=options.straggler_interval_s,
        accelerator=options.accelerator or "",
        failover=options.dynamic_failover_extension or "",
        fault_table=fault_table(options),
        machine=options.machine or socket.gethostname(),
    )


def _checkpoints(options: RunOptions, run_id: str, plan: MasterPlan | None) -> str:
    """Where they go. It is said, with what else there is for recoveries."""
    job_id = run_id or (plan.job_id if plan and plan.required else "")  # a required master creates the very job planned
    directory = checkpoint_dir(options, job_id)
    log.info(capabilities(options, directory))
    return directory


def worker_base_environment(options: RunOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """What workers inherit: everything but the job's secret, and one thread each unless told otherwise."""
    environment = {name: value for name, value in environ.items() if name != TOKEN_VARIABLE}
    if "OMP_NUM_THREADS" not in environment and options.nproc_per_node != "1":
        log.info("OMP_NUM_THREADS is not set: each worker gets 1, so that they do not crowd each other out")
        environment["OMP_NUM_THREADS"] = "1"
    return environment


def count_workers(nproc_per_node: str) -> int:
    """How many workers this node runs."""
    if nproc_per_node.isdigit():
        return int(nproc_per_node)
    if nproc_per_node == "cpu":
        return len(os.sched_getaffinity(0))
    # The agent does not import torch: a helper process asks it for the devices.
    probe = subprocess.run(
        [sys.executable, "-m", "holdfast.worker.devices", nproc_per_node], capture_output=True, text=True, check=False
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
    """Whether this node has the job's master, and how to start it."""
    from holdfast.agent.config import MasterPlan

    by_rank = options.node_rank if options.rdzv_backend == "static" and options.nodes_most > 1 else None
    here = options.is_host
    if here is None:
        here = by_rank == 0 if by_rank is not None else is_local(host)
    if not here:
        return None
    listen_host = host if is_local(host) else "0.0.0.0"  # told to be the host of an address that leads here
    arguments = {
        "--nnodes": f"{options.nnodes_min}:{options.nnodes_max}",
        "--max-restarts": options.max_restarts,
        "--recovery": ",".join(options.recovery),
        "--spares": options.spares,
        "--spare-nodes": options.spare_nodes,
        "--replicas": options.replicas,
        "--replica-parity": options.replica_parity,
        "--cordon-limit": options.cordon_limit,
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
        "--state-dir": options.state_dir,
        "--log-format": options.log_format,
        "--parent-pid": os.getpid(),
    }
    if options.tls_cert:
        arguments |= {"--tls-cert": options.tls_cert, "--tls-key": options.tls_key, "--tls-ca": options.tls_ca or ""}
    if options.dynamic_failover_extension:
        arguments["--dynamic-failover-extension"] = options.dynamic_failover_extension
    flat = tuple(str(word) for pair in arguments.items() for word in pair)
    job_id = run_id or _new_job_id(options.script)
    return MasterPlan(arguments=flat, job_id=job_id, listen_host=listen_host, required=port == 0)


def _new_job_id(script: str) -> str:
    return f"{Path(script).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _log_plan(options: RunOptions, node_id: str, run_id: str) -> LogPlan:
    from holdfast.agent.logs import LogPlan

    if options.log_dir == os.devnull:
        run_dir = Path(os.devnull)
    elif options.log_dir:
        run_dir = Path(options.log_dir).absolute() / f"{run_id or NO_RUN_ID}_{secrets.token_hex(4)}"
    else:
        run_dir = Path(options.state_dir) / "logs" / f"{node_id}_{secrets.token_hex(4)}"
    return LogPlan(
        run_dir=run_dir,
        role=options.role,
        redirects=options.redirects,
        tee=options.tee,
        local_ranks_filter=options.local_ranks_filter or frozenset(),
        prefix_template=options.log_line_prefix_template,
        duplicate_stdout_filters=options.duplicate_stdout_filters,
        duplicate_stderr_filters=options.duplicate_stderr_filters,
    )
