"""Two ends of a bulk line for tests, and a proxy between them that changes a byte on its way."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from holdfast.core.image_info import ImageInfo
from holdfast.errors import ReplicaError
from holdfast.snapshots.replica_store import IncomingReplica, ReplicaStore
from holdfast.snapshots.transfer import BulkClient, BulkServer
from holdfast.wire.bulk_messages import Contribute, ReadBlocks, StoredReplica
from holdfast.wire.tls import Tls
from support.slot_records import checksums_of

TOKEN = "a token of sixteen characters or more"


def label(step: int = 1, content: bytes = b"", **changes: Any) -> ImageInfo:
    known: dict[str, Any] = {
        "node_id": "a", "local_rank": 0, "part": 0, "shards": 2, "shares": 1, "view": 1, "step": step,
        "size_bytes": len(content) or 1, "checksums": checksums_of(content) if content else b"",
    }  # fmt: skip
    return ImageInfo(**(known | changes))


class ReplicasOnly:
    """A receiver of replicas and of nothing else."""

    def __init__(self, replicas: ReplicaStore) -> None:
        self.replicas = replicas

    def offer(self, image: ImageInfo, complete_step: int) -> IncomingReplica | None:
        return self.replicas.offer(image, complete_step)

    def contribute(self, contribution: Contribute) -> IncomingReplica | None:
        raise ReplicaError("no parity here")

    def inventory(self) -> tuple[StoredReplica, ...]:
        return tuple(StoredReplica(kind="replica", image=held.info) for held in self.replicas.images())

    def reading(self, wanted: ReadBlocks) -> AbstractContextManager[memoryview]:
        return self.replicas.reading(wanted.node_id, wanted.local_rank, wanted.view, wanted.step)


@contextlib.contextmanager
def bulk_server(root: Path, *, tls: Tls | None = None, token: str = TOKEN) -> Iterator[tuple[BulkServer, ReplicaStore]]:
    replicas = ReplicaStore(root)
    replicas.assign({"a": 4})
    server = BulkServer("127.0.0.1", token=token, tls=tls, receiver=ReplicasOnly(replicas))
    server.start()
    try:
        yield server, replicas
    finally:
        server.close()


@contextlib.contextmanager
def bulk_client(port: int, *, tls: Tls | None = None, token: str = TOKEN) -> Iterator[BulkClient]:
    client = BulkClient("127.0.0.1", port, token=token, tls=tls)
    try:
        yield client
    finally:
        client.close()
        client.disconnect()


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
