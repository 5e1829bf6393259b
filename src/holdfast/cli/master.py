"""`holdfast master`: a job's master by itself. Node 0's agent starts it in the same way."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from holdfast import exit_codes
from holdfast.cli.addresses import check_free, is_loopback
from holdfast.cli.master_address import remove_address, write_address
from holdfast.cli.run_flag_values import (
    PORT_MAX,
    cordon_limit,
    host,
    job_name,
    node_range,
    seconds,
    seconds_between_messages,
    strategies,
    whole_number,
    yes_or_no,
)
from holdfast.core.sentences import sentence
from holdfast.core.settings import Settings
from holdfast.core.state import Finished
from holdfast.core.stragglers import ACTIONS
from holdfast.core.strategies import LADDER
from holdfast.core.transact import replay
from holdfast.errors import JournalError, JournalLockedError, UsageError, WireError
from holdfast.failover import DynamicFailoverExtension, load
from holdfast.journal import BOOK_NAME, MachineBook, SqliteJournal, is_abandoned, read_entries, set_aside
from holdfast.master.machine_registry import MachineRegistry
from holdfast.master.master import Master, collect_garbage_rarely
from holdfast.monitors import load as load_monitors
from holdfast.observe.token_file import find_or_create_token
from holdfast.platforms.platform import ENVIRONMENT, LOCAL, open_platform
from holdfast.util.files import expand_home
from holdfast.util.logs import get_logger, set_up_logging
from holdfast.util.state_directory import DEFAULT, check_state_directory, journal_path
from holdfast.wire.control import Server
from holdfast.wire.strangers import StrangerLog
from holdfast.wire.tls import Tls

ABANDONED_PATIENCE_S = 10.0
"""For a master whose agent is gone: it needs about two seconds to see that it is alone. One that other nodes still need
stays, so the wait has a limit."""
LOOK_AGAIN_S = 0.05

log = get_logger(__name__)


def master(argv: list[str]) -> int:
    """Run a master until its job is over."""
    options = _parser().parse_args(argv)
    options.state_dir = str(expand_home(options.state_dir))
    if any((options.tls_cert, options.tls_key, options.tls_ca)) and not (options.tls_cert and options.tls_key):
        raise UsageError("TLS needs a certificate and its key: give both --tls-cert FILE and --tls-key FILE")
    set_up_logging(options.log_format, "master", verbose=options.verbose)
    check_state_directory(Path(options.state_dir))
    token = find_or_create_token(
        os.environ, options.token_file or None, options.state_dir, loopback=is_loopback(options.host)
    )
    settings = _settings(options)
    _allow_many_connections()
    collect_garbage_rarely()
    tls = Tls(options.tls_cert, options.tls_key, options.tls_ca) if options.tls_cert else None
    extension = _extension(options.dynamic_failover_extension, must_load=not options.resume)
    return asyncio.run(_run(options, settings, token, tls, extension))


def _extension(name: str, *, must_load: bool) -> DynamicFailoverExtension | None:
    """Return the master's extension, if the named class is one. A job that runs is not lost because its file has gone
    since."""
    try:
        loaded = load(name) if name else None
    except UsageError as error:
        if must_load:
            raise
        log.error("failover-extension-not-loaded", f"{error}. The job goes on without it")
        return None
    return loaded if isinstance(loaded, DynamicFailoverExtension) else None


async def _run(
    options: argparse.Namespace,
    settings: Settings,
    token: str,
    tls: Tls | None,
    extension: DynamicFailoverExtension | None,
) -> int:
    strangers = StrangerLog("control")
    try:
        check_free(options.host, options.port)  # before the journal is touched: most often another agent was first
        server = Server(
            options.host,
            options.port,
            token=token,
            tls=tls,
            stranger=strangers.turned_away,
            torch_store=lambda: the_master.torch_store,
        )
        journal = await _open_when_free(options, settings)
        try:
            registry = _machine_registry(options)
            the_master = Master(
                journal, server, options.job_id, settings, extension=extension, machine_registry=registry
            )
            if options.parent_pid:
                _watch_parent(the_master, options.parent_pid)
            await the_master.run(lambda port: _announce(options, port))
            if not options.parent_pid and isinstance(the_master.job.phase, Finished):  # else the agent says so
                log.notice("master-ended", sentence(the_master.job.phase.record))
            remove_address(_job_dir(options))  # while the journal is ours; one that fails leaves it to the next
        finally:
            journal.close()
            strangers.close()
    except (WireError, JournalLockedError) as error:
        (log.debug if options.parent_pid else log.error)("address-or-journal-taken", str(error))
        return exit_codes.ADDRESS_TAKEN
    except JournalError as error:
        log.error("journal-failed", str(error))
        return exit_codes.NO_MASTER
    return exit_codes.SUCCESS


def _machine_registry(options: argparse.Namespace) -> MachineRegistry:
    """Return the registry of machines in the state directory, which all jobs there share."""
    state_dir = Path(options.state_dir)
    return MachineRegistry(
        MachineBook(state_dir / BOOK_NAME), open_platform(options.platform, state_dir), load_monitors()
    )


async def _open_when_free(options: argparse.Namespace, settings: Settings) -> SqliteJournal:
    """Open the journal, and wait for it while it is held by a master whose agent was killed: that one ends when it sees
    that it is alone. A master that an agent supervises is not waited for."""
    state_dir, give_up_at, is_logged = Path(options.state_dir), time.monotonic() + ABANDONED_PATIENCE_S, False
    while True:
        try:
            return open_journal(
                state_dir, options.job_id, settings, resume=options.resume, agent_pid=options.parent_pid
            )
        except JournalLockedError:
            if time.monotonic() > give_up_at or not is_abandoned(journal_path(state_dir, options.job_id)):
                raise
        if not is_logged:
            text = "the last master of this job is ending, as its agent is gone: waiting for its journal"
            log.info("waiting-for-journal", text)
            is_logged = True
        await asyncio.sleep(LOOK_AGAIN_S)


def open_journal(
    state_dir: Path, job_id: str, settings: Settings, *, resume: bool, agent_pid: int = 0
) -> SqliteJournal:
    """Open the job's journal: a new one, an unfinished one to go on with, or with `resume` the one there must be."""

    def look(path: Path) -> None:
        if resume and not path.exists():
            raise JournalError(
                f"the journal {path} is gone while its job runs: restore it. The workers go on, but without a master"
                " nothing is recovered"
            )
        if path.exists() and not resume:
            _look_at_earlier(path, job_id, settings)

    return SqliteJournal(journal_path(state_dir, job_id), before_open=look, agent_pid=agent_pid)


