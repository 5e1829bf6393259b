"""What an elastic group communicates through, by device: gloo on the CPU, the vendor's library on an accelerator.

A communicator is a plug-in with two duties. `make` connects the members of one group in one view, blocking until all
are there; it runs on a thread of its own. `free` is called from any thread when the view is over and must make
everybody who hangs in `inner` return at once. What `make` returns speaks the methods of torch's `Backend`.

Which one a kind of device has is said by its plug-in (checks/accelerators): `communicator` names a class that is made
without arguments, or nothing, and then the backend that torch knows by the plug-in's `backend` is used.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from holdfast import torch_compat
from holdfast.checks.accelerators import registry
from holdfast.errors import HoldfastError, UsageError
from holdfast.torch_compat import PrefixStore, Store
from holdfast.util.logs import get_logger
from holdfast.worker.collectives import gloo_rest, sockets
from holdfast.worker.collectives.guarded import Guarded
from holdfast.worker.collectives.repeatable_gloo import Connected, RepeatableGloo, RetrySettings
from holdfast.worker.collectives.sockets import Mesh

# All members are known to be there when this begins: connecting takes milliseconds. Who is still at it when the view is
# over keeps a thread and some sockets until then.
CONNECT_TIMEOUT_S = 20.0
RANKS_IN_TIME = 500
RANKS_PER_S = 50.0
"""A rank connects with every other and looks all their addresses up in one store, so this takes longer with more: the
time grows by a second for each 50 ranks beyond 500. An estimate: no group of that size was there to measure. Only what
a script itself does on the CPU has such groups: commits are agreed by a tree then (agreement_tree.py)."""
MANY_RANKS = 1_000
"""From here on connecting each with each is known to be slow, and the log says so."""
DEVICE_TRIES_MAX = 8

log = get_logger(__name__)


@dataclass(frozen=True)
class GroupInfo:
    """The group that a communicator is made for."""

    name: str = ""
    ranks: tuple[int, ...] = ()
    """Its members, by their ranks in the world; empty: not known."""
    device_index: int = 0
    """The current device of the thread that wants the communicator: that of the making thread is always 0."""
    began: Callable[[Any], None] = lambda inner: None
    """To be called by `make` as soon as there is something that `free` can free, while it is still connecting. Raises
    if the view is over already."""
    retries: int = 0
    """How often a collective whose connection broke may be run again, by communicators that can; see
    collective_retries.py."""


class Communicator(Protocol):
    """One object serves one view."""

    def make(self, store: Store, rank: int, size: int, timeout: timedelta, mesh: Mesh, about: GroupInfo) -> Any: ...

    def free(self, inner: Any) -> None: ...

    def drop(self, inner: Any) -> None:
        """Let go of all that a communicator holds, when it is not used any more; called on a thread that may wait."""


# A communicator may also have `error_of(inner) -> str`: what its own threads know to be broken, or nothing. A thread of
# the view asks for it all the time (view_connections.py), and so does each commit of a state on such a device.


def error_by_torch(inner: Any) -> str:
    """Return what torch's own watchdog has seen, where a backend has one that can be asked."""
    if not hasattr(inner, "get_error"):
        return ""
    try:
        error = torch_compat.backend_error(inner)
    except RuntimeError as unsupported:  # what torch's own base class answers
        if "does not support" in str(unsupported):
            return ""
        raise
    return f"the communicator failed: {error}" if error else ""


