"""Keeps a fork server alive and asks it for processes.

What a launch's report pipe says decides everything (the rule is in worker/birth/forkserver.py):

    started        the child is known and watched before the loop does anything else
    not started    LaunchError, with the reason
    end of file    nobody is left who could run it: sent once more, to the next fork server if this one died

So a fork server's death loses no request and starts none twice, and running workers do not notice it.
A launch that nobody waits for any more (its caller was cancelled) is followed to its end, to kill what it started.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence, Set

import structlog

from holdfast.agent.birth.child import Child
from holdfast.agent.birth.server_process import ServerProcess
from holdfast.agent.local_link import ReportPipe
from holdfast.errors import LaunchError, WireError
from holdfast.wire.local import Mode, NotStarted, Ready, Report, ServerRequest, Started

LAUNCH_ATTEMPTS_MAX = 2
# A fork server that cannot get ready will not do better the fourth time: the environment is broken.
EARLY_DEATHS_MAX = 3
START_PAUSE_S = 1.0
CLOSE_GRACE_S = 2.0

log = structlog.get_logger("holdfast.launcher")


class Nursery:
    def __init__(self, mode: Mode, preload: Sequence[str], env: Mapping[str, str]) -> None:
        self._mode, self._preload, self._env = mode, tuple(preload), dict(env)
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._request_count = 0
        self._children: dict[int, Child] = {}
        self._births: dict[int, Child] = {}
        self._pipes: set[ReportPipe] = set()
        self._launches: set[asyncio.Task[Child]] = set()
        self._server: ServerProcess | None = None
        self._serving: asyncio.Future[ServerProcess] = self._loop.create_future()
        self._supervision = self._loop.create_task(self._supervise())

    def next_request_id(self) -> int:
        self._request_count += 1
        return self._request_count

    @property
    def server_pid(self) -> int:
        """0 while there is none."""
        return 0 if self._server is None or self._server.child.ended else self._server.child.pid

    async def ready(self) -> Ready:
        server = await asyncio.shield(self._serving)
        ready = await server.ready()
        assert ready is not None, "only a server that got ready is ever put into service"
        return ready

    async def launch(self, request: ServerRequest, descriptors: Sequence[int]) -> Child:
        """The descriptors are copied: the caller may close its own at any time."""
        if self._closed:
            raise LaunchError("the launcher is closed")
        launch = self._loop.create_task(self._launch(request, [os.dup(descriptor) for descriptor in descriptors]))
        self._launches.add(launch)
        launch.add_done_callback(self._launches.discard)
        try:
            return await asyncio.shield(launch)
        except asyncio.CancelledError:
            launch.add_done_callback(kill_unwanted)
            raise

    def reap_orphans(self, known_pids: Set[int] = frozenset()) -> int:
        """Reaps zombies that this process inherited as a subreaper; the number of them. Ours are never among them:
        a zombie that is ours has reported before it could end, so reading the pipes after seeing it makes it known.
        `known_pids` are children that other parts of the agent reap; one that is a zombie now ends this round early."""
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
        """Ends the fork server. Launches under way fail, and what they have started is killed."""
        self._closed = True
        self._supervision.cancel()
        await asyncio.wait({self._supervision})
        if self._pipes:
            await asyncio.wait([pipe.outcome for pipe in self._pipes], timeout=CLOSE_GRACE_S)
        if self._server is not None:
            self._server.child.signal(signal.SIGKILL)
            await self._server.child.wait()
        self._give_up(LaunchError("the launcher is closed"))
        await asyncio.gather(*self._launches, return_exceptions=True)

    async def _launch(self, request: ServerRequest, descriptors: list[int]) -> Child:
        try:
            for _ in range(LAUNCH_ATTEMPTS_MAX):
                try:
                    report = await self._attempt(request, descriptors)
                except WireError as error:
                    raise LaunchError(f"the request cannot be sent to the fork server: {error}") from error
                if isinstance(report, NotStarted):
                    raise LaunchError(report.reason)
                if isinstance(report, Started):
                    return self._hand_over(request.request_id)
            raise LaunchError(f"a process died {LAUNCH_ATTEMPTS_MAX} times before it could run: out of memory?")
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _hand_over(self, request_id: int) -> Child:
        child = self._births.pop(request_id)
        if self._closed:
            child.kill_group(signal.SIGKILL)
            raise LaunchError("the launcher was closed while a process was being started")
        return child

    async def _attempt(self, request: ServerRequest, descriptors: Sequence[int]) -> Report | None:
        pipe = ReportPipe(self._reported)
        self._pipes.add(pipe)
        pipe.outcome.add_done_callback(lambda _: self._pipes.discard(pipe))
        try:
            await self._send(request, [pipe.writing, *descriptors])
        finally:
            pipe.close_writing()
        return await pipe.outcome

    async def _send(self, request: ServerRequest, descriptors: Sequence[int]) -> None:
        """Once the whole frame is in the socket; a server that died before that has never seen the request."""
        while True:
            server = await asyncio.shield(self._serving)
            try:
                return await server.link.send(request, descriptors)
            except ConnectionError:
                await server.child.wait()

    def _reported(self, report: Report) -> None:
        """Called the moment a report is read. A failed newborn is ours to reap too."""
        if report.pid:
            child = self._watch(Child(report.pid))
            if isinstance(report, Started):
                self._births[report.request_id] = child

    def _watch(self, child: Child) -> Child:
        self._children[child.pid] = child
        child.on_end(self._forget)
        return child

    def _forget(self, child: Child) -> None:
        self._children.pop(child.pid, None)

    async def _supervise(self) -> None:
        early_deaths = 0
        last_words = ""
        while early_deaths < EARLY_DEATHS_MAX:
            try:
                server = self._server = ServerProcess(self._mode, self._preload, self._env)
            except OSError as error:
                early_deaths += 1
                last_words = f"the fork server cannot be started: {error}"
                log.warning(last_words)
                await asyncio.sleep(START_PAUSE_S)  # memory or descriptors ran out: a moment later there may be some
                continue
            self._watch(server.child)
            server.child.on_end(self._server_ended)
            early_deaths += 1
            if (ready := await server.ready()) is not None:
                early_deaths = 0
                log.info("fork server ready", mode=ready.mode, preload_s=round(ready.preload_s, 3), why=ready.problems)
                if not server.child.ended:
                    self._serving.set_result(server)
            status = await server.child.wait()
            log.warning("fork server died", wait_status=status, stderr=server.last_words())
            last_words = f"the fork server died {early_deaths} times before it was ready:\n{server.last_words()}"
        self._give_up(LaunchError(last_words))

    def _server_ended(self, _: Child) -> None:
        """From this moment launches wait for the next one."""
        if self._serving.done():
            self._serving = self._loop.create_future()

    def _give_up(self, error: LaunchError) -> None:
        if self._serving.done():
            self._serving = self._loop.create_future()
        self._serving.set_exception(error)
        self._serving.exception()  # seen: nobody has to be waiting for it


def next_zombie() -> int | None:
    try:
        end = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if end is None else end.si_pid


def kill_unwanted(launch: asyncio.Task[Child]) -> None:
    if not launch.cancelled() and launch.exception() is None:
        launch.result().kill_group(signal.SIGKILL)
