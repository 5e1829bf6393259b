"""One view as this process lives it: its store, its sockets and the communicators made under it.

The rule of ending. `end` may come from any thread and at any moment, also while a communicator is being made. So each
is made on a thread of its own, and whoever wants it waits for whichever comes first, the communicator or the end. A
maker that comes too late finds nobody waiting and drops what it has made.

What a view has made is dropped by `retire`, on a thread too: a destructor waits for the communicator's own threads, and
nothing on the way of a recovery may wait for them.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from holdfast.errors import HoldfastError, ViewOverError
from holdfast.worker.collectives import communicators
from holdfast.worker.collectives.communicators import Communicator
from holdfast.worker.collectives.make_believe import MakeBelieve
from holdfast.worker.collectives.sockets import Address, Mesh


class Realm:
    def __init__(self, view: int, store: Store | None, rank: int, world_size: int) -> None:
        """Without a store all is make-believe."""
        self.view = view
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.mesh = Mesh()
        self.over: str | None = None
        self._lock = threading.Lock()
        self._shutting = threading.Lock()
        self._communicators: dict[str, Communicator] = {}
        self._waiting: set[Future[Any]] = set()
        self._made: list[tuple[Communicator, Any]] = []

    def check(self) -> None:
        if self.over is not None:
            raise ViewOverError(self.over)

    def make(self, name: str, device: str, rank: int, size: int, timeout: timedelta) -> Any:
        """A communicator for the group of this name; blocks until all its members have come."""
        if self.store is None or size == 1:
            return MakeBelieve(rank, size)
        store = PrefixStore(f"view/{self.view}/{name}/{device}", self.store)
        promise: Future[Any] = Future()
        with self._lock:
            self.check()
            communicator = self._communicator(device)
            self._waiting.add(promise)
            self.mesh.add_store(store_addresses(self.store))
        arguments = (promise, communicator, (store, rank, size, timeout, self.mesh))
        threading.Thread(target=self._make, args=arguments, name=f"holdfast-{name}", daemon=True).start()
        try:
            return promise.result()
        finally:
            with self._lock:
                self._waiting.discard(promise)

    def _communicator(self, device: str) -> Communicator:
        if device not in self._communicators:
            if device not in communicators.available():
                raise HoldfastError(f"there is no communicator for tensors on {device}")
            self._communicators[device] = communicators.available()[device]()
        return self._communicators[device]

    def _make(self, promise: Future[Any], communicator: Communicator, arguments: tuple[Any, ...]) -> None:
        try:
            inner = communicator.make(*arguments)
        except BaseException as error:
            # Its frames hold the half-made communicator, and the error may be kept for long.
            settle(promise, error=error.with_traceback(None))
            return
        with self._lock:
            is_wanted = self.over is None and settle(promise, inner)
            if is_wanted:
                self._made.append((communicator, inner))
        if not is_wanted:
            communicator.drop(inner)

    def end(self, why: str) -> None:
        """Free everybody who hangs in a communicator of this view, or waits for one. From any thread; once."""
        with self._shutting:
            with self._lock:
                if self.over is not None:
                    return
                self.over = why
                waiting, made = list(self._waiting), list(self._made)
            # All are told; who has got a communicator just now has no more need of the store's connection.
            freed = [settle(promise, error=ViewOverError(why)) for promise in waiting]
            if any(freed):
                self.mesh.shut_stores()
            self.mesh.shut()
        for communicator, inner in made:
            communicator.free(inner)

    def wait_until_shut(self) -> None:
        """If it is being ended right now: until no socket is looked for any more, as a newer view's come next."""
        with self._shutting:
            return

    def retire(self) -> threading.Thread:
        """Drop all that was made, on a thread of its own. Nobody may use this view any more."""
        self.over = self.over or f"view {self.view} is over"
        thread = threading.Thread(target=self._drop, name="holdfast-retire", daemon=True)
        thread.start()
        return thread

    def _drop(self) -> None:
        # First the sockets: a destructor waits for collectives in flight, and those for peers that may never answer.
        # Known ones only: a newer view's are there by now.
        self.mesh.shut(unknown=False)
        with self._lock:
            made, self._made = self._made, []
            self._communicators.clear()
        for communicator, inner in made:
            communicator.drop(inner)


def settle(promise: Future[Any], inner: Any = None, error: BaseException | None = None) -> bool:
    """Whether anybody still waited."""
    try:
        promise.set_exception(error) if error is not None else promise.set_result(inner)
    except InvalidStateError:
        return False
    return True


def store_addresses(store: Store) -> set[Address]:
    """Where a TCP store's server is; nothing for other kinds, which have no connection that one could wait for."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return set()
    try:
        return {(ipaddress.ip_address(store.host).compressed, store.port)}
    except ValueError:  # a name, which has been looked up a moment ago
        found = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_STREAM)
        return {(str(name[0]), store.port) for *_, name in found}
