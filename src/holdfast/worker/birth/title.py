"""What `ps` and `pgrep -f` show of this process.

Every worker is a fork of one server and would carry its command line. People look for their script's name, so the
memory that the kernel shows as the command line is written anew. It cannot grow: the agent pads the server's own with
blanks (`--title-room`), and what does not fit is cut.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

# Positions in /proc/self/stat, counted after the process name, which may itself contain blanks.
_ARG_START, _ARG_END = 45, 46


def set_title(arguments: Sequence[bytes]) -> None:
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    if len(fields) <= _ARG_END:
        return  # a kernel or sandbox that does not tell: the title is a courtesy
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    room = end - start
    if start and room > 1:
        ctypes.memmove(start, b"\0".join(arguments)[: room - 1].ljust(room, b"\0"), room)
