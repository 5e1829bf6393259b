"""A process for tests to kill: one end of a bulk line. `serve ROOT` says its port, `send PORT FILE STEP` sends a file.

Both say on stdout how far they are. The server waits for a line on stdin after each block, unless it is closed.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from agent.bulks import bulk_client, bulk_server, label
from holdfast.agent import guests


def serve(root: str) -> None:
    take = guests.Incoming.take

    def said(self: guests.Incoming, index: int) -> None:
        take(self, index)
        print("took", index, flush=True)
        sys.stdin.readline()

    guests.Incoming.take = said  # type: ignore[method-assign]
    with bulk_server(Path(root)) as (server, _):
        print("port", server.port, flush=True)
        signal.pause()


def send(port: str, file: str, step: str) -> None:
    image = Path(file).read_bytes()
    with bulk_client(int(port)) as client:
        client.put(label(int(step), image), memoryview(image))
    print("sent", flush=True)


if __name__ == "__main__":
    {"serve": serve, "send": send}[sys.argv[1]](*sys.argv[2:])
