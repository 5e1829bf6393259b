"""Keeps the rendezvous stores of views, in a process that outlives workers and has torch, which the agent has not.

The agent binds and listens before it asks, so a worker that connects at once waits in the backlog instead of failing.
One store a view: a store that served an older view would answer with its keys.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import msgspec

from holdfast.wire.launch_messages import (
    CloseStore,
    FrameReader,
    OpenStore,
    StoreClosed,
    StoreFailed,
    StoreHostRequest,
    StoreOpened,
    send,
)

if TYPE_CHECKING:
    from holdfast.torch_compat import TCPStore

# A view's store is closed when the next view is decided; this many open means that one was forgotten.
STORES_MAX = 256


class StoreHost:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._stores: dict[int, TCPStore] = {}

    def serve(self) -> None:
        """Host the store until the agent's end of the socket is closed, by the agent or by its death."""
        reader = FrameReader(msgspec.msgpack.Decoder(StoreHostRequest))
        while reader.receive(self._control):
            for request, descriptors in reader.frames():
                match request:
                    case OpenStore():
                        send(self._control, self._open(request, descriptors[0]))
                    case CloseStore():
                        self._stores.pop(request.view, None)  # the last reference: its port is closed on return
                        send(self._control, StoreClosed(request.view))
        os._exit(0)

    def _open(self, request: OpenStore, listener: int) -> StoreOpened | StoreFailed:
        view = request.view
        try:
            if view in self._stores or len(self._stores) >= STORES_MAX:
                raise RuntimeError(f"the view has a store already, or {STORES_MAX} are open")
            self._stores[view] = open_store(listener, request.port)
        except Exception as error:  # torch raises what it likes, and importing it may fail too
            return StoreFailed(view, f"no store for view {view} at {request.host}:{request.port}: {error}")
        finally:
            os.close(listener)
        return StoreOpened(view)


def open_store(listener: int, port: int) -> TCPStore:
    """Open the store on a descriptor of its own: it closes the one it is given, sooner or later."""
    from torch.distributed import TCPStore

    address = own_address(listener)
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener))


def own_address(listener: int) -> str:
    """Return where the store's own client finds it. Not the name that workers use: it need not resolve, or lead back,
    here."""
    with socket.socket(fileno=os.dup(listener)) as probe:
        address = str(probe.getsockname()[0])
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
