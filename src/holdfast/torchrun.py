"""torch.distributed.run and torch.distributed.launcher for programs, with Holdfast behind them.

    from holdfast.torchrun import LaunchConfig, elastic_launch       # instead of torch.distributed.launcher.api
    results = elastic_launch(LaunchConfig(1, 1, 2, rdzv_backend="c10d"), train)(0.1)      # {rank: returned}

    from holdfast import torchrun                                    # instead of torch.distributed.run
    torchrun.main(["--standalone", "--nproc-per-node=2", "train.py"])

    HOLDFAST_TORCHRUN=1 accelerate launch train.py                   # any program that uses torch's own names

The signatures, results and exceptions are torch's (`ChildFailedError`, `SignalException`, `RendezvousTimeoutError`; a
configuration that cannot work is a `ValueError`, as in torch). The agent is a child process, `holdfast run` with flags
made from the configuration: so this works from a thread, inside a running event loop, and with CUDA initialised. Our
own flags have their variables (`HOLDFAST_SPARES=1`). The job ends with the process that launched it.

One function of torch is replaced by `replace`, as by the variable: `torch.distributed.launcher.api.launch_agent`, which
torchrun, `elastic_launch`, `accelerate launch`, notebook launchers and Lightning's Fabric call.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed.run
from torch.distributed.elastic import events
from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import get_args_parser, parse_args

from holdfast import exit_codes
from holdfast.as_torchrun import LAUNCHER, SWITCH_VARIABLE, replace
from holdfast.cli.child_failures import ChildFailure, LaunchReport
from holdfast.util.processes import module_command
from holdfast.util.program_streams import ProgramStreams
from holdfast.wire.launch_messages import CallerSettings
from holdfast.worker.launch import caller_fork, function_call

__all__ = [
    "ChildFailedError",
    "LaunchConfig",
    "SignalException",
    "elastic_launch",
    "get_args_parser",
    "launch_agent",
    "main",
    "parse_args",
    "replace",
    "run",
]

READ_BYTES = 65_536


class elastic_launch:  # torch's name
    """Torch's `elastic_launch`: call it with the arguments of the entry point."""

    def __init__(
        self, config: LaunchConfig, entrypoint: Callable[..., Any] | str | None, health_check_server: Any = None
    ) -> None:
        self._config, self._entrypoint = config, entrypoint
        self._health_check_server = health_check_server

    def __call__(self, *args: Any) -> dict[int, Any]:
        return launch_agent(self._config, self._entrypoint, list(args), self._health_check_server)


@record
def main(args: Sequence[str] | None = None) -> None:
    """Launch a job from a command line, as `torch.distributed.run.main` does."""
    run(parse_args(args))  # type: ignore[no-untyped-call]


def run(args: Any) -> None:
    """Launch a job from parsed arguments, as `torch.distributed.run.run` does."""
    with _replaced():
        torch.distributed.run.run(args)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _replaced() -> Iterator[None]:
    api: Any = importlib.import_module(LAUNCHER)
    before = api.launch_agent
    api.launch_agent = launch_agent
    try:
        yield
    finally:
        api.launch_agent = before


def launch_agent(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    health_check_server: Any = None,
) -> dict[int, Any]:
    """Run a job on this node and return what its functions returned, by rank; None for each rank of a command."""
    if function_call.is_being_prepared():
        raise RuntimeError(
            "a worker imports the main module of this program, which launches a job at its top: put the launch below"
            " `if __name__ == '__main__':`"
        )
    if entrypoint is None or not config.nproc_per_node:
        raise ValueError("elastic_launch needs an entry point and at least one worker: pass a function or a command")
    config.run_id = config.run_id or str(uuid.uuid4().int)
    tell = EndEvent(config, _name_of(entrypoint, args))
    try:
        with contextlib.ExitStack() as open_here:
            returned = _launch(open_here, config, entrypoint, args)
    except ChildFailedError:
        tell.record("SUCCEEDED")
        raise
    except Exception:
        tell.record("FAILED", traceback.format_exc())
        raise
    tell.record("SUCCEEDED")
    return returned


