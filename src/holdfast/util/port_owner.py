"""Which process of this machine listens at a port: for the sentence about a port that another program has."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

LISTENING = "0A"
"""The state of a socket in /proc/net/tcp that takes connections."""
COMMAND_CHARS_MAX = 80


def port_owner(port: int) -> tuple[int, list[str]] | None:
    """Return the id and the command line of the process that listens at a TCP port; None if there is none, or it is
    another user's, whose processes the system does not show."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    if not sockets:
        return None
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if any(_target(link) in sockets for link in (process / "fd").iterdir()):
                words = (process / "cmdline").read_bytes().split(b"\0")
                return int(process.name), [os.fsdecode(word) for word in words if word]
    return None


def foreign_listener(port: int) -> str:
    """Return which program has the port, in words; empty if that is a master of Holdfast, or not known."""
    if (owner := port_owner(port)) is None:
        return ""
    pid, command = owner
    if "master" in command and any("holdfast" in word for word in command):
        return ""
    return f"port {port} is in use by process {pid} ({' '.join(command)[:COMMAND_CHARS_MAX]})"


def _listening(port: int) -> set[str]:
    """Return the numbers of the sockets that listen at the port."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):  # a kernel without IPv6 has only the first
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(fields[9])
    return found


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # it was closed meanwhile
        return ""
