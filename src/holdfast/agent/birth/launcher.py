"""How the agent starts processes: workers and the keeper of their rendezvous stores.

The agent has threads (gRPC's) and no torch, so it never forks itself. It asks a fork server, which has torch imported
and one thread (worker/birth/forkserver.py), and becomes the parent of what is forked, being a subreaper: it reaps its
workers, they outlive the fork server, and none of them outlives the agent.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
from collections.abc import Coroutine, Mapping, Sequence, Set
from typing import Any

from holdfast.agent.birth.child import Child
from holdfast.agent.birth.nursery import Nursery
from holdfast.agent.stores import Stores
from holdfast.errors import LaunchError
from holdfast.wire.local import Mode, Ready, ScriptKind, StartExec, StartPython

__all__ = ["Child", "Launcher"]

_PR_SET_CHILD_SUBREAPER = 36


class Launcher:
    """Make one with `start`, from the agent's main thread."""

    def __init__(self, nursery: Nursery) -> None:
        self._nursery = nursery
        self._stores = Stores(nursery)
        self._unfinished: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(cls, mode: Mode, preload: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Launcher:
        """Does not wait for the fork server: requests do. `env` should be the workers' without their ranks: what
        libraries read from it while they are imported is read once, by the fork server."""
        become_subreaper()
        return cls(Nursery(mode, preload, os.environ if env is None else env))

    async def ready(self) -> Ready:
        """Waits until processes can be forked. Its `problems` are sentences for the user's eyes."""
        return await self._nursery.ready()

    async def start_python(
        self,
        argv: Sequence[str],
        *,
        kind: ScriptKind,
        env: Mapping[str, str],
        cwd: str,
        stdout: int,
        stderr: int,
        local_rank: int,
        numa_binding: str = "",
    ) -> Child:
        """Runs `argv[0]`, a script, a module or a path, in a fork. `env` is the whole environment."""
        request = StartPython(
            request_id=self._nursery.next_request_id(),
            argv=tuple(map(os.fsencode, argv)),
            kind=kind,
            env=encode_environment(env),
            cwd=os.fsencode(cwd),
            local_rank=local_rank,
            numa_binding=numa_binding,
        )
        return await self._nursery.launch(request, [stdout, stderr])

    async def start_exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str,
        stdout: int,
        stderr: int,
        local_rank: int,
        numa_binding: str = "",
    ) -> Child:
        """Runs a program, looked for on `env`'s PATH."""
        request = StartExec(
            request_id=self._nursery.next_request_id(),
            argv=tuple(map(os.fsencode, argv)),
            env=encode_environment(env),
            cwd=os.fsencode(cwd),
            local_rank=local_rank,
            numa_binding=numa_binding,
        )
        return await self._nursery.launch(request, [stdout, stderr])

    async def open_store(self, view: int, host: str, listening_socket: socket.socket) -> None:
        """Serves a view's store on a socket that is bound and listening, and closes the agent's own copy of it.
        `host` is where workers look for it; it is used in messages only."""
        await self._to_its_end(self._stores.open(view, host, listening_socket))

    async def close_store(self, view: int) -> None:
        """The port is free on return."""
        await self._to_its_end(self._stores.close_view(view))

    async def stores_lost(self) -> frozenset[int]:
        """Waits until the store keeper dies; the views whose stores died with it."""
        return await self._stores.lost()

    def reap_orphans(self, known_pids: Set[int] = frozenset()) -> int:
        """To be called after a worker's end: what it had started is the agent's now. `known_pids` are children that
        other code of this process waits for."""
        return self._nursery.reap_orphans(known_pids)

    async def close(self) -> None:
        """Ends the fork server and the store keeper. Workers are the caller's to stop, before."""
        await self._nursery.close()
        await self._stores.end()
        await asyncio.gather(*self._unfinished, return_exceptions=True)

    @property
    def server_pid(self) -> int:
        return self._nursery.server_pid

    @property
    def keeper_pid(self) -> int:
        return self._stores.keeper_pid

    async def _to_its_end(self, work: Coroutine[Any, Any, None]) -> None:
        """A caller's cancellation must not cut a frame in two, nor leave a socket in nobody's hands."""
        task = asyncio.get_running_loop().create_task(work)
        self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)
        await asyncio.shield(task)


def encode_environment(env: Mapping[str, str]) -> dict[bytes, bytes]:
    return {os.fsencode(name): os.fsencode(value) for name, value in env.items()}


def become_subreaper() -> None:
    """Also undoes an inherited "ignore SIGCHLD", under which the kernel would reap our children before us."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        raise LaunchError("Holdfast watches workers through pidfds: it needs Linux 5.4 or newer") from error
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise LaunchError(f"this process cannot adopt its workers: {os.strerror(ctypes.get_errno())}")
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