class EndEvent:
    """The event for `config.event_log_handler`: this node's agent has ended. As in torch, the agent has succeeded
    where workers have failed and it has told so; programs count on one such event from each launch."""

    def __init__(self, config: LaunchConfig, program: str) -> None:
        try:
            get_logging_handler(config.event_log_handler)
        except KeyError:
            raise ValueError(
                f"event_log_handler {config.event_log_handler!r}: torch has no handler of that name; add it to those in"
                " torch.distributed.elastic.events.handlers, or leave the name out"
            ) from None
        self._config, self._program, self._began = config, program, time.monotonic()

    def record(self, state: str, error: str | None = None) -> None:
        """Give the event to the handler."""
        told: dict[str, str | int | float | bool | None] = {
            "run_id": self._config.run_id,
            "role": self._config.role,
            "hostname": socket.gethostname(),
            "state": state,
            "total_run_time": int(time.monotonic() - self._began),
            "rdzv_backend": self._config.rdzv_backend,
            "raw_error": error,
            "metadata": json.dumps({"entry_point": self._program}),
        }
        event = events.Event(f"torchelastic.worker.status.{state}", source=events.EventSource.AGENT, metadata=told)
        events.record(event, self._config.event_log_handler)


def _launch(
    open_here: contextlib.ExitStack, config: LaunchConfig, entrypoint: Callable[..., Any] | str, args: list[Any]
) -> dict[int, Any]:
    """Start the agent, wait for its end, and return what it came to. The agent's descriptors are open until it has
    them, this process's own until the end; then the agent ends too, if it still runs."""
    streams = ProgramStreams(_teed(config.logs_specs))
    open_here.callback(streams.finish)
    report_here, report = os.pipe()
    caller, caller_here = os.pipe()
    open_here.callback(os.close, report_here)
    ending = open_here.enter_context(contextlib.ExitStack())
    ending.callback(os.close, caller_here)
    agents = open_here.enter_context(contextlib.ExitStack())
    agents.callback(os.close, report)
    agents.callback(os.close, caller)
    agents.callback(streams.begin)
    settings = CallerSettings(report=report, caller=caller)
    if not isinstance(entrypoint, str):
        results = os.memfd_create("holdfast-results", os.MFD_CLOEXEC)
        open_here.callback(os.close, results)
        settings = msgspec.structs.replace(settings, results=results)
    signals = _Signals(config.signals_to_handle)
    open_here.callback(signals.restore)
    agent = _start_agent(settings, config, entrypoint, args, [report_here, caller_here], streams.for_child)
    signals.pass_to(agent)
    open_here.callback(_end, agent, ending)
    agents.close()
    report_text = b"".join(iter(lambda: os.read(report_here, READ_BYTES), b""))
    status = _wait(agent)
    if signals.received is not None:
        raise SignalException(f"Process {os.getpid()} got signal: {signals.received}", sigval=signals.received)
    if not report_text:
        raise RuntimeError(f"the Holdfast agent (process {agent}) ended with code {status} and left no report")
    ended = msgspec.json.decode(report_text, type=LaunchReport)
    if ended.exit_code != exit_codes.SUCCESS:
        raise error_of(ended, _name_of(entrypoint, args))
    if isinstance(entrypoint, str):
        return dict.fromkeys(ended.ranks)
    return function_call.collected(Path(f"/proc/self/fd/{results}").read_bytes())


