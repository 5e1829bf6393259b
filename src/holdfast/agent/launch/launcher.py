"""How the agent starts processes: workers, the host of their rendezvous stores, the examiner of the node.

The agent has threads and no torch, so it never forks itself. It asks a fork server, which has torch imported and one
thread (worker/launch/fork_server.py), and becomes the parent of what is forked, being a subreaper: it reaps its
workers, they outlive the fork server, and none of them outlives the agent.

What a launch's report pipe says decides everything (the rule is in worker/launch/fork_server.py):

    started        the child is known and watched before the loop does anything else
    not started    LaunchError, with the reason
    end of file    no process is left that could run it: sent once more, to the next fork server if this one died

A fork server that a preloaded module has made unfit to fork (threads, a device) is replaced by one without the module,
for the rest of the job. If the module is not known, it is replaced by one that imports torch alone.

So a fork server's death loses no request and starts none twice, and running workers do not notice it. One that does
not answer is killed (helper_watch.py); if what it has forked does not report either, the launch fails, and what comes
of it later is killed.
A launch whose caller was cancelled is followed to its end, to kill what it started.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Mapping, Sequence, Set
from typing import Any

import msgspec

from holdfast.agent.helper_watch import Helper, kill_unless_answered
from holdfast.agent.launch.child import Child
from holdfast.agent.launch.fork_server_process import ForkServerProcess, InheritedServer, ReportPipe
from holdfast.agent.rendezvous_stores import RendezvousStores
from holdfast.errors import LaunchError, WireError
from holdfast.util.logs import get_logger
from holdfast.util.tasks import TaskSet
from holdfast.wire.launch_messages import (
    ForkServerReady,
    LaunchExec,
    LaunchPython,
    Mode,
    PreloadPlan,
    Report,
    ScriptKind,
    ServerRequest,
    WorkerLaunched,
)

__all__ = ["Child", "Launcher", "process_request"]

LAUNCH_ATTEMPTS_MAX = 2
EARLY_DEATHS_MAX = 3
"""A fork server that cannot get ready will not do better the fourth time: the environment is broken."""
START_PAUSE_S = 1.0
READY_LIMIT_S = 600.0
"""How long a fork server may take to get ready; it gives up imports by itself long before."""
LAUNCH_LIMIT_S = 60.0
"""How long a fork may take to report. It takes milliseconds; seconds where all processors are busy."""
LATE_REPORT_S = 30.0
"""How long a launch whose fork server was killed waits for what that server may have forked."""
CLOSE_GRACE_S = 2.0
TORCH_ALONE = PreloadPlan()
INHERITED_DIED = "the process that was forked from the calling program has died, and with it the function to run"

_PR_SET_CHILD_SUBREAPER = 36

log = get_logger(__name__)


class Launcher:
    """The client of the fork server, which it supervises. Make one with `start`, from the agent's main thread."""

    def __init__(
        self, mode: Mode, plan: PreloadPlan, env: Mapping[str, str], inherited: InheritedServer | None = None
    ) -> None:
        self._mode, self._plan, self._env = mode, plan, dict(env)
        self._inherited = inherited
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self.is_fit = True
        """Whether forks of the warm interpreter do what the script means by the variables that it sets."""
        self._is_replacing = False
        self._request_count = 0
        self._children: dict[int, Child] = {}
        self._launched: dict[int, Child] = {}
        self._pipes: set[ReportPipe] = set()
        self._abandoned: set[int] = set()
        """Requests that failed because nothing was heard of them."""
        self._launches: set[asyncio.Task[Child]] = set()
        self._server: ForkServerProcess | None = None
        self._serving: asyncio.Future[ForkServerProcess] = self._loop.create_future()
        self._tasks = TaskSet()
        self._tasks.start(self._supervise(), "fork server supervisor")
        self.stores = RendezvousStores(self.launch)

    @classmethod
    async def start(
        cls,
        mode: Mode,
        plan: PreloadPlan = TORCH_ALONE,
        env: Mapping[str, str] | None = None,
        inherited: InheritedServer | None = None,
    ) -> Launcher:
        """Start a fork server without waiting for it: requests do. `env` should be the workers' without their ranks,
        because what libraries read from it while they are imported is read once, by the fork server."""
        become_subreaper()
        return cls(mode, plan, os.environ if env is None else env, inherited)

    @property
    def server_pid(self) -> int:
        """The fork server's process id; 0 while there is none."""
        return 0 if self._server is None or self._server.child.ended else self._server.child.pid

    @property
    def helpers(self) -> list[Helper]:
        """The processes of the launcher that are replaced when they hang."""
        server, store_host = self._server, self.stores.helper
        found = [] if server is None or server.child.ended else [_helper(server)]
        return [*found, store_host] if store_host else found

    async def ready(self) -> ForkServerReady:
        """Wait until processes can be forked. The answer's `problems` are sentences for the user."""
        server = await asyncio.shield(self._serving)
        ready = await server.ready()
        assert ready is not None, "only a server that got ready is ever put into service"
        return ready

    async def launch(self, request: ServerRequest, descriptors: Sequence[int]) -> Child:
        """Start a process and return it. The descriptors are copied: the caller may close its own at any time."""
        if self._closed:
            raise LaunchError("the launcher is closed")
        self._request_count += 1
        request = msgspec.structs.replace(request, request_id=self._request_count)
        launch = self._loop.create_task(self._launch(request, [os.dup(descriptor) for descriptor in descriptors]))
        self._launches.add(launch)
        launch.add_done_callback(self._launches.discard)
        try:
            return await asyncio.shield(launch)
        except asyncio.CancelledError:
            launch.add_done_callback(kill_unwanted)
            raise

    def reap_orphans(self, known_pids: Set[int] = frozenset()) -> int:
        """Reap zombies that this process inherited as a subreaper, and return their number. To be called after a
        worker's end: what it had started belongs to the agent now. Children of the launcher are never among them: a
        zombie of ours has reported before it could end, so reading the pipes after seeing it makes it known.
        `known_pids` are children that other code of the agent reaps; one that is a zombie ends this round early."""
        count = 0
        while (pid := next_zombie()) is not None and pid not in known_pids:
            for pipe in tuple(self._pipes):
                pipe.poll()
            child = self._children.get(pid)
            if child is not None:
                child.poll()
            elif os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is not None:
                count += 1
        return count

    async def close(self) -> None:
        """End the fork server and the store host. Launches under way fail, and what they have started is killed.
        Workers are stopped by the caller, before."""
        self._closed = True
        await self._tasks.close()
        if self._pipes:
            await asyncio.wait([pipe.outcome for pipe in self._pipes], timeout=CLOSE_GRACE_S)
        if self._server is not None:
            self._server.child.signal(signal.SIGKILL)
            await self._server.child.wait()
        self._fail_launches(LaunchError("the launcher is closed"))
        await asyncio.gather(*self._launches, return_exceptions=True)
        await self.stores.end()

    # --- one launch

    async def _launch(self, request: ServerRequest, descriptors: list[int]) -> Child:
        """Send the request until a process reports. A server that died before it had the whole frame has never seen the
        request, and that attempt does not count."""
        attempts = 0
        try:
            while attempts < LAUNCH_ATTEMPTS_MAX:
                plan, pipe = self._plan, self._open_pipe()
                try:
                    server = await asyncio.shield(self._serving)
                    self._tasks.start(kill_unless_answered(pipe.outcome, _helper(server), LAUNCH_LIMIT_S))
                    await server.link.send(request, [pipe.writing, *descriptors])
                except ConnectionError:
                    await server.child.wait()
                    continue
                except WireError as error:
                    raise LaunchError(f"the request cannot be sent to the fork server: {error}") from error
                finally:
                    pipe.close_writing()
                attempts += 1
                report = await self._report_of(request, server, pipe)
                if isinstance(report, WorkerLaunched):
                    return self._hand_over(request.request_id)
                if report is not None and not (report.is_unfit and self._replace_unfit(plan, report.reason)):
                    raise LaunchError(report.reason)
            raise LaunchError(f"a process died {LAUNCH_ATTEMPTS_MAX} times before it could run: out of memory?")
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    async def _report_of(self, request: ServerRequest, server: ForkServerProcess, pipe: ReportPipe) -> Report | None:
        """Wait for a launch's report, for a while also after the fork server's end."""
        server_ended: asyncio.Future[Any] = self._loop.create_task(server.child.wait())
        answers: list[asyncio.Future[Any]] = [pipe.outcome, server_ended]
        await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        server_ended.cancel()
        if not pipe.outcome.done():
            await asyncio.wait([pipe.outcome], timeout=LATE_REPORT_S)
        if not pipe.outcome.done():
            self._abandoned.add(request.request_id)
            raise LaunchError(
                "the fork server ended, and the process that it forked last does not report: is the disk of the"
                " working directory unreachable?"
            )
        return pipe.outcome.result()

    def _open_pipe(self) -> ReportPipe:
        pipe = ReportPipe(self._reported)
        self._pipes.add(pipe)
        pipe.outcome.add_done_callback(lambda _: self._pipes.discard(pipe))
        return pipe

    def _hand_over(self, request_id: int) -> Child:
        child = self._launched.pop(request_id)
        if self._closed:
            child.kill_group(signal.SIGKILL)
            raise LaunchError("the launcher was closed while a process was being started")
        return child

    def _reported(self, report: Report) -> None:
        """Watch the child, in the moment its report is read. One that failed is ours to reap too."""
        if report.pid:
            child = self._watch(Child(report.pid))
            if report.request_id in self._abandoned:
                child.kill_group(signal.SIGKILL)
            elif isinstance(report, WorkerLaunched):
                self._launched[report.request_id] = child

    def _watch(self, child: Child) -> Child:
        self._children[child.pid] = child
        child.on_end(self._forget)
        return child

    def _forget(self, child: Child) -> None:
        self._children.pop(child.pid, None)

    # --- the fork server

    async def _supervise(self) -> None:
        early_deaths = 0
        problem = ""
        while early_deaths < EARLY_DEATHS_MAX:
            try:
                server = self._server = ForkServerProcess(self._mode, self._plan, self._env, self._inherited)
            except OSError as error:
                early_deaths += 1
                problem = f"the fork server cannot be started: {error}"
                log.warning("fork-server-not-started", problem)
                await asyncio.sleep(START_PAUSE_S)  # memory or descriptors ran out: a moment later there may be some
                continue
            self._watch(server.child)
            server.child.on_end(self._server_ended)
            early_deaths += 1
            if (ready := await self._when_ready(server)) is not None:
                early_deaths = 0
                if self._leave_out(ready.unsafe):
                    server.child.signal(signal.SIGKILL)
                    await server.child.wait()
                    continue
                self._log_ready(ready)
                if not server.child.ended:
                    self._serving.set_result(server)
            status = await server.child.wait()
            if self._inherited is not None:
                problem = INHERITED_DIED
                break
            if self._is_replacing:
                self._is_replacing = False
                continue
            log.warning(
                "fork-server-died",
                "the fork server died, starting another; running workers are not affected",
                wait_status=status,
                stderr=server.stderr_tail(),
            )
            problem = f"the fork server died {early_deaths} times before it was ready:\n{server.stderr_tail()}"
        self._fail_launches(LaunchError(problem))

    async def _when_ready(self, server: ForkServerProcess) -> ForkServerReady | None:
        """Wait until a fork server can fork; return None if it died, or was killed because it took too long."""
        ready = self._loop.create_task(server.ready())
        watch = self._tasks.start(kill_unless_answered(ready, _helper(server), READY_LIMIT_S))
        try:
            return await ready
        finally:
            watch.cancel()

    def _log_ready(self, ready: ForkServerReady) -> None:
        if self.is_fit and not ready.is_fit and self._plan.script_kind != "path":
            self.is_fit = False
            log.warning(
                "script-needs-clean-start",
                f"the script sets {', '.join(ready.sets)}, which torch reads only while it is imported: each worker"
                " starts with a fresh interpreter, as with --start-method spawn. Set them in the environment of"
                " `holdfast run` instead, and restarts are faster",
            )
        log.info(
            "fork-server-ready",
            "the fork server is ready",
            mode=ready.mode,
            preload_s=round(ready.preload_s, 3),
            why=ready.problems,
            imported=ready.imported,
        )

    def _leave_out(self, unsafe: Mapping[str, str]) -> bool:
        """Remove modules from the plan that make a fork server unfit to fork; return whether there are any."""
        found = {name: why for name, why in unsafe.items() if name not in self._plan.without}
        for name, why in found.items():
            is_named = name in self._plan.modules
            write = log.warning if is_named else log.info
            source = f"--preload {name}" if is_named else f"{name}, which the script imports,"
            text = f"{source} {why}: restarting the fork server without it, workers import it themselves"
            write("preload-module-unsafe", text)
        self._plan = msgspec.structs.replace(self._plan, without=(*self._plan.without, *found))
        return bool(found)

    def _replace_unfit(self, refused_plan: PreloadPlan, reason: str) -> bool:
        """Start a fork server that imports torch alone, instead of one that found threads or a device in itself when
        it was to fork. Return False if the one that refused was such a server already."""
        if self._plan != refused_plan:
            return True  # it was replaced for another request
        if self._plan.modules in ((), ("none",)) or self._inherited is not None:
            return False
        log.warning("fork-server-unfit", f"{reason}. Restarting the fork server with torch alone")
        self._plan = PreloadPlan()
        self._is_replacing = True
        if self._server is not None:
            self._server.child.signal(signal.SIGKILL)
        self._server_ended()
        return True

    def _server_ended(self, _: Child | None = None) -> None:
        """Have launches wait for the next fork server, from this moment."""
        if self._serving.done():
            self._serving = self._loop.create_future()

    def _fail_launches(self, error: LaunchError) -> None:
        if self._serving.done():
            self._serving = self._loop.create_future()
        self._serving.set_exception(error)
        self._serving.exception()  # marks it as retrieved: perhaps no launch waits for it


