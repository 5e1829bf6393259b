"""Another user of the machine. Only root can be one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

STRANGER = 65_534


def as_stranger(action: Callable[[], object]) -> bool:
    """Do something as another user; return whether it was possible."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            os.umask(0)
            os.setgroups([])
            os.setresgid(STRANGER, STRANGER, STRANGER)
            os.setresuid(STRANGER, STRANGER, STRANGER)
            action()
            code = 0
        except OSError:
            pass
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def world_writable(directory: Path) -> Path:
    """Create a directory in which every user may create files and remove their own, and which all can reach."""
    for above in directory.parents:
        if above.stat().st_mode & 0o011 != 0o011:
            above.chmod(above.stat().st_mode | 0o011)
    directory.mkdir()
    directory.chmod(0o1777)
    return directory