def _start_agent(
    settings: CallerSettings,
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str,
    args: list[Any],
    ours: Sequence[int],
    streams: Mapping[int, int],
) -> int:
    """Start the agent and return its process id."""
    environment, flags = launch_environment(config), launch_flags(config, entrypoint, args)
    if isinstance(entrypoint, str):
        return _spawn(settings, flags, environment, streams)
    if config.start_method == "fork":
        call = function_call.InheritedCall(
            function=entrypoint,
            arguments=tuple(args),
            main=sys.modules["__main__"],
            argv=sys.argv[:],
            path=sys.path[:],
            random_states=function_call.random_states(),
        )
        return caller_fork.start_agent(call, settings, agent_command, flags, environment, ours, streams)
    with os.fdopen(os.memfd_create("holdfast-call", os.MFD_CLOEXEC), "wb") as file:
        file.write(function_call.pickled(entrypoint, tuple(args)))
        file.flush()
        return _spawn(msgspec.structs.replace(settings, call=file.fileno()), flags, environment, streams)


def _spawn(
    settings: CallerSettings, flags: Sequence[str], environment: dict[str, str], streams: Mapping[int, int]
) -> int:
    passed = [number for number in (settings.report, settings.caller, settings.call, settings.results) if number >= 0]
    process = subprocess.Popen(
        agent_command(settings, flags),
        env=environment,
        pass_fds=passed,
        start_new_session=True,
        stdout=streams.get(1),
        stderr=streams.get(2),
    )
    process.returncode = 0  # as far as Popen is concerned: it is reaped below
    return process.pid


def agent_command(settings: CallerSettings, flags: Sequence[str]) -> list[str]:
    """Return the command line of an agent that reports to this process."""
    return [*module_command("holdfast.cli.launched"), msgspec.json.encode(settings).decode(), *flags]


def _wait(agent: int) -> int:
    _, status = os.waitpid(agent, 0)
    _reaped.add(agent)
    return os.waitstatus_to_exitcode(status)


def _end(agent: int, ending: contextlib.ExitStack) -> None:
    """End an agent that still runs, as when an exception has interrupted the wait for it."""
    ending.close()
    if agent not in _reaped:
        _wait(agent)
    _reaped.discard(agent)


_reaped: set[int] = set()


class _Signals:
    """Passes the signals of `signals_to_handle` on to the agent, while there is one. Only a main thread can."""

    def __init__(self, names: str) -> None:
        self._agent = 0
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return
        for name in names.split(","):
            with contextlib.suppress(KeyError, ValueError, OSError):  # the agent's flags say what is wrong with it
                number = signal.Signals[name.strip()]
                self._before[number] = signal.signal(number, self._pass_on)

    def pass_to(self, agent: int) -> None:
        """Pass signals to this process, also one that has come already."""
        self._agent = agent
        if self.received is not None:
            os.kill(agent, self.received)

    def _pass_on(self, number: int, _: object) -> None:
        self.received = self.received or signal.Signals(number)
        if self._agent and self._agent not in _reaped:
            os.kill(self._agent, number)

    def restore(self) -> None:
        """Put the handlers back that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def error_of(report: LaunchReport, name: str) -> Exception:
    """Return torch's exception for a job that failed."""
    code = report.exit_code
    if code == exit_codes.USAGE:
        return ValueError(report.why)
    if code == exit_codes.NODES_MISSING:
        return RendezvousTimeoutError(report.why)
    if code > exit_codes.SIGNAL_BASE:
        number = signal.Signals(code - exit_codes.SIGNAL_BASE)
        return SignalException(report.why, sigval=number)
    if report.failures:
        return ChildFailedError(name, {failure.rank: _process_failure(failure) for failure in report.failures})
    return RuntimeError(report.why)


def _process_failure(failure: ChildFailure) -> ProcessFailure:
    found = ProcessFailure(
        local_rank=failure.local_rank, pid=failure.pid, exitcode=failure.exit_code, error_file=failure.error_file
    )
    if not failure.error_file:
        found.timestamp = int(failure.failed_at)
        found.message = failure.text
    return found


def _name_of(entrypoint: Callable[..., Any] | str, args: list[Any]) -> str:
    """Return the program's name, as torch's summary of failures begins with it."""
    if not isinstance(entrypoint, str):
        return str(getattr(entrypoint, "__name__", entrypoint))
    if entrypoint != sys.executable:
        return entrypoint
    return next((str(word) for word in args if not str(word).startswith("-")), "")