def _look_at_earlier(path: Path, job_id: str, settings: Settings) -> None:
    """Set the journal of a finished job of this name aside; go on with an unfinished one, if it is the same job."""
    job = replay(entry.record for entry in read_entries(path))
    if isinstance(job.phase, Finished):
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(job.created_at))
        aside = path.with_name(f"journal-{stamp}-{os.getpid()}.sqlite")
        set_aside(path, aside)
        outcome = job.phase.record.outcome.value
        text = f"job {job.job_id} ran before and {outcome}: its journal is now {aside.name}"
        log.info("journal-set-aside", text)
    elif job.term and job.job_id != job_id:  # a/b and a_b
        raise UsageError(
            f"the unfinished job {job.job_id} has its journal where that of {job_id} would be, in {path.parent}: give"
            " another --rdzv-id"
        )
    elif job.term and job.created_settings != settings:  # whatever it was resized to since
        raise UsageError(
            f"job {job.job_id} is unfinished in {path} and was started with other settings: give the same flags to"
            " go on with it, or another --rdzv-id to start a new job"
        )
    elif job.term:
        text = f"job {job.job_id} is unfinished: going on with it, {job.incidents.restarts_used} restarts used"
        log.warning("job-resumed", text)


def _job_dir(options: argparse.Namespace) -> Path:
    return journal_path(Path(options.state_dir), options.job_id).parent


def _announce(options: argparse.Namespace, port: int) -> None:
    say = log.info if options.parent_pid else log.notice
    say("master-listening", f"the master of job {options.job_id} listens on {options.host}:{port}")
    try:
        write_address(_job_dir(options), options.host, port)
    except OSError as error:  # no reason to end: the job needs it not, and operators can name the address
        text = f"cannot write this address to a file beside the journal: {error.strerror}"
        log.warning("address-not-written", text)
    if options.ready_fd >= 0:
        with contextlib.suppress(BrokenPipeError):  # the agent died: other agents may need this master
            os.write(options.ready_fd, f"{port}\n".encode())
        os.close(options.ready_fd)