def _helper(server: ForkServerProcess) -> Helper:
    return Helper("the fork server", server.child.pid, lambda: server.child.signal(signal.SIGKILL))


def process_request(
    argv: Sequence[str],
    *,
    kind: ScriptKind | None,
    env: Mapping[str, str],
    cwd: str,
    local_rank: int,
    numa_binding: str = "",
) -> LaunchPython | LaunchExec:
    """Return the request for a process: a script, a module or a path that runs in a fork of the warm interpreter, or
    with `kind` None a program of its own, found on `env`'s PATH. `env` is the whole environment."""
    variables = {os.fsencode(name): os.fsencode(value) for name, value in env.items()}
    arguments, directory = tuple(map(os.fsencode, argv)), os.fsencode(cwd)
    if kind is None:
        return LaunchExec(
            request_id=0,
            argv=arguments,
            env=variables,
            cwd=directory,
            local_rank=local_rank,
            numa_binding=numa_binding,
        )
    return LaunchPython(
        request_id=0,
        argv=arguments,
        kind=kind,
        env=variables,
        cwd=directory,
        local_rank=local_rank,
        numa_binding=numa_binding,
    )


def next_zombie() -> int | None:
    """Return a child of this process that has ended and was not reaped, or None."""
    try:
        end = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if end is None else end.si_pid


def kill_unwanted(launch: asyncio.Task[Child]) -> None:
    """Kill what a launch has started whose caller was cancelled."""
    if not launch.cancelled() and launch.exception() is None:
        launch.result().kill_group(signal.SIGKILL)


def become_subreaper() -> None:
    """Make this process the parent of orphans below it, and undo an inherited "ignore SIGCHLD", under which the kernel
    would reap our children before us."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        raise LaunchError("Holdfast watches workers through pidfds: it needs Linux 5.4 or newer") from error
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise LaunchError(f"this process cannot adopt its workers: {os.strerror(ctypes.get_errno())}")
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
