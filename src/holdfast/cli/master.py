"""`holdfast master`: a job's master by itself. Node 0's agent starts it in the same way."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import time
from pathlib import Path
from typing import NoReturn

import structlog

from holdfast.cli import exit_codes
from holdfast.cli.addresses import check_free, is_loopback
from holdfast.cli.console import set_up_logging
from holdfast.cli.master_address import remove_address, write_address
from holdfast.cli.run_flag_values import strategies, whole_number, yes_or_no
from holdfast.cli.secrets import find_token
from holdfast.core.ladder import LADDER
from holdfast.core.settings import Settings
from holdfast.core.state import Finished
from holdfast.core.stragglers import ACTIONS
from holdfast.core.transact import replay
from holdfast.errors import JournalError, JournalLockedError, UsageError, WireError
from holdfast.failover import DynamicFailoverExtension, load
from holdfast.journal import BOOK_NAME, NodeBook, SqliteJournal, is_abandoned, read_entries, set_aside
from holdfast.master.master import Master
from holdfast.master.steward import Steward
from holdfast.monitors import load as load_monitors
from holdfast.platforms.base import ENVIRONMENT, LOCAL, open_platform
from holdfast.wire.channel import Tls

ABANDONED_PATIENCE_S = 10.0
"""For a master whose agent is gone: it needs about two seconds to see that it is alone. One that other nodes still need
stays, and is not waited for for ever."""
LOOK_AGAIN_S = 0.05

log = structlog.get_logger("master")


def master(argv: list[str]) -> int:
    """Run a master until its job is over."""
    options = _parser().parse_args(argv)
    set_up_logging(options.log_format, "master")
    token = find_token(os.environ, options.token_file or None, options.state_dir, loopback=is_loopback(options.host))
    settings = _settings(options)
    _allow_many_connections()
    tls = Tls(options.tls_cert, options.tls_key, options.tls_ca) if options.tls_cert else None
    extension = _extension(options.dynamic_failover_extension, must_load=not options.resume)
    return asyncio.run(_run(options, settings, token, tls, extension))


def _extension(name: str, *, must_load: bool) -> DynamicFailoverExtension | None:
    """The master's own, if the named class is one. A job that runs is not lost because its file has gone since."""
    try:
        loaded = load(name) if name else None
    except UsageError as error:
        if must_load:
            raise
        log.error(f"{error}. The job goes on without it")
        return None
    return loaded if isinstance(loaded, DynamicFailoverExtension) else None


async def _run(
    options: argparse.Namespace,
    settings: Settings,
    token: str,
    tls: Tls | None,
    extension: DynamicFailoverExtension | None,
) -> int:
    try:
        check_free(options.host, options.port)  # before the journal is touched: most often another agent was first
        journal = await _open_when_free(options, settings)
        try:
            the_master = Master(journal, options.job_id, settings, extension=extension, steward=_steward(options))
            if options.parent_pid:
                _watch_parent(the_master, options.parent_pid)
            await the_master.run(options.host, options.port, token, tls, lambda port: _announce(options, port))
            remove_address(_job_dir(options))  # while the journal is ours; one that fails leaves it to the next
        finally:
            journal.close()
    except (WireError, JournalLockedError) as error:
        (log.debug if options.parent_pid else log.error)(str(error))
        return exit_codes.ADDRESS_TAKEN
    except JournalError as error:
        log.error(str(error))
        return exit_codes.NO_MASTER
    return exit_codes.SUCCESS


def _steward(options: argparse.Namespace) -> Steward:
    """With what is known of machines in the state directory, which all jobs there share."""
    state_dir = Path(options.state_dir)
    return Steward(NodeBook(state_dir / BOOK_NAME), open_platform(options.platform, state_dir), load_monitors())


async def _open_when_free(options: argparse.Namespace, settings: Settings) -> SqliteJournal:
    """An agent that was killed and is started again finds the master of its last life still there: that one ends when
    it sees that nobody is left to work for, and is waited for. One that is kept is not."""
    state_dir, give_up_at, is_said = Path(options.state_dir), time.monotonic() + ABANDONED_PATIENCE_S, False
    while True:
        try:
            return open_journal(
                state_dir, options.job_id, settings, resume=options.resume, keeper_pid=options.parent_pid
            )
        except JournalLockedError:
            if time.monotonic() > give_up_at or not is_abandoned(journal_path(state_dir, options.job_id)):
                raise
        if not is_said:
            log.info("the last master of this job is ending, as its agent is gone: waiting for its journal")
            is_said = True
        await asyncio.sleep(LOOK_AGAIN_S)


def open_journal(
    state_dir: Path, job_id: str, settings: Settings, *, resume: bool, keeper_pid: int = 0
) -> SqliteJournal:
    """The job's journal: a new one, an unfinished one to go on with, or with `resume` the one there must be."""

    def look(path: Path) -> None:
        if resume and not path.exists():
            raise JournalError(
                f"the journal {path} is gone while its job runs: restore it. The workers go on, but without a master"
                " nothing is recovered"
            )
        if path.exists() and not resume:
            _look_at_earlier(path, settings)

    return SqliteJournal(journal_path(state_dir, job_id), before_open=look, keeper_pid=keeper_pid)


def journal_path(state_dir: Path, job_id: str) -> Path:
    """Where a job's journal is."""
    return state_dir / "jobs" / job_id.replace("/", "_") / "journal.sqlite"