# --- from torch's configuration to our flags


def launch_environment(config: LaunchConfig) -> dict[str, str]:
    """Return the environment of the agent: this one, without the switch, which is for launchers only."""
    environment = {name: value for name, value in os.environ.items() if name != SWITCH_VARIABLE}
    if config.log_line_prefix_template:
        environment["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = config.log_line_prefix_template
    return environment


def launch_flags(config: LaunchConfig, entrypoint: Callable[..., Any] | str, args: list[Any]) -> list[str]:
    """Return the command line of `holdfast run` for a configuration."""
    conf = dict(config.rdzv_configs)
    node_rank = conf.pop("rank", None)
    given = {
        "--nnodes": f"{config.min_nodes}:{config.max_nodes}",
        "--nproc-per-node": config.nproc_per_node,
        "--node-rank": node_rank if config.max_nodes > 1 else None,
        "--rdzv-backend": config.rdzv_backend,
        "--rdzv-endpoint": config.rdzv_endpoint,
        "--rdzv-id": config.run_id,
        "--rdzv-conf": ",".join(f"{key}={value}" for key, value in conf.items() if value not in (None, "")),
        "--max-restarts": config.max_restarts,
        "--role": config.role,
        "--signals-to-handle": config.signals_to_handle,
        "--shutdown-timeout": config.shutdown_timeout,
        "--local-addr": config.local_addr,
        "--numa-binding": config.numa_options.affinity_mode.value if config.numa_options else None,
        "--duplicate-stdout-filters": _listed(config.duplicate_stdout_filters),
        "--duplicate-stderr-filters": _listed(config.duplicate_stderr_filters),
        **_log_flags(config.logs_specs),
    }
    flags = [f"{flag}={value}" for flag, value in given.items() if value not in (None, "")]
    return [*flags, *["--virtual-local-rank"] * config.virtual_local_rank, *_program(entrypoint, args)]


def _listed(filters: Sequence[str] | None) -> str:
    return ",".join(text.replace(",", ",,") for text in filters or ())


def _log_flags(specs: Any) -> dict[str, Any]:
    if type(specs) is not DefaultLogsSpecs:
        raise ValueError(
            f"logs_specs of type {type(specs).__name__}: Holdfast opens the workers' log files itself; pass a"
            " DefaultLogsSpecs, or none"
        )
    shown = specs._local_ranks_filter
    return {
        "--log-dir": specs._root_log_dir,
        "--redirects": _streams(specs._redirects),
        "--tee": _streams(specs._tee),
        "--local-ranks-filter": ",".join(map(str, sorted(shown))) if shown else None,
    }


def _teed(specs: Any) -> list[int]:
    """Return the streams, 1 and 2, that are shown with a prefix for any rank. torch writes those lines itself, to this
    program's `sys.stdout` and `sys.stderr`; others come from the workers, to descriptors 1 and 2."""
    chosen = specs._tee if type(specs) is DefaultLogsSpecs else Std.NONE
    teed = set(chosen.values() if isinstance(chosen, dict) else [chosen])
    return [number for number, one in ((1, Std.OUT), (2, Std.ERR)) if any(one & choice for choice in teed)]


def _streams(choice: Any) -> str:
    if isinstance(choice, dict):
        return ",".join(f"{rank}:{int(value)}" for rank, value in choice.items()) or "0"
    return str(int(choice))


def _program(entrypoint: Callable[..., Any] | str, args: list[Any]) -> list[str]:
    """Return the words that say what to run. Python with a script or a module is forked from the warm server."""
    if not isinstance(entrypoint, str):
        return ["--module", "--", function_call.MODULE]
    words = [str(word) for word in args]
    if entrypoint == sys.executable:
        match words[words[:1] == ["-u"] :]:
            case ["-m", *module] if module:
                return ["--module", "--", *module]
            case [script, *rest] if not script.startswith("-"):
                return ["--", script, *rest]
    return ["--no-python", "--", entrypoint, *words]


if __name__ == "__main__":
    main()
