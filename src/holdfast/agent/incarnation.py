"""The identity of one incarnation of an agent, and of its machine."""

from __future__ import annotations

import os
import secrets

from holdfast.core.orders import Refuse
from holdfast.util.processes import boot_id, machine_id, process_state


def new_incarnation() -> str:
    """Return a name for one incarnation of an agent."""
    return secrets.token_hex(8)


def is_holder_dead(refusal: Refuse) -> bool:
    """Return whether the process that has our node id ran on this machine, in this boot, and has ended."""
    here = refusal.holder_machine_id == machine_id() and refusal.holder_boot_id == boot_id()
    return here and refusal.holder_pid > 0 and not _exists(refusal.holder_pid)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return process_state(pid) != "Z"