def _look_at_earlier(path: Path, settings: Settings) -> None:
    """A finished job of this name is put aside; an unfinished one goes on, if it is the same job."""
    job = replay(entry.record for entry in read_entries(path))
    if isinstance(job.phase, Finished):
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(job.created_at))
        aside = path.with_name(f"journal-{stamp}-{os.getpid()}.sqlite")
        set_aside(path, aside)
        log.info(f"job {job.job_id} ran before and {job.phase.record.outcome.value}: its journal is now {aside.name}")
    elif job.term and job.asked != settings:  # whatever it was resized to since
        raise UsageError(
            f"job {job.job_id} is unfinished in {path} and was started with other settings: give the same flags to"
            " go on with it, or another --rdzv-id to start a new job"
        )
    elif job.term:
        log.warning(f"job {job.job_id} is unfinished: going on with it, {job.restarts_used} restarts used")


def _job_dir(options: argparse.Namespace) -> Path:
    return journal_path(Path(options.state_dir), options.job_id).parent


def _announce(options: argparse.Namespace, port: int) -> None:
    log.info(f"listening on {options.host}:{port}")
    try:
        write_address(_job_dir(options), options.host, port)
    except OSError as error:  # no reason to end: the job needs it not, and operators can name the address
        log.warning(f"cannot write this address down beside the journal: {error.strerror}")
    if options.ready_fd >= 0:
        with contextlib.suppress(BrokenPipeError):  # the agent died meanwhile: other agents may need this master
            os.write(options.ready_fd, f"{port}\n".encode())
        os.close(options.ready_fd)


def _watch_parent(the_master: Master, pid: int) -> None:
    """Know when the agent that started this master is gone: it outlives it only while others need it."""
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
    """Some three descriptors an agent: as many as this user may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _settings(options: argparse.Namespace) -> Settings:
    nodes_min, _, nodes_max = options.nnodes.partition(":")
    try:
        bounds = int(nodes_min), int(nodes_max or nodes_min)
    except ValueError:
        raise UsageError(f"--nnodes {options.nnodes} is not a number or MIN:MAX") from None
    if not 0 < bounds[0] <= bounds[1]:
        raise UsageError(f"--nnodes {options.nnodes}: the minimum must be at least 1 and at most the maximum")
    return Settings(
        nodes_min=bounds[0],
        nodes_max=bounds[1],
        restarts_max=options.max_restarts,
        recovery=options.recovery,
        spares=options.spares,
        spare_nodes=options.spare_nodes,
        replicas=options.replicas,
        replica_parity=options.replica_parity,
        cordon_limit=options.cordon_limit,
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
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"holdfast master: {message}; holdfast master --help lists the flags")


def _parser() -> argparse.ArgumentParser:
    defaults = Settings()
    parser = _Parser(prog="holdfast master", description="Run a job's master alone.")
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on; other than loopback needs a token")
    add("--port", type=int, default=29400, help="port to listen on, 0 for any free one")
    add("--job-id", required=True, help="the agents' --rdzv-id")
    add("--nnodes", default="1:1", help="as given to the agents")
    add("--max-restarts", type=int, default=defaults.restarts_max, help="as given to the agents")
    add("--recovery", type=strategies, default=",".join(LADDER), help="as given to the agents")
    for name in ("--spares", "--spare-nodes", "--replicas", "--replica-parity", "--cordon-limit"):
        default = getattr(defaults, name[2:].replace("-", "_"))
        add(name, type=whole_number(0), default=default, help="as given to the agents")
    add("--straggler-action", choices=ACTIONS, default=defaults.straggler_action, help="as given to the agents")
    for name in ("--node-check", "--exclude-straggler", "--check-only"):
        add(name, type=yes_or_no, nargs="?", const=True, default=False, help="as given to the agents")
    add("--dynamic-failover-extension", default="", help="as given to the agents")
    add("--settle", type=float, default=defaults.settle_s, help="seconds to wait for nodes beyond the minimum")
    add("--join-timeout", type=float, default=defaults.join_timeout_s, help="seconds to wait for the minimum")
    add("--heartbeat-interval", type=float, default=defaults.heartbeat_interval_s, help="seconds")
    add("--silence-timeout", type=float, default=defaults.silence_timeout_s, help="seconds until a silent node is lost")
    add("--reconnect-grace", type=float, default=defaults.reconnect_grace_s, help="seconds a connection may be down")
    add("--guard-window", type=float, default=defaults.guard_window_s, help="seconds an id is kept for a silent node")
    add("--state-dir", default=os.environ.get("HOLDFAST_STATE_DIR") or str(Path.home() / ".holdfast"))
    add("--platform", default=os.environ.get(ENVIRONMENT) or LOCAL, help="where cordons are kept")
    add("--token-file", default=os.environ.get("HOLDFAST_TOKEN_FILE", ""), help="file with the job's token")
    add("--tls-cert", default="")
    add("--tls-key", default="")
    add("--tls-ca", default="", help="also demands a certificate of every agent")
    add("--log-format", choices=["auto", "text", "json"], default="auto")
    add("--resume", action="store_true", help="go on with the job's journal, which must be there")
    add("--parent-pid", type=int, default=0, help=argparse.SUPPRESS)
    add("--ready-fd", type=int, default=-1, help=argparse.SUPPRESS)
    return parser
