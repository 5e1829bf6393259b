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
from datetime import timedelta
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from holdfast.checks.accelerators import registry
from holdfast.errors import HoldfastError, UsageError
from holdfast.worker.collectives import sockets
from holdfast.worker.collectives.guarded import Guarded
from holdfast.worker.collectives.sockets import Mesh

# All members are known to be there when this begins: connecting takes milliseconds. Who is still at it when the view is
# over keeps a thread and some sockets until then.
CONNECT_TIMEOUT = timedelta(seconds=20)
DEVICE_TRIES_MAX = 8


class Communicator(Protocol):
    """One object serves one view."""

    def make(self, store: Store, rank: int, size: int, timeout: timedelta, mesh: Mesh) -> Any: ...

    def free(self, inner: Any) -> None: ...

    def drop(self, inner: Any) -> None:
        """Nobody uses it any more: let go of all it holds. On a thread that may wait."""


class Gloo:
    """Hangs are freed by shutting the mesh's sockets, by the caller, and by the guard around it where that is not
    enough: gloo's own abort() and shutdown() free nobody."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._device: Any = None
        self._address: sockets.Address = ("", 0)

    def make(self, store: Store, rank: int, size: int, timeout: timedelta, mesh: Mesh) -> Any:
        with self._lock:  # the view's groups share one listener
            if self._device is None:
                self._device, self._address = open_gloo_device()
                mesh.add_listener(self._address)
        mesh.add_peers(exchange(store, rank, size, self._address, timeout))
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [self._device]
        options._timeout = min(timeout, CONNECT_TIMEOUT)
        inner = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options)
        inner._set_default_timeout(timeout)
        inner._set_sequence_number_for_group()
        mesh.remember()
        return Guarded(inner)

    def free(self, inner: Any) -> None:
        inner.fail("the view is over")

    def drop(self, inner: Any) -> None:
        inner.bury()


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


class Nccl:
    """Not run by this project's tests: they have no GPU. The calls are those of torch 2.4 and later."""

    def make(self, store: Store, rank: int, size: int, timeout: timedelta, mesh: Mesh) -> Any:
        from torch._C._distributed_c10d import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        inner = ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)
        inner._set_sequence_number_for_group()
        return inner

    def free(self, inner: Any) -> None:
        """ncclCommAbort: kernels in flight end, and waiting threads raise."""
        inner.abort()

    def drop(self, inner: Any) -> None:
        return None


class Xccl:
    """Intel's. Not run by this project's tests: they have no such device."""

    def make(self, store: Store, rank: int, size: int, timeout: timedelta, mesh: Mesh) -> Any:
        from torch._C._distributed_c10d import ProcessGroupXCCL

        options = ProcessGroupXCCL.Options()
        options._timeout = timeout
        return ProcessGroupXCCL(PrefixStore("xccl", store), rank, size, options)

    def free(self, inner: Any) -> None:
        inner.abort()

    def drop(self, inner: Any) -> None:
        return None


class Hccl:
    """Huawei's, from the package torch_npu. Not run by this project's tests: they have no such device."""

    def make(self, store: Store, rank: int, size: int, timeout: timedelta, mesh: Mesh) -> Any:
        from torch_npu._C._distributed_c10d import ProcessGroupHCCL  # type: ignore[import-not-found]

        options = ProcessGroupHCCL.Options()
        options._timeout = timeout
        return ProcessGroupHCCL(PrefixStore("hccl", store), rank, size, options)

    def free(self, inner: Any) -> None:
        inner.abort_hccl_comm("the view is over") if hasattr(inner, "abort_hccl_comm") else inner.abort()

    def drop(self, inner: Any) -> None:
        return None


class Registered:
    """Whatever backend of torch's own registry a device's plug-in names."""

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def make(self, store: Store, rank: int, size: int, timeout: timedelta, mesh: Mesh) -> Any:
        if self._backend == dist.Backend.GLOO:
            return Gloo().make(store, rank, size, timeout, mesh)
        plugins: dict[str, Any] = dist.Backend._plugins
        if self._backend.upper() not in plugins:
            raise HoldfastError(f"torch knows no backend {self._backend}: import the package that registers it")
        return plugins[self._backend.upper()].creator_fn(PrefixStore(self._backend, store), rank, size, timeout)

    def free(self, inner: Any) -> None:
        if hasattr(inner, "fail"):
            inner.fail("the view is over")
        else:
            inner.abort()

    def drop(self, inner: Any) -> None:
        if hasattr(inner, "bury"):
            inner.bury()


@functools.cache
def available() -> dict[str, Callable[[], Communicator]]:
    """By device type: the CPU's, and the accelerator's if there is one and a plug-in for it."""
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


def of_accelerator(name: str) -> Callable[[], Communicator]:
    """What makes the communicators of a kind of processor."""
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
