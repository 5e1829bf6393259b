"""Many threads that all at once are the first to read a note and the head of a part, as in a process that publishes;
again and again, each time in a new process. Exits with the number of those that died of it.

msgspec looks at a type when it is first used, which is not safe in several threads.
"""

import os
import sys
import threading

from holdfast.storage.image import parse, plan
from holdfast.storage.manifest import CheckpointInfo, ManifestNote, PartInfo, decode, encode

THREADS, TIMES = 16, 40
part = PartInfo(number=0, file="f", size_bytes=0, checksums="")
note = encode(ManifestNote(about=CheckpointInfo(step=1, world_size=1), nonce="n", part=part))
layout = plan([], 64, {})
image = bytearray(layout.size_bytes)
with memoryview(image) as buffer:
    layout.frame(buffer)
    layout.put_skeleton(buffer, b"")


def read_all() -> int:
    together, read = threading.Barrier(THREADS), []

    def work() -> None:
        together.wait()
        read.append(
            (decode(note, ManifestNote, "note"), parse(lambda at, size: bytes(image[at : at + size]), len(image)))
        )

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(read) - THREADS


def die() -> None:
    os._exit(read_all())


sys.setswitchinterval(1e-6)
dead = 0
for _ in range(TIMES):
    if not (child := os.fork()):
        die()
    dead += os.waitpid(child, 0)[1] != 0
sys.exit(dead)
