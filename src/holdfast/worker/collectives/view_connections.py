"""One view as this process lives it: its store, its sockets and the communicators made under it.

The rule of ending. `end` may come from any thread and at any moment, also while a communicator is being made. So each
is made on a thread of its own, and the caller waits for whichever comes first, the communicator or the end. A maker
that comes too late finds no caller waiting and drops what it has made, or frees it, if it was seen connecting.

A view also ends when a communicator of a device is broken. With torch's watchdogs off (watchdogs.py) nothing else acts
on that: if a link breaks and no process dies, the main thread hangs on a kernel that never ends. A thread asks them.

What a view has made is freed on threads too (`Freeing`): an abort may block or raise, and the thread that ends it
is the one that listens to the agent. It is dropped by `retire`, again on a thread: a destructor waits for the
communicator's own threads, and nothing on the way of a recovery may wait for them.
"""

from __future__ import annotations

import functools
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from holdfast.errors import HoldfastError, ViewOverError
from holdfast.torch_compat import PrefixStore, Store, TCPStore
from holdfast.util.logs import get_logger
from holdfast.worker.collectives import communicators
from holdfast.worker.collectives.collective_retries import retries_allowed
from holdfast.worker.collectives.communicators import Communicator, GroupInfo
from holdfast.worker.collectives.local_only import LocalOnly
from holdfast.worker.collectives.sockets import Address, Mesh

ERROR_POLL_S = 0.2
"""The time between two looks at the errors of a device's communicators."""
MAKE_MARGIN_S = 200.0
"""What making a communicator may take beyond the group's time-out, within which all members come: for connecting, see
TORCH_NCCL_NONBLOCKING_TIMEOUT in watchdogs.py."""
log = get_logger(__name__)


def ignore(text: str) -> None:
    """Freeing.py has logged it."""


