"""Where workers are born: a process that has imported everything once, and forks.

`python -u …/start_fork_server.py --fd N …`, started by the agent, with one socket to it. It has one thread, and no will
of its own: signals from a terminal do not reach it, and it ends when the agent does.

Who is whose child:

    agent ── fork server ── intermediate ── worker        at the second fork
    agent ── worker                                       a millisecond later: the intermediate has exited

The agent is a subreaper, so it inherits the worker, reaps it and learns its true exit status; and the worker survives
the fork server. The intermediate's own status is not needed (SIGCHLD is ignored here, so the kernel reaps it).

**The rule of the report pipe** (never a worker twice, never one unknown). Each request comes with the write end of a
pipe of its own, of which only the server, the intermediate and the worker ever hold copies. The worker writes its pid
there as its last act before the user's code, and does not run if it cannot. So what the agent reads is the truth:

    a pid             it runs, or ran: this request is done, even if the fork server died meanwhile
    a reason          nothing ran and nothing will
    end of file       every process that could ever have run it is gone: it may be sent again

There is no fourth case, no time-out, and nothing to remember about requests here.

A new worker leaves through `serve`'s return value, down the stack to `main`: so the user's code runs on a shallow
stack, and the interpreter ends as it always does, with threads joined and atexit run.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import traceback
from collections.abc import Callable

import msgspec

from holdfast.exit_codes import INTERNAL_ERROR
from holdfast.wire.launch_messages import (
    BecomeStoreHost,
    FrameReader,
    LaunchExec,
    LaunchPython,
    PreloadPlan,
    ServerRequest,
    send,
)
from holdfast.worker.launch import (
    build_locks,
    child_setup,
    reset_interpreter,
    script,
    script_variables,
    spare_environment,
    stack_handler,
    way_out,
)
from holdfast.worker.launch.child_setup import become_program, set_title
from holdfast.worker.launch.preload import preload, why_no_fork
from holdfast.worker.launch.script_variables import APPLIED
from holdfast.worker.launch.store_host import StoreHost

ProcessMain = Callable[[], None]


class ForkServer:
    def __init__(self, control: socket.socket, agent_pid: int, applied: tuple[str, ...] = ()) -> None:
        self._control = control
        self._agent_pid = agent_pid
        self._openmp = os.environ.get(reset_interpreter.OPENMP_VARIABLE)
        self._applied = applied
        # What preloaded modules hold open is theirs: closed behind their back, the number would return as another file.
        self._preloaded_descriptors = child_setup.open_descriptors() - {control.fileno()}

    def serve(self) -> ProcessMain:
        """Returns in workers only; the server itself never comes back."""
        reader = FrameReader(msgspec.msgpack.Decoder(ServerRequest))
        while reader.receive(self._control):
            for request, descriptors in reader.frames():
                run_child = self._fork(request, descriptors)
                if run_child is not None:
                    return run_child
                for descriptor in descriptors:
                    os.close(descriptor)
        os._exit(0)

    def _fork(self, request: ServerRequest, descriptors: list[int]) -> ProcessMain | None:
        """Fork; return None in the server."""
        unfit = reason = why_no_fork()
        try:
            if reason is None and os.fork() == 0:
                return self._fork_worker(request, descriptors)
        except OSError as error:
            reason = f"the fork server cannot fork: {error}"
        if reason is not None:
            child_setup.report_failure(descriptors[0], request.request_id, 0, reason, is_unfit=unfit is not None)
        return None

    def _fork_worker(self, request: ServerRequest, descriptors: list[int]) -> ProcessMain:
        """Fork the worker, in the intermediate process. Nothing but the worker may leave this function."""
        try:
            intermediate_pid = os.getpid()
            if os.fork() != 0:
                os._exit(0)
            return self._set_up_worker(request, descriptors, intermediate_pid)
        except BaseException as error:  # else a half-born worker would go on as a second fork server
            traceback.print_exc()
            reason = f"a worker could not be set up: {type(error).__name__}: {error}"
            child_setup.report_failure(descriptors[0], request.request_id, 0, reason)
            os._exit(INTERNAL_ERROR)

    def _set_up_worker(self, request: ServerRequest, descriptors: list[int], intermediate_pid: int) -> ProcessMain:
        """Set up the worker, in its own process."""
        os.setsid()
        self._control.detach()  # closed with the rest, by number
        if isinstance(request, BecomeStoreHost):
            return self._host_store(request, descriptors, intermediate_pid)
        return self._become_worker(request, descriptors, intermediate_pid)

    def _become_worker(
        self, request: LaunchPython | LaunchExec, descriptors: list[int], intermediate_pid: int
    ) -> ProcessMain:
        pipe, stdout, stderr = descriptors
        for_exec = isinstance(request, LaunchExec)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        child_setup.close_descriptors({pipe} if for_exec else self._preloaded_descriptors | {pipe})
        child_setup.reset_signals(for_exec)
        try:
            child_setup.set_environment(request, for_exec)
            problem = ""
        except OSError as error:
            problem = f"a worker cannot be started in {os.fsdecode(request.cwd)!r}: {error.strerror}"
        child_setup.adopt_agent(intermediate_pid, self._agent_pid)
        if problem:
            child_setup.report_failure(pipe, request.request_id, os.getpid(), problem)
            os._exit(0)
        child_setup.announce(pipe, request.request_id)
        return lambda: live(request, self._openmp, self._applied)

    def _host_store(self, request: BecomeStoreHost, descriptors: list[int], intermediate_pid: int) -> ProcessMain:
        """Host a rendezvous store. The process goes on ignoring signals, as the server does: it belongs to the agent
        alone."""
        pipe, control, stderr = descriptors
        os.dup2(stderr, 1)
        os.dup2(stderr, 2)
        child_setup.close_descriptors(self._preloaded_descriptors | {pipe, control})
        set_title([b"holdfast: store host"])
        child_setup.adopt_agent(intermediate_pid, self._agent_pid)
        child_setup.announce(pipe, request.request_id)
        return lambda: keep_stores(control)


def live(request: LaunchPython | LaunchExec, openmp_of_server: str | None, applied: tuple[str, ...]) -> None:
    """Run a worker until it ends."""
    child_setup.bind_to_numa(request.numa_binding, request.local_rank)
    if isinstance(request, LaunchExec):
        become_program(request.argv)
    else:
        stack_handler.install()
        reset_interpreter.set_threads(openmp_of_server)
        script_variables.install(applied)
        build_locks.install()
        spare_environment.watch()
        way_out.install()
        script.run(request.kind, [os.fsdecode(argument) for argument in request.argv])


def keep_stores(control: int) -> None:
    StoreHost(socket.socket(fileno=control)).serve()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="holdfast.worker.launch.fork_server")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--agent-pid", type=int, required=True)
    parser.add_argument("--mode", choices=["warm", "cold"], required=True)
    parser.add_argument("--preload", default="{}", help="a PreloadPlan as JSON")
    parser.add_argument("--title-room", help="blanks, so that a worker's title has room")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    child_setup.die_with(arguments.agent_pid)  # while it preloads it does not look at its socket
    set_title([b"holdfast: fork server"])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ready = preload(arguments.mode, msgspec.json.decode(arguments.preload, type=PreloadPlan))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control = socket.socket(fileno=arguments.fd)
    server = ForkServer(control, arguments.agent_pid, tuple(name for name in ready.sets if name in APPLIED))
    try:
        send(control, ready)
    except OSError:
        return  # the agent has closed its end while we were busy
    run_child = server.serve()
    run_child()