def connect_now(inner: Any, kind: str, about: GroupInfo, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Connect what torch would connect in the first collective, on the main thread, where it could not be freed.

    What `eager_connect_single_device` of NCCL only begins is waited for by the thread that uses it next, with a
    lock in torch that `abort` needs too. So it is not used before all members have begun: a member that dies until then
    (it may be making its context) frees the others at once. Then it is used, here: when this returns it is connected,
    and no later abort meets that lock."""
    about.began(inner)
    device = torch.device(kind, about.device_index)
    inner.eager_connect_single_device(device)
    store.set(f"begun/{rank}", "1")
    store.wait([f"begun/{other}" for other in range(size)], timeout)
    inner.allreduce([first_tensor(device)]).wait()
    return inner


def first_tensor(device: torch.device) -> torch.Tensor:
    """Return what a new communicator sums first."""
    return torch.ones(1, device=device)


class Gloo:
    """Hangs are freed by shutting the mesh's sockets, by the caller, and by the guard around it where that is not
    enough: gloo's own abort() and shutdown() free no waiting thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._device: Any = None
        self._address: sockets.Address = ("", 0)

    def make(self, store: Store, rank: int, size: int, timeout: timedelta, mesh: Mesh, about: GroupInfo) -> Any:
        with self._lock:  # the view's groups share one listener
            if self._device is None:
                self._device, self._address = open_gloo_device()
                mesh.add_listener(self._address)
        connected = self._connect(store, rank, size, timeout, mesh, (self._device, self._address))
        if not about.retries:
            return connected.guarded

        def reconnect(again: Store, part: Mesh, limit: timedelta) -> Connected:
            """Connect with a listener of its own: the sockets of several groups are not to be taken for each other."""
            with self._lock:
                opened = open_gloo_device()
            part.add_listener(opened[1])
            return self._connect(again, rank, size, timeout, part, opened, limit)

        settings = RetrySettings(about.retries, rank, size, store, mesh, about.name)
        return RepeatableGloo(connected, reconnect, settings)

    def _connect(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        mesh: Mesh,
        opened: tuple[Any, sockets.Address],
        limit: timedelta | None = None,
    ) -> Connected:
        """Connect through this listener; all members must do so, within `limit` if there is one."""
        mesh.add_peers(exchange(store, rank, size, opened[1], limit or timeout))
        connect = min(limit or timeout, connect_timeout(size))
        if size >= MANY_RANKS and rank == 0:
            log.warning(
                "many-ranks",
                f"{size} ranks connect with each other for a collective of the script on tensors of the CPU, which may"
                f" take up to {connect.total_seconds():.0f} s in each view: it was not tested with so many",
            )
        before = gloo_rest.threads()
        inner = torch_compat.make_gloo(store, rank, size, opened[0], connect, timeout)
        return Connected(Guarded(inner), mesh.remember(), gloo_rest.threads() - before)

    def free(self, inner: Any) -> None:
        inner.fail("the view is over")

    def drop(self, inner: Any) -> None:
        inner.release()


def connect_timeout(size: int) -> timedelta:
    """Return how long the members of a group may take to connect with one another."""
    return timedelta(seconds=CONNECT_TIMEOUT_S + max(size - RANKS_IN_TIME, 0) / RANKS_PER_S)


def open_gloo_device() -> tuple[Any, sockets.Address]:
    """Gloo opens a listener and does not say where. If another thread opens one too just now, try again."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    for _ in range(DEVICE_TRIES_MAX):
        before = sockets.listeners()
        device: Any
        if interface:
            device = ProcessGroupGloo.create_device(interface=interface)
        else:
            device = ProcessGroupGloo.create_default_device()
        new = sockets.listeners() - before
        if len(new) == 1:
            return device, new.pop()
    raise HoldfastError("gloo's listener cannot be found among the sockets of this process")


class TorchCommunicator:
    """What the communicators have in common that torch watches itself, and frees by its `abort` (of NCCL:
    ncclCommAbort): kernels in flight end, and waiting threads raise."""

    def error_of(self, inner: Any) -> str:
        """Return the error that torch's watchdog has seen, or nothing."""
        return error_by_torch(inner)

    def __init__(self) -> None:
        self._freed: set[int] = set()
        """id() of those that were aborted."""

    def free(self, inner: Any) -> None:
        self._freed.add(id(inner))
        inner.abort()

    def drop(self, inner: Any) -> None:
        """Give its memory on the device back, after a view that ended well: else the destructor does it some time
        later, by an abort."""
        if id(inner) not in self._freed and hasattr(inner, "shutdown"):
            inner.shutdown()


class Nccl(TorchCommunicator):
    """Not run on a GPU by this project's tests, which have none: they run it with a simulated ProcessGroupNCCL, the
    names of which are compared with torch's. An abort is reliable from torch 2.7 and NCCL 2.26 on;
    NCCL 2.26 itself may hang when it connects without blocking (pytorch#153960), so have a later one.

    It connects here, and not in the first collective as is torch's way: on the main thread, and blocking, nothing could
    free it. `blocking = 0` makes ncclCommInitRank return at once; who uses the communicator before it is connected
    polls it, up to TORCH_NCCL_NONBLOCKING_TIMEOUT (watchdogs.py), and an abort waits for that."""

    NAMES = (
        *("abort", "shutdown", "get_error", "eager_connect_single_device", "supports_coalescing"),
        *("_start_coalescing", "_end_coalescing", "_set_sequence_number_for_group"),
    )
    """What is used of ProcessGroupNCCL beside its collectives, most of it only after a fault."""

    @classmethod
    def lacking(cls) -> list[str]:
        """Return what this torch does not have of all that is used."""
        kind = getattr(dist, "ProcessGroupNCCL", None)
        return ["ProcessGroupNCCL"] if kind is None else [name for name in cls.NAMES if not hasattr(kind, name)]

    def make(self, store: Store, rank: int, size: int, timeout: timedelta, mesh: Mesh, about: GroupInfo) -> Any:
        if lacking := self.lacking():  # now, not when the first fault needs it
            raise torch_compat.version_error("NCCL in a session", AttributeError(", ".join(lacking)))
        inner = torch_compat.make_nccl(store, rank, size, timeout, about.name, about.ranks)
        return connect_now(inner, "cuda", about, store, rank, size, timeout)


class Xccl(TorchCommunicator):
    """Intel's. Not run by this project's tests: they have no such device."""

    def make(self, store: Store, rank: int, size: int, timeout: timedelta, mesh: Mesh, about: GroupInfo) -> Any:
        inner = torch_compat.make_xccl(store, rank, size, timeout)
        return connect_now(inner, "xpu", about, store, rank, size, timeout)


class Hccl(TorchCommunicator):
    """Huawei's, from the package torch_npu. Not run by this project's tests: they have no such device."""

    def make(self, store: Store, rank: int, size: int, timeout: timedelta, mesh: Mesh, about: GroupInfo) -> Any:
        inner = torch_compat.make_hccl(store, rank, size, timeout)
        return connect_now(inner, "npu", about, store, rank, size, timeout)

    def free(self, inner: Any) -> None:
        self._freed.add(id(inner))
        inner.abort_hccl_comm("the view is over") if hasattr(inner, "abort_hccl_comm") else inner.abort()


class Registered(TorchCommunicator):
    """Whatever backend of torch's own registry a device's plug-in names."""

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def make(self, store: Store, rank: int, size: int, timeout: timedelta, mesh: Mesh, about: GroupInfo) -> Any:
        if self._backend == dist.Backend.GLOO:
            return Gloo().make(store, rank, size, timeout, mesh, about)
        create = torch_compat.backend_creator(self._backend)
        if create is None:
            raise HoldfastError(f"torch knows no backend {self._backend}: import the package that registers it")
        inner = create(PrefixStore(self._backend, store), rank, size, timeout)
        about.began(inner)
        return inner

    def free(self, inner: Any) -> None:
        if hasattr(inner, "fail"):
            inner.fail("the view is over")
        else:
            inner.abort()

    def drop(self, inner: Any) -> None:
        if hasattr(inner, "release"):
            inner.release()


@functools.cache
def available() -> dict[str, Callable[[], Communicator]]:
    """Return what makes communicators, by device type: the CPU's, and the accelerator's if there is one and a plug-in
    for it."""
    devices = ["cpu"]
    if torch.accelerator.is_available() and (accelerator := torch.accelerator.current_accelerator()) is not None:
        devices.append(accelerator.type)
    found: dict[str, Callable[[], Communicator]] = {}
    for device in devices:
        try:
            found[device] = of_accelerator(device)
        except UsageError:  # no plug-in: its tensors cannot be communicated, but those of the CPU can
            continue
    return found


@functools.cache
def connects_in_rebuild(device: str) -> bool:
    """Whether groups connect on this type of device as soon as a view has come about, and not when first used: on one
    that runs behind its host, connecting in the middle of a step may wait for kernels that wait for a peer."""
    try:
        return registry.load(device).runs_behind_host
    except UsageError:
        return False


def of_accelerator(name: str) -> Callable[[], Communicator]:
    """Return what makes the communicators of a kind of processor."""
    plug_in = registry.load(name)
    if not plug_in.communicator:
        return functools.partial(Registered, plug_in.backend)
    return registry.resolve(plug_in.communicator)


def exchange(store: Store, rank: int, size: int, own: sockets.Address, timeout: timedelta) -> set[sockets.Address]:
    """Tell the others where this one listens; returns when all have, with their addresses."""
    store.set(f"at/{rank}", msgspec.json.encode(own).decode())
    others = [f"at/{other}" for other in range(size) if other != rank]
    store.wait(others, timeout)
    return {msgspec.json.decode(value, type=sockets.Address) for value in values(store, others)}


def values(store: Store, keys: list[str]) -> Iterable[bytes]:
    if store.has_extended_api():  # type: ignore[attr-defined]
        return store.multi_get(keys)
    return [store.get(key) for key in keys]
