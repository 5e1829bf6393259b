"""Where workers are born: a process that has imported everything once, and forks.

`python -u -m holdfast.worker.birth.forkserver --fd N …`, started by the agent, with one socket to it. It has no gRPC,
one thread, and no will of its own: signals from a terminal do not reach it, and it ends when the agent does.

Who is whose child:

    agent ── fork server ── intermediate ── worker        at the second fork
    agent ── worker                                       a millisecond later: the intermediate has exited

The agent is a subreaper, so it inherits the worker, reaps it and learns its true exit status; and the worker survives
the fork server. The intermediate's own status interests nobody (SIGCHLD is ignored here, so the kernel reaps it).

**The rule of the report pipe** (never a worker twice, never one unknown). Each request comes with the write end of a
pipe of its own, of which only the server, the intermediate and the newborn ever hold copies. The newborn writes its pid
there as its last act before the user's code, and does not run if it cannot. So what the agent reads is the truth:

    a pid             it runs, or ran: this request is done, even if the fork server died meanwhile
    a reason          nothing ran and nothing will
    end of file       every process that could ever have run it is gone: it may be sent again

There is no fourth case, no time-out, and nothing to remember about requests here.

A newborn leaves through `serve`'s return value, down the stack to `main`: so the user's code runs on a shallow stack,
and the interpreter ends as it always does, with threads joined and atexit run.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable

import msgspec

from holdfast.wire.local import FrameReader, KeepStores, ServerRequest, StartExec, StartPython, send
from holdfast.worker.birth import like_new, newborn, numa, script
from holdfast.worker.birth.preload import preload, why_no_fork
from holdfast.worker.birth.program import become_program
from holdfast.worker.birth.storekeeper import StoreKeeper
from holdfast.worker.birth.title import set_title

BUG_EXIT_CODE = 70

Life = Callable[[], None]


class ForkServer:
    def __init__(self, control: socket.socket, agent_pid: int) -> None:
        self._control = control
        self._agent_pid = agent_pid
        self._openmp = os.environ.get(like_new.OPENMP_VARIABLE)
        # What preloaded modules hold open is theirs: closed behind their back, the number would return as another file.
        self._preloaded_descriptors = newborn.open_descriptors() - {control.fileno()}

    def serve(self) -> Life:
        """Returns in workers only; the server itself never comes back."""
        reader = FrameReader(msgspec.msgpack.Decoder(ServerRequest))
        while reader.receive(self._control):
            for request, descriptors in reader.frames():
                life = self._fork(request, descriptors)
                if life is not None:
                    return life
                for descriptor in descriptors:
                    os.close(descriptor)
        os._exit(0)

    def _fork(self, request: ServerRequest, descriptors: list[int]) -> Life | None:
        """None in the server."""
        reason = why_no_fork()
        try:
            if reason is None and os.fork() == 0:
                return self._bear(request, descriptors)
        except OSError as error:
            reason = f"the fork server cannot fork: {error}"
        if reason is not None:
            newborn.report_failure(descriptors[0], request.request_id, 0, reason)
        return None

    def _bear(self, request: ServerRequest, descriptors: list[int]) -> Life:
        """In the intermediate. Nothing but a newborn may leave this function."""
        try:
            intermediate_pid = os.getpid()
            if os.fork() != 0:
                os._exit(0)
            return self._grow_up(request, descriptors, intermediate_pid)
        except BaseException as error:  # else a half-born worker would go on as a second fork server
            traceback.print_exc()
            reason = f"a worker could not be set up: {type(error).__name__}: {error}"
            newborn.report_failure(descriptors[0], request.request_id, 0, reason)
            os._exit(BUG_EXIT_CODE)

    def _grow_up(self, request: ServerRequest, descriptors: list[int], intermediate_pid: int) -> Life:
        """In the newborn."""
        os.setsid()
        self._control.detach()  # closed with the rest, by number
        if isinstance(request, KeepStores):
            return self._become_keeper(request, descriptors, intermediate_pid)
        return self._become_worker(request, descriptors, intermediate_pid)

    def _become_worker(self, request: StartPython | StartExec, descriptors: list[int], intermediate_pid: int) -> Life:
        pipe, stdout, stderr = descriptors
        for_exec = isinstance(request, StartExec)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        newborn.close_descriptors({pipe} if for_exec else self._preloaded_descriptors | {pipe})
        newborn.reset_signals(for_exec)
        try:
            newborn.settle(request, for_exec)
            problem = ""
        except OSError as error:
            problem = f"a worker cannot be started in {os.fsdecode(request.cwd)!r}: {error.strerror}"
        newborn.leave_home(intermediate_pid, self._agent_pid)
        if problem:
            newborn.report_failure(pipe, request.request_id, os.getpid(), problem)
            os._exit(0)
        newborn.announce(pipe, request.request_id)
        return lambda: live(request, self._openmp)

    def _become_keeper(self, request: KeepStores, descriptors: list[int], intermediate_pid: int) -> Life:
        """It goes on ignoring signals, as the server does: it belongs to the agent alone."""
        pipe, control, stderr = descriptors
        os.dup2(stderr, 1)
        os.dup2(stderr, 2)
        newborn.close_descriptors(self._preloaded_descriptors | {pipe, control})
        set_title([b"holdfast: store keeper"])
        newborn.leave_home(intermediate_pid, self._agent_pid)
        newborn.announce(pipe, request.request_id)
        return lambda: keep_stores(control)


def live(request: StartPython | StartExec, openmp_of_server: str | None) -> None:
    """A worker's whole life."""
    numa.bind(request.numa_binding, request.local_rank)
    if isinstance(request, StartExec):
        become_program(request.argv)
    else:
        like_new.set_threads(openmp_of_server)
        script.run(request.kind, [os.fsdecode(argument) for argument in request.argv])


def keep_stores(control: int) -> None:
    StoreKeeper(socket.socket(fileno=control)).serve()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="holdfast.worker.birth.forkserver")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--agent-pid", type=int, required=True)
    parser.add_argument("--mode", choices=["warm", "cold"], required=True)
    parser.add_argument("--preload", default="")
    parser.add_argument("--title-room", help="blanks, so that a worker's title has room")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    newborn.die_with(arguments.agent_pid)  # while it preloads it does not look at its socket
    if not sys.flags.safe_path:
        sys.path.pop(0)  # the working directory, put there by -m: it is for the user's modules, not for ours
    set_title([b"holdfast: fork server"])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ready = preload(arguments.mode, [name for name in arguments.preload.split(",") if name])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control = socket.socket(fileno=arguments.fd)
    server = ForkServer(control, arguments.agent_pid)
    try:
        send(control, ready)
    except OSError:
        return  # the agent has closed its end while we were busy
    life = server.serve()
    life()


if __name__ == "__main__":
    main()