class ViewConnections:
    def __init__(
        self,
        view: int,
        store: Store | None,
        rank: int,
        world_size: int,
        on_stuck: Callable[[str], None] = ignore,
    ) -> None:
        """Without a store every collective is answered locally (local_only.py). `on_stuck` is called with a text if
        communicators cannot be freed."""
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
        self._on_stuck = on_stuck
        self._freeing: Freeing | None = None
        self._ended = threading.Event()
        self._asker: threading.Thread | None = None

    def check(self) -> None:
        if self.over is not None:
            raise ViewOverError(self.over)

    def make(
        self, name: str, device: str, rank: int, size: int, timeout: timedelta, ranks: tuple[int, ...] = ()
    ) -> Any:
        """Return a communicator for the group of this name and of these ranks; blocks until all its members have
        come. Raises TimeoutError if it cannot be made in time."""
        if self.store is None or size == 1:
            return LocalOnly(rank, size)
        promise: Future[Any] = Future()
        with self._lock:
            self.check()
            communicator = self._communicator(device)
            is_first = not self._waiting
            self._waiting.add(promise)
            self.mesh.add_store(store_addresses(self.store))
        index = torch.accelerator.current_device_index() if device != "cpu" else 0
        begun: list[Any] = []
        began = functools.partial(self._began, communicator, begun)
        about = GroupInfo(f"{name}/view/{self.view}", ranks, index, began, retries_allowed())
        prefix = f"view/{self.view}/{name}/{device}"
        arguments = (promise, communicator, begun, prefix, is_first, (rank, size, timeout, self.mesh, about))
        threading.Thread(target=self._make, args=arguments, name=f"holdfast-{name}", daemon=True).start()
        limit_s = timeout.total_seconds() + MAKE_MARGIN_S
        try:
            return promise.result(limit_s)
        except TimeoutError:
            if promise.done():  # what the maker raised
                raise
            raise TimeoutError(f"group {name} was not connected on {device} within {limit_s:g} s") from None
        finally:
            with self._lock:
                self._waiting.discard(promise)

    def _communicator(self, device: str) -> Communicator:
        if device not in self._communicators:
            if device not in communicators.available():
                raise HoldfastError(f"there is no communicator for tensors on {device}")
            self._communicators[device] = communicators.available()[device]()
        return self._communicators[device]

    def _began(self, communicator: Communicator, begun: list[Any], inner: Any) -> None:
        """Record a communicator that begins to connect: from now on it is freed with the others."""
        with self._lock:
            self.check()
            begun.append(inner)
            self._keep(communicator, inner)

    def _keep(self, communicator: Communicator, inner: Any) -> None:
        """With the lock held."""
        self._made.append((communicator, inner))
        if self._asker is None and hasattr(communicator, "error_of"):
            self._asker = threading.Thread(target=self._ask_for_errors, name="holdfast-errors", daemon=True)
            self._asker.start()

    def _make(
        self,
        promise: Future[Any],
        communicator: Communicator,
        begun: list[Any],
        prefix: str,
        is_first: bool,
        arguments: tuple[Any, ...],
    ) -> None:
        inner: Any = None
        try:
            assert self.store is not None
            # A client serves one request after another: while one group waits in it for its members, another could not
            # tell its own that it has come, and ranks that come to two groups in different orders would wait for one
            # another.
            client: Store = self.store if is_first else self.store.clone()  # type: ignore[attr-defined]
            inner = communicator.make(PrefixStore(prefix, client), *arguments)
        except BaseException as error:
            # Its frames hold the half-made communicator, and the error may be kept for long.
            settle(promise, error=error.with_traceback(None))
        else:
            with self._lock:
                is_wanted = self.over is None and settle(promise, inner)
                if is_wanted and not begun:
                    self._keep(communicator, inner)
            if not is_wanted and not begun:
                drop(communicator, inner)
        if self.over is not None and begun:
            free(communicator, begun[0])  # once more: it may have been freed before there was anything to abort

    def _ask_for_errors(self) -> None:
        while not self._ended.wait(ERROR_POLL_S):
            if text := self._error():
                self.end(text)

    def _error(self) -> str:
        """Return what a communicator knows to be broken though no collective has raised; or nothing."""
        with self._lock:
            made = list(self._made)
        for communicator, inner in made:
            error_of = getattr(communicator, "error_of", None)
            if error_of is not None and (text := error_of(inner)):
                return str(text)
        return ""

    def end(self, why: str) -> None:
        """Free everybody who hangs in a communicator of this view, or waits for one. From any thread; once. Returns
        before the communicators are freed, see `wait_until_freed`."""
        with self._shutting:
            with self._lock:
                if self.over is not None:
                    return
                self.over = why
                self._ended.set()
                waiting, made = list(self._waiting), list(self._made)
            for promise in waiting:
                settle(promise, error=ViewOverError(why))
            # Always: a communicator that connects in its first collective waits for the store without a promise.
            self.mesh.shut_stores()
            self.mesh.shut()
            self._freeing = Freeing(made, self._on_stuck)

    def check_communicators(self) -> None:
        """Raise if the view is over, or one of its communicators is broken without any collective having said so."""
        self.check()
        if text := self._error():
            raise dist.DistBackendError(text)
        self.check()

    def wait_until_freed(self) -> None:
        """Wait, if the view was ended, until its communicators are freed or have had their time."""
        self.wait_until_shut()
        if self._freeing is not None:
            self._freeing.wait()

    def wait_until_shut(self) -> None:
        """Wait, if the view is being ended right now, until no socket is looked for any more, as a newer view's come
        next."""
        with self._shutting:
            return

    def retire(self) -> threading.Thread:
        """Drop all that was made, on a thread of its own. The view must not be used any more."""
        self.over = self.over or f"view {self.view} is over"
        self._ended.set()
        thread = threading.Thread(target=self._drop, name="holdfast-retire", daemon=True)
        thread.start()
        return thread

    def _drop(self) -> None:
        # First the sockets: a destructor waits for collectives in flight, and those for peers that may never answer.
        # Known ones only: a newer view's are there by now.
        with self._lock:
            made, self._made = self._made, []
            self._communicators.clear()
        for _, inner in made:
            if hasattr(inner, "leave"):  # else it would take the end of its connections for a break
                inner.leave()
        self.mesh.shut(unknown=False)
        for communicator, inner in made:
            drop(communicator, inner)


