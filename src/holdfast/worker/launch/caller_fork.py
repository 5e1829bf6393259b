"""A fork server that is a fork of the calling program, for `start_method="fork"`.

    calling program ── agent                    forked, then another program (exec), with the same process id
                       └── fork server          forked by it before the exec: it has the calling program's memory
                            ╌╌ workers          as from any fork server (fork_server.py)

So functions of a notebook, closures and queues reach the workers by inheritance, and nothing is pickled. As with any
fork, one thread survives: a device must not have been initialised before, which the server refuses, and locks that
other threads held at that moment stay locked.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import util as multiprocessing_util
from typing import Any, NoReturn

import msgspec

from holdfast.wire.launch_messages import CallerSettings, ForkServerReady, send
from holdfast.worker.launch import child_setup, function_call
from holdfast.worker.launch.fork_server import ForkServer

CANNOT_EXEC_EXIT_CODE = 126

AgentCommand = Callable[[CallerSettings, Sequence[str]], list[str]]


def start_agent(
    call: function_call.InheritedCall,
    settings: CallerSettings,
    command: AgentCommand,
    flags: Sequence[str],
    environment: dict[str, str],
    ours: Sequence[int],
    streams: Mapping[int, int],
) -> int:
    """Start an agent whose fork server has this process's memory; return the agent's process id. `ours`: descriptors
    that this process keeps for itself. `streams`: what the agent has for stdout (1) and stderr (2) instead of ours."""
    sys.stdout.flush()
    sys.stderr.flush()
    agent_pid = os.fork()
    if agent_pid:
        return agent_pid
    try:
        for descriptor in ours:
            os.close(descriptor)
        for number, descriptor in streams.items():
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.setsid()
        _become_agent(call, settings, command, flags, environment)
    except BaseException:
        traceback.print_exc()
    os._exit(CANNOT_EXEC_EXIT_CODE)


def _become_agent(
    call: function_call.InheritedCall,
    settings: CallerSettings,
    command: AgentCommand,
    flags: Sequence[str],
    environment: dict[str, str],
) -> NoReturn:
    agents_end, servers_end = socket.socketpair()
    agent_pid = os.getpid()
    server_pid = os.fork()
    if server_pid == 0:
        agents_end.close()
        for descriptor in (settings.report, settings.caller, settings.results):
            os.close(descriptor)
        _serve(call, servers_end, agent_pid)
    servers_end.close()
    settings = msgspec.structs.replace(settings, server=agents_end.fileno(), server_pid=server_pid)
    for descriptor in (settings.report, settings.caller, settings.results, settings.server):
        os.set_inheritable(descriptor, True)
    words = command(settings, flags)
    os.execve(words[0], words, environment)


def _serve(call: function_call.InheritedCall, control: socket.socket, agent_pid: int) -> NoReturn:
    """Serve as the fork server; in its workers, run what they are for, and end as a forked child does."""
    code = child_setup.ORPHAN_EXIT_CODE
    try:
        child_setup.die_with(agent_pid)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        function_call.inherited = call
        server = ForkServer(control, agent_pid)
        send(control, ForkServerReady(mode="warm", preload_s=0.0, problems=()))
        code = _live(server.serve())
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def _live(life: Callable[[], None]) -> int:
    """Run a worker to its end, without going back to where the calling program was; return its exit code."""
    finalizers: Any = multiprocessing_util
    finalizers._finalizer_registry.clear()  # the calling program's, which still needs what they would remove
    try:
        life()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        code = child_setup.ORPHAN_EXIT_CODE
    finalizers._exit_function()  # ends processes that the function has started
    sys.stdout.flush()
    sys.stderr.flush()
    return code
