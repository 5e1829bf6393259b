"""Two ends of a bulk line for tests, and a proxy between them that changes a byte on its way."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from holdfast.agent.replicas.blocks import checksums_of
from holdfast.agent.replicas.bulk import BulkClient, BulkServer
from holdfast.agent.replicas.guests import Guests, Incoming
from holdfast.errors import ReplicaError
from holdfast.wire.bulk import Contribute, Kept, Label, Read
from holdfast.wire.tls import Tls

TOKEN = "a token of sixteen characters or more"


def label(step: int = 1, content: bytes = b"", **changes: object) -> Label:
    known: dict[str, object] = {
        "node_id": "a", "seat": 0, "part": 0, "shards": 2, "shares": 1, "view": 1, "step": step,
        "size_bytes": len(content) or 1, "checksums": checksums_of(memoryview(content)) if content else b"",
    }  # fmt: skip
    return Label(**(known | changes))  # type: ignore[arg-type]


class GuestKeeper:
    """A keeper of nothing but guests."""

    def __init__(self, guests: Guests) -> None:
        self.guests = guests

    def offer(self, label: Label, whole: int) -> Incoming | None:
        return self.guests.offer(label, whole)

    def contribute(self, piece: Contribute) -> Incoming | None:
        raise ReplicaError("no parity here")

    def inventory(self) -> tuple[Kept, ...]:
        return tuple(Kept(kind="guest", label=held.label) for held in self.guests.held())

    def reading(self, wanted: Read) -> AbstractContextManager[memoryview]:
        return self.guests.reading(wanted.node_id, wanted.seat, wanted.view, wanted.step)


@contextlib.contextmanager
def bulk_server(root: Path, *, tls: Tls | None = None, token: str = TOKEN) -> Iterator[tuple[BulkServer, Guests]]:
    guests = Guests(root)
    guests.promise({"a": 4})
    server = BulkServer("127.0.0.1", token=token, tls=tls, keeper=GuestKeeper(guests))
    server.start()
    try:
        yield server, guests
    finally:
        server.close()


@contextlib.contextmanager
def bulk_client(port: int, *, tls: Tls | None = None, token: str = TOKEN) -> Iterator[BulkClient]:
    client = BulkClient("127.0.0.1", port, token=token, tls=tls)
    try:
        yield client
    finally:
        client.close()
        client.hang_up()


class Proxy:
    """Passes bytes on, both ways. Of those to the server it flips one bit at each of these offsets of the stream, or
    passes no more of them on from `stop_at`."""

    def __init__(self, port: int, flips: tuple[int, ...] = (), stop_at: int | None = None) -> None:
        self._target, self._flips, self._stop_at = port, set(flips), stop_at
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.stopped = threading.Event()
        self.passed = 0
        self._sockets: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            self._sockets += [near, far]
            for args in ((near, far, True), (far, near, False)):
                thread = threading.Thread(target=self._pass_on, args=args, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_upward: bool) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 20)):
                if is_upward:
                    for offset in [o for o in self._flips if self.passed <= o < self.passed + len(data)]:
                        data[offset - self.passed] ^= 1
                        self._flips.discard(offset)
                    self.passed += len(data)
                    if self._stop_at is not None and self.passed > self._stop_at:
                        self.stopped.set()
                        return
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5.0)
        for one in self._sockets:
            one.close()


def noise(size_bytes: int) -> bytes:
    return os.urandom(size_bytes)
