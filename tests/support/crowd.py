"""Ranks for tests: processes forked from this one, which has imported torch already, and a store they meet at."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.fsdp  # what all ranks need is imported once, before they are forked
from torch.distributed.device_mesh import init_device_mesh  # noqa: F401

from holdfast.worker.collectives import groups

DEADLINE_S = 60.0
STACKS_AFTER_S = 20.0
TIMEOUT = timedelta(seconds=45)
# torch looks the store's address up backwards whenever it connects: where a name server is slow, five seconds a time.
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
FORK = multiprocessing.get_context("fork")


class Member:
    """One rank's view of the test."""

    def __init__(self, index: int, ports: tuple[int, int]) -> None:
        self.index = index
        self._port, self._meeting_port = ports
        self.store = self.connect()
        self._meeting = self._connect_meeting()
        """The client of the newest view's store, whose connections are broken when the view is ended."""

    def connect(self) -> dist.TCPStore:
        return dist.TCPStore("127.0.0.1", self._port, is_master=False, timeout=TIMEOUT)

    def _connect_meeting(self) -> dist.TCPStore:
        return dist.TCPStore("127.0.0.1", self._meeting_port, is_master=False, timeout=TIMEOUT)

    def start(self, rank: int, size: int, view: int = 1, *, believe: bool = False) -> None:
        groups.start(rank, size, None if believe else self._meeting, view=view, timeout=TIMEOUT)

    def switch(self, rank: int, size: int, view: int) -> None:
        self._meeting = self._connect_meeting()
        groups.switch(self._meeting, rank, size, view=view)

    def say(self, key: str) -> None:
        self.store.set(key, "yes")

    def hear(self, *keys: str) -> None:
        self.store.wait(list(keys), TIMEOUT)


class Crowd:
    """Who forks must have no threads that work meanwhile: what they have locked stays locked in the child. A store's
    server has one, and looks up the name of everybody who connects, so it is in a process of its own."""

    def __init__(self) -> None:
        ours, theirs = FORK.Pipe()
        self._store_host = FORK.Process(target=keep_store, args=(theirs,))
        self._store_host.start()
        self._ports = ours.recv()
        ours.close()
        theirs.close()
        self._store = dist.TCPStore("127.0.0.1", self._ports[0], is_master=False, timeout=TIMEOUT)
        self._ranks: list[tuple[Any, Connection]] = []

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        self._store_host.kill()
        self._store_host.join()

    def add(self, function: Callable[..., Any], *arguments: Any) -> int:
        ours, theirs = FORK.Pipe()
        index = len(self._ranks)
        process = FORK.Process(target=live, args=(theirs, self._ports, index, function, arguments))
        process.start()
        theirs.close()
        self._ranks.append((process, ours))
        return index

    def hear(self, *keys: str) -> None:
        self._store.wait(list(keys), timedelta(seconds=DEADLINE_S))

    def say(self, key: str) -> None:
        self._store.set(key, "yes")

    def kill(self, index: int) -> None:
        os.kill(self._ranks[index][0].pid, signal.SIGKILL)
        self._ranks[index][0].join()

    def results(self) -> list[Any]:
        """What each function returned; None for a rank that was killed."""
        deadline = time.monotonic() + DEADLINE_S
        return [self._result(index, deadline) for index in range(len(self._ranks))]

    def _result(self, index: int, deadline: float) -> Any:
        process, connection = self._ranks[index]
        assert connection.poll(max(0.0, deadline - time.monotonic())), f"rank {index} has not come back"
        try:
            outcome, value = connection.recv()
        except EOFError:
            process.join()
            assert process.exitcode == -signal.SIGKILL, f"rank {index} ended with {process.exitcode}"
            return None
        assert outcome == "returned", f"rank {index}: {value}"
        return value


def keep_store(connection: Connection) -> None:
    gc.freeze()
    servers = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    connection.send((servers[0].port, servers[1].port))  # one to talk, one for the views
    while True:
        signal.pause()  # until it is killed


def together(function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    """The function on so many ranks at once."""
    with Crowd() as crowd:
        for rank in range(size):
            crowd.add(function, rank, size, *arguments)
        return crowd.results()


def live(
    connection: Connection,
    ports: tuple[int, int],
    index: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    gc.freeze()  # what other tests left for the collector is the parent's: destroying it here would join its threads
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(STACKS_AFTER_S)
    warnings.simplefilter("ignore", FutureWarning)  # torch renames its collectives; both names are tried
    try:
        message = ("returned", function(Member(index, ports), *arguments))
    except BaseException:
        message = ("raised", traceback.format_exc())
    connection.send(message)
    sys.stderr.flush()
    os._exit(0)  # nothing of the parent's is cleaned up here
