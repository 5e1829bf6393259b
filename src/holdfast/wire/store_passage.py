"""Clients of torch's rendezvous store that come to the master's port.

Under torchrun the store of a static rendezvous listens at `--master-addr` and `--master-port`, and scripts may be told
that address in other ways than by MASTER_PORT (`init_process_group("tcp://HOST:PORT")`). Here the master listens there.
Torch's clients begin with bytes that no other client sends, so they are recognised and passed on, byte by byte, to the
store of the view in force. They are not asked for the job's token, as torch's own store asks for none. Their number is
limited by descriptors, so that agents find some. Where the control port has TLS nothing is passed on.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Callable

VALIDATE = b"\x00\xce\xf7\x85\x3c"
"""The first query of a client, with its magic number. Seen in torch 2.13."""
CONNECT_TIMEOUT_S = 5.0
CHUNK_BYTES = 64 * 1024
DESCRIPTORS_EACH = 2
SHARE_OF_DESCRIPTORS = 4

Address = tuple[str, int]


class StorePassage:
    """Passes clients on to the store that `store` returns; None: there is no view now, and clients try again."""

    def __init__(self, store: Callable[[], Address | None]) -> None:
        self._store = store
        self._count = 0
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._count_max = max(descriptors // SHARE_OF_DESCRIPTORS // DESCRIPTORS_EACH, 8)

    async def carry(self, client: socket.socket) -> str:
        """Carry all bytes of a connection in both directions until it ends; return why not, if not."""
        address = self._store()
        if address is None:
            return "it is a client of torch's rendezvous store, and there is no view now"
        if self._count >= self._count_max:
            return f"{self._count_max} clients of torch's rendezvous store are connected already"
        self._count += 1
        try:
            return await _carry(client, address)
        finally:
            self._count -= 1


async def _carry(client: socket.socket, address: Address) -> str:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            found = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
            family, kind, protocol, _, resolved = found[0]
            store = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
            with contextlib.ExitStack() as undo:
                undo.callback(store.close)
                await loop.sock_connect(store, resolved)
                undo.pop_all()
    except OSError as error:  # TimeoutError too
        return f"the rendezvous store at {address[0]}:{address[1]} cannot be reached: {error.strerror or error}"
    with store:
        for end in (client, store):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.gather(_copy(client, store), _copy(store, client))
    return ""


async def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy until the source ends, and then end the target's half; a broken connection ends both halves."""
    loop = asyncio.get_running_loop()
    try:
        while data := await loop.sock_recv(source, CHUNK_BYTES):
            await loop.sock_sendall(target, data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
