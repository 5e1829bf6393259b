"""A process for tests to kill: one end of a bulk line. `serve ROOT` says its port, `send PORT FILE STEP` sends a file.

Both say on stdout how far they are. The server waits for a line on stdin after each block, unless it is closed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.snapshots import replica_store
from support.bulks import bulk_client, bulk_server, label


def serve(root: str) -> None:
    accept = replica_store.IncomingReplica.accept

    def said(self: replica_store.IncomingReplica, index: int) -> None:
        accept(self, index)
        print("took", index, flush=True)
        sys.stdin.readline()

    replica_store.IncomingReplica.accept = said  # type: ignore[method-assign]
    with bulk_server(Path(root)) as (server, _):
        print("port", server.port, flush=True)
        signal.pause()


def send(port: str, file: str, step: str) -> None:
    image = Path(file).read_bytes()
    with bulk_client(int(port)) as client:
        client.put(label(int(step), image), memoryview(image))
    print("sent", flush=True)


# --- for the tests that start them


@contextlib.contextmanager
def started(program: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """It is gone afterwards."""
    process = subprocess.Popen(
        [sys.executable, str(program), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def word(process: subprocess.Popen[str], wanted: str) -> str:
    """Until it says this; what it says of it."""
    assert process.stdout is not None
    for line in process.stdout:
        first, _, rest = line.strip().partition(" ")
        if first == wanted:
            return rest
    raise AssertionError(f"it ended before it said {wanted}")


def tell(process: subprocess.Popen[str], *lines: str) -> None:
    """On its stdin."""
    assert process.stdin is not None
    process.stdin.write("".join(f"{line}\n" for line in lines))
    process.stdin.flush()


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {"serve": serve, "send": send}
    commands[sys.argv[1]](*sys.argv[2:])