def drop(communicator: Communicator, inner: Any) -> None:
    """Let go of a communicator; what it raises keeps no other from being dropped."""
    try:
        communicator.drop(inner)
    except Exception as error:  # a vendor's library may raise anything
        log.error("communicator-drop-failed", "dropping a communicator of a view that is over failed", error=error)


def free(communicator: Communicator, inner: Any) -> None:
    """Free a communicator whose maker came back after the end of its view. No caller waits for it."""
    try:
        communicator.free(inner)
    except Exception as error:  # as above
        text = "freeing a communicator that was connecting when its view ended failed"
        log.error("communicator-free-failed", text, error=error)


def settle(promise: Future[Any], inner: Any = None, error: BaseException | None = None) -> bool:
    """Set the outcome; return whether it was still waited for."""
    try:
        promise.set_exception(error) if error is not None else promise.set_result(inner)
    except InvalidStateError:
        return False
    return True


def store_addresses(store: Store) -> set[Address]:
    """Return where a TCP store's server is; nothing for other kinds, which have no connection that one could wait
    for."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return set()
    try:
        return {(ipaddress.ip_address(store.host).compressed, store.port)}
    except ValueError:  # a name, which has been looked up a moment ago
        found = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_STREAM)
        return {(str(name[0]), store.port) for *_, name in found}


# --- Freeing the communicators of a view that is over: all at once, each on a thread of its own, with a time limit.
#
# Why threads. An abort may block: torch's `abort()` of NCCL waits for up to the group's time-out, and two communicators
# of the same device can wait for each other, because one's memory is released only when the other's kernels have ended
# (pytorch#119797). So all aborts are under way at the same time, and none of them can keep another from beginning.
# torch groups them with `_group_start` and `_group_end` instead; a group is the calling thread's, and since 2.5 torch
# itself aborts on a further thread, which the group does not reach.
#
# A communicator that raised, or was not free in time, may still have kernels on the device that write into tensors, or
# a thread that hangs in it. Nothing in this process can help that: `on_stuck` ends the process.

log = get_logger(__name__)

FREE_TIMEOUT_S = 20.0
"""An abort takes milliseconds to about a second; one that has not come back after this hangs in a driver."""


class Freer(Protocol):
    """What frees a communicator (communicators.Communicator)."""

    def free(self, inner: Any) -> None: ...


class Freeing:
    """The freeing of all communicators of one view."""

    def __init__(
        self,
        made: Sequence[tuple[Freer, Any]],
        on_stuck: Callable[[str], None],
        timeout_s: float = FREE_TIMEOUT_S,
    ) -> None:
        self._on_stuck = on_stuck
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._problems: list[str] = []
        self._threads = [
            threading.Thread(target=self._free, args=pair, name=f"holdfast-free-{at}", daemon=True)
            for at, pair in enumerate(made)
        ]
        for thread in self._threads:
            thread.start()
        if self._threads:
            threading.Thread(target=self._watch, name="holdfast-free-watch", daemon=True).start()

    def wait(self) -> None:
        """Wait until all are freed, or the time is up."""
        for thread in self._threads:
            thread.join(max(0.0, self._deadline - time.monotonic()))

    def _free(self, communicator: Freer, inner: Any) -> None:
        try:
            communicator.free(inner)
        except Exception as error:  # a vendor's library may raise anything; the others are freed all the same
            self._problems.append(f"{type(error).__name__}: {error}")

    def _watch(self) -> None:
        self.wait()
        hanging = sum(thread.is_alive() for thread in self._threads)
        problems = list(self._problems)
        if hanging:
            problems.append(f"{hanging} of {len(self._threads)} did not return within {self._timeout_s:g} s")
        if problems:
            text = f"communicators of a view that is over cannot be freed ({'; '.join(problems)})"
            log.error("communicators-stuck", f"{text}: this process must be replaced")
            self._on_stuck(text)
