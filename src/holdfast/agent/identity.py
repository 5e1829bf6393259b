"""Who this agent is, and whether another life of it still is."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

from holdfast.core.orders import Refuse


def new_incarnation() -> str:
    """A name for one life of an agent."""
    return secrets.token_hex(8)


def boot_id() -> str:
    """Changes with every boot of the machine."""
    return _read("/proc/sys/kernel/random/boot_id")


def machine_id() -> str:
    """Stays the same over boots; with the host name, as cloned images share the number."""
    return f"{socket.gethostname()}/{_read('/etc/machine-id')}"


def saw_dead(refusal: Refuse) -> bool:
    """Whether the process that holds our id ran on this machine, in this boot, and is gone."""
    here = refusal.holder_machine_id == machine_id() and refusal.holder_boot_id == boot_id()
    return here and refusal.holder_pid > 0 and not _exists(refusal.holder_pid)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    stat = _read(f"/proc/{pid}/stat")
    return stat.rpartition(")")[2].split()[:1] == ["Z"]


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
