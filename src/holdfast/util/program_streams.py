"""The output of a child process, written to this program's `sys.stdout` and `sys.stderr` where those are not its
descriptors 1 and 2: a notebook's, or what `contextlib.redirect_stdout` put there. A child inherits descriptors only.
"""

from __future__ import annotations

import codecs
import os
import sys
import threading
from collections.abc import Iterable
from typing import Any

READ_BYTES = 65_536
COPY_DEADLINE_S = 5.0
"""For what is left to copy once the child has ended: a process that the child has left behind may hold its streams."""


def is_elsewhere(stream: Any, number: int) -> bool:
    """Whether a stream of this program is not the process's descriptor of that number."""
    if stream is None:
        return False
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return True
    return bool(descriptor != number)


class ProgramStreams:
    """Pipes for a child's stdout and stderr (of those, the ones in `numbers`: 1 and 2), and the threads that copy."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self.for_child: dict[int, int] = {}
        self._ours: list[tuple[int, Any]] = []
        self._copies: list[threading.Thread] = []
        streams = {1: sys.stdout, 2: sys.stderr}
        for number in numbers:
            if is_elsewhere(streams[number], number):
                ours, self.for_child[number] = os.pipe()
                self._ours.append((ours, streams[number]))

    def begin(self) -> None:
        """Close the child's ends, once the child has them or could not be started, and copy. Threads start here and
        not earlier, because the child may be a fork."""
        while self.for_child:
            os.close(self.for_child.popitem()[1])
        while self._ours:
            copy = threading.Thread(target=_copy, args=self._ours.pop(), name="child-output", daemon=True)
            copy.start()
            self._copies.append(copy)

    def finish(self) -> None:
        """Wait until all is written that the child wrote, after the child's end."""
        self.begin()
        for copy in self._copies:
            copy.join(COPY_DEADLINE_S)


def _copy(descriptor: int, stream: Any) -> None:
    """Write to the stream what comes, until the end; a stream that takes nothing any more does not stop the child."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    is_open = True
    with os.fdopen(descriptor, "rb", buffering=0) as pipe:
        while data := pipe.read(READ_BYTES):
            is_open = is_open and _write(stream, decoder.decode(data))
    if is_open:
        _write(stream, decoder.decode(b"", final=True))


def _write(stream: Any, text: str) -> bool:
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):
        return False
    return True
