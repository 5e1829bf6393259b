"""Processes for tests to kill: one holds images for node a, the other is node a, which seals one after the other.

hold ROOT [ADDRESS]      says `port N`
send DIRECTORY VIEW      is told `ADDRESS PORT` of its partner on stdin, as often as it changes; says `safe STEP`
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path

from holdfast.core.image_info import BLOCK_BYTES
from holdfast.core.orders import Peer
from holdfast.snapshots.replica_store import ReplicaStore
from holdfast.snapshots.replicator import Replicator
from holdfast.snapshots.transfer import BulkServer
from holdfast.wire import bulk_connection
from support.bulks import TOKEN, ReplicasOnly
from support.file_images import FileImages

SIZE = 2 * BLOCK_BYTES + 4_096


def content_of(view: int, step: int) -> bytes:
    """Every eight bytes of it say which it is."""
    word = view.to_bytes(2, "big") + step.to_bytes(6, "big")
    return word * (SIZE // len(word))


def hold(root: str, address: str = "127.0.0.1") -> None:
    replicas = ReplicaStore(Path(root))
    replicas.assign({"a": 1})
    server = BulkServer(address, token=TOKEN, tls=None, receiver=ReplicasOnly(replicas))
    server.start()
    print("port", server.port, flush=True)
    signal.pause()


async def send(directory: str, view: str) -> None:
    bulk_connection.STALL_S = bulk_connection.HANDSHAKE_S = 1.0
    images = FileImages(Path(directory))
    replicator = Replicator(
        "a", images, token=TOKEN, tls=None, on_safe=lambda _, __, version: print("safe", version[1], flush=True)
    )

    def told() -> None:
        address, port = sys.stdin.readline().split()
        replicator.follow([Peer(node_id="b", address=address, bulk_port=int(port), workers=1)])

    asyncio.get_running_loop().add_reader(sys.stdin, told)
    step = 0
    while True:
        step += 1
        images.seal(step, content_of(int(view), step), view=int(view), checked=step % 2 == 0)
        await asyncio.sleep(0.005)  # the time of a step


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.argv[1] == "hold":
        hold(*sys.argv[2:])
    else:
        asyncio.run(send(*sys.argv[2:]))