def _watch_parent(the_master: Master, pid: int) -> None:
    """Tell the master when the agent that started it is gone: it outlives it only while others need it."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        the_master.orphan()
        return
    loop = asyncio.get_running_loop()

    def gone() -> None:
        loop.remove_reader(pidfd)
        the_master.orphan()

    loop.add_reader(pidfd, gone)


def _allow_many_connections() -> None:
    """Allow as many descriptors as this user may have: each agent needs one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _settings(options: argparse.Namespace) -> Settings:
    return Settings(
        nodes_min=options.nnodes[0],
        nodes_max=options.nnodes[1],
        restarts_max=options.max_restarts,
        recovery=options.recovery,
        spares=options.spares,
        spare_nodes=options.spare_nodes,
        replicas=options.replicas,
        replica_parity=options.replica_parity,
        cordon_limit=options.cordon_limit[0],
        cordon_share=options.cordon_limit[1],
        wait_for_nodes_s=options.wait_for_nodes,
        straggler_action=options.straggler_action,
        node_check=options.node_check,
        exclude_straggler=options.exclude_straggler,
        check_only=options.check_only,
        settle_s=options.settle,
        join_timeout_s=options.join_timeout,
        heartbeat_interval_s=options.heartbeat_interval,
        silence_timeout_s=options.silence_timeout,
        reconnect_grace_s=options.reconnect_grace,
        guard_window_s=options.guard_window,
        farewell_timeout_s=options.farewell_timeout,
        checkpoints_apart=options.checkpoints_apart,
    )


class _Parser(argparse.ArgumentParser):
    def parse_args(self, args: Sequence[str], namespace: None = None) -> argparse.Namespace:  # type: ignore[override]
        if empty := next((word for word in args if word.partition("=")[2] == "--"), ""):
            self.error(f"{empty}: -- is no value")  # argparse would drop it, and go on with none
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"holdfast master: {message}; holdfast master --help lists the flags")


def _parser() -> argparse.ArgumentParser:
    defaults = Settings()
    parser = _Parser(prog="holdfast master", description="Run a job's master alone.")
    add = parser.add_argument
    add("--host", type=host, default="127.0.0.1", help="address to listen on; other than loopback needs a token")
    add("--port", type=whole_number(0, PORT_MAX), default=29400, help="port to listen on, 0 for any free one")
    add("--job-id", type=job_name, required=True, help="the agents' --rdzv-id")
    add("--nnodes", type=node_range, default="1:1", help="as given to the agents")
    add("--max-restarts", type=whole_number(0), default=defaults.restarts_max, help="as given to the agents")
    add("--recovery", type=strategies, default=",".join(LADDER), help="as given to the agents")
    for name in ("--spares", "--spare-nodes", "--replicas", "--replica-parity"):
        default = getattr(defaults, name[2:].replace("-", "_"))
        add(name, type=whole_number(0), default=default, help="as given to the agents")
    add("--cordon-limit", type=cordon_limit, default="1%", help="as given to the agents")
    add("--wait-for-nodes", type=seconds, default=defaults.wait_for_nodes_s, help="seconds; as given to the agents")
    add("--straggler-action", choices=ACTIONS, default=defaults.straggler_action, help="as given to the agents")
    for name in ("--node-check", "--exclude-straggler", "--check-only", "--checkpoints-apart"):
        add(name, type=yes_or_no, nargs="?", const=True, default=False, help="as given to the agents")
    add("--dynamic-failover-extension", default="", help="as given to the agents")
    add("--settle", type=seconds, default=defaults.settle_s, help="seconds to wait for nodes beyond the minimum")
    add("--join-timeout", type=seconds, default=defaults.join_timeout_s, help="seconds to wait for the minimum")
    add("--heartbeat-interval", type=seconds_between_messages, default=defaults.heartbeat_interval_s, help="seconds")
    add(
        "--silence-timeout",
        type=seconds,
        default=defaults.silence_timeout_s,
        help="seconds until a silent node is lost",
    )
    add("--reconnect-grace", type=seconds, default=defaults.reconnect_grace_s, help="seconds a connection may be down")
    add("--guard-window", type=seconds, default=defaults.guard_window_s, help="seconds an id is kept for a silent node")
    add("--farewell-timeout", type=seconds, default=defaults.farewell_timeout_s, help="seconds to stay for lost nodes")
    add("--state-dir", default=os.environ.get("HOLDFAST_STATE_DIR") or str(DEFAULT), help="where the journal is kept")
    add("--platform", default=os.environ.get(ENVIRONMENT) or LOCAL, help="where cordons are kept")
    add("--token-file", default=os.environ.get("HOLDFAST_TOKEN_FILE", ""), help="file with the job's token")
    add("--tls-cert", default="")
    add("--tls-key", default="")
    add("--tls-ca", default="", help="also demands a certificate of every agent")
    add("--log-format", choices=["auto", "text", "json"], default="auto")
    add("-v", "--verbose", type=yes_or_no, nargs="?", const=True, default=False, help="show every message")
    add("--resume", action="store_true", help="go on with the job's journal, which must be there")
    add("--parent-pid", type=int, default=0, help=argparse.SUPPRESS)
    add("--ready-fd", type=int, default=-1, help=argparse.SUPPRESS)
    return parser
